"""Statistics of an exchange: when its buckets ran, and how many bytes they sent."""

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
    """One collective of a bucket, on the bucket's clock. Several may run at the same time."""

    name: str
    """The collective, like `all_reduce`."""
    level: str
    """The level on which it runs."""
    sent_bytes: int
    """Bytes that the busiest rank sends."""
    start_s: float
    """When it was issued; on CUDA, when the lane's stream reached it."""
    end_s: float
    """When it had ended; on CUDA, when the lane's stream continued after waiting for it, which may be later."""


@dataclass(frozen=True)
class BucketTiming:
    """Times of one bucket in the last step, in seconds on this host's monotonic clock."""

    bucket: int
    lane: int
    bytes: int
    exchange: str
    """Short name of the exchange."""
    ready_s: float
    start_s: float
    end_s: float
    phases: tuple[PhaseTiming, ...] = ()
    """The collectives in the order in which they were issued, if `handle.trace()` is on. Between them, the exchange
    computes."""


@dataclass(frozen=True)
class Stats:
    """Statistics of an exchange since it was attached."""

    steps: int
    sent_bytes: dict[str, int]
    """Bytes that the busiest rank sent in the last step, per level."""
    total_sent_bytes: dict[str, int]
    """Bytes that the busiest rank sent in all steps, per level."""
    buckets: tuple[BucketTiming, ...]
    """Times of the last step's buckets, in the order in which they were ready. Buckets that still run are left out."""


class Exchanged(Protocol):
    """The fields of a bucket that determine its bytes."""

    @property
    def lane(self) -> int: ...

    @property
    def exchange(self) -> Exchange: ...

    @property
    def layout(self) -> Layout: ...


def timings_of(jobs: Iterable[Job]) -> tuple[BucketTiming, ...]:
    """Return the times of the buckets that have ended."""
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
                phases=() if job.phases is None else tuple(PhaseTiming(*phase) for phase in job.phases.ended(seconds)),
            )
            timings.append(timing)
    return tuple(timings)


def name_of(exchange: Exchange) -> str:
    """Return the short name of an exchange with the settings that differ from it, like `oktopk(density=0.05)`.

    An exchange that is not in `EXCHANGES` is named after its type.
    """
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
    """Return the bytes that the busiest rank has sent over these lanes, per level."""
    total: Counter[str] = Counter()
    for groups in lanes:
        total.update(groups.counter.sent_bytes)
    return dict(total)


def predicted_for(buckets: Iterable[Exchanged], lanes: Sequence[LaneGroups]) -> dict[str, int]:
    """Return the bytes that a step should send, per level, by the cost that the exchanges state."""
    total: Counter[str] = Counter()
    for bucket in buckets:
        topology = lanes[bucket.lane].topology
        total.update(bucket.exchange.cost(bucket.layout.numel, bucket.layout.dtype, topology).sent_bytes)
    return dict(total)
