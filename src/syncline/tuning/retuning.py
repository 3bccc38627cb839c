"""Decide when to tune again: links have changed for good, and tuning takes a small share of the training time.

A link that flickers must not cause one tuning after the other. So a drift counts if it lasts over several checks, each
tuning doubles the distance to the next one, and all of them together may take a share of the time since the first.
"""

from __future__ import annotations

from dataclasses import dataclass

CHECK_STEPS = 100
"""Steps between two checks."""
CHECKS = 2
"""Checks in a row that must find a drift."""
SHARE = 0.02
"""Share of the training time that tuning may take, from the second time on."""


@dataclass
class Retuning:
    """The state of this decision, on rank 0, which decides for all ranks."""

    began_s: float
    cost_s: float  # what the last tuning took: the next one will take about as long
    spent_s: float = 0.0
    drifted: int = 0
    pause: int = 0
    """Checks that are skipped after the last tuning."""
    count: int = 0

    def due(self, drifted: bool, now_s: float) -> bool:
        """Return whether to tune again, given what a check has found."""
        if self.pause:
            self.pause -= 1
            return False
        self.drifted = self.drifted + 1 if drifted else 0
        affordable = self.spent_s + self.cost_s <= SHARE * (now_s - self.began_s)
        return self.drifted >= CHECKS and affordable

    def tuned(self, cost_s: float) -> None:
        """Note that the model was tuned again, and what that took."""
        self.count += 1
        self.spent_s += cost_s
        self.cost_s, self.drifted, self.pause = cost_s, 0, 2**self.count
