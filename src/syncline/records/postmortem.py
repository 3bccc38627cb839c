"""Read the failure reports of all ranks of a job: which ranks they suspect, and which ranks wrote none."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from syncline.errors import UsageError
from syncline.files import FileError
from syncline.records.failure_report import FOLDER, FOLDER_VARIABLE, FailureReport, Kind, Suspect, chosen_folder
from syncline.records.run_record import FINISHED, RunRecord

_APART_S = 300.0
"""Time beyond the timeout that may lie between the reports of one failure, because clocks of hosts differ."""

_WHAT_TO_DO = {
    Kind.FAILED: "see its output",
    Kind.ENDED: "see its output",
    Kind.INSIDE: "its exchange hangs in its own code: see its output",
    Kind.ELSEWHERE: "it did something else: fewer batches, a checkpoint, an exception that was caught",
    Kind.DETACHED: "it runs another program, or has detached its model: see its output",
    Kind.SILENT: "its process has ended or is stopped, or its host or link is down: see its output and its host",
    Kind.UNSEEN: "it had not started yet: see its output, and whether its host can reach the others",
    Kind.STORE_GONE: "the server of the store has ended, rank 0 or the launcher on its host: see its output",
    Kind.STORE_MUTE: "see whether its host is up, and the links of the ranks that suspect it",
    Kind.VICTIM: "see its output",
}
"""Advice for each reason why a rank is suspected. The most telling reason comes first."""


class Accused(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that others suspect."""

    rank: int
    by: tuple[int, ...]  # the ranks that suspect it
    kind: Kind  # the most telling reason that one of them gives
    why: str
    left_report: bool = msgspec.field(name="left_note")  # True if the rank wrote a failure report itself

    @property
    def what_to_do(self) -> str:
        return _WHAT_TO_DO[self.kind]


class Postmortem(msgspec.Struct, frozen=True, kw_only=True):
    """The failure reports of a job's last failure, and what follows from them."""

    schema: int = 1
    reports: tuple[FailureReport, ...] = msgspec.field(name="notes")  # reports of the last failure, by rank
    earlier: tuple[int, ...]  # ranks whose report belongs to another failure
    missing: tuple[int, ...]  # ranks without a report of the last failure
    accused: tuple[Accused, ...]  # those that most others suspect first
    damaged: tuple[str, ...] = ()  # files that could not be read, and why
    apart: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """The steps or calls in which ranks waited for each other, each with its ranks, the most frequent first."""

    @property
    def last(self) -> FailureReport:
        return max(self.reports, key=FailureReport.moment)


def examine_reports(folder: str | os.PathLike[str] | None = None) -> Postmortem:
    """Read all failure reports in a folder and work out which ranks are suspected.

    If hosts share no folder, collect the reports of all hosts in one first.

    Args:
        folder: The folder; by default, the one to which ranks write their reports.

    Raises:
        UsageError: There are no reports in the folder.
        FileError: None of the reports can be read.
    """
    by_rank: dict[int, FailureReport] = {}
    damaged: list[FileError] = []
    folder = chosen_folder() if folder is None else folder
    if folder is None:
        raise UsageError(f"{FOLDER_VARIABLE} is empty, so ranks write no failure reports: name a folder that has some")
    for path in _paths(Path(folder)):
        try:
            report = FailureReport.load(path)
            if report.rank in by_rank:
                raise FileError(f"{path}: is a second report of rank {report.rank}: give each job its own folder")
            by_rank[report.rank] = report
        except FileError as error:
            damaged.append(error)
    if not by_rank:
        more = f"; {len(damaged) - 1} more are damaged, too" if len(damaged) > 1 else ""
        raise FileError(f"{damaged[0]}{more}")
    return postmortem_of(list(by_rank.values()), tuple(map(str, damaged)))


def postmortem_of(known: Sequence[FailureReport], damaged: tuple[str, ...] = ()) -> Postmortem:
    """Work out which ranks are suspected, from at least one failure report and at most one of each rank."""
    last = max(known, key=FailureReport.moment)
    reports = sorted((report for report in known if _is_same_failure(report, last)), key=lambda report: report.rank)
    ranks = {report.rank for report in reports}
    accused = _accused(reports)
    return Postmortem(
        reports=tuple(reports),
        earlier=tuple(sorted({report.rank for report in known} - ranks)),
        missing=tuple(rank for rank in range(last.world_size) if rank not in ranks),
        accused=accused,
        damaged=damaged,
        apart=() if accused else _apart(reports),
    )


def unfinished_runs(folder: str | os.PathLike[str]) -> list[RunRecord]:
    """Return the records that `syncline run` wrote to a folder and whose scripts did not finish, by rank.

    A process that was killed, and those that torchrun then ended, cannot write a failure report. Other files are
    ignored.
    """
    records: list[RunRecord] = []
    with contextlib.suppress(OSError):
        for path in Path(folder).glob("rank-*.json"):
            with contextlib.suppress(FileError):
                records.append(RunRecord.load(path))
    return sorted((record for record in records if record.ended != FINISHED), key=lambda record: record.rank)


def _paths(folder: Path) -> list[Path]:
    try:
        if not folder.exists():
            elsewhere = "nothing has failed here, or ranks wrote their rank-N.json elsewhere: name that folder"
            raise UsageError(f"there is no {folder}: {elsewhere}")
        if not folder.is_dir():
            raise UsageError(f"{folder} is not a folder: name the one to which ranks wrote their rank-N.json")
        paths = sorted(path for path in folder.glob("rank-*.json") if path.is_file())
    except OSError as error:
        raise FileError(f"{folder}: cannot be read: {error.strerror or error}") from error
    if not paths:
        inside = f"; {folder / FOLDER} has some" if any((folder / FOLDER).glob("rank-*.json")) else ""
        raise UsageError(f"{folder} has no rank-N.json: each rank writes its own, on its own host{inside}")
    return paths


def _is_same_failure(report: FailureReport, last: FailureReport) -> bool:
    apart_s = (last.moment() - report.moment()).total_seconds()
    same_job = report.job == last.job
    if not (report.job and last.job):  # one of them could not ask the store
        same_job = (report.run, report.attempt) == (last.run, last.attempt)
    in_time = apart_s <= last.timeout_s + _APART_S
    return report is last or (same_job and report.world_size == last.world_size and in_time)


def _accused(reports: Sequence[FailureReport]) -> tuple[Accused, ...]:
    named: dict[int, dict[int, Suspect]] = {}
    for report in reports:
        for suspect in report.suspects:
            named.setdefault(suspect.rank, {})[report.rank] = suspect
    wrote = {report.rank for report in reports}
    accused = []
    for rank, by in named.items():
        worst = min(by.values(), key=lambda suspect: list(_WHAT_TO_DO).index(suspect.kind))
        accused.append(Accused(rank=rank, by=tuple(by), kind=worst.kind, why=worst.why, left_report=rank in wrote))
    # A rank that failed in a collective and reported it is a victim. Ranks that ask late find the store gone, even if
    # the rank that served it is a victim like them.
    culprits = [rank for rank in accused if rank.kind is not Kind.VICTIM]
    culprits = culprits or [rank for rank in accused if not rank.left_report]
    return tuple(
        sorted(culprits, key=lambda rank: (rank.kind is Kind.STORE_GONE and rank.left_report, -len(rank.by), rank.rank))
    )


def _apart(reports: Sequence[FailureReport]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    ranks: dict[str, list[int]] = {}
    for report in reports:
        ranks.setdefault(report.where, []).append(report.rank)
    most_first = sorted(ranks.items(), key=lambda entry: -len(entry[1]))
    return tuple((where, tuple(waiting)) for where, waiting in most_first) if len(ranks) > 1 else ()
