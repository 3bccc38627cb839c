"""The two halves of a lossless hierarchical exchange: sums in shards level by level, and shards gathered back.

On the wire, for Q ranks on each of H hosts and a bucket of S bytes:

- `ScatterByLevels`: a reduce-scatter inside each host, then one of each rank's part among the ranks with the same part
  on all hosts. A rank sends (Q−1)/Q·S bytes inside its host, and (H−1)/H·S/Q bytes to other hosts.
- `GatherByLevels`: the same in reverse order, as all-gathers.

A flat reduce-scatter sends (P−1)/P·S bytes per rank, of which most leave the host. Further levels, such as racks, work
alike. All groups of a level must have the same size.

When they lose: links between hosts are as fast as those inside, or buckets are small: there are two start-ups per half.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from syncline.errors import UsageError
from syncline.exchange import wire
from syncline.exchange.base import Comm, Rounding, State, Work
from syncline.exchange.dense import part_of
from syncline.exchange.halves import Unscaled, has_ring, shard_state
from syncline.exchange.layout import Layout
from syncline.exchange.topology import Cost, Level, Phase, Topology


def levels_of(topology: Topology) -> list[Level]:
    """Return the levels that have a group of several ranks, from the inside out.

    Raises:
        UsageError: The groups of a level have different sizes.
    """
    levels = [level for level in topology.levels if level.ranks > 1]
    if any(not level.equal for level in levels) or (levels and _parts(levels) != topology.ranks):
        text = "overlap='forward' with Hierarchical needs groups of equal size, such as as many ranks on every host"
        raise UsageError(f"{text}: use Dense()")
    return levels


def positions_of(topology: Topology) -> list[int]:
    """Return which part of a bucket each rank owns."""
    levels = levels_of(topology)
    return [
        sum(_index(level, rank) * _parts(levels[number + 1 :]) for number, level in enumerate(levels))
        for rank in range(topology.ranks)
    ]


def _parts(levels: list[Level]) -> int:
    return math.prod(level.ranks for level in levels)


def _index(level: Level, rank: int) -> int:
    return next(group.index(rank) for group in level.groups if rank in group)


@dataclass(frozen=True)
class ScatterByLevels:
    """Leave each rank's shard of the sum in its state. The bucket itself is not changed."""

    lossless = True
    keeps = False
    waits = True

    def prepare(self, layout: Layout, comm: Comm) -> State:
        return LevelsState(layout, comm.topology)

    def run(self, flat: Tensor, state: State, comm: Comm) -> Work | None:
        assert isinstance(state, LevelsState)  # noqa: S101 - `prepare` made it
        shard = state.with_equal_parts(flat)
        for name, halves in state.levels:
            group = comm.level(name)
            assert group is not None  # noqa: S101 - every rank is in a group of each level
            halves.scatter(shard, group).wait()
            shard = halves.shard()
        return None

    def cost(self, numel: int, dtype: torch.dtype, topology: Topology) -> Cost:
        kind = wire.REDUCE_SCATTER if has_ring(topology) else "all_to_all"
        return Cost(tuple(_phases(kind, numel, dtype, topology)))

    def rounding(self, dtype: torch.dtype, ranks: int) -> Rounding:
        return Rounding.of_summation(dtype, ranks)


class LevelsState(State):
    """The buffers of a reduce-scatter at each level."""

    def __init__(self, layout: Layout, topology: Topology) -> None:
        found = levels_of(topology)
        numel = _parts(found) * part_of(layout.numel, _parts(found))
        self._numel = layout.numel
        self._padded = layout.buffer("whole", numel) if numel != layout.numel else None
        self.levels = []
        for number, level in enumerate(found):
            workspace = None if layout.workspace is None else layout.workspace.part(level.name)
            piece = Layout(Layout.flat(numel).slots, layout.dtype, layout.device, workspace)
            state = shard_state(piece, level.ranks, has_ring(topology), own_sum=number == len(found) - 1)
            self.levels.append((level.name, state))
            numel //= level.ranks

    @property
    def gradient(self) -> Tensor:
        """This rank's shard of the sum, padded with zeros."""
        return self.levels[-1][1].gradient

    def average(self, share: float) -> bool:
        return self.levels[-1][1].average(share)

    def with_equal_parts(self, flat: Tensor) -> Tensor:
        """Return the bucket, padded with zeros if it does not divide evenly by the ranks."""
        if self._padded is None:
            return flat
        self._padded[: self._numel].copy_(flat)
        self._padded[self._numel :].zero_()
        return self._padded


@dataclass(frozen=True)
class GatherByLevels:
    """Replace a bucket, padded to equal shards, by the shards of all ranks. Each rank's own shard is in its place."""

    lossless = True
    keeps = False
    waits = True

    def prepare(self, layout: Layout, comm: Comm) -> State:
        levels_of(comm.topology)
        return Unscaled()

    def run(self, flat: Tensor, state: State, comm: Comm) -> Work | None:
        regions = []
        for level in levels_of(comm.topology):
            group = comm.level(level.name)
            assert group is not None  # noqa: S101 - every rank is in a group of each level
            regions.append((group, flat))
            flat = flat.view(group.size, -1)[group.rank]
        for group, region in reversed(regions):
            group.all_gather(region, region.view(group.size, -1)[group.rank]).wait()
        return None

    def cost(self, numel: int, dtype: torch.dtype, topology: Topology) -> Cost:
        return Cost(tuple(reversed(_phases("all_gather", numel, dtype, topology))))

    def rounding(self, dtype: torch.dtype, ranks: int) -> Rounding:
        return Rounding(0.0)


def _phases(kind: str, numel: int, dtype: torch.dtype, topology: Topology) -> list[Phase]:
    """Return the collectives of a half, from the inside out."""
    levels, phases = levels_of(topology), []
    left = _parts(levels) * part_of(numel, _parts(levels))
    for level in levels:
        phases.append(Phase.of(kind, left, dtype.itemsize, topology.among(level)))
        left //= level.ranks
    return phases
