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
from importlib import resources
from pathlib import Path

import msgspec

from syncline.files import FileError, read_json, write_json

# Only what can carry a gradient: autograd differentiates floating point and complex numbers alone.
ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "complex64": 8,
    "complex128": 16,
}


class Gradient(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One parameter's gradient."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    ready_s: float
    """Seconds from the start of backward until the gradient is complete."""


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One training step of one model on one device, without communication.

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

    def __post_init__(self) -> None:
        _check_counts(self)
        _check_times(self)
        seen: set[str] = set()
        for index, gradient in enumerate(self.gradients):
            _check_gradient(gradient, f"gradients[{index}]")
            if gradient.name in seen:
                raise ValueError(f"gradients[{index}].name: {gradient.name} appears twice")
            seen.add(gradient.name)

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

        A model made for a fast network fits a slow emulated link this way: sizes and rate shrink together,
        and the overlap stays what it was. Resized gradients become one-dimensional and keep at least one
        element.
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


def _check_gradient(gradient: Gradient, field: str) -> None:
    parts = gradient.name.split(".")
    if not all(parts):
        raise ValueError(f"{field}.name: {gradient.name!r} is not a parameter's name")
    if any(size < 0 for size in gradient.shape):
        raise ValueError(f"{field}.shape: has a negative size")
    if gradient.dtype not in ITEM_BYTES:
        raise ValueError(f"{field}.dtype: {gradient.dtype} is unknown; known: {', '.join(ITEM_BYTES)}")
    expected_bytes = math.prod(gradient.shape) * ITEM_BYTES[gradient.dtype]
    if gradient.bytes != expected_bytes:
        raise ValueError(
            f"{field}.bytes: is {gradient.bytes}, but {gradient.dtype} of shape {list(gradient.shape)} "
            f"takes {expected_bytes}"
        )


def _scaled_gradient(gradient: Gradient, time: float, bytes: float) -> Gradient:
    ready_s = gradient.ready_s * time
    if bytes == 1.0:
        return msgspec.structs.replace(gradient, ready_s=ready_s)
    elements = max(1, round(math.prod(gradient.shape) * bytes))
    return msgspec.structs.replace(
        gradient, shape=(elements,), bytes=elements * ITEM_BYTES[gradient.dtype], ready_s=ready_s
    )
