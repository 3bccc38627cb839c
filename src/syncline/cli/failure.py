"""`syncline failure`: the failure reports of all ranks of a job, read together."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from rich.table import Table

from syncline.cli import commands, screen
from syncline.cli.screen import say
from syncline.doctor import Accused, Postmortem, examine_reports, unfinished_runs
from syncline.errors import UsageError
from syncline.files import FileError, one_line
from syncline.health.failure import FailureReport
from syncline.records.run_record import LOST, RunRecord
from syncline.units import count_text, ranks_text, size_text

_MOST_RANKS = 8
"""Number of ranks that a line lists."""


def main(args: commands.Failure) -> None:
    screen.check_writable(args.json)
    try:
        postmortem = examine_reports(args.folder)
    except (UsageError, FileError):
        runs = unfinished_runs(args.folder or commands.RUN_FOLDER)
        if not runs:
            raise
        states = [{"rank": run.rank, "host": run.host, "state": run.state} for run in runs]
        screen.save(args.json, {"schema": 1, "runs": states})
        _show_runs(runs)
        return
    screen.save(args.json, postmortem)
    _show(postmortem, args.events)


def _show_runs(runs: Sequence[RunRecord]) -> None:
    say(f"{runs[0].ranks} ranks under syncline run · no failure report · {one_line(runs[0].command)}\n")
    table = screen.table("rank", "host", "process", "state", words=(1, 3))
    for run in runs:
        table.add_row(str(run.rank), one_line(run.host), str(run.process or ""), one_line(run.state))
    say(table)
    say()
    if all(LOST in run.state for run in runs):
        say(
            "A signal ended them, or their hosts went down: the launcher's output says which rank ended first, and the "
            "kernel's log whether memory ran out."
        )


def _show(postmortem: Postmortem, events: int) -> None:
    last, reports = postmortem.last, postmortem.reports
    say(
        f"{last.world_size} ranks over {one_line(last.backend)}, timeout {last.timeout_s:g} s · "
        f"{count_text(len(reports), 'failure report')} · {one_line(last.date)}{_age(last)} · "
        f"syncline {one_line(last.syncline)}, torch {one_line(last.torch)}\n"
    )
    pending = ["was exchanging"] if any(report.pending for report in reports) else []
    table = screen.table("rank", "host", "step", "failed", *pending, words=(1, 3, 4))
    for report in reports:
        step = "" if report.step is None else str(report.step)
        cells = (str(report.rank), one_line(report.host), step, one_line(report.error))
        table.add_row(*cells, *([_pending(report)] if pending else []))
    say(table)
    say()
    for report in reports if events else ():
        _show_events(report, events)
    for problem in postmortem.damaged:
        text = one_line(problem).removesuffix("; write it again")  # a failure cannot be repeated
        say(f"Cannot be used: {text}", style="yellow", soft_wrap=True)
    if postmortem.missing:
        other = f" (that of {_ranks(postmortem.earlier)} is of another failure)" if postmortem.earlier else ""
        say(f"No failure report of {_ranks(postmortem.missing)}{other}.")
    for accused in postmortem.accused:
        say(_accusation(accused), style="red" if accused is postmortem.accused[0] else None)
    if postmortem.apart:
        places = "; ".join(f"{_ranks(ranks)} in {one_line(where)}" for where, ranks in postmortem.apart)
        others = tuple(sorted(rank for _, ranks in postmortem.apart[1:] for rank in ranks))
        say(
            f"They waited for each other: {places}. All ranks must make the same steps and calls, in the same order. "
            f"Look first at {_ranks(others)}, for a step or a call that was left out or made twice.",
            style="red",
        )
    elif not postmortem.accused:
        first = f" Look first at {_ranks(postmortem.missing)}." if postmortem.missing else ""
        say(f"No failure report names a suspect: each rank's own error is all that is known.{first}")


def _pending(report: FailureReport) -> str:
    if not report.pending:
        return ""
    oldest = max(report.pending, key=lambda pending: pending.age_s)
    more = f" and {len(report.pending) - 1} more" if len(report.pending) > 1 else ""
    exchange = f", {one_line(oldest.exchange)}" if oldest.exchange else ""
    return f"bucket {oldest.bucket}, {size_text(oldest.bytes)}{exchange}, for {oldest.age_s:.1f} s{more}"


def _show_events(report: FailureReport, events: int) -> None:
    say(f"rank {report.rank}, before it failed:")
    rows = Table.grid(padding=(0, 2, 0, 2))
    rows.add_column(justify="right")
    for event in report.events[-events:]:
        level = f"{one_line(event.level)}, " if event.level else ""
        sent = f"{level}{size_text(event.sent_bytes)}" if event.sent_bytes else ""
        bucket = f"step {event.step}, bucket {event.bucket}, lane {event.lane}"
        rows.add_row(f"{event.before_s:.3f} s", one_line(event.what), bucket, sent)
    say(rows)
    say()


def _accusation(accused: Accused) -> str:
    report = "" if accused.left_report else "; it wrote no failure report"
    by = f"named by {_ranks(accused.by)}"
    return f"Suspect: rank {accused.rank} ({one_line(accused.why)}), {by}{report}. Next: {accused.what_to_do}."


def _age(report: FailureReport) -> str:
    hours = (datetime.datetime.now(datetime.timezone.utc) - report.moment()).total_seconds() / 3600
    if hours < 1:
        return ""
    return f", {hours:.0f} h ago" if hours < 48 else f", {hours / 24:.0f} days ago"


def _ranks(ranks: tuple[int, ...]) -> str:
    return ranks_text(ranks, _MOST_RANKS)
