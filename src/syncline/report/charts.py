"""The contents of a page, as data: sections, and their charts, which are bars, lines and tables. A timeline is bars.

The modules in `sections` build them, and the macros in `charts.html.j2` draw them. Every element that can be pointed at
has a tooltip with its numbers, and the same numbers as `data-` attributes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from syncline.units import duration_text, size_text

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
    "between": "between steps: optimizer, data, logging",
    "ended": "exchanges that ended",
    "failed": "exchanges that failed",
}
"""What a bar's colour means, the same on every chart."""
_SEEN = 0.002  # part of a chart's width from which a bar can be seen, and its colour is in the legend
_SMALLEST = 1e-300  # anything smaller is drawn as 0: there are no round numbers below it


class Bar(msgspec.Struct, frozen=True):
    """One bar of a row; a bar of kind `predicted` is drawn as a tick at its start."""

    kind: str
    start: float
    end: float
    tooltip: str
    data: Mapping[str, str | float] = {}
    label: str = ""  # drawn on the bar if it is wide enough
    line: int = 0  # line of the row, for bars that overlap in time
    inner: bool = False  # true for a part of another bar, drawn thinly on top of it


class Row(msgspec.Struct, frozen=True):
    name: str
    bars: tuple[Bar, ...] = ()
    cells: tuple[str, ...] = ()  # texts to the right of the bars, one per column
    quartiles: tuple[float, float] | None = None
    note: str = ""
    strong: bool = False


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


class Bars(msgspec.Struct, frozen=True):
    """Rows of bars on one scale that starts at 0."""

    caption: str
    rows: Sequence[Row]
    columns: Sequence[str] = ()  # names of the cells; narrow screens show only the first two
    source: str = ""  # `measured`, `predicted` or what else the badge says
    limit: tuple[float, str] | None = None  # a vertical line through all rows, and its name
    note: str = ""
    unit: str = "seconds"  # `seconds` or `bytes`
    compact: bool = False  # true for a timeline: no space between rows
    common_end: float = 0.0  # end of the scale where several charts share one

    @property
    def end(self) -> float:
        whiskers = [row.quartiles[1] for row in self.rows if row.quartiles is not None]
        end = max([self.common_end, *whiskers, *(bar.end for row in self.rows for bar in row.bars)])
        return end if math.isfinite(end) and end > 0 else 1.0

    @property
    def ticks(self) -> list[tuple[float, str]]:
        text = size_text if self.unit == "bytes" else duration_text
        return [(tick, text(tick) if tick else "0") for tick in _round_numbers(self.end, 4)]

    @property
    def legend_entries(self) -> list[tuple[str, str]]:
        bars = [bar for row in self.rows for bar in row.bars]
        drawn = {bar.kind for bar in bars if bar.kind == "predicted" or bar.end - bar.start >= _SEEN * self.end}
        return [(f"k-{kind}", text) for kind, text in KINDS.items() if kind in drawn]


class Axis(msgspec.Struct, frozen=True):
    name: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False

    def percent(self, value: float) -> float:
        """Return 0 for the start of the axis, 100 for its end."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, self.low * 1e-3))
        return 100 * (value - low) / (high - low) if high > low else 0.0


def linear_axis(name: str, values: Iterable[float], text: Callable[[float], str], *, margin: float = 1.04) -> Axis:
    """Start at 0, or at the smallest value if that is negative, and end a little above the largest."""
    finite = [0.0, *(value for value in values if math.isfinite(value))]
    low, high = min(finite) * margin, max(finite) * margin
    if high - low <= _SMALLEST:
        high = low + 1.0
    ticks = sorted({*_round_numbers(high), *(-tick for tick in _round_numbers(-low))})
    return Axis(name, low, high, tuple((tick, text(tick)) for tick in ticks))


def narrow_axis(name: str, values: Iterable[float], text: Callable[[float], str]) -> Axis:
    """Start a little below the smallest value, and end a little above the largest: 0 is far from all of them."""
    finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    margin = 0.06 * (max(finite) - min(finite)) or 0.5
    low, high = min(finite) - margin, max(finite) + margin
    spacing = _round_numbers(high - low)[1]
    ticks = [spacing * index for index in range(math.ceil(low / spacing), math.floor(high / spacing) + 1)]
    return Axis(name, low, high, tuple((tick, text(tick)) for tick in ticks))


def log_axis(name: str, values: Iterable[float], text: Callable[[float], str]) -> Axis:
    """Label powers of ten; where there are fewer than three, also 2 and 5 times those."""
    positive = [value for value in values if math.isfinite(value) and value > _SMALLEST] or [1.0, 10.0]
    low, high = min(positive) / 1.3, max(positive) * 1.3
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [10.0**power for power in powers if low <= 10.0**power <= high]
    if len(ticks) < 3:
        ticks = [times * 10.0**power for power in powers for times in (1, 2, 5) if low <= times * 10.0**power <= high]
    if len(ticks) < 2:
        ticks = sorted({min(positive), max(positive)})
    return Axis(name, low, high, tuple((tick, text(tick)) for tick in ticks[:: 1 + len(ticks) // 8]), log=True)


def count_axis(name: str, values: Iterable[int]) -> Axis:
    """Label every value, on a logarithmic scale."""
    known = sorted(set(values))
    return Axis(name, known[0] / 1.15, known[-1] * 1.15, tuple((float(v), f"{v:,}") for v in known), log=True)


def _round_numbers(largest: float, wanted: int = 5) -> tuple[float, ...]:
    """Return about `wanted` round numbers from 0 up to `largest`."""
    if not (math.isfinite(largest) and largest > _SMALLEST):
        return (0.0,)
    rough = largest / wanted
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * times for times in (1, 2, 2.5, 5, 10) if power * times >= rough * 0.999)
    return tuple(step * index for index in range(int(largest / step * (1 + 1e-9)) + 1))


class Point(msgspec.Struct, frozen=True):
    x: float
    y: float
    tooltip: str
    quartiles: tuple[float, float] | None = None


class Series(msgspec.Struct, frozen=True):
    name: str
    line: Sequence[tuple[float, float]] = ()
    points: Sequence[Point] = ()
    band: Sequence[tuple[float, float, float]] = ()  # x, low and high
    dashed: bool = False
    color: int = 0  # 0 to 7


class Lines(msgspec.Struct, frozen=True):
    """Lines, points and bands over two axes."""

    caption: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    source: str = ""
    note: str = ""
    quiet: bool = False  # show points only when they are pointed at

    @property
    def legend_entries(self) -> list[tuple[str, str]]:
        return [(f"h{series.color}{' dashed' if series.dashed else ''}", series.name) for series in self.series]

    def path(self, points: Sequence[tuple[float, float]]) -> str:
        return "M" + " L".join(f"{self.x.percent(x):.2f} {100 - self.y.percent(y):.2f}" for x, y in points)

    def outline(self, band: Sequence[tuple[float, float, float]]) -> str:
        return self.path([*((x, high) for x, _, high in band), *((x, low) for x, low, _ in reversed(band))]) + " Z"


class HeatCell(msgspec.Struct, frozen=True):
    text: str
    tooltip: str
    heat: int  # 0 to 8: how strong its colour is
    value: float


class Table(msgspec.Struct, frozen=True):
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | HeatCell]]
    source: str = ""
    note: str = ""

    @property
    def heated(self) -> bool:
        return any(isinstance(cell, HeatCell) for row in self.rows for cell in row)

    @property
    def text_columns(self) -> set[int]:
        """Columns that hold words, which are aligned to the left."""
        cells = [(column, cell) for row in self.rows for column, cell in enumerate(row) if isinstance(cell, str)]
        return {column for column, cell in cells if cell and cell != "–" and not cell.lstrip("+-")[:1].isdigit()}


Chart = Bars | Lines | Table


class Section(msgspec.Struct, frozen=True):
    name: str  # also its address on the page: `#timeline`
    title: str
    lead: str = ""
    charts: Sequence[Chart | Sequence[Lines]] = ()  # line charts in an inner sequence are drawn small, side by side
    points: Sequence[str] = ()  # sentences, as a list
    commands: Sequence[tuple[str, str]] = ()  # pairs of a purpose, such as "Predict again", and a command
