"""`syncline cluster run`: run a command on an emulated cluster."""

from __future__ import annotations

import typer

from syncline.cli import options
from syncline.cli.commands.cluster import Run
from syncline.cluster import ClusterSpec, format_rate, run_command, why_not_shaped


def run(args: Run) -> None:
    with options.one_line_errors("syncline cluster run"):
        spec = options.cluster_spec(args)
        status = run_command(spec, args.command, per_rank=args.per_rank, announce=spec.describe() + _bursts(spec))
    raise typer.Exit(status)


def _bursts(spec: ClusterSpec) -> str:
    """Describe the bursts of the links: an idle link carries that much faster than its rate."""
    if why_not_shaped() is not None:
        return ""
    from syncline.cluster.links import burst_bytes

    rates = [spec.rate_bps, *([] if spec.trunk_rate_bps is None else [spec.trunk_rate_bps])]
    return "".join(f", {burst_bytes(rate) / 1000:.0f} kB burst at {format_rate(rate)}" for rate in rates)
