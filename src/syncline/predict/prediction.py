"""What one training step takes on a cluster, and what it loses to what.

The step, in the order in which things happen on the slowest rank: DDP broadcasts its buffers; forward; backward, on
whose thread gradients are copied into buckets and full buckets are handed to their lanes; the lanes' timeline; copies
back, bucket by bucket; the optimizer.

What a step loses is told by taking causes away one after the other and asking for the time again, so the parts add up
to the whole: buffers; copies, hooks and selection; start-ups; the tail, which would not be there if every gradient
travelled as soon as it is ready; each kind of link, the one that the others wait for last; software that does not fill
a link; ranks that are slower than others.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from dataclasses import dataclass, field

import msgspec

from syncline.exchange import Climbing, Cost, Phase, Topology
from syncline.predict.exchange_time import capacities, flow, solo_s, topology_of
from syncline.predict.schedule import Schedule
from syncline.predict.timeline import Bucket, Collective, Timeline, Work, simulate
from syncline.records.network import Network
from syncline.records.profile import Overheads, Profile

_NO_OVERHEADS = Overheads(copy_in_s_per_byte=0.0, copy_out_s_per_byte=0.0, hook_s=0.0, work={})


class Losses(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Seconds of one step beyond its computation on a typical rank. They add up to all that is lost."""

    startups_s: float
    links_s: dict[str, float]
    """To links that are busy, by kind: `host`, `rack`, `local`."""
    tail_s: float
    """To gradients that wait for their bucket to fill, and so travel after backward has ended."""
    straggler_s: float
    """To waiting for slower ranks."""
    overhead_s: float
    """To copies into and out of buckets, hooks, and an exchange's own computation."""
    buffers_s: float
    """To broadcasting buffers before forward."""
    software_s: float
    """To what collectives cost on links of any speed: processors, and protocols that do not fill a link."""

    @property
    def total_s(self) -> float:
        single = (self.startups_s, self.tail_s, self.straggler_s, self.overhead_s, self.buffers_s, self.software_s)
        return sum(single) + sum(self.links_s.values())


@dataclass(frozen=True)
class _Case:
    """What is predicted, and which causes of loss are there."""

    profile: Profile
    network: Network
    schedule: Schedule
    paced: bool
    overheads: bool = True
    straggler: bool = True
    buffers: bool = True
    topology: Topology = field(default_factory=lambda: Topology.flat(1))
    """With the links as they are: what an exchange chooses by them stays chosen when a cause is taken away."""


@dataclass(frozen=True)
class Prediction:
    """One step of one schedule on one cluster. What takes further simulations is worked out when it is asked for."""

    iteration_s: float
    timeline: Timeline
    """Seconds count from the start of backward."""
    _case: _Case

    @property
    def schedule(self) -> Schedule:
        return self._case.schedule

    @property
    def hosts(self) -> int:
        return self._case.network.hosts

    @property
    def ranks(self) -> int:
        return self._case.network.ranks

    @property
    def compute_s(self) -> float:
        """The same step on a typical rank alone."""
        return self._case.profile.step_s

    @property
    def backward_s(self) -> float:
        """Of the rank that all wait for."""
        return _pace(self._case)[1]

    @property
    def scaling(self) -> float:
        """1 where nothing is lost."""
        return self.compute_s / self.iteration_s if self.iteration_s else 1.0

    @property
    def exposed_s(self) -> float:
        """How long the lanes were still at work when backward had ended."""
        return max(0.0, max(self.timeline.end_s.values(), default=0.0) - self.backward_s)

    @property
    def sent_bytes(self) -> int:
        """By the busiest rank."""
        return sum(phase.sent_bytes for cost in _costs(self._case) for phase in cost.phases)

    def link_bytes(self, name: str) -> int:
        """Through the busiest link of a kind."""
        phases = [phase for cost in _costs(self._case) for phase in cost.phases]
        network = self._case.network
        return sum(network.loads(one.kind, one.elements, one.itemsize, one.level).get(name, 0) for one in phases)

    @functools.cached_property
    def low_s(self) -> float:
        """With the network's figures at the cheap end of their confidence intervals, and the profile's low quartile."""
        spread = self._case.profile.spread
        faster_s = 0.0 if spread is None else min(0.0, spread.low_s - self.compute_s)
        return max(self.compute_s, min(self._bound_s(high=False), self.iteration_s)) + faster_s

    @functools.cached_property
    def high_s(self) -> float:
        """The same at the dear end, with the high quartile."""
        spread = self._case.profile.spread
        slower_s = 0.0 if spread is None else max(0.0, spread.high_s - self.compute_s)
        return max(self._bound_s(high=True), self.iteration_s) + slower_s

    @functools.cached_property
    def losses(self) -> Losses:
        return _losses(self._case, self.iteration_s)

    def _bound_s(self, *, high: bool) -> float:
        return _iteration(dataclasses.replace(self._case, network=self._case.network.bound(high=high)))[0]


def predict(
    profile: Profile,
    network: Network,
    schedule: Schedule,
    *,
    paced: bool = False,
    topology: Topology | None = None,
) -> Prediction:
    """`paced`: gradients come at their offsets whatever the thread did in between, as those of a replayed profile.
    `topology`: the network's, for those who ask often."""
    if topology is None:
        climbing = next((one for one in schedule.exchanges.values() if isinstance(one, Climbing)), None)
        tree = network.tree if climbing is None else climbing.tree(network.tree, network.ranks)
        topology = topology_of(network, tree)
    case = _Case(profile, network, schedule, paced, topology=topology)
    iteration_s, timeline = _iteration(case)
    return Prediction(iteration_s, timeline, case)


def _losses(case: _Case, iteration_s: float) -> Losses:
    """Each cause taken away in turn, on top of those before it."""
    typical_s = case.profile.step_s
    ladder: list[tuple[str, _Case]] = []
    current = case
    if case.buffers and case.profile.buffers:
        current = dataclasses.replace(current, buffers=False)
        ladder.append(("buffers", current))
    current = dataclasses.replace(current, overheads=False)
    ladder.append(("overhead", current))
    current = dataclasses.replace(current, network=current.network.without(startups=True))
    ladder.append(("startups", current))
    current = dataclasses.replace(current, schedule=_one_by_one(current.schedule))
    ladder.append(("tail", current))
    busiest_last = _by_busy_time(case)
    for name in busiest_last:
        current = dataclasses.replace(current, network=current.network.without(link=name))
        ladder.append((name, current))
    current = dataclasses.replace(current, network=current.network.without(software=True))
    ladder.append(("software", current))
    current = dataclasses.replace(current, straggler=False)
    ladder.append(("straggler", current))
    # Without a cause a step can be longer: gradients one by one are padded one by one. It then was no loss.
    times = list(itertools.accumulate([iteration_s, *(_iteration(step)[0] for _, step in ladder)], min))
    times = [*(max(typical_s, time_s) for time_s in times[:-1]), typical_s]
    lost = {name: before - after for (name, _), (before, after) in zip(ladder, itertools.pairwise(times), strict=True)}
    return Losses(
        startups_s=lost["startups"],
        links_s={name: lost[name] for name in busiest_last},
        tail_s=lost["tail"],
        straggler_s=lost["straggler"],
        overhead_s=lost["overhead"],
        buffers_s=lost.get("buffers", 0.0),
        software_s=lost["software"],
    )


def _by_busy_time(case: _Case) -> list[str]:
    """The kinds of links, from the one that is least busy to the one that the others wait for."""
    busy_s = {link.name: 0.0 for link in case.network.links}
    for phase in (phase for cost in _costs(case) for phase in cost.phases):
        for name, seconds in case.network.busy_s(phase.kind, phase.elements, phase.itemsize, phase.level).items():
            busy_s[name] += seconds
    return sorted(busy_s, key=lambda name: busy_s[name])


def _one_by_one(schedule: Schedule) -> Schedule:
    """Every gradient in a bucket of its own."""
    each = {place: schedule.exchange_of(index) for index, places in enumerate(schedule.buckets) for place in places}
    places = sorted(each)
    return dataclasses.replace(
        schedule, buckets=tuple((place,) for place in places), each=tuple(each[place] for place in places)
    )


def _iteration(case: _Case) -> tuple[float, Timeline]:
    profile, network, schedule = case.profile, case.network, case.schedule
    forward_s, backward_s, update_s = _pace(case)
    overheads = (profile.overheads if case.overheads and network.ranks > 1 else None) or _NO_OVERHEADS
    ready_s, thread_s = _ready(case, overheads, backward_s)
    sizes = schedule.bucket_bytes(profile)
    buckets = []
    costs = _costs(case)
    for index, (cost, nbytes) in enumerate(zip(costs, sizes, strict=True)):
        name, exchange = schedule.exchange_of(index)
        work = overheads.work.get(name)
        own_s = work.fixed_s + work.s_per_byte * nbytes if work is not None else 0.0
        stages = [stage for phases in cost.parts for stage in _stages(network, phases, own_s / cost.chunks)]
        waits = exchange.waits and len(cost.phases) > 1
        lane = index % schedule.lanes
        buckets.append(Bucket(str(index), ready_s[index], lane, tuple(stages), cost.chunks, waits))
    timeline = simulate(
        buckets,
        capacities(network),
        network.in_flight,
        network.slowdown,
        network.crowding,
        chunks_in_flight=network.in_flight,
    )
    end_s = thread_s
    for index, nbytes in enumerate(sizes):
        end_s = max(end_s, timeline.end_s[str(index)]) + overheads.copy_out_s_per_byte * nbytes
    waiting_s = _jitter_s(profile) if case.straggler and network.ranks > 1 else 0.0
    return _buffers_s(case) + forward_s + end_s + update_s + waiting_s, timeline


def _jitter_s(profile: Profile) -> float:
    """What each step waits for whoever is late in it, beyond the rank that always is."""
    always_s = 0.0 if profile.slowest is None else profile.slowest.step_s - profile.step_s
    return max(0.0, profile.jitter_s - max(0.0, always_s))


def _pace(case: _Case) -> tuple[float, float, float]:
    """Forward, backward and update of the rank that all wait for."""
    profile = case.profile
    slowest = profile.slowest if case.straggler and case.network.ranks > 1 else None
    if slowest is None or slowest.step_s <= profile.step_s:  # medians of parts may add up to more than any rank's step
        return profile.forward_s, profile.backward_s, profile.update_s
    return slowest.forward_s, slowest.backward_s, slowest.update_s


def _ready(case: _Case, overheads: Overheads, backward_s: float) -> tuple[list[float], float]:
    """When each bucket is handed to its lane, and when the thread that runs backward is through."""
    profile, schedule = case.profile, case.schedule
    stretch = backward_s / profile.backward_s if profile.backward_s > 0 else 1.0
    bucket_of = {place: index for index, places in enumerate(schedule.buckets) for place in places}
    missing = [len(places) for places in schedule.buckets]
    ready_s = [0.0] * len(missing)
    late_s = now_s = 0.0
    for place, gradient in enumerate(profile.gradients):
        due_s = gradient.ready_s * stretch
        extra_s = overheads.copy_in_s_per_byte * gradient.bytes
        missing[bucket_of[place]] -= 1
        if not missing[bucket_of[place]] and profile.device != "cuda":
            extra_s += overheads.hook_s  # on CUDA the host is ahead of the device, and hooks cost it nothing
        late_s = (max(0.0, now_s - due_s) if case.paced else late_s) + extra_s
        now_s = due_s + late_s
        ready_s[bucket_of[place]] = now_s
    # Buckets are launched in their order, whichever is full first.
    ready_s = list(itertools.accumulate(ready_s, max))
    return ready_s, max(now_s, backward_s + (0.0 if case.paced else late_s))


def _costs(case: _Case) -> list[Cost]:
    """By bucket: what its exchange puts on the wire."""
    if case.network.ranks < 2:
        return [Cost(()) for _ in case.schedule.buckets]
    contents = case.schedule.contents(case.profile)
    return [
        case.schedule.exchange_of(index)[1].cost(numel, dtype, case.topology)
        for index, (numel, dtype) in enumerate(contents)
    ]


def _stages(network: Network, phases: tuple[Phase, ...], own_s: float) -> tuple[Work | Collective, ...]:
    """An exchange's own work stands before, between and after its collectives, in equal parts."""
    if not phases:
        return ()
    flows = [flow(network, phase) for phase in phases]
    if not own_s:
        return tuple(flows)
    part = Work(own_s / (len(flows) + 1))
    return (part, *(stage for flow in flows for stage in (flow, part)))


def _buffers_s(case: _Case) -> float:
    if not case.buffers or case.network.ranks < 2:
        return 0.0
    return sum(solo_s(case.network, "broadcast", one.bytes, 1) for one in case.profile.buffers)
