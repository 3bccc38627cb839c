"""`syncline probe`: measure the links and the collectives of a cluster."""

from __future__ import annotations

from syncline.bench.run import probe_emulated
from syncline.cli import options, screen
from syncline.cli.commands.probe import Probe
from syncline.errors import UsageError
from syncline.exchange import WORLD
from syncline.measure.probe import probe
from syncline.records.link_costs import Collective, Point
from syncline.records.network import Network
from syncline.report import formatting
from syncline.units import size_text

_WIDEST_MATRIX = 16
_MAX_BUDGET_S = 3600.0


def probe_cluster(args: Probe) -> None:
    with options.one_line_errors("syncline probe"):
        if not 1 <= args.budget <= _MAX_BUDGET_S:
            raise UsageError(f"--budget {args.budget:g}: must be 1 to {_MAX_BUDGET_S:g} seconds")
        first = options.is_first()
        if first:
            screen.check_writable(args.output)
        with screen.progress("Probing", shown=first) as on_progress:
            if options.under_torchrun():
                options.refuse_cluster_options(args.context)
                with options.torchrun_group(args.device):
                    network = probe(
                        budget_s=args.budget, on_progress=lambda done, of: on_progress(round(done), round(of))
                    )
            else:
                spec = options.cluster_spec(args)
                if spec.world_size < 2:
                    raise UsageError("probe needs at least two ranks: with one, there is no link to measure")
                screen.warn_if_not_shaped()
                network = probe_emulated(spec, args.budget, on_progress)
        if first:
            try:
                if args.output is not None:
                    network.save(args.output)
            finally:  # show what took a minute to measure even if its file cannot be written
                _show(network, args.every)


def _show(network: Network, every: bool) -> None:
    screen.out.print(_summary(network))
    screen.out.print()
    racks = ": racks found from the rates between hosts" if network.racks > 1 else ""
    tree, _, branches = network.tree.describe().partition("\n")
    screen.out.print(f"{tree}{racks}\n{branches}", highlight=False)
    screen.out.print()
    for entry in network.collectives:
        if every or (entry.level, entry.kind) == (WORLD, "all_reduce"):
            _show_sweep(entry)
    _show_fits(network)
    _show_matrix(network)


def _summary(network: Network) -> str:
    parts = []
    for link in network.links:
        what = {"host": "A host's link", "rack": "A rack's link", "local": "Inside a host, a rank"}[link.name]
        nominal = f" ({link.bytes_per_s * 8 / link.nominal_bps:.0%} of its nominal rate)" if link.nominal_bps else ""
        burst = f", with a burst of {formatting.size(link.burst_bytes)}" if link.burst_bytes >= 1000 else ""
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
    screen.out.print(f"{entry.kind} among {entry.ranks} ranks ({entry.level})")
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
    screen.out.print(table)
    screen.out.print()


def _show_fits(network: Network) -> None:
    table = screen.table("collective", "ranks", "start-up", "90 % interval", "per MB sent", "of a link", "fit error")
    for entry in network.collectives:
        large = next((point for point in reversed(entry.points)), None)
        per_mb = f"{large.fitted_s / large.sent_bytes * 1e9:.1f} ms" if large is not None else "–"
        table.add_row(
            entry.kind if entry.level == WORLD else f"{entry.kind} ({entry.level})",
            str(entry.ranks),
            f"{entry.startup_s * 1e3:.2f} ms",
            f"{entry.startup_low_s * 1e3:.2f}–{entry.startup_high_s * 1e3:.2f}",
            per_mb,
            "–" if large is None else f"{_share_of_link(network, entry, large):.0%}",
            f"{entry.residual:.0%}",
        )
    screen.out.print(table)
    screen.out.print(
        "size: bytes of the buffer; sent: bytes of the busiest rank; algbw, busbw: size and sent divided by time, in "
        "MB/s; of a link: share of the link's rate that the largest size reached",
        style="dim",
    )


def _share_of_link(network: Network, entry: Collective, point: Point) -> float:
    """Return the time that the bytes need on the slowest link they cross, divided by the fitted time."""
    alone_s = max(network.busy_s(entry.kind, point.bytes // 4, 4, entry.level).values(), default=0.0)
    return min(1.0, alone_s / point.fitted_s) if point.fitted_s else 1.0


def _show_matrix(network: Network) -> None:
    rows = network.matrix_bytes_per_s
    if not rows or network.hosts > _WIDEST_MATRIX:
        return
    screen.out.print()
    screen.out.print("From host to host, in Mbit/s, while every host sends to one other")
    table = screen.table("from", *(f"to {host}" for host in range(network.hosts)))
    for host, row in enumerate(rows):
        table.add_row(str(host), *("" if other == host else f"{rate * 8 / 1e6:,.0f}" for other, rate in enumerate(row)))
    screen.out.print(table)
