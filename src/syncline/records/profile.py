"""The profile of a model: when each gradient is ready during backward, and how large it is.

A `Profile` is all that predictions and plans use of a model. It lists gradients in the order in which backward finishes
them, each with its time from the start of backward, so it shows how much communication can hide behind computation.
A profile recorded on a GPU host can be studied on a laptop.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TypeVar

import msgspec

from syncline.files import FileError, read_json, write_json
from syncline.records.activations import Activations, Line
from syncline.records.checks import (
    MOST,
    check_all_seconds,
    check_device,
    check_schema,
    check_seconds,
    check_whole,
    first_repeated,
)

# Only floating-point and complex tensors have gradients.
ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "complex64": 8,
    "complex128": 16,
}
_MOST_ELEMENTS = 1 << 60
_MOST_DIMENSIONS = 64
# Buffers may have any dtype: BatchNorm counts steps in an int64, and attention masks are bool.
BUFFER_ITEM_BYTES = {
    **ITEM_BYTES,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "bool": 1,
}


class Gradient(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One parameter's gradient."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    ready_s: float
    """Seconds from the start of backward until the gradient is complete."""


class Buffers(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All buffers of one dtype, which DDP broadcasts together before every forward."""

    dtype: str
    bytes: int


class RankTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The medians of one of several ranks that were measured at the same time."""

    rank: int
    forward_s: float
    backward_s: float
    update_s: float

    @property
    def step_s(self) -> float:
        return self.forward_s + self.backward_s + self.update_s


class Spread(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Lower and upper quartile of the step times."""

    low_s: float
    high_s: float


class Work(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An exchange's own computation for one bucket, as a linear function of the bucket's bytes."""

    fixed_s: float
    s_per_byte: float


class Overheads(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The time that DDP and the exchanges add to the computation, without any network."""

    copy_in_s_per_byte: float
    """Copies into buckets, on the thread that runs backward."""
    copy_out_s_per_byte: float
    """Copies out of buckets, after the exchange."""
    hook_s: float
    """Time of the hook of one bucket, on the thread that runs backward."""
    work: dict[str, Work]
    """The work of each exchange, by its name in `syncline.exchange.EXCHANGES`."""


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One training step of one model on one device, without communication.

    If several ranks were measured at the same time, all times are medians over them, and `ranks` has the times of each.
    The constructor raises `ValueError`, which names the field, if fields contradict each other.

    Example:
        >>> profile = syncline.Profile.load("profile.json")
        >>> print(profile.step_s, profile.gradient_bytes)
    """

    schema: int = 1
    model: str
    gradients: tuple[Gradient, ...]
    """Sorted by `ready_s`."""
    forward_s: float
    backward_s: float
    update_s: float
    """The optimizer's step; 0.0 if it was not measured."""
    device: str
    """`cpu` or `cuda`."""
    where: str
    """The hardware, for readers."""
    how: str
    """The method and versions, for readers."""
    steps: int
    """Number of measured steps."""
    batch: int | None
    """Examples per rank and step, if known."""
    buffers: tuple[Buffers, ...] = ()
    """One entry per dtype. DDP sends one broadcast for each."""
    ranks: tuple[RankTimes, ...] = ()
    spread: Spread | None = None
    jitter_s: float = 0.0
    """Time that a step waits for the rank that is slowest in it: the median over steps of the slowest rank's step time
    minus the median rank's."""
    overheads: Overheads | None = None
    activations: Activations | None = None
    """Memory of forward and backward, if it was measured."""

    def __post_init__(self) -> None:
        _check_counts(self)
        _check_times(self)
        for index, gradient in enumerate(self.gradients):
            _check_gradient(gradient, f"gradients[{index}]")
        if repeated := first_repeated(gradient.name for gradient in self.gradients):
            raise ValueError(f"gradients[{repeated[0]}].name: {repeated[1]} appears twice")
        _check_buffers(self.buffers)
        _check_ranks(self.ranks)
        if self.spread is not None:
            _check_spread(self.spread)
        check_seconds(self.jitter_s, "jitter_s")
        if self.overheads is not None:
            _check_overheads(self.overheads)
        if self.activations is not None:
            _check_activations(self.activations)

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

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a profile from a JSON file. Raises `FileError` if it is not valid."""
        return read_json(path, cls)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile to a JSON file."""
        write_json(path, self)

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
            forward_s=self.forward_s * time,
            backward_s=self.backward_s * time,
            update_s=self.update_s * time,
            buffers=tuple(_scaled_buffers(entry, bytes) for entry in self.buffers),
            ranks=tuple(_times_scaled(rank, time) for rank in self.ranks),
            spread=self.spread and _times_scaled(self.spread, time),
            jitter_s=self.jitter_s * time,
            activations=self.activations if bytes == 1.0 else None,
            how=f"{self.how}; scaled: time × {time:g}, bytes × {bytes:g}",
        )


def shipped_profiles() -> tuple[str, ...]:
    """Return the names of the profiles that are installed with Syncline."""
    folder = resources.files("syncline") / "profiles"
    if not folder.is_dir():
        return ()
    return tuple(sorted(entry.name[: -len(".json")] for entry in folder.iterdir() if entry.name.endswith(".json")))


def load_profile(name_or_path: str | os.PathLike[str]) -> Profile:
    """Return a shipped profile by its name, or any profile by its path."""
    name = os.fspath(name_or_path)
    if name in shipped_profiles():
        with resources.as_file(resources.files("syncline") / "profiles" / f"{name}.json") as path:
            return Profile.load(path)
    if Path(name).suffix or Path(name).exists() or os.sep in name:
        return Profile.load(name)
    known = ", ".join(shipped_profiles()) or "none"
    raise FileError(f"{name}: is neither a file nor a shipped profile (shipped: {known})")


def _check_counts(profile: Profile) -> None:
    check_schema(profile.schema)
    if not profile.gradients:
        raise ValueError("gradients: is empty; a profile has at least one gradient")
    check_whole(profile.steps, "steps", least=1)
    if profile.batch is not None:
        check_whole(profile.batch, "batch", least=1)
    check_device(profile.device)


def _check_times(profile: Profile) -> None:
    check_all_seconds(profile, "", "forward_s", "backward_s", "update_s")
    for index, gradient in enumerate(profile.gradients):
        check_seconds(gradient.ready_s, f"gradients[{index}].ready_s")
    for index, (before, after) in enumerate(itertools.pairwise(profile.gradients), start=1):
        if after.ready_s < before.ready_s:
            raise ValueError(
                f"gradients[{index}].ready_s: is {after.ready_s}, but {before.ready_s} for the one before; "
                "gradients must be sorted by ready_s"
            )
    last, rounding_s = len(profile.gradients) - 1, 1e-9 + 1e-6 * profile.backward_s
    if profile.gradients[last].ready_s > profile.backward_s + rounding_s:
        ready_s = profile.gradients[last].ready_s
        raise ValueError(f"gradients[{last}].ready_s: is {ready_s}, after backward_s ({profile.backward_s})")


def elements_of(shape: Sequence[int]) -> int | None:
    """Return the number of elements of a tensor, or None if no tensor can have this shape.

    Sizes are not multiplied beyond a limit, because the product of many large integers takes very long.
    """
    if any(size < 0 for size in shape) or len(shape) > _MOST_DIMENSIONS:
        return None
    elements = 1
    for size in shape:
        elements = min(elements * size, _MOST_ELEMENTS) if size < _MOST_ELEMENTS else _MOST_ELEMENTS
    return elements if elements < _MOST_ELEMENTS else None


def _check_gradient(gradient: Gradient, field: str) -> None:
    parts = gradient.name.split(".")
    if not all(parts):
        raise ValueError(f"{field}.name: {gradient.name!r} is not a valid parameter name")
    if any(size < 0 for size in gradient.shape):
        raise ValueError(f"{field}.shape: has a negative size")
    elements = elements_of(gradient.shape)
    if elements is None:
        raise ValueError(f"{field}.shape: has too many elements")
    if gradient.dtype not in ITEM_BYTES:
        raise ValueError(f"{field}.dtype: {gradient.dtype} is unknown; known: {', '.join(ITEM_BYTES)}")
    expected_bytes = elements * ITEM_BYTES[gradient.dtype]
    if gradient.bytes != expected_bytes:
        raise ValueError(
            f"{field}.bytes: is {gradient.bytes}, but {gradient.dtype} of shape {list(gradient.shape)} "
            f"takes {expected_bytes}"
        )


def _check_buffers(buffers: tuple[Buffers, ...]) -> None:
    for index, entry in enumerate(buffers):
        field = f"buffers[{index}]"
        if entry.dtype not in BUFFER_ITEM_BYTES:
            raise ValueError(f"{field}.dtype: {entry.dtype} is unknown; known: {', '.join(BUFFER_ITEM_BYTES)}")
        if not 0 <= entry.bytes <= MOST or entry.bytes % BUFFER_ITEM_BYTES[entry.dtype]:
            raise ValueError(f"{field}.bytes: {entry.bytes} is not a whole number of {entry.dtype} elements")
    if repeated := first_repeated(entry.dtype for entry in buffers):
        index, dtype = repeated
        raise ValueError(f"buffers[{index}].dtype: {dtype} appears twice; buffers of one dtype are one entry")


def _check_ranks(ranks: tuple[RankTimes, ...]) -> None:
    for index, times in enumerate(ranks):
        if times.rank < 0:
            raise ValueError(f"ranks[{index}].rank: must be at least 0, not {times.rank}")
        check_all_seconds(times, f"ranks[{index}].", "forward_s", "backward_s", "update_s")
    if repeated := first_repeated(str(times.rank) for times in ranks):
        raise ValueError(f"ranks[{repeated[0]}].rank: {repeated[1]} appears twice")


def _check_spread(spread: Spread) -> None:
    check_all_seconds(spread, "spread.", "low_s", "high_s")
    if spread.high_s < spread.low_s:
        raise ValueError(f"spread.high_s: is {spread.high_s}, below low_s ({spread.low_s})")


def _check_overheads(overheads: Overheads) -> None:
    check_all_seconds(overheads, "overheads.", "copy_in_s_per_byte", "copy_out_s_per_byte", "hook_s")
    for name, work in overheads.work.items():
        check_all_seconds(work, f"overheads.work.{name}.", "fixed_s", "s_per_byte")


def _check_activations(activations: Activations) -> None:
    """Check that values stay finite at every batch size; `Activations` checks the rest."""
    for index, batch in enumerate(activations.batches):
        if batch > MOST:
            raise ValueError(f"activations.batches[{index}]: is too large")
    parts = [("", activations), *((f"blocks[{index}].", block) for index, block in enumerate(activations.blocks))]
    for prefix, part in parts:
        for field in part.__struct_fields__:
            value = getattr(part, field)
            numbers = (value.fixed, value.each) if isinstance(value, Line) else (value,)
            if any(isinstance(number, int | float) and not -MOST <= number <= MOST for number in numbers):
                raise ValueError(f"activations.{prefix}{field}: is too large")


def _scaled_buffers(buffers: Buffers, bytes: float) -> Buffers:
    item_bytes = BUFFER_ITEM_BYTES[buffers.dtype]
    elements = buffers.bytes // item_bytes
    return Buffers(dtype=buffers.dtype, bytes=item_bytes * (max(1, round(elements * bytes)) if elements else 0))


T = TypeVar("T", RankTimes, Spread)


def _times_scaled(times: T, factor: float) -> T:
    """Multiply all fields that are named `…_s`."""
    seconds = {field: getattr(times, field) for field in times.__struct_fields__ if field.endswith("_s")}
    return msgspec.structs.replace(times, **{field: value * factor for field, value in seconds.items()})


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
