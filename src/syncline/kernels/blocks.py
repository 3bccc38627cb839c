"""The wire format of quantised gradients: integer codes of 8, 4 or 3 bits, and one bf16 scale per block of elements.

A bucket is divided into P contiguous parts, one per rank, of equal size and padded with zeros to whole blocks. In
bytes, a part is:

    scale of each block … | planes of codes

The value of an element is code · scale, which is exact in fp32. Codes go from −largest to largest, so no element is
clipped: a scale is the largest magnitude of its block divided by `largest`, and rounding it to bf16 changes an element
by less than half a code.

Codes are folded together: the second half of a block, multiplied by a power of two, is added to the first half, until
a number fills whole bytes. 4 bits are folded once (c₀ + 16·c₁ in one byte), 3 bits three times (eight codes in three
bytes). The first bytes of all numbers form the first plane, and so on. Unfolding rounds to the nearest code, so every
byte is valid, and no received code can lead outside of the bucket. A scale that is not finite, or so large that a
product could overflow, is read as NaN, and all ranks drop the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from syncline.kernels.slots import Buffers

BITS = (8, 4, 3)
FOLDS = {8: (), 4: (16,), 3: (8, 64, 4096)}
"""Factors of the second half in each fold, by bits per code."""
PLANES = {8: 1, 4: 1, 3: 3}
"""Bytes per folded number, by bits per code."""
SMALLEST_SCALE = 2.0**-120
"""Lower limit of a scale, so that its reciprocal is finite. Elements below half of it are rounded to zero."""


@dataclass(frozen=True)
class Blocks:
    """The blocks of a bucket of `numel` elements for `parts` ranks."""

    numel: int
    parts: int
    bits: int
    block: int
    """Elements per block, a power of two."""

    @cached_property
    def blocks(self) -> int:
        """Blocks per part. The last ones may be beyond the end of the bucket."""
        return -(-self.numel // (self.parts * self.block))

    @property
    def part(self) -> int:
        """Elements per part."""
        return self.blocks * self.block

    @property
    def used(self) -> int:
        """Number of blocks of all parts together that contain an element of the bucket."""
        return -(-self.numel // self.block)

    @property
    def width(self) -> int:
        """Folded numbers per block."""
        return self.block >> len(FOLDS[self.bits])

    @property
    def largest(self) -> int:
        """The largest code."""
        return int(2 ** (self.bits - 1)) - 1

    @property
    def limit(self) -> float:
        """Scales must be smaller than this, so that no product with a code overflows."""
        return 2.0 ** (129 - self.bits)

    @cached_property
    def bytes(self) -> int:
        """Bytes per part."""
        return self.blocks * (torch.bfloat16.itemsize + PLANES[self.bits] * self.width)


class BlockKernels(Protocol):
    """The kernels for one bucket, with their buffers. No method waits for the device. `kept` holds both copies of the
    residual, and `turn` the index of the current one; `kept` is None without error feedback. Parts are bytes, one row
    per rank."""

    def encode(
        self, flat: Tensor, share: float, kept: Tensor | None, turn: Tensor, ratio: Tensor | None,
        rank: int, rows: Tensor,
    ) -> None:  # fmt: skip
        """Quantise `ratio * kept[turn] + share * flat` to `rows` (the ratio is 1 if it is None), and write the rounding
        errors to `kept[1 - turn]`. Part `rank` is not quantised: its sum is written to `kept[1 - turn]`, and its row is
        unchanged. `share * flat` is rounded to its type first."""

    def total(
        self, received: Tensor, flat: Tensor, share: float, kept: Tensor | None, turn: Tensor, rank: int, row: Tensor
    ) -> None:
        """Add the received parts and this rank's own part in rank order. `encode` left the latter in `kept[1 - turn]`;
        without error feedback, it is in `flat`. Quantise the sum to `row`, and write the errors of rounding it to codes
        and then to the bucket's type to part `rank` of `kept[1 - turn]`."""

    def decode(self, gathered: Tensor, flat: Tensor) -> Tensor:
        """Write the values of all parts to `flat`, and return whether all of them are finite, as a 0-dim tensor."""


def block_kernels_for(blocks: Blocks, device: torch.device, buffers: Buffers | None = None) -> BlockKernels:
    """Return the kernels for a device, with memory from `buffers` or their own."""
    if device.type == "cuda":
        from syncline.kernels.blocks_cuda import CudaBlockKernels

        return CudaBlockKernels(blocks, device)
    from syncline.kernels.blocks_cpu import CpuBlockKernels

    return CpuBlockKernels(blocks, buffers)
