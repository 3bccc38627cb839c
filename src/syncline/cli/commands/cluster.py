"""`syncline cluster`: the options."""

from __future__ import annotations

from typing import Annotated

import typer

from syncline.cli.commands import common

app = typer.Typer(help="Emulate a cluster on this machine: hosts behind links that hold a rate.", no_args_is_help=True)


@app.callback()
def _cluster() -> None:
    """Emulate a cluster on this machine: hosts behind links that hold a rate."""


@app.command("run", no_args_is_help=True, context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="What to run, after --.")],
    hosts: common.Hosts = 4,
    per_host: common.PerHost = "1",
    rate: common.Rate = "200mbit",
    racks: common.Racks = 1,
    trunk_rate: common.TrunkRate = None,
    rank_order: common.RankOrder = "host",
    device: common.Device = "cpu",
    per_rank: Annotated[bool, typer.Option("--per-rank", help="Run it once per rank: without torchrun.")] = False,
) -> None:
    """Run any command on every emulated host.

    syncline cluster run --hosts 4 --per-host 2 --rate 1gbit -- torchrun train.py

    torchrun needs no options: hosts, ranks and addresses are in its environment.
    """
    from syncline.cli.cluster import run as run_on_hosts

    cluster = common.ClusterOptions(hosts, per_host, rate, racks, trunk_rate, rank_order, device)
    run_on_hosts(command, cluster, per_rank=per_rank)
