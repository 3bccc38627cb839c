"""Exchange the updates of a sharded model's optimizer between replicas. Each rank exchanges those of its shards.

After the warm-up, FSDP still reduces gradients among the shards of a replica, but nothing is exchanged between
replicas in backward passes.
"""

from __future__ import annotations

from torch import Tensor

from syncline.fsdp.engine import ReplicaEngine
from syncline.fsdp.units import Unit
from syncline.updates.updating import Updating


class ShardUpdating(Updating[ReplicaEngine]):
    """The exchange of updates that is attached to a sharded model."""

    def reduce(self, unit: Unit, flat: Tensor) -> None:
        """Exchange the gradients of a unit in the warm-up. After it, leave them alone."""
        if self._warm is not None:
            self._warm.reduce(unit, flat)

    def _synchronise(self, on: bool) -> None:
        """Do nothing: `reduce` knows whether the warm-up is over."""
