"""What `tune` and `follow` share: probing for a plan, planning for a live model, and changing the model's buckets."""

from __future__ import annotations

from collections.abc import Sequence

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
from syncline.measure.steps import run_on_all_ranks
from syncline.plan.make import make_plan
from syncline.plan.search import options
from syncline.predict.exchange_time import topology_of
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.records.profile import Profile
from syncline.runtime.topology import hosts_of


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

    return profile, msgspec.json.decode(run_on_all_ranks(group, encoded_plan)[0], type=Plan)


def make_planned(
    ddp: DDP,
    plan: Plan,
    *,
    network: Network | None,
    timeout_s: float | None = None,
    scaler: GradScaler | None = None,
) -> Handle:
    """Give the model the plan's buckets, lanes and exchanges. Collective, between steps.

    Gradients that are views of DDP's old buckets stay views of those.
    """
    try:
        forget(ddp)
        buckets.change(ddp, plan.caps)
        return apply(ddp, plan, network=network, timeout_s=timeout_s, scaler=scaler)
    except BaseException:
        make_plain(ddp)
        raise


def make_plain(ddp: DDP) -> None:
    """Give the model DDP's own buckets, and remove the exchange."""
    forget(ddp)
    buckets.put_back(ddp)
