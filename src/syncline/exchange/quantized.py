"""Quantized: send every gradient in 8, 4 or 3 bits, and add rounding errors to the next step's gradients.

On the wire, for P ranks and a bucket of n elements, divided into P parts of whole blocks:

1. Each rank adds its gradients to its residual, rounds each block of all parts but its own to integer codes with one
   bf16 scale, and sends part i to rank i (all-to-all).
2. Rank i adds the parts in fp32, in rank order, with its own part unrounded, and rounds the sum to codes.
3. All ranks receive all sums (all-gather). The result is the same on all ranks, bit for bit.
4. The residual of a rank keeps the rounding errors: in its own part those of the sum, and in the other parts those of
   the values that it sent. So each value is rounded twice, one residual serves both roundings, and what was applied
   plus the residuals equals what came in.

Over gloo, a large bucket is sent in up to eight pieces: while one is on the wire, others are rounded and summed.

Cost: a rank sends 2(P−1)/P · n · (bits/8 + 2/block) bytes, with parts padded to whole blocks. By default, this is
3.97, 7.9 or 10.2 times fewer than fp32, with 8, 4 or 3 bits. The residual takes two fp32 copies of the gradients;
without error feedback, there is none.

When it loses: the link is faster than three passes over memory; buckets have fewer than a block per rank (they are sent
dense if that is smaller); or the training must give the same bits as plain DDP. This exchange is lossy, but every
gradient is applied in every step. A byte-level GPT with AdamW trained as well as with dense gradients in 8 and 4 bits,
and 0.5 % worse in 3 bits (`docs/results.md`).

Papers: the two hops, each rounded once, are those of ZeRO++ (qgZ, 2023). Error feedback is from 1-bit SGD (Seide et
al., Interspeech 2014) and EF-SGD (Karimireddy et al., ICML 2019). Here the owner of a part does not round its own
gradients before the sum, and the residual of its part holds the error of the sum.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from syncline.errors import UsageError
from syncline.exchange.base import Comm, Rounding, State, Work
from syncline.exchange.layout import Layout
from syncline.exchange.packed import Packed, PackedState
from syncline.exchange.residual import Residual
from syncline.exchange.topology import WORLD, Cost, Phase, Topology
from syncline.kernels import BITS, BlockKernels, Blocks, block_kernels_for

_SMALLEST_BLOCK, _LARGEST_BLOCK = 32, 4096
_PIECE_BYTES, _MOST_PIECES = 300_000, 8
"""Smallest all-to-all of a piece, the same as `wire.PACED_FROM_BYTES`, and the largest number of pieces."""
_HALF_CODE = 0.5 * (1 + 2**-7)
"""A bound on the error of rounding, in units of the largest magnitude divided by the largest code: half a code, and
what rounding the scale to bf16 adds."""


@dataclass(frozen=True)
class Quantized(Packed):
    """Send all gradients in few bits; rounding errors are added to later gradients.

    Args:
        bits: Bits per gradient: 8, 4 or 3.
        block: The number of gradients that share a scale, a power of two from 32 to 4096. Smaller blocks are more
            precise, and cost 16 bits each. By default 256, and 128 with 3 bits.
        error_feedback: Keep rounding errors in a residual. If False, they are lost, and no memory is needed for them.

    Raises:
        UsageError: A setting is out of range.

    Example:
        >>> handle = syncline.attach(model, syncline.Quantized(bits=4))
    """

    bits: int = 4
    block: int = 0
    """0 stands for the default, which replaces it."""
    error_feedback: bool = True

    def __post_init__(self) -> None:
        bits: Any = self.bits
        block: Any = (128 if bits == 3 else 256) if self.block == 0 and type(self.block) is int else self.block
        if isinstance(bits, bool) or not isinstance(bits, Integral) or bits not in BITS:
            raise UsageError(f"Quantized(bits={bits!r}): bits must be one of {', '.join(map(str, BITS))}")
        whole = isinstance(block, Integral) and not isinstance(block, bool)
        if not (whole and _SMALLEST_BLOCK <= block <= _LARGEST_BLOCK and int(block).bit_count() == 1):
            sizes = f"{_SMALLEST_BLOCK} to {_LARGEST_BLOCK}"
            raise UsageError(f"Quantized(block={block!r}): block must be a power of two from {sizes}")
        if not isinstance(self.error_feedback, bool):
            raise UsageError(f"Quantized(error_feedback={self.error_feedback!r}): pass True or False")
        object.__setattr__(self, "bits", int(bits))  # a NumPy number cannot be written as JSON
        object.__setattr__(self, "block", int(block))

    @property
    def keeps(self) -> bool:
        return self.error_feedback

    def prepare(self, layout: Layout, comm: Comm) -> State:
        pieces = self.pieces(layout.numel, layout.dtype, comm.topology)
        if pieces:
            return QuantizedState(layout, pieces, self.error_feedback)
        return Residual(layout) if self.error_feedback else State()

    def run(self, flat: Tensor, state: State, comm: Comm) -> Work | None:
        if not isinstance(state, QuantizedState):
            return self.run_dense(flat, state, comm)
        # While a piece is on the wire, its neighbours are computed. All all-to-alls come first: a step took longer when
        # they ran at the same time as all-gathers (ADR 0022).
        kept, first, last = state.feedback(), state.pieces[0], state.pieces[-1]
        first.encode(flat, kept, state, comm.rank)
        arriving = comm.all_to_all(first.theirs, first.mine)
        for previous, piece in itertools.pairwise(state.pieces):
            piece.encode(flat, kept, state, comm.rank)
            arriving.wait()
            arriving = comm.all_to_all(piece.theirs, piece.mine)
            previous.total(flat, kept, state, comm.rank)
        arriving.wait()
        last.total(flat, kept, state, comm.rank)
        gathering, finite = comm.all_gather(first.theirs, first.picked), []
        for previous, piece in itertools.pairwise(state.pieces):
            following = comm.all_gather(piece.theirs, piece.picked)
            gathering.wait()
            finite.append(previous.decode(flat))
            gathering = following
        gathering.wait()
        finite.append(last.decode(flat))
        state.result_is_finite = finite[0] if len(finite) == 1 else torch.stack(finite).all()
        return None

    def pieces(self, numel: int, dtype: torch.dtype, topology: Topology) -> tuple[Blocks, ...]:
        """Return the blocks of each piece of a bucket; none if the bucket is sent dense.

        There is one piece over NCCL, because a GPU quantises so fast that there is nothing to hide, and inside
        `Hierarchical`, which has its own chunks.
        """
        whole = self.blocks(numel, dtype, topology.ranks)
        if whole is None:
            return ()
        count = min(_MOST_PIECES, whole.parts * whole.bytes // _PIECE_BYTES)
        if topology.backend != "gloo" or topology.whole.name != WORLD or count < 2:
            return (whole,)
        size = whole.parts * whole.block * -(-whole.blocks // count)
        sizes = [min(size, numel - start) for start in range(0, numel, size)]
        return tuple(dataclasses.replace(whole, numel=piece) for piece in sizes)

    def cost(self, numel: int, dtype: torch.dtype, topology: Topology) -> Cost:
        pieces = self.pieces(numel, dtype, topology) if topology.ranks > 1 else ()
        if len(pieces) < 2:
            return super().cost(numel, dtype, topology)
        sizes = [topology.ranks * blocks.bytes for blocks in pieces]
        phases = [Phase.of(kind, nbytes, 1, topology) for nbytes in sizes for kind in self.collectives]
        return Cost(tuple(phases), len(pieces))

    def blocks(self, numel: int, dtype: torch.dtype, ranks: int) -> Blocks | None:
        """Return the blocks of a bucket; None if it is sent dense: on one rank, or if codes would not be smaller."""
        blocks = Blocks(numel, ranks, self.bits, self.block)
        return blocks if ranks > 1 and ranks * blocks.bytes < numel * dtype.itemsize else None

    def part_bytes(self, numel: int, dtype: torch.dtype, ranks: int) -> int | None:
        blocks = self.blocks(numel, dtype, ranks)
        return None if blocks is None else blocks.bytes

    def rounding(self, dtype: torch.dtype, ranks: int) -> Rounding:
        if self.error_feedback:
            return super().rounding(dtype, ranks)
        lost = _HALF_CODE / Blocks(1, ranks, self.bits, self.block).largest
        info = torch.finfo(dtype)
        # What the other ranks send is rounded once. The sum, at most `ranks` times the largest value and its error, is
        # rounded to codes and then to the bucket's type. The errors of fp32 sums are small. Values below the smallest
        # scale may become zero.
        largest = (ranks - 1) * lost + ranks * (1 + lost) * lost
        summation = 2 * ranks * torch.finfo(torch.float32).eps + info.eps
        return Rounding(
            summation, largest * (1 + 2 * summation), absolute=ranks * 2.0**-119 + info.smallest_normal * info.eps
        )


@dataclass(frozen=True)
class Piece:
    """A part of a bucket that is sent on its own: its elements, its kernels, and its part of the buffers."""

    where: slice
    kernels: BlockKernels
    mine: Tensor
    theirs: Tensor
    picked: Tensor

    def encode(self, flat: Tensor, kept: Tensor | None, state: Residual, rank: int) -> None:
        """Write the codes to send to each rank to `mine`."""
        held = None if kept is None else kept[:, self.where]
        self.kernels.encode(flat[self.where], state.share, held, state.turn, state.ratio, rank, self.mine)

    def total(self, flat: Tensor, kept: Tensor | None, state: Residual, rank: int) -> None:
        """Sum the received parts, and write the codes of the sum to `picked`."""
        held = None if kept is None else kept[:, self.where]
        self.kernels.total(self.theirs, flat[self.where], state.share, held, state.turn, rank, self.picked)

    def decode(self, flat: Tensor) -> Tensor:
        """Write the gathered sums to the bucket, and return whether they are finite, as a 0-dim tensor."""
        return self.kernels.decode(self.theirs, flat[self.where])


class QuantizedState(PackedState):
    """A bucket that is sent in codes, in one or several pieces."""

    def __init__(self, layout: Layout, pieces: Sequence[Blocks], error_feedback: bool) -> None:
        ranks = pieces[0].parts
        super().__init__(layout, 0.0, ranks, sum(blocks.bytes for blocks in pieces), ranks)
        self._blocks, self.partial = pieces, error_feedback
        scratch = functools.cache(layout.buffer)  # pieces are computed one after the other
        self.pieces, start, end = list[Piece](), 0, 0
        for blocks in pieces:
            where, row = slice(start, start := start + blocks.numel), slice(end, end := end + blocks.bytes)
            rows = slice(ranks * row.start, ranks * row.stop)
            mine, theirs = (buffer.view(-1)[rows].view(ranks, -1) for buffer in (self.mine, self.theirs))
            kernels = block_kernels_for(blocks, layout.device, scratch)
            self.pieces.append(Piece(where, kernels, mine, theirs, self.picked[row]))
        if error_feedback:
            self.reserve()

    def describe(self) -> str:
        first, used = self._blocks[0], sum(blocks.used for blocks in self._blocks)
        pieces = f", {len(self._blocks)} pieces" if len(self._blocks) > 1 else ""
        return f"{first.bits} bits, {used} blocks of {first.block}{pieces}"

    def feedback(self) -> Tensor | None:
        """Return both copies of the residual, of which this step writes one; None without error feedback."""
        if not self.partial:
            return None
        self.put("residual")
        return self.residual

    @property
    def settles(self) -> bool:
        return self.partial
