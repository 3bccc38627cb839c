"""What sparse exchanges keep of a bucket: everything that was not applied yet.

There are two copies of it, and a step writes the one that is not in force. At its end they change places if the step
was finite; if not, everything is as it was, without a copy having been made. Which one is in force is a number on the
device, so nobody waits to know it.

Buckets that share a workspace have one copy each, at rest. Before a step it is copied to the workspace, where there are
two, and the one that is in force afterwards is copied back.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from syncline.exchange.base import Layout, State


class Residual(State):
    """In fp32, whatever the bucket's type; with momentum, each rank's own velocity beside it."""

    sparse = False
    """Whether a part of each step is kept."""

    def __init__(self, layout: Layout, momentum: float = 0.0) -> None:
        self._numel, self._device, self._dtype = layout.numel, layout.device, layout.dtype
        self._momentum = momentum
        self._workspace = layout.workspace
        self._pairs: dict[str, Tensor] = {}
        """Both copies of each; where they are in a workspace, the one at rest."""
        self.turn = torch.zeros((), dtype=torch.int32, device=layout.device)
        """Which of each pair is in force. It stays the same tensor, as `ratio` does: kernels know where they are."""
        self.ratio: Tensor | None = None
        """What is kept, times this, is in the measure of the step that began."""
        self.share = 1.0
        """What comes in is yet to be multiplied by this."""
        self.step = 0
        self._scale = self._measure = torch.ones((), device=layout.device)
        self._changed = False

    @property
    def residual(self) -> Tensor:
        """Both copies."""
        return self._pair("residual")

    @property
    def velocity(self) -> Tensor | None:
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
        """Takes the room of a workspace that a step will need, for others to know how much that is."""
        if self._workspace is not None:
            for kind in ("residual", *(("velocity",) if self._momentum else ())):
                self._workspace.take(kind, (2, self._numel), torch.float32)

    def _fetch(self) -> None:
        if self._workspace is not None:
            for kind, rest in self._pairs.items():
                self._pair(kind)[0].copy_(rest, non_blocking=True)

    def _store(self, applied: Tensor) -> None:
        for kind, rest in self._pairs.items():
            before, after = self._pair(kind)
            rest.copy_(torch.where(applied, after, before, out=before), non_blocking=True)

    # --- a step -------------------------------------------------------------------------------------------------

    def average(self, share: float) -> bool:
        if self._dtype == torch.float64:  # kernels multiply in fp32
            return False
        self.share = share
        return True

    def take(self, flat: Tensor) -> None:
        """What came in, multiplied as it should be: for those who do not do that on the way."""
        if self.share != 1.0:
            flat.mul_(self.share)

    def begin(self, step: int, scale: Tensor | None = None) -> None:
        self.step = step
        self._fetch()
        if scale is not None:
            self._scale = scale.to(device=self._device, dtype=torch.float32, copy=True)
        elif self.ratio is not None:  # there was a scale before, and there is none now
            self._scale = torch.ones_like(self._measure)
        if scale is not None or self.ratio is not None:
            self.ratio = torch.empty_like(self._measure) if self.ratio is None else self.ratio
            torch.div(self._scale, self._measure, out=self.ratio)

    def accelerate(self, flat: Tensor) -> None:
        """Turns the gradient into this rank's velocity, where it has one."""
        if self.velocity is not None:
            self.take(flat)
            velocity = self._in_force("velocity").mul_(self._momentum).add_(flat)
            self.put("velocity", velocity)
            flat.copy_(velocity)

    def hold(self) -> None:
        """Keeps what is kept, where the step changes something else."""
        if self._changed and "residual" in self._pairs:
            self.put("residual", self._in_force("residual"))

    def give_up(self, flat: Tensor) -> None:
        """Adds all that is kept to a bucket that goes whole: what it kept in other buckets, or in a checkpoint."""
        if "residual" in self._pairs:
            flat.add_(self._in_force("residual"))
            self.put("residual", torch.zeros(self._numel, device=self._device))

    def put(self, kind: str, value: Tensor | None = None) -> None:
        """What is to be in force if this step counts; None where it was written to the pair already."""
        if value is not None:
            self._pair(kind).index_copy_(0, (1 - self.turn).to(torch.int64).view(1), value.view(1, -1))
        self._changed = True

    def settle(self, applied: Tensor) -> None:
        if not self._changed:
            return
        self._changed = False
        if applied.dim() > 0:
            self._put_back(applied)
            applied = applied.any()
        if self._workspace is None:
            self.turn.bitwise_xor_(applied)
        else:
            self._store(applied)
        if self.ratio is not None:
            self._measure = torch.where(applied, self._scale, self._measure)

    def _put_back(self, applied: Tensor) -> None:
        """Undo the step for elements whose result was not applied, in the measure of the others."""
        for kind, pair in ((kind, self._pair(kind)) for kind in self._pairs):
            after = pair[1] if self._workspace is not None else pair.index_select(0, (1 - self.turn).view(1))[0]
            self.put(kind, torch.where(applied, after, self._in_force(kind)))
        self._changed = False

    # --- between steps ------------------------------------------------------------------------------------------

    @property
    def rests_bytes(self) -> int:
        kinds = (1 if self.sparse or "residual" in self._pairs else 0) + (1 if self._momentum else 0)
        return kinds * self._numel * torch.float32.itemsize

    def kept(self) -> Tensor | None:
        return self._at_rest("residual") if "residual" in self._pairs else None

    def tensors(self, layout: Layout) -> dict[str, dict[str, Tensor]]:
        flats = {kind: (held := self._at_rest(kind)) / self._measure.to(held.device) for kind in self._pairs}
        return {slot.name: {kind: slot.view(flat) for kind, flat in flats.items()} for slot in layout.slots if flats}

    def load(self, layout: Layout, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.turn.zero_()
        self._measure, self.ratio = torch.ones_like(self._measure), None
        for held in self._pairs.values():
            held.zero_()
        for slot in layout.slots:
            for kind, tensor in tensors.get(slot.name, {}).items():
                if kind == "residual" or self._momentum:
                    slot.view(self._resting(kind)).copy_(tensor)

    def _resting(self, kind: str) -> Tensor:
        pair = self._pair(kind)
        return pair[0] if self._workspace is None else self._pairs[kind]

    def _at_rest(self, kind: str) -> Tensor:
        if self._workspace is not None:
            return self._pairs[kind].clone()
        return self._pair(kind).index_select(0, self.turn.view(1))[0]

    def _in_force(self, kind: str) -> Tensor:
        """A copy, in the measure of the step."""
        value = self._at_rest(kind) if self._workspace is None else self._pair(kind)[0].clone()
        return value if self.ratio is None else value.mul_(self.ratio)
