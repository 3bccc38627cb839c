"""What the notes of a job that failed say together: whom they suspect, and who has left none."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from syncline.errors import UsageError
from syncline.files import FileError
from syncline.health.failure import FOLDER, FOLDER_VARIABLE, Failure, chosen_folder
from syncline.health.suspects import Kind, Suspect
from syncline.records.run_record import FINISHED, RunRecord

_APART_S = 300.0
"""Beyond the timeout, what may lie between the notes of one failure: hosts' clocks differ."""

_WHAT_TO_DO = {
    Kind.FAILED: "see its output",
    Kind.ENDED: "see its output",
    Kind.INSIDE: "its exchange hangs in code of its own: see its output",
    Kind.ELSEWHERE: "it did something else meanwhile: fewer batches, a checkpoint, an exception that was caught",
    Kind.DETACHED: "it runs another program, or has detached its model: see its output",
    Kind.SILENT: "its process ended or stands still, or its host or link is gone: see its output and its host",
    Kind.UNSEEN: "it had not come so far: see its output, and whether its host reaches the others",
    Kind.STORE_GONE: "whoever serves the store has ended, rank 0 or the launcher on its host: see its output",
    Kind.STORE_MUTE: "see whether its host, and the link of those who say so, are up",
    Kind.VICTIM: "see its output",
}
"""From what says most of a rank to what says least."""
_WEIGHT = {kind: place for place, kind in enumerate(_WHAT_TO_DO)}


class Accused(msgspec.Struct, frozen=True, kw_only=True):
    """A rank, and who suspects it."""

    rank: int
    by: tuple[int, ...]
    kind: Kind
    why: str
    """The worst that one of them says, in its words."""
    left_note: bool

    @property
    def what_to_do(self) -> str:
        return _WHAT_TO_DO[self.kind]


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
    apart: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Where ranks were that all waited for each other, most first: those that were elsewhere than most did something
    else before."""

    @property
    def last(self) -> Failure:
        return max(self.notes, key=Failure.moment)


def examine_notes(folder: str | os.PathLike[str] | None = None) -> Postmortem:
    """Of the folder that failures are left in, where no other is named. Hosts have a folder each, unless they share it:
    notes are to be brought together first."""
    found: dict[int, Failure] = {}
    damaged: list[FileError] = []
    for path in _paths(_default() if folder is None else Path(folder)):
        try:
            note = Failure.load(path)
            if note.rank in found:
                raise FileError(f"{path}: is a second note of rank {note.rank}: give each job a folder of its own")
            found[note.rank] = note
        except FileError as error:
            damaged.append(error)
    if not found:
        more = f"; {len(damaged) - 1} more are damaged, too" if len(damaged) > 1 else ""
        raise FileError(f"{damaged[0]}{more}")
    last = max(found.values(), key=Failure.moment)
    notes = [found[rank] for rank in sorted(found) if _together(found[rank], last)]
    there = {note.rank for note in notes}
    return Postmortem(
        notes=tuple(notes),
        earlier=tuple(sorted(found.keys() - there)),
        missing=tuple(rank for rank in range(last.world_size) if rank not in there),
        accused=(accused := _accused(notes)),
        damaged=tuple(map(str, damaged)),
        apart=() if accused else _apart(notes),
    )


def unfinished_runs(folder: str | os.PathLike[str]) -> list[RunRecord]:
    """Return the records of `syncline run` in a folder whose scripts did not finish, by rank.

    A process that was killed, and those that torchrun then ended, could write no failure report. Files that are no such
    records are left out.
    """
    found: list[RunRecord] = []
    with contextlib.suppress(OSError):
        for path in sorted(Path(folder).glob("rank-*.json")):
            with contextlib.suppress(FileError):
                found.append(RunRecord.load(path))
    return sorted((run for run in found if run.ended != FINISHED), key=lambda run: run.rank)


def _default() -> Path:
    if (folder := chosen_folder()) is None:
        raise UsageError(f"{FOLDER_VARIABLE} is set to nothing: ranks leave no notes; name a folder that has some")
    return folder


def _paths(folder: Path) -> list[Path]:
    try:
        if not folder.exists():
            raise UsageError(
                f"there is no {folder}: nothing has failed here, or ranks left their rank-N.json elsewhere: name it"
            )
        if not folder.is_dir():
            raise UsageError(f"{folder} is not a folder: name the one in which ranks have left their rank-N.json")
        paths = sorted(path for path in folder.iterdir() if path.match("rank-*.json") and path.is_file())
    except OSError as error:
        raise FileError(f"{folder}: cannot be read: {error.strerror or error}") from error
    if not paths:
        inside = f"; {folder / FOLDER} has some" if any((folder / FOLDER).glob("rank-*.json")) else ""
        raise UsageError(f"{folder} has no rank-N.json: each rank leaves its own, on its own host{inside}")
    return paths


def _together(note: Failure, last: Failure) -> bool:
    apart_s = (last.moment() - note.moment()).total_seconds()
    alike = note.job == last.job
    if not (note.job and last.job):  # one of them could not ask the store
        alike = (note.run, note.attempt) == (last.run, last.attempt)
    return note is last or (alike and note.world_size == last.world_size and apart_s <= last.timeout_s + _APART_S)


def _accused(notes: Sequence[Failure]) -> tuple[Accused, ...]:
    by: dict[int, list[int]] = {}
    worst: dict[int, Suspect] = {}
    for note in notes:
        for suspect in note.suspects:
            by.setdefault(suspect.rank, []).append(note.rank)
            if suspect.rank not in worst or _WEIGHT[suspect.kind] < _WEIGHT[worst[suspect.rank].kind]:
                worst[suspect.rank] = suspect
    left = {note.rank for note in notes}
    accused = [
        Accused(rank=rank, by=tuple(by[rank]), kind=one.kind, why=one.why, left_note=rank in left)
        for rank, one in worst.items()
    ]
    # Who failed too and said so is a victim; and whoever serves the store is missed by all who ask after it has left,
    # having failed like them.
    culprits = [one for one in accused if one.kind is not Kind.VICTIM]
    culprits = culprits or [one for one in accused if not one.left_note]
    return tuple(
        sorted(culprits, key=lambda one: (one.kind is Kind.STORE_GONE and one.left_note, -len(one.by), one.rank))
    )


def _apart(notes: Sequence[Failure]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    ranks: dict[str, list[int]] = {}
    for note in notes:
        ranks.setdefault(note.where, []).append(note.rank)
    found = sorted(ranks.items(), key=lambda one: -len(one[1]))
    return tuple((where, tuple(there)) for where, there in found) if len(found) > 1 else ()
