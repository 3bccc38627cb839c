"""When the exchange of one step began and ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from syncline.dist.lane import Job


@dataclass(frozen=True)
class Span:
    """The exchange of one step: seconds on this host's monotonic clock."""

    first_ready_s: float
    last_ready_s: float
    end_s: float

    @property
    def exchange_s(self) -> float:
        return self.end_s - self.first_ready_s

    @property
    def exposed_s(self) -> float:
        """What came after the last bucket was ready, when backward has nothing left to hide it behind."""
        return self.end_s - self.last_ready_s


def span_of(jobs: Sequence[Job]) -> Span | None:
    """From when to when; None while one of them is not known to have ended, and where there are none."""
    known = [seconds for job in jobs if (seconds := job.marks.seconds()) is not None]
    if not known or len(known) < len(jobs):
        return None
    ready_s = [seconds["ready"] for seconds in known]
    return Span(min(ready_s), max(ready_s), max(seconds["end"] for seconds in known))
