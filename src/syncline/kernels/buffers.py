"""The source of the memory that kernels work in."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Buffers(Protocol):
    """Returns a buffer of zeros. A shared buffer contains zeros only if its last user left zeros in it."""

    def __call__(self, kind: str, *shape: int, dtype: torch.dtype) -> Tensor: ...


def own_buffers(device: torch.device) -> Buffers:
    """Return a source of buffers that are not shared."""

    def make(kind: str, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return make
