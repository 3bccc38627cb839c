"""Statistics of an exchange: when its buckets ran, and how many bytes they sent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from syncline.dist.lane import Job
from syncline.exchange import name_of
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
    timings = []
    for job in jobs:
        if (seconds := job.marks.seconds()) is not None:
            ended = () if job.phases is None else job.phases.ended(seconds)
            phases = [dict(zip(PhaseTiming.__struct_fields__, phase, strict=True)) for phase in ended]
            times_s = {f"{what}_s": seconds[what] for what in ("ready", "start", "end")}
            name = "" if job.exchange is None else name_of(job.exchange)
            about = {"bucket": job.bucket, "lane": job.lane, "bytes": job.bytes, "exchange": name, "phases": phases}
            timings.append(msgspec.convert({**about, **times_s}, BucketTiming))
    return tuple(timings)
