"""Decide whether measuring the links can pay, from steps that were watched anyway.

The most that any exchange can save is the time that a step waits for communication. A probe may take a share of what
could be saved in a number of steps that even a short training run has.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from syncline.plan.search import LEAST_GAIN
from syncline.tuning.trials import reduced
from syncline.units import milliseconds_text

REPAID_STEPS = 1_000
"""Steps in which tuning should be repaid."""
PROBE_SHARE, LOSSLESS_PROBE_SHARE = 0.1, 0.02
"""Share of what could be saved in these steps that a probe may take. Lossless exchanges rarely save all of it."""
PATIENCE = 20
"""Where little may be saved, tuning begins after this many times what it costs, so that no training ends much later."""
_OTHER_COSTS_S = 2.5  # of measuring the work of exchanges, planning and switching
_BY_LANES = 0.25  # share of exposed communication that lanes may save where a single collective does not fill a link
_MUCH = 0.2  # share of a step from which waiting for communication is worth a hint
LEAST_PROBE_S = 1.5
"""A shorter probe would measure too little."""


@dataclass(frozen=True)
class Stakes:
    """The median time of a step, and of its part that waits for communication, which tuning could save."""

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

    def savings_s(self, *, lossy: bool) -> float:
        """Return about the most that can be saved per step.

        Lossless exchanges can be hidden behind computation by other buckets, lanes and paths, but hardly more.
        """
        hidden_s = self.step_s - self.exposed_s + _BY_LANES * self.exposed_s
        return self.exposed_s if lossy else min(self.exposed_s, hidden_s)

    @property
    def why_not_probe(self) -> str | None:
        """Why nothing is measured, as a sentence; None if it may pay."""
        step, exposed = milliseconds_text(self.step_s), milliseconds_text(self.exposed_s)
        waits = f"a step of {step} waits {exposed} for communication"
        if self.exposed_s <= LEAST_GAIN * self.step_s:
            return f"Plain DDP stays, and nothing was probed: {waits}, which is all that could be saved."
        if REPAID_STEPS * self.exposed_s < LEAST_PROBE_S:
            least_steps = f"{LEAST_PROBE_S / self.exposed_s:,.0f}"
            text = f"so measuring the links would be repaid after {least_steps} steps at the earliest"
            return f"Plain DDP stays, and nothing was probed: {waits}, {text}. To plan all the same, pass a network."
        return None

    def probe_s(self, most_s: float, *, lossy: bool) -> float:
        """Return how long a probe may take, at most `most_s`."""
        saved_s = REPAID_STEPS * self.savings_s(lossy=lossy)
        return min(most_s, max(LEAST_PROBE_S, (PROBE_SHARE if lossy else LOSSLESS_PROBE_SHARE) * saved_s))

    def steps_to_wait(self, most_probe_s: float) -> int:
        """Return the steps before tuning that may not save anything: then it takes a twentieth of the time so far."""
        cost_s = self.probe_s(most_probe_s, lossy=False) + _OTHER_COSTS_S
        return math.ceil(PATIENCE * cost_s / max(self.step_s, 1e-6))

    @property
    def hint(self) -> str:
        """A sentence that names `quality`, where much could be gained with it; empty otherwise."""
        if self.exposed_s < _MUCH * self.step_s:
            return ""
        step, exposed = milliseconds_text(self.step_s), milliseconds_text(self.exposed_s)
        return f' A step of {step} waits {exposed} for communication: quality="same" permits (lossy) compression.'
