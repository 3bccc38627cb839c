"""What the notes of a job that failed say together: whom they suspect, and who has left none."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from syncline.engine.failure import FOLDER, FOLDER_VARIABLE, Failure
from syncline.errors import UsageError
from syncline.files import FileError

_APART_S = 300.0
"""Beyond the timeout, what may lie between the notes of one failure: hosts' clocks differ."""

_MOST_RANKS = 1_000_000

_WHAT_TO_DO = {
    "no sign of life": "its process ended or stands still, or its host or link is gone: see its output and its host",
    "it has left no sign here": "it had not come so far: see its output, and whether its host reaches the others",
    "alive, and has nothing attached": "it runs another program, or has detached its model: see its output",
    "alive, and has been inside": "its exchange hangs in code of its own: see its output",
    "alive, ": "it did something else meanwhile: fewer batches, a checkpoint, an exception that was caught",
    "the job's store": "whoever serves the store has ended, rank 0 or the launcher on its host: see its output",
    "or this rank's own link": "see whether its host, and the link of those who say so, are up",
}
"""By how the reason begins for which a rank is suspected; others are errors of its own."""
_STORE = "the job's store"
_VICTIM = "it failed too"


class Accused(msgspec.Struct, frozen=True, kw_only=True):
    """A rank, and who suspects it."""

    rank: int
    by: tuple[int, ...]
    why: str
    """In the words of the first of them."""
    left_note: bool

    @property
    def what_to_do(self) -> str:
        return next((told for words, told in _WHAT_TO_DO.items() if self.why.startswith(words)), "see its output")


class Postmortem(msgspec.Struct, frozen=True, kw_only=True):
    schema: int = 1
    notes: tuple[Failure, ...]
    """By rank, those of the last failure."""
    earlier: tuple[int, ...]
    """Ranks whose note is of another one."""
    missing: tuple[int, ...]
    """Ranks without a note of the last failure."""
    accused: tuple[Accused, ...]
    """Those that most others suspect first."""
    damaged: tuple[str, ...] = ()
    """Files that cannot be used, and why."""

    @property
    def last(self) -> Failure:
        return max(self.notes, key=_moment)


def examine_notes(folder: str | os.PathLike[str] | None = None) -> Postmortem:
    """Of the folder that failures are left in, where no other is named. Hosts have a folder each, unless they share it:
    notes are to be brought together first."""
    found: dict[int, Failure] = {}
    damaged: list[FileError] = []
    for path in _paths(_default() if folder is None else Path(folder)):
        try:
            note = Failure.load(path)
            if not 0 <= note.rank < note.world_size <= _MOST_RANKS:
                raise FileError(f"{path}: rank: is {note.rank} of {note.world_size}: no rank has left it")
            if note.rank in found:
                raise FileError(f"{path}: is a second note of rank {note.rank}: give each job a folder of its own")
            _moment(note)
            found[note.rank] = note
        except FileError as error:
            damaged.append(error)
        except ValueError:
            damaged.append(FileError(f"{path}: date: is not a date in ISO 8601"))
    if not found:
        raise damaged[0]
    last = max(found.values(), key=_moment)
    notes = [found[rank] for rank in sorted(found) if _together(found[rank], last)]
    there = {note.rank for note in notes}
    return Postmortem(
        notes=tuple(notes),
        earlier=tuple(sorted(found.keys() - there)),
        missing=tuple(rank for rank in range(last.world_size) if rank not in there),
        accused=_accused(notes),
        damaged=tuple(map(str, damaged)),
    )


def _default() -> Path:
    folder = os.environ.get(FOLDER_VARIABLE, FOLDER)
    if not folder:
        raise UsageError(f"{FOLDER_VARIABLE} is set to nothing: ranks leave no notes; name a folder that has some")
    return Path(folder)


def _paths(folder: Path) -> list[Path]:
    try:
        if not folder.is_dir():
            raise UsageError(f"{folder} is not a folder: name the one in which ranks have left their rank-N.json")
        paths = sorted(path for path in folder.iterdir() if path.match("rank-*.json") and path.is_file())
    except OSError as error:
        raise FileError(f"{folder}: cannot be read: {error.strerror or error}") from error
    if not paths:
        raise UsageError(f"{folder} has no rank-N.json: each rank leaves its own, on its own host")
    return paths


def _moment(note: Failure) -> datetime.datetime:
    moment = datetime.datetime.fromisoformat(note.date)
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=datetime.timezone.utc)


def _together(note: Failure, last: Failure) -> bool:
    apart_s = (_moment(last) - _moment(note)).total_seconds()
    alike = (note.world_size, note.run, note.attempt) == (last.world_size, last.run, last.attempt)
    return note is last or (alike and apart_s <= max(0.0, last.timeout_s) + _APART_S)


def _accused(notes: Sequence[Failure]) -> tuple[Accused, ...]:
    by: dict[int, list[int]] = {}
    why: dict[int, str] = {}
    for note in notes:
        for suspect in note.suspects:
            by.setdefault(suspect.rank, []).append(note.rank)
            why.setdefault(suspect.rank, suspect.why)
    left = {note.rank for note in notes}
    accused = [Accused(rank=rank, by=tuple(by[rank]), why=why[rank], left_note=rank in left) for rank in by]
    # Who failed too is a victim; and whoever serves the store is missed by all who ask after it has left, having failed
    # like them and said so.
    culprits = [one for one in accused if not one.why.startswith(_VICTIM)] or accused
    return tuple(
        sorted(culprits, key=lambda one: (one.why.startswith(_STORE) and one.left_note, -len(one.by), one.rank))
    )
