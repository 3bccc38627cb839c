"""The batch of each rank: the result of measuring, a file, and what `attach` weights gradients by."""

from __future__ import annotations

import os
from collections.abc import Callable, Sized
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import msgspec
import torch.distributed as dist

from syncline.balance.sampler import ShareSampler
from syncline.errors import UsageError
from syncline.files import read_json, write_json
from syncline.units import milliseconds_text, speedup_text

Count = Callable[..., int]
"""Returns the number of samples in the arguments of a model's forward."""
_SAME = 0.02  # a step that is faster by less is called as fast


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The content of a file."""

    schema: int = 1
    batches: tuple[int, ...]
    equal_s: float | None = None
    step_s: float | None = None


@dataclass(frozen=True)
class Shares:
    """The number of samples that each rank computes in a step. `syncline.shares` measures them.

    Args:
        batches: The samples of each rank, in rank order.
        rank: The number of this rank. Default: its number in `torch.distributed`, or what torchrun says.
        equal_s: Seconds of forward and backward on the slowest rank with equal batches, if they were measured.
        step_s: The same with these batches.
        count: Function that gets the arguments of the model's forward and returns their number of samples. Default: the
            first dimension of the first tensor.

    Raises:
        UsageError: A batch is not a positive integer, or the rank is not one of them.

    Example:
        >>> shares = syncline.Shares((96, 96, 48, 16), rank=2)
        >>> shares.batch, shares.total
        (48, 256)
    """

    batches: tuple[int, ...]
    rank: int = -1
    equal_s: float | None = None
    step_s: float | None = None
    count: Count | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "batches", tuple(self.batches))
        except TypeError:
            raise UsageError(f"batches is {self.batches!r}: pass the samples of each rank, like (96, 96, 64)") from None
        for rank, batch in enumerate(self.batches):
            if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
                raise UsageError(f"the batch of rank {rank} is {batch!r}: it must be an integer, at least 1")
        if self.rank == -1:
            object.__setattr__(self, "rank", _own_rank())
        if not isinstance(self.rank, int) or not 0 <= self.rank < len(self.batches):
            text = f"there are {len(self.batches)} batches, and this is rank {self.rank}"
            if self.rank == -1:
                text = "there is neither a process group nor torchrun, so this rank is not known"
            raise UsageError(f"{text}: pass one batch for each rank, and rank= if it is not known")
        count: Any = self.count
        if count is not None and not callable(count):
            raise UsageError(f"count is {count!r}: pass a function of the arguments of the model's forward")

    @property
    def batch(self) -> int:
        """The number of samples of this rank."""
        return self.batches[self.rank]

    @property
    def total(self) -> int:
        """The number of samples of all ranks."""
        return sum(self.batches)

    @property
    def saved_s(self) -> float:
        """Seconds per step that these batches save; 0 if they were not measured."""
        return 0.0 if self.equal_s is None or self.step_s is None else max(0.0, self.equal_s - self.step_s)

    def describe(self) -> str:
        """Return the batches and, if they were measured, the time of a step with them and with equal ones."""
        text = f"{self.total} samples on {len(self.batches)} ranks: {', '.join(map(str, self.batches))}."
        if self.equal_s is None or self.step_s is None or not self.equal_s:
            return text
        times = f"{milliseconds_text(self.step_s)} instead of {milliseconds_text(self.equal_s)} with equal batches"
        faster = speedup_text(self.step_s / self.equal_s, _SAME)
        return f"{text} Forward and backward of the slowest rank take {times}: {faster}."

    def sampler(
        self, dataset: Sized | int, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> ShareSampler:
        """Return a batch sampler that deals a dataset in these batches, each sample exactly once per epoch.

        Args:
            dataset: The dataset, or its number of samples.
            shuffle: Whether to deal in a random order, which `set_epoch` changes.
            seed: The seed of that order, the same on all ranks.
            drop_last: Leave out the last samples of an epoch if they do not fill a whole batch of all ranks. By default
                they are divided in the same proportion.

        Raises:
            UsageError: The dataset has too few samples or no length, or the seed is not an integer.

        Example:
            >>> sampler = syncline.Shares((2, 1), rank=0).sampler(7, shuffle=False)
            >>> list(sampler)
            [[0, 1], [3, 4], [6]]
        """
        try:
            samples = dataset if isinstance(dataset, int) else len(dataset)
        except TypeError:
            kind = type(dataset).__name__
            raise UsageError(f"the dataset is a {kind} without a length: pass one with a length, or a number") from None
        number: Any = seed
        if not isinstance(number, Integral):
            raise UsageError(f"seed is {seed!r}: pass an integer, the same on all ranks")
        return ShareSampler(samples, self.batches, self.rank, shuffle=shuffle, seed=int(seed), drop_last=drop_last)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the batches to a JSON file, for a job that is resumed on the same ranks. One rank calls this."""
        write_json(path, _File(batches=self.batches, equal_s=self.equal_s, step_s=self.step_s))

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, rank: int = -1, count: Count | None = None) -> Shares:
        """Read a file that `save` wrote.

        Raises:
            UsageError: The file is not valid, or it is for another number of ranks: measure again.
        """
        loaded = read_json(path, _File)
        try:
            shares = cls(loaded.batches, rank, loaded.equal_s, loaded.step_s, count)
        except UsageError as error:
            raise UsageError(f"{os.fspath(path)}: {error}") from error
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() != len(shares.batches):
            saved = f"has batches for {len(shares.batches)} ranks, but there are {dist.get_world_size()} now"
            raise UsageError(f"{os.fspath(path)}: {saved}: measure again with syncline.shares")
        return shares

    def fingerprint(self) -> dict[str, Any]:
        """Return the fields that must be equal on all ranks."""
        return {"batches": list(self.batches), "count": self.count is not None}


def _own_rank() -> int:
    """Return the number of this rank, or -1 if it is not known."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else -1
