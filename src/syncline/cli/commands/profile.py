"""`syncline profile`: the options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from syncline.cli.commands import choices


def profile(
    target: Annotated[
        str, typer.Argument(metavar="MODEL|FILE.py:FUNCTION", help=f"One of {', '.join(choices.MODELS)}, or your own.")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "--json", metavar="FILE", help="Write the profile.")
    ] = None,
    device: Annotated[str | None, typer.Option(metavar="cpu|cuda", help="Where to compute; default: cpu.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to take medians over.")] = 20,
    warmup: Annotated[int, typer.Option(min=0, help="Steps before them.")] = 5,
    batch: Annotated[int | None, typer.Option(min=1, help="Samples per rank and step of a named model.")] = None,
    autocast: Annotated[str | None, typer.Option(metavar="|".join(choices.AUTOCAST), help="Of a named model.")] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="Also what forward and backward take of memory, for plan --memory-budget.")
    ] = False,
    hosts: Annotated[
        int | None, typer.Option(metavar="N", help="On this many emulated hosts.", rich_help_panel="Several ranks")
    ] = None,
    per_host: Annotated[
        str, typer.Option("--per-host", metavar="N|N,N,…", help="Ranks on each.", rich_help_panel="Several ranks")
    ] = "1",
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="The longest that the run may take.")] = 1800,
) -> None:
    """Measure a model's backward: when each gradient is ready, and what can hide behind the rest.

    syncline profile cnn --output profile.json

    FUNCTION() returns (model, step) or (model, step, optimizer); step(model) returns the loss. Measures in this
    process, under torchrun on all its ranks at once, or on the ranks of an emulated cluster (--hosts).
    """
    from syncline.cli.profile import profile as run

    run(
        target,
        output=output,
        device=device,
        steps=steps,
        warmup=warmup,
        batch=batch,
        autocast=autocast,
        memory=memory,
        hosts=hosts,
        per_host=per_host,
        timeout=timeout,
    )
