"""Predict the time of one training step on a cluster, and what it loses to each cause.

A step on the slowest rank consists of: DDP's broadcast of buffers; forward; backward, whose thread copies gradients
into buckets and hands full buckets to their lanes; the exchanges on the lanes; copies out of the buckets; the
optimizer.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from syncline.exchange import Climbing, Cost, Phase, Topology
from syncline.predict.exchange_time import capacities, flow, solo_s, topology_of
from syncline.predict.schedule import Schedule
from syncline.predict.timeline import Bucket, Collective, Timeline, Work, simulate
from syncline.records.network import Network
from syncline.records.profile import Overheads, Profile

_NO_OVERHEADS = Overheads(copy_in_s_per_byte=0.0, copy_out_s_per_byte=0.0, hook_s=0.0, work={})


class Losses(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Seconds of a step beyond the computation of a typical rank, by cause."""

    startups_s: float
    """Start-ups of collectives."""
    links_s: dict[str, float]
    """Busy links, by kind: `host`, `rack`, `local`."""
    tail_s: float
    """Gradients that wait for their bucket to fill, and so are sent after backward has ended."""
    straggler_s: float
    """Waiting for slower ranks."""
    overhead_s: float
    """Copies into and out of buckets, hooks, and the exchanges' own computation."""
    buffers_s: float
    """Broadcasts of buffers before forward."""
    software_s: float
    """The cost of collectives on infinitely fast links: processors, and protocols that do not fill a link."""

    @property
    def by_cause(self) -> dict[str, float]:
        """Seconds by cause; a link's cause is its name."""
        single = ("startups", "tail", "straggler", "overhead", "buffers", "software")
        return {name: getattr(self, f"{name}_s") for name in single} | self.links_s

    @property
    def total_s(self) -> float:
        return sum(self.by_cause.values())


@dataclass(frozen=True)
class _Case:
    """The inputs of a prediction, and which causes of loss it includes."""

    profile: Profile
    network: Network
    schedule: Schedule
    paced: bool
    topology: Topology
    """The topology with all causes, so that exchanges choose the same paths when a cause is removed."""
    overheads: bool = True
    straggler: bool = True
    buffers: bool = True


@dataclass(frozen=True)
class Prediction:
    """One step of one schedule on one cluster. Properties that need further simulations are computed on first use."""

    iteration_s: float
    timeline: Timeline
    """The exchanges, in seconds from the start of backward."""
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
        """Time of the step on a typical rank alone."""
        return self._case.profile.step_s

    @property
    def backward_s(self) -> float:
        """Backward of the slowest rank."""
        return _pace(self._case)[1]

    @property
    def scaling(self) -> float:
        """Scaling efficiency: time of computation divided by the time of the step; 1 if nothing is lost."""
        return self.compute_s / self.iteration_s if self.iteration_s else 1.0

    @property
    def exposed_s(self) -> float:
        """Communication after the end of backward."""
        return max(0.0, max(self.timeline.end_s.values(), default=0.0) - self.backward_s)

    @property
    def sent_bytes(self) -> int:
        """Bytes per step sent by the busiest rank."""
        return sum(phase.sent_bytes for phase in _phases(self._case))

    def link_bytes(self, name: str) -> int:
        """Return the bytes per step through the busiest link of a kind."""
        loads = self._case.network.loads
        phases = _phases(self._case)
        return sum(loads(phase.kind, phase.elements, phase.itemsize, phase.level).get(name, 0) for phase in phases)

    @functools.cached_property
    def low_s(self) -> float:
        """Time of the step at the low ends of the network's intervals and the profile's quartiles."""
        spread = self._case.profile.spread
        faster_s = 0.0 if spread is None else min(0.0, spread.low_s - self.compute_s)
        return max(self.compute_s, min(self._bound_s(high=False), self.iteration_s)) + faster_s

    @functools.cached_property
    def high_s(self) -> float:
        """Time of the step at the high ends of the network's intervals and the profile's quartiles."""
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
    """Predict the time of one step.

    Args:
        profile: The model.
        network: The cluster.
        schedule: Buckets, lanes and exchanges.
        paced: Whether gradients are ready at fixed times, as in a replayed profile, even if copies and hooks delay the
            thread that runs backward.
        topology: The network's topology, to save time in repeated predictions.
    """
    if topology is None:
        exchanges = schedule.exchanges.values()
        climbing = next((exchange for exchange in exchanges if isinstance(exchange, Climbing)), None)
        tree = network.tree if climbing is None else climbing.tree(network.tree, network.ranks)
        topology = topology_of(network, tree)
    case = _Case(profile, network, schedule, paced, topology)
    iteration_s, timeline = _iteration(case)
    return Prediction(iteration_s, timeline, case)


def _losses(case: _Case, iteration_s: float) -> Losses:
    """Remove one cause after the other, and attribute the time that each saves to it, so that losses add up."""
    typical_s = case.profile.step_s
    causes, cases = zip(*_without_causes(case), strict=True)
    # Removing a cause may make a step longer: single gradients are padded one by one. That cause then counts as 0.
    times = list(itertools.accumulate([iteration_s, *(_iteration(case)[0] for case in cases)], min))
    times = [*(max(typical_s, time_s) for time_s in times[:-1]), typical_s]
    lost = {name: before - after for name, (before, after) in zip(causes, itertools.pairwise(times), strict=True)}
    links = [link.name for link in case.network.links]
    return Losses(
        **{f"{name}_s": seconds for name, seconds in lost.items() if name not in links},
        links_s={name: seconds for name, seconds in lost.items() if name in links},
    )


def _without_causes(case: _Case) -> Iterator[tuple[str, _Case]]:
    """Yield the causes of loss, and the case without them and all earlier ones. The busiest link is the last."""
    replace = dataclasses.replace
    busy_s = {link.name: 0.0 for link in case.network.links}
    for phase in _phases(case):
        for name, seconds in case.network.busy_s(phase.kind, phase.elements, phase.itemsize, phase.level).items():
            busy_s[name] += seconds
    yield "buffers", (case := replace(case, buffers=False))
    yield "overhead", (case := replace(case, overheads=False))
    yield "startups", (case := replace(case, network=case.network.without(startups=True)))
    yield "tail", (case := replace(case, schedule=_one_by_one(case.schedule)))
    for name in sorted(busy_s, key=lambda name: busy_s[name]):
        yield name, (case := replace(case, network=case.network.without(link=name)))
    yield "software", (case := replace(case, network=case.network.without(software=True)))
    yield "straggler", replace(case, straggler=False)


def _one_by_one(schedule: Schedule) -> Schedule:
    """Return the schedule with one bucket for every gradient."""
    buckets = [schedule.exchange_of(index) for index in range(len(schedule.buckets))]
    each = {gradient: buckets[index] for index, bucket in enumerate(schedule.buckets) for gradient in bucket}
    order = sorted(each)
    return dataclasses.replace(
        schedule, buckets=tuple((gradient,) for gradient in order), each=tuple(each[gradient] for gradient in order)
    )


def _iteration(case: _Case) -> tuple[float, Timeline]:
    profile, network, schedule = case.profile, case.network, case.schedule
    forward_s, backward_s, update_s = _pace(case)
    overheads = (profile.overheads if case.overheads and network.ranks > 1 else None) or _NO_OVERHEADS
    ready_s, thread_s = _ready(case, overheads, backward_s)
    sizes = schedule.bucket_bytes(profile)
    buckets = []
    for index, (cost, nbytes) in enumerate(zip(_costs(case), sizes, strict=True)):
        name, exchange = schedule.exchange_of(index)
        work = overheads.work.get(name)
        own_s = work.fixed_s + work.s_per_byte * nbytes if work is not None else 0.0
        stages = [stage for phases in cost.parts for stage in _stages(network, phases, own_s / cost.chunks)]
        waits, lane = exchange.waits and len(cost.phases) > 1, index % schedule.lanes
        buckets.append(Bucket(str(index), ready_s[index], lane, tuple(stages), cost.chunks, waits))
    timeline = simulate(buckets, capacities(network), network.in_flight, network.slowdown, network.crowding)
    end_s = thread_s
    for index, nbytes in enumerate(sizes):
        end_s = max(end_s, timeline.end_s[str(index)]) + overheads.copy_out_s_per_byte * nbytes
    waiting_s = _jitter_s(profile) if case.straggler and network.ranks > 1 else 0.0
    return _buffers_s(case) + forward_s + end_s + update_s + waiting_s, timeline


def _jitter_s(profile: Profile) -> float:
    """Return the time that a step waits for randomly late ranks, beyond the rank that is always slowest."""
    always_s = 0.0 if profile.slowest is None else profile.slowest.step_s - profile.step_s
    return max(0.0, profile.jitter_s - max(0.0, always_s))


def _pace(case: _Case) -> tuple[float, float, float]:
    """Return forward, backward and update of the slowest rank."""
    profile = case.profile
    slowest = profile.slowest if case.straggler and case.network.ranks > 1 else None
    if slowest is None or slowest.step_s <= profile.step_s:  # the medians' sum may exceed the step of every rank
        return profile.forward_s, profile.backward_s, profile.update_s
    return slowest.forward_s, slowest.backward_s, slowest.update_s


def _ready(case: _Case, overheads: Overheads, backward_s: float) -> tuple[list[float], float]:
    """Return when each bucket is handed to its lane, and when the thread that runs backward has finished."""
    profile, schedule = case.profile, case.schedule
    stretch = backward_s / profile.backward_s if profile.backward_s > 0 else 1.0
    bucket_of = {gradient: bucket for bucket, gradients in enumerate(schedule.buckets) for gradient in gradients}
    missing = [len(gradients) for gradients in schedule.buckets]
    ready_s = [0.0] * len(missing)
    late_s = now_s = 0.0
    for index, gradient in enumerate(profile.gradients):
        bucket = bucket_of[index]
        due_s = gradient.ready_s * stretch
        extra_s = overheads.copy_in_s_per_byte * gradient.bytes
        missing[bucket] -= 1
        if not missing[bucket] and profile.device != "cuda":
            extra_s += overheads.hook_s  # on CUDA the host is ahead of the device, so hooks do not delay a step
        late_s = (max(0.0, now_s - due_s) if case.paced else late_s) + extra_s
        now_s = due_s + late_s
        ready_s[bucket] = now_s
    # Buckets are launched in their order, even if a later one is full first.
    ready_s = list(itertools.accumulate(ready_s, max))
    return ready_s, max(now_s, backward_s + (0.0 if case.paced else late_s))


def _costs(case: _Case) -> list[Cost]:
    """Return the cost of each bucket's exchange."""
    if case.network.ranks < 2:
        return [Cost(()) for _ in case.schedule.buckets]
    exchanges = [case.schedule.exchange_of(index)[1] for index in range(len(case.schedule.buckets))]
    contents = zip(exchanges, case.schedule.contents(case.profile), strict=True)
    return [exchange.cost(numel, dtype, case.topology) for exchange, (numel, dtype) in contents]


def _phases(case: _Case) -> list[Phase]:
    return [phase for cost in _costs(case) for phase in cost.phases]


def _stages(network: Network, phases: tuple[Phase, ...], own_s: float) -> tuple[Work | Collective, ...]:
    """Return the stages of one chunk: its collectives, with equal parts of the exchange's own work around each."""
    flows = tuple(flow(network, phase) for phase in phases)
    if not flows or not own_s:
        return flows
    part = Work(own_s / (len(flows) + 1))
    return (part, *(stage for collective in flows for stage in (collective, part)))


def _buffers_s(case: _Case) -> float:
    if not case.buffers or case.network.ranks < 2:
        return 0.0
    return sum(solo_s(case.network, "broadcast", entry.bytes, 1) for entry in case.profile.buffers)
