"""The memory and time of a model's forward and backward, block by block, as functions of the batch size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from syncline.records.fields import MOST, Amount, Count, PositiveCount

KEEP, RECOMPUTE, OFFLOAD, PARK = WAYS = ("keep", "recompute", "offload", "park")
"""What happens to a block's activations between forward and backward: see `syncline.predict.memory`."""

_Coefficient = Annotated[float, msgspec.Meta(ge=-MOST, le=MOST)]


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A quantity that grows linearly with the batch."""

    fixed: _Coefficient
    each: _Coefficient

    def at(self, batch: float) -> float:
        return max(0.0, self.fixed + self.each * batch)

    @classmethod
    def through(cls, points: Sequence[tuple[int, float]]) -> Line:
        """Return the line through the measurements at one or two batch sizes; through one, a line from the origin."""
        if len(points) == 1:
            return cls(0.0, points[0][1] / points[0][0])
        (small, low), (large, high) = points[0], points[-1]
        each = max(0.0, (high - low) / (large - small))
        return cls(max(0.0, high - each * large), each)


class Block(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The bytes that one block adds to the memory in use, and its seconds."""

    name: str
    held: Line  # bytes after its forward: what autograd saves, and the output
    input: Line  # bytes of the input, which stay in memory if the block is recomputed
    forward_peak: Line
    backward_peak: Line  # peak of the backward, including the bytes held since the block's forward
    forward_s: Line
    backward_s: Line


class Activations(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The memory and time of a model's forward and backward, without weights and gradients."""

    batches: Annotated[tuple[PositiveCount, ...], msgspec.Meta(min_length=1)]  # the measured batch sizes
    blocks: tuple[Block, ...]
    before: Line  # bytes held by the layers before the blocks
    behind_peak: Line  # peak of the head and the loss, in forward and backward
    before_peak: Line  # peak of the backward of the layers before the blocks
    behind_s: Line  # forward and backward of all layers outside the blocks
    to_host_bps: Amount = 0.0  # bytes per second between the device and pinned host memory; 0 if there is none
    parameter_bytes: Count = 0
    buffer_bytes: Count = 0
    elements: Count = 0  # number of elements of all parameters
    largest_bytes: Count = 0  # bytes of the largest parameter
    optimizer_bytes: Amount = 0.0  # bytes of optimizer state per element
