"""Failure reports: the small JSON file that each rank writes when an exchange, or a call that all ranks make, fails.

A report contains names, sizes and times, and no gradients. It is written to the folder `syncline-failure`, or to the
one that `SYNCLINE_FAILURES` names. If this variable is set but empty, no report is written.
"""

from __future__ import annotations

import datetime
import enum
import os
import socket
from pathlib import Path

import msgspec
import torch

from syncline._version import __version__
from syncline.files import JsonFile
from syncline.records.fields import Seconds

FOLDER_VARIABLE = "SYNCLINE_FAILURES"
FOLDER = "syncline-failure"
_MOST_RANKS = 1_000_000


class Kind(enum.Enum):
    """The reason why a rank is suspected."""

    FAILED = "failed"  # an error of its own
    ENDED = "ended"  # its program ended, with or without an exception
    VICTIM = "victim"  # it failed in a collective too
    SILENT = "silent"
    UNSEEN = "unseen"  # it has never sent a heartbeat
    ELSEWHERE = "elsewhere"  # it is alive, but has not reached the collective
    DETACHED = "detached"
    INSIDE = "inside"  # it is inside an exchange, but not in a collective
    STORE_GONE = "store-gone"  # it served the store, or its launcher did, and the store has ended
    STORE_MUTE = "store-mute"  # the store does not answer, or the link of this rank is down


class Suspect(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank that may have caused a failure."""

    rank: int
    kind: Kind
    why: str

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.why})"


class Event(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Something that happened in an exchange before the failure."""

    before_s: Seconds  # time between the event and the failure
    what: str
    """`ready`, `start`, `end`, `failed`, or the name of a collective that was started, such as `all_reduce`."""
    lane: int
    step: int
    bucket: int
    level: str = ""
    sent_bytes: int = 0


class Pending(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A bucket whose exchange had not finished."""

    lane: int
    step: int
    bucket: int
    bytes: int
    exchange: str
    age_s: float  # time since the bucket was ready


class FailureReport(JsonFile, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The knowledge of one rank about a failure."""

    schema: int = 2
    rank: int
    world_size: int
    host: str = msgspec.field(default_factory=socket.gethostname)
    process: int = msgspec.field(default_factory=os.getpid)
    date: str = msgspec.field(
        default_factory=lambda: datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")
    )
    syncline: str = __version__
    torch: str = str(torch.__version__)
    backend: str
    timeout_s: float
    run: str = ""
    attempt: str = "0"
    """torchrun's ids of the job (`run`) and of this start of it (`attempt`)."""
    job: str = ""  # a name that all ranks of one start share; empty if they could not agree on one
    where: str
    """`step 6`, or a call that all ranks make, such as `save`."""
    step: int | None = None  # None for a call outside training steps
    error: str
    suspects: tuple[Suspect, ...] = ()
    pending: tuple[Pending, ...] = ()
    events: tuple[Event, ...] = ()  # the last events, oldest first

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size <= _MOST_RANKS:
            raise ValueError(f"rank: is {self.rank} of {self.world_size}: there is no such rank")
        if not self.timeout_s >= 0:
            raise ValueError(f"timeout_s: is {self.timeout_s}; it must not be negative")
        self.moment()

    def moment(self) -> datetime.datetime:
        try:
            moment = datetime.datetime.fromisoformat(self.date)
            utc = datetime.timezone.utc
            return moment.replace(tzinfo=utc) if moment.tzinfo is None else moment.astimezone(utc)
        except (ValueError, OverflowError):
            raise ValueError("date: is not a date in ISO 8601") from None


def chosen_folder() -> Path | None:
    """Return the folder of failure reports; None if none are to be written."""
    folder = os.environ.get(FOLDER_VARIABLE, FOLDER)
    return Path(folder) if folder else None
