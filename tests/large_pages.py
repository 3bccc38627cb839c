"""This process's memory in large pages, of which a fork copies one entry where there were five hundred."""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path

_LARGE_PAGE_BYTES = 1 << 21
_MADV_COLLAPSE = 25
_PRIVATE_AND_NAMELESS = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0 *(\[heap\])?$", re.MULTILINE)


def gather() -> None:
    """Moves what is there now into large pages, where the kernel can (Linux 6.1); elsewhere everything stays."""
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise
    for found in _PRIVATE_AND_NAMELESS.finditer(Path("/proc/self/maps").read_text()):
        start, end = (int(found[place], 16) for place in (1, 2))
        if end - start >= 2 * _LARGE_PAGE_BYTES:
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_COLLAPSE)
