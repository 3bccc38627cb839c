"""The parts that lossy exchanges have in common: a bucket is sent in a packed format, or dense if that is smaller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from syncline.exchange.base import Comm, Rounding, State, Work
from syncline.exchange.layout import Layout
from syncline.exchange.residual import Residual
from syncline.exchange.topology import Cost, Phase, Topology


@dataclass(frozen=True)
class Packed:
    """An exchange that sends a packed format, with error feedback."""

    lossless = False
    waits = True
    collectives: ClassVar[tuple[str, ...]] = ("all_to_all", "all_gather")
    partial: ClassVar[bool] = False
    """True if the result of a packed bucket has only some elements, so that `State.applied_here` returns flags."""

    @property
    def keeps(self) -> bool:
        return True

    def part_bytes(self, numel: int, dtype: torch.dtype, ranks: int) -> int | None:
        """Return the bytes that a rank sends to another in each collective; None for a bucket that is sent dense."""
        raise NotImplementedError

    def run_dense(self, flat: Tensor, state: State, comm: Comm) -> Work | None:
        """Sum a bucket that is sent dense."""
        if isinstance(state, Residual):
            state.take(flat)
            state.give_up(flat)
        return comm.all_reduce(flat) if comm.size > 1 else None

    def cost(self, numel: int, dtype: torch.dtype, topology: Topology) -> Cost:
        if topology.ranks == 1:
            return Cost(())
        part_bytes = self.part_bytes(numel, dtype, topology.ranks)
        if part_bytes is None:
            return Cost((Phase.of("all_reduce", numel, dtype.itemsize, topology),))
        nbytes = topology.ranks * part_bytes
        return Cost(tuple(Phase.of(kind, nbytes, 1, topology) for kind in self.collectives))

    def rounding(self, dtype: torch.dtype, ranks: int) -> Rounding:
        # Additions in fp32: to the rank's residual, and over the ranks at the owner; and subtracting what was applied.
        unit = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
        return Rounding(4 * ranks * unit, of_largest=4 * ranks * unit)


class PackedState(Residual):
    """A bucket that is sent in the packed format. Its kernels report whether the result is finite."""

    partial = True

    def __init__(
        self, layout: Layout, momentum: float, rows: int, part_bytes: int, ranks: int, decay: float = 1.0
    ) -> None:
        super().__init__(layout, momentum, decay)
        self.mine = layout.buffer("mine", rows, part_bytes, dtype=torch.uint8)
        """The rows that this rank sends: one for each rank, or one for all of them."""
        self.theirs = layout.buffer("theirs", ranks, part_bytes, dtype=torch.uint8)
        """The rows that this rank receives, one from each rank."""
        self.picked = layout.buffer("picked", part_bytes, dtype=torch.uint8)
        """The packed sum of this rank's part, which all ranks gather."""
        self.result_is_finite: Tensor | None = None

    def finite(self, flat: Tensor) -> Tensor:
        known, self.result_is_finite = self.result_is_finite, None
        return super().finite(flat) if known is None else known
