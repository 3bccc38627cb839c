"""`syncline doctor`: what works here, what does not, and what to do about it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from syncline.cli import options, screen
from syncline.cluster import format_rate
from syncline.dist.deadline import left_behind
from syncline.doctor import Checkup, examine
from syncline.files import write_json

_LONGEST_LIST = 4
"""Interfaces, and GPUs, that are named one by one."""


def doctor(json: Path | None, wait: float) -> None:
    with options.one_line_errors("syncline doctor"):
        if options.is_first():
            screen.check_writable(json)
        found = examine(wait)
        status = 0
        if found is not None:
            status = 1 if found.problems else 0
            try:
                if json is not None and options.is_first():
                    write_json(json, found)
            finally:
                if options.is_first():
                    show(found, screen.out)
                else:  # a rank that rank 0 does not see: nobody else can tell
                    screen.err.print(f"syncline doctor: {found.problems[0].why}")
    if left_behind():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    raise typer.Exit(status)


def show(found: Checkup, console: Console) -> None:
    console.print(
        f"syncline {found.syncline} · Python {found.python} · torch {found.torch} · "
        + " · ".join(
            f"{name} {version}" if version else f"no {name}"
            for name, version in (("CUDA", found.cuda), ("NCCL", found.nccl), ("Triton", found.triton))
        )
    )
    console.print()
    about = _grid()
    about.add_row("machine", _machine(found))
    about.add_row("network", _interfaces(found))
    about.add_row("", f"gloo would listen on {_names(found.gloo.names)}, NCCL on {_names(found.nccl_interfaces.names)}")
    if found.job:
        about.add_row("job", " ".join(f"{name}={value}" for name, value in found.job.items()))
    console.print(about)
    console.print()
    verdicts = Table.grid(padding=(0, 2, 0, 0))
    verdicts.add_column(no_wrap=True)
    verdicts.add_column(no_wrap=True)
    verdicts.add_column()
    for one in found.findings:
        style = "green" if one.works else "red" if one.needed else "yellow"
        remedy = f" → {one.remedy}" if one.remedy else ""
        verdicts.add_row("yes" if one.works else "no", one.what, one.why + remedy, style=None if one.works else style)
    console.print(verdicts)
    console.print()
    if found.problems:
        console.print(f"Something that should work does not: {found.problems[0].what}.", style="red")
    console.print(f"Next: {found.next}")


def _grid() -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column()
    return grid


def _machine(found: Checkup) -> str:
    gib = 2**30
    cores = f"{found.cores} core" + ("" if found.cores == 1 else "s")
    memory = f"{found.memory_bytes / gib:.1f} GiB of memory ({found.available_bytes / gib:.1f} free)"
    shown = [f"{gpu.name} ({gpu.memory_bytes / gib:.0f} GiB)" for gpu in found.gpus[:_LONGEST_LIST]]
    more = [f"{len(found.gpus) - _LONGEST_LIST} more GPUs"] if len(found.gpus) > _LONGEST_LIST else []
    return ", ".join([cores, memory, found.system, *(shown or ["no GPU"]), *more])


def _interfaces(found: Checkup) -> str:
    shown = []
    for one in found.interfaces[:_LONGEST_LIST]:
        rate = f", {format_rate(one.speed_bps)}" if one.speed_bps else ""
        down = "" if one.up else ", down"
        shown.append(f"{one.name} ({' and '.join(one.families)}{rate}{down})")
    more = len(found.interfaces) - len(shown)
    return ", ".join([*shown, *([f"{more} more"] if more else [])]) or "no interface has an address"


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "nothing"
