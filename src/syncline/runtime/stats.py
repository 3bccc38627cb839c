"""What an exchange has done: when its buckets ran, and what was sent for them."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from syncline.dist.comm import LaneGroups
from syncline.dist.lane import Job
from syncline.exchange import EXCHANGES, Dense, Exchange, Hierarchical, Layout


@dataclass(frozen=True)
class PhaseTiming:
    """One collective of a bucket, on the bucket's clock. Several may be under way at once."""

    name: str
    """As `all_reduce`."""
    level: str
    """Among which ranks."""
    sent_bytes: int
    """By the busiest of them."""
    start_s: float
    """When it was issued; on CUDA, when the lane's stream got to it."""
    end_s: float
    """When it had ended; on CUDA, when the lane's stream went on after waiting for it, which may be later."""


@dataclass(frozen=True)
class BucketTiming:
    """One bucket of the last step: seconds on this host's monotonic clock."""

    bucket: int
    lane: int
    bytes: int
    exchange: str
    """Through which it went, in short."""
    ready_s: float
    start_s: float
    end_s: float
    phases: tuple[PhaseTiming, ...] = ()
    """In the order in which they were issued, while `handle.trace()` is on. What lies between them is the exchange's
    own work."""


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
            timing = BucketTiming(
                bucket=job.bucket,
                lane=job.lane,
                bytes=job.bytes,
                exchange="" if job.exchange is None else name_of(job.exchange),
                ready_s=seconds["ready"],
                start_s=seconds["start"],
                end_s=seconds["end"],
                phases=() if job.phases is None else tuple(PhaseTiming(*one) for one in job.phases.ended(seconds)),
            )
            timings.append(timing)
    return tuple(timings)


def name_of(exchange: Exchange) -> str:
    """As in `EXCHANGES`, with the settings that are not as there: `oktopk(density=0.05)`. Others by their type."""
    known = _known()
    for name, other in known.items():
        if exchange == other:
            return name
    if isinstance(exchange, Hierarchical) and exchange.across != Dense():
        name, other = f"hierarchical+{name_of(exchange.across)}", Hierarchical(across=exchange.across)
    else:
        alike = (name for name, other in known.items() if type(other) is type(exchange))
        name = next(alike, type(exchange).__name__)
        other = known.get(name, exchange)
    changed = _changed(exchange, other)
    return f"{name}({changed})" if changed else name


@functools.cache
def _known() -> dict[str, Exchange]:
    return {name: make() for name, make in EXCHANGES.items()}


def _changed(exchange: object, other: object) -> str:
    texts = []
    for field in dataclasses.fields(exchange) if dataclasses.is_dataclass(exchange) else ():
        value = getattr(exchange, field.name)
        if value != getattr(other, field.name):
            texts.append(f"{field.name}={name_of(value) if isinstance(value, Exchange) else repr(value)}")
    return ", ".join(texts)


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
