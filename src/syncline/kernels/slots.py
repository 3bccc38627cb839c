"""The wire format of the selected entries of a bucket: slots of a fixed size, whatever the data.

A bucket is divided into cells, which are assigned to P regions in turn: cell c belongs to region c mod P. Every region
therefore has a part of every layer, and ranks need not agree on boundaries. Each region has a slot with a fixed number
of entries. In 16-bit words:

    exponent, entries per cell …, padding | place of each entry in its cell … | value of each entry …

Entries are ordered by cell, and by place within a cell. A cell has at most 2^15 elements, so a place takes 16 bits, and
an entry with a 16-bit value takes 4 bytes. fp16 values are multiplied by two to the exponent; for other types the
exponent is zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

VALUES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

KEY_SHIFT = 19
"""Low bits of a magnitude that a key leaves out. There are sixteen keys per octave."""
KEYS = 1 << (31 - KEY_SHIFT)
SLACK = 1
"""Keys by which the next step's first threshold is below the smallest selected key of this step: about 5 %."""

_LARGEST_CELL = 1 << 15
_SMALLEST_CELL = 32
_ENTRIES_PER_CELL = 32  # average in a large bucket, so that the cell's count adds little to the slot
_FEWEST_PER_CELL = 8
_CELLS_PER_REGION = 16  # at least, in a large bucket, so that regions are similar
_FEWEST_PER_SLOT = 8  # with fewer, headers and start-ups cost too much


class Buffers(Protocol):
    """Returns a buffer of zeros. A shared buffer contains zeros only if its last user left zeros in it."""

    def __call__(self, kind: str, *shape: int, dtype: torch.dtype) -> Tensor: ...


def own_buffers(device: torch.device) -> Buffers:
    """Return a source of buffers that are not shared."""
    return lambda kind, *shape, dtype: torch.zeros(shape, dtype=dtype, device=device)


@dataclass(frozen=True)
class Slots:
    """The slots of a bucket of `numel` elements: `regions` slots with `entries` entries each."""

    numel: int
    regions: int
    entries: int
    cell: int
    """Elements per cell, a power of two."""
    values: torch.dtype
    """Number format of the values."""

    @classmethod
    def of(
        cls, numel: int, regions: int, density: float, values: torch.dtype, ranks: int | None = None
    ) -> Slots | None:
        """Return the slots for a bucket; None if it is so small that it should be sent dense. The result depends only
        on sizes, so all ranks get the same one. `ranks` is the number of ranks; by default, there is one region per
        rank."""
        selected = int(density * numel)
        if selected < _FEWEST_PER_SLOT * (ranks or regions):
            return None
        largest = _power_of_two(_ENTRIES_PER_CELL / density)
        smallest = _power_of_two(_FEWEST_PER_CELL / density)
        even = 1 << max(0, int(math.log2(max(1, numel / (_CELLS_PER_REGION * regions)))))
        whole = 1 << int(math.log2(max(1, numel // regions)))  # so that every region has at least one cell
        cell = min(max(min(largest, even), smallest, _SMALLEST_CELL), whole, _LARGEST_CELL)
        return cls(numel, regions, -(-selected // regions), cell, values)

    @cached_property
    def cells(self) -> int:
        """Cells per region. The last ones may be beyond the end of the bucket."""
        return math.ceil(self.numel / (self.cell * self.regions))

    @cached_property
    def places_at(self) -> int:
        """Offset of the first place, in words."""
        return _even(1 + self.cells)

    @cached_property
    def values_at(self) -> int:
        """Offset of the first value, in words."""
        return self.places_at + _even(self.entries)

    @cached_property
    def words(self) -> int:
        """Words per slot."""
        return self.values_at + _even(self.entries * self.values.itemsize // 2)

    @property
    def bytes(self) -> int:
        """Bytes per slot."""
        return 2 * self.words


def _power_of_two(least: float) -> int:
    return 1 << math.ceil(math.log2(max(1.0, least)))


def _even(words: int) -> int:
    return words + words % 2
