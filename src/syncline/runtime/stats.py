"""Statistics of an exchange: when its buckets ran, and how many bytes they sent."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from dataclasses import dataclass

from syncline.dist.lane import Job
from syncline.exchange import EXCHANGES, Dense, Exchange, Hierarchical
from syncline.records.run_record import BucketSpan, PhaseSpan

PhaseTiming = PhaseSpan
BucketTiming = BucketSpan


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
    """The buckets of the last step that have ended, in the order in which they were ready. Times are in seconds on
    this host's monotonic clock."""


def timings_of(jobs: Iterable[Job]) -> tuple[BucketTiming, ...]:
    """Return the times of the buckets that have ended."""
    return tuple(
        BucketTiming(
            bucket=job.bucket,
            lane=job.lane,
            bytes=job.bytes,
            exchange="" if job.exchange is None else name_of(job.exchange),
            ready_s=seconds["ready"],
            start_s=seconds["start"],
            end_s=seconds["end"],
            phases=() if job.phases is None else tuple(map(_phase, job.phases.ended(seconds))),
        )
        for job in jobs
        if (seconds := job.marks.seconds()) is not None
    )


def _phase(phase: tuple[str, str, int, float, float]) -> PhaseTiming:
    name, level, sent_bytes, start_s, end_s = phase
    return PhaseTiming(name=name, level=level, sent_bytes=sent_bytes, start_s=start_s, end_s=end_s)


def name_of(exchange: Exchange) -> str:
    """Return the short name of an exchange, like `oktopk(density=0.05)`.

    It is the name of an exchange of the same type in `EXCHANGES`, with the settings that differ from it. If there is
    none, it is the name of the type.
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
    fields: list[str] = [f.name for f in dataclasses.fields(exchange)] if dataclasses.is_dataclass(exchange) else []
    changed = ", ".join(
        f"{field}={name_of(value) if isinstance(value, Exchange) else repr(value)}"
        for field in fields
        if (value := getattr(exchange, field)) != getattr(other, field)
    )
    return f"{name}({changed})" if changed else name


@functools.cache
def _known() -> dict[str, Exchange]:
    return {name: make() for name, make in EXCHANGES.items()}
