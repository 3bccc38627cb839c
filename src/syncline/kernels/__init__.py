"""Selection of large entries, on CPU and CUDA: one interface, the same bits.

What is selected is defined without reference to how: of each region the entries with the largest keys, where a key is
the magnitude's exponent and its four leading bits of mantissa; among equal keys those that come first. Entries of
key 0, which no gradient of use has, are never selected.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from syncline.kernels.buffers import Buffers, own_buffers
from syncline.kernels.slots import KEY_SHIFT, KEYS, VALUES, Slots


class Kernels(Protocol):
    """For the slots of one bucket, with the buffers that this takes. Nothing here waits for a device."""

    def pack(self, flat: Tensor, share: float, kept: Tensor, turn: Tensor, ratio: Tensor | None, slots: Tensor) -> None:
        """Adds `kept[turn]`, times `ratio`, to `flat`, times `share` and rounded to its type; leaves the sum in
        `kept[1 - turn]`, zeros in `flat`, and the largest entries of each region in `slots`, one row each."""

    def total(self, received: Tensor) -> Tensor:
        """One region, dense in fp32: the sum of one slot from each rank, in their order."""

    def select(self, rank: int, kept: Tensor, turn: Tensor, dtype: torch.dtype, slot: Tensor) -> None:
        """The largest entries of the region that was last summed, into `slot`. What their cast to `dtype`, by way of
        the slot's type, loses goes to `kept[1 - turn]`, where region `rank` lies."""

    def spread(self, gathered: Tensor, flat: Tensor) -> Tensor:
        """Writes the entries of each region's slot to their places in `flat`, which holds zeros. True where all are
        finite."""

    def release(self, flat: Tensor, kept: Tensor, turn: Tensor, velocity: Tensor | None = None) -> None:
        """Of what was last packed, takes those entries that are in `flat` out of `kept[1 - turn]`, and clears them in
        `velocity[1 - turn]`."""


def kernels_for(slots: Slots, device: torch.device, buffers: Buffers | None = None) -> Kernels:
    buffers = buffers or own_buffers(device)
    if device.type == "cuda":
        from syncline.kernels.cuda import CudaKernels

        return CudaKernels(slots, device, buffers)
    from syncline.kernels.cpu import CpuKernels

    return CpuKernels(slots, buffers)


__all__ = ["KEYS", "KEY_SHIFT", "VALUES", "Buffers", "Kernels", "Slots", "kernels_for", "own_buffers"]
