"""Numbers as people read them: rounded to what they mean, never without a unit."""

from __future__ import annotations

import dataclasses


def ms(value: float, unit: str = " ms") -> str:
    return f"{value:.0f}{unit}" if value >= 100 else f"{value:.1f}{unit}"


def step(seconds: float) -> str:
    """What a step, or a part of one, takes."""
    return ms(seconds * 1e3)


def fine(seconds: float) -> str:
    """What may be much less than a step, to three digits."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 or not seconds else f"{seconds * 1e6:.3g} µs"


def size(nbytes: float | None) -> str:
    if nbytes is None:
        return "–"
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes:.0f} B"


def short_size(nbytes: float) -> str:
    """Of round numbers, on an axis."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:g} {unit}"
    return f"{nbytes:g} B"


def rate(bits_per_s: float) -> str:
    for unit, scale in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits_per_s >= 0.9995 * scale:
            return (
                f"{bits_per_s / scale:.3g} {unit}"
                if bits_per_s < 999.5 * scale
                else f"{bits_per_s / scale:,.0f} {unit}"
            )
    return f"{bits_per_s:.3g} bit/s"


def speed(ratio: float | None) -> str:
    """A ratio of times, as people say it."""
    if ratio is None or ratio <= 0:
        return "–"
    return f"{1 / ratio:.2f}× faster" if ratio < 1 else f"{ratio:.2f}× slower"


def pace(ratio: float) -> str:
    """The same, where a few per cent are nothing."""
    return "at the same speed" if abs(ratio - 1) <= 0.03 else speed(ratio)


def share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "–"


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def listed(words: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join([*([", ".join(words[:-1])] if words[1:] else []), *words[-1:]])


def exchange(one: object) -> str:
    """Its type, and what is not as it is by default."""
    usual = type(one)()
    parts = []
    for field in dataclasses.fields(one):  # type: ignore[arg-type]
        value = getattr(one, field.name)
        if value != getattr(usual, field.name):
            parts.append(f"{field.name}={exchange(value) if dataclasses.is_dataclass(value) else repr(value)}")
    return f"{type(one).__name__}({', '.join(parts)})"
