"""`syncline probe`: the options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from syncline.cli.commands import common


def probe_command(
    output: Annotated[
        Path | None, typer.Option("--output", "--json", metavar="FILE", help="Write the network.")
    ] = None,
    hosts: common.Hosts = 4,
    per_host: common.PerHost = "1",
    rate: common.Rate = "200mbit",
    racks: common.Racks = 1,
    trunk_rate: common.TrunkRate = None,
    rank_order: common.RankOrder = "host",
    device: common.Device = "cpu",
    budget: Annotated[float, typer.Option(metavar="SECONDS", help="About how long to measure.")] = 55.0,
    every: Annotated[bool, typer.Option("--every", help="Show the sweep of every collective.")] = False,
    context: typer.Context = None,  # type: ignore[assignment]  # typer passes it
) -> None:
    """Measure a cluster's links with the collectives that training uses: this one under torchrun, or an emulated one.

    torchrun --nnodes 4 … -m syncline probe --output network.json

    syncline probe --hosts 4 --rate 200mbit --output network.json
    """
    from syncline.cli.probe import probe_command as run

    cluster = common.ClusterOptions(hosts, per_host, rate, racks, trunk_rate, rank_order, device)
    run(cluster, output=output, budget=budget, every=every, context=context)
