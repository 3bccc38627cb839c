"""Weight each rank by the samples that it has computed, so that ranks may have batches of different sizes.

If each rank's loss is the mean over its own n samples, the gradient of the batch of all P ranks is Σ n·g / Σ n. An
exchange averages over ranks, so each rank first multiplies its gradient, or its update, by n·P / Σ n. The numbers are
those of the forward passes that have really run, so the last batch of an epoch has the right weights, too.

Ranks sum their numbers in one small all-reduce per step, which begins in forward and ends before the first bucket.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from syncline.balance.shares import Shares
from syncline.dist.comm import group_device
from syncline.errors import UsageError, warn

_FAR_OFF = 1.5  # factor by which the first step's samples may differ from the shares before a warning


@dataclass
class Counted:
    """Numbers of samples: this rank's, and the sum over the ranks, which an all-reduce may still compute."""

    own: float
    total: Tensor
    work: Any

    def weight(self, ranks: int, since: Counted | None = None) -> Tensor:
        """Return this rank's samples divided by the mean over the ranks, as a 0-dim tensor; 1 if there are none.

        Args:
            ranks: The number of ranks.
            since: An earlier count, to weigh only the samples since then.
        """
        own, total = self.own, self._sum()
        if since is not None:
            own, total = own - since.own, total - since._sum()
        return torch.where(total > 0, own * ranks / total, 1.0)

    def _sum(self) -> Tensor:
        self.work.wait()  # each time: on CUDA, it makes the current stream wait
        return self.total


class SampleWeights:
    """The weight of this rank, from the samples of its forward passes."""

    def __init__(self, group: dist.ProcessGroup, shares: Shares) -> None:
        self.shares, self._group, self._device = shares, group, group_device(group)
        self.ranks = group.size()
        self._unsynced = 0  # samples of passes that only accumulate, since the last one that synchronises
        self._everything = 0.0
        self._step: Counted | None = None
        self._weight: Tensor | None = None  # of the current step, once it is needed
        self._was_used = self._was_checked = False

    # --- in forward ---------------------------------------------------------------------------------------------

    def forward(self, arguments: tuple[Any, ...], options: Mapping[str, Any], *, synchronises: bool) -> None:
        """Count the samples of a forward pass. If its backward synchronises, begin to sum them over the ranks."""
        samples = self._count(arguments, options)
        self._everything += samples
        if self._was_used:
            self._unsynced, self._was_used = 0, False
        if synchronises:
            # A pass that is repeated before backward counts once, because only the ratios between ranks matter.
            self._step, self._weight = self._summed(float(self._unsynced + samples)), None
        else:
            self._unsynced += samples

    def _count(self, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> int:
        if self.shares.count is not None:
            samples: Any = self.shares.count(*arguments, **options)
            if not isinstance(samples, int) or samples < 1:
                raise UsageError(f"count returned {samples!r}: it must return the number of samples, at least 1")
            return samples
        tensors = (leaf for leaf in tree_leaves((arguments, dict(options))) if isinstance(leaf, Tensor) and leaf.dim())
        first = next(tensors, None)
        if first is None:
            text = "forward gets no tensor whose first dimension is the batch"
            raise UsageError(f"the samples cannot be counted: {text}: pass shares with count=, see syncline.Shares")
        return first.shape[0]

    def _summed(self, own: float) -> Counted:
        total = torch.full((), own, dtype=torch.float64, device=self._device)
        return Counted(own, total, dist.all_reduce(total, group=self._group, async_op=True))

    # --- where gradients and updates are exchanged --------------------------------------------------------------

    def of_gradients(self) -> Tensor:
        """Return the weight of the gradients of the current backward pass."""
        if self._step is None:
            raise UsageError("gradients are weighted by samples, but no forward pass of the DDP model has counted them")
        self._was_used = True
        if self._weight is None:
            self._weight = self._step.weight(self.ranks)
            if not self._was_checked:
                self._was_checked = True
                self._check(float(self._weight))
        return self._weight

    def _check(self, weight: float) -> None:
        expected = self.shares.batch * self.ranks / self.shares.total
        if not 1 / _FAR_OFF < weight / expected < _FAR_OFF:
            text = (
                f"rank {self.shares.rank} computed {weight:.2f} times the samples of an average rank in the first step"
            )
            cause = "Deal batches with shares.sampler, and pass count= if the first dimension is not the batch"
            warn(f"{text}, but its share is {expected:.2f} times the average. {cause}")

    def so_far(self) -> Counted:
        """Collective: return the samples of all steps so far, to weigh updates by what was computed between two
        exchanges."""
        return self._summed(self._everything)
