"""Selection of the largest entries, on the CPU and on CUDA, with bit-identical results.

Each region's slot gets the entries with the largest keys. A key is the exponent of the magnitude and the four leading
bits of its mantissa. Among equal keys, the first entries are selected. Entries of key 0 (magnitudes below 2^-130) are
never selected.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from syncline.kernels.buffers import Buffers, own_buffers
from syncline.kernels.slots import KEY_SHIFT, KEYS, VALUES, Slots


class Kernels(Protocol):
    """The kernels for one bucket, with their buffers. No method waits for the device.

    `kept` holds both copies of the residual, and `turn` the index of the current one. A step reads `kept[turn]` and
    writes `kept[1 - turn]`.
    """

    def pack(self, flat: Tensor, share: float, kept: Tensor, turn: Tensor, ratio: Tensor | None, slots: Tensor) -> None:
        """Add the bucket to the residual, clear it, and select the largest entries.

        Args:
            flat: The bucket. It is multiplied by `share` and rounded to its type before the addition, and then filled
                with zeros.
            share: The factor for the bucket.
            kept: Both copies of the residual. `kept[1 - turn]` receives `ratio * kept[turn] + share * flat`.
            turn: The index of the current copy.
            ratio: The factor for the residual; None for 1.
            slots: Receives the largest entries of each region, one row per region.
        """

    def total(self, received: Tensor) -> Tensor:
        """Return the sum of one slot from each rank, added in rank order, as one dense region in fp32."""

    def select(self, rank: int, kept: Tensor, turn: Tensor, dtype: torch.dtype, slot: Tensor) -> None:
        """Write the largest entries of the region that `total` summed to a slot.

        Args:
            rank: The region's number. Rounding errors are added to its elements of `kept[1 - turn]`.
            kept: Both copies of the residual.
            turn: The index of the current copy.
            dtype: The bucket's type, to which the entries will be rounded after the slot's type.
            slot: Receives the entries.
        """

    def spread(self, gathered: Tensor, flat: Tensor) -> Tensor:
        """Write the entries of each region's slot to `flat`, which must contain zeros.

        Returns:
            Whether all entries are finite, as a 0-dim tensor.
        """

    def release(self, flat: Tensor, kept: Tensor, turn: Tensor, velocity: Tensor | None = None) -> None:
        """Subtract the entries that `pack` selected and that are non-zero in `flat` from `kept[1 - turn]`, and set them
        to zero in `velocity[1 - turn]`."""


def kernels_for(slots: Slots, device: torch.device, buffers: Buffers | None = None) -> Kernels:
    """Return the kernels for a device, with memory from `buffers` or their own."""
    buffers = buffers or own_buffers(device)
    if device.type == "cuda":
        from syncline.kernels.cuda import CudaKernels

        return CudaKernels(slots, device, buffers)
    from syncline.kernels.cpu import CpuKernels

    return CpuKernels(slots, buffers)


__all__ = ["KEYS", "KEY_SHIFT", "VALUES", "Buffers", "Kernels", "Slots", "kernels_for", "own_buffers"]
