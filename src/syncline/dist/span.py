"""The start and end of one step's exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from syncline.dist.lane import Job


@dataclass(frozen=True)
class Span:
    """The times of one step's exchange, in seconds on this host's monotonic clock."""

    first_ready_s: float
    """When the gradients of the first bucket were ready."""
    last_ready_s: float
    """When the gradients of the last bucket were ready."""
    end_s: float
    """When the last bucket ended."""

    @property
    def exchange_s(self) -> float:
        return self.end_s - self.first_ready_s

    @property
    def exposed_s(self) -> float:
        """Communication time after the last bucket was ready, when there is no backward computation left to hide it."""
        return self.end_s - self.last_ready_s


def span_of(jobs: Sequence[Job]) -> Span | None:
    """Return the span of these buckets, or None if there are none or one has not ended yet."""
    ended = [seconds for job in jobs if (seconds := job.marks.seconds()) is not None]
    if not ended or len(ended) < len(jobs):
        return None
    ready_s = [seconds["ready"] for seconds in ended]
    return Span(min(ready_s), max(ready_s), max(seconds["end"] for seconds in ended))
