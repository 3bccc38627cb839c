"""Find what limits the scaling of a step, explain it in words, and simulate the remedies that may help."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from syncline.exchange import BASELINES, EXCHANGES, FOR_UPDATES, UsesLevels
from syncline.predict.bucket_size import best_overlap
from syncline.predict.exchange_time import topology_of
from syncline.predict.prediction import Losses, Prediction, predict
from syncline.predict.schedule import OVERLAP, Schedule, ddp_caps
from syncline.records.bucket_caps import filled
from syncline.records.network import Network
from syncline.records.profile import Profile
from syncline.units import count_text, duration_text, milliseconds_text, rate_text, size_text

_WORTH = 0.02  # remedies that save a smaller share of a step are not listed
_OVERLAPS = 0.98  # overlap must be faster than plain DDP with the same buckets, by this factor
_FINE = 0.05  # if a step loses a smaller share than this, nothing limits the scaling
_BUCKETS_MB = (0.25, 1.0, 4.0, 10.0, 25.0, 50.0, 100.0, 400.0)
_LANES = (2, 4)
_FASTER = (2.5, 10)
_DESCRIPTIONS = {
    "int8": "8 bits per gradient (int8)",
    "int4": "4 bits per gradient (int4)",
    "int3": "3 bits per gradient (int3)",
    "hierarchical+int4": "inside hosts first, 4 bits at the top",
    "oktopk": "the largest 1 % of the gradients (oktopk)",
    "hierarchical+oktopk": "inside hosts first, 1 % at the top",
    "hierarchical": "inside hosts first (hierarchical)",
    "hierarchical+bf16": "inside hosts first, bf16 at the top",
}

CAUSES = {
    "startups": "start-ups of collectives",
    "host": "the hosts' links",
    "rack": "the links between racks",
    "local": "the links inside the hosts",
    "tail": "buckets that are full, and sent, too late",
    "straggler": "waiting for slower ranks",
    "overhead": "copies, hooks and the exchange's own work",
    "buffers": "broadcasting buffers before forward",
    "software": "processors and protocols that do not fill the links",
}


@dataclass(frozen=True)
class Remedy:
    """A change, and the predicted step with it."""

    name: str
    what: str
    prediction: Prediction
    lossy: bool = False
    hardware: bool = False
    last: bool = False  # listed after all others, however much it saves, because it changes what is applied in a step


@dataclass(frozen=True)
class Diagnosis:
    prediction: Prediction
    culprit: str | None  # the largest cause, a key of `CAUSES`; None if a step loses hardly any time
    why: str
    remedies: tuple[Remedy, ...]  # those that save time, the best first


def lost_to(losses: Losses) -> dict[str, float]:
    """Return the seconds lost to each cause, the largest first, without causes that cost nothing."""
    by_loss = sorted(losses.by_cause.items(), key=lambda cause: -cause[1])
    return {name: seconds for name, seconds in by_loss if seconds > 1e-7}


def diagnose(profile: Profile, network: Network, schedule: Schedule) -> Diagnosis:
    """Predict a step, and find the largest cause of loss and the remedies against it."""
    prediction = predict(profile, network, schedule)
    lost = lost_to(prediction.losses)
    total_s = prediction.iteration_s - prediction.compute_s
    if not lost or total_s < _FINE * prediction.compute_s:
        return Diagnosis(prediction, None, "hardly anything is lost: leave it alone", ())
    culprit = next(iter(lost))
    worth_s = (1 - _WORTH) * prediction.iteration_s
    remedies = [remedy for suggest in REMEDIES for remedy in suggest(profile, network, schedule)]
    remedies = [remedy for remedy in remedies if remedy.prediction.iteration_s < worth_s]
    remedies.sort(key=lambda remedy: (remedy.last, remedy.prediction.iteration_s))
    return Diagnosis(prediction, culprit, _why(culprit, profile, network, prediction), tuple(remedies))


def _why(culprit: str, profile: Profile, network: Network, prediction: Prediction) -> str:
    sizes = prediction.schedule.bucket_bytes(profile)
    buckets = count_text(len(sizes), "bucket" if prediction.schedule.updates is None else "fragment")
    if culprit == "startups":
        startup = duration_text(network.collective("all_reduce").startup_s)
        median = size_text(sorted(sizes)[len(sizes) // 2])
        return f"{buckets} of {median} (median), and each collective takes {startup} to start, whatever its size"
    if culprit in ("host", "rack", "local"):
        rate = next(link.bytes_per_s for link in network.links if link.name == culprit)
        nbytes = prediction.link_bytes[culprit]
        load = f"{size_text(nbytes)} per step through each of them, at {rate_text(rate * 8)}"
        if prediction.schedule.updates is not None:
            return f"{load}: updates are sent when the optimizer has stepped"
        if nbytes / rate > prediction.backward_s:
            return f"{load}: that takes longer than backward"
        return f"{load}: the last gradients are ready only when backward ends, so no computation is left to hide them"
    if culprit == "tail":
        last = "the only bucket" if len(sizes) == 1 else f"the last of {buckets}"
        return f"{last} holds {size_text(sizes[-1])}, and is sent when no computation is left"
    if culprit == "straggler":
        slowest = profile.slowest
        if slowest is not None and slowest.step_s > 1.05 * profile.step_s:
            typical = milliseconds_text(profile.step_s)
            return f"rank {slowest.rank} computes for {milliseconds_text(slowest.step_s)}, a typical rank for {typical}"
        return f"in each step some rank is late, by {milliseconds_text(profile.jitter_s)} (median)"
    if culprit == "overhead":
        return f"{size_text(profile.gradient_bytes)} are copied and processed in {buckets}"
    if culprit == "buffers":
        return f"{size_text(sum(entry.bytes for entry in profile.buffers))} of buffers are sent before every forward"
    return "collectives take this long on links of any speed: use faster processors, or send fewer bytes"


def other_buckets(profile: Profile, network: Network, schedule: Schedule) -> Iterator[Remedy]:
    if schedule.updates is not None:
        return
    sizes_mb = [bucket_mb for bucket_mb in _BUCKETS_MB if bucket_mb != schedule.bucket_mb]
    options = [Schedule.of(profile, schedule.name, lanes=schedule.lanes, bucket_mb=bucket_mb) for bucket_mb in sizes_mb]
    best = _fastest(profile, network, options)
    yield Remedy("buckets", f"buckets of {best.schedule.bucket_mb:g} MB (bucket_cap_mb)", best)


def more_lanes(profile: Profile, network: Network, schedule: Schedule) -> Iterator[Remedy]:
    if schedule.lanes == 1 and schedule.updates is None:
        name, bucket_mb = schedule.exchange_name, schedule.bucket_mb
        best = _fastest(profile, network, [Schedule.of(profile, name, lanes=n, bucket_mb=bucket_mb) for n in _LANES])
        yield Remedy("lanes", f"{best.schedule.lanes} lanes: several buckets at once", best)


def overlap_with_forward(profile: Profile, network: Network, schedule: Schedule) -> Iterator[Remedy]:
    if schedule.lossless and not schedule.overlaps and schedule.exchange_name == "dense":
        best, caps = best_overlap(profile, network, caps=ddp_caps(schedule.bucket_mb))
        plain = predict(profile, network, Schedule("ddp", filled(profile.gradients, caps)))
        if best.iteration_s > _OVERLAPS * plain.iteration_s:  # the buckets help, and not the overlap
            best = predict(profile, network, Schedule.of(profile, OVERLAP, bucket_mb=schedule.bucket_mb))
        size = "" if best.schedule.bucket_mb is None else f", bucket_cap_mb={best.schedule.bucket_mb:.3g}"
        yield Remedy(OVERLAP, f"weights gathered behind the next forward (overlap{size})", best)


def other_exchanges(profile: Profile, network: Network, schedule: Schedule) -> Iterator[Remedy]:
    levels = [level for level in topology_of(network).levels if level.ranks > 1]
    for name, make in EXCHANGES.items() if schedule.lossless else ():
        exchange = make()
        useful = len(levels) > 1 if isinstance(exchange, UsesLevels) else not exchange.lossless
        if useful and name not in (*BASELINES, *FOR_UPDATES, schedule.exchange_name):
            option = Schedule.of(profile, name, lanes=schedule.lanes, bucket_mb=schedule.bucket_mb)
            what = _DESCRIPTIONS.get(name, f"{name} on the wire")
            prediction = predict(profile, network, option)
            yield Remedy(name, what, prediction, lossy=not exchange.lossless, last=exchange.keeps)


def faster_links(profile: Profile, network: Network, schedule: Schedule) -> Iterator[Remedy]:
    names = [link.name for link in network.links if link.name != "local"]
    for name, factor in itertools.product(names, _FASTER):
        faster = predict(profile, network.with_faster(name, factor), schedule)
        yield Remedy(f"{name} × {factor:g}", f"{CAUSES[name]} {factor:g} times as fast", faster, hardware=True)


def even_ranks(profile: Profile, network: Network, schedule: Schedule) -> Iterator[Remedy]:
    if profile.ranks or profile.jitter_s:
        even = predict(msgspec.structs.replace(profile, ranks=(), jitter_s=0.0), network, schedule)
        yield Remedy("even ranks", "all ranks as fast as a typical one", even)


def unequal_batches(profile: Profile, network: Network, schedule: Schedule) -> Iterator[Remedy]:
    if len(profile.ranks) > 1 and network.ranks > 1 and (balanced := _balanced(profile)) is not None:
        what = "a batch for each rank, by its speed (syncline.shares)"
        yield Remedy("shares", what, predict(balanced, network, schedule))


def shares_hint(profile: Profile) -> str:
    """Return a sentence that names `syncline.shares` and what it would save, if a rank makes the others wait."""
    slowest, balanced = profile.slowest, _balanced(profile)
    if slowest is None or balanced is None:
        return ""
    saved_s = slowest.step_s - balanced.step_s
    varies = profile.spread is not None and slowest.step_s <= profile.spread.high_s  # as steps of a typical rank do
    if saved_s < _FINE * slowest.step_s or varies:
        return ""
    times = f"{milliseconds_text(slowest.step_s)} per step, a typical rank for {milliseconds_text(profile.step_s)}"
    remedy = "a batch for each rank by its speed (syncline.shares)"
    saves = f"would save about {milliseconds_text(saved_s)} (predicted)"
    return f" Rank {slowest.rank} computes for {times}: {remedy} {saves}."


def _balanced(profile: Profile) -> Profile | None:
    """Return the profile of ranks whose batches are such that all need the same time, if forward and backward take time
    in proportion to the batch. None if a time is not known."""
    times_s = [rank.forward_s + rank.backward_s for rank in profile.ranks]
    typical_s = profile.forward_s + profile.backward_s
    if not times_s or min(times_s) <= 0 or typical_s <= 0 or profile.slowest is None:
        return None
    pace = statistics.harmonic_mean(times_s) / typical_s
    always_s = max(0.0, profile.slowest.step_s - profile.step_s)
    return msgspec.structs.replace(
        profile,
        gradients=tuple(msgspec.structs.replace(g, ready_s=g.ready_s * pace) for g in profile.gradients),
        forward_s=profile.forward_s * pace,
        backward_s=profile.backward_s * pace,
        update_s=max(rank.update_s for rank in profile.ranks),
        jitter_s=max(0.0, profile.jitter_s - always_s),
        ranks=(),
    )


REMEDIES: list[Callable[[Profile, Network, Schedule], Iterator[Remedy]]]
REMEDIES = [other_buckets, more_lanes, overlap_with_forward, other_exchanges, faster_links, even_ranks, unequal_batches]
"""Functions that simulate remedies. One yields nothing if its remedy does not apply. Add a new one to this list."""


def _fastest(profile: Profile, network: Network, options: list[Schedule]) -> Prediction:
    return min((predict(profile, network, option) for option in options), key=lambda option: option.iteration_s)
