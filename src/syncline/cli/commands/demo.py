"""`syncline demo`: the options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from syncline.cli.commands import choices, common


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Train on real digits over an emulated slow network, with plain DDP and with syncline.tune. Under two minutes.

    syncline demo --hosts 4 --rate 100mbit
    """

    hosts: common.Hosts = 4
    per_host: common.PerHost = "1"
    rate: common.Rate = "100mbit"
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each method.")] = 60
    tune: Annotated[
        float, typer.Option(min=5, max=3600, metavar="SECONDS", help="Approximate time for each of the two tunings.")
    ] = choices.DEMO_TUNE_S
    json: common.JsonFile = None
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File for the HTML report. Default: syncline-report.html.")
    ] = None

    def start(self) -> None:
        from syncline.cli.demo import demo

        demo(self)
