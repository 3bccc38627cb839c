"""Halves of an exchange that send fewer bits: gradients to the owner of a shard, and weights on the way back.

On the wire, for P ranks and a bucket of n elements:

- `ScatterSixteen`: each rank sends the i-th part of its gradients to rank i in 16 bits, and rank i sums them in fp32.
  Each value is rounded once.
- `ScatterQuantized`: the same in 8, 4 or 3 bits. With error feedback, a rank adds the rounding errors of what it sent
  to its next gradients. The sum itself is not rounded, so there is no error to keep for it.
- `GatherSixteen`: the owner of a shard keeps its weights in fp32, the *master*, and sends them in 16 bits. All ranks,
  the owner included, then compute with the rounded weights. Rounding errors do not add up over steps, because each step
  of the optimizer changes the master.

When they lose: links are faster than the passes over memory.

Papers: ZeRO++ (2023) sends quantised weights and gradients between shards. Mixed-precision training (Micikevicius et
al., ICLR 2018) keeps masters in fp32.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from syncline.exchange.base import Comm, Exchange, Rounding, State, Work
from syncline.exchange.dense import SIXTEEN_BITS, Dense, PackedHalves, part_of
from syncline.exchange.halves import AllGather, ReduceScatter
from syncline.exchange.hierarchical import Hierarchical
from syncline.exchange.hierarchical_halves import GatherByLevels, ScatterByLevels, levels_of, positions_of
from syncline.exchange.layout import Layout
from syncline.exchange.quantized import Quantized
from syncline.exchange.residual import Residual
from syncline.exchange.topology import Cost, Phase, Topology
from syncline.kernels import Blocks, block_kernels_for

GATHERS = ("fp32", "bf16", "fp16")
"""Formats in which weights can be gathered."""


def halves_of(
    exchange: Exchange, gather: str, numel: int, dtype: torch.dtype, topology: Topology
) -> tuple[Exchange, Exchange, int]:
    """Return the two halves of an exchange for a bucket of this size and type, and the elements of a shard.

    Only fp32 buckets are sent in fewer bits, and only if that is smaller.
    """
    ranks = topology.ranks
    if isinstance(exchange, Hierarchical) and len(levels_of(topology)) > 1:
        return ScatterByLevels(), GatherByLevels(), part_of(numel, ranks)
    narrow = dtype == torch.float32 and ranks > 1
    scatter: Exchange = ReduceScatter()
    part = part_of(numel, ranks)
    if narrow and isinstance(exchange, Quantized):
        blocks = exchange.blocks(numel, dtype, ranks)
        if blocks is not None:
            scatter, part = ScatterQuantized(exchange), blocks.part
    elif narrow and isinstance(exchange, Dense) and not exchange.lossless:
        scatter = ScatterSixteen(exchange.wire)
    return scatter, GatherSixteen(gather, part) if narrow and gather != "fp32" else AllGather(part), part


def owners_of(exchange: Exchange, topology: Topology) -> list[int]:
    """Return which part of a bucket each rank owns."""
    by_levels = isinstance(exchange, Hierarchical) and len(levels_of(topology)) > 1
    return positions_of(topology) if by_levels else list(range(topology.ranks))


@dataclass(frozen=True)
class ScatterSixteen:
    """Leave each rank's shard of the sum in its state, after gradients were sent in 16 bits."""

    wire: str
    lossless = False
    keeps = False
    waits = True

    def prepare(self, layout: Layout, comm: Comm) -> State:
        return _SixteenState(layout, comm.size, SIXTEEN_BITS[self.wire])

    def run(self, flat: Tensor, state: State, comm: Comm) -> Work | None:
        assert isinstance(state, _SixteenState)  # noqa: S101 - `prepare` made it
        state.scatter(flat, comm).wait()
        state.gradient.copy_(state.shard())
        return None

    def cost(self, numel: int, dtype: torch.dtype, topology: Topology) -> Cost:
        return Cost(Dense(wire=self.wire).halves_cost(numel, dtype, topology)[:1])

    def rounding(self, dtype: torch.dtype, ranks: int) -> Rounding:
        return Dense(wire=self.wire, roundings="two").rounding(dtype, ranks)


class _SixteenState(PackedHalves):
    def __init__(self, layout: Layout, ranks: int, wire: torch.dtype) -> None:
        super().__init__(layout, ranks, wire)
        self.gradient = torch.zeros(part_of(layout.numel, ranks), device=layout.device)


@dataclass(frozen=True)
class ScatterQuantized:
    """Leave each rank's shard of the sum in its state, after gradients were sent in few bits."""

    exchange: Quantized
    lossless = False
    waits = True

    @property
    def keeps(self) -> bool:
        return self.exchange.error_feedback

    def prepare(self, layout: Layout, comm: Comm) -> State:
        blocks = self.exchange.blocks(layout.numel, layout.dtype, comm.size)
        assert blocks is not None  # noqa: S101 - `halves_of` has checked that codes are smaller
        return QuantizedShardState(layout, blocks, self.exchange.error_feedback)

    def run(self, flat: Tensor, state: State, comm: Comm) -> Work | None:
        assert isinstance(state, QuantizedShardState)  # noqa: S101 - `prepare` made it
        state.encode(flat, comm.rank)
        comm.all_to_all(state.theirs, state.mine).wait()
        state.total(flat, comm.rank)
        return None

    def cost(self, numel: int, dtype: torch.dtype, topology: Topology) -> Cost:
        nbytes = self.exchange.part_bytes(numel, dtype, topology.ranks)
        assert nbytes is not None  # noqa: S101 - `halves_of` has checked that codes are smaller
        return Cost((Phase.of("all_to_all", topology.ranks * nbytes, 1, topology),))

    def rounding(self, dtype: torch.dtype, ranks: int) -> Rounding:
        return self.exchange.rounding(dtype, ranks)


class QuantizedShardState(Residual):
    """The residual of a bucket, and the buffers with which it is sent in codes. Only the residual and the shard belong
    to this bucket alone, if the layout has a workspace."""

    def __init__(self, layout: Layout, blocks: Blocks, error_feedback: bool) -> None:
        super().__init__(dataclasses.replace(layout, workspace=None))
        self.partial, self._blocks = error_feedback, blocks
        scratch = functools.cache(layout.buffer)
        self._kernels = block_kernels_for(blocks, layout.device, scratch)
        # What a rank receives are parts of equal size, even if this rank's own part is at the end of the bucket.
        padded = dataclasses.replace(blocks, numel=blocks.parts * blocks.part)
        self._decoding = block_kernels_for(padded, layout.device, scratch)
        self.mine, self.theirs = (
            layout.buffer(kind, blocks.parts, blocks.bytes, dtype=torch.uint8) for kind in ("mine", "theirs")
        )
        self._decoded = layout.buffer("decoded", blocks.parts, blocks.part, dtype=torch.float32)
        self.gradient = torch.zeros(blocks.part, device=layout.device)
        """This rank's shard of the sum, padded with zeros."""
        self.finite_here: Tensor | None = None
        """Whether this rank's own gradients were finite, as a 0-dim tensor."""

    def describe(self) -> str:
        return f"{self._blocks.bits} bits, {self._blocks.used} blocks of {self._blocks.block}"

    @property
    def settles(self) -> bool:
        return self.partial

    def encode(self, flat: Tensor, rank: int) -> None:
        """Write the codes to send to each rank to `mine`."""
        kept = self.residual if self.partial else None
        if kept is not None:
            self.put("residual")
            self.finite_here = torch.isfinite(flat).all()
        self._kernels.encode(flat, self.share, kept, self.turn, self.ratio, rank, self.mine)

    def total(self, flat: Tensor, rank: int) -> None:
        """Sum what was received and this rank's own part, which is not rounded."""
        self._decoding.decode(self.theirs, self._decoded.view(-1))
        start = min(rank * self._blocks.part, self._numel)
        where = slice(start, min(start + self._blocks.part, self._numel))
        own = self._decoded[rank].zero_()[: where.stop - where.start]
        if self.partial:  # `encode` has left it in the residual, in which nothing of it has to stay
            other = (1 - self.turn).to(torch.int64).view(1)
            mine = self.residual[:, where]
            own.copy_(mine.index_select(0, other)[0])
            mine.index_fill_(0, other, 0.0)
        else:
            torch.mul(flat[where], self.share, out=own)
        torch.sum(self._decoded, 0, out=self.gradient)


@dataclass(frozen=True)
class GatherSixteen:
    """Replace the weights of a bucket by those of all owners, rounded to 16 bits."""

    wire: str
    part: int
    """Elements of a shard."""
    lossless = False
    keeps = False
    waits = True

    def prepare(self, layout: Layout, comm: Comm) -> State:
        return MasterState(layout, comm.size, self.part, SIXTEEN_BITS[self.wire])

    def run(self, flat: Tensor, state: State, comm: Comm) -> Work | None:
        assert isinstance(state, MasterState)  # noqa: S101 - `prepare` made it
        state.gather(state.master, flat, comm).wait()
        state.finish(flat)
        return None

    def cost(self, numel: int, dtype: torch.dtype, topology: Topology) -> Cost:
        elements = topology.ranks * (self.part + (1 if self.wire == "fp16" else 0))
        return Cost((Phase.of("all_gather", elements, 2, topology),))

    def rounding(self, dtype: torch.dtype, ranks: int) -> Rounding:
        return Dense(wire=self.wire, roundings="two").rounding(dtype, 1)


class MasterState(PackedHalves):
    """The weights of the owner of a shard in fp32, and the buffers in which they are sent."""

    def __init__(self, layout: Layout, ranks: int, part: int, wire: torch.dtype) -> None:
        whole = Layout.flat(ranks * part, device=layout.device)
        super().__init__(dataclasses.replace(whole, workspace=layout.workspace), ranks, wire)
        self.master = torch.zeros(part, device=layout.device)

    def take_changes(self, own: Tensor, rank: int) -> None:
        """Take weights that the script has changed in this rank's shard: those that differ from the rounded master."""
        rounded = self.rounded(self.master, rank)
        torch.where(own == rounded, self.master, own, out=self.master)
