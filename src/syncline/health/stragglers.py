"""Stragglers: each rank measures its own part of a step, and the first rank of a model compares them."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

from syncline.dist.lane import Span
from syncline.errors import warn
from syncline.health.suspects import Progress

_STEPS = 50  # number of steps whose median counts
_ENOUGH_STEPS = 10
_LAG = 0.25
"""A straggler's own time exceeds that of the others by at least this fraction, and by `_LAG_S`."""
_LAG_S = 0.005
_CHECKS = 2  # number of checks in a row at which a rank must be the slowest: every rank is slow once in a while


class Stragglers:
    """The straggler among the ranks of one model."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._own_s: deque[float] = deque(maxlen=_STEPS)
        self._slowest, self._checks = -1, 0
        """The slowest rank, and at how many checks in a row it was the slowest."""
        self.straggler: str | None = None
        """A sentence about the rank that makes the others wait, if there is one; known to the first rank."""

    def stepped(self, span: Span | None, period_s: float) -> None:
        """Record the time of a step that this rank did not spend waiting for the exchange."""
        if span is not None:
            self._own_s.append(max(0.0, period_s - span.exposed_s))

    def own_s(self) -> float | None:
        """Return the median of this rank's own time per step, after enough steps."""
        steps = tuple(self._own_s)
        return statistics.median(steps) if len(steps) >= _ENOUGH_STEPS else None

    def compare(self, progress: Mapping[int, Progress]) -> None:
        """Look for a straggler, and warn about a new one."""
        own_s = {rank: of_rank.own_s for rank, of_rank in progress.items() if of_rank.own_s is not None}
        if len(own_s) < self._ranks:
            return
        slowest = max(own_s, key=lambda rank: own_s[rank])
        others_s = statistics.median(seconds for rank, seconds in own_s.items() if rank != slowest)
        lag_s = own_s[slowest] - others_s
        late = lag_s > max(_LAG_S, _LAG * others_s)
        self._checks = 0 if not late else self._checks + 1 if slowest == self._slowest else 1
        self._slowest, self.straggler = slowest, None
        if self._checks >= _CHECKS:
            self.straggler = (
                f"rank {slowest} takes {lag_s:.3f} s per step longer than the others, which wait for it "
                f"({own_s[slowest]:.3f} s of its own, the others {others_s:.3f} s; medians of the last {_STEPS} steps)"
                f"{_remedy(own_s)}"
            )
            if self._checks == _CHECKS:
                warn(self.straggler)


def _remedy(own_s: Mapping[int, float]) -> str:
    """Name the remedy, and what it would save if a rank's time is in proportion to its batch."""
    if min(own_s.values()) <= 0:
        return ""
    saved_s = max(own_s.values()) - statistics.harmonic_mean(own_s.values())
    saves = f"would save about {saved_s:.3f} s per step (predicted)"
    return f". A batch for each rank by its speed (syncline.shares) {saves}"
