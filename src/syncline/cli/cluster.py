"""`syncline cluster`: hosts with links of a given speed, emulated on this machine."""

from __future__ import annotations

import typer

from syncline.cli import options
from syncline.cli.commands.common import ClusterOptions
from syncline.cluster import ClusterSpec, format_rate, run_command, why_not_shaped


def run(command: list[str], cluster: ClusterOptions, *, per_rank: bool) -> None:
    with options.one_line_errors("syncline cluster run"):
        spec = options.cluster_spec(cluster)
        status = run_command(spec, command, per_rank=per_rank, announce=spec.describe() + _bursts(spec))
    raise typer.Exit(status)


def _bursts(spec: ClusterSpec) -> str:
    """The burst is what an idle link gives away for free: small messages are only as honest as it is small."""
    if why_not_shaped() is not None:
        return ""
    from syncline.cluster.links import burst_bytes

    rates = [spec.rate_bps, *([] if spec.trunk_rate_bps is None else [spec.trunk_rate_bps])]
    return "".join(f", {burst_bytes(rate) / 1000:.0f} kB burst at {format_rate(rate)}" for rate in rates)
