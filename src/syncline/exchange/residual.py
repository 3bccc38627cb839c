"""The residual of a lossy exchange: the part of the gradients that was not applied yet.

There are two copies. A step reads the current one and writes the other. At the end of the step they are swapped if the
step was finite; otherwise the step is undone by not swapping them, so no backup copy is needed. The index of the
current copy is a number on the device, so that the host need not wait for it.

Buckets that share a workspace store one copy each between steps. Before a step it is copied to the workspace, which has
room for two, and afterwards the current one is copied back.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from syncline.exchange.base import State
from syncline.exchange.layout import Layout


class Residual(State):
    """A residual in fp32, whatever the bucket's type; with momentum, also this rank's velocity."""

    partial = False
    """True if `run` applies only a part of the bucket, so that every step leaves a residual."""

    def __init__(self, layout: Layout, momentum: float = 0.0, decay: float = 1.0) -> None:
        self._numel, self._device, self._dtype = layout.numel, layout.device, layout.dtype
        self._momentum, self._decay = momentum, decay
        self._workspace = layout.workspace
        self._pairs: dict[str, Tensor] = {}
        """Both copies of `residual` and `velocity`, by kind; with a workspace, the one copy stored between steps."""
        self.turn = torch.zeros((), dtype=torch.int32, device=layout.device)
        """Index of the current copy; 0 with a workspace. Like `ratio`, it stays the same tensor, for CUDA graphs."""
        self.ratio = None if decay == 1.0 else torch.full((), decay, device=layout.device)
        """Factor for the residual before this step's input is added: its decay, and the conversion to this step's loss
        scale; None if it is 1."""
        self._rescaling: Tensor | None = None
        """Factor that converts the residual to this step's loss scale; None without a loss scale."""
        self.share = 1.0
        """Factor for the bucket, which `run` applies: 1/world_size."""
        self.step = 0
        self._step_scale = self._scale = torch.ones((), device=layout.device)
        """Loss scale of the current step, and the one that the residual is stored in."""
        self._changed = False

    def describe(self) -> str:
        return "whole"

    @property
    def residual(self) -> Tensor:
        """Both copies of the residual."""
        return self._pair("residual")

    @property
    def velocity(self) -> Tensor | None:
        """Both copies of the velocity; None without momentum."""
        return self._pair("velocity") if self._momentum else None

    def _pair(self, kind: str) -> Tensor:
        if self._workspace is None:
            if kind not in self._pairs:
                self._pairs[kind] = torch.zeros(2, self._numel, device=self._device)
            return self._pairs[kind]
        pair = self._workspace.take(kind, (2, self._numel), torch.float32)
        if kind not in self._pairs:
            self._pairs[kind] = self._workspace.at_rest(self._numel)
            pair[0].zero_()
        return pair

    def reserve(self) -> None:
        """Take the workspace memory that a step will need, so that the size of the workspace is known beforehand."""
        if self._workspace is not None:
            for kind in ("residual", *(("velocity",) if self._momentum else ())):
                self._workspace.take(kind, (2, self._numel), torch.float32)

    def average(self, share: float) -> bool:
        if self._dtype == torch.float64:  # kernels multiply in fp32
            return False
        self.share = share
        return True

    def begin(self, step: int, scale: Tensor | None = None) -> None:
        self.step = step
        if self._workspace is not None:
            for kind, stored in self._pairs.items():
                self._pair(kind)[0].copy_(stored, non_blocking=True)
        if scale is None and self._rescaling is None:
            return
        if scale is None:  # an earlier step had a loss scale, this one has none
            scale = torch.ones_like(self._scale)
        self._step_scale = scale.to(device=self._device, dtype=torch.float32, copy=True)
        self._rescaling = torch.empty_like(self._scale) if self._rescaling is None else self._rescaling
        torch.div(self._step_scale, self._scale, out=self._rescaling)
        decayed = self._decay != 1.0
        self.ratio = torch.mul(self._rescaling, self._decay, out=self.ratio) if decayed else self._rescaling

    def take(self, flat: Tensor) -> None:
        """Multiply the bucket by `share` here, not in a kernel, and with momentum replace it by the velocity."""
        if self.share != 1.0:
            flat.mul_(self.share)
        if self._momentum:
            velocity = self._before_step("velocity").mul_(self._momentum).add_(flat)
            self.put("velocity", velocity)
            flat.copy_(velocity)

    def hold(self) -> None:
        """Copy the residual to the other copy, in a step that changes only the velocity."""
        if self._changed and "residual" in self._pairs:
            self.put("residual", self._before_step("residual"))

    def give_up(self, flat: Tensor) -> None:
        """Add the whole residual to a bucket that is sent dense. It may come from other buckets or a checkpoint."""
        if "residual" in self._pairs:
            flat.add_(self._before_step("residual").mul_(self._decay))
            self.put("residual", torch.zeros(self._numel, device=self._device))

    def put(self, kind: str, value: Tensor | None = None) -> None:
        """Write the values that become current if the step is applied. Without a value, a kernel has written them."""
        if value is not None:
            self._pair(kind).index_copy_(0, (1 - self.turn).to(torch.int64).view(1), value.view(1, -1))
        self._changed = True

    def settle(self, applied: Tensor) -> None:
        if not self._changed:
            return
        if applied.dim() > 0:  # undo the step for elements that were not applied, in the step's loss scale
            for kind in self._pairs:
                after = self._pair(kind).index_select(0, (1 - self.turn).view(1))[0]
                self.put(kind, torch.where(applied, after, self._before_step(kind)))
            applied = applied.any()
        if self._workspace is None:
            self.turn.bitwise_xor_(applied)
        else:
            for kind, stored in self._pairs.items():
                before, after = self._pair(kind)
                stored.copy_(torch.where(applied, after, before, out=before), non_blocking=True)
        if self._rescaling is not None:
            self._scale = torch.where(applied, self._step_scale, self._scale)
        self._changed = False

    @property
    def state_bytes(self) -> int:
        kinds = (1 if self.partial or "residual" in self._pairs else 0) + (1 if self._momentum else 0)
        return kinds * self._numel * torch.float32.itemsize

    def kept(self) -> Tensor | None:
        return self._current("residual") if "residual" in self._pairs else None

    def tensors(self, layout: Layout) -> dict[str, dict[str, Tensor]]:
        flats = {kind: (value := self._current(kind)) / self._scale.to(value.device) for kind in self._pairs}
        return {slot.name: {kind: slot.view(flat) for kind, flat in flats.items()} for slot in layout.slots if flats}

    def load(self, layout: Layout, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.turn.zero_()
        self._scale, self._rescaling = torch.ones_like(self._scale), None
        self.ratio = None if self.ratio is None or self._decay == 1.0 else self.ratio.fill_(self._decay)
        for pair in self._pairs.values():
            pair.zero_()
        for slot in layout.slots:
            for kind, tensor in tensors.get(slot.name, {}).items():
                if kind == "residual" or self._momentum:
                    pair = self._pair(kind)
                    slot.view(pair[0] if self._workspace is None else self._pairs[kind]).copy_(tensor)

    def _current(self, kind: str) -> Tensor:
        """Return a copy of the values as they are between steps."""
        stored = self._pairs[kind]
        return stored.clone() if self._workspace is not None else stored.index_select(0, self.turn.view(1))[0]

    def _before_step(self, kind: str) -> Tensor:
        """Return a copy of the values before this step, in this step's loss scale."""
        value = self._pair(kind).index_select(0, self.turn.view(1))[0]
        return value if self._rescaling is None else value.mul_(self._rescaling)
