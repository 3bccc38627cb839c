"""What a model's forward leaves for its backward, block by block, as data: bytes and seconds, by the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

KEEP, RECOMPUTE, OFFLOAD, PARK = WAYS = ("keep", "recompute", "offload", "park")
"""What may become of it: `syncline.predict.memory` explains them."""


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A quantity that grows with the batch."""

    fixed: float
    each: float

    def at(self, batch: float) -> float:
        return max(0.0, self.fixed + self.each * batch)

    @classmethod
    def through(cls, points: Sequence[tuple[int, float]]) -> Line:
        """Through what was measured at one batch or two. One: all of it grows."""
        if len(points) == 1:
            return cls(0.0, points[0][1] / points[0][0])
        (small, low), (large, high) = points[0], points[-1]
        each = max(0.0, (high - low) / (large - small))
        return cls(max(0.0, high - each * large), each)


class Block(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One block, by itself: bytes above what was there before it, and seconds."""

    name: str
    held: Line
    """After its forward: what autograd saves, and its output."""
    input: Line
    """What has to stay if the rest does not."""
    forward_peak: Line
    backward_peak: Line
    """From when its own forward is complete, that included."""
    forward_s: Line
    backward_s: Line

    def __post_init__(self) -> None:
        for name in ("held", "input", "forward_peak", "backward_peak", "forward_s", "backward_s"):
            line: Line = getattr(self, name)
            if not (math.isfinite(line.fixed) and math.isfinite(line.each)):
                raise ValueError(f"{name}: must be finite")


class Activations(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a model's forward and backward take, beside its weights and gradients."""

    batches: tuple[int, ...]
    """At which it was measured."""
    blocks: tuple[Block, ...]
    before: Line
    """Held by what comes before the blocks."""
    behind_peak: Line
    """The most that the head and the loss take, in forward and backward."""
    before_peak: Line
    """The most that the backward of what comes before takes."""
    behind_s: Line
    """Forward and backward of all that is not in blocks."""
    to_host_bps: float = 0.0
    """Bytes per second between the device and pinned memory of the host; 0: there is no such way."""
    parameter_bytes: int = 0
    buffer_bytes: int = 0
    elements: int = 0
    """Of all parameters."""
    largest_bytes: int = 0
    """Of any parameter."""
    optimizer_bytes: float = 0.0
    """Of the optimizer's state, per element."""

    def __post_init__(self) -> None:
        if not self.batches or any(batch < 1 for batch in self.batches):
            raise ValueError("batches: must name at least one, from 1 up")
        if not (math.isfinite(self.to_host_bps) and self.to_host_bps >= 0):
            raise ValueError("to_host_bps: must be 0 or more")
        for name in ("parameter_bytes", "buffer_bytes", "elements", "largest_bytes", "optimizer_bytes"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}: must be 0 or more")
