"""The part of a tensor that this rank holds: the shard of a DTensor, and all of any other tensor."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, without its gradient history. It shares the tensor's memory."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)  # the attribute of a DTensor
    return local.detach()


def like(part: Tensor, whole: Tensor) -> Tensor:
    """Return a part as a DTensor that is sharded like `whole`, or unchanged if `whole` is not sharded."""
    if part.dim() == 0 or not hasattr(whole, "_local_tensor"):
        return part
    from torch.distributed.tensor import DTensor  # only where it is loaded already: its import takes a second

    sharded: Any = whole
    mesh, placements, stride = sharded.device_mesh, sharded.placements, whole.stride()
    made: Tensor = DTensor.from_local(part, mesh, placements, run_check=False, shape=whole.shape, stride=stride)
    return made
