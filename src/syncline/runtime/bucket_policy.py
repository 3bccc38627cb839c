"""Which way each bucket of a model goes: one exchange for all of them, or what a plan says of each.

A plan speaks of the buckets that DDP makes after its first step (its second with `static_graph`). Until then buckets
are others, and go as they are, summed without loss. Should they still be others then, that is told, and each goes as
the planned one does with which it shares most.
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
from syncline.errors import UsageError, tell
from syncline.exchange import Dense, Exchange, settings
from syncline.health.meeting import meet, together
from syncline.records.plan import Plan, Where
from syncline.runtime.topology import hosts_of


class Route(Protocol):
    @property
    def lanes(self) -> int: ...

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """All that buckets may go through, each once."""

    @property
    def mismatch(self) -> str | None:
        """What is not as it was planned, if anything."""

    @property
    def expected_s(self) -> float | None:
        """From the first bucket's gradients to the last bucket's end, where somebody expects something."""

    def way(self, names: Sequence[str], index: int, steps: int) -> tuple[Exchange, int]:
        """Exchange and lane of a bucket with these parameters, after so many steps."""

    def settings(self) -> dict[str, Any]:
        """What a saved state must have been saved by."""

    def fingerprint(self) -> dict[str, Any]:
        """What all ranks must agree on."""


@dataclass(frozen=True)
class Uniform:
    """One exchange; lanes take turns."""

    exchange: Exchange
    lanes: int
    mismatch: str | None = None
    expected_s: float | None = None

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        return (self.exchange,)

    def way(self, names: Sequence[str], index: int, steps: int) -> tuple[Exchange, int]:
        return self.exchange, index % self.lanes

    def settings(self) -> dict[str, Any]:
        return settings(self.exchange)

    def fingerprint(self) -> dict[str, Any]:
        return {"exchange": settings(self.exchange), "lanes": self.lanes}


class Planned:
    """As a plan says."""

    def __init__(self, plan: Plan, *, settled_after: int = 1, tells: bool = False) -> None:
        """`settled_after`: steps after which buckets are the plan's. `tells`: whether this rank warns if not."""
        self.plan = plan
        self.mismatch: str | None = None
        self._settled_after, self._tells = settled_after, tells
        made = plan.exchanges
        self._ways = {
            frozenset(bucket.parameters): (exchange, bucket.lane)
            for bucket, exchange in zip(plan.buckets, made, strict=True)
        }
        self._exchanges = tuple(dict.fromkeys([Dense(), *made]))

    @property
    def lanes(self) -> int:
        return self.plan.lanes

    @property
    def expected_s(self) -> float | None:
        return self.plan.exchange_s

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        return self._exchanges

    def way(self, names: Sequence[str], index: int, steps: int) -> tuple[Exchange, int]:
        held = frozenset(names)
        if held in self._ways:
            return self._ways[held]
        if steps < self._settled_after:
            return Dense(), index % self.lanes
        if self.mismatch is None:
            self.mismatch = self._told(held, index)
            if self._tells:
                tell(self.mismatch)
        return self._ways[max(self._ways, key=lambda planned: len(planned & held))]

    def _told(self, held: frozenset[str], index: int) -> str:
        planned = frozenset(self.plan.buckets[index].parameters) if index < len(self.plan.buckets) else frozenset()
        others = sorted(held ^ planned)
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        return (
            f"DDP's bucket {index} is not the plan's: they differ in {others[0]}{more}. Gradients become ready in "
            "another order than when the plan was made. Each bucket goes as the planned one with which it shares most; "
            "plan again"
        )

    def settings(self) -> dict[str, Any]:
        return {"type": "Plan", "digest": digest(self.fingerprint()).hex()[:16]}

    def fingerprint(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"plan.lanes": self.lanes, "plan.buckets": len(self.plan.buckets)}
        for index, bucket in enumerate(self.plan.buckets):
            names = bucket.parameters
            held = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
            fields[f"plan.buckets[{index}].parameters"] = f"{held}, {len(names)}, {digest({'': names}).hex()[:8]}"
            fields[f"plan.buckets[{index}].lane"] = bucket.lane
            fields[f"plan.buckets[{index}].exchange"] = bucket.exchange
        return fields


def read_plan(plan: Plan | str | os.PathLike[str], group: dist.ProcessGroup, device: torch.device, call: str) -> Plan:
    """On all ranks together, so that none waits for one that could not read it."""
    with together(group, device, "the plan", call) as fields:
        if not isinstance(plan, Plan | str | os.PathLike):
            raise UsageError(f"plan is a {type(plan).__name__}: pass a Plan, or the file that syncline plan wrote")
        made = plan if isinstance(plan, Plan) else Plan.load(plan)
        fields |= Planned(made).fingerprint()
    return made


def difference_of(
    plan: Plan, shapes: Mapping[str, tuple[tuple[int, ...], str]], group: dist.ProcessGroup, device: str, call: str
) -> str | None:
    """Collective: how a model with these parameters, and its cluster, are others than the plan's, if they are. What is
    different for one rank is for all of them."""
    where = Where(host_of_rank=hosts_of(group), backend=backend_of(group), device=device)
    different = plan.difference(shapes, where)
    meet(group, {"difference": different}, "what the plan does not fit", call)
    return different
