"""Make Ctrl-C during imports end the process at once, with status 130 and no output.

Imports take seconds, and there is nothing to clean up yet. A KeyboardInterrupt would show a traceback through other
packages' modules, or one of them would swallow it.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

INTERRUPTED = 130


def begin() -> None:
    """Install the handler; call it first, in the main thread. It replaces no handler other than Python's own."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def end() -> None:
    """Make Ctrl-C raise KeyboardInterrupt again. Does nothing without `begin`."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(_signal: int, _frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)
