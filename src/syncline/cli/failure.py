"""`syncline failure`: the failure reports of all ranks of a job, read together."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from syncline.cli import options, screen
from syncline.cli.commands.failure import Failure as FailureOptions
from syncline.cli.commands.run import FOLDER as RUN_FOLDER
from syncline.doctor import Accused, Postmortem, examine_reports, unfinished_runs
from syncline.errors import UsageError
from syncline.files import FileError, one_line, write_json
from syncline.health.failure import FailureReport
from syncline.records.run_record import LOST, RunRecord
from syncline.units import ranks_text, size_text

_MOST_RANKS = 8
"""Number of ranks that a line lists."""


def failure(args: FailureOptions) -> None:
    with options.one_line_errors("syncline failure"):
        screen.check_writable(args.json)
        try:
            postmortem = examine_reports(args.folder)
        except (UsageError, FileError):
            runs = unfinished_runs(RUN_FOLDER if args.folder is None else args.folder)
            if not runs:
                raise
            if args.json is not None:
                states = [{"rank": run.rank, "host": run.host, "state": run.state} for run in runs]
                write_json(args.json, {"schema": 1, "runs": states})
            show_runs(runs, screen.out)
            return
        if args.json is not None:
            write_json(args.json, postmortem)
        show(postmortem, screen.out, args.events)


def show_runs(runs: Sequence[RunRecord], console: Console) -> None:
    console.print(f"{runs[0].ranks} ranks under syncline run · no failure report · {one_line(runs[0].command)}")
    console.print()
    table = _table("rank", "host", "process", "state")
    for run in runs:
        table.add_row(str(run.rank), one_line(run.host), str(run.process or ""), one_line(run.state))
    console.print(table)
    console.print()
    if all(LOST in run.state for run in runs):
        console.print(
            "A signal ended them, or their hosts went down: the launcher's output says which rank ended first, and the "
            "kernel's log whether memory ran out."
        )


def show(postmortem: Postmortem, console: Console, events: int = 0) -> None:
    last, reports = postmortem.last, postmortem.reports
    wrote = "1 failure report" if len(reports) == 1 else f"{len(reports)} failure reports"
    console.print(
        f"{last.world_size} ranks over {one_line(last.backend)}, timeout {last.timeout_s:g} s · {wrote} · "
        f"{one_line(last.date)}{_age(last)} · syncline {one_line(last.syncline)}, torch {one_line(last.torch)}"
    )
    console.print()
    columns = ["rank", "host", "step", "failed", *(["was exchanging"] if any(r.pending for r in reports) else [])]
    table = _table(*columns)
    for report in reports:
        step = "" if report.step is None else str(report.step)
        cells = [str(report.rank), one_line(report.host), step, one_line(report.error), _pending(report)]
        table.add_row(*cells[: len(columns)])
    console.print(table)
    console.print()
    for report in reports if events else ():
        _show_events(report, events, console)
    for problem in postmortem.damaged:
        text = one_line(problem).removesuffix("; write it again")  # a failure cannot be repeated
        console.print(f"Cannot be used: {text}", style="yellow", soft_wrap=True)
    if postmortem.missing:
        earlier = postmortem.earlier
        other = f" (that of {_ranks(earlier)} is of another failure)" if earlier else ""
        console.print(f"No failure report of {_ranks(postmortem.missing)}{other}.")
    for accused in postmortem.accused:
        console.print(_accusation(accused), style="red" if accused is postmortem.accused[0] else None)
    if postmortem.apart:
        places = "; ".join(f"{_ranks(ranks)} in {one_line(where)}" for where, ranks in postmortem.apart)
        others = tuple(sorted(rank for _, ranks in postmortem.apart[1:] for rank in ranks))
        console.print(
            f"They waited for each other: {places}. All ranks must make the same steps and calls, in the same order. "
            f"Look first at {_ranks(others)}, for a step or a call that was left out or made twice.",
            style="red",
        )
    elif not postmortem.accused:
        first = f" Look first at {_ranks(postmortem.missing)}." if postmortem.missing else ""
        console.print(f"No failure report names a suspect: each rank's own error is all that is known.{first}")


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        number = column in ("rank", "process", "step")
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    return table


def _pending(report: FailureReport) -> str:
    if not report.pending:
        return ""
    oldest = max(report.pending, key=lambda pending: pending.age_s)
    more = f" and {len(report.pending) - 1} more" if len(report.pending) > 1 else ""
    exchange = f", {one_line(oldest.exchange)}" if oldest.exchange else ""
    return f"bucket {oldest.bucket}, {size_text(oldest.bytes)}{exchange}, for {oldest.age_s:.1f} s{more}"


def _show_events(report: FailureReport, events: int, console: Console) -> None:
    console.print(f"rank {report.rank}, before it failed:")
    rows = Table.grid(padding=(0, 2, 0, 2))
    rows.add_column(justify="right")
    for event in report.events[-events:]:
        level = f"{one_line(event.level)}, " if event.level else ""
        sent = f"{level}{size_text(event.sent_bytes)}" if event.sent_bytes else ""
        bucket = f"step {event.step}, bucket {event.bucket}, lane {event.lane}"
        rows.add_row(f"{event.before_s:.3f} s", one_line(event.what), bucket, sent)
    console.print(rows)
    console.print()


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
