"""Quantities as text, for messages and tables; and sizes parsed from text."""

from __future__ import annotations

import re
from collections.abc import Sequence

from syncline.errors import UsageError


def size_text(nbytes: float | None) -> str:
    """Format bytes in decimal units, to three digits: `1.5 MB`; None as a dash."""
    if nbytes is None:
        return "–"
    return _scaled_text(nbytes, (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))) or f"{nbytes:.0f} B"


def rate_text(bits_per_s: float) -> str:
    """Format a rate in decimal units, to three digits: `200 Mbit/s`."""
    scales = (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3))
    return _scaled_text(bits_per_s, scales) or f"{bits_per_s:.3g} bit/s"


def duration_text(seconds: float) -> str:
    """Format a time of any length, to three digits: `50 µs`, `1.5 s`."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 or not seconds else f"{seconds * 1e6:.3g} µs"


def milliseconds_text(seconds: float, unit: str = " ms") -> str:
    """Format the time of a step: `61.4 ms`, `135 ms`."""
    return f"{seconds * 1e3:.{0 if seconds >= 0.1 else 1}f}{unit}"


def milliseconds_range(low_s: float, high_s: float, unit: str = " ms") -> str:
    """Format a range of step times: `61.4–135 ms`."""
    return f"{milliseconds_text(low_s, unit='')}–{milliseconds_text(high_s, unit)}"


def speedup_text(ratio: float, same: float = 0.0) -> str:
    """Format a ratio of times: `1.50× faster`. A difference of up to `same` counts as none."""
    if same and abs(ratio - 1) <= same:
        return "at the same speed"
    return f"{1 / ratio:.2f}× faster" if 0 < ratio < 1 else f"{ratio:.2f}× slower"


def count_text(number: int, noun: str) -> str:
    """Format a number with its noun: `1 bucket`, `3 buckets`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def ranks_text(ranks: Sequence[int], most: int | None = None) -> str:
    """Format ranks: `rank 1`, `ranks 0, 2`. Beyond `most` ranks, the others are counted: `ranks 0, 2 and 5 more`."""
    named = ", ".join(map(str, ranks[:most]))
    left = 0 if most is None else max(0, len(ranks) - most)
    return f"rank{'s' if len(ranks) > 1 else ''} {named}" + (f" and {left} more" if left else "")


def format_bytes(size: float) -> str:
    """Format a memory size in GiB or MiB, to three digits: `1.5 GiB`."""
    value, unit = (size / 2**30, "GiB") if size >= 2**30 else (size / 2**20, "MiB")
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(size: object) -> int:
    """Return the bytes of a memory size like `"8GiB"` or `"500MB"`, or of a number of bytes."""
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match is None or match[2].upper() not in _UNITS or not float(match[1]):
        raise UsageError(f"{size!r} is not a size of memory: write it like 8GiB or 500MB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _scaled_text(value: float, scales: Sequence[tuple[str, float]]) -> str:
    """Format a value in the largest unit that it reaches, or return an empty text."""
    for unit, scale in scales:
        if value >= 0.9995 * scale:  # a value that rounds to 1,000 of the smaller unit is 1 of this one
            scaled = value / scale
            return f"{scaled:.3g} {unit}" if scaled < 999.5 else f"{scaled:,.0f} {unit}"
    return ""
