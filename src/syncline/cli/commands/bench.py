"""`syncline bench`: the options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from syncline.cli.commands import choices, common


def bench(
    hosts: common.Hosts = 4,
    per_host: common.PerHost = "1",
    rate: common.Rate = "200mbit",
    racks: common.Racks = 1,
    trunk_rate: common.TrunkRate = None,
    rank_order: common.RankOrder = "host",
    device: common.Device = "cpu",
    model: Annotated[str | None, typer.Option(metavar="NAME", help=f"One of {', '.join(choices.MODELS)}.")] = None,
    replay: Annotated[str | None, typer.Option(metavar="PROFILE", help="A recorded profile: file or name.")] = None,
    scale: Annotated[
        str, typer.Option(metavar="T,B", help="Of a replay: times by T, sizes by B. 10,0.05 fits slow links.")
    ] = "1,1",
    methods: Annotated[str, typer.Option(metavar="A,B,…", help="All of them: --methods list.")] = "nosync,ddp,dense",
    steps: Annotated[int, typer.Option(min=1, help="Rounds in which every method takes a step.")] = 30,
    batch: Annotated[int, typer.Option(min=1, help="Samples per rank and step.")] = 16,
    bucket_mb: Annotated[float | None, typer.Option(help="Of DDP's buckets, for every method.")] = None,
    network: Annotated[
        Path | None, typer.Option(metavar="FILE", help="For predictions: what syncline probe wrote.")
    ] = None,
    probe: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help=f"Without --network: how long to probe; {choices.BENCH_PROBE_S:g}, or "
            f"{choices.BENCH_PROBE_LEVELS_S:g} where hosts have several ranks; 0: no predictions.",
        ),
    ] = None,
    peak_memory: Annotated[
        bool, typer.Option("--peak-memory", help="Also measure what each method takes of memory.")
    ] = False,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="The longest that the run may take.")] = 1800,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result for machines.")] = None,
    report: common.ReportFile = None,
) -> None:
    """Compare methods on an emulated cluster, in one run: they take turns in the same processes.

    syncline bench --hosts 4 --rate 200mbit --model cnn --methods nosync,ddp,dense,bf16
    """
    from syncline.cli.bench import bench as run

    run(
        common.ClusterOptions(hosts, per_host, rate, racks, trunk_rate, rank_order, device),
        model=model,
        replay=replay,
        scale=scale,
        methods=methods,
        steps=steps,
        batch=batch,
        bucket_mb=bucket_mb,
        network=network,
        probe=probe,
        peak_memory=peak_memory,
        timeout=timeout,
        json=json,
        report=report,
    )
