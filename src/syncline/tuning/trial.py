"""The trial of `tune` and `follow`: plain DDP and the plan take turns on the model, and the faster one stays."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from syncline.dist.comm import group_device
from syncline.records.plan import Plan
from syncline.tuning.settings import has_residual

SETTLING = 3
"""Steps after a change until DDP has rebuilt its buckets and caches are warm."""
_MAX_RATIO = 0.99
"""A plan wins if its steps take less than this fraction of plain DDP's time."""
_LIVE_STEPS = 8
_LONG_STEP_S = 1.0
"""Above this, `follow` tries fewer steps."""
_BUDGETED_STEPS = (4, 15)

Turn = Literal["plain", "plan"]
_FOUR_TURNS: tuple[Turn, ...] = ("plain", "plan", "plan", "plain")
_TWO_TURNS: tuple[Turn, ...] = ("plain", "plan")


@dataclass(frozen=True)
class Trial:
    """The result of a trial: medians over steps, each step as long as on its slowest rank."""

    plain_s: float
    plan_s: float
    steps: int
    """Number of counted steps, of plain DDP and of the plan each."""

    @classmethod
    def of(cls, group: dist.ProcessGroup, step_s: Mapping[Turn, Sequence[float]]) -> Trial:
        """Return the result of steps that took so long on this rank. Collective: it is the same on all ranks."""
        slowest = torch.tensor([step_s["plain"], step_s["plan"]], dtype=torch.float64, device=group_device(group))
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
        plain_s, plan_s = (statistics.median(row) for row in slowest.tolist())
        return cls(plain_s, plan_s, len(step_s["plan"]))

    @property
    def won(self) -> bool:
        """Whether the plan is faster than plain DDP."""
        return self.plan_s < _MAX_RATIO * self.plain_s

    def describe(self, what: str = "forward and backward") -> str:
        """Return both times and which of the two stays, in one sentence."""
        stays = "the plan stays" if self.won else "plain DDP stays"
        return f"Tried: plain DDP {self.plain_s * 1e3:.1f} ms, the plan {self.plan_s * 1e3:.1f} ms per {what}: {stays}."


@dataclass(frozen=True)
class Schedule:
    """Turns of a trial, and the steps in each."""

    turns: tuple[Turn, ...]
    settling: int
    counted: int

    @classmethod
    def within(cls, budget_s: float, plan: Plan) -> Schedule:
        """Return the schedule whose steps fit into a budget, by the plan's own predictions."""
        longest_s = max(plan.plain_s, plan.iteration_s, 1e-6)
        fewest, most = _BUDGETED_STEPS
        turns, settling, counted = _FOUR_TURNS, SETTLING, _steps_within(budget_s, longest_s, 4, SETTLING)
        if counted < fewest:  # of long steps, a few are enough
            turns, settling, counted = _TWO_TURNS, 2, _steps_within(budget_s, longest_s, 2, 2)
        return cls(turns, settling, max(2, min(most, counted)))

    @classmethod
    def on_live_steps(cls, plan: Plan) -> Schedule:
        """Return the schedule for a script's own steps."""
        long = plan.plain_s > _LONG_STEP_S
        # Each change of the exchange drops its residual, so a plan with one gets a single turn.
        turns = _TWO_TURNS if long or has_residual(plan) else _FOUR_TURNS
        return cls(turns, 2, _LIVE_STEPS // 2) if long else cls(turns, SETTLING, _LIVE_STEPS)


def _steps_within(budget_s: float, step_s: float, turns: int, settling: int) -> int:
    return int(budget_s / (turns * step_s)) - settling
