"""`syncline probe`: measure the links and the collectives of a cluster."""

from __future__ import annotations

from syncline.bench.run import probe_emulated
from syncline.cli import commands, options, screen
from syncline.cli.screen import say
from syncline.errors import UsageError
from syncline.exchange import WORLD
from syncline.measure.probe import probe
from syncline.records.link_costs import Collective
from syncline.records.network import Network
from syncline.report.sections.network import collectives
from syncline.units import size_text

_WIDEST_MATRIX = 16


def main(args: commands.Probe) -> None:
    options.check_seconds("--budget", args.budget)
    first = options.is_first()
    if first:
        screen.check_writable(args.output)
    with screen.progress("Probing", shown=first) as on_progress:
        if options.under_torchrun():
            options.refuse_cluster_options(args.context)
            with options.torchrun_group(args.device):
                network = probe(budget_s=args.budget, on_progress=lambda done, of: on_progress(round(done), round(of)))
        else:
            spec = options.cluster_spec(args)
            if spec.world_size < 2:
                raise UsageError("probe needs at least two ranks: with one, there is no link to measure")
            screen.warn_if_not_shaped()
            network = probe_emulated(spec, args.budget, on_progress)
    if first:
        _show(network, args.every)
        screen.save(args.output, network, "Network")


def _show(network: Network, every: bool) -> None:
    racks = ": racks found from the rates between hosts" if network.racks > 1 else ""
    tree, _, branches = network.tree.describe().partition("\n")
    say(f"{_summary(network)}\n\n{tree}{racks}\n{branches}\n")
    for entry in network.collectives:
        if every or (entry.level, entry.kind) == (WORLD, "all_reduce"):
            _show_sweep(entry)
    screen.show(collectives(network), most=len(network.collectives))
    if network.matrix_bytes_per_s and network.hosts <= _WIDEST_MATRIX:
        say("\nFrom host to host, in Mbit/s, while every host sends to one other")
        table = screen.table("from", *(f"to {host}" for host in range(network.hosts)))
        for host, row in enumerate(network.matrix_bytes_per_s):
            rates = ("" if other == host else f"{rate * 8 / 1e6:,.0f}" for other, rate in enumerate(row))
            table.add_row(str(host), *rates)
        say(table)


def _summary(network: Network) -> str:
    parts = []
    for link in network.links:
        what = {"host": "A host's link", "rack": "A rack's link", "local": "Inside a host, a rank"}[link.name]
        nominal = f" ({link.bytes_per_s * 8 / link.nominal_bps:.0%} of its nominal rate)" if link.nominal_bps else ""
        burst = f", with a burst of {size_text(link.burst_bytes)}" if link.burst_bytes >= 1000 else ""
        parts.append(f"{what} carries {link.bytes_per_s * 8 / 1e6:,.0f} Mbit/s of payload{nominal}{burst}.")
    startup = network.collective("all_reduce").startup_s
    parts.append(f"A tiny all-reduce among {network.ranks} ranks takes {startup * 1e3:.3g} ms.")
    overlaps = [
        f"{overlap.streams} at once take {overlap.slowdown:.2f} times as long as one" for overlap in network.overlap
    ]
    if overlaps:
        parts.append(f"{'; '.join(overlaps)}. One process group runs {network.in_flight} at a time.")
    if network.one_machine:
        parts.append("All hosts are on one machine and share its processors.")
    return " ".join(parts)


def _show_sweep(entry: Collective) -> None:
    say(f"{entry.kind} among {entry.ranks} ranks ({entry.level})")
    table = screen.table("size", "sent", "time, ms", "quartiles", "algbw", "busbw", "fit", "samples")
    for point in entry.points:
        table.add_row(
            size_text(point.bytes),
            size_text(point.sent_bytes),
            f"{point.median_s * 1e3:.2f}",
            f"{point.low_s * 1e3:.2f}–{point.high_s * 1e3:.2f}",
            f"{point.bytes / point.median_s / 1e6:.1f}",
            f"{point.sent_bytes / point.median_s / 1e6:.1f}",
            f"{point.fitted_s / point.median_s - 1:+.0%}",
            str(point.repeats),
        )
    say(table)
    say(
        "size: bytes of the buffer; sent: bytes of the busiest rank; algbw, busbw: size and sent divided by time, in "
        "MB/s\n",
        style="dim",
    )
