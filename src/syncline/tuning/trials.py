"""Trials: plain DDP, what tuning has chosen and its rivals take turns, and the gentlest that is fast enough stays."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from syncline.dist.comm import group_device
from syncline.measure.steps import quartiles
from syncline.plan.choice import Choice
from syncline.plan.ladder import TOLERANCE
from syncline.units import count_text

SETTLING = 3
"""Steps after a change until DDP has rebuilt its buckets and caches are warm."""
_OVERLAP_SETTLING = 8  # steps until weights are in shards, and two more
_MAX_RATIO = 0.99  # a plan wins if its steps take less than this fraction of plain DDP's time, beyond the noise
_NOTCH = 1.57  # medians of n values with an interquartile range q are known to about ± 1.57 q / √n, at 95 %
_CLEAR_NOISE, _CLEAR_SHARE = 3.0, 0.05  # the first turns decide if they differ by this many times the noise, and share
_LIVE_STEPS, _LONG_STEP_S = 8, 1.0  # steps of a turn of `follow`, which tries fewer if they take longer than this
_BUDGETED_STEPS = (4, 15)


@dataclass(frozen=True)
class Times:
    """The median and the quartiles of a contender's steps, on the slowest rank of each."""

    median_s: float
    low_s: float
    high_s: float
    noise_s: float
    """How far the median may be wrong, given how much the steps vary."""

    @classmethod
    def of(cls, step_s: Sequence[float]) -> Times:
        spread = quartiles(list(step_s))
        noise_s = _NOTCH * (spread.high_s - spread.low_s) / math.sqrt(len(step_s))
        return cls(statistics.median(step_s), spread.low_s, spread.high_s, noise_s)

    def describe(self, name: str) -> str:
        return f"{name} {self.median_s * 1e3:.1f} ms ({self.low_s * 1e3:.1f}–{self.high_s * 1e3:.1f})"


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

    lossy: bool = False
    others: tuple[tuple[str, Times], ...] = ()
    """The other contenders that were tried, by the names of their rungs."""
    stepped: bool = False
    """Whether the optimizer's step is a part of the times, because a contender needed it."""

    @classmethod
    def between(cls, plain: Times, plan: Times, steps: int, **fields: Any) -> Trial:
        ranges = (plain.low_s, plain.high_s), (plan.low_s, plan.high_s)
        noise_s = math.hypot(plain.noise_s, plan.noise_s)
        return cls(plain.median_s, plan.median_s, steps, *ranges, noise_s, **fields)

    @property
    def won(self) -> bool:
        """Whether the plan is faster than plain DDP, by more than the noise, and by 1 %; by 5 % if it is lossy."""
        return self.plan_s + self.noise_s < self._most_s

    @property
    def _most_s(self) -> float:
        return _MAX_RATIO * self.plain_s / (1 + TOLERANCE if self.lossy else 1)

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
        """Return one sentence with all times and their quartiles, and what is kept."""
        times = [
            Times(self.plain_s, *self.plain_range_s, 0.0).describe("plain DDP"),
            Times(self.plan_s, *self.plan_range_s, 0.0).describe(name),
            *(times.describe(rung) for rung, times in self.others),
        ]
        within = self.plan_s < self._most_s and not self.won
        stays = f"{name} stays" if self.won else "plain DDP stays"
        reason = ", because the difference is within the noise" if within else ""
        return f"Tried: {', '.join(times)} per {what}, noise ± {self.noise_s * 1e3:.1f} ms: {stays}{reason}."


@dataclass(frozen=True)
class Schedule:
    """How often each contender of a trial gets a turn, and the steps in each turn."""

    passes: int
    settling: int
    counted: int

    @classmethod
    def within(cls, budget_s: float, longest_s: float, contenders: int = 2) -> Schedule:
        """Return the schedule whose steps fit into a budget, by the predicted time of the longest step."""
        in_turn = budget_s / (contenders * max(longest_s, 1e-6))  # steps of each contender
        fewest, most = _BUDGETED_STEPS
        passes, settling, counted = 2, SETTLING, int(in_turn / 2) - SETTLING
        if counted < fewest:  # of long steps, a few are enough
            passes, settling, counted = 1, 2, int(in_turn) - 2
        return cls(passes, settling, max(2, min(most, counted)))

    @classmethod
    def on_live_steps(cls, plain_s: float, *, keeps: bool) -> Schedule:
        """Return the schedule for a script's own steps. If an exchange `keeps` a residual, each change would drop it:
        then there is a single pass."""
        long = plain_s > _LONG_STEP_S
        settling, counted = (2, _LIVE_STEPS // 2) if long else (SETTLING, _LIVE_STEPS)
        return cls(1 if long or keeps else 2, settling, counted)

    def steps(self, choice: Choice | None) -> int:
        """Return the counted steps of a turn: whole periods."""
        period = 1 if choice is None else choice.period
        return -(-self.counted // period) * period

    def settle(self, choice: Choice | None) -> int:
        """Return the steps before those that count. Updates that take turns are all prepared after one period."""
        overlaps = choice is not None and choice.attachment is not None and choice.attachment.overlap
        least = _OVERLAP_SETTLING if overlaps else self.settling
        return max(least, 0 if choice is None or choice.period == 1 else choice.period + 1)


class Contest:
    """Plain DDP and the choices that predictions cannot tell apart take turns, and the gentlest that is as fast as the
    fastest stays. All ranks must call its methods alike."""

    def __init__(self, group: dist.ProcessGroup, choices: Sequence[Choice]) -> None:
        """Prepare a trial of choices that differ in their rungs, from the gentlest on."""
        self._group, self.choices = group, tuple(choices)
        self._step_s: dict[str, list[float]] = {}

    def turns(self, schedule: Schedule) -> Iterator[Choice | None]:
        """Yield what has the next turn: a choice, or None for plain DDP. `note` must be called after each turn."""
        contenders: tuple[Choice | None, ...] = (None, *self.choices)
        yield from contenders
        if schedule.passes > 1 and not self._clear:
            yield from reversed(contenders)

    def note(self, choice: Choice | None, step_s: Sequence[float]) -> None:
        """Add the counted steps of a turn on this rank. Collective: the slowest rank counts, over whole periods,
        because ranks do not wait for each other inside one."""
        means_s = means(step_s, 1 if choice is None else choice.period)
        self._step_s.setdefault(_key(choice), []).extend(reduced(self._group, means_s, dist.ReduceOp.MAX))

    def times(self, choice: Choice | None) -> Times:
        return Times.of(self._step_s[_key(choice)])

    @property
    def best(self) -> Choice:
        """The gentlest choice that is as fast as the fastest, within the tolerance or the noise."""
        known = [(choice, self.times(choice)) for choice in self.choices]
        fastest = min((times for _, times in known), key=lambda times: times.median_s)
        return next(choice for choice, times in known if _as_fast(times, fastest))

    @property
    def trial(self) -> Trial:
        """The comparison of the best choice with plain DDP."""
        best = self.best
        others = tuple((_described(choice), self.times(choice)) for choice in self.choices if choice is not best)
        steps = best.period * len(self._step_s[_key(best)])
        return Trial.between(self.times(None), self.times(best), steps, lossy=not best.lossless, others=others)

    @property
    def _clear(self) -> bool:
        """Whether more turns would hardly change the answer."""
        trial, own = self.trial, self.times(self.best)
        least_s = _CLEAR_SHARE * own.median_s
        others = (abs(times.median_s - own.median_s) > least_s + _noise(times, own) for _, times in trial.others)
        return trial.clear and all(others)


def _key(choice: Choice | None) -> str:
    return "" if choice is None else choice.rung


def _described(choice: Choice) -> str:
    return choice.rung if choice.lossless else f"{choice.rung} (lossy)"


def _noise(one: Times, other: Times) -> float:
    return math.hypot(one.noise_s, other.noise_s)


def _as_fast(times: Times, fastest: Times) -> bool:
    most_s = max(TOLERANCE * fastest.median_s, _noise(times, fastest))
    return times.median_s - fastest.median_s <= most_s


def means(step_s: Sequence[float], period: int) -> list[float]:
    """Return the means over periods of steps that differ from each other."""
    return [statistics.mean(step_s[first : first + period]) for first in range(0, len(step_s), period)]


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
