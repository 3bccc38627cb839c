"""Which gradients to fuse into buckets, if buckets travel one after the other.

A planner gets when each gradient is ready, how large it is, and what a bucket of some bytes takes, and returns buckets:
how many gradients each has, in the order in which they are ready. The published ones are here to be compared with:

- `wfbp`: none are fused. Wait-free back-propagation.
- `mgwfbp`: MG-WFBP's greedy (INFOCOM 2019). From the first gradient on: one waits for the next if that is ready before
  the first could have arrived, and if either the first is still queued by then, or waiting takes less than a start-up.
- `asc`: ASC-WFBP's (INFOCOM 2021): the same without waiting; what is left runs on two lanes.
- `constant`: buckets that are closed when they reach a size.
- `cycles`: what is ready at each tick of a clock travels together, up to a size, and the clock stands still meanwhile:
  Horovod's tensor fusion.

`optimal` is the exact optimum for one lane: with f(j) the earliest time by which the first j gradients can be there,

    f(j) = min over i < j of  max(f(i), ready(j)) + cost(bytes of i+1 … j)

because to have arrived earlier never hurts what comes after. O(L²), vectorised over i.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Sizes = tuple[int, ...]
"""How many gradients each bucket has, in the order in which they are ready."""


@dataclass(frozen=True)
class Gradients:
    """What there is to fuse, in the order in which it is ready."""

    ready_s: Floats
    bytes: Floats
    cost_s: Callable[[Floats], Floats]
    """What buckets of so many bytes take."""

    @property
    def count(self) -> int:
        return len(self.ready_s)

    @property
    def startup_s(self) -> float:
        """What a bucket takes however little it holds."""
        return float(self.cost_s(np.zeros(1))[0])


def line(startup_s: float, s_per_byte: float) -> Callable[[Floats], Floats]:
    """The cost that the published planners assume."""
    return lambda nbytes: startup_s + s_per_byte * nbytes


def arrival_s(gradients: Gradients, sizes: Sequence[int]) -> float:
    """When the last bucket has arrived, if they travel one after the other."""
    end_s = 0.0
    for bucket_s, ready_s in zip(*_buckets(gradients, sizes), strict=True):
        end_s = max(end_s, float(ready_s)) + float(bucket_s)
    return end_s


def optimal(gradients: Gradients) -> Sizes:
    """The buckets with which the last gradient arrives first."""
    count = gradients.count
    ready_s = np.maximum.accumulate(gradients.ready_s)
    ends = np.concatenate([[0.0], np.cumsum(gradients.bytes)])
    arrived_s = np.zeros(count + 1)
    cut = np.zeros(count + 1, np.int64)
    for j in range(1, count + 1):
        # What arrived before the gradients of this bucket were ready is all the same: fewest buckets, then.
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
    sizes, filled, held = [], 0.0, 0
    for nbytes in gradients.bytes:
        filled, held = filled + float(nbytes), held + 1
        if filled >= bucket_bytes:
            sizes.append(held)
            filled, held = 0.0, 0
    return tuple([*sizes, held] if held else sizes)


def cycles(gradients: Gradients, cycle_s: float, buffer_bytes: float) -> Sizes:
    sizes: list[int] = []
    now_s, first = 0.0, 0
    while first < gradients.count:
        # The first tick at which something is ready.
        now_s += max(1.0, math.ceil((float(gradients.ready_s[first]) - now_s) / cycle_s)) * cycle_s
        last, held = first, 0.0
        while last < gradients.count and float(gradients.ready_s[last]) <= now_s + 1e-12:
            held += float(gradients.bytes[last])
            if last > first and held > buffer_bytes:
                break
            last += 1
        last = max(last, first + 1)
        taken = gradients.bytes[first:last].sum(keepdims=True)
        now_s += max(0.0, float(gradients.cost_s(taken)[0]) - cycle_s)
        sizes.append(last - first)
        first = last
    return tuple(sizes)


def _greedy(gradients: Gradients, patience_s: float) -> Sizes:
    """A bucket takes the next gradient in if that is ready before the bucket could have arrived, and either the bucket
    is still queued by then, or would wait less than `patience_s` for it."""
    sizes: list[int] = []
    free_s, first = 0.0, 0
    for last in range(gradients.count):
        ready_s = float(gradients.ready_s[last])
        took_s = float(gradients.cost_s(gradients.bytes[first : last + 1].sum(keepdims=True))[0])
        start_s = max(free_s, ready_s)
        if last + 1 < gradients.count:
            next_s = float(gradients.ready_s[last + 1])
            queued, waits_s = start_s > next_s, next_s - start_s
            if next_s < start_s + took_s and (queued or waits_s < patience_s):
                continue
        sizes.append(last + 1 - first)
        free_s, first = start_s + took_s, last + 1
    return tuple(sizes)


def _buckets(gradients: Gradients, sizes: Sequence[int]) -> tuple[Floats, Floats]:
    """What each bucket takes, and when it is ready."""
    ends = np.cumsum(sizes)
    if list(ends[-1:]) != [gradients.count] or min(sizes, default=0) < 1:
        raise ValueError(f"buckets of {list(sizes)} do not hold {gradients.count} gradients")
    total = np.concatenate([[0.0], np.cumsum(gradients.bytes)])
    starts = np.concatenate([[0], ends[:-1]])
    return gradients.cost_s(total[ends] - total[starts]), np.maximum.accumulate(gradients.ready_s)[ends - 1]
