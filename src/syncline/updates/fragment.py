"""A fragment: a part of a model's weights, and the arithmetic of exchanging its updates. It does not communicate.

Every rank steps its own weights. The anchor is the weights that all ranks agreed on last, so a rank's update is
`anchor - weights`. Updates are exchanged, and their mean over the ranks is subtracted from the anchor. The weights then
continue from the anchor; with a delay, what the rank has done in the meantime is added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from syncline.balance.sample_weights import Counted
from syncline.records.pieces import Piece
from syncline.runtime.bucket_runner import Bucket, Residuals
from syncline.updates.policy import Nesterov

Tensors = Mapping[str, Tensor]
RESIDUALS = ("residual", "velocity")  # kinds that belong to the state of an exchange


@dataclass
class Fragment(Bucket):
    """Weights that are exchanged together."""

    pieces: tuple[Piece, ...] = ()
    period: int = 1  # the fragment is exchanged in one of this many steps
    turn: int = 0  # index of that step, from 0 to period - 1
    anchor: Tensor = field(default_factory=lambda: torch.empty(0))
    """The weights that all ranks agreed on last, flat, in fp32 or fp64."""
    velocity: Tensor | None = None  # the momentum of an outer optimizer
    counted: Counted | None = None  # the samples of all ranks at the last exchange, if updates are weighted by them
    work: Tensor | None = None
    """Memory for the update, which is reused on the CPU: new memory would cost a page fault for every page."""

    @property
    def label(self) -> str:
        return f"the updates of {' to '.join(dict.fromkeys((self.pieces[0].name, self.pieces[-1].name)))}"

    def start(self, weights: Tensors, outer: Nesterov | None) -> None:
        """Make the current weights the anchor."""
        self.anchor = self.gathered(weights).to(self.layout.dtype, copy=True)
        self.velocity = torch.zeros_like(self.anchor) if outer is not None else None

    def gathered(self, tensors: Tensors) -> Tensor:
        """Return a flat copy of this fragment's part of some tensors, in their own type."""
        return torch.cat([piece.of(tensors[piece.name]) for piece in self.pieces])

    def update(self, weights: Tensors) -> Tensor:
        """Return this rank's update, `anchor - weights`. The next call may overwrite it."""
        first = weights[self.pieces[0].name]
        if self.period > 1 or first.is_cuda or first.dtype != self.layout.dtype:
            return self.update_from(self.gathered(weights))
        self.work = torch.empty_like(self.anchor) if self.work is None else self.work
        offset = 0
        for piece in self.pieces:
            here = slice(offset, offset + piece.numel)
            torch.sub(self.anchor[here], piece.of(weights[piece.name]), out=self.work[here])
            offset += piece.numel
        return self.work

    def scatter(self, flat: Tensor, weights: Tensors) -> None:
        """Write the elements of a flat tensor to the weights."""
        parts = flat.split([piece.numel for piece in self.pieces])
        torch._foreach_copy_([piece.of(weights[piece.name]) for piece in self.pieces], list(parts))

    def update_from(self, now: Tensor) -> Tensor:
        """Return the update of a rank whose weights are `now`, as a new tensor."""
        return self.anchor.to(now.dtype).to(self.layout.dtype) - now

    def apply(self, mean: Tensor, finite: Tensor, outer: Nesterov | None) -> None:
        """Subtract the mean update of the ranks from the anchor, if it is finite. `mean` is overwritten."""
        if finite.is_cuda or not bool(finite):
            mean.masked_fill_(~finite, 0)
        if outer is not None and self.velocity is not None:
            before = self.velocity.clone()
            outer.step(mean, self.velocity)
            mean.masked_fill_(~finite, 0)
            torch.where(finite, self.velocity, before, out=self.velocity)
        self.anchor.sub_(mean)

    def saved(self) -> Residuals:
        """Return what a checkpoint needs, by piece and kind."""
        flats = {"anchor": self.anchor, "outer": self.velocity}
        saved = {name: dict(kinds) for name, kinds in self.ready.tensors(self.layout).items()}
        for slot in self.layout.slots:
            own = {kind: slot.view(flat) for kind, flat in flats.items() if flat is not None}
            saved.setdefault(slot.name, {}).update(own)
        return saved

    def load(self, saved: Residuals) -> None:
        """Continue from what `saved` returned, after `start`."""
        for slot in self.layout.slots:
            slot.view(self.anchor).copy_(saved[slot.name]["anchor"])
            if self.velocity is not None and "outer" in saved[slot.name]:
                slot.view(self.velocity).copy_(saved[slot.name]["outer"])
        residuals = {
            name: {kind: tensor for kind, tensor in kinds.items() if kind in RESIDUALS} for name, kinds in saved.items()
        }
        self.ready.load(self.layout, residuals)
