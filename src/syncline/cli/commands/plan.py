"""`syncline plan`: the options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from syncline.cli.commands import choices, common


def plan_command(
    profile: Annotated[str, typer.Option(metavar="NAME|FILE", help="Of the model: syncline profile writes one.")],
    network: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Of the cluster: syncline probe writes one.")
    ] = None,
    hosts: Annotated[
        int | None, typer.Option(min=1, max=65_536, metavar="N", help="How many hosts; default: the network's, or 4.")
    ] = None,
    rate: Annotated[str | None, typer.Option(metavar="RATE", help="Of the hosts' links; default: as measured.")] = None,
    per_host: Annotated[
        int | None, typer.Option("--per-host", min=1, metavar="N", help="Ranks on each host, without --network.")
    ] = None,
    allow: Annotated[
        str,
        typer.Option(metavar="A,B,…", help=f"What may change results: {', '.join(choices.ALLOWED)}. Default: nothing."),
    ] = "",
    bucket_mb: Annotated[
        float | None, typer.Option(help="The size of plain DDP's buckets, if not its default.")
    ] = None,
    memory_budget: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Instead: what to train with in so much memory, like 8GiB, per rank."),
    ] = None,
    scale: Annotated[str, typer.Option(metavar="T,B", help="Of the profile: times by T, sizes by B.")] = "1,1",
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the plan, for wrap.")] = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The same: the plan is a file for machines.")
    ] = None,
    report: common.ReportFile = None,
) -> None:
    """Find the fastest way to exchange a model's gradients on a cluster: buckets, lanes and exchanges.

    syncline plan --profile profile.json --network network.json --out plan.json

    Apply it with syncline.wrap(net, "plan.json"). Without --network, links are assumed to be Ethernet at --rate.

    syncline plan --profile profile.json --network network.json --memory-budget 8GiB --allow sparse
    """
    from syncline.cli.plan import plan_command as run

    run(
        profile=profile,
        network=network,
        hosts=hosts,
        rate=rate,
        per_host=per_host,
        allow=allow,
        bucket_mb=bucket_mb,
        memory_budget=memory_budget,
        scale=scale,
        out=out,
        json=json,
        report=report,
    )
