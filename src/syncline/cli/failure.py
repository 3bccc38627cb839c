"""`syncline failure`: what the notes of a job that failed say together."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from syncline.cli import options, screen
from syncline.cli.commands.run import FOLDER as RUN_FOLDER
from syncline.doctor import Accused, Postmortem, examine_notes, unfinished_runs
from syncline.errors import UsageError
from syncline.files import FileError, one_line, write_json
from syncline.health.failure import Failure
from syncline.records.run_record import LOST, RunRecord
from syncline.units import ranks_text, size_text

_LONGEST_LIST = 8


def failure(folder: Path | None, events: int, json: Path | None) -> None:
    with options.one_line_errors("syncline failure"):
        screen.check_writable(json)
        try:
            found = examine_notes(folder)
        except (UsageError, FileError):
            runs = unfinished_runs(RUN_FOLDER if folder is None else folder)
            if not runs:
                raise
            if json is not None:
                states = [{"rank": run.rank, "host": run.host, "state": run.state} for run in runs]
                write_json(json, {"schema": 1, "runs": states})
            show_runs(runs, screen.out)
            return
        if json is not None:
            write_json(json, found)
        show(found, screen.out, events)


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
            "A signal ended them, or their hosts went down: the launcher's output says which rank ended first, and the "
            "kernel's log whether memory ran out."
        )


def show(found: Postmortem, console: Console, events: int = 0) -> None:
    last = found.last
    console.print(
        f"{last.world_size} ranks over {one_line(last.backend)}, timeout {last.timeout_s:g} s · "
        f"{len(found.notes)} left a note · {one_line(last.date)}{_age(last)} · "
        f"syncline {one_line(last.syncline)}, torch {one_line(last.torch)}"
    )
    console.print()
    rows = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    columns = ["rank", "host", "step", "failed", *(["was exchanging"] if any(n.pending for n in found.notes) else [])]
    for column in columns:
        rows.add_column(column, justify="right" if column in ("rank", "step") else "left", overflow="fold")
    for note in found.notes:
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
    for note in found.notes if events else ():
        _show_events(note, events, console)
    for problem in found.damaged:
        told = one_line(problem).removesuffix("; write it again")  # nobody can
        console.print(f"Cannot be used: {told}", style="yellow", soft_wrap=True)
    if found.missing:
        console.print(f"No note of {_ranks(found.missing)}{_of_earlier(found)}.")
    for one in found.accused:
        console.print(_accusation(one), style="red" if one is found.accused[0] else None)
    if found.apart:
        places = "; ".join(f"{_ranks(ranks)} in {one_line(where)}" for where, ranks in found.apart)
        others = tuple(sorted(rank for _, ranks in found.apart[1:] for rank in ranks))
        console.print(
            f"They waited for each other: {places}. All ranks must make the same steps and calls, in the same order. "
            f"Look first at {_ranks(others)}, and what was left out or done twice there.",
            style="red",
        )
    elif not found.accused:
        first = f" Look first at {_ranks(found.missing)}." if found.missing else ""
        console.print(f"No note names a suspect: what failed is what each says of itself.{first}")


def _pending(note: Failure) -> str:
    if not note.pending:
        return ""
    one = max(note.pending, key=lambda pending: pending.age_s)
    more = f" and {len(note.pending) - 1} more" if len(note.pending) > 1 else ""
    exchange = f", {one_line(one.exchange)}" if one.exchange else ""
    return f"bucket {one.bucket}, {size_text(one.bytes)}{exchange}, for {one.age_s:.1f} s{more}"


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


def _accusation(one: Accused) -> str:
    note = "; it left no note" if not one.left_note else ""
    say = "say" if len(one.by) > 1 else "says"
    return f"Suspect: rank {one.rank} ({one_line(one.why)}), {say} {_ranks(one.by)}{note}. Next: {one.what_to_do}."


def _age(note: Failure) -> str:
    hours = (datetime.datetime.now(datetime.timezone.utc) - note.moment()).total_seconds() / 3600
    if hours < 1:
        return ""
    return f", {hours:.0f} h ago" if hours < 48 else f", {hours / 24:.0f} days ago"


def _of_earlier(found: Postmortem) -> str:
    return f" (that of {_ranks(found.earlier)} is of another failure)" if found.earlier else ""


def _ranks(ranks: tuple[int, ...]) -> str:
    return ranks_text(ranks, _LONGEST_LIST)
