"""A batch sampler that deals a dataset in unequal batches, each sample exactly once per epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch.utils.data import Sampler

from syncline.balance.division import dealt
from syncline.errors import UsageError


class ShareSampler(Sampler[list[int]]):
    """The batches of one rank, for `DataLoader(dataset, batch_sampler=…)`. `Shares.sampler` creates it.

    In each epoch, all ranks have the same number of batches, and each sample is in exactly one batch of one rank. If
    the last samples do not fill a whole batch of all ranks, they are divided in the same proportion, at least one per
    rank. If they are fewer than the ranks, they are dealt together with the batch before them.

    Call `set_epoch` before each epoch, on all ranks, to shuffle in another order.
    """

    def __init__(
        self, samples: int, batches: Sequence[int], rank: int, *, shuffle: bool, seed: int, drop_last: bool
    ) -> None:
        self._samples, self._batches, self._rank = samples, tuple(batches), rank
        self._shuffle, self._seed, self.epoch = shuffle, seed, 0
        self.totals = totals_of(samples, sum(batches), len(batches), drop_last)
        """The samples of each step on all ranks together."""

    @property
    def sampler(self) -> ShareSampler:
        """This object: Lightning sets the epoch of a batch sampler's `sampler`."""
        return self

    @property
    def batch_size(self) -> int:
        """Not defined. Code that divides batches among ranks, such as Accelerate's, asks for it."""
        text = "a loader with batches of unequal sizes is for this rank alone, and must not be divided again"
        remedy = "do not pass it to accelerator.prepare, or pass use_distributed_sampler=False to Lightning's Trainer"
        raise UsageError(f"{text}: {remedy}")

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next epoch. All ranks must pass the same number."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.totals)

    def __iter__(self) -> Iterator[list[int]]:
        order: Sequence[int] = range(self._samples)
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed + self.epoch)
            order = torch.randperm(self._samples, generator=generator).tolist()
        begin = 0
        for total in self.totals:
            ends = [begin, *(begin + end for end in accumulate(dealt(total, self._batches)))]
            yield list(order[ends[self._rank] : ends[self._rank + 1]])
            begin += total


def totals_of(samples: int, total: int, ranks: int, drop_last: bool) -> tuple[int, ...]:
    """Return how many samples each step of an epoch takes on all ranks together: `total`, except at the end."""
    steps, tail = divmod(samples, total)
    if samples < ranks or (drop_last and not steps):
        needed = f"a step needs {total}" if drop_last else f"each of the {ranks} ranks needs one"
        raise UsageError(f"the dataset has {samples} samples, and {needed}: use a larger dataset, or smaller batches")
    if drop_last or not tail:
        return (total,) * steps
    if tail >= ranks:
        return (*(total,) * steps, tail)
    if total + tail < 2 * ranks:  # not enough for two steps
        return (*(total,) * (steps - 1), total + tail)
    return (*(total,) * (steps - 1), total + tail - ranks, ranks)
