"""Planners that fuse gradients into buckets, which are exchanged one after the other.

A planner gets the ready time and size of each gradient, and the time of a bucket as a function of its bytes. It returns
the number of gradients in each bucket, in ready order. The published planners serve as comparisons:

- `wfbp`: wait-free back-propagation, one gradient per bucket.
- `mgwfbp`: the greedy algorithm of MG-WFBP (INFOCOM 2019). A bucket takes in the next gradient if that is ready before
  the bucket could have arrived, and if the bucket is still queued then or would wait less than a start-up.
- `asc`: ASC-WFBP (INFOCOM 2021), which is the same without waiting. Its buckets run on two lanes.
- `constant`: buckets are closed when they reach a size.
- `cycles`: Horovod's tensor fusion. At each tick of a clock, all ready gradients form a bucket, up to a size. The clock
  stops during an exchange.

`optimal` is the exact optimum for one lane. If f(j) is the earliest time at which the first j gradients have arrived,

    f(j) = min over i < j of  max(f(i), ready(j)) + cost(bytes of i+1 … j)

because an earlier arrival never delays later buckets. It takes O(L²) operations, vectorised over i.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Sizes = tuple[int, ...]
"""Number of gradients in each bucket, in ready order."""


@dataclass(frozen=True)
class Gradients:
    """The gradients of a step, in ready order."""

    ready_s: Floats
    bytes: Floats
    cost_s: Callable[[Floats], Floats]
    """Returns the time of buckets of the given bytes."""

    @property
    def count(self) -> int:
        return len(self.ready_s)

    @property
    def startup_s(self) -> float:
        """Time of an empty bucket."""
        return float(self.cost_s(np.zeros(1))[0])


def line(startup_s: float, s_per_byte: float) -> Callable[[Floats], Floats]:
    """Return the linear cost function that the published planners assume."""
    return lambda nbytes: startup_s + s_per_byte * nbytes


def arrival_s(gradients: Gradients, sizes: Sequence[int]) -> float:
    """Return when the last bucket has arrived, if buckets are exchanged one after the other."""
    end_s = 0.0
    for bucket_s, ready_s in zip(*_buckets(gradients, sizes), strict=True):
        end_s = max(end_s, float(ready_s)) + float(bucket_s)
    return end_s


def optimal(gradients: Gradients) -> Sizes:
    """Return the buckets with which the last gradient arrives earliest."""
    count = gradients.count
    ready_s = np.maximum.accumulate(gradients.ready_s)
    ends = np.concatenate([[0.0], np.cumsum(gradients.bytes)])
    arrived_s = np.zeros(count + 1)
    cut = np.zeros(count + 1, np.int64)
    for j in range(1, count + 1):
        # argmin takes the first of equal times, and so the fewest buckets.
        times_s = np.maximum(arrived_s[:j], ready_s[j - 1]) + gradients.cost_s(ends[j] - ends[:j])
        cut[j] = int(np.argmin(times_s))
        arrived_s[j] = times_s[cut[j]]
    sizes = []
    while count:
        sizes.append(int(count - cut[count]))
        count = int(cut[count])
    return tuple(reversed(sizes))


def wfbp(gradients: Gradients) -> Sizes:
    return (1,) * gradients.count


def mgwfbp(gradients: Gradients) -> Sizes:
    return _greedy(gradients, gradients.startup_s)


def asc(gradients: Gradients) -> Sizes:
    return _greedy(gradients, 0.0)


def constant(gradients: Gradients, bucket_bytes: float) -> Sizes:
    sizes, filled, count = [], 0.0, 0
    for nbytes in gradients.bytes:
        filled, count = filled + float(nbytes), count + 1
        if filled >= bucket_bytes:
            sizes.append(count)
            filled, count = 0.0, 0
    return tuple([*sizes, count] if count else sizes)


def cycles(gradients: Gradients, cycle_s: float, buffer_bytes: float) -> Sizes:
    sizes: list[int] = []
    now_s, first = 0.0, 0
    while first < gradients.count:
        # The first tick at which something is ready.
        now_s += max(1.0, math.ceil((float(gradients.ready_s[first]) - now_s) / cycle_s)) * cycle_s
        last, filled = first, 0.0
        while last < gradients.count and float(gradients.ready_s[last]) <= now_s + 1e-12:
            filled += float(gradients.bytes[last])
            if last > first and filled > buffer_bytes:
                break
            last += 1
        last = max(last, first + 1)
        bucket_bytes = gradients.bytes[first:last].sum(keepdims=True)
        now_s += max(0.0, float(gradients.cost_s(bucket_bytes)[0]) - cycle_s)
        sizes.append(last - first)
        first = last
    return tuple(sizes)


def _greedy(gradients: Gradients, patience_s: float) -> Sizes:
    """Fuse as `mgwfbp` does, if a bucket waits less than `patience_s` for the next gradient."""
    sizes: list[int] = []
    free_s, first = 0.0, 0
    for last in range(gradients.count):
        ready_s = float(gradients.ready_s[last])
        bucket_s = float(gradients.cost_s(gradients.bytes[first : last + 1].sum(keepdims=True))[0])
        start_s = max(free_s, ready_s)
        if last + 1 < gradients.count:
            next_s = float(gradients.ready_s[last + 1])
            queued, waits_s = start_s > next_s, next_s - start_s
            if next_s < start_s + bucket_s and (queued or waits_s < patience_s):
                continue
        sizes.append(last + 1 - first)
        free_s, first = start_s + bucket_s, last + 1
    return tuple(sizes)


def _buckets(gradients: Gradients, sizes: Sequence[int]) -> tuple[Floats, Floats]:
    """Return the time of each bucket, and when it is ready."""
    ends = np.cumsum(sizes)
    if list(ends[-1:]) != [gradients.count] or min(sizes, default=0) < 1:
        raise ValueError(f"buckets of {list(sizes)} do not hold {gradients.count} gradients")
    total = np.concatenate([[0.0], np.cumsum(gradients.bytes)])
    starts = np.concatenate([[0], ends[:-1]])
    return gradients.cost_s(total[ends] - total[starts]), np.maximum.accumulate(gradients.ready_s)[ends - 1]
