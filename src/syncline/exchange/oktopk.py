"""OkTopk: send only the largest sums, in slots of a fixed size, and keep the rest in a residual.

On the wire, for P ranks and a bucket of n elements, of which k = density · n are selected:

1. Each rank adds its gradients to its residual, selects the k/P largest entries of each of P regions, and sends them to
   the region's owner (all-to-all).
2. Each owner sums the entries in fp32 and selects the k/P largest sums.
3. All ranks receive all owners' selections (all-gather). The result is the same on all ranks, and zero elsewhere.
4. A rank's residual keeps entries that it did not send, entries that the owner did not select, and rounding errors of
   the values that it sent. So what was applied plus the residuals equals what came in.

With mean="contributors", the owner of a region counts how many of the P ranks sent each entry, and multiplies the sum
by P/count before it selects. Gradients are divided by the number of ranks, so the result is the mean over the ranks
that sent the entry. Then what was applied times count/P, plus the residuals, equals what came in.

Cost: an entry takes 4 bytes, or 6 with fp32 values. A rank sends 2(P−1) slots of about 4k/P bytes per step, which is
2k(P−1)/P words of 4 bytes and never more than 2.5k (the paper's bound is 6k). The residual takes two fp32 copies of the
gradients.

When it loses: the link is fast enough for dense gradients; buckets are small (with k < 8P, a bucket is sent dense); or
the model needs all gradients in every step. This exchange is lossy: a model trains differently and may train worse.
With SGD, `warmup` and `momentum` help; with AdamW, exchange updates instead of gradients (`docs/guide/updates.md`).
`docs/results.md` has measurements.

Paper: Ok-Topk, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP 2022. It selects with a threshold
that it tracks over steps, and sends a variable number of entries. Here slots have a fixed size and hold the largest
entries of the current step, so shapes and bytes do not depend on data. Regions consist of small cells, so they need no
rebalancing. See ADR 0015.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real

import torch
from torch import Tensor

from syncline.errors import UsageError
from syncline.exchange.base import Comm, State, Work
from syncline.exchange.layout import Layout
from syncline.exchange.residual import Residual
from syncline.exchange.sparse import Sparse, SparseState
from syncline.kernels import VALUES, Slots, kernels_for

_MOST_WORDS = {"bf16": 2.5, "fp16": 2.5, "fp32": 4.6}
"""Most 4-byte words that a rank may send per selected entry, in both collectives together. If headers and rounding up
make a bucket exceed it, the bucket is sent dense."""


@dataclass(frozen=True)
class Slotted(Sparse):
    """The parts that `OkTopk` and `AllgatherTopk` have in common: entries are sent in slots."""

    momentum = 0.0
    formats = VALUES

    def slots(self, numel: int, dtype: torch.dtype, ranks: int) -> Slots | None:
        """Return the slots for a bucket; None if it is sent dense: on one rank, or if it is too small, or slots would
        be larger."""
        raise NotImplementedError

    def prepare(self, layout: Layout, comm: Comm) -> State:
        slots = self.slots(layout.numel, layout.dtype, comm.size)
        if slots is None:
            return Residual(layout, self.momentum, self.residual_factor)
        return SlotState(layout, self, slots, comm.size)

    def part_bytes(self, numel: int, dtype: torch.dtype, ranks: int) -> int | None:
        slots = self.slots(numel, dtype, ranks)
        return None if slots is None else slots.bytes


@dataclass(frozen=True)
class OkTopk(Slotted):
    """Send the largest sums of all gradients; the others are added to later gradients.

    To clip gradients, call `torch.nn.utils.clip_grad_norm_` after the backward pass, as without Syncline. It clips the
    result of the exchange.

    Args:
        density: The fraction of the gradients to send.
        values: The number format of the entries: `bf16`, `fp16` (scaled to its range) or `fp32`. Rounding errors are
            added to the residual.
        warmup: The number of dense steps at the beginning, while gradients change fast.
        momentum: Each rank accumulates its gradients with this momentum before it selects entries, and resets the
            entries that were applied. It replaces the optimizer's own momentum: use `SGD(momentum=0)` with
            `OkTopk(momentum=0.9)`.
        mean: `ranks` divides each sum by the number of ranks, and `contributors` by the number of ranks that sent the
            entry. `auto` divides updates by contributors, and gradients by ranks.
        decay: The factor for the residual before each step's gradients are added. By default 1, and 0.95 for updates
            that are exchanged less often than in every step.

    Raises:
        UsageError: A setting is out of range.

    Example:
        >>> handle = syncline.attach(model, syncline.OkTopk(density=0.01, warmup=100))
    """

    warmup: int = 0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        warmup, momentum = (getattr(self, name) for name in ("warmup", "momentum"))
        if isinstance(warmup, bool) or not isinstance(warmup, Integral) or int(warmup) < 0:
            raise UsageError(f"OkTopk(warmup={warmup!r}): warmup must be a number of steps, at least 0")
        is_number = isinstance(momentum, Real)
        if not (is_number and 0 <= momentum < 1):
            raise UsageError(f"OkTopk(momentum={momentum!r}): momentum must be at least 0 and less than 1")
        object.__setattr__(self, "warmup", int(warmup))
        object.__setattr__(self, "momentum", float(momentum))

    def run(self, flat: Tensor, state: State, comm: Comm) -> Work | None:
        if not isinstance(state, SlotState):
            return self.run_dense(flat, state, comm)
        state.sent_dense = warming_up = state.step < self.warmup
        if self.momentum or warming_up:
            state.take(flat)
        if warming_up:
            state.hold()
            return comm.all_reduce(flat)
        kernels, kept, turn = state.kernels, state.residual, state.turn
        state.put("residual")
        kernels.pack(flat, 1.0 if self.momentum else state.share, kept, turn, state.ratio, state.mine)
        comm.all_to_all(state.theirs, state.mine).wait()
        kernels.total(state.theirs)
        kernels.select(comm.rank, kept, turn, flat.dtype, state.picked)
        comm.all_gather(state.theirs, state.picked).wait()
        state.result_is_finite = kernels.spread(state.theirs, flat)
        kernels.release(flat, kept, turn, state.velocity, state.flags)
        return None

    def slots(self, numel: int, dtype: torch.dtype, ranks: int) -> Slots | None:
        slots = Slots.of(numel, ranks, self.density, VALUES[self.values]) if ranks > 1 else None
        if slots is None or ranks * slots.bytes >= numel * dtype.itemsize:
            return None
        most = _MOST_WORDS[self.values] * int(self.density * numel)
        return slots if 2 * (ranks - 1) * slots.bytes <= 4 * most else None


class SlotState(SparseState):
    """A bucket that is sent in slots."""

    def __init__(self, layout: Layout, exchange: Slotted, slots: Slots, ranks: int) -> None:
        super().__init__(layout, exchange.momentum, slots.regions, slots.bytes, ranks, exchange.residual_factor)
        self._slots = slots
        self.kernels = kernels_for(slots, layout.device, layout.buffer, exchange.mean == "contributors")
        self.reserve()

    def describe(self) -> str:
        regions = self._slots.regions
        return f"sparse, {regions} slot{'' if regions == 1 else 's'} of {self._slots.entries} entries"
