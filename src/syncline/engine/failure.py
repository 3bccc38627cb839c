"""What a rank leaves behind when an exchange fails: one small file, for whoever asks next morning what it was.

Names, sizes and times, and nothing of what was exchanged. It goes to the folder `syncline-failure`, or to the one that
`SYNCLINE_FAILURES` names; set to nothing, it is not written.
"""

from __future__ import annotations

import datetime
import os
import socket
from pathlib import Path

import msgspec
import torch

from syncline import torchrun
from syncline._version import __version__
from syncline.engine.signs import Suspect
from syncline.errors import SynclineError, first_line
from syncline.files import read_json, write_json

FOLDER_VARIABLE = "SYNCLINE_FAILURES"
FOLDER = "syncline-failure"


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
    """What one rank knew when an exchange had failed."""

    schema: int = 1
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
    step: int
    error: str
    suspects: tuple[Suspect, ...]
    pending: tuple[Pending, ...]
    events: tuple[Event, ...]
    """The last ones, in the order in which they happened."""

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Failure:
        return read_json(path, cls)


def leave(failure: Failure) -> str:
    """Writes it → where it is, or why it is nowhere, to be appended to the error."""
    folder = os.environ.get(FOLDER_VARIABLE, FOLDER)
    if not folder:
        return ""
    path = Path(folder) / f"rank-{failure.rank}.json"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json(path, failure)
    except (OSError, SynclineError) as problem:
        return f"; this rank's last events could not be written: {first_line(problem)}"
    return f"; this rank's last events are in {path.absolute()}"


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")
