"""Read the failure reports of all ranks of a job: which ranks they suspect, and which ranks left no report."""

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
"""Longest time, in addition to the timeout, between two reports of one failure: the clocks of hosts differ."""

_WHAT_TO_DO = {
    Kind.FAILED: "see its output",
    Kind.ENDED: "see its output",
    Kind.INSIDE: "its exchange hangs in its own code: see its output",
    Kind.ELSEWHERE: "it did something else: it had fewer batches, wrote a checkpoint, or caught an exception",
    Kind.DETACHED: "it runs another program or has detached its model: see its output",
    Kind.SILENT: "its process ended or hangs, or its host or link is down: see its output and its host",
    Kind.UNSEEN: "it had not got that far: see its output, and whether its host reaches the others",
    Kind.STORE_GONE: "the process that serves the store has ended, rank 0 or the launcher on its host: see its output",
    Kind.STORE_MUTE: "see whether its host, and the links of the ranks that suspect it, are up",
    Kind.VICTIM: "see its output",
}
"""The next action for each kind of suspect, in order of evidence: the strongest first."""
_EVIDENCE = {kind: order for order, kind in enumerate(_WHAT_TO_DO)}


class Accused(msgspec.Struct, frozen=True, kw_only=True):
    """A suspected rank, and the ranks that suspect it."""

    rank: int
    by: tuple[int, ...]
    kind: Kind
    why: str
    """The strongest reason that one of them gives."""
    left_note: bool

    @property
    def what_to_do(self) -> str:
        return _WHAT_TO_DO[self.kind]


class Postmortem(msgspec.Struct, frozen=True, kw_only=True):
    """All failure reports of the last failure in a folder."""

    schema: int = 1
    notes: tuple[Failure, ...]
    """Failure reports, by rank."""
    earlier: tuple[int, ...]
    """Ranks whose report is of an earlier failure or of another job."""
    missing: tuple[int, ...]
    """Ranks without a report of this failure."""
    accused: tuple[Accused, ...]
    """Suspected ranks; those that most others suspect come first."""
    damaged: tuple[str, ...] = ()
    """Problems of files that cannot be used."""
    apart: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Groups of ranks that waited for each other in different places, the largest first. The ranks of the others have
    left something out, or did something twice."""

    @property
    def last(self) -> Failure:
        return max(self.notes, key=Failure.moment)


def examine_notes(folder: str | os.PathLike[str] | None = None) -> Postmortem:
    """Read the failure reports in a folder.

    Args:
        folder: Where the reports of all ranks are. Default: the folder that ranks write to. Each host has its own
            unless they share it, so reports must be collected first.

    Raises:
        UsageError: If there is no such folder, or it has no reports.
        FileError: If none of the reports can be read.
    """
    found: dict[int, Failure] = {}
    damaged: list[FileError] = []
    for path in _report_paths(_default_folder() if folder is None else Path(folder)):
        try:
            note = Failure.load(path)
            if note.rank in found:
                raise FileError(f"{path}: is a second report of rank {note.rank}: give each job its own folder")
            found[note.rank] = note
        except FileError as error:
            damaged.append(error)
    if not found:
        more = f"; {len(damaged) - 1} more are damaged" if len(damaged) > 1 else ""
        raise FileError(f"{damaged[0]}{more}")
    last = max(found.values(), key=Failure.moment)
    notes = [found[rank] for rank in sorted(found) if _same_failure(found[rank], last)]
    reported = {note.rank for note in notes}
    return Postmortem(
        notes=tuple(notes),
        earlier=tuple(sorted(found.keys() - reported)),
        missing=tuple(rank for rank in range(last.world_size) if rank not in reported),
        accused=(accused := _accused(notes)),
        damaged=tuple(map(str, damaged)),
        apart=() if accused else _apart(notes),
    )


def unfinished_runs(folder: str | os.PathLike[str]) -> list[RunRecord]:
    """Return the records of `syncline run` in a folder whose scripts did not finish, by rank.

    A process that was killed, and those that torchrun then ended, could not write a failure report. Other files are
    skipped.
    """
    found: list[RunRecord] = []
    with contextlib.suppress(OSError):
        for path in sorted(Path(folder).glob("rank-*.json")):
            with contextlib.suppress(FileError):
                found.append(RunRecord.load(path))
    return sorted((run for run in found if run.ended != FINISHED), key=lambda run: run.rank)


def _default_folder() -> Path:
    if (folder := chosen_folder()) is None:
        raise UsageError(f"{FOLDER_VARIABLE} is empty, so ranks write no failure reports: name a folder that has some")
    return folder


def _report_paths(folder: Path) -> list[Path]:
    try:
        if not folder.exists():
            raise UsageError(
                f"there is no folder {folder}: nothing has failed, or the failure reports are in another one: name it"
            )
        if not folder.is_dir():
            raise UsageError(f"{folder} is not a folder: name the one with the failure reports, rank-N.json")
        paths = sorted(path for path in folder.iterdir() if path.match("rank-*.json") and path.is_file())
    except OSError as error:
        raise FileError(f"{folder}: cannot be read: {error.strerror or error}") from error
    if not paths:
        inside = f"; {folder / FOLDER} has some" if any((folder / FOLDER).glob("rank-*.json")) else ""
        raise UsageError(
            f"{folder} has no failure reports (rank-N.json): each rank writes its own, on its own host{inside}"
        )
    return paths


def _same_failure(note: Failure, last: Failure) -> bool:
    apart_s = (last.moment() - note.moment()).total_seconds()
    same_job = note.job == last.job
    if not (note.job and last.job):  # one of them could not reach the store, which has the job's name
        same_job = (note.run, note.attempt) == (last.run, last.attempt)
    return note is last or (same_job and note.world_size == last.world_size and apart_s <= last.timeout_s + _APART_S)


def _accused(notes: Sequence[Failure]) -> tuple[Accused, ...]:
    by: dict[int, list[int]] = {}
    worst: dict[int, Suspect] = {}
    for note in notes:
        for suspect in note.suspects:
            by.setdefault(suspect.rank, []).append(note.rank)
            if suspect.rank not in worst or _EVIDENCE[suspect.kind] < _EVIDENCE[worst[suspect.rank].kind]:
                worst[suspect.rank] = suspect
    reported = {note.rank for note in notes}
    accused = [
        Accused(rank=rank, by=tuple(by[rank]), kind=suspect.kind, why=suspect.why, left_note=rank in reported)
        for rank, suspect in worst.items()
    ]
    # A rank that failed and wrote a report is a victim. If it served the store, ranks that asked later suspect it
    # although it failed like them.
    culprits = [rank for rank in accused if rank.kind is not Kind.VICTIM]
    culprits = culprits or [rank for rank in accused if not rank.left_note]
    return tuple(
        sorted(culprits, key=lambda rank: (rank.kind is Kind.STORE_GONE and rank.left_note, -len(rank.by), rank.rank))
    )


def _apart(notes: Sequence[Failure]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    ranks: dict[str, list[int]] = {}
    for note in notes:
        ranks.setdefault(note.where, []).append(note.rank)
    groups = sorted(ranks.items(), key=lambda group: -len(group[1]))
    return tuple((where, tuple(members)) for where, members in groups) if len(groups) > 1 else ()
