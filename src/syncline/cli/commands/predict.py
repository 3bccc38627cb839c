"""`syncline predict`: the options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from syncline.cli.commands import common


@dataclass(frozen=True, kw_only=True)
class Predict:
    """Predict the time of a training step for other hosts, links and plans, and find what limits it.

    syncline predict --profile bert-base-cuda --network network.json --hosts 4,8,16,64 --rate 10gbit

    Without --network, links are assumed to be Ethernet at --rate, and the answer says so.
    """

    profile: Annotated[str, typer.Option(metavar="NAME|FILE", help="Profile of the model, from syncline profile.")]
    network: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Network of the cluster, from syncline probe.")
    ] = None
    hosts: Annotated[
        str | None, typer.Option(metavar="N,N,…", help="Numbers of hosts. The diagnosis is for the first.")
    ] = None
    rate: Annotated[
        str | None, typer.Option(metavar="RATE,…", help="Rates of the hosts' links. Default: as measured.")
    ] = None
    trunk_rate: Annotated[
        str | None, typer.Option(metavar="RATE", help="Rate of the racks' links. Default: as measured.")
    ] = None
    per_host: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Without --network: ranks per host. Default: 1.")
    ] = None
    plan: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PLAN", help="ddp, hierarchical, dense,lanes=4, bf16,bucket_mb=5. Can be repeated. Default: ddp."
        ),
    ] = None
    scale: common.Scale = "1,1"
    json: common.JsonFile = None
    report: common.ReportFile = None

    def start(self) -> None:
        from syncline.cli.predict import predict_steps

        predict_steps(self)
