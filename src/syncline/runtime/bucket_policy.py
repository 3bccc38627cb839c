"""Choose the exchange and lane of each bucket: the same exchange for all, or as a plan says.

A plan refers to the buckets that DDP makes after its first step (its second with `static_graph`). Until then, DDP's
other buckets are summed losslessly.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from syncline.dist.agreement import digest
from syncline.dist.comm import backend_of
from syncline.errors import warn
from syncline.exchange import Dense, Exchange, settings
from syncline.health.meeting import meet, same_on_all_ranks
from syncline.records.plan import Plan, Where
from syncline.runtime.topology import hosts_of, loaded_from
from syncline.runtime.validation import only_device


@dataclass(frozen=True)
class Uniform:
    """One exchange for all buckets, and the lanes in turn."""

    exchange: Exchange
    lanes: int
    plan: None = None
    mismatch: None = None
    expected_s: None = None
    warmup: int = 0

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        return (self.exchange,)

    def assign(self, names: Sequence[str], index: int, steps: int) -> tuple[Exchange, int]:
        return self.exchange, index % self.lanes

    def __str__(self) -> str:
        return repr(self.exchange)

    def settings(self) -> dict[str, Any]:
        return settings(self.exchange)

    def fingerprint(self) -> dict[str, Any]:
        return {"exchange": settings(self.exchange), "lanes": self.lanes}


class Planned:
    """The exchange and lane that a plan gives to each bucket.

    After `settled_after` steps, the buckets should be the plan's. If not, a rank that `warns` does so.
    """

    def __init__(self, plan: Plan, *, settled_after: int = 1, warns: bool = False) -> None:
        self.plan, self.lanes = plan, plan.lanes
        self.expected_s = plan.exchange_s  # predicted time from the first ready bucket to the end of the last, or None
        self.mismatch: str | None = None  # how DDP's buckets differ from the planned ones, if they do
        self.exchanges = tuple(dict.fromkeys([Dense(), *plan.exchanges]))  # all that buckets may use, each once
        warmups = (getattr(getattr(exchange, "across", exchange), "warmup", 0) for exchange in plan.exchanges)
        self.warmup = max(warmups, default=0)  # steps in which exchanges take longer than planned
        self._settled_after, self._warns = settled_after, warns
        buckets = zip(plan.buckets, plan.exchanges, strict=True)
        self._assigned = {frozenset(bucket.parameters): (exchange, bucket.lane) for bucket, exchange in buckets}

    def assign(self, names: Sequence[str], index: int, steps: int) -> tuple[Exchange, int]:
        """Return the exchange and lane of the bucket `index` with these parameters, after `steps` steps."""
        bucket = frozenset(names)
        if bucket in self._assigned:
            return self._assigned[bucket]
        if steps < self._settled_after:
            return Dense(), index % self.lanes
        if self.mismatch is None:
            planned = self.plan.buckets[index].parameters if index < len(self.plan.buckets) else ()
            others = sorted(bucket.symmetric_difference(planned))
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            self.mismatch = (
                f"DDP's bucket {index} does not match the plan: they differ in {others[0]}{more}. Gradients become "
                "ready in a different order than when the plan was made. Each bucket uses the exchange and lane of the "
                "planned bucket that shares most parameters with it. Make a new plan for this model"
            )
            if self._warns:
                warn(self.mismatch)
        return self._assigned[max(self._assigned, key=lambda planned: len(planned & bucket))]

    def settings(self) -> dict[str, Any]:
        """Return the settings that a checkpoint must have been saved with."""
        return {"type": "Plan", "digest": digest(self.fingerprint()).hex()[:16]}

    def fingerprint(self) -> dict[str, Any]:
        """Return the fields that must be equal on all ranks."""
        fields: dict[str, Any] = {"plan.lanes": self.lanes, "plan.buckets": len(self.plan.buckets)}
        for index, bucket in enumerate(self.plan.buckets):
            names = bucket.parameters
            label = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
            parameters = f"{label}, {len(names)}, {digest({'': names}).hex()[:8]}"
            parts = {"parameters": parameters, "lane": bucket.lane, "exchange": bucket.exchange}
            fields |= {f"plan.buckets[{index}].{part}": value for part, value in parts.items()}
        return fields


BucketPolicy = Uniform | Planned


def read_plan(plan: Plan | str | os.PathLike[str], group: ProcessGroup, device: torch.device, call: str) -> Plan:
    """Collective: return the plan, or read it from its file. If one rank cannot read it, all ranks raise."""
    with same_on_all_ranks(group, device, "the plan", call) as fields:
        loaded = loaded_from("plan", plan, Plan)
        fields |= Planned(loaded).fingerprint()
    return loaded


def difference_of(plan: Plan, parameters: Mapping[str, nn.Parameter], group: ProcessGroup, call: str) -> str | None:
    """Collective: return how the model or the cluster differs from the plan's, or None if the plan fits."""
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    shapes = {name: (tuple(p.shape), str(p.dtype).removeprefix("torch.")) for name, p in trained.items()}
    where = Where(host_of_rank=hosts_of(group), backend=backend_of(group), device=only_device(parameters).type)
    different = plan.difference(shapes, where)
    meet(group, {"difference": different}, "the difference from the plan", call)
    return different
