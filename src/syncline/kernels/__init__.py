"""Kernels of the lossy exchanges, on the CPU and on CUDA, with bit-identical results.

`slots` is the wire format of `OkTopk`, `chunks` that of `ChunkedTopk`, and `blocks` that of `Quantized`. `Kernels`,
implemented in `cpu` and `cuda`, select the entries of slots: each region's slot gets those with the largest keys. A key
is the exponent of the magnitude and the four leading bits of its mantissa. Among equal keys, the first entries are
selected. Entries of key 0 (magnitudes below 2^-130) are never selected.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from syncline.kernels.blocks import BITS, BlockKernels, Blocks, block_kernels_for
from syncline.kernels.chunks import CHUNK_VALUES, LARGEST_CHUNK, SMALLEST_CHUNK, ChunkKernels, Chunks, chunk_kernels_for
from syncline.kernels.slots import KEY_SHIFT, KEYS, VALUES, Buffers, Slots


class Kernels(Protocol):
    """The kernels for one bucket, with their buffers. No method waits for the device. `kept` holds both copies of the
    residual, and `turn` the index of the current one. A step reads `kept[turn]` and writes `kept[1 - turn]`. Slots are
    bytes, one row per region."""

    def pack(self, flat: Tensor, share: float, kept: Tensor, turn: Tensor, ratio: Tensor | None, slots: Tensor) -> None:
        """Write `ratio * kept[turn] + share * flat` to `kept[1 - turn]` (without a ratio, it is 1), fill `flat` with
        zeros, and write the largest entries of each region to `slots`. `share * flat` is rounded to its type first."""

    def total(self, received: Tensor) -> Tensor:
        """Return the sum of one slot from each rank, added in rank order, as one dense region in fp32. With
        `contributors`, each sum is multiplied by the number of slots and divided by how many of them have the entry."""

    def select(self, rank: int, kept: Tensor, turn: Tensor, dtype: torch.dtype, slot: Tensor) -> None:
        """Write the largest entries of region `rank`, which `total` summed, to a slot. Add the errors of rounding them
        to the slot's type and then to the bucket's `dtype` to this region's elements of `kept[1 - turn]`; with
        `contributors`, multiplied by the share of the slots that have the entry."""

    def spread(self, gathered: Tensor, flat: Tensor) -> Tensor:
        """Write the entries of each region's slot to `flat`, which must contain zeros, and return whether all of them
        are finite, as a 0-dim tensor."""

    def release(
        self, flat: Tensor, kept: Tensor, turn: Tensor, velocity: Tensor | None = None, flags: Tensor | None = None
    ) -> None:
        """Subtract the entries that `pack` selected and that are non-zero in `flat` from `kept[1 - turn]`, set them to
        zero in `velocity[1 - turn]`, and set `flags` (int8) to 1 there and to 0 elsewhere."""


def kernels_for(
    slots: Slots, device: torch.device, buffers: Buffers | None = None, contributors: bool = False
) -> Kernels:
    """Return the kernels for a device, with memory from `buffers` or their own. `contributors`: sums are scaled by the
    number of ranks that sent each entry."""
    if device.type == "cuda":
        from syncline.kernels.cuda import CudaKernels

        return CudaKernels(slots, device, buffers, contributors)
    from syncline.kernels.cpu import CpuKernels

    return CpuKernels(slots, buffers, contributors)


__all__ = ["BITS", "CHUNK_VALUES", "KEYS", "KEY_SHIFT", "LARGEST_CHUNK", "SMALLEST_CHUNK", "VALUES", "BlockKernels"]
__all__ += ["Blocks", "ChunkKernels", "Chunks", "Kernels", "Slots", "block_kernels_for", "chunk_kernels_for"]
__all__ += ["kernels_for"]
