"""Quantities as people write them."""

from __future__ import annotations


def size_text(nbytes: float) -> str:
    """To three digits, in decimal units: `1.5 MB`."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= 0.9995 * scale:  # what rounds to 1,000 of the smaller unit is 1 of this one
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes:.0f} B"
