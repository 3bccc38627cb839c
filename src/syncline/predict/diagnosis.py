"""What limits the scaling, in words, and what would change it: every remedy is simulated before it is named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from syncline.exchange import BASELINES, EXCHANGES, Climbing
from syncline.predict.exchange_time import topology_of
from syncline.predict.prediction import Losses, Prediction, predict
from syncline.predict.schedule import Schedule
from syncline.records.network import Network
from syncline.records.profile import Profile
from syncline.units import size_text

_WORTH = 0.02
"""A remedy that saves less of a step than this is not one."""
_FINE = 0.05
"""Below this loss nothing limits the scaling."""
_EXCHANGES = {
    "oktopk": "the largest 1 % of the gradients (oktopk)",
    "hierarchical+oktopk": "inside hosts first, 1 % at the top",
    "hierarchical": "inside hosts first (hierarchical)",
    "hierarchical+bf16": "inside hosts first, bf16 at the top",
}
BUCKETS_MB = (0.25, 1.0, 4.0, 10.0, 25.0, 50.0, 100.0, 400.0)

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
    """Something to change, and what a step would then take."""

    name: str
    what: str
    prediction: Prediction
    lossy: bool = False
    hardware: bool = False
    last: bool = False
    """Named after all others, however much it saves: it changes how a model trains."""


@dataclass(frozen=True)
class Diagnosis:
    prediction: Prediction
    culprit: str | None
    """A key of `CAUSES`; None where hardly anything is lost."""
    why: str
    remedies: tuple[Remedy, ...]
    """Only those that save something, the best first; then those that change how a model trains."""


def lost_to(losses: Losses) -> dict[str, float]:
    """Seconds by cause, the largest first; causes that cost nothing are left out."""
    found = {
        "startups": losses.startups_s,
        "tail": losses.tail_s,
        "straggler": losses.straggler_s,
        "overhead": losses.overhead_s,
        "buffers": losses.buffers_s,
        "software": losses.software_s,
        **losses.links_s,
    }
    return {name: found[name] for name in sorted(found, key=lambda name: -found[name]) if found[name] > 1e-7}


def diagnose(profile: Profile, network: Network, schedule: Schedule) -> Diagnosis:
    prediction = predict(profile, network, schedule)
    lost = lost_to(prediction.losses)
    total_s = prediction.iteration_s - prediction.compute_s
    if not lost or total_s < _FINE * prediction.compute_s:
        return Diagnosis(prediction, None, "hardly anything is lost: leave it alone", ())
    culprit = next(iter(lost))
    remedies = sorted(_remedies(profile, network, schedule), key=lambda one: (one.last, one.prediction.iteration_s))
    worth_s = (1 - _WORTH) * prediction.iteration_s
    useful = [remedy for remedy in remedies if remedy.prediction.iteration_s < worth_s]
    return Diagnosis(prediction, culprit, _why(culprit, profile, network, prediction), tuple(useful))


def _why(culprit: str, profile: Profile, network: Network, prediction: Prediction) -> str:
    buckets = prediction.schedule.buckets
    sizes = prediction.schedule.bucket_bytes(profile)
    if culprit == "startups":
        startup_ms = network.collective("all_reduce").startup_s * 1e3
        middle = f"{_count(len(buckets), 'bucket')} of {size_text(sorted(sizes)[len(sizes) // 2])} in the middle"
        return f"{middle}, and starting a collective takes {startup_ms:.3g} ms however little it carries"
    if culprit in ("host", "rack", "local"):
        link = network.link(culprit)
        rate = "" if link is None else f", at {link.bytes_per_s * 8 / 1e6:,.0f} Mbit/s"
        nbytes = prediction.link_bytes(culprit)
        what = f"{size_text(nbytes)} per step through each of them{rate}"
        busy_s = 0.0 if link is None else nbytes / link.bytes_per_s
        if busy_s > prediction.backward_s:
            return f"{what}: longer than backward takes"
        return f"{what}: the last gradients are there when backward ends, and nothing is left to hide them behind"
    if culprit == "tail":
        last = size_text(sizes[-1])
        return f"the last bucket of {len(buckets)} holds {last}, and travels when nothing is left to compute"
    if culprit == "straggler":
        slowest = profile.slowest
        if slowest is not None and slowest.step_s > 1.05 * profile.step_s:
            typical_ms = profile.step_s * 1e3
            return f"rank {slowest.rank} computes {slowest.step_s * 1e3:.1f} ms, a typical one {typical_ms:.1f} ms"
        return f"in each step some rank is late, by {profile.jitter_s * 1e3:.1f} ms in the middle"
    if culprit == "overhead":
        return f"{size_text(profile.gradient_bytes)} are copied and worked on in {len(buckets)} buckets"
    if culprit == "buffers":
        return f"{size_text(sum(one.bytes for one in profile.buffers))} of buffers are sent before every forward"
    return "collectives take this long on links of any speed: more processor, or fewer bytes"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _remedies(profile: Profile, network: Network, schedule: Schedule) -> Iterator[Remedy]:
    yield from _other_buckets(profile, network, schedule)
    if schedule.lanes == 1:
        options = [Schedule.of(profile, schedule.exchange_name, lanes=n, bucket_mb=schedule.bucket_mb) for n in (2, 4)]
        best = min(
            (predict(profile, network, option) for option in options), key=lambda prediction: prediction.iteration_s
        )
        yield Remedy("lanes", f"{best.schedule.lanes} lanes: several buckets at once", best)
    if schedule.lossless:
        yield from _other_exchanges(profile, network, schedule)
    for link in network.links:
        if link.name != "local":
            for times in (2.5, 10):
                faster = predict(profile, network.with_faster(link.name, times), schedule)
                where = "the hosts' links" if link.name == "host" else "the links between racks"
                yield Remedy(f"{link.name} × {times:g}", f"{where} {times:g} times as fast", faster, hardware=True)
    if profile.ranks or profile.jitter_s:
        even = predict(msgspec.structs.replace(profile, ranks=(), jitter_s=0.0), network, schedule)
        yield Remedy("even ranks", "all ranks as fast as a typical one", even)


def _other_exchanges(profile: Profile, network: Network, schedule: Schedule) -> Iterator[Remedy]:
    levels = [level for level in topology_of(network).levels if level.ranks > 1]
    for name, make in EXCHANGES.items():
        if name in BASELINES:
            continue
        exchange = make()
        climbs = isinstance(exchange, Climbing)
        if name == schedule.exchange_name or (climbs and len(levels) < 2) or (exchange.lossless and not climbs):
            continue
        plan = Schedule.of(profile, name, lanes=schedule.lanes, bucket_mb=schedule.bucket_mb)
        other = predict(profile, network, plan)
        what = _EXCHANGES.get(name, f"{name} on the wire")
        yield Remedy(name, what, other, lossy=not exchange.lossless, last=exchange.keeps)


def _other_buckets(profile: Profile, network: Network, schedule: Schedule) -> Iterator[Remedy]:
    tried = [
        predict(profile, network, Schedule.of(profile, schedule.name, lanes=schedule.lanes, bucket_mb=bucket_mb))
        for bucket_mb in BUCKETS_MB
        if bucket_mb != schedule.bucket_mb
    ]
    best = min(tried, key=lambda prediction: prediction.iteration_s)
    yield Remedy("buckets", f"buckets of {best.schedule.bucket_mb:g} MB (bucket_cap_mb)", best)
