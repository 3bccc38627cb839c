"""Planners that fuse gradients into buckets, which are exchanged one after the other. A planner returns the number of
gradients in each bucket, in ready order. `optimal` is the exact optimum for one lane; `wfbp`, `mgwfbp` and `asc` are
published algorithms."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Sizes = tuple[int, ...]  # number of gradients in each bucket, in ready order


@dataclass(frozen=True)
class Gradients:
    """The gradients of a step, in ready order."""

    ready_s: Floats
    bytes: Floats
    cost_s: Callable[[Floats], Floats]  # returns the time of buckets of the given bytes

    @property
    def count(self) -> int:
        return len(self.ready_s)


def line(startup_s: float, s_per_byte: float) -> Callable[[Floats], Floats]:
    """Return the linear cost function that the published planners assume."""
    return lambda nbytes: startup_s + s_per_byte * nbytes


def optimal(gradients: Gradients) -> Sizes:
    """Return the buckets with which the last gradient arrives earliest. The first j gradients arrive at the earliest at

    f(j) = min over i < j of  max(f(i), ready(j)) + cost(bytes of i+1 … j)

    because an earlier arrival never delays later buckets."""
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
    """Return one bucket per gradient: wait-free back-propagation."""
    return (1,) * gradients.count


def mgwfbp(gradients: Gradients) -> Sizes:
    """Fuse by the greedy algorithm of MG-WFBP (INFOCOM 2019). A bucket takes in the next gradient if that is ready
    before the bucket could have arrived, and if the bucket is still queued then or would wait less than a start-up."""
    return _greedy(gradients, patience_s=float(gradients.cost_s(np.zeros(1))[0]))


def asc(gradients: Gradients) -> Sizes:
    """Fuse as ASC-WFBP does (INFOCOM 2021): like `mgwfbp`, but without waiting. Its buckets run on two lanes."""
    return _greedy(gradients, patience_s=0.0)


def _greedy(gradients: Gradients, patience_s: float) -> Sizes:
    sizes: list[int] = []
    free_s, first = 0.0, 0
    for last, next_s in enumerate([*gradients.ready_s[1:], math.inf]):
        bucket_s = float(gradients.cost_s(gradients.bytes[first : last + 1].sum(keepdims=True))[0])
        start_s = max(free_s, float(gradients.ready_s[last]))
        if next_s < start_s + bucket_s and (start_s > next_s or next_s - start_s < patience_s):
            continue
        sizes.append(last + 1 - first)
        free_s, first = start_s + bucket_s, last + 1
    return tuple(sizes)
