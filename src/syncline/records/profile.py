"""The profile of a model: when each gradient is ready during backward, and how large it is.

A `Profile` is all that predictions and plans use of a model. It shows how much communication can hide behind
computation. A profile recorded on a GPU host can be studied on a laptop.
"""

from __future__ import annotations

import itertools
import math
import os
from importlib import resources
from pathlib import Path
from typing import Annotated

import msgspec
import torch

from syncline.files import FileError, JsonFile
from syncline.records.activations import Activations
from syncline.records.fields import MOST, Amount, Count, Device, PositiveCount, Schema, Seconds, Share, check_unique
from syncline.records.sharding import Sharding

_GRADIENT_DTYPES = ("float64", "float32", "float16", "bfloat16", "complex64", "complex128")
_OTHER_DTYPES = (
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
    *("float8_e4m3fn", "float8_e5m2"),
)

ITEM_BYTES: dict[str, int] = {name: getattr(torch, name).itemsize for name in _GRADIENT_DTYPES}
"""Bytes of an element, by dtype. Only floating-point and complex tensors have gradients."""
BUFFER_ITEM_BYTES = ITEM_BYTES | {name: getattr(torch, name).itemsize for name in _OTHER_DTYPES}
"""The same for buffers: BatchNorm counts steps in an int64, and attention masks are bool."""


class NamedTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The name and the type of a parameter's gradient."""

    name: str
    shape: Annotated[tuple[Count, ...], msgspec.Meta(max_length=64)]
    dtype: str

    def __post_init__(self) -> None:
        if not all(self.name.split(".")):
            raise ValueError(f"name: {self.name!r} is not a valid parameter name")
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype: {self.dtype} is unknown; known: {', '.join(ITEM_BYTES)}")
        if math.prod(self.shape) > MOST:
            raise ValueError("shape: has too many elements")

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Gradient(NamedTensor, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One parameter's gradient."""

    bytes: int
    ready_s: Seconds  # seconds from the start of backward until the gradient is complete

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bytes != self.nbytes:
            tensor = f"{self.dtype} of shape {list(self.shape)}"
            raise ValueError(f"bytes: is {self.bytes}, but {tensor} takes {self.nbytes}")


class Buffers(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All buffers of one dtype, which DDP broadcasts together before every forward."""

    dtype: str
    bytes: Count

    def __post_init__(self) -> None:
        if self.dtype not in BUFFER_ITEM_BYTES:
            raise ValueError(f"dtype: {self.dtype} is unknown; known: {', '.join(BUFFER_ITEM_BYTES)}")
        if self.bytes % BUFFER_ITEM_BYTES[self.dtype]:
            raise ValueError(f"bytes: {self.bytes} is not a whole number of {self.dtype} elements")


class RankTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The medians of one of several ranks that were measured at the same time."""

    rank: Count
    forward_s: Seconds
    backward_s: Seconds
    update_s: Seconds

    @property
    def step_s(self) -> float:
        return self.forward_s + self.backward_s + self.update_s


class Spread(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Lower and upper quartile of the step times."""

    low_s: Seconds
    high_s: Seconds

    def __post_init__(self) -> None:
        if self.high_s < self.low_s:
            raise ValueError(f"high_s: is {self.high_s}, below low_s ({self.low_s})")


class Work(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An exchange's own computation for one bucket, as a linear function of the bucket's bytes."""

    fixed_s: Seconds
    s_per_byte: Seconds

    def of(self, nbytes: int) -> float:
        """Return the seconds for a bucket of `nbytes`."""
        return self.fixed_s + self.s_per_byte * nbytes


class Overheads(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The time that DDP and the exchanges add to the computation, without any network."""

    copy_in_s_per_byte: Seconds  # copies into buckets, on the thread that runs backward
    copy_out_s_per_byte: Seconds  # copies out of buckets, after the exchange
    hook_s: Seconds  # time of the hook of one bucket, on the thread that runs backward
    work: dict[str, Work]  # the work of each exchange, by its name in `syncline.exchange.EXCHANGES`


class UnderLoad(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Time that an exchange adds to a bucket where it shares the processors with the model, beyond the start-ups and
    the bytes of its collectives: its passes, and waiting for a processor around each collective."""

    beside: Work  # while the model computes
    alone: Work  # after the model has computed
    crowded: Amount = 1.0  # factor by which `alone` grows while another lane runs an exchange, too
    taken: Share = 0.0  # the part of its speed that the model's computation loses meanwhile


class Contention(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Time that computation and communication take from each other, measured in steps of the model on all ranks."""

    exchanges: dict[str, UnderLoad]  # by name, as in `Overheads.work`; always with `dense`
    taken_s_per_byte: Seconds = 0.0  # computing time that a rank loses for each byte that it sends meanwhile
    sending: Amount = 1.0  # factor by which bytes take longer while the model computes

    def __post_init__(self) -> None:
        if "dense" not in self.exchanges:
            raise ValueError("exchanges: has no entry for dense")


class Profile(JsonFile, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One training step of one model on one device, without communication.

    If several ranks were measured at the same time, all times are medians over them, and `ranks` has the times of each.
    The constructor raises `ValueError`, which names the field, if fields contradict each other.

    Example:
        >>> profile = syncline.Profile.load("profile.json")
        >>> print(profile.step_s, profile.gradient_bytes)
    """

    schema: Schema = 1
    model: str
    gradients: tuple[Gradient, ...]  # sorted by `ready_s`
    forward_s: Seconds
    backward_s: Seconds
    update_s: Seconds  # the optimizer's step; 0.0 if it was not measured
    device: Device  # `cpu` or `cuda`
    where: str  # the hardware, for readers
    how: str  # the method and versions, for readers
    steps: PositiveCount  # number of measured steps
    batch: PositiveCount | None  # examples per rank and step, if known
    buffers: tuple[Buffers, ...] = ()  # One entry per dtype. DDP sends one broadcast for each.
    ranks: tuple[RankTimes, ...] = ()
    spread: Spread | None = None
    jitter_s: Seconds = 0.0
    """Time that a step waits for the rank that is slowest in it: the median over steps of the slowest rank's step time
    minus the median rank's."""
    overheads: Overheads | None = None
    contention: Contention | None = None  # if it was measured; otherwise predictions assume none
    activations: Activations | None = None  # memory of forward and backward, if it was measured
    sharding: Sharding | None = None  # the units of a model for FSDP

    def __post_init__(self) -> None:
        check_unique("gradients[{}].name", (gradient.name for gradient in self.gradients))
        check_unique("buffers[{}].dtype", (entry.dtype for entry in self.buffers))
        check_unique("ranks[{}].rank", (times.rank for times in self.ranks))
        for index, (before, after) in enumerate(itertools.pairwise(self.gradients), start=1):
            if after.ready_s < before.ready_s:
                problem = f"is {after.ready_s}, but {before.ready_s} for the one before"
                raise ValueError(f"gradients[{index}].ready_s: {problem}; gradients must be sorted by ready_s")
        if not self.gradients:
            raise ValueError("gradients: is empty; a profile has at least one gradient")
        last, rounding_s = len(self.gradients) - 1, 1e-9 + 1e-6 * self.backward_s
        if (ready_s := self.gradients[last].ready_s) > self.backward_s + rounding_s:
            raise ValueError(f"gradients[{last}].ready_s: is {ready_s}, after backward_s ({self.backward_s})")
        if self.sharding is not None:
            self.sharding.check({gradient.name for gradient in self.gradients})

    @property
    def slowest(self) -> RankTimes | None:
        """The rank whose steps take longest; None if only one rank was measured."""
        return max(self.ranks, key=lambda rank: rank.step_s, default=None)

    @property
    def step_s(self) -> float:
        """Seconds of forward, backward and update together."""
        return self.forward_s + self.backward_s + self.update_s

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients of one rank."""
        return sum(gradient.bytes for gradient in self.gradients)

    def scaled(self, time: float = 1.0, bytes: float = 1.0) -> Profile:
        """Return the profile with all times and all gradient sizes multiplied.

        Use it to fit a model made for a fast network to slow emulated links: if sizes and rate shrink together, the
        overlap stays the same. Resized gradients keep at least one element. Those with two or more dimensions become
        matrices that shrink on both sides, for hooks that factorise them. Overheads stay the same, because they depend
        on the machine and not on the model.

        Args:
            time: Factor for all times.
            bytes: Factor for the sizes of all gradients and buffers.

        Raises:
            ValueError: A factor is not greater than 0.
        """
        for field, factor in (("time", time), ("bytes", bytes)):
            if not (math.isfinite(factor) and factor > 0):
                raise ValueError(f"{field}: must be a finite factor greater than 0, not {factor}")
        if time == bytes == 1.0:
            return self
        return msgspec.structs.replace(
            self,
            gradients=tuple(_scaled_gradient(gradient, time, bytes) for gradient in self.gradients),
            buffers=tuple(_scaled_buffers(entry, bytes) for entry in self.buffers),
            ranks=tuple(msgspec.structs.replace(rank, **_scaled_times(rank, time)) for rank in self.ranks),
            spread=self.spread and msgspec.structs.replace(self.spread, **_scaled_times(self.spread, time)),
            **_scaled_times(self, time),
            activations=self.activations if bytes == 1.0 else None,
            how=f"{self.how}; scaled: time × {time:g}, bytes × {bytes:g}",
        )


def shipped_profiles() -> tuple[str, ...]:
    """Return the names of the profiles that are installed with Syncline."""
    files = (resources.files("syncline") / "profiles").iterdir()
    return tuple(sorted(entry.name.removesuffix(".json") for entry in files if entry.name.endswith(".json")))


def load_profile(name_or_path: str | os.PathLike[str]) -> Profile:
    """Return a shipped profile by its name, or any profile by its path."""
    name = os.fspath(name_or_path)
    if name in shipped_profiles():
        with resources.as_file(resources.files("syncline") / "profiles" / f"{name}.json") as path:
            return Profile.load(path)
    if Path(name).suffix or Path(name).exists() or os.sep in name:
        return Profile.load(name)
    raise FileError(f"{name}: is neither a file nor a shipped profile (shipped: {', '.join(shipped_profiles())})")


def _scaled_buffers(buffers: Buffers, bytes: float) -> Buffers:
    item_bytes = BUFFER_ITEM_BYTES[buffers.dtype]
    elements = buffers.bytes // item_bytes
    return Buffers(dtype=buffers.dtype, bytes=item_bytes * (max(1, round(elements * bytes)) if elements else 0))


def _scaled_times(record: Profile | RankTimes | Spread, factor: float) -> dict[str, float]:
    return {field: getattr(record, field) * factor for field in record.__struct_fields__ if field.endswith("_s")}


def _scaled_gradient(gradient: Gradient, time: float, bytes: float) -> Gradient:
    ready_s = gradient.ready_s * time
    if bytes == 1.0:
        return msgspec.structs.replace(gradient, ready_s=ready_s)
    elements = max(1.0, math.prod(gradient.shape) * bytes)
    shape: tuple[int, ...] = (round(elements),)
    if len(gradient.shape) > 1:
        rows = max(1, round(gradient.shape[0] * math.sqrt(bytes)))
        shape = (rows, max(1, round(elements / rows)))
    size = math.prod(shape) * ITEM_BYTES[gradient.dtype]
    return msgspec.structs.replace(gradient, shape=shape, bytes=size, ready_s=ready_s)
