"""How the selected entries of a bucket travel: fixed slots, whatever the data.

A bucket is cut into cells, dealt like cards to as many regions as there are ranks: cell c belongs to region c mod P. So
every region has its share of every layer, and nobody has to agree on boundaries. For each region there is a slot of a
fixed number of entries. In 16-bit words:

    exponent, entries per cell …, padding | place in its cell, per entry … | value, per entry …

Entries lie in the order of their places, cell by cell. A cell has at most 2^15 elements, so a place takes 16 bits,
and an entry 4 bytes with a 16-bit value. Values are scaled by two to the exponent, which is zero but in fp16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

VALUES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

KEY_SHIFT = 19
"""Entries are compared by these many bits less of their magnitude: sixteen steps per octave."""
KEYS = 1 << (31 - KEY_SHIFT)

SLACK = 1
"""By how many keys the next step's guess of what is worth a look is below this step's smallest: a twentieth or so."""

_LARGEST_CELL = 1 << 15
_SMALLEST_CELL = 32
_ENTRIES_PER_CELL = 32
"""That a cell has on average where there are enough of them: its own word is then little beside them."""
_FEWEST_PER_CELL = 8
_CELLS_PER_REGION = 16
"""At least, where buckets are large enough: so that regions are alike."""
_FEWEST_PER_SLOT = 8
"""With fewer, what is not an entry weighs too much, and so do start-ups."""


@dataclass(frozen=True)
class Slots:
    """Of a bucket of `numel` elements: `regions` slots of `entries` each."""

    numel: int
    regions: int
    entries: int
    cell: int
    """Elements of a cell: a power of two."""
    values: torch.dtype

    @classmethod
    def of(
        cls, numel: int, regions: int, density: float, values: torch.dtype, ranks: int | None = None
    ) -> Slots | None:
        """For `density` of the elements in all; None where so few are better sent whole.

        Decided from sizes alone, so all ranks decide the same.
        """
        selected = int(density * numel)
        if selected < _FEWEST_PER_SLOT * (ranks or regions):
            return None
        largest = _power_of_two(_ENTRIES_PER_CELL / density)
        smallest = _power_of_two(_FEWEST_PER_CELL / density)
        even = 1 << max(0, int(math.log2(max(1, numel / (_CELLS_PER_REGION * regions)))))
        whole = 1 << int(math.log2(max(1, numel // regions)))  # every region has at least one
        cell = min(max(min(largest, even), smallest, _SMALLEST_CELL), whole, _LARGEST_CELL)
        return cls(numel, regions, -(-selected // regions), cell, values)

    @cached_property
    def cells(self) -> int:
        """Of each region; the last ones may lie beyond the bucket's end."""
        return math.ceil(self.numel / (self.cell * self.regions))

    @cached_property
    def places_at(self) -> int:
        """Words before the first entry's place."""
        return _even(1 + self.cells)

    @cached_property
    def values_at(self) -> int:
        return self.places_at + _even(self.entries)

    @cached_property
    def words(self) -> int:
        return self.values_at + _even(self.entries * self.values.itemsize // 2)

    @property
    def bytes(self) -> int:
        """Of one slot."""
        return 2 * self.words


def _power_of_two(least: float) -> int:
    return 1 << math.ceil(math.log2(max(1.0, least)))


def _even(words: int) -> int:
    return words + words % 2
