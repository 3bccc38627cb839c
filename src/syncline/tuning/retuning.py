"""Decide when to tune again: links have changed for good, and tuning takes a small share of the training time.

A link that flickers must not cause one tuning after the other. So a drift counts if it lasts over several checks, each
tuning doubles the distance to the next one, and all of them together may take a share of the time since the first.
"""

from __future__ import annotations

from dataclasses import dataclass

from syncline.tuning.stakes import Stakes
from syncline.units import milliseconds_text

CHECK_S, CHECK_STEPS, _FEWEST_STEPS = 5.0, 100, 10
"""Time and most steps between two checks."""
CHECKS = 2
"""Checks in a row that must find a drift."""
SHARE = 0.02
"""Share of the training time that tuning may take, from the second time on."""


_FACTOR, _LEAST_SHARE = 1.5, 0.1


def steps_until_check(step_s: float) -> int:
    """Return the steps until the next check, which all ranks must count alike."""
    return max(min(_FEWEST_STEPS, CHECK_STEPS), min(CHECK_STEPS, round(CHECK_S / max(step_s, 1e-6))))


def exposure_drift(before: Stakes, now: Stakes) -> str | None:
    """Describe how steps wait longer for communication than after the last tuning, or return None if they do not."""
    if now.exposed_s <= _FACTOR * before.exposed_s + _LEAST_SHARE * before.step_s:
        return None
    waits = f"{milliseconds_text(now.exposed_s)} per step, and {milliseconds_text(before.exposed_s)} after it was tuned"
    return f"the model waits {waits}"


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
