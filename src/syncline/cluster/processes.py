"""Forked children that live their whole life in one function."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable

from syncline.errors import SynclineError


class Complaints:
    """Where children say why they failed: the pipe given here until it is closed, then the terminal."""

    def __init__(self, pipe: int) -> None:
        self._pipe: int | None = pipe

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            if self._pipe is None:
                sys.stderr.write(f"{text}\n")
            else:
                os.write(self._pipe, text.encode())

    def close(self) -> None:
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None


def fork(main: Callable[[], int], complaints: Complaints) -> int:
    """Starts a child that runs `main`, ends with the status it returns, and never comes back into its parent's code.

    Forking is safe while the caller's other threads hold no lock that `main` needs. Locks of Python and of the C
    library are reset by them; torch's OpenMP pool does not survive, so children compute on one thread.

    What the parent left behind is never collected in a child: a process group that waits in a cycle of garbage would
    join threads that only the parent has, and hang.
    """
    _flush()  # what is still buffered would be written once by each process that inherits the buffer
    collects = gc.isenabled()
    gc.disable()  # or the child could collect before it has frozen anything: libraries run code of theirs in a new fork
    pid = -1
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
            pid = os.fork()
    finally:
        if pid == 0:
            gc.freeze()
        if collects:
            gc.enable()
    if pid:
        return pid
    status = 1
    try:
        status = main()
    except (OSError, SynclineError) as error:
        complaints.say(getattr(error, "strerror", None) or str(error))
    except BaseException:  # noqa: BLE001 - whatever it was, this process must end here
        complaints.say(traceback.format_exc())
    finally:
        _flush()
        os._exit(status if 0 <= status < 256 else 1)


def describe_exit(code: int) -> str:
    """How a process ended, from its exit code as `subprocess` counts: negative for signals."""
    if code >= 0:
        return f"exited with {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, missing, or its reader is gone
            stream.flush()
