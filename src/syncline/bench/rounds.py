"""Let methods take turns in the same processes, so that noise affects all alike, and compare them round by round.

The order of the methods is random in each round, and every method waits until the links have regained the burst that
the method before it used up. In a round, a method takes one step or, if its steps differ, a whole period of them.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.bench.methods import slow_sgd
from syncline.cluster import Rank, links

REST_S = 0.02
"""Shortest pause between steps."""
OnProgress = Callable[[int, int], None]
"""Called with the amount that is done, and the total."""


@dataclass(frozen=True)
class Contender:
    """A method to compare. `step` returns when its training steps are complete on this rank."""

    name: str
    step: Callable[[], None]
    steps: int = 1
    """Number of training steps in one call of `step`."""
    lead: Callable[[], None] = lambda: None
    """Called right before the time is taken, for a method whose steps overlap: its first step."""
    lead_steps: int = 0
    """Number of training steps in one call of `lead`."""
    settle: Callable[[], None] = lambda: None
    """Called after the time is taken, to wait for what the last step has left under way."""


def training_step(
    model: nn.Module, loss_of: Callable[[], Tensor], optimizer: Optimizer | None = None
) -> Callable[[], None]:
    """Return a function that takes one step of the optimizer, by default of plain SGD."""
    stepped = optimizer or slow_sgd(model.parameters())

    def step() -> None:
        stepped.zero_grad()
        loss_of().backward()
        stepped.step()

    return step


@dataclass(frozen=True)
class Quartiles:
    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quartiles:
        several = values if len(values) > 1 else [*values, *values]
        return cls(*statistics.quantiles(several, n=4, method="inclusive"))

    def fields(self, name: str, scale: float = 1.0) -> dict[str, float]:
        """Return the fields of a result's row: `name`, with the median, `name_low` and `name_high`."""
        return {name: self.median * scale, f"{name}_low": self.low * scale, f"{name}_high": self.high * scale}


Record = dict[str, list[list[float]]]
"""Per contender and round: start and end on this rank, and bytes that its host had sent before and after."""


def take_turns(rank: Rank, contenders: Sequence[Contender], *, warmup: int, rounds: int) -> Record:
    """Let each contender take its steps once per round, in a random order that is the same on all ranks.

    Before the first round, each takes at least `warmup` steps that are not measured.
    """
    record: Record = {contender.name: [] for contender in contenders}
    rest_s = REST_S
    if rank.shaped:  # wait three times as long as the slowest link needs to regain its burst
        rates = [rate for rate in (rank.spec.rate_bps, rank.spec.trunk_rate_bps) if rate is not None]
        rest_s = max(REST_S, *(3 * links.burst_bytes(rate) * 8 / rate for rate in rates))
    generator = random.Random(0)  # noqa: S311 - an order, not a secret
    for number in range(-warmup, rounds):
        for contender in generator.sample(contenders, len(contenders)):
            if number < -math.ceil(warmup / contender.steps):
                continue  # its later rounds alone take enough steps
            _barrier(rank)
            time.sleep(rest_s)
            _barrier(rank)
            sent_before = links.sent_bytes() if rank.shaped else -1
            contender.lead()
            _reach(rank)
            start = time.monotonic()
            contender.step()
            _reach(rank)
            end = time.monotonic()
            contender.settle()
            _barrier(rank)
            if number >= 0:
                sent = (links.sent_bytes() if rank.shaped else -1) - sent_before
                measured = sent * contender.steps / (contender.steps + contender.lead_steps)
                record[contender.name].append([start, end, sent_before, sent_before + measured])
        report_progress(rank, number + warmup + 1, warmup + rounds)
    return record


def report_progress(rank: Rank, done: float, of: float) -> None:
    """Report progress from rank 0 to the launching process."""
    if rank.rank == 0:
        rank.say([round(done), round(of)])


def reports_to(on_progress: OnProgress | None) -> Callable[[int, Any], None]:
    """Return the event handler for `launch` that passes on the calls of `report_progress`."""
    return lambda _rank, event: None if on_progress is None else on_progress(*event)


@dataclass(frozen=True)
class Turns:
    """The measurements of one contender over all ranks."""

    seconds: list[float]
    """Per round: from when the last rank started until the last rank ended, divided by the number of training steps."""
    wire_bytes: float
    """Bytes per training step that the busiest host sent, headers included. Meaningless if links are not emulated."""

    @property
    def quartiles(self) -> Quartiles:
        return Quartiles.of(self.seconds)

    def ratio_to(self, other: Turns) -> Quartiles:
        """Return the quartiles over the rounds of this time divided by the other's."""
        return Quartiles.of([mine / theirs for mine, theirs in zip(self.seconds, other.seconds, strict=True)])


def combine(records: Sequence[Record], steps: Mapping[str, int] | None = None) -> dict[str, Turns]:
    """Combine the records of all ranks. Emulated hosts share the machine's clock, so times can be compared.

    Args:
        records: The record of each rank.
        steps: The number of training steps that a contender takes in each round, where that is not 1.
    """
    turns = {}
    for name in records[0]:
        count = (steps or {}).get(name, 1)
        rounds = list(zip(*(record[name] for record in records), strict=True))
        seconds = [(max(mark[1] for mark in ranks) - max(mark[0] for mark in ranks)) / count for ranks in rounds]
        sent = [max(mark[3] - mark[2] for mark in ranks) / count for ranks in rounds]
        turns[name] = Turns(seconds, statistics.median(sent))
    return turns


def _barrier(rank: Rank) -> None:
    dist.barrier(device_ids=[0] if rank.spec.device == "cuda" else None)
    _finish(rank)


def _reach(rank: Rank) -> None:
    """Wait until the device has computed the steps. Collectives that overlap with the next step may still run."""
    if rank.spec.device == "cuda":
        torch.cuda.current_stream().synchronize()


def _finish(rank: Rank) -> None:
    if rank.spec.device == "cuda":
        torch.cuda.synchronize()
