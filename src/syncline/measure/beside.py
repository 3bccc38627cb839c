"""Measure how collectives inside hosts and between hosts slow each other down on a GPU.

They use different links, but share the processors that feed sockets, and the GPU's memory and queues. HSDP runs both at
the same time: reduce-scatters inside a host, and all-reduces between replicas.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist

from syncline.dist.comm import reduce_scatter_from
from syncline.records.link_costs import Beside

_INSIDE_BYTES, _BETWEEN_BYTES = 16 << 20, 1 << 20
_TARGET_S = 0.08  # each side runs about as long
_REPEATS = 3
_MOST = 100.0


def measure_beside(inside: dist.ProcessGroup, between: dist.ProcessGroup, device: torch.device) -> Beside:
    """Measure collectives inside the group `inside` and inside `between` alone, and at the same time. All ranks of the
    job call it together, on CUDA: each with its two groups, which have no other rank in common."""
    whole = torch.zeros(_INSIDE_BYTES // 4, device=device)
    part = torch.zeros(whole.numel() // inside.size(), device=device)
    other = torch.zeros(_BETWEEN_BYTES // 4, device=device)
    streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
    collectives: tuple[Callable[[], object], ...] = (
        lambda: reduce_scatter_from(part, whole[: part.numel() * inside.size()], group=inside),
        lambda: dist.all_reduce(other, group=between),
    )

    def seconds(counts: tuple[int, int]) -> tuple[float, float]:
        """Return how long this many collectives of each side take, on the slowest rank."""
        torch.cuda.synchronize(device)
        dist.barrier(device_ids=[device.index or 0])
        torch.cuda.synchronize(device)
        start, ends = torch.cuda.Event(enable_timing=True), []
        start.record()
        for stream, collective, count in reversed(tuple(zip(streams, collectives, counts, strict=True))):
            stream.wait_event(start)
            with torch.cuda.stream(stream):
                for _ in range(count):
                    collective()
                ends.append(torch.cuda.Event(enable_timing=True))
                ends[-1].record()
        torch.cuda.synchronize(device)
        times = torch.tensor([start.elapsed_time(end) / 1e3 for end in reversed(ends)], device=device)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        inside_s, between_s = times.tolist()
        return inside_s, between_s

    seconds((1, 1))  # opens connections
    each = seconds((4, 0))[0] / 4, seconds((0, 4))[1] / 4
    many, few = (max(1, round(_TARGET_S / each_s)) for each_s in each)
    alone = [(seconds((many, 0))[0], seconds((0, few))[1]) for _ in range(_REPEATS)]
    both = [seconds((many, few)) for _ in range(_REPEATS)]
    medians = [statistics.median(values) for times in (alone, both) for values in zip(*times, strict=True)]
    return factors((medians[0], medians[1]), (medians[2], medians[3]))


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
