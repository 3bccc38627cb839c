"""Find the links of a live model's ranks, and choose an exchange, the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from syncline.ddp import reducer
from syncline.dist.comm import backend_of, gather_bytes
from syncline.errors import UsageError
from syncline.exchange import Exchange, wire
from syncline.health.meeting import same_on_all_ranks
from syncline.measure.overhead import measure_overheads
from syncline.measure.probe import probe
from syncline.measure.steps import run_on_all_ranks
from syncline.plan.choice import Choice, choice_of
from syncline.plan.ladder import exchanges_of, make_choice
from syncline.plan.make import make_plan
from syncline.plan.search import options
from syncline.predict import Schedule, predict
from syncline.predict.exchange_time import topology_of
from syncline.records.bucket_caps import filled
from syncline.records.network import Network
from syncline.records.plan import Alternative, Plan, PlannedGradient, Where
from syncline.records.profile import Profile
from syncline.runtime.topology import check_network, hosts_of, read_network
from syncline.runtime.validation import optimizer_settings
from syncline.tuning.network_cache import cached_path, kinds_of, recall, remember
from syncline.tuning.settings import TuneSettings
from syncline.units import milliseconds_text

_MOST_DIFFERENCE = 0.3  # part of a step by which remembered links may mispredict it
_OVERHEADS_S, _LOSSLESS_OVERHEADS_S = 2.0, 0.3  # time for measuring the work of exchanges: lossless ones have little


def agreed_network(
    group: dist.ProcessGroup,
    device: torch.device,
    call: str,
    check: Callable[[], TuneSettings],
    optimizer: Optimizer | None = None,
) -> tuple[TuneSettings, Network | None]:
    """Return the settings that `check` returns, and their network if any, once all ranks agree. Collective.

    They must also agree on whether there is an optimizer, and on its settings.
    """
    with same_on_all_ranks(group, device, f"the configuration of {call}", call) as fields:
        settings = check()
        network = read_network(settings.network, fields)
        fields |= {"allow": list(settings.allow), "change": settings.change, "budget_s": settings.budget_s}
        fields |= {"timeout_s": settings.timeout_s, "scaler": settings.scaler is not None}
        fields |= {"quality": settings.quality, "cache": settings.cache, "warmup": settings.warmup}
        fields |= {"retune": settings.retune, "probe_s": settings.probe_s}
        fields["optimizer"] = None if optimizer is None else optimizer_settings(optimizer)
    if network is not None:
        check_network(network, hosts_of(group), backend_of(group))
    return settings, network


def may_be_lossy(settings: TuneSettings) -> bool:
    """Return whether exchanges may send less than the gradients."""
    return bool(settings.allow) or settings.quality not in (None, "exact")


def has_levels(group: dist.ProcessGroup) -> bool:
    """Return whether a host has several ranks. Collective."""
    return group.size() > len(set(hosts_of(group)))


def find_network(
    group: dist.ProcessGroup,
    settings: TuneSettings,
    probe_s: float,
    *,
    overlap: bool = False,
    fresh: bool = False,
    why_outdated: Callable[[Network], str | None] = lambda _: None,
    log: Callable[[str], None] = lambda _: None,
) -> Network:
    """Return the links, remembered or probed with the collectives that may be used, and no others. Collective.

    With `fresh`, they are probed in any case. `why_outdated` returns why remembered links are not used, if so; rank 0
    decides. Links that replace remembered ones are probed with the same collectives, too.
    """
    gentle = not settings.allow and settings.quality is None and not overlap and not has_levels(group)
    kinds: tuple[str, ...] = ("all_reduce", "broadcast") if gentle else wire.KINDS
    path = cached_path(group) if settings.cache else None
    if (known := recall(group, path, kinds)) is not None:
        reason = gather_bytes(group, ("" if fresh else why_outdated(known) or "").encode())[0].decode()
        if not fresh and not reason:
            log(f"using the links that were probed at {known.date}; without them: cache=False, or --no-cache")
            return known
        if reason:
            log(f"the links that were probed at {known.date} are not used: {reason}")
        kinds = tuple(kind for kind in wire.KINDS if kind in {*kinds, *kinds_of(known)})
    log(f"probing the links for about {probe_s:.2g} s, while the script waits")
    network = probe(budget_s=probe_s, kinds=kinds)
    remember(group, path, network)
    return network


def why_outdated(ddp: DDP, profile: Profile, step_s: float, network: Network) -> str | None:
    """Return why remembered links cannot be those of today, given a step of plain DDP; None if they can."""
    schedule = Schedule("ddp", filled(profile.gradients, _own_caps(ddp)))
    try:
        predicted_s = predict(profile, network, schedule).iteration_s
    except UsageError as error:
        return str(error)
    if abs(predicted_s - step_s) <= _MOST_DIFFERENCE * step_s:
        return None
    return f"plain DDP takes {milliseconds_text(step_s)} per step, and they predict {milliseconds_text(predicted_s)}"


def _own_caps(ddp: DDP) -> tuple[int, ...]:
    return reducer.own_caps(ddp) if reducer.can_change() else (int(ddp.bucket_bytes_cap),)


def choose_for_live(
    ddp: DDP,
    profile: Profile,
    network: Network,
    settings: TuneSettings,
    device: torch.device,
    *,
    updates: bool = False,
    overlap: bool = False,
    own_buckets: bool = False,
) -> tuple[Profile, Choice]:
    """Return the profile with the cost of exchanges on this device, and rank 0's choice. Collective.

    All ranks use the choice of rank 0, because hosts may round differently.
    """
    group: dist.ProcessGroup = ddp.process_group
    quality = settings.quality or "exact"
    exchanges: dict[str, Exchange] = options(network, settings.allow)
    if settings.quality is not None:
        exchanges |= exchanges_of(quality, network, updates=updates)
    makers: dict[str, Callable[[], Exchange]] = {name: lambda e=each: e for name, each in exchanges.items()}  # type: ignore[misc]
    overheads = measure_overheads(
        device,
        makers,
        topology=topology_of(network),
        group=group,
        largest_bytes=profile.gradient_bytes,
        budget_s=_OVERHEADS_S if may_be_lossy(settings) else _LOSSLESS_OVERHEADS_S,
    )
    profile = msgspec.structs.replace(profile, overheads=overheads)
    caps = _own_caps(ddp)

    def encoded() -> bytes:
        if group.rank() != 0:
            return b""
        if settings.allow:
            plan = make_plan(profile, network, settings.allow, caps=caps, own_buckets=own_buckets)
            return msgspec.json.encode(choice_of(plan, own_buckets=own_buckets))
        able = {"updates": updates, "overlap": overlap, "own_buckets": own_buckets}
        hint, warmup = settings.quality is not None, settings.warmup
        choice = make_choice(profile, network, quality, caps=caps, hint=hint, warmup=warmup, **able)
        return msgspec.json.encode(choice)

    return profile, msgspec.json.decode(run_on_all_ranks(group, encoded)[0], type=Choice)


def plain_choice(profile: Profile, group: dist.ProcessGroup, step_s: float, reason: str) -> Choice:
    """Return the choice to do nothing, for links that were not measured. Collective."""
    where = Where(host_of_rank=hosts_of(group), backend=backend_of(group), device=profile.device)
    gradients = tuple(PlannedGradient(name=g.name, shape=g.shape, dtype=g.dtype) for g in profile.gradients)
    nothing = Alternative(name="do nothing: plain DDP", iteration_s=step_s, lossless=True)
    return choice_of(
        Plan(
            model=profile.model,
            gradients=gradients,
            where=where,
            buckets=(),
            lanes=1,
            iteration_s=step_s,
            low_s=step_s,
            high_s=step_s,
            plain_s=step_s,
            compute_s=profile.step_s,
            exchange_s=0.0,
            reason=reason,
            alternatives=(nothing,),
            how=f"model: {profile.how}; links: not measured",
        )
    )
