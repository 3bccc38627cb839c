"""Where kernels get the memory that they work in."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Buffers(Protocol):
    """Makes memory to work in: with zeros in it, or shared, and then with anything but for what is left as zeros."""

    def __call__(self, kind: str, *shape: int, dtype: torch.dtype) -> Tensor: ...


def own_buffers(device: torch.device) -> Buffers:
    def make(kind: str, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return make
