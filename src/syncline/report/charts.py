"""Blocks as HTML and SVG. Every mark carries its figures and says them; every text from outside is escaped.

Nothing has a fixed width: places along a chart are per cents, lines are drawn in a box that stretches with strokes that
do not, and letters keep their size on a screen of any width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

from markupsafe import Markup

from syncline.report import figures, scales
from syncline.report.blocks import KINDS, Axis, Block, Cell, Dot, Lines, Segment, Series, Table, Track, Tracks

_ROW_PX, _BAR_PX = 24, 16
_PLOT_PX, _SMALL_PX = 280, 170
_HUES = 8
_LONGEST = 28
"""Letters of a column's name."""
_EMPTY = Markup("")


def tag(name: str, /, *inside: object, **attributes: object) -> Markup:
    """An element. `class_` is class, `data_x` is data-x; what is None is left out; what is not Markup is escaped."""
    pairs = (
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), _text(value))
        for key, value in attributes.items()
        if value is not None
    )
    return Markup("<{0}{1}>{2}</{0}>").format(name, _EMPTY.join(pairs), _EMPTY.join(map(_part, inside)))


def _part(inside: object) -> str:
    return inside if isinstance(inside, str) else _EMPTY.join(map(_part, inside))  # type: ignore[call-overload]


def _text(value: object) -> object:
    """Figures in markup are short: nobody sees a thousandth of a pixel, or needs more digits than were measured."""
    return f"{value:.6g}" if isinstance(value, float) else value


def draw(block: Block) -> Markup:
    if isinstance(block, Tracks):
        return _tracks(block)
    return _lines(block) if isinstance(block, Lines) else _table(block)


def _caption(name: str, text: str, source: str) -> Markup:
    badge = tag("span", source, class_=f"badge {'measured' if source == 'measured' else 'predicted'}")
    return tag(name, tag("span", text), " ", badge if source else _EMPTY)


def _mark(name: str, says: str, first: bool, class_: str, *inside: object, **attributes: object) -> Markup:
    """What can be pointed at, and reached with the keyboard: the first of a chart with Tab, the others with arrows."""
    tabindex = 0 if first else -1
    return tag(name, tag("title", says), *inside, class_=f"mark {class_}", role="img", tabindex=tabindex, **attributes)


class _First:
    """Whether a mark is its chart's first."""

    def __init__(self) -> None:
        self._asked = False

    def __call__(self) -> bool:
        asked, self._asked = self._asked, True
        return not asked


def _tracks(block: Tracks) -> Markup:
    first = _First()
    end = block.end if math.isfinite(block.end) and block.end > 0 else 1.0
    ticks = scales.rounds(end, 4)
    body = tag("tbody", [_track(block, row, end, ticks, first) for row in block.rows])
    head = ""
    if block.columns:
        names = (
            tag("th", _shortened(name), scope="col", class_=_wide(place)) for place, name in enumerate(block.columns)
        )
        head = tag("thead", tag("tr", tag("td"), tag("td"), list(names)))
    foot = tag("tfoot", tag("tr", tag("td"), tag("td", _axis(block, end, ticks)), _padding(block)))
    return tag(
        "figure",
        tag(
            "table",
            _caption("caption", block.caption, block.source),
            head,
            body,
            foot,
            class_="tracks whole" if block.whole else "tracks",
        ),
        _legend([(f"k-{kind}", KINDS[kind]) for kind in block.legend], block.marked),
        tag("p", block.note, class_="note") if block.note else "",
        class_="chart",
    )


def _wide(place: int) -> str | None:
    """Columns that narrow pages leave out."""
    return "wide" if place > 1 else None


def _shortened(name: str) -> str:
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"


def _padding(block: Tracks) -> list[Markup]:
    return [tag("td", class_=_wide(place)) for place in range(len(block.columns))]


def _track(block: Tracks, row: Track, end: float, ticks: Sequence[float], first: _First) -> Markup:
    height = _ROW_PX * row.rows
    inside = [_rule("grid", 100 * tick / end, height) for tick in ticks]
    inside += [_segment(one, end, first) for one in row.segments]
    if row.spread is not None:
        inside += list(_whisker(row.spread, end))
    for marker in row.markers:
        at = _percent(marker.at, end)
        inside.append(
            _mark(
                "rect",
                marker.says,
                first(),
                "foreseen",
                x=at,
                y=1,
                width=4,
                height=_ROW_PX - 2,
                transform="translate(-2 0)",
                **_data(marker.data),
            )
        )
    if block.line is not None:
        inside.append(_rule("limit", 100 * block.line[0] / end, height))
    name = tag("th", row.name, tag("small", row.note) if row.note else "", scope="row")
    drawn = tag("svg", inside, width="100%", height=height, role="group", aria_label=row.name)
    cells = [tag("td", text, class_=f"figure {_wide(place) or ''}".strip()) for place, text in enumerate(row.figures)]
    return tag("tr", name, tag("td", drawn, class_="drawn"), cells, class_="strong" if row.strong else None)


def _percent(value: float, end: float) -> str:
    return f"{100 * max(0.0, value) / end:.3f}%"


def _rule(class_: str, percent: float, height: float) -> Markup:
    at = f"{percent:.3f}%"
    return tag("line", class_=class_, x1=at, x2=at, y1=0, y2=height)


def _segment(one: Segment, end: float, first: _First) -> Markup:
    start, width = 100 * max(0.0, one.start) / end, 100 * max(0.0, one.end - one.start) / end
    own = one.kind == "own" and "bucket" in one.data  # part of a bucket's bar, and drawn on it
    top = one.row * _ROW_PX + (_ROW_PX - _BAR_PX) // 2
    bar = _mark(
        "rect",
        one.says,
        first(),
        f"k-{one.kind}{' inner' if own else ''}",
        x=f"{start:.3f}%",
        width=f"{max(width, 0.1):.3f}%",
        y=top + (_BAR_PX * 2 // 3 if own else 0),
        height=_BAR_PX // 3 if own else _BAR_PX,
        data_kind=one.kind,
        **_data(one.data),
    )
    # A letter takes about a per cent and a half of the narrowest chart.
    if not one.label or width < 2 + 1.4 * len(one.label):
        return bar
    text = tag(
        "text", one.label, x=f"{start + width / 2:.3f}%", y=top + 12, class_=f"on on-{one.kind}", aria_hidden="true"
    )
    return bar + text


def _data(data: object) -> dict[str, object]:
    return {f"data_{key}": value for key, value in dict(data).items()}  # type: ignore[call-overload]


def _whisker(spread: tuple[float, float], end: float) -> Iterator[Markup]:
    low, high = (_percent(value, end) for value in spread)
    middle = _ROW_PX / 2
    yield tag("line", class_="whisker", x1=low, x2=high, y1=middle, y2=middle)
    for at in (low, high):
        yield tag("line", class_="whisker", x1=at, x2=at, y1=middle - 4, y2=middle + 4)


def _axis(block: Tracks, end: float, ticks: Sequence[float]) -> Markup:
    text = figures.short_size if block.unit == "bytes" else functools.partial(scales.seconds_text, most=end)
    inside = []
    for place, value in enumerate(ticks):
        percent = 100 * value / end
        anchor = "start" if place == 0 else "end" if percent > 94 else "middle"
        edge = place in (0, len(ticks) - 1)
        inside.append(
            tag("text", text(value), x=f"{percent:.3f}%", y=14, text_anchor=anchor, class_=None if edge else "mid")
        )
    height = 20
    if block.line is not None:
        at, says = block.line
        percent = 100 * at / end
        anchor = "start" if percent < 50 else "end"
        inside.append(tag("text", says, x=f"{percent:.3f}%", y=32, text_anchor=anchor, class_="limit"))
        height = 38
    return tag("svg", inside, width="100%", height=height, class_="axis", aria_hidden="true")


def _legend(entries: Sequence[tuple[str, str]], marked: str = "") -> Markup:
    items = [tag("li", tag("span", class_=f"swatch {class_}"), name) for class_, name in entries]
    if marked:
        items.append(tag("li", tag("span", class_="swatch foreseen"), marked))
    return tag("ul", items, class_="legend") if len(items) > 1 or marked else _EMPTY


def _lines(block: Lines) -> Markup:
    first = _First()
    height = _SMALL_PX if block.small else _PLOT_PX
    inside: list[Markup] = []
    for value, text in block.y.ticks:
        at = f"{_down(block.y, value):.3f}%"
        inside.append(tag("line", class_="grid", x1="0", x2="100%", y1=at, y2=at))
        inside.append(tag("text", text, x=-8, y=at, dy="0.32em", text_anchor="end", class_="tick"))
    for place, (value, text) in enumerate(block.x.ticks):
        at = f"{_along(block.x, value):.3f}%"
        inside.append(tag("line", class_="grid", x1=at, x2=at, y1="0", y2="100%"))
        shown = "tick" if place % 2 == 0 else "tick mid"
        inside.append(tag("text", text, x=at, y=height + 18, text_anchor="middle", class_=shown))
    inside.append(tag("text", block.x.name, x="100%", y=height + 36, text_anchor="end", class_="tick name"))
    shapes = [shape for one in block.series for shape in _shapes(block, one)]
    inside.append(
        tag(
            "svg",
            shapes,
            viewBox="0 0 100 100",
            preserveAspectRatio="none",
            width="100%",
            height="100%",
            aria_hidden="true",
        )
    )
    inside += [_dot(block, one, dot, first) for one in block.series for dot in one.dots]
    drawn = tag("svg", inside, width="100%", height=height, role="group", aria_label=block.caption)
    classes = "chart lines small" if block.small else "chart lines"
    return tag(
        "figure",
        _caption("figcaption", block.caption, block.source),
        tag("p", block.y.name, class_="axis-name"),
        tag("div", drawn, class_="plot"),
        "" if block.small else _legend([(_hue(one) + " dashed" * one.dashed, one.name) for one in block.series]),
        tag("p", block.note, class_="note") if block.note else "",
        class_=f"{classes} quiet" if block.quiet else classes,
    )


def _hue(one: Series) -> str:
    return f"h{one.hue % _HUES}"


def _along(axis: Axis, value: float) -> float:
    return 100 * scales.place(axis, value)


def _down(axis: Axis, value: float) -> float:
    return 100 - 100 * scales.place(axis, value)


def _shapes(block: Lines, one: Series) -> Iterator[Markup]:
    hue = _hue(one)
    if one.band:
        there = [(x, high) for x, _, high in one.band]
        back = [(x, low) for x, low, _ in reversed(one.band)]
        yield tag("path", d=f"{_path(block, there + back)} Z", class_=f"band {hue}")
    if len(one.line) > 1:
        yield tag("path", d=_path(block, one.line), class_=f"line {hue}{' dashed' if one.dashed else ''}")


def _path(block: Lines, points: Sequence[tuple[float, float]]) -> str:
    return "M" + " L".join(f"{_along(block.x, x):.2f} {_down(block.y, y):.2f}" for x, y in points)


def _dot(block: Lines, one: Series, dot: Dot, first: _First) -> Markup:
    x, y, hue = f"{_along(block.x, dot.x):.3f}%", f"{_down(block.y, dot.y):.3f}%", _hue(one)
    whisker = _EMPTY
    if dot.low is not None and dot.high is not None:
        ends = (f"{_down(block.y, value):.3f}%" for value in (dot.low, dot.high))
        whisker = tag("line", class_="whisker", x1=x, x2=x, y1=next(ends), y2=next(ends))
    circle = _mark(
        "circle",
        dot.says,
        first(),
        f"dot {hue}",
        cx=x,
        cy=y,
        r=3.5 if block.small else 4.5,
        data_series=one.name,
        data_x=dot.x,
        data_y=dot.y,
    )
    return whisker + circle


def _table(block: Table) -> Markup:
    first = _First()
    words = [place for place in range(len(block.columns)) if _has_words([row[place].text for row in block.rows])]
    aligned = ["words" if place in words else None for place in range(len(block.columns))]
    names = [tag("th", name, scope="col", class_=aligned[place]) for place, name in enumerate(block.columns)]
    rows = [
        tag("tr", [_cell(cell, place, aligned[place], first) for place, cell in enumerate(row)]) for row in block.rows
    ]
    heated = any(cell.heat is not None for row in block.rows for cell in row)
    table = tag(
        "table",
        _caption("caption", block.caption, block.source),
        tag("thead", tag("tr", names)),
        tag("tbody", rows),
        class_="data matrix" if heated else "data",
    )
    return tag(
        "figure",
        tag("div", table, class_="scroll", role="region", aria_label=block.caption, tabindex=0),
        tag("p", block.note, class_="note") if block.note else "",
        class_="chart" if heated else None,
    )


def _has_words(texts: Sequence[str]) -> bool:
    """Whether a column holds something else than figures."""
    return any(text and not text[0].isdigit() and text != "–" for text in texts)


def _cell(cell: Cell, place: int, aligned: str | None, first: _First) -> Markup:
    if cell.heat is not None:
        tabindex = 0 if first() else -1
        class_ = f"mark heat heat-{cell.heat}"
        return tag("td", cell.text, title=cell.says, class_=class_, tabindex=tabindex, data_value=cell.value)
    long = "prose" if len(cell.text) > _LONGEST + 8 else ""
    class_ = f"{aligned or ''} {long}".strip()
    given = {"title": cell.says or None, "class_": class_ or None, "data_value": cell.value}
    return tag("td", cell.text, **given) if place else tag("th", cell.text, scope="row", **given)
