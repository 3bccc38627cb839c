"""Fork children that run one function and exit."""

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
    """Where children report why they failed: a pipe until it is closed, then standard error."""

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
    """Fork a child that runs `main` and exits with the status it returns; return its process id.

    Forking is safe while no other thread of the caller holds a lock that `main` needs. Python and the C library reset
    their own locks. torch's OpenMP pool does not survive, so children must compute on one thread.

    A child never collects its parent's garbage: a process group in a reference cycle would join threads that exist only
    in the parent, and hang.
    """
    _flush()  # or every child would write the buffered output again
    collects = gc.isenabled()
    gc.disable()  # until gc.freeze(): libraries run code in a new child, which could start a collection
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
    except BaseException:  # noqa: BLE001 - the child must end here in any case
        complaints.say(traceback.format_exc())
    finally:
        _flush()
        os._exit(status if 0 <= status < 256 else 1)


def describe_exit(code: int) -> str:
    """Describe an exit code, which is negative for signals as in `subprocess`."""
    if code >= 0:
        return f"exited with {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, missing, or without a reader
            stream.flush()
