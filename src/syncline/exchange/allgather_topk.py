"""AllgatherTopk: the usual sparse exchange, to compare with.

Each rank picks its own k = density · n largest entries, and everyone gets everyone's (all-gather): k(P−1) entries sent
per rank, which grow with the number of ranks, where `OkTopk` stays under 2k whatever it is. The result has up to kP
entries. What is not picked is kept.

It has the same selection and the same slots as `OkTopk`, one region for all: what differs is what travels.

When it wins: among two or three ranks, where its one collective saves a start-up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from syncline.exchange.base import Comm, Cost, Layout, Phase, Rounding, State, Topology, Work
from syncline.exchange.oktopk import check_sparse
from syncline.exchange.residual import Residual
from syncline.kernels import VALUES, Slots, kernels_for


@dataclass(frozen=True)
class AllgatherTopk:
    """The largest `density` of each rank's gradients; the rest is added to later ones. `values`: as in `OkTopk`."""

    density: float = 0.01
    values: str = "fp32"

    def __post_init__(self) -> None:
        check_sparse(type(self).__name__, self.density, self.values)

    @property
    def lossless(self) -> bool:
        return False

    @property
    def keeps(self) -> bool:
        return True

    @property
    def waits(self) -> bool:
        return True

    def prepare(self, layout: Layout, comm: Comm) -> State:
        slots = self.slots(layout.numel, layout.dtype, comm.size)
        return Residual(layout) if slots is None else _Picked(layout, slots, comm.size)

    def run(self, flat: Tensor, state: State, comm: Comm) -> Work | None:
        assert isinstance(state, Residual)  # noqa: S101 - as prepared
        if not isinstance(state, _Picked):
            state.take(flat)
            state.give_up(flat)
            return comm.all_reduce(flat) if comm.size > 1 else None
        state.put("residual")
        state.kernels.pack(flat, state.share, state.residual, state.turn, state.ratio, state.mine)
        comm.all_gather(state.theirs, state.mine).wait()
        flat.copy_(state.kernels.total(state.theirs)[: flat.numel()])
        state.kernels.release(flat, state.residual, state.turn)
        return None

    def cost(self, numel: int, dtype: torch.dtype, topology: Topology) -> Cost:
        if topology.ranks == 1:
            return Cost(())
        slots = self.slots(numel, dtype, topology.ranks)
        if slots is None:
            return Cost((Phase.of("all_reduce", numel, dtype.itemsize, topology),))
        return Cost((Phase.of("all_gather", topology.ranks * slots.bytes, 1, topology),))

    def slots(self, numel: int, dtype: torch.dtype, ranks: int) -> Slots | None:
        """None where a bucket goes whole: alone, or too small, or no smaller for being sparse."""
        if ranks == 1:
            return None
        slots = Slots.of(numel, 1, self.density, VALUES[self.values], ranks)
        return slots if slots is not None and ranks * slots.bytes < 2 * numel * dtype.itemsize else None

    def rounding(self, dtype: torch.dtype, ranks: int) -> Rounding:
        unit = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
        return Rounding(4 * ranks * unit, of_largest=4 * ranks * unit)


class _Picked(Residual):
    sparse = True

    def __init__(self, layout: Layout, slots: Slots, ranks: int) -> None:
        super().__init__(layout)
        self.kernels = kernels_for(slots, layout.device, layout.buffer)
        self.mine = layout.buffer("mine", slots.bytes, dtype=torch.uint8)
        self.theirs = layout.buffer("theirs", ranks, slots.bytes, dtype=torch.uint8)
        self.reserve()
