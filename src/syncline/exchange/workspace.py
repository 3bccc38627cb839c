"""Memory for what exchanges need only while they run, shared by buckets that run one after the other.

A bucket of DDP has buffers of its own, and its residual twice. Where memory is short, buckets are many and small and
take turns: what they need meanwhile then is there once, as large as the largest of them needs it, and a residual is at
rest in one copy, on the device or in pinned memory of the host.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Workspace:
    """The memory of one lane. Whoever takes some must leave it as it is when the next one begins: with anything in it,
    but for what is asked to hold zeros, which must be left with zeros."""

    def __init__(self, device: torch.device, *, rest_on_host: bool = False) -> None:
        self.device = device
        self._rest = {"on host": rest_on_host}
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}
        self._prefix = ""

    def take(self, kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory of this kind, at the same place for everyone who asks for no more than the first did."""
        key, numel = (self._prefix + kind, dtype), math.prod(shape)
        if key not in self._buffers or self._buffers[key].numel() < numel:
            self._buffers[key] = torch.zeros(numel, dtype=dtype, device=self.device)
        return self._buffers[key][:numel].view(shape)

    def part(self, name: str) -> Workspace:
        """For one of several that run at the same time."""
        inner = Workspace(self.device)
        inner._buffers, inner._rest, inner._prefix = self._buffers, self._rest, f"{self._prefix}{name}/"
        return inner

    def rest_on(self, where: str) -> None:
        """`device` or `host`: for what begins to be kept from now on, in all parts."""
        self._rest["on host"] = where == "host"

    def at_rest(self, numel: int) -> Tensor:
        """Zeros, for what is kept between steps."""
        if self._rest["on host"]:
            return torch.zeros(numel, pin_memory=self.device.type == "cuda")
        return torch.zeros(numel, device=self.device)

    @property
    def bytes(self) -> int:
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())
