"""The buckets of a checkpoint, which the first steps after a restart use instead of DDP's."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from syncline.exchange import Layout


@dataclass
class Regrouping:
    """Steps after a restart that use the buckets of the checkpoint instead of DDP's."""

    buckets: tuple[tuple[str, ...], ...]
    steps_left: int = 2
    """Steps until DDP's buckets are final. If they still differ then, residuals move to them."""
    submitted: list[tuple[Layout, Tensor]] = field(default_factory=list)
    """DDP's buckets in this step."""

    @property
    def complete(self) -> bool:
        """Whether all gradients of a step have been submitted."""
        names = {slot.name for layout, _ in self.submitted for slot in layout.slots}
        return names.issuperset(name for bucket in self.buckets for name in bucket)

    @property
    def matches_ddp(self) -> bool:
        return {tuple(slot.name for slot in layout.slots) for layout, _ in self.submitted} == set(self.buckets)
