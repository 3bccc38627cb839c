"""The state of one backward pass: the gradients that have arrived, and the buckets that are being exchanged."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from syncline.layerwise.bucketing import Piece
from syncline.runtime.bucket_runner import Bucket, Step


@dataclass
class LayerBucket(Bucket):
    """Pieces of gradients that are exchanged together."""

    pieces: tuple[Piece, ...] = ()
    ends: tuple[str, ...] = ()
    """Parameters whose last piece is in this bucket."""
    before: tuple[int, ...] = ()
    """Indices of the buckets with the other pieces, for a parameter that is in several."""

    @property
    def label(self) -> str:
        return self.pieces[0].name if len(self.pieces) == 1 else f"{self.pieces[0].name} to {self.pieces[-1].name}"


@dataclass
class Pass(Step):
    """One backward pass."""

    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Gradients that have arrived, by name. The results overwrite them."""
    arrived: set[str] = field(default_factory=set)
    order: list[str] = field(default_factory=list)
    submitted: int = 0
    in_flight: list[Flight] = field(default_factory=list)
    finite: dict[int, Tensor] = field(default_factory=dict)
    """Whether each bucket was finite, by index."""
    unused: frozenset[str] = frozenset()
    """Parameters that no rank has used."""


@dataclass
class Flight:
    """A bucket that was submitted."""

    bucket: LayerBucket
    future: Any
    bytes: int
    """Size of the gradients, which stay in memory until the bucket has finished."""


def counts(bucket: LayerBucket, now: Pass) -> Tensor:
    """Return whether the parameters that a bucket completes take a step.

    A parameter in several buckets takes a step if any of its pieces was finite. The result of the others is zero.
    """
    finite = now.finite[bucket.index]
    if not bucket.before:
        return finite
    return torch.stack([finite, *(now.finite[index] for index in bucket.before)]).any()
