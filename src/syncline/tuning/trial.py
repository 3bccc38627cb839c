"""What `tune` and `follow` share: agree on arguments, probe, plan for a live model, and try the plan."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from syncline.ddp import buckets
from syncline.dist.comm import backend_of, group_device
from syncline.exchange import EXCHANGES, wire
from syncline.health import meeting
from syncline.measure.assumed_network import assumed_links
from syncline.measure.overhead import measure_overheads
from syncline.measure.probe import probe
from syncline.measure.steps import run_on_all_ranks
from syncline.plan.make import make_plan
from syncline.plan.search import options
from syncline.predict.exchange_time import topology_of
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.records.profile import Profile
from syncline.runtime.topology import check_network, hosts_of, read_network
from syncline.tuning.settings import TuneSettings, has_residual

SETTLING = 3
"""Steps after a change until DDP has rebuilt its buckets and caches are warm."""
_MAX_RATIO = 0.99
"""A plan wins if its steps take less than this fraction of plain DDP's time."""
_LIVE_STEPS = 8
_LONG_STEP_S = 1.0
"""Above this, `follow` tries fewer steps."""
_BUDGETED_STEPS = (4, 15)

Turn = Literal["plain", "plan"]
_FOUR_TURNS: tuple[Turn, ...] = ("plain", "plan", "plan", "plain")
_TWO_TURNS: tuple[Turn, ...] = ("plain", "plan")


def agreed_network(
    group: dist.ProcessGroup, device: torch.device, call: str, check: Callable[[], TuneSettings]
) -> Network | None:
    """Return the network of the settings that `check` returns, if it has one, once all ranks agree. Collective."""
    with meeting.same_on_all_ranks(group, device, f"the configuration of {call}", call) as fields:
        settings = check()
        network = read_network(settings.network, fields)
        fields |= {"allow": list(settings.allow), "change": settings.change, "budget_s": settings.budget_s}
        fields |= {"timeout_s": settings.timeout_s, "scaler": settings.scaler is not None}
    if network is not None:
        check_network(network, hosts_of(group), backend_of(group))
    return network


def probe_for(group: dist.ProcessGroup, allowed: Sequence[str], budget_s: float) -> Network:
    """Probe the collectives that a plan may use, and no others. Collective."""
    if group.size() == 1:
        return assumed_links((0,), backend=backend_of(group))
    has_levels = group.size() > len(set(hosts_of(group)))
    kinds = wire.KINDS if allowed or has_levels else ("all_reduce", "broadcast")
    return probe(budget_s=budget_s, kinds=kinds)


def plan_for_live(
    ddp: DDP, profile: Profile, network: Network, allowed: Sequence[str], device: torch.device
) -> tuple[Profile, Plan]:
    """Return the profile with the cost of exchanges on this device, and rank 0's plan. Collective.

    All ranks use the plan of rank 0, because hosts may round differently.
    """
    group: dist.ProcessGroup = ddp.process_group
    exchanges = {name: EXCHANGES[name] for name in options(network, allowed)}
    overheads = measure_overheads(device, exchanges, topology=topology_of(network), group=group)
    profile = msgspec.structs.replace(profile, overheads=overheads)
    caps = buckets.own_caps(ddp)

    def encoded_plan() -> bytes:
        return msgspec.json.encode(make_plan(profile, network, allowed, caps=caps)) if group.rank() == 0 else b""

    return profile, msgspec.json.decode(run_on_all_ranks(group, encoded_plan)[0], type=Plan)


@dataclass(frozen=True)
class Trial:
    """The times of plain DDP and of a plan that took turns: medians over steps. The slowest rank counts."""

    plain_s: float
    plan_s: float
    steps: int
    """Number of counted steps of plain DDP, and as many of the plan."""

    @classmethod
    def of(cls, group: dist.ProcessGroup, step_s: Mapping[Turn, Sequence[float]]) -> Trial:
        """Return the result, given the step times on this rank. Collective: the result is the same on all ranks."""
        slowest = torch.tensor([step_s["plain"], step_s["plan"]], dtype=torch.float64, device=group_device(group))
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
        plain_s, plan_s = (statistics.median(row) for row in slowest.tolist())
        return cls(plain_s, plan_s, len(step_s["plan"]))

    @property
    def won(self) -> bool:
        """Whether the plan is faster than plain DDP."""
        return self.plan_s < _MAX_RATIO * self.plain_s

    def describe(self, what: str = "forward and backward") -> str:
        """Return one sentence with both times and which of the two is kept."""
        stays = "the plan stays" if self.won else "plain DDP stays"
        return f"Tried: plain DDP {self.plain_s * 1e3:.1f} ms, the plan {self.plan_s * 1e3:.1f} ms per {what}: {stays}."


@dataclass(frozen=True)
class Schedule:
    """Turns of a trial, and the steps in each."""

    turns: tuple[Turn, ...]
    settling: int
    counted: int

    @classmethod
    def within(cls, budget_s: float, plan: Plan) -> Schedule:
        """Return the schedule whose steps fit into a budget, by the plan's own predictions."""
        longest_s = max(plan.plain_s, plan.iteration_s, 1e-6)
        fewest, most = _BUDGETED_STEPS
        turns, settling, counted = _FOUR_TURNS, SETTLING, int(budget_s / (4 * longest_s)) - SETTLING
        if counted < fewest:  # of long steps, a few are enough
            turns, settling, counted = _TWO_TURNS, 2, int(budget_s / (2 * longest_s)) - 2
        return cls(turns, settling, max(2, min(most, counted)))

    @classmethod
    def on_live_steps(cls, plan: Plan) -> Schedule:
        """Return the schedule for a script's own steps."""
        long = plan.plain_s > _LONG_STEP_S
        # Each change of the exchange drops its residual, so a plan with one gets a single turn.
        turns = _TWO_TURNS if long or has_residual(plan) else _FOUR_TURNS
        return cls(turns, 2, _LIVE_STEPS // 2) if long else cls(turns, SETTLING, _LIVE_STEPS)
