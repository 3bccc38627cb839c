"""What a rank leaves behind when an exchange or a meeting fails: one small file, for whoever asks why next morning.

Names, sizes and times, and nothing of what was exchanged. It goes to the folder `syncline-failure`, or to the one that
`SYNCLINE_FAILURES` names; set to nothing, it is not written.
"""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch

from syncline._version import __version__
from syncline.dist import torchrun
from syncline.errors import first_line
from syncline.files import read_json, write_json
from syncline.health.heartbeat import Vigil, vigil
from syncline.health.suspects import Suspect

FOLDER_VARIABLE = "SYNCLINE_FAILURES"
FOLDER = "syncline-failure"
_MOST_RANKS = 1_000_000


class Event(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Something that happened to an exchange, so many seconds before it failed."""

    before_s: float
    what: str
    """`ready`, `start`, `end`, `failed`, or a collective that was issued, as `all_reduce`."""
    lane: int
    step: int
    bucket: int
    level: str = ""
    sent_bytes: int = 0


class Pending(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A bucket that was on its way."""

    lane: int
    step: int
    bucket: int
    bytes: int
    exchange: str
    age_s: float
    """Since it was ready."""


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one rank knew when something had failed that takes all of them."""

    schema: int = 2
    rank: int
    world_size: int
    host: str = msgspec.field(default_factory=socket.gethostname)
    process: int = msgspec.field(default_factory=os.getpid)
    date: str = msgspec.field(default_factory=lambda: _now())
    syncline: str = __version__
    torch: str = str(torch.__version__)
    backend: str
    timeout_s: float
    run: str = msgspec.field(default_factory=torchrun.run_id)
    attempt: str = msgspec.field(default_factory=torchrun.attempt)
    """torchrun's, of the job and of its restarts."""
    job: str = ""
    """The same for all ranks that have started together, and for no others; nothing, where they could not agree."""
    where: str
    """What it was in: `step 6`, or a call that all ranks must make, like `save`."""
    step: int | None
    """None, where ranks met for something else."""
    error: str
    suspects: tuple[Suspect, ...]
    pending: tuple[Pending, ...]
    events: tuple[Event, ...]
    """The last ones, in the order in which they happened."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size <= _MOST_RANKS:
            raise ValueError(f"rank: is {self.rank} of {self.world_size}: no rank has left it")
        if not self.timeout_s >= 0:
            raise ValueError(f"timeout_s: is {self.timeout_s}; it must not be negative")
        self.moment()

    def moment(self) -> datetime.datetime:
        try:
            moment = datetime.datetime.fromisoformat(self.date)
        except ValueError:
            raise ValueError("date: is not a date in ISO 8601") from None
        return moment if moment.tzinfo is not None else moment.replace(tzinfo=datetime.timezone.utc)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Failure:
        return read_json(path, cls)


def told(
    error: str,
    note_of: Callable[[Sequence[Suspect], str], Failure],
    find: Callable[[Vigil], Sequence[Suspect]],
    *,
    own: bool,
) -> tuple[Sequence[Suspect], str]:
    """Tells the other ranks, leaves a note, and finds out because of whom it is, unless it is this rank's `own` doing.
    Takes seconds. `note_of` suspects, and the job's name. → the suspects, and where the note is."""
    with vigil() as found:
        job = "" if found is None else found.job
        if found is not None:
            found.say(error, own=own)
        left = leave(lambda: note_of([], job))  # now: a launcher may end this process before more is known
        suspects = [] if found is None or own else find(found)
    return suspects, leave(lambda: note_of(suspects, job)) if suspects else left


def chosen_folder() -> Path | None:
    """Where notes are left; None, where none are to be."""
    folder = os.environ.get(FOLDER_VARIABLE, FOLDER)
    return Path(folder) if folder else None


def leave(found: Callable[[], Failure]) -> str:
    """Writes what is found → where it is, or why it is nowhere, to be appended to the error, which must be
    told whatever else is broken by now."""
    if (folder := chosen_folder()) is None:
        return ""
    try:
        failure = found()
        path = folder / f"rank-{failure.rank}.json"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json(path, failure)
    except Exception as problem:  # noqa: BLE001
        return f"; this rank's note could not be written: {first_line(problem)}"
    return f"; this rank's note is in {path.absolute()}"


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")
