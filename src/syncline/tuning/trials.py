"""Trials: plain DDP and what tuning has found take turns, and the faster one stays."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from syncline.dist.comm import group_device
from syncline.measure.steps import quartiles
from syncline.units import count_text

SETTLING = 3
"""Steps after a change until DDP has rebuilt its buckets and caches are warm."""
_MAX_RATIO = 0.99  # a plan wins if its steps take less than this fraction of plain DDP's time, beyond the noise
_NOTCH = 1.57  # medians of n values with an interquartile range q are known to about ± 1.57 q / √n, at 95 %
_CLEAR_NOISE, _CLEAR_SHARE = 3.0, 0.05  # the first turns decide if they differ by this many times the noise, and share
_LIVE_STEPS, _LONG_STEP_S = 8, 1.0  # steps of a turn of `follow`, which tries fewer if they take longer than this
_BUDGETED_STEPS = (4, 15)

Turn = Literal["plain", "plan"]
_FOUR_TURNS: tuple[Turn, ...] = ("plain", "plan", "plan", "plain")
_TWO_TURNS: tuple[Turn, ...] = ("plain", "plan")


@dataclass(frozen=True)
class Trial:
    """The times of plain DDP and of a plan that took turns: medians over steps. The slowest rank counts."""

    plain_s: float
    plan_s: float
    steps: int
    """Number of counted steps of plain DDP, and as many of the plan."""
    plain_range_s: tuple[float, float]
    """The quartiles of plain DDP's steps."""
    plan_range_s: tuple[float, float]
    noise_s: float
    """How far the difference of the two medians may be wrong, given how much the steps vary."""

    @classmethod
    def of(cls, group: dist.ProcessGroup, step_s: Mapping[Turn, Sequence[float]], period: int = 1) -> Trial:
        """Return the result, given the step times on this rank. Collective: the result is the same on all ranks.

        With a `period`, the plan's steps differ from each other, and their means over that many steps count.
        """
        plain = reduced(group, step_s["plain"], dist.ReduceOp.MAX)
        plan = reduced(group, step_s["plan"], dist.ReduceOp.MAX)
        blocks = [statistics.mean(plan[first : first + period]) for first in range(0, len(plan), period)]
        ranges = [quartiles(plain), quartiles(blocks)]
        widths = [_NOTCH * (entry.high_s - entry.low_s) for entry in ranges]
        noise_s = math.hypot(widths[0] / math.sqrt(len(plain)), widths[1] / math.sqrt(len(blocks)))
        (plain_range, plan_range) = ((entry.low_s, entry.high_s) for entry in ranges)
        medians = statistics.median(plain), statistics.median(blocks)
        return cls(*medians, len(plan), plain_range, plan_range, noise_s)

    @property
    def won(self) -> bool:
        """Whether the plan is faster than plain DDP, by more than 1 % and more than the noise."""
        return self.plan_s + self.noise_s < _MAX_RATIO * self.plain_s

    @property
    def clear(self) -> bool:
        """Whether the difference is so large that more turns would not change the answer."""
        difference_s = abs(self.plain_s - self.plan_s)
        return difference_s > max(_CLEAR_NOISE * self.noise_s, _CLEAR_SHARE * self.plain_s)

    @property
    def saved_s(self) -> float:
        """Time that the plan saves per step; 0 if plain DDP stays."""
        return self.plain_s - self.plan_s if self.won else 0.0

    def describe(self, what: str = "forward and backward", name: str = "the plan") -> str:
        """Return one sentence with both times and their quartiles, and which of the two is kept."""
        times = []
        for method, seconds, (low_s, high_s) in (
            ("plain DDP", self.plain_s, self.plain_range_s),
            (name, self.plan_s, self.plan_range_s),
        ):
            times.append(f"{method} {seconds * 1e3:.1f} ms ({low_s * 1e3:.1f}–{high_s * 1e3:.1f})")
        within = self.plan_s < _MAX_RATIO * self.plain_s and not self.won
        stays = f"{name} stays" if self.won else "plain DDP stays"
        reason = ", because the difference is within the noise" if within else ""
        return f"Tried: {', '.join(times)} per {what}, noise ± {self.noise_s * 1e3:.1f} ms: {stays}{reason}."


@dataclass(frozen=True)
class Schedule:
    """Turns of a trial, and the steps in each."""

    turns: tuple[Turn, ...]
    settling: int
    counted: int

    @classmethod
    def within(cls, budget_s: float, longest_s: float, period: int = 1) -> Schedule:
        """Return the schedule whose steps fit into a budget, by the predicted time of the longer step."""
        longest_s = max(longest_s, 1e-6)
        fewest, most = _BUDGETED_STEPS
        turns, settling, counted = _FOUR_TURNS, SETTLING, int(budget_s / (4 * longest_s)) - SETTLING
        if counted < fewest:  # of long steps, a few are enough
            turns, settling, counted = _TWO_TURNS, 2, int(budget_s / (2 * longest_s)) - 2
        counted = max(2, min(most, counted))
        return cls(turns, settling, -(-counted // period) * period)

    @classmethod
    def on_live_steps(cls, plain_s: float, *, keeps: bool, period: int = 1) -> Schedule:
        """Return the schedule for a script's own steps. If the exchange `keeps` a residual, each change would drop it,
        so it gets a single turn."""
        long = plain_s > _LONG_STEP_S
        turns = _TWO_TURNS if long or keeps else _FOUR_TURNS
        settling, counted = (2, _LIVE_STEPS // 2) if long else (SETTLING, _LIVE_STEPS)
        return cls(turns, settling, -(-counted // period) * period)


def repaid_after(cost_s: float, saved_s: float) -> str:
    """Return a sentence: what tuning cost, and after how many steps that is repaid."""
    cost = f"Tuning took {cost_s:.1f} s"
    if saved_s <= 0:
        return f"{cost}."
    steps = max(1, math.ceil(cost_s / saved_s))
    return f"{cost}, and saves {saved_s * 1e3:.1f} ms per step: it is repaid after {count_text(steps, 'step')}."


def reduced(group: dist.ProcessGroup, values: Sequence[float], op: Any) -> list[float]:
    """Return the smallest or largest values of all ranks. Collective."""
    tensor = torch.tensor(values, dtype=torch.float64, device=group_device(group))
    dist.all_reduce(tensor, op=op, group=group)
    return [float(value) for value in tensor]
