"""Axes of line charts: where they start and end, and which values are labelled."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

_SMALLEST = 1e-300
"""Anything smaller is drawn as 0: there are no round numbers below it."""
_MARGIN = 1.04


@dataclass(frozen=True)
class Axis:
    name: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False

    def percent(self, value: float) -> float:
        """0 at the start of the axis, 100 at its end."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, self.low * 1e-3))
        return 100 * (value - low) / (high - low) if high > low else 0.0


def round_numbers(largest: float, wanted: int = 5) -> tuple[float, ...]:
    """About `wanted` round numbers from 0 up to `largest`."""
    if not (math.isfinite(largest) and largest > _SMALLEST):
        return (0.0,)
    rough = largest / wanted
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * times for times in (1, 2, 2.5, 5, 10) if power * times >= rough * 0.999)
    return tuple(step * index for index in range(int(largest / step * (1 + 1e-9)) + 1))


def linear(name: str, values: Iterable[float], text: Callable[[float], str], *, margin: float = _MARGIN) -> Axis:
    """From 0, or from the smallest value if that is negative, to a little above the largest."""
    finite = [0.0, *(value for value in values if math.isfinite(value))]
    low, high = min(finite) * margin, max(finite) * margin
    if high - low <= _SMALLEST:
        high = low + 1.0
    ticks = sorted({*round_numbers(high), *(-tick for tick in round_numbers(-low))})
    return Axis(name, low, high, tuple((tick, text(tick)) for tick in ticks))


def time(name: str, seconds: Iterable[float], *, margin: float = _MARGIN) -> Axis:
    values = list(seconds)
    return linear(name, values, time_text(max(values, default=0.0)), margin=margin)


def time_text(largest: float) -> Callable[[float], str]:
    """Format seconds in the unit that suits the largest of them."""
    if largest >= 10:
        return lambda seconds: f"{seconds:g} s"
    if largest >= 1e-3 or not largest:
        return lambda seconds: f"{round(seconds * 1e3, 6):g} ms"
    return lambda seconds: f"{round(seconds * 1e6, 6):g} µs"


def logarithmic(name: str, values: Iterable[float], text: Callable[[float], str]) -> Axis:
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


def counts(name: str, values: Iterable[int]) -> Axis:
    """Label every value, on a logarithmic scale."""
    known = sorted(set(values)) or [1]
    return Axis(name, known[0] / 1.15, known[-1] * 1.15, tuple((float(v), f"{v:,}") for v in known), log=True)
