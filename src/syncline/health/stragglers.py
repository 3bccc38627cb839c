"""Which rank keeps the others waiting: each says what a step takes it by itself, and the first of them compares."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence

from syncline.dist.span import Span
from syncline.errors import tell
from syncline.health.suspects import At

_STEPS = 50
"""Of which the median says what a step takes."""
_ENOUGH_STEPS = 10
_LAGS = 0.25
"""A rank that takes this much of a step longer than the others is a straggler."""
_LAGS_S = 0.005
_LOOKS = 2
"""One after the other at which it must be the slowest: others are slow once in a while."""


class Stragglers:
    """Of one model's ranks."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks
        self._own_s: deque[float] = deque(maxlen=_STEPS)
        self._slowest, self._looks = -1, 0
        """Who was the slowest at the last looks, and at how many of them."""
        self.found: str | None = None
        """Who keeps the others waiting, if somebody does."""
        self._told: int | None = None

    def stepped(self, span: Span | None, period_s: float) -> None:
        """A step is over, and took so long: what this rank did not spend waiting for the last bucket was its own."""
        if span is not None:
            self._own_s.append(max(0.0, period_s - span.exposed_s))

    def own_s(self) -> float | None:
        """What a step takes this rank itself, when it has made enough of them."""
        steps = tuple(self._own_s)
        return statistics.median(steps) if len(steps) >= _ENOUGH_STEPS else None

    def compare(self, at: Mapping[int, At]) -> None:
        own_s = {rank: one.own_s for rank, one in at.items() if one.own_s is not None}
        if len(own_s) < len(self._ranks):
            return
        slowest = max(own_s, key=lambda rank: own_s[rank])
        others_s = statistics.median(seconds for rank, seconds in own_s.items() if rank != slowest)
        lag_s = own_s[slowest] - others_s
        if lag_s <= max(_LAGS_S, _LAGS * others_s):
            self._looks, self.found, self._told = 0, None, None
            return
        self._looks = self._looks + 1 if slowest == self._slowest else 1
        self._slowest = slowest
        if self._looks < _LOOKS:
            self.found = None
            return
        self.found = (
            f"rank {slowest} takes {lag_s:.3f} s per step longer than the others, which wait for it "
            f"({own_s[slowest]:.3f} s of its own, theirs {others_s:.3f} s; medians of the last {_STEPS} steps)"
        )
        if self._told != slowest:
            self._told = slowest
            tell(self.found)
