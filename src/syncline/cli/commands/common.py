"""Options that several commands have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

_PANEL = "The emulated cluster"

Hosts = Annotated[int, typer.Option("--hosts", metavar="N", help="How many hosts.", rich_help_panel=_PANEL)]
PerHost = Annotated[
    str,
    typer.Option("--per-host", metavar="N|N,N,…", help="Ranks on each host, or a list.", rich_help_panel=_PANEL),
]
Rate = Annotated[
    str,
    typer.Option("--rate", metavar="RATE", help="Of each host's link: 200mbit, 1gbit.", rich_help_panel=_PANEL),
]
Racks = Annotated[int, typer.Option("--racks", metavar="N", help="Racks to put them in.", rich_help_panel=_PANEL)]
TrunkRate = Annotated[
    str | None,
    typer.Option("--trunk-rate", metavar="RATE", help="Of each rack's uplink.", rich_help_panel=_PANEL),
]
RankOrder = Annotated[
    str,
    typer.Option("--rank-order", metavar="host|scrambled", help="How ranks are numbered.", rich_help_panel=_PANEL),
]
Device = Annotated[str, typer.Option("--device", metavar="cpu|cuda", help="Where ranks run.", rich_help_panel=_PANEL)]
ReportFile = Annotated[
    Path | None, typer.Option("--report", metavar="FILE", help="Also write a page to look at, in HTML.")
]


@dataclass(frozen=True)
class ClusterOptions:
    """The options above that describe an emulated cluster, as typed; `options.cluster_spec` checks them."""

    hosts: int = 4
    per_host: str = "1"
    rate: str = "200mbit"
    racks: int = 1
    trunk_rate: str | None = None
    rank_order: str = "host"
    device: str = "cpu"
