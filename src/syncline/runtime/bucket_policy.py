"""Choose the exchange and lane of each bucket: the same exchange for all, or as a plan says.

A plan refers to the buckets that DDP makes after its first step (its second with `static_graph`). Until then DDP has
other buckets, and they are summed losslessly. If DDP's buckets still differ after that, a warning says so, and each
bucket follows the planned bucket that shares most parameters with it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from syncline.dist.agreement import digest
from syncline.dist.comm import backend_of
from syncline.errors import UsageError, warn
from syncline.exchange import Dense, Exchange, settings
from syncline.health.meeting import meet, together
from syncline.records.plan import Plan, Where
from syncline.runtime.topology import hosts_of


class BucketPolicy(Protocol):
    """Chooses the exchange and lane of each bucket."""

    @property
    def lanes(self) -> int: ...

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """All exchanges that buckets may use, each once."""

    @property
    def mismatch(self) -> str | None:
        """How the buckets differ from the planned ones, if they do."""

    @property
    def expected_s(self) -> float | None:
        """Predicted time from the first bucket's gradients to the end of the last bucket; None without a prediction."""

    def assign(self, names: Sequence[str], index: int, steps: int) -> tuple[Exchange, int]:
        """Return the exchange and lane of the bucket `index` with these parameters, after `steps` steps."""

    def settings(self) -> dict[str, Any]:
        """Return the settings that a checkpoint must have been saved with."""

    def fingerprint(self) -> dict[str, Any]:
        """Return the fields that must be equal on all ranks."""


@dataclass(frozen=True)
class Uniform:
    """One exchange for all buckets, and the lanes in turn."""

    exchange: Exchange
    lanes: int
    mismatch: str | None = None
    expected_s: float | None = None

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        return (self.exchange,)

    def assign(self, names: Sequence[str], index: int, steps: int) -> tuple[Exchange, int]:
        return self.exchange, index % self.lanes

    def settings(self) -> dict[str, Any]:
        return settings(self.exchange)

    def fingerprint(self) -> dict[str, Any]:
        return {"exchange": settings(self.exchange), "lanes": self.lanes}


class Planned:
    """The exchange and lane that a plan gives to each bucket.

    Args:
        plan: The plan.
        settled_after: Number of steps after which the buckets are expected to be the plan's.
        warns: Whether this rank warns if they are not.
    """

    def __init__(self, plan: Plan, *, settled_after: int = 1, warns: bool = False) -> None:
        self.plan = plan
        self.mismatch: str | None = None
        self._settled_after, self._warns = settled_after, warns
        exchanges = plan.exchanges
        self._assigned = {
            frozenset(bucket.parameters): (exchange, bucket.lane)
            for bucket, exchange in zip(plan.buckets, exchanges, strict=True)
        }
        self._exchanges = tuple(dict.fromkeys([Dense(), *exchanges]))

    @property
    def lanes(self) -> int:
        return self.plan.lanes

    @property
    def expected_s(self) -> float | None:
        return self.plan.exchange_s

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        return self._exchanges

    def assign(self, names: Sequence[str], index: int, steps: int) -> tuple[Exchange, int]:
        bucket = frozenset(names)
        if bucket in self._assigned:
            return self._assigned[bucket]
        if steps < self._settled_after:
            return Dense(), index % self.lanes
        if self.mismatch is None:
            self.mismatch = self._explain_mismatch(bucket, index)
            if self._warns:
                warn(self.mismatch)
        return self._assigned[max(self._assigned, key=lambda planned: len(planned & bucket))]

    def _explain_mismatch(self, bucket: frozenset[str], index: int) -> str:
        planned = frozenset(self.plan.buckets[index].parameters) if index < len(self.plan.buckets) else frozenset()
        others = sorted(bucket ^ planned)
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        return (
            f"DDP's bucket {index} does not match the plan: they differ in {others[0]}{more}. Gradients become ready "
            "in a different order than when the plan was made. Each bucket uses the exchange and lane of the planned "
            "bucket that shares most parameters with it. Make a new plan for this model"
        )

    def settings(self) -> dict[str, Any]:
        return {"type": "Plan", "digest": digest(self.fingerprint()).hex()[:16]}

    def fingerprint(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"plan.lanes": self.lanes, "plan.buckets": len(self.plan.buckets)}
        for index, bucket in enumerate(self.plan.buckets):
            names = bucket.parameters
            label = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
            fields[f"plan.buckets[{index}].parameters"] = f"{label}, {len(names)}, {digest({'': names}).hex()[:8]}"
            fields[f"plan.buckets[{index}].lane"] = bucket.lane
            fields[f"plan.buckets[{index}].exchange"] = bucket.exchange
        return fields


def read_plan(plan: Plan | str | os.PathLike[str], group: dist.ProcessGroup, device: torch.device, call: str) -> Plan:
    """Collective: return the plan, or read it from its file. If one rank cannot read it, all ranks raise."""
    with together(group, device, "the plan", call) as fields:
        if not isinstance(plan, Plan | str | os.PathLike):
            raise UsageError(f"plan is a {type(plan).__name__}: pass a Plan, or the path of a file that syncline wrote")
        loaded = plan if isinstance(plan, Plan) else Plan.load(plan)
        fields |= Planned(loaded).fingerprint()
    return loaded


def difference_of(
    plan: Plan, shapes: Mapping[str, tuple[tuple[int, ...], str]], group: dist.ProcessGroup, device: str, call: str
) -> str | None:
    """Collective: return how the model or the cluster differs from the plan's, or None if the plan fits.

    Raises:
        MismatchError: The ranks find different answers.
    """
    where = Where(host_of_rank=hosts_of(group), backend=backend_of(group), device=device)
    different = plan.difference(shapes, where)
    meet(group, {"difference": different}, "the difference from the plan", call)
    return different
