"""Turn the result of a search into a plan: buckets with parameter names, exchanges with settings, and the reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec

from syncline.exchange import Exchange, Hierarchical, OkTopk, settings
from syncline.plan.search import SearchResult, search
from syncline.predict import Prediction
from syncline.predict.diagnosis import CAUSES, lost_to
from syncline.predict.exchange_time import topology_of
from syncline.predict.schedule import DDP_CAPS
from syncline.records.network import Network
from syncline.records.plan import Alternative, Plan, PlannedBucket, PlannedGradient, Where
from syncline.records.profile import Profile
from syncline.units import milliseconds_text

SPARSE_WARMUP_STEPS = 300
"""Steps that a plan lets a sparse exchange send everything, because training begins badly without."""


def make_plan(
    profile: Profile,
    network: Network,
    allow: Sequence[str] = (),
    *,
    paced: bool = False,
    caps: Sequence[int] = DDP_CAPS,
    own_buckets: bool = False,
) -> Plan:
    """Find the best plan for a model on a cluster.

    Args:
        profile: The model.
        network: The cluster.
        allow: Lossy exchanges that may be used: `bf16`, `fp16`, `int8`, `int4`, `int3`, `sparse`. By default the
            plan is lossless.
        paced: Whether gradients are ready at fixed times, as in a replayed profile.
        caps: Bytes at which plain DDP closes its buckets; the last one repeats.
        own_buckets: Keep plain DDP's buckets, with one exchange for all of them.

    Returns:
        The plan. Its `nothing` is true if plain DDP is best.

    Raises:
        UsageError: `allow` has an unknown name.

    Example:
        >>> profile, network = syncline.Profile.load("profile.json"), syncline.Network.load("network.json")
        >>> plan = syncline.make_plan(profile, network, allow=("bf16",))
        >>> plan.save("plan.json")
    """
    result = search(profile, network, allow, paced=paced, caps=caps, own_buckets=own_buckets)
    plain_s = result.plain.iteration_s
    reason = "There is only one rank, which has nothing to exchange." if network.ranks == 1 else _reason(result)
    alternatives = (
        Alternative(name="do nothing: plain DDP", iteration_s=plain_s, lossless=True),
        *(Alternative(name=c.name, iteration_s=c.seconds, lossless=c.schedule.lossless) for c in result.candidates),
    )
    plan = plan_for(result.plain if result.nothing else result.best, plain_s, reason, alternatives)
    return msgspec.structs.replace(plan, buckets=(), lanes=1) if result.nothing else plan


def plan_for(chosen: Prediction, plain_s: float, reason: str, alternatives: tuple[Alternative, ...] = ()) -> Plan:
    """Return a plan with the schedule of the given prediction."""
    profile, network, schedule = chosen.profile, chosen.network, chosen.schedule
    topology, buckets = topology_of(network), []
    contents = zip(schedule.bucket_exchanges, schedule.contents(profile), schedule.buckets, strict=True)
    for index, ((_, exchange), (numel, dtype), gradients) in enumerate(contents):
        if isinstance(exchange, Hierarchical):
            path = exchange.path(numel, dtype, topology)
            if not path.shapes:
                exchange = exchange.across
            elif len(set(path.shapes)) == 1:  # stored in the plan, because applying it must not depend on link rates
                exchange = dataclasses.replace(exchange, shape=path.shapes[0], chunks=path.chunks)
        names = tuple(profile.gradients[gradient].name for gradient in gradients)
        described = settings(_warmed_up(exchange))
        buckets.append(PlannedBucket(parameters=names, lane=index % schedule.lanes, exchange=described))
    first_s = max(profile.gradients[index].ready_s for index in schedule.buckets[0])
    return Plan(
        model=profile.model,
        gradients=tuple(PlannedGradient(name=g.name, shape=g.shape, dtype=g.dtype) for g in profile.gradients),
        where=Where(host_of_rank=network.host_of_rank, backend=network.backend, device=profile.device),
        buckets=tuple(buckets),
        lanes=schedule.lanes,
        iteration_s=chosen.iteration_s,
        low_s=chosen.low_s,
        high_s=chosen.high_s,
        compute_s=chosen.compute_s,
        plain_s=plain_s,
        exchange_s=max(0.0, max(chosen.timeline.end_s.values(), default=0.0) - first_s),
        reason=reason,
        alternatives=alternatives,
        how=f"model: {profile.how}; links: {network.how}",
    )


def _warmed_up(exchange: Exchange) -> Exchange:
    """Return the exchange, with a warm-up if it is sparse and has none."""
    if isinstance(exchange, Hierarchical):
        return dataclasses.replace(exchange, across=_warmed_up(exchange.across))
    if isinstance(exchange, OkTopk) and not exchange.warmup:
        return dataclasses.replace(exchange, warmup=SPARSE_WARMUP_STEPS)
    return exchange


def _reason(result: SearchResult) -> str:
    plain, best = result.plain, result.best
    plain_text = milliseconds_text(plain.iteration_s)
    if result.nothing:
        gain = 1 - best.iteration_s / plain.iteration_s if plain.iteration_s else 0.0
        if gain <= 0:
            return f"Nothing that is allowed is faster than plain DDP, predicted at {plain_text} per step."
        saving = f"the best that is allowed saves {gain:.1%}: not worth a change."
        return f"Plain DDP is predicted to take {plain_text} per step, of which {saving}"
    count = len(best.schedule.buckets)
    buckets = "one bucket" if count == 1 else f"{count} buckets"
    buckets = buckets.capitalize() if best.schedule.lossless else f"Lossy: {buckets}"
    lanes = f" on {best.schedule.lanes} lanes" if best.schedule.lanes > 1 else ""
    left = lost_to(best.losses)
    saved = {name: seconds - left.get(name, 0.0) for name, seconds in lost_to(plain.losses).items()}
    most = max(saved, key=lambda name: saved[name], default="")
    others = f", instead of DDP's {len(plain.schedule.buckets)}"
    if best.schedule.buckets == plain.schedule.buckets:
        buckets, others = buckets.replace(str(count), f"DDP's {count}", 1), ""
    return (
        f"{buckets}{lanes} through {' and '.join(best.schedule.exchanges)}{others}: "
        f"predicted {plain_text} → {milliseconds_text(best.iteration_s)} per step"
        f"{f', mostly less lost to {CAUSES[most]}' if most and saved[most] > 0 else ''}."
    )
