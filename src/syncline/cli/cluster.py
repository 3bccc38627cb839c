"""`syncline cluster`: hosts with links of a given speed, emulated on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from syncline.cli import options
from syncline.cluster import ClusterSpec, format_rate, run_command, why_not_shaped

app = typer.Typer(help="Emulate a cluster on this machine: hosts behind links that hold a rate.", no_args_is_help=True)


@app.callback()
def _cluster() -> None:
    """Emulate a cluster on this machine: hosts behind links that hold a rate."""


@app.command("run", no_args_is_help=True, context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="What to run, after --.")],
    hosts: options.Hosts = 4,
    per_host: options.PerHost = "1",
    rate: options.Rate = "200mbit",
    racks: options.Racks = 1,
    trunk_rate: options.TrunkRate = None,
    rank_order: options.RankOrder = "host",
    device: options.Device = "cpu",
    per_rank: Annotated[bool, typer.Option("--per-rank", help="Run it once per rank: without torchrun.")] = False,
) -> None:
    """Run any command on every emulated host.

    syncline cluster run --hosts 4 --per-host 2 --rate 1gbit -- torchrun train.py

    torchrun needs no options: hosts, ranks and addresses are in its environment.
    """
    with options.one_line_errors("syncline cluster run"):
        spec = options.cluster_spec(hosts, per_host, rate, racks, trunk_rate, rank_order, device)
        status = run_command(spec, command, per_rank=per_rank, announce=spec.describe() + _bursts(spec))
    raise typer.Exit(status)


def _bursts(spec: ClusterSpec) -> str:
    """The burst is what an idle link gives away for free: small messages are only as honest as it is small."""
    if why_not_shaped() is not None:
        return ""
    from syncline.cluster.links import burst_bytes

    rates = [spec.rate_bps, *([] if spec.trunk_rate_bps is None else [spec.trunk_rate_bps])]
    return "".join(f", {burst_bytes(rate) / 1000:.0f} kB burst at {format_rate(rate)}" for rate in rates)
