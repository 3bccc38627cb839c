"""The Plan: which gradients travel together, on which lane, through which exchange; and for which model and cluster.

A plan is a file that outlives the run that made it, so it says what it was made for: the gradients, by name, shape and
type, and where ranks sit. Whoever applies it compares, and names what differs. What was measured is not compared: links
that became slower make a plan worse, not wrong.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import msgspec

from syncline.exchange import Exchange, made_of
from syncline.files import read_json, write_json
from syncline.records.bucket_caps import caps_of
from syncline.records.profile import ITEM_BYTES, MOST_S, elements_of

MAX_LANES = 16


class PlannedGradient(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """In the order in which they are ready."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class PlannedBucket(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """In the order in which they are launched."""

    parameters: tuple[str, ...]
    lane: int
    exchange: dict[str, Any]
    """Its type and settings."""


class Alternative(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What was not chosen, or was: the one with the plan's own time."""

    name: str
    iteration_s: float
    lossless: bool


class Where(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The cluster, as far as a plan depends on it."""

    host_of_rank: tuple[int, ...]
    backend: str
    device: str


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A plan that contradicts itself cannot be constructed: `ValueError` names the field."""

    schema: int = 1
    model: str
    gradients: tuple[PlannedGradient, ...]
    where: Where
    buckets: tuple[PlannedBucket, ...]
    """None where plain DDP is best, and is left alone."""
    lanes: int
    iteration_s: float
    """Predicted, as are all seconds here."""
    low_s: float
    high_s: float
    compute_s: float
    """Of a rank alone."""
    plain_s: float
    """Of plain DDP."""
    exchange_s: float
    """From the first bucket's gradients to the last bucket's end."""
    reason: str
    alternatives: tuple[Alternative, ...]
    """The first is to do nothing."""
    how: str
    """From what it was made, for people."""

    def __post_init__(self) -> None:
        if self.schema != 1:
            raise ValueError(f"schema: is {self.schema}, and this release knows 1")
        if not 1 <= self.lanes <= MAX_LANES:
            raise ValueError(f"lanes: is {self.lanes}; there may be 1 to {MAX_LANES}")
        for field in ("iteration_s", "low_s", "high_s", "compute_s", "plain_s", "exchange_s"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{field}: must be seconds from 0 up, not {value}")
            if value > MOST_S:
                raise ValueError(f"{field}: is {value:g} seconds, which is too long to be meant")
        if self.low_s > self.high_s:
            raise ValueError(f"low_s: is {self.low_s}, above high_s ({self.high_s})")
        for index, other in enumerate(self.alternatives):
            if not (math.isfinite(other.iteration_s) and other.iteration_s >= 0):
                raise ValueError(
                    f"alternatives[{index}].iteration_s: must be seconds from 0 up, not {other.iteration_s}"
                )
        hosts = self.where.host_of_rank
        if not hosts:
            raise ValueError("where.host_of_rank: is empty; there is at least one rank")
        if sorted(set(hosts)) != list(range(len(set(hosts)))):
            raise ValueError(f"where.host_of_rank: is {list(hosts)}; hosts are numbered from 0, without a gap")
        if self.where.device not in ("cpu", "cuda"):
            raise ValueError(f"where.device: must be cpu or cuda, not {self.where.device}")
        self._check_gradients()
        self._check_buckets()

    def _check_gradients(self) -> None:
        if not self.gradients:
            raise ValueError("gradients: is empty; a model has at least one")
        seen: set[str] = set()
        for index, gradient in enumerate(self.gradients):
            if not gradient.name:
                raise ValueError(f"gradients[{index}].name: is empty")
            if gradient.name in seen:
                raise ValueError(f"gradients[{index}].name: {gradient.name} appears twice")
            if gradient.dtype not in ITEM_BYTES:
                known = ", ".join(ITEM_BYTES)
                raise ValueError(f"gradients[{index}].dtype: {gradient.dtype} is unknown; known: {known}")
            if elements_of(gradient.shape) is None:
                raise ValueError(f"gradients[{index}].shape: {list(gradient.shape[:8])} is no tensor's")
            seen.add(gradient.name)

    def _check_buckets(self) -> None:
        types = {gradient.name: gradient.dtype for gradient in self.gradients}
        bucket_of: dict[str, int] = {}
        for index, bucket in enumerate(self.buckets):
            where = f"buckets[{index}]"
            if not bucket.parameters:
                raise ValueError(f"{where}.parameters: is empty")
            if not 0 <= bucket.lane < self.lanes:
                raise ValueError(f"{where}.lane: is {bucket.lane}; the plan has lanes 0 to {self.lanes - 1}")
            for name in bucket.parameters:
                if name not in types:
                    raise ValueError(f"{where}.parameters: {name} is not among the gradients")
                if name in bucket_of:
                    raise ValueError(f"{where}.parameters: {name} is in buckets[{bucket_of[name]}], too")
                bucket_of[name] = index
            kinds = sorted({types[name] for name in bucket.parameters})
            if len(kinds) > 1:
                raise ValueError(f"{where}.parameters: are {' and '.join(kinds)}; a bucket holds one type")
            try:
                made_of(bucket.exchange)
            except ValueError as error:
                raise ValueError(f"{where}.exchange: {error}") from error
        missing = [name for name in types if name not in bucket_of]
        if self.buckets and missing:
            raise ValueError(f"buckets: {missing[0]} is in none of them")

    @property
    def nothing(self) -> bool:
        """Whether plain DDP is left alone."""
        return not self.buckets

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """By bucket."""
        return tuple(made_of(bucket.exchange) for bucket in self.buckets)

    @property
    def lossless(self) -> bool:
        return all(exchange.lossless for exchange in self.exchanges)

    @property
    def caps(self) -> tuple[int, ...]:
        """Bytes at which DDP must close its buckets to make these; of several types, those of the type with most."""
        if self.nothing:
            return ()
        place = {gradient.name: index for index, gradient in enumerate(self.gradients)}
        return caps_of(self.gradients, [[place[name] for name in bucket.parameters] for bucket in self.buckets])

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        return read_json(path, cls)

    def save(self, path: str | os.PathLike[str]) -> None:
        write_json(path, self)

    def difference(self, parameters: Mapping[str, tuple[tuple[int, ...], str]], where: Where) -> str | None:
        """What is different here from what the plan was made for, if anything. `parameters`: by name, shape and type of
        all that is trained."""
        for gradient in self.gradients:
            if gradient.name not in parameters:
                return f"the plan's parameter {gradient.name} is not in the model"
            shape, dtype = parameters[gradient.name]
            if (shape, dtype) != (gradient.shape, gradient.dtype):
                planned = f"{gradient.dtype} of shape {list(gradient.shape)}"
                return f"parameter {gradient.name} is {dtype} of shape {list(shape)}, and {planned} in the plan"
        known = {gradient.name for gradient in self.gradients}
        for name in parameters:
            if name not in known:
                return f"the model's parameter {name} is not in the plan"
        for field in ("backend", "device"):
            here, planned = getattr(where, field), getattr(self.where, field)
            if here != planned:
                return f"the {field} is {here}, and {planned} in the plan"
        if len(where.host_of_rank) != len(self.where.host_of_rank):
            return f"there are {len(where.host_of_rank)} ranks, and {len(self.where.host_of_rank)} in the plan"
        if where.host_of_rank != self.where.host_of_rank:
            return f"ranks sit on hosts {list(where.host_of_rank)}, and on {list(self.where.host_of_rank)} in the plan"
        return None
