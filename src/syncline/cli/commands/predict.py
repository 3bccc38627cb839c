"""`syncline predict`: the options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from syncline.cli.commands import common


def predict_command(
    profile: Annotated[str, typer.Option(metavar="NAME|FILE", help="Of the model: syncline profile writes one.")],
    network: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Of the cluster: syncline probe writes one.")
    ] = None,
    hosts: Annotated[
        str | None, typer.Option(metavar="N,N,…", help="How many hosts; the first is looked at in detail.")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(metavar="RATE,…", help="Of the hosts' links; default: as measured.")
    ] = None,
    trunk_rate: Annotated[
        str | None, typer.Option("--trunk-rate", metavar="RATE", help="Of the racks' links; default: as measured.")
    ] = None,
    per_host: Annotated[
        int | None, typer.Option("--per-host", min=1, metavar="N", help="Ranks on each host, without --network.")
    ] = None,
    plan: Annotated[
        list[str] | None,
        typer.Option(metavar="PLAN", help="ddp, hierarchical, dense,lanes=4 or bf16,bucket_mb=5. May be repeated."),
    ] = None,
    scale: Annotated[str, typer.Option(metavar="T,B", help="Of the profile: times by T, sizes by B.")] = "1,1",
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result for machines.")] = None,
    report: common.ReportFile = None,
) -> None:
    """Predict a step's time on hosts, links and plans that nobody has tried, and say what limits the scaling.

    syncline predict --profile bert-base-cuda --network network.json --hosts 4,8,16,64 --rate 10gbit

    Without --network, links are assumed to be Ethernet at --rate, and the answer says so.
    """
    from syncline.cli.predict import predict_command as run

    run(
        profile=profile,
        network=network,
        hosts=hosts,
        rate=rate,
        trunk_rate=trunk_rate,
        per_host=per_host,
        plans=plan or ["ddp"],
        scale=scale,
        json=json,
        report=report,
    )
