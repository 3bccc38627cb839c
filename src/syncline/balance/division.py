"""Divide a batch among ranks so that all finish their part at the same time. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from syncline.errors import UsageError

_HALVINGS = 100  # halvings of an interval of seconds, after which its ends are neighbouring floats
_LEAST_SLOPE = 1e-3  # a sample takes at least this share of the seconds per sample of a whole step


@dataclass(frozen=True)
class RankCost:
    """The time of a step on one rank, `fixed_s + sample_s · samples`, and the most samples that it has memory for."""

    fixed_s: float
    sample_s: float
    most: int | None = None

    def seconds(self, samples: int) -> float:
        """Return the time of a step with this many samples."""
        return self.fixed_s + self.sample_s * samples

    def samples_within(self, seconds: float, total: int) -> int:
        """Return how many of `total` samples fit into a time and into the memory, but at least one."""
        most = total if self.most is None else min(total, self.most)
        return max(1, int(min(most, (seconds - self.fixed_s) / self.sample_s)))


def fitted(times: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return the fixed time and the time per sample that explain measured steps best.

    Relative errors count, so that short steps decide as much as long ones. Neither result is negative. The line goes
    through the last time, which should be the one that matters most.

    Args:
        times: Numbers of samples, and the seconds that a step with so many took.
    """
    samples, seconds = (np.array(column, dtype=float) for column in zip(*times, strict=True))
    (fixed_s, sample_s), _ = nnls(np.stack([1 / seconds, samples / seconds], axis=1), np.ones(len(times)))
    sample_s = max(sample_s, _LEAST_SLOPE * float(np.median(seconds / samples)))
    factor = seconds[-1] / (fixed_s + sample_s * samples[-1])
    return float(fixed_s * factor), float(sample_s * factor)


def divide(total: int, costs: Sequence[RankCost]) -> tuple[int, ...]:
    """Return the samples of each rank with which the slowest rank takes the least time. Their sum is `total`.

    Raises:
        UsageError: There are fewer samples than ranks, or the ranks do not have enough memory for all samples.
    """
    if total < len(costs):
        raise UsageError(f"total is {total}, but each of the {len(costs)} ranks needs at least one sample")
    low_s, high_s = 0.0, 2 * max(cost.seconds(total) for cost in costs)  # more than enough
    if sum(cost.samples_within(high_s, total) for cost in costs) < total:
        most = sum(total if cost.most is None else cost.most for cost in costs)
        raise UsageError(f"total is {total}, but the memory budget permits only {most} samples on all ranks together")
    for _ in range(_HALVINGS):
        middle_s = (low_s + high_s) / 2
        enough = sum(cost.samples_within(middle_s, total) for cost in costs) >= total
        low_s, high_s = (low_s, middle_s) if enough else (middle_s, high_s)
    batches = [cost.samples_within(high_s, total) for cost in costs]
    while sum(batches) > total:  # ranks that finish at the same time
        several = [rank for rank, batch in enumerate(batches) if batch > 1]
        batches[max(several, key=lambda rank: costs[rank].seconds(batches[rank]))] -= 1
    return tuple(batches)


def equal_batches(total: int, ranks: int) -> tuple[int, ...]:
    """Return batches that differ by at most one, and whose sum is `total`."""
    return tuple(total // ranks + (rank < total % ranks) for rank in range(ranks))


def dealt(samples: int, batches: Sequence[int]) -> tuple[int, ...]:
    """Divide any number of samples as `batches` divide theirs: at least one each, and if they are no more than the sum
    of `batches`, no rank gets more than its own."""
    over = [batch - 1 for batch in batches]
    if not any(over):
        over = [1] * len(batches)
    left, whole = samples - len(batches), sum(over)
    quotas = [divmod(left * part, whole) for part in over]
    missing = left - sum(quota for quota, _ in quotas)
    order = sorted(range(len(batches)), key=lambda rank: (-quotas[rank][1], rank))
    first = set(order[:missing])
    return tuple(1 + quota + (rank in first) for rank, (quota, _) in enumerate(quotas))
