"""`syncline profile`: the options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from syncline.cli.commands import choices, common


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measure when each gradient of a model is ready, and how long forward, backward and update take.

    syncline profile cnn --output profile.json

    FUNCTION() must return (model, step) or (model, step, optimizer), and step(model) the loss.

    It measures in this process, on all ranks under torchrun, or on emulated hosts (--hosts).
    """

    target: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|FILE.py:FUNCTION", help=f"Model: {', '.join(choices.MODELS)}, or a function that builds one."
        ),
    ]
    output: Annotated[Path | None, typer.Option("--output", "--json", metavar="FILE", help="Write the profile.")] = None
    device: Annotated[str | None, typer.Option(metavar="cpu|cuda", help="Device to compute on. Default: cpu.")] = None
    steps: Annotated[int, typer.Option(min=1, help="Measured steps; medians are reported.")] = 20
    warmup: Annotated[int, typer.Option(min=0, help="Steps before the measured ones.")] = 5
    batch: Annotated[int | None, typer.Option(min=1, help="Samples per rank and step. Default for MODEL: 16.")] = None
    autocast: Annotated[
        str | None, typer.Option(metavar="|".join(choices.AUTOCAST), help="Run MODEL under autocast.")
    ] = None
    memory: Annotated[
        bool, typer.Option("--memory", help="Also measure the memory of activations, for plan --memory-budget.")
    ] = False
    hosts: Annotated[
        int | None, typer.Option(metavar="N", help="Measure on this many emulated hosts.", rich_help_panel=common.PANEL)
    ] = None
    per_host: common.PerHost = "1"
    timeout: common.Timeout = 1800

    def start(self) -> None:
        from syncline.cli.profile import profile

        profile(self)
