"""Decide whether measuring the links can pay, from steps that were watched anyway.

The most that any exchange can save is the time that a step waits for communication. A probe may take a share of what
could be saved in a number of steps that even a short training has.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from syncline.plan.search import LEAST_GAIN
from syncline.tuning.trials import reduced
from syncline.units import milliseconds_text

REPAID_STEPS = 1_000
"""Steps in which tuning should be repaid."""
PROBE_SHARE = 0.25
"""Share of what could be saved in these steps that a probe may take."""
LEAST_PROBE_S = 1.0


@dataclass(frozen=True)
class Stakes:
    """What can be won: the median time of a step, and the part of it that waits for communication."""

    step_s: float
    exposed_s: float

    @classmethod
    def of(cls, group: dist.ProcessGroup, step_s: Sequence[float], exposed_s: Sequence[float]) -> Stakes:
        """Return what is at stake, given the times of the same steps on each rank. Collective.

        A rank that waits for a slower one does not wait for the links, so the rank that waits least counts.
        """
        slowest = reduced(group, step_s, dist.ReduceOp.MAX)
        least = reduced(group, exposed_s, dist.ReduceOp.MIN)
        return cls(statistics.median(slowest), max(0.0, statistics.median(least)))

    @property
    def why_not_probe(self) -> str | None:
        """Why nothing is measured, as a sentence; None if it may pay."""
        step, exposed = milliseconds_text(self.step_s), milliseconds_text(self.exposed_s)
        waits = f"a step of {step} waits {exposed} for communication"
        if self.exposed_s < LEAST_GAIN * self.step_s:
            return f"Plain DDP stays, and nothing was probed: {waits}, which is all that could be saved."
        if PROBE_SHARE * REPAID_STEPS * self.exposed_s < LEAST_PROBE_S:
            least_steps = f"{LEAST_PROBE_S / self.exposed_s:,.0f}"
            text = f"so measuring the links would be repaid after {least_steps} steps at the earliest"
            return f"Plain DDP stays, and nothing was probed: {waits}, {text}. To plan all the same, pass a network."
        return None

    def probe_s(self, most_s: float) -> float:
        """Return how long a probe may take, at most `most_s`."""
        return max(LEAST_PROBE_S, min(most_s, PROBE_SHARE * REPAID_STEPS * self.exposed_s))
