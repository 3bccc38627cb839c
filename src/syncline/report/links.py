"""What a cluster's links carry, and what collectives over them take."""

from __future__ import annotations

from collections.abc import Iterator

from syncline.records.link_costs import Collective
from syncline.records.network import Network
from syncline.report import commands, figures, scales, verdict
from syncline.report.blocks import Block, Cell, Dot, Lines, Section, Series, Table
from syncline.report.story import Story

_MOST_HOSTS, _MOST_FITS = 16, 12
_HEATS = 8
_WHERE = {"world": "all ranks", "hosts": "one rank of each host", "local": "the ranks of a host"}
LINKS = {"host": "hosts’ links", "rack": "links between racks", "local": "inside hosts"}


def links_section(network: Network, story: Story) -> Section:
    blocks: list[Block] = [_links(network)] if network.links else []
    if network.matrix_bytes_per_s:
        blocks.append(_matrix(network))
    blocks += _fits(network)
    if network.collectives:
        blocks.append(_collectives(network))
    said = verdict.of_network(network)
    lead = said if network.measured else f"{said} Nobody measured this: it is {network.how}."
    if any(one.points for one in network.collectives):
        lead += " In the small charts, points are what was measured, with quartiles, and lines what was fitted."
    return Section("links", "The links", lead, tuple(blocks), how=commands.of_network(story))


def _links(network: Network) -> Table:
    return Table(
        "What links carry of payload, in each direction",
        ("", "rate", "between", "sold as", "burst"),
        tuple(
            (
                Cell(LINKS.get(link.name, link.name)),
                Cell(figures.rate(link.bytes_per_s * 8), value=link.bytes_per_s),
                Cell(f"{figures.rate(link.low_bytes_per_s * 8)} and {figures.rate(link.high_bytes_per_s * 8)}"),
                Cell("–" if link.nominal_bps is None else figures.rate(link.nominal_bps)),
                Cell(figures.size(link.burst_bytes) if link.burst_bytes else "–"),
            )
            for link in network.links
        ),
        "measured" if network.measured else "assumed",
    )


def _matrix(network: Network) -> Table:
    """The stronger the colour, the faster."""
    rates = network.matrix_bytes_per_s
    shown = min(network.hosts, _MOST_HOSTS)
    most = max((value for row in rates for value in row), default=0.0)
    rows = []
    for source in range(shown):
        cells = [Cell(f"host {source}")]
        for target in range(shown):
            value = rates[source][target]
            if source == target:
                cells.append(Cell("", value=0.0))
                continue
            says = f"from host {source} to host {target}: {figures.rate(value * 8)}"
            heat = round(_HEATS * value / most) if most else 0
            cells.append(Cell(figures.rate(value * 8), says, heat, value))
        rows.append(tuple(cells))
    left = network.hosts - shown
    return Table(
        "From host to host, while every host sends to one other",
        ("from ↓ to →", *(f"host {target}" for target in range(shown))),
        tuple(rows),
        "measured",
        note=f"The first {shown} of {network.hosts} hosts." if left else "The stronger the colour, the faster.",
    )


def _fits(network: Network) -> Iterator[Lines]:
    fitted = [one for one in network.collectives if one.points]
    for one in fitted[:_MOST_FITS]:
        yield _fit(one)


def _fit(one: Collective) -> Lines:
    """Points and the line through them; both axes count in powers."""
    points = sorted(one.points, key=lambda point: point.bytes)
    name = one.kind.replace("_", "-")
    times = [value for point in points for value in (point.low_s, point.high_s, point.fitted_s)]
    return Lines(
        f"{name}, {_WHERE.get(one.level, one.level)} ({one.ranks})",
        scales.logarithmic("bytes", [float(point.bytes) for point in points], figures.short_size),
        scales.logarithmic("time", times, figures.fine),
        (
            Series("fitted", line=tuple((float(point.bytes), point.fitted_s) for point in points), hue=7),
            Series(
                "measured",
                dots=tuple(
                    Dot(
                        float(point.bytes),
                        point.median_s,
                        f"{name} of {figures.size(point.bytes)}: {figures.fine(point.median_s)}, quartiles "
                        f"{figures.fine(point.low_s)} to {figures.fine(point.high_s)}, fitted "
                        f"{figures.fine(point.fitted_s)}; {figures.count(point.repeats, 'repeat')}",
                        point.low_s,
                        point.high_s,
                    )
                    for point in points
                ),
                hue=0,
            ),
        ),
        "measured",
        small=True,
    )


def _collectives(network: Network) -> Table:
    return Table(
        "What collectives take, from the fits",
        ("collective", "among", "start-up", "between", "fit’s error"),
        tuple(
            (
                Cell(one.kind.replace("_", "-")),
                Cell(f"{_WHERE.get(one.level, one.level)} ({one.ranks})"),
                Cell(figures.fine(one.startup_s), value=one.startup_s),
                Cell(f"{figures.fine(one.startup_low_s)} and {figures.fine(one.startup_high_s)}"),
                Cell(f"{one.residual:.0%}" if one.points else "–"),
            )
            for one in network.collectives
        ),
        "measured" if network.measured else "assumed",
        note="Start-up: what one takes however little it carries, with its 90 % interval. Fit’s error: root mean "
        "square of relative errors.",
    )
