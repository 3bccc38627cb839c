"""`syncline plan`: the options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from syncline.cli.commands import choices, common


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Find the fastest plan for a model on a cluster: which buckets, lanes and exchanges to use.

    syncline plan --profile profile.json --network network.json --out plan.json

    Apply it with syncline.wrap(net, "plan.json"). Without --network, links are assumed to be Ethernet at --rate.

    syncline plan --profile profile.json --network network.json --memory-budget 8GiB --allow sparse
    """

    profile: Annotated[str, typer.Option(metavar="NAME|FILE", help="Profile of the model, from syncline profile.")]
    network: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Network of the cluster, from syncline probe.")
    ] = None
    hosts: Annotated[
        int | None,
        typer.Option(min=1, max=65_536, metavar="N", help="Number of hosts. Default: the network's, or 4."),
    ] = None
    rate: Annotated[
        str | None, typer.Option(metavar="RATE", help="Rate of the hosts' links. Default: as measured.")
    ] = None
    per_host: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Without --network: ranks per host. Default: 1.")
    ] = None
    allow: Annotated[
        str,
        typer.Option(
            metavar="A,B,…", help=f"Lossy exchanges to consider: {', '.join(choices.ALLOWED)}. Default: none."
        ),
    ] = ""
    bucket_mb: Annotated[float | None, typer.Option(help="Bucket size of plain DDP, if not its default, in MB.")] = None
    memory_budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Instead: find the fastest method that fits in this memory per rank, as in 8GiB."
        ),
    ] = None
    scale: common.Scale = "1,1"
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the plan.")] = None
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Same as --out; with --memory-budget: write the result.")
    ] = None
    report: common.ReportFile = None

    def start(self) -> None:
        from syncline.cli.plan import plan

        plan(self)
