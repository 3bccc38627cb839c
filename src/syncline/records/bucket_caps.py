"""How sizes at which DDP closes its buckets, their *caps*, make buckets, and buckets make caps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Sized(Protocol):
    """A gradient, as far as buckets ask."""

    @property
    def dtype(self) -> str: ...

    @property
    def bytes(self) -> int: ...


def filled(gradients: Sequence[Sized], caps: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """As DDP fills buckets after its first step: in ready order, one type each, closed when they reach their cap. Caps
    are in bytes, and begin anew with each type; the last one repeats."""
    open_buckets: dict[str, list[int]] = {}
    bytes_in: dict[str, int] = {}
    closed_of: dict[str, int] = {}
    closed: list[tuple[int, ...]] = []
    for place, gradient in enumerate(gradients):
        kind = gradient.dtype
        open_buckets.setdefault(kind, []).append(place)
        bytes_in[kind] = bytes_in.get(kind, 0) + gradient.bytes
        number = closed_of.get(kind, 0)
        if bytes_in[kind] >= caps[min(number, len(caps) - 1)]:
            closed.append(tuple(open_buckets.pop(kind)))
            bytes_in[kind], closed_of[kind] = 0, number + 1
    return (*closed, *(tuple(places) for places in open_buckets.values()))


def caps_of(gradients: Sequence[Sized], buckets: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """What `filled` needs to make these buckets; of several types, those of the type with most bytes."""
    by_type: dict[str, list[int]] = {}
    for places in buckets:
        kind = gradients[places[0]].dtype
        by_type.setdefault(kind, []).append(sum(gradients[place].bytes for place in places))
    most = max(by_type, key=lambda kind: (sum(by_type[kind]), kind))
    return tuple(max(1, size) for size in by_type[most])
