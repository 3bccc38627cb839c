"""The two halves of a lossless exchange, for code that runs something in between: the optimizer, on each rank's shard.

On the wire, for P ranks and a bucket of S bytes:

- `ReduceScatter`: rank i gets the i-th part of the sum, its shard. Each rank sends (P−1)/P·S bytes. On NCCL this is one
  reduce-scatter. gloo would emulate that with an all-reduce, which sends twice as many bytes. So on gloo each rank
  sends the i-th part of its bucket to rank i (all-to-all), and rank i sums the parts.
- `AllGather`: all ranks receive all shards, which replace the bucket. Each rank sends (P−1)/P·S bytes.

Together they send as many bytes as an all-reduce. When they lose: nothing hides the second half, or start-ups dominate,
of which there are two.

Paper: DeAR, "Decoupling the all-reduce primitive for accelerating distributed deep learning", arXiv 2302.12445.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from syncline.exchange import wire
from syncline.exchange.base import Comm, Rounding, State, Work
from syncline.exchange.dense import Dense, Halves, part_of
from syncline.exchange.layout import Layout
from syncline.exchange.topology import Cost, Phase, Topology


@dataclass(frozen=True)
class ReduceScatter:
    """Leave each rank's shard of the sum in its state. The bucket itself is not changed."""

    lossless = True
    keeps = False
    waits = True

    def prepare(self, layout: Layout, comm: Comm) -> State:
        return shard_state(layout, comm.size, has_ring(comm.topology))

    def run(self, flat: Tensor, state: State, comm: Comm) -> Work | None:
        assert isinstance(state, ShardState)  # noqa: S101 - `prepare` made it
        if comm.size == 1:
            state.take(flat)
            return None
        state.scatter(flat, comm).wait()
        state.shard()
        return None

    def cost(self, numel: int, dtype: torch.dtype, topology: Topology) -> Cost:
        if topology.ranks == 1:
            return Cost(())
        if has_ring(topology):
            elements = topology.ranks * part_of(numel, topology.ranks)
            return Cost((Phase.of(wire.REDUCE_SCATTER, elements, dtype.itemsize, topology),))
        return Cost(Dense().halves_cost(numel, dtype, topology)[:1])

    def rounding(self, dtype: torch.dtype, ranks: int) -> Rounding:
        return Rounding.of_summation(dtype, ranks)


@dataclass(frozen=True)
class AllGather:
    """Replace a bucket, padded to equal shards, by the shards of all ranks. Each rank's own shard is in its place."""

    part: int | None = None
    """Elements of a shard; by default, the smallest number that suffices."""
    lossless = True
    keeps = False
    waits = True  # so that a lane gathers the bucket that is needed first alone, at the full rate of the link

    def prepare(self, layout: Layout, comm: Comm) -> State:
        return Unscaled()

    def run(self, flat: Tensor, state: State, comm: Comm) -> Work | None:
        if comm.size > 1:
            comm.all_gather(flat, flat.view(comm.size, -1)[comm.rank]).wait()
        return None

    def cost(self, numel: int, dtype: torch.dtype, topology: Topology) -> Cost:
        if topology.ranks == 1:
            return Cost(())
        elements = topology.ranks * (self.part or part_of(numel, topology.ranks))
        return Cost((Phase.of("all_gather", elements, dtype.itemsize, topology),))

    def rounding(self, dtype: torch.dtype, ranks: int) -> Rounding:
        return Rounding(0.0)


@dataclass(frozen=True)
class AllReduce:
    """Both halves at once, for a bucket that stays whole. Unlike `Dense`, it does not run beside the next bucket's
    reduce-scatter, whose paced rounds need the links for themselves."""

    lossless = True
    keeps = False
    waits = True

    def prepare(self, layout: Layout, comm: Comm) -> State:
        return State()

    def run(self, flat: Tensor, state: State, comm: Comm) -> Work | None:
        comm.all_reduce(flat).wait()
        return None

    def cost(self, numel: int, dtype: torch.dtype, topology: Topology) -> Cost:
        return Dense().cost(numel, dtype, topology)

    def rounding(self, dtype: torch.dtype, ranks: int) -> Rounding:
        return Rounding.of_summation(dtype, ranks)


class ShardState(Halves):
    """The buffers of a reduce-scatter. With a workspace, only the shard may belong to this bucket alone."""

    def __init__(self, layout: Layout, ranks: int) -> None:
        super().__init__(layout, ranks)
        self._share = 1.0

    @property
    def gradient(self) -> Tensor:
        """This rank's shard of the sum, padded with zeros."""
        return self._sum

    def own(self) -> None:
        """Keep the shard in memory of this bucket alone, until the next step."""
        self._sum = torch.zeros_like(self._sum)

    def average(self, share: float) -> bool:
        if self._sum.element_size() < 4:  # a sum that is not divided yet could overflow
            return False
        self._share = share
        return True

    def take(self, flat: Tensor) -> None:
        """Copy the bucket of a single rank."""
        torch.mul(flat, self._share, out=self._sum)

    def shard(self) -> Tensor:
        return super().shard().mul_(self._share)


class RingShardState(ShardState):
    """The buffers of a reduce-scatter that sums on the way, and needs no memory for the parts of all ranks."""

    def __init__(self, layout: Layout, ranks: int) -> None:  # without the buffers of `Halves`
        part = part_of(layout.numel, ranks)
        self._numel = layout.numel
        self._padded = layout.buffer("padded", ranks * part) if ranks * part != layout.numel else None
        self._sum = layout.buffer("sum", part)
        self._share = 1.0

    def scatter(self, flat: Tensor, comm: Comm) -> Work:
        return comm.reduce_scatter(self._sum, self._with_equal_parts(flat))

    def shard(self) -> Tensor:
        return self._sum.mul_(self._share)


def shard_state(layout: Layout, ranks: int, ring: bool, *, own_sum: bool = True) -> ShardState:
    """Return the buffers of a reduce-scatter. Other buckets overwrite its result, unless it is the bucket's own."""
    state = RingShardState(layout, ranks) if ring else ShardState(layout, ranks)
    if own_sum:
        state.own()
    return state


def has_ring(topology: Topology) -> bool:
    """Return whether the backend's own reduce-scatter sends half of the bytes of an all-reduce."""
    return topology.backend == "nccl"


class Unscaled(State):
    """No state. Weights are not averaged."""

    def average(self, share: float) -> bool:
        return True
