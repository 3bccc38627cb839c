"""What is known of one backward, layer by layer: which gradients have arrived, and which buckets are under way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from syncline.dist.lane import Job
from syncline.exchange import Exchange, Layout, State
from syncline.layerwise.bucketing import Piece


@dataclass
class Bucket:
    """Some pieces of gradients that are exchanged together."""

    index: int
    pieces: tuple[Piece, ...]
    lane: int
    exchange: Exchange
    layout: Layout
    state: State
    averages: bool
    ends: tuple[str, ...]
    """Parameters of which this holds the last piece."""
    before: tuple[int, ...] = ()
    """Where the others are, for a parameter that is in several."""

    @property
    def label(self) -> str:
        return self.pieces[0].name if len(self.pieces) == 1 else f"{self.pieces[0].name} to {self.pieces[-1].name}"


@dataclass
class Pass:
    """One backward."""

    held: dict[str, Tensor] = field(default_factory=dict)
    """Gradients that have arrived, by name; they become results in place."""
    arrived: set[str] = field(default_factory=set)
    order: list[str] = field(default_factory=list)
    submitted: int = 0
    under_way: list[Flight] = field(default_factory=list)
    finite: dict[int, Tensor] = field(default_factory=dict)
    """By bucket."""
    jobs: list[Job] = field(default_factory=list)
    began_s: float | None = None
    """When its first bucket was complete."""
    unused: frozenset[str] = frozenset()
    """By no rank."""


@dataclass
class Flight:
    """A bucket that was submitted, and the gradients that it holds on to."""

    bucket: Bucket
    future: Any
    bytes: int


def counts(bucket: Bucket, now: Pass) -> Tensor:
    """Whether what a bucket completes takes its step. Of a large parameter some parts may count and others not, whose
    result is zero."""
    finite = now.finite[bucket.index]
    if not bucket.before:
        return finite
    return torch.stack([finite, *(now.finite[index] for index in bucket.before)]).any()
