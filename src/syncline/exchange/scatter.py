"""Scatter: the first half of an exchange, for models whose gradients are sharded. Each rank gets its shard of the sum.

On the wire, for P ranks and a bucket of P rows, of which row i is the part that rank i needs:

- As `Dense()`, NCCL's own reduce-scatter. gloo emulates its own with an all-reduce, which sends twice as many bytes. So
  on gloo, and with 16 bits, each rank sends row i to rank i (all-to-all), and rank i sums the rows in fp32. Each rank
  sends (P−1)/P of the bucket.
- As `Quantized`, each rank adds its gradients to its residual, and rounds each row but its own to codes of few bits.
  Rank i adds the rows in fp32, with its own row unrounded. A value is rounded once, and the residual of its sender
  keeps the error. What was applied plus the residuals equals what came in.

Cost: one collective. `Quantized` sends (P−1)/P · n · (bits/8 + 2/block) bytes, with rows padded to whole blocks, and
needs a copy of the bucket in fp32 beside its residual.

When fewer bits lose: links are faster than the passes over memory, as NVLink inside a host.

Paper: as `Quantized`, the first hop of ZeRO++ (qgZ), arXiv 2306.10209, with error feedback.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from syncline.errors import UsageError
from syncline.exchange.base import Comm, Exchange, Rounding, State, Work
from syncline.exchange.dense import Dense, Halves, part_of
from syncline.exchange.halves import ReduceScatter, has_ring, shard_state
from syncline.exchange.layout import Layout, Slot
from syncline.exchange.quantized import Quantized
from syncline.exchange.residual import Residual
from syncline.exchange.topology import Cost, Phase, Topology
from syncline.kernels import Blocks, block_kernels_for


@dataclass(frozen=True)
class Scatter:
    """Leave this rank's shard of the average in the state. The bucket itself is overwritten.

    Args:
        like: The exchange whose first half this is: `Dense` or `Quantized`.

    Raises:
        UsageError: `like` is another exchange.
    """

    like: Exchange
    waits = True
    sums = False  # whether the result is the sum

    def __post_init__(self) -> None:
        if not isinstance(self.like, Dense | Quantized):
            text = f"{self.like!r} cannot send gradients to the owners of shards"
            raise UsageError(f"{text}: use Dense or Quantized, or replicas of shards with replicate=")

    @property
    def lossless(self) -> bool:
        return self.like.lossless

    @property
    def keeps(self) -> bool:
        return self.like.keeps

    def prepare(self, layout: Layout, comm: Comm) -> State:
        blocks = self._blocks(layout.numel, layout.dtype, comm.size)
        if blocks is not None and isinstance(self.like, Quantized):
            state: DenseRows | CodedRows = CodedRows(layout, blocks, self.like.error_feedback)
        else:
            state = DenseRows(layout, comm, self._dense)
        state.factor = float(comm.size) if self.sums else 1.0
        return state

    def run(self, flat: Tensor, state: State, comm: Comm) -> Work | None:
        assert isinstance(state, DenseRows | CodedRows)  # noqa: S101 - `prepare` made it
        state.encode(flat, comm).wait()
        state.add(flat, comm.rank)
        return None

    def cost(self, numel: int, dtype: torch.dtype, topology: Topology) -> Cost:
        if topology.ranks == 1:
            return Cost(())
        blocks = self._blocks(numel, dtype, topology.ranks)
        if blocks is None and self._dense.lossless:
            return ReduceScatter().cost(numel, dtype, topology)
        if blocks is None:
            return Cost(self._dense.halves_cost(numel, dtype, topology)[:1])
        return Cost((Phase.of("all_to_all", topology.ranks * blocks.bytes, 1, topology),))

    def rounding(self, dtype: torch.dtype, ranks: int) -> Rounding:
        return self.like.rounding(dtype, ranks)

    @property
    def _dense(self) -> Dense:
        return self.like if isinstance(self.like, Dense) else Dense()

    def _blocks(self, numel: int, dtype: torch.dtype, ranks: int) -> Blocks | None:
        """Return the blocks of the bucket with padded rows; None if it is sent dense."""
        if not isinstance(self.like, Quantized) or ranks == 1:
            return None
        padded = ranks * self.like.block * -(-part_of(numel, ranks) // self.like.block)
        blocks = Blocks(padded, ranks, self.like.bits, self.like.block)
        return blocks if ranks * blocks.bytes < numel * dtype.itemsize else None


class ScatterSum(Scatter):
    """Leave this rank's shard of the sum in the state, instead of the average.

    The caller has divided the gradients already, if their type requires it.
    """

    sums = True


class DenseRows(State):
    """The buffers of a bucket that is sent dense, or in 16 bits."""

    factor = 1.0
    """Factor for the average: the number of ranks for the sum."""

    def __init__(self, layout: Layout, comm: Comm, dense: Dense) -> None:
        self._halves: Halves = dense.halves(layout, comm.size)
        if dense.lossless:
            self._halves = shard_state(layout, comm.size, has_ring(comm.topology), own_sum=False)
        self.shard = torch.zeros(part_of(layout.numel, comm.size), dtype=layout.dtype, device=layout.device)
        """This rank's shard of the last result."""
        self._share = 1.0

    def average(self, share: float) -> bool:
        self._share = share  # for the sum: small gradients in 16 bits would become zero
        return True

    def encode(self, flat: Tensor, comm: Comm) -> Work:
        """Send each rank its row."""
        return self._halves.scatter(flat, comm)

    def add(self, flat: Tensor, rank: int) -> None:
        """Add the received rows."""
        torch.mul(self._halves.shard(), self._share * self.factor, out=self.shard)

    def finite(self, flat: Tensor) -> Tensor:
        return torch.isfinite(self.shard).all()


class CodedRows(Residual):
    """The buffers and the residual of a bucket that is sent in codes. Rows are padded to whole blocks."""

    partial = True
    factor = 1.0

    def __init__(self, layout: Layout, blocks: Blocks, error_feedback: bool) -> None:
        self._padded = _with_rows(layout, blocks.parts, blocks.part)
        super().__init__(self._padded)
        self._feedback, self._row = error_feedback, layout.numel // blocks.parts
        shape, device = (blocks.parts, blocks.part), layout.device
        self._kernels = block_kernels_for(blocks, device)
        self._gradients = torch.zeros(shape, dtype=layout.dtype, device=device)
        self._values = torch.zeros(shape, device=device)
        self._mine, self._theirs = torch.zeros(2, blocks.parts, blocks.bytes, dtype=torch.uint8, device=device)
        self.shard = torch.zeros(self._row, dtype=layout.dtype, device=device)

    def describe(self) -> str:
        return "codes to the owner"

    @property
    def settles(self) -> bool:
        return self._feedback

    def encode(self, flat: Tensor, comm: Comm) -> Work:
        self._gradients[:, : self._row].copy_(flat.view(len(self._gradients), -1))
        kept = self.residual if self._feedback else None
        arguments = self.share, kept, self.turn, self.ratio
        self._kernels.encode(self._gradients.view(-1), *arguments, comm.rank, self._mine)
        if self._feedback:
            self.put("residual")  # the kernel has written it
        return comm.all_to_all(self._theirs, self._mine)

    def add(self, flat: Tensor, rank: int) -> None:
        self._kernels.decode(self._theirs, self._values.view(-1))
        if not self._feedback:
            self._values[rank].copy_(self._gradients[rank]).mul_(self.share)
            self.shard.copy_(self._values.sum(0)[: self._row].mul_(self.factor))
            return
        # `encode` has left the sum of this rank's own row and its residual where the new residual will be.
        own, other = self.residual.view(2, *self._values.shape)[:, rank], (1 - self.turn).to(torch.int64).view(1)
        self._values[rank].copy_(own.index_select(0, other)[0])
        total = self._values.sum(0)
        self.shard.copy_(total[: self._row] * self.factor)
        # The error of rounding to 16 bits, or zero.
        total[: self._row].sub_(self.shard.to(torch.float32), alpha=1 / self.factor)
        own.index_copy_(0, other, total.view(1, -1))

    def finite(self, flat: Tensor) -> Tensor:
        return torch.isfinite(self.shard).all()

    def tensors(self, layout: Layout) -> dict[str, dict[str, Tensor]]:
        saved = super().tensors(self._padded)
        return {name: kinds for name, kinds in saved.items() if name}

    def load(self, layout: Layout, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        super().load(self._padded, tensors)


def _with_rows(layout: Layout, ranks: int, row: int) -> Layout:
    """Return a layout of matrices with `ranks` rows, whose rows are padded to `row` elements."""
    used = layout.numel // ranks
    slots = [Slot(slot.name, (ranks, slot.numel // ranks), (row, 1), slot.offset, slot.numel) for slot in layout.slots]
    if row > used:
        slots.append(Slot("", (ranks, row - used), (row, 1), used, ranks * (row - used)))
    return Layout(tuple(slots), layout.dtype, layout.device)
