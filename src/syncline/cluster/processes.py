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
from typing import TypeVar

from syncline.errors import SynclineError

T = TypeVar("T")


def report_to_stderr(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def fork(main: Callable[[], int], report: Callable[[str], None] = report_to_stderr) -> int:
    """Fork a child that runs `main` and exits with the status it returns; return its process id.

    If `main` raises, the child reports the error with `report`.

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
    except BaseException as error:  # noqa: BLE001 - the child must end here in any case
        expected = isinstance(error, OSError | SynclineError)
        with contextlib.suppress(OSError):
            report((getattr(error, "strerror", None) or str(error)) if expected else traceback.format_exc())
    finally:
        _flush()
        os._exit(status if 0 <= status < 256 else 1)


def reap(children: dict[int, T], ended: Callable[[T, int], None] = lambda *_: None) -> int:
    """Wait for children and orphans; call `ended` with a child's value and exit code; return the first failure's code.

    The first process of a PID namespace inherits all orphans.
    """
    failed = 0
    while children:
        pid, status = os.wait()
        if pid in children:
            code = os.waitstatus_to_exitcode(status)
            failed = failed or code
            ended(children.pop(pid), code)
    return failed


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
