"""The kinds of chart on a page, as data: bars (timelines are bars too), lines and tables.

Sections build them, and the macros in `charts.html.j2` draw them. Whatever can be pointed at carries a tooltip with its
numbers, and the same numbers as `data-` attributes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from syncline.report import axes, formatting
from syncline.report.axes import Axis

KINDS = {
    "compute": "computation",
    "hidden": "communication hidden behind computation",
    "exposed": "exposed communication",
    "waiting": "waiting for slower ranks",
    "own": "copies, hooks and the exchange’s own work",
    "chosen": "the plan",
    "plain": "current schedule",
    "other": "alternatives",
    "change": "can be changed in the script",
    "lossy": "changes numerics",
    "hardware": "needs different hardware",
    "predicted": "predicted",
}
"""What a bar's colour means, the same on every chart."""


@dataclass(frozen=True)
class Bar:
    """One bar of a row; a bar of kind `predicted` is drawn as a tick at its start."""

    kind: str
    start: float
    end: float
    tooltip: str
    data: Mapping[str, str | float] = field(default_factory=dict)
    label: str = ""
    """Drawn on the bar if it is wide enough."""
    line: int = 0
    """Line of the row, for bars that overlap in time."""
    inner: bool = False
    """True for a part of another bar, drawn thinly on top of it."""


@dataclass(frozen=True)
class Row:
    name: str
    bars: tuple[Bar, ...] = ()
    cells: tuple[str, ...] = ()
    """Texts to the right of the bars, one per column."""
    quartiles: tuple[float, float] | None = None
    note: str = ""
    strong: bool = False

    @property
    def lines(self) -> int:
        return 1 + max((bar.line for bar in self.bars), default=0)


def time_bar(kind: str, seconds: float, tooltip: str, start: float = 0.0, **data: str | float) -> Bar:
    return Bar(kind, start, start + seconds, tooltip, {"seconds": seconds, **data})


def stacked(parts: Iterable[tuple[str, float, str]], **data: str | float) -> tuple[Bar, ...]:
    """Put bars end to end, each given as kind, seconds and tooltip; parts without length are left out."""
    bars, start = [], 0.0
    for kind, seconds, tooltip in parts:
        if seconds > 1e-9:
            bars.append(time_bar(kind, seconds, tooltip, start, **data))
        start += seconds
    return tuple(bars)


@dataclass(frozen=True)
class Bars:
    """Rows of bars on one scale that starts at 0."""

    caption: str
    rows: tuple[Row, ...]
    columns: tuple[str, ...] = ()
    """Names of the cells; narrow screens show only the first two."""
    source: str = ""
    """`measured`, `predicted` or what else the badge says."""
    limit: tuple[float, str] | None = None
    """A vertical line through all rows, and its name."""
    note: str = ""
    unit: str = "seconds"
    """Or `bytes`."""
    compact: bool = False
    """True for a timeline: no space between rows."""
    legend: tuple[str, ...] | None = None
    """Kinds to explain; None for those that are drawn."""
    common_end: float = 0.0
    """End of the scale where several charts share one."""
    template: ClassVar[str] = "bars"

    @property
    def kinds(self) -> tuple[str, ...]:
        drawn = {bar.kind for row in self.rows for bar in row.bars}
        return tuple(kind for kind in KINDS if kind in drawn)

    @property
    def end(self) -> float:
        ends = [bar.end for row in self.rows for bar in row.bars]
        ends += [row.quartiles[1] for row in self.rows if row.quartiles is not None]
        end = max([self.common_end, *ends])
        return end if math.isfinite(end) and end > 0 else 1.0

    @property
    def ticks(self) -> list[tuple[float, str]]:
        text = formatting.axis_size if self.unit == "bytes" else axes.time_text(self.end)
        return [(tick, text(tick)) for tick in axes.round_numbers(self.end, 4)]

    @property
    def legend_entries(self) -> list[tuple[str, str]]:
        """CSS class and text."""
        return [(f"k-{kind}", KINDS[kind]) for kind in (self.kinds if self.legend is None else self.legend)]


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    tooltip: str
    quartiles: tuple[float, float] | None = None


@dataclass(frozen=True)
class Series:
    name: str
    line: Sequence[tuple[float, float]] = ()
    points: Sequence[Point] = ()
    band: Sequence[tuple[float, float, float]] = ()
    """x, low and high."""
    dashed: bool = False
    color: int = 0
    """0 to 7."""


@dataclass(frozen=True)
class Lines:
    """Lines, points and bands over two axes."""

    caption: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    source: str = ""
    note: str = ""
    quiet: bool = False
    """Show points only when they are pointed at."""
    template: ClassVar[str] = "lines"

    @property
    def legend_entries(self) -> list[tuple[str, str]]:
        return [(f"h{one.color}{' dashed' if one.dashed else ''}", one.name) for one in self.series]

    def path(self, points: Sequence[tuple[float, float]]) -> str:
        return "M" + " L".join(f"{self.x.percent(x):.2f} {100 - self.y.percent(y):.2f}" for x, y in points)

    def outline(self, band: Sequence[tuple[float, float, float]]) -> str:
        return self.path([*((x, high) for x, _, high in band), *((x, low) for x, low, _ in reversed(band))]) + " Z"


@dataclass(frozen=True)
class HeatCell:
    text: str
    tooltip: str
    heat: int
    """0 to 8: how strong its colour is."""
    value: float


@dataclass(frozen=True)
class Table:
    caption: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[str | HeatCell]]
    source: str = ""
    note: str = ""
    template: ClassVar[str] = "table"

    @property
    def heated(self) -> bool:
        return any(isinstance(cell, HeatCell) for row in self.rows for cell in row)

    @property
    def text_columns(self) -> set[int]:
        """Columns that hold words, which are aligned to the left."""
        return {
            column
            for row in self.rows
            for column, cell in enumerate(row)
            if isinstance(cell, str) and cell and cell != "–" and not cell[0].isdigit()
        }


Chart = Bars | Lines | Table
