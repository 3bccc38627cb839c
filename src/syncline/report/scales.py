"""Where an axis begins and ends, and which of its places are named."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from syncline.report.blocks import Axis

_LEAST = 1e-300
"""Less is nothing: it has no round numbers below it."""


def rounds(most: float, wanted: int = 5) -> tuple[float, ...]:
    """Round numbers from 0 up to `most`, about so many."""
    if not (math.isfinite(most) and most > _LEAST):
        return (0.0,)
    rough = most / wanted
    power = 10 ** math.floor(math.log10(rough))
    width = next(power * times for times in (1, 2, 2.5, 5, 10) if power * times >= rough * 0.999)
    return tuple(width * place for place in range(int(most / width * (1 + 1e-9)) + 1))


def linear(name: str, values: Iterable[float], text: Callable[[float], str], *, ceiling: float = 1.04) -> Axis:
    """From 0 to a little above the largest."""
    most = max((value for value in values if math.isfinite(value)), default=0.0)
    high = most * ceiling if most > _LEAST else 1.0
    return Axis(name, 0.0, high, tuple((tick, text(tick)) for tick in rounds(high)))


def duration(name: str, seconds: Iterable[float], *, ceiling: float = 1.04) -> Axis:
    """The same for seconds, all of them in the unit that suits the largest."""
    values = list(seconds)
    most = max(values, default=0.0)
    return linear(name, values, lambda value: seconds_text(value, most), ceiling=ceiling)


def seconds_text(seconds: float, most: float) -> str:
    if most >= 10:
        return f"{seconds:g} s"
    return f"{round(seconds * 1e3, 6):g} ms" if most >= 1e-3 or not most else f"{round(seconds * 1e6, 6):g} µs"


def between(name: str, values: Iterable[float], text: Callable[[float], str]) -> Axis:
    """From 0, or from the smallest where that is below; for what may be negative."""
    known = [value for value in values if math.isfinite(value)]
    low, high = min([0.0, *known]), max([0.0, *known])
    if high - low <= _LEAST:
        high = low + 1.0
    ticks = [*(-tick for tick in rounds(-low)[1:]), *rounds(high)]
    return Axis(name, low * 1.04, high * 1.04, tuple((tick, text(tick)) for tick in sorted(ticks)))


def logarithmic(name: str, values: Iterable[float], text: Callable[[float], str]) -> Axis:
    """Over all that are positive, with a little to each side; powers of ten are named, or a few between them."""
    known = [value for value in values if math.isfinite(value) and value > _LEAST]
    least, most = (min(known), max(known)) if known else (1.0, 10.0)
    low, high = least / 1.3, most * 1.3
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [10.0**power for power in powers if low <= 10.0**power <= high]
    if len(ticks) < 3:
        ticks = [times * 10.0**power for power in powers for times in (1, 2, 5) if low <= times * 10.0**power <= high]
    if len(ticks) < 2:
        ticks = sorted({least, most})
    ticks = ticks[:: 1 + len(ticks) // 8]
    return Axis(name, low, high, tuple((tick, text(tick)) for tick in ticks), log=True)


def doubling(name: str, counts: Iterable[int]) -> Axis:
    """Numbers of something, each of which is named."""
    known = sorted(set(counts)) or [1]
    low, high = known[0] / 1.15, known[-1] * 1.15
    return Axis(name, low, high, tuple((float(value), f"{value:,}") for value in known), log=True)


def place(axis: Axis, value: float) -> float:
    """0 at its beginning, 1 at its end."""
    low, high = axis.low, axis.high
    if axis.log:
        low, high, value = math.log(low), math.log(high), math.log(max(value, axis.low * 1e-3))
    return (value - low) / (high - low) if high > low else 0.0
