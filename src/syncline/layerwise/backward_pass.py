"""One backward pass, layer by layer: which gradients have arrived, and which buckets are being exchanged."""

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
    """Parameters of which this holds the last piece."""
    before: tuple[int, ...] = ()
    """Indices of the buckets with the other pieces, for a parameter that is in several."""

    @property
    def label(self) -> str:
        return self.pieces[0].name if len(self.pieces) == 1 else f"{self.pieces[0].name} to {self.pieces[-1].name}"


@dataclass
class Pass(Step):
    """One backward pass."""

    held: dict[str, Tensor] = field(default_factory=dict)
    """Gradients that have arrived, by name; they become results in place."""
    arrived: set[str] = field(default_factory=set)
    order: list[str] = field(default_factory=list)
    submitted: int = 0
    under_way: list[Flight] = field(default_factory=list)
    finite: dict[int, Tensor] = field(default_factory=dict)
    """Whether each bucket was finite, by index."""
    unused: frozenset[str] = frozenset()
    """Parameters that no rank has used."""


@dataclass
class Flight:
    """A bucket that was submitted, and the gradients that it holds on to."""

    bucket: LayerBucket
    future: Any
    bytes: int


def counts(bucket: LayerBucket, now: Pass) -> Tensor:
    """Return whether the parameters that a bucket completes take a step. A large parameter does if any of its pieces
    was finite; the result of the others is zero."""
    finite = now.finite[bucket.index]
    if not bucket.before:
        return finite
    return torch.stack([finite, *(now.finite[index] for index in bucket.before)]).any()
