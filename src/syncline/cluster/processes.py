"""Fork children, create namespaces, request a signal when the parent ends, and adopt orphans, on Linux."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from syncline.errors import SynclineError

HOST_NAMESPACES = 0x40000000 | 0x04000000  # CLONE_NEWNET, CLONE_NEWUTS
CLUSTER_NAMESPACES = HOST_NAMESPACES | 0x20000000 | 0x00020000  # and CLONE_NEWPID, CLONE_NEWNS
_CLONE_NEWUSER = 0x10000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Move the calling process into new namespaces; without privilege, also into a new user namespace.

    The uid and gid stay the same, so commands run as the user who started them.
    """
    try:
        _checked(_libc.unshare(ctypes.c_int(flags)), "unshare")
    except PermissionError:
        uid, gid = os.getuid(), os.getgid()
        _checked(_libc.unshare(ctypes.c_int(flags | _CLONE_NEWUSER)), "unshare")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def enter_network(namespace: Path) -> None:
    """Move only the calling thread into the network namespace of another process, such as /proc/1/ns/net."""
    with namespace.open("rb") as file:
        _checked(_libc.setns(file.fileno(), 0), f"setns {namespace}")


def die_with_parent(parent_pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to signal this process when the thread that forked it ends.

    The kernel forgets this when a process changes its user: call it again after that.
    """
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() not in (parent_pid, 0):  # 0: the parent is outside this PID namespace
        os._exit(1)  # the parent ended before the call above


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parents end, including daemons."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        _checked(_libc.prctl(option, value, 0, 0, 0), "prctl")


def mount(source: str, target: str, kind: str | None = None, flags: int = 0) -> None:
    result = _libc.mount(source.encode(), target.encode(), kind and kind.encode(), ctypes.c_ulong(flags), None)
    _checked(result, f"mount {target}")


def fork(main: Callable[[], int], report: Callable[[str], object] = lambda text: sys.stderr.write(f"{text}\n")) -> int:
    """Fork a child that runs `main`, exits with the status it returns and reports errors; return its process id.

    Forking is safe while no other thread of the caller holds a lock that `main` needs. Python and the C library reset
    their own locks. torch's OpenMP pool does not survive, so children must compute on one thread. A child never
    collects its parent's garbage: a process group in it would join threads that exist only in the parent, and hang.
    """
    _flush()  # or every child would write the buffered output again
    collects = gc.isenabled()
    gc.disable()  # until gc.freeze(): libraries run code in a new child, which could start a collection
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
            if (pid := os.fork()) == 0:
                gc.freeze()
    finally:
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


def ended_children(pids: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Wait for children, and yield the process id and exit code of each. Also reap orphans that are inherited."""
    left = set(pids)
    while left:
        pid, status = os.wait()
        if pid in left:
            left.remove(pid)
            yield pid, os.waitstatus_to_exitcode(status)


def describe_exit(code: int) -> str:
    """Describe an exit code, which is negative for signals as in `subprocess`."""
    names = {number.value: number.name for number in signal.Signals}
    return f"exited with {code}" if code >= 0 else f"was killed by {names.get(-code, f'signal {-code}')}"


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, missing, or without a reader
            stream.flush()
