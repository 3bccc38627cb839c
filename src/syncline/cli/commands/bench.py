"""`syncline bench`: the options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from syncline.cli.commands import choices, common


@dataclass(frozen=True, kw_only=True)
class Bench(common.ClusterOptions):
    """Compare methods of exchanging gradients on an emulated cluster.

    syncline bench --hosts 4 --rate 200mbit --model cnn --methods ddp,dense,bf16

    All methods run in the same processes and take turns step by step.
    """

    model: Annotated[str | None, typer.Option(metavar="NAME", help=f"{', '.join(choices.MODELS)}; default: cnn.")] = (
        None
    )
    replay: Annotated[str | None, typer.Option(metavar="PROFILE", help="Profile to replay: file or name.")] = None
    scale: common.Scale = "1,1"
    methods: Annotated[
        str, typer.Option(metavar="A,B,…", help="Methods to compare. To see all of them: --methods list.")
    ] = "nosync,ddp,dense"
    steps: Annotated[int, typer.Option(min=1, help="Steps that each method takes.")] = 30
    batch: Annotated[int, typer.Option(min=1, help="Samples per rank and step.")] = 16
    bucket_mb: Annotated[float | None, typer.Option(help="Bucket size of DDP, in MB.")] = None
    network: Annotated[Path | None, typer.Option(metavar="FILE", help="Network, from syncline probe.")] = None
    probe: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help=f"Time for probing. Default: {choices.BENCH_PROBE_S:g}, or {choices.BENCH_PROBE_LEVELS_S:g} for "
            "several ranks per host. 0: no predictions.",
        ),
    ] = None
    peak_memory: Annotated[bool, typer.Option("--peak-memory", help="Also measure peak memory.")] = False
    timeout: common.Timeout = 1800
    json: common.JsonFile = None
    report: common.ReportFile = None

    def start(self) -> None:
        from syncline.cli.bench import bench

        bench(self)
