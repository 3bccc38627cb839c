"""Ctrl-C while modules are imported, which takes seconds: the process ends at once, with status 130 and without a word.

Nothing is under way then that would have to be cleaned up. A KeyboardInterrupt would show a traceback through modules
that nobody knows, or be swallowed by one of them.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

INTERRUPTED = 130


def begin() -> None:
    """Call first, in the main thread. A handler other than Python's own, and an ignored Ctrl-C, stay as they are."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def end() -> None:
    """From here on, Ctrl-C raises KeyboardInterrupt as usual. Does nothing without `begin`."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(_signal: int, _frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)
