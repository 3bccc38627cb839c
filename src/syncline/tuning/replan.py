"""From a profile to a plan for a live model, and from one set of buckets to another: what `tune` and `follow` share."""

from __future__ import annotations

import msgspec
import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP

from syncline.ddp import buckets
from syncline.ddp.handle import Handle
from syncline.ddp.hook import forget
from syncline.ddp.wrap import apply
from syncline.dist.comm import backend_of
from syncline.exchange import EXCHANGES, wire
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
from syncline.runtime.topology import hosts_of


def probe_for(group: dist.ProcessGroup, allowed: tuple[str, ...], budget_s: float) -> Network:
    """Collective: only what a plan with what is allowed may use."""
    if group.size() == 1:
        return assumed_links((0,), backend=backend_of(group))
    several = group.size() > len(set(hosts_of(group)))
    kinds = wire.KINDS if allowed or several else ("all_reduce", "broadcast")
    return probe(budget_s=budget_s, kinds=kinds)


def plan_for_live(
    ddp: DDP, profile: Profile, links: Network, allowed: tuple[str, ...], device: torch.device
) -> tuple[Profile, Plan]:
    """Collective: the profile with what exchanges take here, and rank 0's plan, because other machines may round
    differently."""
    group: dist.ProcessGroup = ddp.process_group
    makers = {name: EXCHANGES[name] for name in options(links, allowed)}
    overheads = measure_overheads(device, makers, topology=topology_of(links), group=group)
    profile = msgspec.structs.replace(profile, overheads=overheads)
    caps = buckets.own_caps(ddp)

    def made() -> bytes:
        return msgspec.json.encode(make_plan(profile, links, allowed, caps=caps)) if group.rank() == 0 else b""

    return profile, msgspec.json.decode(together(group, made)[0], type=Plan)


def make_planned(
    ddp: DDP,
    plan: Plan,
    *,
    network: Network | None,
    timeout_s: float | None = None,
    scaler: GradScaler | None = None,
) -> Handle:
    """Collective, between steps: the plan's buckets, on its lanes, through its exchanges. Gradients that are views of
    DDP's buckets are views of buckets that it has no more."""
    try:
        forget(ddp)
        buckets.change(ddp, plan.caps)
        return apply(ddp, plan, network=network, timeout_s=timeout_s, scaler=scaler)
    except BaseException:
        make_plain(ddp)
        raise


def make_plain(ddp: DDP) -> None:
    """As it is without us: its own buckets, without a hook."""
    forget(ddp)
    buckets.put_back(ddp)
