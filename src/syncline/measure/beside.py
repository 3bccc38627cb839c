"""Measure how collectives inside hosts and between hosts slow each other down on a GPU.

They use different links, but share the processors that feed sockets, and the GPU's memory and queues. HSDP runs both at
the same time: collectives among shards inside a host, and the exchange between replicas. So the measurement enqueues
them as FSDP does in backward, on as many streams: gather a unit's parameters, reduce its gradients, and exchange them
while the next unit is gathered.
"""

from __future__ import annotations

import statistics

import torch
import torch.distributed as dist

from syncline.dist.comm import gather_into, reduce_scatter_from
from syncline.records.link_costs import Beside

_UNITS = 8
_UNIT_BYTES = 16 << 20
_PILOT_BYTES = 1 << 20
_LEAST_BYTES, _MOST_BYTES = 64 << 10, 64 << 20
_REPEATS = 3
_MOST = 100.0


def measure_beside(inside: dist.ProcessGroup, between: dist.ProcessGroup, device: torch.device) -> Beside:
    """Measure collectives inside the group `inside` and inside `between` alone, and at the same time. All ranks of the
    job call it together, on CUDA: each with its two groups, which have no other rank in common."""
    backward = _Backward(inside, between, device)
    backward.seconds(True, True)  # opens connections
    _, inside_s, _ = backward.seconds(True, False)
    _, _, pilot_s = backward.seconds(False, True)
    # The exchange takes about as long as the collectives among shards.
    nbytes = int(_PILOT_BYTES * inside_s / max(pilot_s, 1e-6))
    backward.exchanged = torch.zeros(min(_MOST_BYTES, max(_LEAST_BYTES, nbytes)) // 4, device=device)
    times: dict[tuple[bool, bool], list[tuple[float, float, float]]] = {}
    for _ in range(_REPEATS):
        for which in ((True, False), (False, True), (True, True)):
            times.setdefault(which, []).append(backward.seconds(*which))
    medians = {which: tuple(map(statistics.median, zip(*found, strict=True))) for which, found in times.items()}
    first_s, end_s, _ = medians[True, False]
    alone = end_s - first_s, medians[False, True][2]
    began_s, inside_end_s, between_end_s = medians[True, True]
    return factors(alone, (inside_end_s - began_s, between_end_s - began_s))


class _Backward:
    """Backward of a model that computes nothing."""

    def __init__(self, inside: dist.ProcessGroup, between: dist.ProcessGroup, device: torch.device) -> None:
        self.inside, self.between, self.device = inside, between, device
        ranks = inside.size()
        self.shard = torch.zeros(_UNIT_BYTES // 4 // ranks, device=device)
        self.whole = torch.zeros(self.shard.numel() * ranks, device=device)
        self.parameters = torch.zeros(self.whole.numel(), dtype=torch.bfloat16, device=device)
        self.exchanged = torch.zeros(_PILOT_BYTES // 4, device=device)
        # With the priorities that FSDP gives its streams.
        self.gathers, self.reduces = (torch.cuda.Stream(device, priority=-1) for _ in range(2))
        self.exchanges = torch.cuda.Stream(device)

    def seconds(self, shards: bool, replicas: bool) -> tuple[float, float, float]:
        """Run the collectives among shards, those between replicas, or both.

        Returns:
            Seconds until the first unit was reduced, until the last one was, and until all were exchanged, on the
            slowest rank.
        """
        torch.cuda.synchronize(self.device)
        dist.barrier(device_ids=[self.device.index or 0])
        torch.cuda.synchronize(self.device)
        current = torch.cuda.current_stream(self.device)
        start = current.record_event(torch.cuda.Event(enable_timing=True))
        for stream in (self.gathers, self.reduces, self.exchanges):
            stream.wait_event(start)
        reduced = start
        for unit in range(_UNITS):
            if shards:
                self._gather_and_reduce(current)
            if replicas:
                self.exchanges.wait_stream(self.reduces)
                with torch.cuda.stream(self.exchanges):
                    dist.all_reduce(self.exchanged, group=self.between)
            if not unit:
                reduced = self.reduces.record_event(torch.cuda.Event(enable_timing=True))
        ends = [stream.record_event(torch.cuda.Event(enable_timing=True)) for stream in (self.reduces, self.exchanges)]
        torch.cuda.synchronize(self.device)
        found = [start.elapsed_time(event) / 1e3 for event in (reduced, *ends)]
        times = torch.tensor(found, device=self.device)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        first_s, reduced_s, exchanged_s = times.tolist()
        return first_s, reduced_s, exchanged_s

    def _gather_and_reduce(self, current: torch.cuda.Stream) -> None:
        own = self.shard.numel() * self.inside.rank()
        self.gathers.wait_stream(current)
        with torch.cuda.stream(self.gathers):
            part = self.parameters[own : own + self.shard.numel()]
            gather_into(self.parameters, part, group=self.inside)
        current.wait_stream(self.gathers)
        current.wait_stream(self.reduces)  # as FSDP does before it copies the next unit's gradients
        self.reduces.wait_stream(current)
        with torch.cuda.stream(self.reduces):
            reduce_scatter_from(self.shard, self.whole, group=self.inside)


def factors(alone: tuple[float, float], both: tuple[float, float]) -> Beside:
    """Return how much longer two tasks take while both run, from their times alone, and from a common start.

    Example:
        >>> factors((1.0, 2.0), (2.0, 3.0))
        Beside(inside=2.0, between=2.0)
    """
    first = min(both)
    slower = []
    for alone_s, both_s in zip(alone, both, strict=True):
        meanwhile_s = alone_s - (both_s - first)  # work that was done while the other task ran
        slower.append(min(_MOST, max(1.0, first / meanwhile_s)) if meanwhile_s > 0 else _MOST)
    return Beside(inside=slower[0], between=slower[1])
