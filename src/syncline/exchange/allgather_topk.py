"""AllgatherTopk: the usual sparse exchange, as a baseline for `OkTopk`.

On the wire:

- Each rank selects its k = density · n largest entries and sends them to all ranks (one all-gather). The result has up
  to kP entries, for P ranks. Entries that were not selected stay in the residual.
- Selection and slot format are those of `OkTopk`, with one region that spans the bucket.

Cost: k(P−1) entries sent per rank, which grows with the number of ranks. `OkTopk` sends fewer than 2k.

When it loses: with more than three ranks. With two or three, its single collective saves a start-up.

Paper: the top-k with all-gather that Ok-Topk (PPoPP 2022) compares itself with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from syncline.exchange.base import Comm, State, Work
from syncline.exchange.oktopk import SlotState, Slotted
from syncline.kernels import VALUES, Slots


@dataclass(frozen=True)
class AllgatherTopk(Slotted):
    """Send the largest entries of each rank's gradients; the others are added to later gradients.

    Args:
        density: The fraction of the gradients that each rank sends.
        values: The number format of the entries, as in `OkTopk`.
        mean: As in `OkTopk`. All ranks count the contributors.
        decay: As in `OkTopk`.

    Raises:
        UsageError: A setting is out of range.
    """

    values: str = "fp32"
    collectives = ("all_gather",)

    def run(self, flat: Tensor, state: State, comm: Comm) -> Work | None:
        if not isinstance(state, SlotState):
            return self.run_dense(flat, state, comm)
        kernels, kept, turn = state.kernels, state.residual, state.turn
        state.put("residual")
        kernels.pack(flat, state.share, kept, turn, state.ratio, state.mine)
        comm.all_gather(state.theirs, state.mine).wait()
        flat.copy_(kernels.total(state.theirs)[: flat.numel()])
        kernels.release(flat, kept, turn, None, state.flags)
        return None

    def slots(self, numel: int, dtype: torch.dtype, ranks: int) -> Slots | None:
        slots = Slots.of(numel, 1, self.density, VALUES[self.values], ranks) if ranks > 1 else None
        return slots if slots is not None and ranks * slots.bytes < 2 * numel * dtype.itemsize else None
