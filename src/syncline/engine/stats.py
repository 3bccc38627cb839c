"""What an exchange has done: when its buckets ran, and what was sent for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from syncline.engine.comm import LaneGroups
from syncline.engine.lane import Job
from syncline.exchange import Exchange, Layout


@dataclass(frozen=True)
class BucketTiming:
    """One bucket of the last step: seconds on this host's monotonic clock."""

    bucket: int
    lane: int
    bytes: int
    ready_s: float
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Stats:
    """What the exchange has done so far."""

    steps: int
    sent_bytes: dict[str, int]
    """In the last step, by the busiest rank, per level."""
    total_sent_bytes: dict[str, int]
    buckets: tuple[BucketTiming, ...]
    """Of the last step, in the order they were ready; those still under way are left out."""


class Exchanged(Protocol):
    """A bucket, as far as its bytes go."""

    @property
    def lane(self) -> int: ...

    @property
    def exchange(self) -> Exchange: ...

    @property
    def layout(self) -> Layout: ...


def timings_of(jobs: Iterable[Job]) -> tuple[BucketTiming, ...]:
    """Of those that have ended."""
    timings = []
    for job in jobs:
        seconds = job.marks.seconds()
        if seconds is not None:
            size = job.flat.numel() * job.flat.element_size()
            timings.append(BucketTiming(job.bucket, job.lane, size, seconds["ready"], seconds["start"], seconds["end"]))
    return tuple(timings)


def sent_over(lanes: Iterable[LaneGroups]) -> dict[str, int]:
    """By the busiest rank since they were made, per level."""
    total: Counter[str] = Counter()
    for groups in lanes:
        total.update(groups.counter.sent_bytes)
    return dict(total)


def predicted_for(buckets: Iterable[Exchanged], lanes: Sequence[LaneGroups]) -> dict[str, int]:
    """Per step and level, by the exchanges' own account."""
    total: Counter[str] = Counter()
    for bucket in buckets:
        topology = lanes[bucket.lane].topology
        total.update(bucket.exchange.cost(bucket.layout.numel, bucket.layout.dtype, topology).sent_bytes)
    return dict(total)
