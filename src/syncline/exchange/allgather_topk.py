"""AllgatherTopk: the usual sparse exchange, as a baseline for `OkTopk`.

On the wire:

- Each rank selects its k = density · n largest entries and sends them to all ranks (one all-gather). The result has up
  to kP entries, for P ranks. Entries that were not selected stay in the residual.
- Selection and slot format are those of `OkTopk`, with one region that spans the bucket.

Cost: k(P−1) entries sent per rank, which grows with the number of ranks. `OkTopk` sends fewer than 2k.

When it loses:

- With more than three ranks. With two or three, its single collective saves a start-up.

Paper: the top-k with all-gather that Ok-Topk (PPoPP 2022) compares itself with.
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
    """Send the largest entries of each rank's gradients; the others are added to later gradients.

    Args:
        density: The fraction of the gradients that each rank sends.
        values: The number format of the entries, as in `OkTopk`.

    Raises:
        UsageError: A setting is out of range.
    """

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
        """Return the slots for a bucket of this size.

        Returns:
            None for a bucket that is sent dense: on one rank, if it is too small, or if sparse slots would be larger.
        """
        if ranks == 1:
            return None
        slots = Slots.of(numel, 1, self.density, VALUES[self.values], ranks)
        return slots if slots is not None and ranks * slots.bytes < 2 * numel * dtype.itemsize else None

    def rounding(self, dtype: torch.dtype, ranks: int) -> Rounding:
        unit = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
        return Rounding(4 * ranks * unit, of_largest=4 * ranks * unit)


class _Picked(Residual):
    """A bucket that is sent in slots."""

    sparse = True

    def __init__(self, layout: Layout, slots: Slots, ranks: int) -> None:
        super().__init__(layout)
        self.kernels = kernels_for(slots, layout.device, layout.buffer)
        self.mine = layout.buffer("mine", slots.bytes, dtype=torch.uint8)
        self.theirs = layout.buffer("theirs", ranks, slots.bytes, dtype=torch.uint8)
        self.reserve()
