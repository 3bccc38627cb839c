"""Memory that an exchange needs only while it runs, shared by buckets that run one after the other."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Workspace:
    """Buffers shared by buckets that run one after the other on a lane, as large as the largest bucket needs. With DDP,
    every bucket has its own buffers and two copies of its residual. `Layerwise` has many small buckets and little
    memory: they share a workspace, and each stores one copy of its residual between steps. A bucket may leave anything
    in a buffer, unless the buffer must hold zeros at the start: then it must leave zeros."""

    def __init__(self, device: torch.device, *, rest_on_host: bool = False) -> None:
        self.device = device
        self._rest = {"on host": rest_on_host}
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}
        self._prefix = ""

    def take(self, kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a buffer of this kind. Its address changes only when more elements are requested than ever before."""
        key, numel = (self._prefix + kind, dtype), math.prod(shape)
        if key not in self._buffers or self._buffers[key].numel() < numel:
            self._buffers[key] = torch.zeros(numel, dtype=dtype, device=self.device)
        return self._buffers[key][:numel].view(shape)

    def part(self, name: str) -> Workspace:
        """Return a view of the workspace with its own buffers, for one of several chunks that run concurrently."""
        inner = Workspace(self.device)
        inner._buffers, inner._rest, inner._prefix = self._buffers, self._rest, f"{self._prefix}{name}/"
        return inner

    def rest_on(self, where: str) -> None:
        """Choose where residuals that are created from now on are stored, in all parts: `device` or `host`."""
        self._rest["on host"] = where == "host"

    def at_rest(self, numel: int) -> Tensor:
        """Return zeros, as storage for a residual between steps."""
        if self._rest["on host"]:
            return torch.zeros(numel, pin_memory=self.device.type == "cuda")
        return torch.zeros(numel, device=self.device)

    @property
    def bytes(self) -> int:
        """Bytes that the buffers occupy, residuals excluded."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())
