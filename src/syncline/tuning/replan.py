"""What `tune` and `follow` share: their arguments, probing for a plan, and planning for a live model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from syncline.ddp import buckets
from syncline.dist.comm import backend_of
from syncline.exchange import EXCHANGES, wire
from syncline.health import meeting
from syncline.measure.assumed_network import assumed_links
from syncline.measure.overhead import measure_overheads
from syncline.measure.probe import probe
from syncline.measure.steps import together
from syncline.plan.make import make_plan
from syncline.plan.search import options
from syncline.predict.exchange_time import topology_of
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.records.profile import Profile
from syncline.runtime.topology import check_network, hosts_of, read_network
from syncline.tuning.settings import TuneSettings


def agreed_network(
    group: dist.ProcessGroup, device: torch.device, call: str, check: Callable[[], TuneSettings]
) -> Network | None:
    """Return the network of the settings that `check` returns. Raise unless they are valid and equal on all ranks.

    Collective. Without a network it returns None, and the links must be probed.
    """
    with meeting.together(group, device, f"the configuration of {call}", call) as fields:
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
    """Measure what exchanges cost on this device, and plan. Collective.

    Returns:
        The profile with these costs, and rank 0's plan: hosts may round differently.
    """
    group: dist.ProcessGroup = ddp.process_group
    exchanges = {name: EXCHANGES[name] for name in options(network, allowed)}
    overheads = measure_overheads(device, exchanges, topology=topology_of(network), group=group)
    profile = msgspec.structs.replace(profile, overheads=overheads)
    caps = buckets.own_caps(ddp)

    def encoded_plan() -> bytes:
        return msgspec.json.encode(make_plan(profile, network, allowed, caps=caps)) if group.rank() == 0 else b""

    return profile, msgspec.json.decode(together(group, encoded_plan)[0], type=Plan)
