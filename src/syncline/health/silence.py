"""Log a line when a rank falls silent, and one when it is back, while nothing has failed yet."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from syncline.health.suspects import Heartbeats
from syncline.units import ranks_text

ALARM_S = 5.0
"""Time without a heartbeat, or without an answer from the store, that is worth a line in the log."""
_ALARM_BEATS = 3.0
_MOST_RANKS = 8
"""Number of ranks that one line names."""


class SilenceLog:
    """The silent ranks among those that this rank watches."""

    def __init__(self, rank: int, beat_s: float) -> None:
        self._rank, self._beat_s = rank, beat_s
        self._since_s: dict[int, float] = {}
        """When each silent rank fell silent."""
        self._alarms: Counter[int] = Counter()

    def update(self, heartbeats: Heartbeats, ranks: Sequence[int]) -> list[str]:
        """Return the lines to log since the last call."""
        now_s = time.monotonic()
        silent: list[int] = []
        lines = []
        for rank in ranks:
            silent_s = heartbeats.silent_s(rank)
            if silent_s is None:
                self._since_s.pop(rank, None)
            elif rank not in self._since_s and silent_s >= self._patience_s(rank):
                silent.append(rank)
                self._since_s[rank] = now_s - silent_s
                self._alarms[rank] += 1
            elif rank in self._since_s and silent_s < self._beat_s:
                back_s = now_s - self._since_s.pop(rank)
                lines.append(f"rank {self._rank}: rank {rank} is back after {back_s:.0f} s without a heartbeat")
        if silent:
            least_s = min(now_s - self._since_s[rank] for rank in silent)
            lines.append(
                f"rank {self._rank}: no heartbeat from {ranks_text(silent, _MOST_RANKS)} for {least_s:.0f} s: the "
                "process is stopped or has ended, or its host cannot be reached"
            )
        return lines

    def _patience_s(self, rank: int) -> float:
        """Return how long a rank may be silent before that is logged.

        The time doubles whenever the rank comes back: it probably runs code that holds Python's lock for seconds.
        """
        return max(ALARM_S, _ALARM_BEATS * self._beat_s) * 2.0 ** max(0, self._alarms[rank] - 1)
