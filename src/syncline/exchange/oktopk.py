"""OkTopk: send only the largest sums, in slots of a fixed size, and keep the rest in a residual.

On the wire, for P ranks and a bucket of n elements, of which k = density · n are selected:

1. Each rank adds its gradients to its residual, selects the k/P largest entries of each of P regions, and sends them to
   the region's owner (all-to-all).
2. Each owner sums the entries in fp32 and selects the k/P largest sums.
3. All ranks receive all owners' selections (all-gather). The result is the same on all ranks, and zero elsewhere.
4. A rank's residual keeps entries that it did not send, entries that the owner did not select, and rounding errors of
   the values that it sent. So what was applied plus the residuals equals what came in.

Cost: an entry takes 4 bytes, or 6 with fp32 values. A rank sends 2(P−1) slots of about 4k/P bytes per step, which is
2k(P−1)/P words of 4 bytes and never more than 2.5k (the paper's bound is 6k). The residual takes two fp32 copies of the
gradients.

When it loses: the link is fast enough for dense gradients; buckets are small (with k < 8P, a bucket is sent dense); or
the model needs all gradients in every step. This exchange is lossy: a model trains differently and may train worse.
`warmup` and `momentum` help; `docs/results.md` has measurements.

Paper: Ok-Topk, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP 2022. It selects with a threshold
that it tracks over steps, and sends a variable number of entries. Here slots have a fixed size and hold the largest
entries of the current step, so shapes and bytes do not depend on data. Regions consist of small cells, so they need no
rebalancing. See ADR 0015.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, ClassVar

import torch
from torch import Tensor

from syncline.errors import UsageError
from syncline.exchange.base import Comm, Rounding, State, Work
from syncline.exchange.layout import Layout
from syncline.exchange.residual import Residual
from syncline.exchange.topology import Cost, Phase, Topology
from syncline.kernels import VALUES, Slots, kernels_for

_MOST_WORDS = {"bf16": 2.5, "fp16": 2.5, "fp32": 4.6}
"""Most 4-byte words that a rank may send per selected entry, in both collectives together. If headers and rounding up
make a bucket exceed it, the bucket is sent dense."""
_LOWEST_DENSITY = 1e-4


@dataclass(frozen=True)
class Sparse:
    """The parts that `OkTopk` and `AllgatherTopk` have in common."""

    density: float = 0.01
    values: str = "bf16"
    lossless = False
    keeps = True
    waits = True
    momentum = 0.0
    collectives: ClassVar[tuple[str, ...]] = ("all_gather",)

    def __post_init__(self) -> None:
        name = type(self).__name__
        density: Any = self.density
        is_number = isinstance(density, Real) and not isinstance(density, bool)
        if not (is_number and _LOWEST_DENSITY <= density <= 1):
            raise UsageError(
                f"{name}(density={density!r}): density must be a fraction of the gradients from {_LOWEST_DENSITY:g} "
                "to 1, such as 0.01 for 1 %"
            )
        if not isinstance(self.values, str) or self.values not in VALUES:
            raise UsageError(f"{name}(values={self.values!r}): values must be one of {', '.join(VALUES)}")
        object.__setattr__(self, "density", float(density))  # a NumPy number cannot be written as JSON

    def slots(self, numel: int, dtype: torch.dtype, ranks: int) -> Slots | None:
        """Return the slots for a bucket of this size.

        Returns:
            None for a bucket that is sent dense: on one rank, if it is too small, or if sparse slots would be larger.
        """
        raise NotImplementedError

    def prepare(self, layout: Layout, comm: Comm) -> State:
        slots = self.slots(layout.numel, layout.dtype, comm.size)
        return (
            Residual(layout, self.momentum) if slots is None else SparseState(layout, self.momentum, slots, comm.size)
        )

    def run_dense(self, flat: Tensor, state: State, comm: Comm) -> Work | None:
        """Sum a bucket that is sent dense."""
        assert isinstance(state, Residual)  # noqa: S101 - as prepared
        state.take(flat)
        state.give_up(flat)
        return comm.all_reduce(flat) if comm.size > 1 else None

    def cost(self, numel: int, dtype: torch.dtype, topology: Topology) -> Cost:
        if topology.ranks == 1:
            return Cost(())
        slots = self.slots(numel, dtype, topology.ranks)
        if slots is None:
            return Cost((Phase.of("all_reduce", numel, dtype.itemsize, topology),))
        nbytes = topology.ranks * slots.bytes
        return Cost(tuple(Phase.of(kind, nbytes, 1, topology) for kind in self.collectives))

    def rounding(self, dtype: torch.dtype, ranks: int) -> Rounding:
        # fp32 additions: to the rank's residual, over the ranks at the owner, and the subtraction of what was applied.
        unit = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
        return Rounding(4 * ranks * unit, of_largest=4 * ranks * unit)


@dataclass(frozen=True)
class OkTopk(Sparse):
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

    Raises:
        UsageError: A setting is out of range.

    Example:
        >>> handle = syncline.attach(model, syncline.OkTopk(density=0.01, warmup=100))
    """

    warmup: int = 0
    momentum: float = 0.0
    collectives = ("all_to_all", "all_gather")

    def __post_init__(self) -> None:
        super().__post_init__()
        warmup: Any = self.warmup
        momentum: Any = self.momentum
        if isinstance(warmup, bool) or not isinstance(warmup, Integral) or int(warmup) < 0:
            raise UsageError(f"OkTopk(warmup={warmup!r}): warmup must be a number of steps, at least 0")
        is_number = isinstance(momentum, Real)
        if not (is_number and 0 <= momentum < 1):
            raise UsageError(f"OkTopk(momentum={momentum!r}): momentum must be at least 0 and less than 1")
        object.__setattr__(self, "warmup", int(warmup))
        object.__setattr__(self, "momentum", float(momentum))

    def run(self, flat: Tensor, state: State, comm: Comm) -> Work | None:
        if not isinstance(state, SparseState):
            return self.run_dense(flat, state, comm)
        warming_up = state.step < self.warmup
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
        kernels.release(flat, kept, turn, state.velocity)
        return None

    def slots(self, numel: int, dtype: torch.dtype, ranks: int) -> Slots | None:
        slots = Slots.of(numel, ranks, self.density, VALUES[self.values]) if ranks > 1 else None
        if slots is None or ranks * slots.bytes >= numel * dtype.itemsize:
            return None
        most = _MOST_WORDS[self.values] * int(self.density * numel)
        return slots if 2 * (ranks - 1) * slots.bytes <= 4 * most else None


class SparseState(Residual):
    """A bucket that is sent in slots."""

    sparse = True

    def __init__(self, layout: Layout, momentum: float, slots: Slots, ranks: int) -> None:
        super().__init__(layout, momentum)
        self._slots = slots
        self.kernels = kernels_for(slots, layout.device, layout.buffer)
        self.mine = layout.buffer("mine", slots.regions, slots.bytes, dtype=torch.uint8)
        self.theirs = layout.buffer("theirs", ranks, slots.bytes, dtype=torch.uint8)
        self.picked = layout.buffer("picked", slots.bytes, dtype=torch.uint8)
        self.result_is_finite: Tensor | None = None
        self.reserve()

    def describe(self) -> str:
        regions = self._slots.regions
        return f"sparse, {regions} slot{'' if regions == 1 else 's'} of {self._slots.entries} entries"

    def finite(self, flat: Tensor) -> Tensor:
        known, self.result_is_finite = self.result_is_finite, None
        return super().finite(flat) if known is None else known
