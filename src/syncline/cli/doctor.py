"""`syncline doctor` and `syncline failure`: what works on this machine, and why a job failed."""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Iterable, Sequence

import typer
from rich.console import Console
from rich.table import Table

from syncline.cli import commands, options, screen
from syncline.cli.screen import say
from syncline.cluster import format_rate
from syncline.dist.deadline import left_behind
from syncline.doctor import Checkup, examine
from syncline.doctor.interfaces import Interface
from syncline.errors import UsageError
from syncline.files import one_line
from syncline.records.failure_report import FailureReport
from syncline.records.postmortem import Postmortem, examine_reports, unfinished_runs
from syncline.records.run_record import LOST, RunRecord
from syncline.units import count_text, format_bytes, ranks_text, size_text

_LONGEST_LIST = 4  # number of interfaces and of GPUs that are listed by name


def doctor_command(args: commands.Doctor) -> None:
    first = options.is_first()
    if first:
        screen.check_writable(args.json)
    checkup = examine(args.wait)
    if checkup is not None and first:
        show(checkup, screen.out)
        screen.save(args.json, checkup)
    elif checkup is not None:  # rank 0 cannot see this rank, and so cannot report its problem
        screen.err.print(f"syncline doctor: {checkup.problems[0].why}")
    status = 1 if checkup is not None and checkup.problems else 0
    if left_behind():  # a stuck thread may keep the process from ending
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    raise typer.Exit(status)


def show(checkup: Checkup, console: Console) -> None:
    libraries = (("CUDA", checkup.cuda), ("NCCL", checkup.nccl), ("Triton", checkup.triton))
    versions = [f"{name} {version}" if version else f"no {name}" for name, version in libraries]
    first = [f"syncline {checkup.syncline}", f"Python {checkup.python}", f"torch {checkup.torch}"]
    console.print(" · ".join([*first, *versions]) + "\n")
    gloo, nccl = (", ".join(found.names) or "nothing" for found in (checkup.gloo, checkup.nccl_interfaces))
    memory = f"{format_bytes(checkup.memory_bytes)} of memory ({format_bytes(checkup.available_bytes)} free)"
    gpus = _listed(f"{gpu.name} ({format_bytes(gpu.memory_bytes)})" for gpu in checkup.gpus) or "no GPU"
    about = _grid(2)
    about.add_row("machine", f"{count_text(checkup.cores, 'core')}, {memory}, {checkup.system}, {gpus}")
    about.add_row("network", _listed(map(_interface, checkup.interfaces)) or "no interface has an address")
    about.add_row("", f"gloo would listen on {gloo}, NCCL on {nccl}")
    if checkup.job:
        about.add_row("job", " ".join(f"{name}={value}" for name, value in checkup.job.items()))
    verdicts = _grid(3)
    for finding in checkup.findings:
        style = None if finding.works else "red" if finding.needed else "yellow"
        remedy = f" → {finding.remedy}" if finding.remedy else ""
        verdicts.add_row("yes" if finding.works else "no", finding.what, finding.why + remedy, style=style)
    for grid in (about, verdicts):
        console.print(grid)
        console.print()
    if checkup.problems:
        console.print(f"This does not work: {checkup.problems[0].what}.", style="red")
    console.print(f"Next: {checkup.next}")


def _grid(columns: int) -> Table:
    """Make a table without lines, in which only the last column is wrapped."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    for column in range(columns):
        grid.add_column(no_wrap=column < columns - 1)
    return grid


def _interface(interface: Interface) -> str:
    rate = f", {format_rate(interface.speed_bps)}" if interface.speed_bps else ""
    down = "" if interface.up else ", down"
    return f"{interface.name} ({' and '.join(interface.families)}{rate}{down})"


def _listed(names: Iterable[str]) -> str:
    shown = list(names)
    more = [f"{len(shown) - _LONGEST_LIST} more"] if len(shown) > _LONGEST_LIST else []
    return ", ".join([*shown[:_LONGEST_LIST], *more])


_MOST_RANKS = 8  # number of ranks that a line lists


def failure_command(args: commands.Failure) -> None:
    screen.check_writable(args.json)
    try:
        postmortem = examine_reports(args.folder)
    except UsageError:
        runs = unfinished_runs(args.folder or commands.RUN_FOLDER)
        if not runs:
            raise
        states = [{"rank": run.rank, "host": run.host, "state": run.state} for run in runs]
        screen.save(args.json, {"schema": 1, "runs": states})
        _show_runs(runs)
        return
    screen.save(args.json, postmortem)
    _show_postmortem(postmortem, args.events)


def _show_runs(runs: Sequence[RunRecord]) -> None:
    say(f"{runs[0].ranks} ranks under syncline run · no failure report · {one_line(runs[0].command)}\n")
    cells = ((f"{run.rank}", one_line(run.host), f"{run.process or ''}", one_line(run.state)) for run in runs)
    screen.table(("rank", "host", "process", "state"), cells, words=(1, 3))
    say()
    if all(LOST in run.state for run in runs):
        say(
            "A signal ended them, or their hosts went down: the launcher's output says which rank ended first, and the "
            "kernel's log whether memory ran out."
        )


def _show_postmortem(postmortem: Postmortem, events: int) -> None:
    last, reports = postmortem.last, postmortem.reports
    say(
        f"{last.world_size} ranks over {one_line(last.backend)}, timeout {last.timeout_s:g} s · "
        f"{count_text(len(reports), 'failure report')} · {one_line(last.date)}{_age(last)} · "
        f"syncline {one_line(last.syncline)}, torch {one_line(last.torch)}\n"
    )
    columns = ["rank", "host", "step", "failed", "was exchanging"][: 5 if any(one.pending for one in reports) else 4]
    rows = []
    for report in reports:
        step = "" if report.step is None else str(report.step)
        cells = (str(report.rank), one_line(report.host), step, one_line(report.error), _pending(report))
        rows.append(cells[: len(columns)])
    screen.table(columns, rows, words=(1, 3, 4))
    say()
    for report in reports if events else ():
        _show_events(report, events)
    for problem in postmortem.damaged:
        text = one_line(problem).removesuffix("; write it again")  # a failure cannot be repeated
        say(f"Cannot be used: {text}", style="yellow", soft_wrap=True)
    if postmortem.missing:
        other = f" (that of {_ranks(postmortem.earlier)} is of another failure)" if postmortem.earlier else ""
        say(f"No failure report of {_ranks(postmortem.missing)}{other}.")
    for index, accused in enumerate(postmortem.accused):
        by = f"named by {_ranks(accused.by)}" + ("" if accused.left_report else "; it wrote no failure report")
        text = f"Suspect: rank {accused.rank} ({one_line(accused.why)}), {by}. Next: {accused.what_to_do}."
        say(text, style=None if index else "red")
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
    say(rows, "")


def _age(report: FailureReport) -> str:
    hours = (datetime.datetime.now(datetime.timezone.utc) - report.moment()).total_seconds() / 3600
    if hours < 1:
        return ""
    return f", {hours:.0f} h ago" if hours < 48 else f", {hours / 24:.0f} days ago"


def _ranks(ranks: tuple[int, ...]) -> str:
    return ranks_text(ranks, _MOST_RANKS)
