"""`syncline cluster run`: run a command on an emulated cluster."""

from __future__ import annotations

import typer

from syncline.cli import commands, options
from syncline.cluster import format_rate, run_command, why_not_shaped


def main(args: commands.ClusterRun) -> None:
    spec = options.cluster_spec(args)
    announce = spec.describe()
    if why_not_shaped() is None:  # an idle link carries a burst faster than its rate
        from syncline.cluster.links import burst_bytes

        rates = [spec.rate_bps, *([] if spec.trunk_rate_bps is None else [spec.trunk_rate_bps])]
        announce += "".join(f", {burst_bytes(rate) / 1000:.0f} kB burst at {format_rate(rate)}" for rate in rates)
    raise typer.Exit(run_command(spec, args.command, per_rank=args.per_rank, announce=announce))
