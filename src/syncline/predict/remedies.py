"""Changes that may make a step faster. Each is simulated before it is suggested.

To add a remedy, write a function that yields `Remedy` objects and add it to `REMEDIES`. `diagnosis` sorts them and
leaves out those that save too little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from syncline.exchange import BASELINES, EXCHANGES, Climbing
from syncline.predict.exchange_time import topology_of
from syncline.predict.prediction import Prediction, predict
from syncline.predict.schedule import Schedule
from syncline.records.network import Network
from syncline.records.profile import Profile

_BUCKETS_MB = (0.25, 1.0, 4.0, 10.0, 25.0, 50.0, 100.0, 400.0)
_LANES = (2, 4)
_FASTER = (2.5, 10)
_EXCHANGES = {
    "oktopk": "the largest 1 % of the gradients (oktopk)",
    "hierarchical+oktopk": "inside hosts first, 1 % at the top",
    "hierarchical": "inside hosts first (hierarchical)",
    "hierarchical+bf16": "inside hosts first, bf16 at the top",
}
_LINKS = {"host": "the hosts' links", "rack": "the links between racks"}


@dataclass(frozen=True)
class Remedy:
    """A change, and the predicted step with it."""

    name: str
    what: str
    prediction: Prediction
    lossy: bool = False
    hardware: bool = False
    last: bool = False
    """Whether it is listed after all others, however much it saves, because it changes how the model trains."""


def other_buckets(profile: Profile, network: Network, schedule: Schedule) -> Iterator[Remedy]:
    options = [
        Schedule.of(profile, schedule.name, lanes=schedule.lanes, bucket_mb=bucket_mb)
        for bucket_mb in _BUCKETS_MB
        if bucket_mb != schedule.bucket_mb
    ]
    best = _fastest(profile, network, options)
    yield Remedy("buckets", f"buckets of {best.schedule.bucket_mb:g} MB (bucket_cap_mb)", best)


def more_lanes(profile: Profile, network: Network, schedule: Schedule) -> Iterator[Remedy]:
    if schedule.lanes > 1:
        return
    name, bucket_mb = schedule.exchange_name, schedule.bucket_mb
    best = _fastest(profile, network, [Schedule.of(profile, name, lanes=n, bucket_mb=bucket_mb) for n in _LANES])
    yield Remedy("lanes", f"{best.schedule.lanes} lanes: several buckets at once", best)


def other_exchanges(profile: Profile, network: Network, schedule: Schedule) -> Iterator[Remedy]:
    if not schedule.lossless:
        return
    levels = [level for level in topology_of(network).levels if level.ranks > 1]
    for name, make in EXCHANGES.items():
        if name in BASELINES:
            continue
        exchange = make()
        climbs = isinstance(exchange, Climbing)
        if name == schedule.exchange_name or (climbs and len(levels) < 2) or (exchange.lossless and not climbs):
            continue
        option = Schedule.of(profile, name, lanes=schedule.lanes, bucket_mb=schedule.bucket_mb)
        prediction = predict(profile, network, option)
        what = _EXCHANGES.get(name, f"{name} on the wire")
        yield Remedy(name, what, prediction, lossy=not exchange.lossless, last=exchange.keeps)


def faster_links(profile: Profile, network: Network, schedule: Schedule) -> Iterator[Remedy]:
    for name in (link.name for link in network.links if link.name in _LINKS):
        for factor in _FASTER:
            faster = predict(profile, network.with_faster(name, factor), schedule)
            yield Remedy(f"{name} × {factor:g}", f"{_LINKS[name]} {factor:g} times as fast", faster, hardware=True)


def even_ranks(profile: Profile, network: Network, schedule: Schedule) -> Iterator[Remedy]:
    if profile.ranks or profile.jitter_s:
        even = predict(msgspec.structs.replace(profile, ranks=(), jitter_s=0.0), network, schedule)
        yield Remedy("even ranks", "all ranks as fast as a typical one", even)


REMEDIES: tuple[Callable[[Profile, Network, Schedule], Iterator[Remedy]], ...] = (
    other_buckets,
    more_lanes,
    other_exchanges,
    faster_links,
    even_ranks,
)
"""All remedies. A function yields nothing if its remedy does not apply."""


def _fastest(profile: Profile, network: Network, options: list[Schedule]) -> Prediction:
    predictions = [predict(profile, network, option) for option in options]
    return min(predictions, key=lambda prediction: prediction.iteration_s)
