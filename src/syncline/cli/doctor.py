"""`syncline doctor`: check what works on this machine, and show how to repair what does not."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer
from rich.console import Console
from rich.table import Table

from syncline.cli import commands, options, screen
from syncline.cluster import format_rate
from syncline.dist.deadline import left_behind
from syncline.doctor import Checkup, examine
from syncline.units import count_text, format_bytes

_LONGEST_LIST = 4
"""Number of interfaces and of GPUs that are listed by name."""


def main(args: commands.Doctor) -> None:
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
    start = f"syncline {checkup.syncline} · Python {checkup.python} · torch {checkup.torch}"
    console.print(" · ".join([start, *versions]) + "\n")
    about = _grid(2)
    about.add_row("machine", _machine(checkup))
    about.add_row("network", _interfaces(checkup))
    gloo, nccl = (", ".join(found.names) or "nothing" for found in (checkup.gloo, checkup.nccl_interfaces))
    about.add_row("", f"gloo would listen on {gloo}, NCCL on {nccl}")
    if checkup.job:
        about.add_row("job", " ".join(f"{name}={value}" for name, value in checkup.job.items()))
    console.print(about)
    console.print()
    verdicts = _grid(3)
    for finding in checkup.findings:
        style = None if finding.works else "red" if finding.needed else "yellow"
        remedy = f" → {finding.remedy}" if finding.remedy else ""
        verdicts.add_row("yes" if finding.works else "no", finding.what, finding.why + remedy, style=style)
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
    memory = f"{format_bytes(checkup.memory_bytes)} of memory ({format_bytes(checkup.available_bytes)} free)"
    gpus = _listed([f"{gpu.name} ({format_bytes(gpu.memory_bytes)})" for gpu in checkup.gpus])
    return ", ".join([count_text(checkup.cores, "core"), memory, checkup.system, gpus or "no GPU"])


def _interfaces(checkup: Checkup) -> str:
    names = []
    for interface in checkup.interfaces:
        rate = f", {format_rate(interface.speed_bps)}" if interface.speed_bps else ""
        down = "" if interface.up else ", down"
        names.append(f"{interface.name} ({' and '.join(interface.families)}{rate}{down})")
    return _listed(names) or "no interface has an address"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _LONGEST_LIST
    return ", ".join([*names[:_LONGEST_LIST], *([f"{more} more"] if more > 0 else [])])
