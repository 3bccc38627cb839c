"""Quantities as people write them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from syncline.errors import UsageError


def size_text(nbytes: float) -> str:
    """To three digits, in decimal units: `1.5 MB`."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= 0.9995 * scale:  # what rounds to 1,000 of the smaller unit is 1 of this one
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes:.0f} B"


def ranks_text(ranks: Sequence[int], most: int | None = None) -> str:
    """`rank 1`, `ranks 0, 2`; of more than `most`, how many more."""
    named = ", ".join(map(str, ranks[:most]))
    left = 0 if most is None else max(0, len(ranks) - most)
    return f"rank{'s' if len(ranks) > 1 else ''} {named}" + (f" and {left} more" if left else "")


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(size: object) -> int:
    """`"8GiB"`, `"500MB"`, or a number of bytes."""
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    found = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if found is None or found[2].upper() not in _UNITS or not float(found[1]):
        raise UsageError(f"{size!r} is not a size of memory: write it like 8GiB or 500MB")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def format_bytes(size: float) -> str:
    """In GiB or MiB, to three figures."""
    value, unit = (size / 2**30, "GiB") if size >= 2**30 else (size / 2**20, "MiB")
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
