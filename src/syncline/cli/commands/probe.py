"""`syncline probe`: the options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from syncline.cli.commands import common


@dataclass(frozen=True, kw_only=True)
class Probe(common.ClusterOptions):
    """Measure a cluster's links with the collectives that training uses.

    torchrun --nnodes 4 … -m syncline probe --output network.json     # this cluster

    syncline probe --hosts 4 --rate 200mbit --output network.json     # an emulated cluster
    """

    output: Annotated[Path | None, typer.Option("--output", "--json", metavar="FILE", help="Write the network.")] = None
    budget: Annotated[float, typer.Option(metavar="SECONDS", help="Approximate time for the measurement.")] = 55.0
    every: Annotated[bool, typer.Option("--every", help="Show the measured times of every collective.")] = False
    context: typer.Context

    def start(self) -> None:
        from syncline.cli.probe import probe_cluster

        probe_cluster(self)
