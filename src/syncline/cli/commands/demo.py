"""`syncline demo`: the options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from syncline.cli.commands import choices, common


def demo(
    hosts: common.Hosts = 4,
    per_host: common.PerHost = "1",
    rate: common.Rate = "100mbit",
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each method.")] = 60,
    tune: Annotated[
        float, typer.Option(min=5, max=3600, metavar="SECONDS", help="For each tuning, about.")
    ] = choices.DEMO_TUNE_S,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result for machines.")] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where the page to look at goes; default: syncline-report.html.")
    ] = None,
) -> None:
    """Train on real digits over an emulated slow cluster: plain DDP against what tune makes of it. Under two minutes.

    syncline demo --hosts 4 --rate 100mbit
    """
    from syncline.cli.demo import demo as run

    run(common.ClusterOptions(hosts, per_host, rate), steps=steps, tune=tune, json=json, report=report)
