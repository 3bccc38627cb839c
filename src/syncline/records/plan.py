"""The plan: the buckets of a model on a cluster, with the lane and the exchange of each.

A plan stores the gradients and the topology that it was made for. `Plan.difference` compares them with the current
model and cluster, but not measurements: a plan made for faster links may be slow, but it is still correct.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from syncline.exchange import Exchange, made_of
from syncline.files import JsonFile
from syncline.records.bucket_caps import caps_of
from syncline.records.fields import Amount, Count, Device, Schema, Seconds, check_unique
from syncline.records.profile import NamedTensor

MAX_LANES = 16
PlannedGradient = NamedTensor  # a plan lists them in the order in which they are ready


class PlannedBucket(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One bucket; a plan lists them in the order in which they are launched."""

    parameters: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    lane: Count
    exchange: dict[str, Any]  # the exchange's type and settings


class Alternative(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A schedule that was considered, the chosen one included."""

    name: str
    iteration_s: Amount
    lossless: bool


class Where(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The properties of the cluster on which a plan depends."""

    host_of_rank: Annotated[tuple[int, ...], msgspec.Meta(min_length=1)]
    backend: str
    device: Device

    def __post_init__(self) -> None:
        hosts = set(self.host_of_rank)
        if hosts != set(range(len(hosts))):
            raise ValueError(f"host_of_rank: is {list(self.host_of_rank)}; hosts must be numbered from 0, without gaps")


class Plan(JsonFile, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The buckets of a model on a cluster, with the lane and the exchange of each, and the predicted times.

    The constructor raises `ValueError`, which names the field, if fields contradict each other.

    Example:
        >>> plan = syncline.Plan.load("plan.json")
        >>> print(plan.reason)
        >>> model = syncline.wrap(net, plan=plan)
    """

    schema: Schema = 1
    model: str
    gradients: Annotated[tuple[PlannedGradient, ...], msgspec.Meta(min_length=1)]
    where: Where
    buckets: tuple[PlannedBucket, ...]  # empty if plain DDP is best and is not changed
    lanes: Annotated[int, msgspec.Meta(ge=1, le=MAX_LANES)]
    iteration_s: Seconds  # Predicted seconds per step. All times in a plan are predictions.
    low_s: Seconds
    high_s: Seconds
    compute_s: Seconds  # seconds per step of a single rank without communication
    plain_s: Seconds  # seconds per step of plain DDP
    exchange_s: Seconds  # from the time at which the first bucket is ready to the end of the last bucket
    reason: str
    alternatives: tuple[Alternative, ...]  # Considered schedules. The first is to do nothing.
    how: str  # the sources of the plan, for readers

    def __post_init__(self) -> None:
        if self.low_s > self.high_s:
            raise ValueError(f"low_s: is {self.low_s}, above high_s ({self.high_s})")
        check_unique("gradients[{}].name", (gradient.name for gradient in self.gradients))
        dtypes = {gradient.name: gradient.dtype for gradient in self.gradients}
        bucket_of: dict[str, int] = {}
        for index, bucket in enumerate(self.buckets):
            where = f"buckets[{index}]"
            if bucket.lane >= self.lanes:
                raise ValueError(f"{where}.lane: is {bucket.lane}; the plan has lanes 0 to {self.lanes - 1}")
            for name in bucket.parameters:
                if name not in dtypes:
                    raise ValueError(f"{where}.parameters: {name} is not among the gradients")
                if name in bucket_of:
                    raise ValueError(f"{where}.parameters: {name} is in buckets[{bucket_of[name]}], too")
                bucket_of[name] = index
            mixed = sorted({dtypes[name] for name in bucket.parameters})
            if len(mixed) > 1:
                raise ValueError(f"{where}.parameters: are {' and '.join(mixed)}; a bucket must have one dtype")
            try:
                made_of(bucket.exchange)
            except ValueError as error:
                raise ValueError(f"{where}.exchange: {error}") from error
        missing = [name for name in dtypes if name not in bucket_of]
        if self.buckets and missing:
            raise ValueError(f"buckets: {missing[0]} is in none of them")

    @property
    def nothing(self) -> bool:
        """Whether the plan is to use plain DDP without changes."""
        return not self.buckets

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """The exchange of each bucket."""
        return tuple(made_of(bucket.exchange) for bucket in self.buckets)

    @property
    def lossless(self) -> bool:
        """Whether all exchanges are lossless."""
        return all(exchange.lossless for exchange in self.exchanges)

    @property
    def caps(self) -> tuple[int, ...]:
        """Bytes at which DDP must close its buckets to make these; see `caps_of`."""
        if self.nothing:
            return ()
        index_of = {gradient.name: index for index, gradient in enumerate(self.gradients)}
        return caps_of(self.gradients, [[index_of[name] for name in bucket.parameters] for bucket in self.buckets])

    def difference(self, parameters: Mapping[str, tuple[tuple[int, ...], str]], where: Where) -> str | None:
        """Return the first difference between the plan's model and cluster and these, or None.

        Args:
            parameters: Shape and dtype of each trained parameter, by name.
            where: The current cluster.
        """
        planned = {gradient.name: (gradient.shape, gradient.dtype) for gradient in self.gradients}
        for name, tensor in planned.items():
            if name not in parameters:
                return f"the plan's parameter {name} is not in the model"
            if parameters[name] != tensor:
                ours, theirs = (f"{dtype} of shape {list(shape)}" for shape, dtype in (parameters[name], tensor))
                return f"parameter {name} is {ours}, but {theirs} in the plan"
        if unplanned := [name for name in parameters if name not in planned]:
            return f"the model's parameter {unplanned[0]} is not in the plan"
        for field in ("backend", "device"):
            current, other = getattr(where, field), getattr(self.where, field)
            if current != other:
                return f"the plan is for {field} {other}, but this job uses {current}"
        here, there = list(where.host_of_rank), list(self.where.host_of_rank)
        if len(here) != len(there):
            return f"the plan is for {len(there)} ranks, but this job has {len(here)}"
        if here != there:
            return f"the plan is for ranks on hosts {there}, but the ranks of this job are on hosts {here}"
        return None
