"""The network: what its links carry, and what collectives over them take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from syncline.records.link_costs import Collective
from syncline.records.network import Network
from syncline.report import sentences
from syncline.report.charts import Chart, HeatCell, Lines, Point, Section, Series, Table, log_axis
from syncline.report.inputs import PROBE, Inputs, ModelData, all_networks
from syncline.units import count_text, duration_text, rate_text, size_text

_MOST_HOSTS, _MOST_FITS, _STRONGEST_HEAT = 16, 12, 8
_LINKS = {"host": "hosts’ links", "rack": "links between racks", "local": "links inside hosts"}
_RANKS = {"world": "all ranks", "hosts": "one rank of each host", "local": "the ranks of a host"}


def network_sections(inputs: Inputs, models: Sequence[ModelData]) -> Iterator[Section]:
    for number, network in enumerate(all_networks(models), 1):
        lead = sentences.network(network)
        charts: list[Chart | Sequence[Lines]] = []
        if not network.measured:
            lead += f" This is not measured: {network.how}."
        if network.links:
            charts.append(links(network))
        if network.matrix_bytes_per_s:
            charts.append(_matrix(network))
        if fits := [_fit(collective) for collective in network.collectives if collective.points][:_MOST_FITS]:
            lead += " In the small charts, points are measurements with their quartiles, and lines are fits."
            charts.append(fits)
        if network.collectives:
            charts.append(collectives(network))
        name = "links" if number == 1 else f"links-{number}"
        yield Section(name, "Network links", lead, charts, commands=inputs.again(*PROBE))


def links(network: Network) -> Table:
    rows = []
    for link in network.links:
        rate, low, high = (rate_text(8 * n) for n in (link.bytes_per_s, link.low_bytes_per_s, link.high_bytes_per_s))
        nominal = "–" if link.nominal_bps is None else rate_text(link.nominal_bps)
        name, burst = _LINKS.get(link.name, link.name), size_text(link.burst_bytes or None)
        rows.append((name, rate, f"{low} and {high}", nominal, burst))
    columns, source = ("", "rate", "between", "nominal", "burst"), "measured" if network.measured else "assumed"
    return Table("Payload that links carry, in each direction", columns, rows, source)


def _matrix(network: Network) -> Table:
    rates, shown = network.matrix_bytes_per_s, range(min(network.hosts, _MOST_HOSTS))
    fastest = max((value for row in rates for value in row), default=0.0) or 1.0
    rows: list[list[str | HeatCell]] = []
    for source in shown:
        rows.append([f"host {source}"])
        for target in shown:
            value, text = rates[source][target], rate_text(rates[source][target] * 8)
            tooltip = f"from host {source} to host {target}: {text}"
            cell = HeatCell(text, tooltip, round(_STRONGEST_HEAT * value / fastest), value)
            rows[-1].append("" if source == target else cell)
    caption = "From host to host, while every host sends to one other"
    columns = ("from ↓ to →", *(f"host {target}" for target in shown))
    note = "" if network.hosts <= _MOST_HOSTS else f"The first {_MOST_HOSTS} of {network.hosts} hosts. "
    return Table(caption, columns, rows, "measured", f"{note}The stronger the colour, the faster.")


def _name_and_ranks(collective: Collective) -> tuple[str, str]:
    ranks = f"{_RANKS.get(collective.level, collective.level)} ({collective.ranks})"
    return collective.kind.replace("_", "-"), ranks


def _fit(collective: Collective) -> Lines:
    points = sorted(collective.points, key=lambda point: point.bytes)
    name, ranks = _name_and_ranks(collective)
    measured = []
    for point in points:
        median, low, high, fitted = map(duration_text, (point.median_s, point.low_s, point.high_s, point.fitted_s))
        tooltip = f"{name} of {size_text(point.bytes)}: {median}, quartiles {low} to {high}, fitted {fitted}; "
        tooltip += count_text(point.repeats, "repeat")
        measured.append(Point(float(point.bytes), point.median_s, tooltip, (point.low_s, point.high_s)))
    times = [value for point in points for value in (point.low_s, point.high_s, point.fitted_s)]
    fit = [(float(point.bytes), point.fitted_s) for point in points]
    x, y = log_axis("bytes", [at for at, _ in fit], size_text), log_axis("time", times, duration_text)
    series = [Series("fitted", fit, color=7), Series("measured", points=measured)]
    return Lines(f"{name}, {ranks}", x, y, series, "measured")


def collectives(network: Network) -> Table:
    rows = []
    for entry in network.collectives:
        startup, low, high = map(duration_text, (entry.startup_s, entry.startup_low_s, entry.startup_high_s))
        per_mb, of_link, error = "–", "–", "–"
        if entry.points:
            large = entry.points[-1]
            alone_s = max(network.busy_s(entry.kind, large.bytes // 4, 4, entry.level).values(), default=0.0)
            per_mb = duration_text(large.fitted_s / large.sent_bytes * 1e6) if large.sent_bytes else "–"
            of_link = f"{min(1.0, alone_s / large.fitted_s) if large.fitted_s else 1.0:.0%}"
            error = f"{entry.residual:.0%}"
        rows.append((*_name_and_ranks(entry), startup, f"{low}–{high}", per_mb, of_link, error))
    return Table(
        "Collectives, from the fits",
        ("collective", "among", "start-up", "90 %", "per MB", "of link", "error"),
        rows,
        "measured" if network.measured else "assumed",
        note="Start-up: time without any bytes, with its 90 % interval. Per MB: time for each MB that the busiest rank "
        "sends. Of link: share of the link’s rate that the largest size reached. Error: root mean square of the fit’s "
        "relative errors.",
    )
