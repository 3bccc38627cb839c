"""`syncline failure`: read the failure reports of all ranks of a job."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from syncline.cli import options, screen
from syncline.cli.commands.failure import Failure as FailureOptions
from syncline.cli.commands.run import FOLDER as RUN_FOLDER
from syncline.doctor import Accused, Postmortem, examine_notes, unfinished_runs
from syncline.errors import UsageError
from syncline.files import FileError, one_line, write_json
from syncline.health.failure import Failure
from syncline.records.run_record import LOST, RunRecord
from syncline.units import ranks_text, size_text

_LONGEST_LIST = 8


def failure(args: FailureOptions) -> None:
    with options.one_line_errors("syncline failure"):
        screen.check_writable(args.json)
        try:
            postmortem = examine_notes(args.folder)
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
    rows = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("rank", "host", "process", "state"):
        rows.add_column(column, justify="right" if column in ("rank", "process") else "left", overflow="fold")
    for run in runs:
        rows.add_row(str(run.rank), one_line(run.host), str(run.process or ""), one_line(run.state))
    console.print(rows)
    console.print()
    if all(LOST in run.state for run in runs):
        console.print(
            "A signal ended them, or their hosts went down. The launcher's output shows which rank ended first, "
            "and the kernel's log whether memory ran out."
        )


def show(postmortem: Postmortem, console: Console, events: int = 0) -> None:
    last = postmortem.last
    console.print(
        f"{last.world_size} ranks over {one_line(last.backend)}, timeout {last.timeout_s:g} s · "
        f"{len(postmortem.notes)} of them left a failure report · {one_line(last.date)}{_age(last)} · "
        f"syncline {one_line(last.syncline)}, torch {one_line(last.torch)}"
    )
    console.print()
    rows = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    columns = [
        "rank",
        "host",
        "step",
        "failed",
        *(["was exchanging"] if any(n.pending for n in postmortem.notes) else []),
    ]
    for column in columns:
        rows.add_column(column, justify="right" if column in ("rank", "step") else "left", overflow="fold")
    for note in postmortem.notes:
        cells = [
            str(note.rank),
            one_line(note.host),
            "" if note.step is None else str(note.step),
            one_line(note.error),
            _pending(note),
        ]
        rows.add_row(*cells[: len(columns)])
    console.print(rows)
    console.print()
    for note in postmortem.notes if events else ():
        _show_events(note, events, console)
    for problem in postmortem.damaged:
        advice = "; write it again"  # not possible for a failure report
        console.print(f"Cannot be used: {one_line(problem).removesuffix(advice)}", style="yellow", soft_wrap=True)
    if postmortem.missing:
        console.print(f"No failure report from {_ranks(postmortem.missing)}{_earlier(postmortem)}.")
    for accused in postmortem.accused:
        console.print(_accusation(accused), style="red" if accused is postmortem.accused[0] else None)
    if postmortem.apart:
        places = "; ".join(f"{_ranks(ranks)} in {one_line(where)}" for where, ranks in postmortem.apart)
        others = tuple(sorted(rank for _, ranks in postmortem.apart[1:] for rank in ranks))
        console.print(
            f"They waited for each other: {places}. All ranks must make the same steps and calls, in the same order. "
            f"Look first at {_ranks(others)} for a call that was left out or made twice.",
            style="red",
        )
    elif not postmortem.accused:
        first = f" Look first at {_ranks(postmortem.missing)}." if postmortem.missing else ""
        console.print(f"No failure report names a suspect: see the error of each rank.{first}")


def _pending(note: Failure) -> str:
    if not note.pending:
        return ""
    oldest = max(note.pending, key=lambda pending: pending.age_s)
    more = f" and {len(note.pending) - 1} more" if len(note.pending) > 1 else ""
    exchange = f", {one_line(oldest.exchange)}" if oldest.exchange else ""
    return f"bucket {oldest.bucket}, {size_text(oldest.bytes)}{exchange}, for {oldest.age_s:.1f} s{more}"


def _show_events(note: Failure, events: int, console: Console) -> None:
    console.print(f"rank {note.rank}, before it failed:")
    rows = Table.grid(padding=(0, 2, 0, 2))
    rows.add_column(justify="right")
    for event in note.events[-events:]:
        level = f"{one_line(event.level)}, " if event.level else ""
        sent = f"{level}{size_text(event.sent_bytes)}" if event.sent_bytes else ""
        place = f"step {event.step}, bucket {event.bucket}, lane {event.lane}"
        rows.add_row(f"{event.before_s:.3f} s", one_line(event.what), place, sent)
    console.print(rows)
    console.print()


def _accusation(accused: Accused) -> str:
    report = "" if accused.left_note else "; it left no failure report"
    by = f"according to {_ranks(accused.by)}"
    return f"Suspect: rank {accused.rank} ({one_line(accused.why)}), {by}{report}. Next: {accused.what_to_do}."


def _age(note: Failure) -> str:
    hours = (datetime.datetime.now(datetime.timezone.utc) - note.moment()).total_seconds() / 3600
    if hours < 1:
        return ""
    return f", {hours:.0f} h ago" if hours < 48 else f", {hours / 24:.0f} days ago"


def _earlier(postmortem: Postmortem) -> str:
    return f" (only one of an earlier failure from {_ranks(postmortem.earlier)})" if postmortem.earlier else ""


def _ranks(ranks: tuple[int, ...]) -> str:
    return ranks_text(ranks, _LONGEST_LIST)
