"""Checks that several records share. Each raises a `ValueError` that begins with the field's name."""

from __future__ import annotations

import math
from collections.abc import Iterable

MOST = 10**18
"""Upper limit for counts and measurements, so that products of several stay finite."""
MOST_S = 1e15
"""Upper limit for seconds, so that sums and products stay finite."""


def check_schema(schema: int) -> None:
    if schema != 1:
        raise ValueError(f"schema: is {schema}, but this release supports 1")


def check_device(device: str, field: str = "device") -> None:
    if device not in ("cpu", "cuda"):
        raise ValueError(f"{field}: must be cpu or cuda, not {device}")


def check_number(value: float, field: str, *, positive: bool = False) -> None:
    if not (math.isfinite(value) and (value > 0 if positive else value >= 0)):
        raise ValueError(f"{field}: must be {'greater than' if positive else 'at least'} 0, not {value}")
    if value > MOST:
        raise ValueError(f"{field}: is too large")


def check_whole(value: int, field: str, least: int) -> None:
    if value < least:
        raise ValueError(f"{field}: must be at least {least}, not {value}")
    if value > MOST:
        raise ValueError(f"{field}: is too large")


def check_seconds(value: float, field: str, most: float = MOST_S) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{field}: must be at least 0 seconds, not {value}")
    if value > most:
        raise ValueError(f"{field}: is {value:g} seconds, which is too long")


def check_all_seconds(record: object, prefix: str, *fields: str) -> None:
    """Check several fields of `record`. `prefix` stands before their names in errors, as `ranks[0].`."""
    for field in fields:
        check_seconds(getattr(record, field), prefix + field)


def first_repeated(names: Iterable[str]) -> tuple[int, str] | None:
    """Return the index and the name of the first repetition, if there is one."""
    seen: set[str] = set()
    for index, name in enumerate(names):
        if name in seen:
            return index, name
        seen.add(name)
    return None
