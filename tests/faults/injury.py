"""The faults, done for real by the process that they are done to.

A fault strikes at one place of the victim's program, or at a random moment after one: signals and timers do not wait
for a convenient one. The journal knows when.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from faults.journal import Journal


class UserError(LookupError):
    """What the user's own code raises."""


@dataclass
class Injury:
    """What is done to this rank, at which step and place; nothing, on a rank that is not the victim."""

    fault: str
    place: str
    """Where it strikes. `timed`: a random while after the step has begun."""
    step: int
    journal: Journal
    delay_s: float = 0.0
    """Of `timed`."""
    stop_s: float = 0.0
    """For how long it is stopped."""
    rate_bps: int = 0
    """What a slow link is reshaped to."""
    armed: bool = True
    _waker: int = -1

    def at(self, place: str, step: int) -> None:
        """The program has come to a place."""
        if not self.armed or step != self.step:
            return
        if place == self.place:
            self.strike()
        elif place == "before" and self.place == "timed":
            self.armed = False
            timer = threading.Timer(self.delay_s, self._strike)
            timer.daemon = True
            timer.start()

    def strike(self) -> None:
        self.armed = False
        self._strike()

    def _strike(self) -> None:
        self.journal.note("fault", fault=self.fault, place=self.place, step=self.step)
        _FAULTS[self.fault](self)

    def prepare(self) -> None:
        """Before there are threads: a process that wakes this one when it has been stopped for long enough."""
        if self.fault in ("stop", "pause"):
            self._waker = start_waker(self.stop_s, self.journal)

    def _stop(self) -> None:
        os.write(self._waker, b"!")
        os.kill(os.getpid(), signal.SIGSTOP)

    def _slow(self) -> None:
        from syncline.cluster import links

        links.reshape(self.rate_bps)


def start_waker(stop_s: float, journal: Journal) -> int:
    """→ a pipe: `stop_s` after something was written to it, this process is continued."""
    read_end, write_end = os.pipe()
    victim = os.getpid()
    if os.fork() == 0:
        try:
            os.close(write_end)
            if os.read(read_end, 1):
                time.sleep(stop_s)
                journal.note("resumed")
                os.kill(victim, signal.SIGCONT)
        finally:
            os._exit(0)
    os.close(read_end)
    return write_end


def _die(injury: Injury) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _cut(injury: Injury) -> None:
    from syncline.cluster import links

    links.cut()


def _raise(injury: Injury) -> None:
    raise UserError("the user's own mistake")


def starve(injury: Injury | None = None) -> None:
    """Asks for memory that this process may not have: the kernel refuses, and torch raises. The limit stays."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + (256 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))
    torch.empty(1 << 32, dtype=torch.uint8)
    raise AssertionError("4 GiB were given where 256 MiB are left")


_FAULTS: dict[str, Callable[[Injury], None]] = {
    "kill": _die,
    "stop": Injury._stop,
    "pause": Injury._stop,
    "cut": _cut,
    "slow": Injury._slow,
    "oom": starve,
    "raise": _raise,
    "linger": _raise,
    "nan": lambda injury: None,  # what comes in is: see `stories`
    "inf": lambda injury: None,
    "caught": _raise,
}


def moment_of(name: str, seed: int, span_s: float) -> float:
    """When a timed fault strikes: the same for the same cell and seed."""
    return random.Random(f"{name}/{seed}").uniform(0.0, span_s)


# --- full disks -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def small_files(most_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond: EFBIG, as on a disk with a quota."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def mount_small_disk(folder: Path, most_bytes: int) -> None:
    """A disk of so many bytes, seen by the processes of this emulated cluster alone, and gone with them: ENOSPC."""
    folder.mkdir(parents=True, exist_ok=True)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, f"size={most_bytes}".encode()) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount {folder}: {os.strerror(number)}")


def fill(folder: Path, leave_bytes: int) -> None:
    """Until so many bytes are left."""
    disk = os.statvfs(folder)
    size = disk.f_bavail * disk.f_frsize - leave_bytes
    (folder / "filler").write_bytes(b"\0" * max(0, size))
