"""Linux system calls that Python 3.10 lacks: namespaces, a signal when the parent ends, adopting orphans."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    _checked(_libc.unshare(ctypes.c_int(flags)), "unshare")


def unshare_as_user(flags: int) -> None:
    """Move the calling process into new namespaces; without privilege, also into a new user namespace.

    The uid and gid stay the same, so commands run as the user who started them.
    """
    try:
        unshare(flags)
    except PermissionError:
        uid, gid = os.getuid(), os.getgid()
        unshare(flags | CLONE_NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def enter(namespace: Path, kind: int) -> None:
    """Move only the calling thread into a namespace of another process, such as /proc/1/ns/net."""
    descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _checked(_libc.setns(descriptor, ctypes.c_int(kind)), f"setns {namespace}")
    finally:
        os.close(descriptor)


def die_with_parent(parent_pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to signal this process when the thread that forked it ends.

    The kernel forgets this when a process changes its user: call it again after that.
    """
    if sys.platform != "linux":
        return
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0), "prctl")
    if os.getppid() not in (parent_pid, 0):  # 0: the parent is outside this PID namespace
        os._exit(1)  # the parent ended before the call above


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parents end, including daemons."""
    if sys.platform == "linux":
        _checked(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")


def mount(source: str, target: str, kind: str | None = None, flags: int = 0) -> None:
    result = _libc.mount(source.encode(), target.encode(), kind and kind.encode(), ctypes.c_ulong(flags), None)
    _checked(result, f"mount {target}")
