"""The duration of one step's exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from syncline.dist.lane import Job


@dataclass(frozen=True)
class Span:
    """The duration of one step's exchange."""

    exchange_s: float
    """Seconds from when the first bucket was ready until the last one ended."""
    exposed_s: float
    """Seconds of it after the last bucket was ready, when there is no backward computation left to hide it."""


def span_of(jobs: Sequence[Job]) -> Span | None:
    """Return the span of these buckets, or None if there are none or one has not ended yet."""
    ended = [seconds for job in jobs if (seconds := job.marks.seconds()) is not None]
    if not ended or len(ended) < len(jobs):
        return None
    ready_s, end_s = [seconds["ready"] for seconds in ended], max(seconds["end"] for seconds in ended)
    return Span(end_s - min(ready_s), end_s - max(ready_s))
