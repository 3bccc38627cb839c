"""The parts that sparse exchanges have in common: their settings, and flags for the entries that were applied.

A sparse exchange applies some elements of a bucket in each step and keeps the others in a residual. An entry may come
from some of the ranks only. `mean` says by which number its sum is divided:

- "ranks": all ranks. This is right for gradients, because a rank that did not send an entry sends it later.
- "contributors": the ranks that sent the entry. This is right for updates: otherwise weights whose updates few ranks
  send would change too slowly. Buckets are divided by the number of ranks P before an exchange, so it multiplies the
  sum by P/count. What was applied times count/P, plus the residuals, then equals what came in.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, ClassVar

import torch
from torch import Tensor

from syncline.errors import UsageError
from syncline.exchange.layout import Layout
from syncline.exchange.packed import Packed, PackedState

MEANS = ("auto", "ranks", "contributors")
_LOWEST_DENSITY = 1e-4


@dataclass(frozen=True)
class Sparse(Packed):
    """An exchange that applies only a fraction of the elements in each step."""

    density: float = 0.01
    values: str = "bf16"
    mean: str = field(default="auto", kw_only=True, metadata={"optional": True})
    """`auto` acts as `ranks`. `for_updates` replaces it."""
    decay: float | None = field(default=None, kw_only=True, metadata={"optional": True})
    """None acts as 1. `for_updates` replaces it."""
    partial = True
    formats: ClassVar[Iterable[str]] = ()
    """Number formats that `values` may name."""

    def __post_init__(self) -> None:
        name = type(self).__name__
        density, decay = (getattr(self, setting) for setting in ("density", "decay"))
        if not (_is_number(density) and _LOWEST_DENSITY <= density <= 1):
            needed = f"a fraction of the gradients from {_LOWEST_DENSITY:g} to 1, such as 0.01 for 1 %"
            raise UsageError(f"{name}(density={density!r}): density must be {needed}")
        if not isinstance(self.values, str) or self.values not in self.formats:
            raise UsageError(f"{name}(values={self.values!r}): values must be one of {', '.join(self.formats)}")
        if not isinstance(self.mean, str) or self.mean not in MEANS:
            raise UsageError(f"{name}(mean={self.mean!r}): mean must be one of {', '.join(MEANS)}")
        if decay is not None and not (_is_number(decay) and 0 < decay <= 1):
            raise UsageError(f"{name}(decay={decay!r}): decay must be greater than 0 and at most 1")
        object.__setattr__(self, "density", float(density))  # a NumPy number cannot be written as JSON
        object.__setattr__(self, "decay", None if decay is None else float(decay))

    @property
    def residual_factor(self) -> float:
        """The factor by which the residual is multiplied before a step's input is added to it."""
        return 1.0 if self.decay is None else self.decay


class SparseState(PackedState):
    """A bucket of which each step applies only some elements."""

    def __init__(self, layout: Layout, momentum: float, rows: int, part_bytes: int, ranks: int, decay: float) -> None:
        super().__init__(layout, momentum, rows, part_bytes, ranks, decay)
        self.flags: Tensor | None = None
        """1 where `run` applied an entry of this rank, 0 elsewhere; None unless `track_applied` was called."""
        self.sent_dense = False
        """True in a step that applies the whole bucket."""

    def track_applied(self) -> None:
        # Not in the workspace, which other buckets use before the flags of this one are read.
        self.flags = torch.zeros(self._numel, dtype=torch.int8, device=self._device)

    def applied_here(self) -> Tensor | None:
        return None if self.flags is None or self.sent_dense else self.flags.view(torch.bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
