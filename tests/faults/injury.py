"""Real faults, which the victim inflicts on itself at one point of its program or at a random moment after it.

The journal records when a fault struck.
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
    """An error in users' code."""


@dataclass
class Injury:
    """The fault of this rank, with its step and place."""

    fault: str
    place: str
    """Where the fault strikes. `timed`: a random time after the step has begun."""
    step: int
    journal: Journal
    delay_s: float = 0.0
    """The delay of a `timed` fault."""
    stop_s: float = 0.0
    """How long the rank is stopped."""
    rate_bps: int = 0
    """The rate of a slow link."""
    armed: bool = True
    _waker: int = -1

    def at(self, place: str, step: int) -> None:
        """Strike if the program has reached the place of the fault."""
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
        """Start a process that continues this one after a stop. Call it before there are threads."""
        if self.fault in ("stop", "pause"):
            self._waker = start_waker(self.stop_s, self.journal)

    def _stop(self) -> None:
        os.write(self._waker, b"!")
        os.kill(os.getpid(), signal.SIGSTOP)

    def _slow(self) -> None:
        from syncline.cluster import links

        links.reshape(self.rate_bps)


def start_waker(stop_s: float, journal: Journal) -> int:
    """Return a pipe. This process is continued `stop_s` after a byte was written to it."""
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
    """Allocate more memory than this process may have, so that torch raises. The limit stays."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + (256 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))
    torch.empty(1 << 32, dtype=torch.uint8)
    raise AssertionError("4 GiB were allocated with a limit of 256 MiB")


_FAULTS: dict[str, Callable[[Injury], None]] = {
    "kill": _die,
    "stop": Injury._stop,
    "pause": Injury._stop,
    "cut": _cut,
    "slow": Injury._slow,
    "oom": starve,
    "raise": _raise,
    "linger": _raise,
    "nan": lambda injury: None,  # the loss is multiplied: see `stories`
    "inf": lambda injury: None,
    "caught": _raise,
}


def moment_of(name: str, seed: int, span_s: float) -> float:
    """Return the delay of a timed fault: the same for the same cell and seed."""
    return random.Random(f"{name}/{seed}").uniform(0.0, span_s)


# --- full disks -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def small_files(most_bytes: int) -> Iterator[None]:
    """Limit the size of files that this process writes: EFBIG, as on a disk with a quota."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def mount_small_disk(folder: Path, most_bytes: int) -> None:
    """Mount a disk of this size, which only the processes of this emulated cluster see: ENOSPC when it is full."""
    folder.mkdir(parents=True, exist_ok=True)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, f"size={most_bytes}".encode()) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount {folder}: {os.strerror(number)}")


def fill(folder: Path, leave_bytes: int) -> None:
    """Fill a disk until `leave_bytes` are free."""
    disk = os.statvfs(folder)
    size = disk.f_bavail * disk.f_frsize - leave_bytes
    (folder / "filler").write_bytes(b"\0" * max(0, size))
