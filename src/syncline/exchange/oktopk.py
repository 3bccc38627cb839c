"""OkTopk: of all gradients only the largest sums travel, in slots of a fixed size, and the rest waits its turn.

After Ok-Topk (near-optimal sparse all-reduce, PPoPP 2022). A rank adds its gradients to what it has kept. Of a bucket
of n elements about k = density · n leave it:

1. Each rank picks the largest entries of each region, k/P of each, and sends them to the region's owner (all-to-all).
2. The owner adds up what it got, in fp32, and picks the k/P largest sums.
3. All ranks get all owners' picks (all-gather). That is the result: the same on all ranks, zero elsewhere.
4. A rank keeps what it did not send, what it sent and the owner did not pick, and what casting to 16 bits lost; an
   owner keeps what casting its sums lost. So what was applied plus what is kept is what came in.

Where the paper exchanges variable numbers of entries, found with a threshold that is tracked over steps and balanced
now and then, slots are fixed here and filled with the largest entries of this very step: shapes and bytes never depend
on data, nothing waits for a device, and there is nothing to balance, because regions are dealt in small cells. An
entry takes 4 bytes, or 6 with fp32 values.

On the wire, per rank and step: 2(P−1) slots of about 4k/P bytes, which is 2k(P−1)/P words, and never more than 2.5k, in
*every* step; the paper's bound is 6k.

When it loses: on links that dense gradients do not fill; with buckets so small that k < 8P, which are sent whole; with
memory to spare for nothing, because it keeps two copies of the gradients; and when a model needs all of its gradients
in every step. Lossy: a model trains differently, and may train worse. See `warmup`, `momentum`, and the results.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from syncline.errors import UsageError
from syncline.exchange.base import Comm, Cost, Layout, Phase, Rounding, State, Topology, Work
from syncline.exchange.residual import Residual
from syncline.kernels import VALUES, Kernels, Slots, kernels_for

_MOST_WORDS = {"bf16": 2.5, "fp16": 2.5, "fp32": 4.6}
"""That a rank sends per selected entry, in both directions: a bucket for which headers and rounding up make it more
goes whole."""
_LOWEST_DENSITY = 1e-4


@dataclass(frozen=True)
class OkTopk:
    """The largest `density` of all sums; what is not sent yet is added to later gradients.

    `values`: what entries travel in: `bf16`, `fp16` (scaled to its range) or `fp32`; what the cast loses is kept.
    `warmup`: so many steps are dense at first, while gradients change fast.
    `momentum`: each rank accumulates gradients with momentum before it selects, and an entry that was applied starts
    anew. For optimizers with momentum, which then must have none of their own: `SGD(momentum=0)` with
    `OkTopk(momentum=0.9)`.

    To clip gradients, clip the result, with `torch.nn.utils.clip_grad_norm_` after backward as ever.
    """

    density: float = 0.01
    values: str = "bf16"
    warmup: int = 0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        for name in ("density", "momentum", "warmup"):
            object.__setattr__(self, name, _plain(getattr(self, name)))
        check_sparse(type(self).__name__, self.density, self.values)
        if isinstance(self.warmup, bool) or not isinstance(self.warmup, int) or self.warmup < 0:
            raise UsageError(f"OkTopk(warmup={self.warmup!r}): it is a number of steps, 0 for none")
        if not (isinstance(self.momentum, int | float) and 0 <= self.momentum < 1):
            raise UsageError(f"OkTopk(momentum={self.momentum!r}): it is at least 0, for none, and less than 1")

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
        return _Whole(layout, self.momentum) if slots is None else _Sparse(layout, self.momentum, slots)

    def run(self, flat: Tensor, state: State, comm: Comm) -> Work | None:
        assert isinstance(state, Residual)  # noqa: S101 - as prepared
        if self.momentum:
            state.accelerate(flat)
        elif not isinstance(state, _Sparse) or state.step < self.warmup:
            state.take(flat)
        if not isinstance(state, _Sparse):
            state.give_up(flat)
            return comm.all_reduce(flat) if comm.size > 1 else None
        if state.step < self.warmup:
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

    def cost(self, numel: int, dtype: torch.dtype, topology: Topology) -> Cost:
        if topology.ranks == 1:
            return Cost(())
        slots = self.slots(numel, dtype, topology.ranks)
        if slots is None:
            return Cost((Phase.of("all_reduce", numel, dtype.itemsize, topology),))
        nbytes = slots.regions * slots.bytes
        return Cost(tuple(Phase.of(kind, nbytes, 1, topology) for kind in ("all_to_all", "all_gather")))

    def slots(self, numel: int, dtype: torch.dtype, ranks: int) -> Slots | None:
        """For a bucket of this size; None where it goes whole: alone, or too small, or no smaller for being sparse."""
        if ranks == 1:
            return None
        slots = Slots.of(numel, ranks, self.density, VALUES[self.values])
        if slots is None or ranks * slots.bytes >= numel * dtype.itemsize:
            return None
        most = _MOST_WORDS[self.values] * int(self.density * numel)
        return slots if 2 * (ranks - 1) * slots.bytes <= 4 * most else None

    def rounding(self, dtype: torch.dtype, ranks: int) -> Rounding:
        # The rank's own sum, the owner's over the ranks, and what is taken out again; kept in fp32 from step to step.
        unit = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
        return Rounding(4 * ranks * unit, of_largest=4 * ranks * unit)


class _Whole(Residual):
    """A bucket that travels whole."""

    def describe(self) -> str:
        return "whole"


class _Sparse(Residual):
    """A bucket that travels in slots."""

    sparse = True

    def __init__(self, layout: Layout, momentum: float, slots: Slots) -> None:
        super().__init__(layout, momentum)
        self.kernels: Kernels = kernels_for(slots, layout.device, layout.buffer)
        self.mine = layout.buffer("mine", slots.regions, slots.bytes, dtype=torch.uint8)
        self.theirs = layout.buffer("theirs", slots.regions, slots.bytes, dtype=torch.uint8)
        self.picked = layout.buffer("picked", slots.bytes, dtype=torch.uint8)
        self.result_is_finite: Tensor | None = None
        self._slots = slots
        self.reserve()

    def describe(self) -> str:
        return f"sparse, {self._slots.regions} slots of {self._slots.entries} entries"

    def finite(self, flat: Tensor) -> Tensor:
        known, self.result_is_finite = self.result_is_finite, None
        return super().finite(flat) if known is None else known


def _plain(value: Any) -> Any:
    """numpy's numbers as Python's, for a setting to be one that JSON knows; all else as it is."""
    if type(value) in (bool, int, float) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def check_sparse(name: str, density: object, values: object) -> None:
    number = isinstance(density, int | float) and not isinstance(density, bool)
    if not (number and math.isfinite(density) and _LOWEST_DENSITY <= density <= 1):  # type: ignore[arg-type,operator]
        raise UsageError(
            f"{name}(density={density!r}): it is a share of all gradients, like 0.01 for one in a hundred, "
            f"and at least {_LOWEST_DENSITY:g}"
        )
    if not isinstance(values, str) or values not in VALUES:
        raise UsageError(f"{name}(values={values!r}): values is one of {', '.join(VALUES)}")
