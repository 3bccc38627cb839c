"""Time collectives from a standing start, on all ranks at once.

Rank 0 announces a start time a little ahead, the links rest until then, and all ranks start. A sample runs from the
start of the last rank to the end of the last rank. Collectives and sizes take turns, so that a disturbance affects all
of them alike. A first sample of each and the available time decide how often each is repeated.
"""

from __future__ import annotations

import dataclasses
import heapq
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from syncline.dist.comm import GroupComm
from syncline.exchange import Work, wire
from syncline.measure.network_fit import Key, Readings

REST_S = 0.012  # links rest this long before a sample, so that traffic shapers regain their burst credit

Progress = Callable[[float, float], None]
Issue = Callable[[], Sequence[Work]]


@dataclass(frozen=True)
class Entry:
    """A measurement that is repeated."""

    key: Key
    issue: Issue  # starts it on a rank that takes part
    taking_part: bool = True
    weight: float = 1.0  # share of the available time, relative to other entries
    chain: int = 1  # collectives in one sample, one after the other; the sample is their mean


class Sampler:
    """Takes samples on all ranks of `control`, a gloo group, and adds them to `readings`."""

    def __init__(
        self,
        control: dist.ProcessGroup,
        device: torch.device,
        readings: Readings,
        budget_s: float,
        on_progress: Progress | None,
        *,
        one_clock: bool,
    ) -> None:
        self._control, self._device, self._readings = control, device, readings
        self._budget_s, self._on_progress = budget_s, on_progress
        self._start_s = time.monotonic()
        self._clock_lead_s = 0.0 if one_clock else self._estimate_clock_lead()
        self._buffers: list[Tensor] = []
        self._meeting_s = 0.0

    def measure_meeting(self) -> None:
        """Measure the time that a sample takes in addition to its collectives."""
        empty = Entry((), lambda: ())
        self.take([empty])
        began = time.monotonic()
        self.take([empty] * 5)
        self._meeting_s = self.largest(time.monotonic() - began) / 5

    def elapsed_s(self) -> float:
        """Return the seconds since the sampler was created, the same on all ranks. Collective."""
        return self.largest(time.monotonic() - self._start_s)

    def take(self, entries: Sequence[Entry]) -> list[float]:
        """Take one sample of each entry, in this order, and return their seconds. Collective."""
        marks = torch.full((len(entries), 2), -torch.inf, dtype=torch.float64)
        for index, entry in enumerate(entries):
            self._meet()
            if entry.taking_part:
                marks[index] = self._timed(entry.issue, entry.chain)
        dist.all_reduce(marks, op=dist.ReduceOp.MAX, group=self._control)
        if self._on_progress is not None:
            self._on_progress(min(time.monotonic() - self._start_s, self._budget_s), self._budget_s)
        return [max(1e-7, float(end - start)) / entry.chain for entry, (start, end) in zip(entries, marks, strict=True)]

    def repeat(self, entries: Sequence[Entry], budget_s: float, most: int = 60) -> None:
        """Sample each entry at least once, and cheap entries more often, as the budget allows. The first sample of an
        entry is dropped if there are enough others, because it runs on cold memory."""
        began = time.monotonic()
        unmeasured = [entry for entry in entries if entry.key not in self._readings.seconds]
        for entry, seconds in zip(unmeasured, self.take(unmeasured), strict=True):
            self._readings.add(entry.key, seconds)
        spent_s = self.largest(time.monotonic() - began)
        costs = [entry.chain * self._readings.seconds[entry.key][0] + self._meeting_s for entry in entries]
        order = _share_out(budget_s - spent_s, costs, [entry.weight for entry in entries], most)
        for index, count in Counter(order).items():
            if count > 3:
                self._readings.seconds[entries[index].key].clear()
        random.Random(0).shuffle(order)  # noqa: S311 - an order, the same on all ranks
        for start in range(0, len(order), len(entries)):
            turn = [entries[index] for index in order[start : start + len(entries)]]
            for entry, seconds in zip(turn, self.take(turn), strict=True):
                self._readings.add(entry.key, seconds)

    def arrivals(self, issue: Issue, receivers: Sequence[int]) -> list[float]:
        """Return when `issue` had ended on each of the receiving ranks, in seconds after the last rank started."""
        rank = dist.get_rank()
        marks = torch.zeros(dist.get_world_size(), 2, dtype=torch.float64)
        self._meet()
        marks[rank] = self._timed(issue)
        dist.all_reduce(marks, group=self._control)
        start = float(marks[:, 0].max())
        return [max(1e-7, float(marks[receiver, 1]) - start) for receiver in receivers]

    def largest(self, value: float) -> float:
        """Return the largest value of all ranks, so that all ranks decide alike. Collective."""
        tensor = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._control)
        return float(tensor)

    def buffer(self, numel: int, index: int) -> Tensor:
        while len(self._buffers) <= index:
            self._buffers.append(torch.zeros(0, device=self._device))
        if self._buffers[index].numel() < numel:
            # Zeros, because their sums stay zero. Writing ones first makes the kernel allocate the pages.
            self._buffers[index] = torch.ones(numel, device=self._device).zero_()
        return self._buffers[index][:numel]

    def collective(self, comm: GroupComm | None, kind: str, numel: int, index: int = 0) -> Issue:
        """Return a function that starts one collective. Collectives that overlap need different `index` values."""
        if comm is None:
            return tuple
        if kind == wire.PACED:
            kind = "all_to_all"
            comm = dataclasses.replace(comm, topology=dataclasses.replace(comm.topology, paced_bytes=0))
        numel -= numel % comm.size  # where hosts have unequal numbers of ranks, the parts of smaller groups are smaller
        self.buffer(numel, 2 * index)  # allocated before the first sample
        self.buffer(numel, 2 * index + 1)

        def start() -> Sequence[Work]:
            first, second = self.buffer(numel, 2 * index), self.buffer(numel, 2 * index + 1)
            arguments: dict[str, tuple[Any, ...]] = {
                "all_reduce": (first,),
                "all_to_all": (second, first),
                "all_gather": (first, second[: numel // comm.size]),
                wire.REDUCE_SCATTER: (second[: numel // comm.size], first),
            }
            return (getattr(comm, kind)(*arguments.get(kind, (first, 0))),)

        return start

    def _estimate_clock_lead(self) -> float:
        """Return by how much this rank's clock is ahead of rank 0's, from the fastest of several round trips."""
        lead_s, rank = 0.0, dist.get_rank()
        for other in range(1, dist.get_world_size()):
            best_s = float("inf")
            for _ in range(16):
                mark = torch.zeros(1, dtype=torch.float64)
                if rank == other:
                    asked = time.monotonic()
                    dist.send(mark, 0, group=self._control)
                    dist.recv(mark, 0, group=self._control)
                    answered = time.monotonic()
                    if answered - asked < best_s:
                        best_s, lead_s = answered - asked, (asked + answered) / 2 - float(mark)
                elif rank == 0:
                    dist.recv(mark, other, group=self._control)
                    mark[0] = time.monotonic()
                    dist.send(mark, other, group=self._control)
        return lead_s

    def _meet(self) -> None:
        """Return on all ranks at the same time, after all of them have finished and the links have rested."""
        dist.barrier(group=self._control)
        moment = torch.tensor([self._now() + REST_S], dtype=torch.float64)
        dist.broadcast(moment, 0, group=self._control)
        while (left_s := float(moment) - self._now()) > 0:
            time.sleep(left_s)

    def _now(self) -> float:
        return time.monotonic() - self._clock_lead_s

    def _timed(self, issue: Issue, chain: int = 1) -> Tensor:
        start = self._now()
        for _ in range(chain):
            for work in issue():
                work.wait()
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return torch.tensor([start, self._now()], dtype=torch.float64)


def _share_out(budget_s: float, costs: Sequence[float], weights: Sequence[float], most: int) -> list[int]:
    """Return the entries to sample within the budget: always the one with the least time for its weight so far."""
    order: list[int] = []
    waiting = [(cost / weight, index, most) for index, (cost, weight) in enumerate(zip(costs, weights, strict=True))]
    heapq.heapify(waiting)
    while waiting:
        share_s, index, left = heapq.heappop(waiting)
        if left and costs[index] <= budget_s:
            budget_s -= costs[index]
            order.append(index)
            heapq.heappush(waiting, (share_s + costs[index] / weights[index], index, left - 1))
    return order
