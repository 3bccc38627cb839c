"""`syncline doctor`: check what works on this machine, and show how to repair what does not."""

from __future__ import annotations

import os
import sys

import typer
from rich.console import Console
from rich.table import Table

from syncline.cli import options, screen
from syncline.cli.commands.doctor import Doctor
from syncline.cluster import format_rate
from syncline.dist.deadline import left_behind
from syncline.doctor import Checkup, examine
from syncline.files import write_json

_LONGEST_LIST = 4
"""Number of interfaces and of GPUs that are listed by name."""


def doctor(args: Doctor) -> None:
    with options.one_line_errors("syncline doctor"):
        if options.is_first():
            screen.check_writable(args.json)
        checkup = examine(args.wait)
        status = 0
        if checkup is not None:
            status = 1 if checkup.problems else 0
            try:
                if args.json is not None and options.is_first():
                    write_json(args.json, checkup)
            finally:
                if options.is_first():
                    show(checkup, screen.out)
                else:  # rank 0 cannot see this rank, and so cannot report its problem
                    screen.err.print(f"syncline doctor: {checkup.problems[0].why}")
    if left_behind():  # a stuck thread may keep the process from ending
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    raise typer.Exit(status)


def show(checkup: Checkup, console: Console) -> None:
    console.print(
        f"syncline {checkup.syncline} · Python {checkup.python} · torch {checkup.torch} · "
        + " · ".join(
            f"{name} {version}" if version else f"no {name}"
            for name, version in (("CUDA", checkup.cuda), ("NCCL", checkup.nccl), ("Triton", checkup.triton))
        )
    )
    console.print()
    about = _grid(2)
    about.add_row("machine", _machine(checkup))
    about.add_row("network", _interfaces(checkup))
    about.add_row(
        "", f"gloo would listen on {_names(checkup.gloo.names)}, NCCL on {_names(checkup.nccl_interfaces.names)}"
    )
    if checkup.job:
        about.add_row("job", " ".join(f"{name}={value}" for name, value in checkup.job.items()))
    console.print(about)
    console.print()
    verdicts = _grid(3)
    for finding in checkup.findings:
        style = "green" if finding.works else "red" if finding.needed else "yellow"
        remedy = f" → {finding.remedy}" if finding.remedy else ""
        verdicts.add_row(
            "yes" if finding.works else "no", finding.what, finding.why + remedy, style=None if finding.works else style
        )
    console.print(verdicts)
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


def _machine(checkup: Checkup) -> str:
    gib = 2**30
    cores = f"{checkup.cores} core" + ("" if checkup.cores == 1 else "s")
    memory = f"{checkup.memory_bytes / gib:.1f} GiB of memory ({checkup.available_bytes / gib:.1f} free)"
    shown = [f"{gpu.name} ({gpu.memory_bytes / gib:.0f} GiB)" for gpu in checkup.gpus[:_LONGEST_LIST]]
    more = [f"{len(checkup.gpus) - _LONGEST_LIST} more GPUs"] if len(checkup.gpus) > _LONGEST_LIST else []
    return ", ".join([cores, memory, checkup.system, *(shown or ["no GPU"]), *more])


def _interfaces(checkup: Checkup) -> str:
    shown = []
    for interface in checkup.interfaces[:_LONGEST_LIST]:
        rate = f", {format_rate(interface.speed_bps)}" if interface.speed_bps else ""
        down = "" if interface.up else ", down"
        shown.append(f"{interface.name} ({' and '.join(interface.families)}{rate}{down})")
    more = len(checkup.interfaces) - len(shown)
    return ", ".join([*shown, *([f"{more} more"] if more else [])]) or "no interface has an address"


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "nothing"
