"""A model's backward pass as data: which gradient is ready when, and how large it is.

A `Profile` is what the predictor and the planner know about a model. Gradients stand in the order in which
backward finishes them, each with its offset from the start of backward, so the file alone says how much
communication can hide behind computation. It needs no torch: a profile recorded on a GPU host can be
studied on a laptop.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import msgspec

from syncline.files import FileError, read_json, write_json
from syncline.records.activations import Activations, Line

# Only what can carry a gradient: autograd differentiates floating point and complex numbers alone.
ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "complex64": 8,
    "complex128": 16,
}
MOST_S = 1e15
"""More is a slip of the hand, and need not stay finite when it is added up or multiplied."""
_MOST = 1e18
"""Of anything that is counted."""
_MOST_ELEMENTS = 1 << 60
_MOST_DIMENSIONS = 64
# Buffers may be of any type; int64 and bool are BatchNorm's counter and attention's masks.
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
    """All buffers of one type, which DDP broadcasts together before every forward."""

    dtype: str
    bytes: int


class RankTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One rank's medians, where several were measured at the same time."""

    rank: int
    forward_s: float
    backward_s: float
    update_s: float

    @property
    def step_s(self) -> float:
        return self.forward_s + self.backward_s + self.update_s


class Spread(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The quartiles, over steps, of how long a whole step took."""

    low_s: float
    high_s: float


class Work(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An exchange's own computation for one bucket: a line in the bucket's bytes of gradient."""

    fixed_s: float
    s_per_byte: float


class Overheads(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What DDP and an exchange add to the computation, whatever the network is."""

    copy_in_s_per_byte: float
    """Into the bucket, on the thread that runs backward."""
    copy_out_s_per_byte: float
    """Out of the bucket, after its exchange."""
    hook_s: float
    """To hand one bucket over, on the thread that runs backward."""
    work: dict[str, Work]
    """By the exchange's name in `syncline.exchange.EXCHANGES`."""


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One training step of one model on one device, without communication.

    Where several ranks were measured at the same time, all times are medians over them, and `ranks` has each.

    A profile that contradicts itself cannot be constructed: `ValueError` names the field.
    """

    schema: int = 1
    model: str
    gradients: tuple[Gradient, ...]
    """In gradient-ready order: `ready_s` never decreases."""
    forward_s: float
    backward_s: float
    update_s: float
    """The optimizer's step; 0.0 where it was not measured."""
    device: str
    """`cpu` or `cuda`."""
    where: str
    """The hardware, for people."""
    how: str
    """The method and versions, for people."""
    steps: int
    """How many steps the medians were taken over."""
    batch: int | None
    """Examples per rank and step, where known."""
    buffers: tuple[Buffers, ...] = ()
    """One entry per type, so one broadcast each."""
    ranks: tuple[RankTimes, ...] = ()
    spread: Spread | None = None
    jitter_s: float = 0.0
    """What it costs each step to wait for whoever happens to be slowest: the median over steps of the slowest rank's
    step less the median rank's."""
    overheads: Overheads | None = None
    activations: Activations | None = None
    """What forward and backward take of memory, where that was measured."""

    def __post_init__(self) -> None:
        _check_counts(self)
        _check_times(self)
        seen: set[str] = set()
        for index, gradient in enumerate(self.gradients):
            _check_gradient(gradient, f"gradients[{index}]")
            if gradient.name in seen:
                raise ValueError(f"gradients[{index}].name: {gradient.name} appears twice")
            seen.add(gradient.name)
        _check_buffers(self.buffers)
        _check_ranks(self.ranks)
        if self.spread is not None:
            _check_spread(self.spread)
        _check_seconds(self.jitter_s, "jitter_s")
        if self.overheads is not None:
            _check_overheads(self.overheads)
        if self.activations is not None:
            _check_activations(self.activations)

    @property
    def slowest(self) -> RankTimes | None:
        """The rank whose steps take longest; None where only one was measured."""
        return max(self.ranks, key=lambda rank: rank.step_s, default=None)

    @property
    def step_s(self) -> float:
        """Forward, backward and update, one after the other."""
        return self.forward_s + self.backward_s + self.update_s

    @property
    def gradient_bytes(self) -> int:
        """What one rank contributes to the exchange in each step."""
        return sum(gradient.bytes for gradient in self.gradients)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        return read_json(path, cls)

    def save(self, path: str | os.PathLike[str]) -> None:
        write_json(path, self)

    def scaled(self, time: float = 1.0, bytes: float = 1.0) -> Profile:
        """The same profile with all times and all gradient sizes multiplied.

        A model made for a fast network fits a slow emulated link this way: sizes and rate shrink together, and the
        overlap stays what it was. Resized gradients keep at least one element; those of two and more dimensions become
        matrices, both sides of which shrink alike, for hooks that factorise them. Overheads stay: they belong to the
        machine, per byte and per bucket, not to the model.
        """
        for field, factor in (("time", time), ("bytes", bytes)):
            if not (math.isfinite(factor) and factor > 0):
                raise ValueError(f"{field}: must be a positive factor, not {factor}")
        if time == bytes == 1.0:
            return self
        return msgspec.structs.replace(
            self,
            gradients=tuple(_scaled_gradient(gradient, time, bytes) for gradient in self.gradients),
            forward_s=self.forward_s * time,
            backward_s=self.backward_s * time,
            update_s=self.update_s * time,
            buffers=tuple(_scaled_buffers(entry, bytes) for entry in self.buffers),
            ranks=tuple(_scaled_rank(rank, time) for rank in self.ranks),
            spread=self.spread and Spread(low_s=self.spread.low_s * time, high_s=self.spread.high_s * time),
            jitter_s=self.jitter_s * time,
            activations=self.activations if bytes == 1.0 else None,
            how=f"{self.how}; scaled: time × {time:g}, bytes × {bytes:g}",
        )


def shipped_profiles() -> tuple[str, ...]:
    """The names that `load_profile` knows without a file."""
    folder = resources.files("syncline") / "profiles"
    if not folder.is_dir():
        return ()
    return tuple(sorted(entry.name[: -len(".json")] for entry in folder.iterdir() if entry.name.endswith(".json")))


def load_profile(name_or_path: str | os.PathLike[str]) -> Profile:
    """A shipped profile by its name, or any profile by its path."""
    name = os.fspath(name_or_path)
    if name in shipped_profiles():
        with resources.as_file(resources.files("syncline") / "profiles" / f"{name}.json") as path:
            return Profile.load(path)
    if Path(name).suffix or Path(name).exists() or os.sep in name:
        return Profile.load(name)
    known = ", ".join(shipped_profiles()) or "none"
    raise FileError(f"{name}: is neither a file nor a shipped profile (shipped: {known})")


def _check_counts(profile: Profile) -> None:
    if profile.schema != 1:
        raise ValueError(f"schema: is {profile.schema}, and this release knows 1")
    if not profile.gradients:
        raise ValueError("gradients: is empty; a profile has at least one gradient")
    if profile.steps < 1:
        raise ValueError(f"steps: must be at least 1, not {profile.steps}")
    if profile.batch is not None and profile.batch < 1:
        raise ValueError(f"batch: must be at least 1, or null where unknown, not {profile.batch}")
    for field in ("steps", "batch"):
        if (getattr(profile, field) or 0) > _MOST:
            raise ValueError(f"{field}: is too large to be meant")
    if profile.device not in ("cpu", "cuda"):
        raise ValueError(f"device: must be cpu or cuda, not {profile.device}")


def _check_times(profile: Profile) -> None:
    for field in ("forward_s", "backward_s", "update_s"):
        _check_seconds(getattr(profile, field), field)
    for index, gradient in enumerate(profile.gradients):
        _check_seconds(gradient.ready_s, f"gradients[{index}].ready_s")
    for index, (before, after) in enumerate(itertools.pairwise(profile.gradients), start=1):
        if after.ready_s < before.ready_s:
            raise ValueError(
                f"gradients[{index}].ready_s: is {after.ready_s}, but {before.ready_s} for the one before; "
                "gradients stand in the order they become ready"
            )
    last, rounding_s = len(profile.gradients) - 1, 1e-9 + 1e-6 * profile.backward_s
    if profile.gradients[last].ready_s > profile.backward_s + rounding_s:
        ready_s = profile.gradients[last].ready_s
        raise ValueError(f"gradients[{last}].ready_s: is {ready_s}, after backward_s ({profile.backward_s})")


def _check_seconds(value: float, field: str) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{field}: must be seconds from 0 up, not {value}")
    if value > MOST_S:
        raise ValueError(f"{field}: is {value:g} seconds, which is too long to be meant")


def elements_of(shape: Sequence[int]) -> int | None:
    """Of a tensor of this shape; None for what is no tensor's. Stops where more are more than any memory: a product of
    many large sizes would take for ever."""
    if any(size < 0 for size in shape) or len(shape) > _MOST_DIMENSIONS:
        return None
    elements = 1
    for size in shape:
        elements = min(elements * size, _MOST_ELEMENTS) if size < _MOST_ELEMENTS else _MOST_ELEMENTS
    return elements if elements < _MOST_ELEMENTS else None


def _check_gradient(gradient: Gradient, field: str) -> None:
    parts = gradient.name.split(".")
    if not all(parts):
        raise ValueError(f"{field}.name: {gradient.name!r} is not a parameter's name")
    if any(size < 0 for size in gradient.shape):
        raise ValueError(f"{field}.shape: has a negative size")
    elements = elements_of(gradient.shape)
    if elements is None:
        raise ValueError(f"{field}.shape: has more elements than any memory")
    if gradient.dtype not in ITEM_BYTES:
        raise ValueError(f"{field}.dtype: {gradient.dtype} is unknown; known: {', '.join(ITEM_BYTES)}")
    expected_bytes = elements * ITEM_BYTES[gradient.dtype]
    if gradient.bytes != expected_bytes:
        raise ValueError(
            f"{field}.bytes: is {gradient.bytes}, but {gradient.dtype} of shape {list(gradient.shape)} "
            f"takes {expected_bytes}"
        )


def _check_buffers(buffers: tuple[Buffers, ...]) -> None:
    seen: set[str] = set()
    for index, entry in enumerate(buffers):
        field = f"buffers[{index}]"
        if entry.dtype not in BUFFER_ITEM_BYTES:
            raise ValueError(f"{field}.dtype: {entry.dtype} is unknown; known: {', '.join(BUFFER_ITEM_BYTES)}")
        if entry.dtype in seen:
            raise ValueError(f"{field}.dtype: {entry.dtype} appears twice; buffers of one type are one entry")
        if not 0 <= entry.bytes <= _MOST or entry.bytes % BUFFER_ITEM_BYTES[entry.dtype]:
            raise ValueError(f"{field}.bytes: {entry.bytes} is no number of {entry.dtype} elements")
        seen.add(entry.dtype)


def _check_ranks(ranks: tuple[RankTimes, ...]) -> None:
    seen: set[int] = set()
    for index, times in enumerate(ranks):
        field = f"ranks[{index}]"
        if times.rank < 0:
            raise ValueError(f"{field}.rank: must be 0 or more, not {times.rank}")
        if times.rank in seen:
            raise ValueError(f"{field}.rank: {times.rank} appears twice")
        seen.add(times.rank)
        _check_all_seconds(times, field, "forward_s", "backward_s", "update_s")


def _check_spread(spread: Spread) -> None:
    _check_all_seconds(spread, "spread", "low_s", "high_s")
    if spread.high_s < spread.low_s:
        raise ValueError(f"spread.high_s: is {spread.high_s}, below low_s ({spread.low_s})")


def _check_overheads(overheads: Overheads) -> None:
    _check_all_seconds(overheads, "overheads", "copy_in_s_per_byte", "copy_out_s_per_byte", "hook_s")
    for name, work in overheads.work.items():
        _check_all_seconds(work, f"overheads.work.{name}", "fixed_s", "s_per_byte")


def _check_activations(activations: Activations) -> None:
    """What they do not check themselves: that nothing overflows on the way from one batch to another."""
    for index, batch in enumerate(activations.batches):
        if batch > _MOST:
            raise ValueError(f"activations.batches[{index}]: is too large to be meant")
    parts = [("", activations), *((f"blocks[{index}].", block) for index, block in enumerate(activations.blocks))]
    for place, part in parts:
        for field in part.__struct_fields__:
            value = getattr(part, field)
            numbers = (value.fixed, value.each) if isinstance(value, Line) else (value,)
            if any(isinstance(number, int | float) and not -_MOST <= number <= _MOST for number in numbers):
                raise ValueError(f"activations.{place}{field}: is too large to be meant")


def _check_all_seconds(part: msgspec.Struct, place: str, *fields: str) -> None:
    for field in fields:
        _check_seconds(getattr(part, field), f"{place}.{field}")


def _scaled_buffers(buffers: Buffers, bytes: float) -> Buffers:
    item_bytes = BUFFER_ITEM_BYTES[buffers.dtype]
    elements = buffers.bytes // item_bytes
    return Buffers(dtype=buffers.dtype, bytes=item_bytes * (max(1, round(elements * bytes)) if elements else 0))


def _scaled_rank(rank: RankTimes, time: float) -> RankTimes:
    return RankTimes(
        rank=rank.rank,
        forward_s=rank.forward_s * time,
        backward_s=rank.backward_s * time,
        update_s=rank.update_s * time,
    )


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
