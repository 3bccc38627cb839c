"""`syncline predict` for sharded models: the time of a step of FSDP2 and HSDP, with and without our exchanges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from syncline.cli import screen
from syncline.cli.screen import say
from syncline.cluster import format_rate
from syncline.errors import UsageError
from syncline.predict.diagnosis import CAUSES, lost_to
from syncline.predict.sharded import FLOOR, SHARDED, ShardedPrediction, predict_sharded
from syncline.records.network import Network
from syncline.records.profile import Profile
from syncline.report import sentences
from syncline.report.inputs import resized
from syncline.report.sections.plan import numbers
from syncline.units import count_text, milliseconds_text

_PLANS = (*SHARDED, FLOOR)


def default_plans(profile: Profile) -> list[str]:
    """Return what is predicted if no plan is named."""
    sharding = profile.sharding
    return ["ddp"] if sharding is None or not sharding.measured_shards else ["hsdp", "hsdp+int4"]


def are_sharded(plans: Sequence[str], profile: Profile) -> bool:
    """Return whether all plans are for sharded models. Raise if only some are, or if the profile does not fit them."""
    sharded = [plan for plan in plans if plan in _PLANS]
    others = [plan for plan in plans if plan not in _PLANS]
    if sharded and others:
        raise UsageError(f"--plan {sharded[0]} is for a sharded model, and --plan {others[0]} is not: ask for one kind")
    if others and profile.sharding is not None and profile.sharding.measured_shards > 1:
        text = f"--plan {others[0]}: the profile is of a sharded model, and contains its collectives"
        raise UsageError(f"{text}: choose among {', '.join(_PLANS)}")
    return bool(sharded)


def predictions(
    plans: Sequence[str], profile: Profile, cluster: Network, counts: Sequence[int], rates: Sequence[int | None]
) -> Iterator[tuple[str, int | None, ShardedPrediction]]:
    """Yield the name of a plan with its rate, the rate, and the prediction."""
    for plan in plans:
        for rate_bps in rates:
            name = plan if len(rates) == 1 else f"{plan}, {format_rate(rate_bps or 0)}"
            for count in counts:
                yield name, rate_bps, predict_sharded(profile, resized(cluster, count, rate_bps), plan)


def show(found: Sequence[tuple[str, int | None, ShardedPrediction]]) -> str:
    """Print the predictions, and return the verdict on the first."""
    first = found[0][2]
    network, link = first.network, first.network.link("host")
    rate = f", {format_rate(link.nominal_bps)} links" if link is not None and link.nominal_bps else ""
    ranks = count_text(first.ranks // first.hosts, "rank")
    say(f"{first.profile.model}, {first.name} on {count_text(first.hosts, 'host')} × {ranks}{rate}, {network.backend}")
    verdict = sentences.sharded(first)
    say(f"\n{verdict}\n")
    rows = [("computation", milliseconds_text(first.compute_s))]
    rows += [(CAUSES[cause], milliseconds_text(seconds)) for cause, seconds in lost_to(first.losses).items()]
    screen.table(("", "per step"), [*rows, ("the whole step", milliseconds_text(first.iteration_s))])
    say()
    curves: dict[str, list[ShardedPrediction]] = {}
    for name, _, prediction in found:
        curves.setdefault(name, []).append(prediction)
    screen.show(numbers(curves), most=len(found))
    return verdict
