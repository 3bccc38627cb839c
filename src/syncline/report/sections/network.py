"""The network: what its links carry, and what collectives over them take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from syncline.records.link_costs import Collective
from syncline.records.network import Network
from syncline.report import axes, commands, formatting, sentences
from syncline.report.charts import Chart, HeatCell, Lines, Point, Series, Table
from syncline.report.formatting import duration, rate, size
from syncline.report.inputs import Inputs, ModelData
from syncline.report.layout import Section
from syncline.report.summary import LINK_NAMES, all_networks

_MOST_HOSTS, _MOST_FITS, _STRONGEST_HEAT = 16, 12, 8
_RANKS = {"world": "all ranks", "hosts": "one rank of each host", "local": "the ranks of a host"}


def network_sections(inputs: Inputs, models: Sequence[ModelData]) -> Iterator[Section]:
    for number, network in enumerate(all_networks(models), 1):
        lead = sentences.network(network)
        charts: list[Chart | Sequence[Lines]] = []
        if not network.measured:
            lead += f" This is not measured: {network.how}."
        if network.links:
            charts.append(_links(network))
        if network.matrix_bytes_per_s:
            charts.append(_matrix(network))
        fitted = [collective for collective in network.collectives if collective.points]
        if fitted:
            lead += " In the small charts, points are measurements with their quartiles, and lines are fits."
            charts.append([_fit(collective) for collective in fitted[:_MOST_FITS]])
        if network.collectives:
            charts.append(_collectives(network))
        name = "links" if number == 1 else f"links-{number}"
        yield Section(name, "Network links", lead, charts, commands=commands.for_network(inputs))


def _source(network: Network) -> str:
    return "measured" if network.measured else "assumed"


def _links(network: Network) -> Table:
    return Table(
        "Payload that links carry, in each direction",
        ("", "rate", "between", "nominal", "burst"),
        [
            (
                LINK_NAMES.get(link.name, link.name),
                rate(link.bytes_per_s * 8),
                f"{rate(link.low_bytes_per_s * 8)} and {rate(link.high_bytes_per_s * 8)}",
                "–" if link.nominal_bps is None else rate(link.nominal_bps),
                size(link.burst_bytes) if link.burst_bytes else "–",
            )
            for link in network.links
        ],
        _source(network),
    )


def _matrix(network: Network) -> Table:
    rates = network.matrix_bytes_per_s
    shown = min(network.hosts, _MOST_HOSTS)
    fastest = max((value for row in rates for value in row), default=0.0)
    rows: list[list[str | HeatCell]] = []
    for source in range(shown):
        rows.append([f"host {source}"])
        for target in range(shown):
            value, text = rates[source][target], rate(rates[source][target] * 8)
            heat = round(_STRONGEST_HEAT * value / fastest) if fastest else 0
            cell = HeatCell(text, f"from host {source} to host {target}: {text}", heat, value)
            rows[-1].append("" if source == target else cell)
    return Table(
        "From host to host, while every host sends to one other",
        ("from ↓ to →", *(f"host {target}" for target in range(shown))),
        rows,
        "measured",
        note=f"The first {shown} of {network.hosts} hosts."
        if network.hosts > shown
        else "The stronger the colour, the faster.",
    )


def _fit(collective: Collective) -> Lines:
    points = sorted(collective.points, key=lambda point: point.bytes)
    name = collective.kind.replace("_", "-")
    measured = [
        Point(
            float(point.bytes),
            point.median_s,
            f"{name} of {size(point.bytes)}: {duration(point.median_s)}, quartiles {duration(point.low_s)} to "
            f"{duration(point.high_s)}, fitted {duration(point.fitted_s)}; "
            f"{formatting.count(point.repeats, 'repeat')}",
            (point.low_s, point.high_s),
        )
        for point in points
    ]
    times = [value for point in points for value in (point.low_s, point.high_s, point.fitted_s)]
    return Lines(
        f"{name}, {_RANKS.get(collective.level, collective.level)} ({collective.ranks})",
        axes.logarithmic("bytes", [float(point.bytes) for point in points], formatting.axis_size),
        axes.logarithmic("time", times, duration),
        [
            Series("fitted", [(float(point.bytes), point.fitted_s) for point in points], color=7),
            Series("measured", points=measured),
        ],
        "measured",
    )


def _collectives(network: Network) -> Table:
    return Table(
        "Collectives, from the fits",
        ("collective", "among", "start-up", "between", "fit’s error"),
        [
            (
                collective.kind.replace("_", "-"),
                f"{_RANKS.get(collective.level, collective.level)} ({collective.ranks})",
                duration(collective.startup_s),
                f"{duration(collective.startup_low_s)} and {duration(collective.startup_high_s)}",
                f"{collective.residual:.0%}" if collective.points else "–",
            )
            for collective in network.collectives
        ],
        _source(network),
        note="Start-up is the time of a collective without any bytes, with its 90 % interval. The fit’s error is the "
        "root mean square of its relative errors.",
    )
