"""Numbers as text: rounded to the digits that mean something, and always with a unit."""

from __future__ import annotations

import dataclasses

_SIZES = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))


def milliseconds(value: float, unit: str = " ms") -> str:
    return f"{value:.0f}{unit}" if value >= 100 else f"{value:.1f}{unit}"


def step_time(seconds: float) -> str:
    """Format the time of a step, or of a part of one."""
    return milliseconds(seconds * 1e3)


def duration(seconds: float) -> str:
    """Format any time, to three digits."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 or not seconds else f"{seconds * 1e6:.3g} µs"


def size(nbytes: float | None) -> str:
    if nbytes is None:
        return "–"
    unit, scale = next((entry for entry in _SIZES[:-1] if nbytes >= entry[1]), _SIZES[-1])
    return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes / scale:.2f} {unit}"


def axis_size(nbytes: float) -> str:
    """Format a round number of bytes."""
    unit, scale = next((entry for entry in _SIZES if nbytes >= entry[1]), _SIZES[-1])
    return f"{nbytes / scale:g} {unit}"


def rate(bits_per_s: float) -> str:
    for unit, scale in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits_per_s >= 0.9995 * scale:
            value = bits_per_s / scale
            return f"{value:.3g} {unit}" if value < 999.5 else f"{value:,.0f} {unit}"
    return f"{bits_per_s:.3g} bit/s"


def speedup(ratio: float | None) -> str:
    """Format a ratio of times: `1.50× faster`."""
    if ratio is None or ratio <= 0:
        return "–"
    return f"{1 / ratio:.2f}× faster" if ratio < 1 else f"{ratio:.2f}× slower"


def clear_speedup(ratio: float) -> str:
    """The same, but a difference of up to 3 % counts as none."""
    return "at the same speed" if abs(ratio - 1) <= 0.03 else speedup(ratio)


def share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "–"


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def exchange(settings: object) -> str:
    """Format an exchange as its type and those of its settings that differ from the defaults."""
    defaults = type(settings)()
    parts = []
    for field in dataclasses.fields(settings):  # type: ignore[arg-type]
        value = getattr(settings, field.name)
        if value != getattr(defaults, field.name):
            parts.append(f"{field.name}={exchange(value) if dataclasses.is_dataclass(value) else repr(value)}")
    return f"{type(settings).__name__}({', '.join(parts)})"
