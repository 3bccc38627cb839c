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
    """One collective of a bucket, with times on the same clock as the bucket's. Several may run at the same time.

    Example:
        >>> handle.trace()
        >>> train_step(model)
        >>> for phase in handle.stats().buckets[0].phases:
        ...     print(phase.name, phase.level, phase.end_s - phase.start_s)
    """

    name: str
    """The kind of collective, such as `all_reduce`."""
    level: str
    """The level of the topology on which it ran."""
    sent_bytes: int
    """Bytes that the busiest rank sent."""
    start_s: float
    """When it was issued; on CUDA, when the lane's stream reached it."""
    end_s: float
    """When it ended; on CUDA, when the lane's stream had waited for it, which may be later."""


@dataclass(frozen=True)
class BucketTiming:
    """One bucket of the last step. Times are in seconds on this host's monotonic clock.

    Example:
        >>> for bucket in handle.stats().buckets:
        ...     print(bucket.bucket, bucket.bytes, bucket.end_s - bucket.start_s)
    """

    bucket: int
    """The index of the bucket."""
    lane: int
    """The index of its lane."""
    bytes: int
    """The size of its gradients."""
    exchange: str
    """The short name of its exchange, such as `oktopk(density=0.05)`."""
    ready_s: float
    """When its gradients were ready."""
    start_s: float
    """When its exchange started."""
    end_s: float
    """When its exchange ended."""
    phases: tuple[PhaseTiming, ...] = ()
    """Its collectives in the order in which they were issued, if `handle.trace()` is on. The time between them is
    computation of the exchange."""


@dataclass(frozen=True)
class Stats:
    """Statistics of an exchange, as `Handle.stats` returns them.

    Example:
        >>> stats = handle.stats()
        >>> print(stats.steps, sum(stats.sent_bytes.values()))
    """

    steps: int
    """Number of steps exchanged, including those of a checkpoint that was loaded."""
    sent_bytes: dict[str, int]
    """Bytes that the busiest rank sent in the last step, per level."""
    total_sent_bytes: dict[str, int]
    """Bytes that the busiest rank has sent since the exchange was attached, per level."""
    buckets: tuple[BucketTiming, ...]
    """The buckets of the last step that have ended, in the order in which they were ready."""


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
        total.update(groups.comm.counter.sent_bytes)
    return dict(total)


def predicted_for(buckets: Iterable[Exchanged], lanes: Sequence[LaneGroups]) -> dict[str, int]:
    """Return the bytes that a step should send, per level, by the cost that the exchanges state."""
    total: Counter[str] = Counter()
    for bucket in buckets:
        topology = lanes[bucket.lane].comm.topology
        total.update(bucket.exchange.cost(bucket.layout.numel, bucket.layout.dtype, topology).sent_bytes)
    return dict(total)
