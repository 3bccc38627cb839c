"""Predict the time of one training step on a cluster, and what it loses to each cause. A step on the slowest rank
consists of: DDP's broadcast of buffers; forward; backward, whose thread copies gradients into buckets and hands full
ones to their lanes; the exchanges on the lanes; copies out of the buckets; the optimizer. If updates are exchanged, the
optimizer comes before the exchanges, and the time of a step is the mean over the steps in which all parts of the
weights are exchanged once. An exchange that overlaps with the next forward is in `predict.overlap`."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from syncline.exchange import Cost, Topology, UsesLevels
from syncline.predict import overlap
from syncline.predict.exchange_time import capacities, flow, solo_s, topology_of
from syncline.predict.schedule import Schedule
from syncline.predict.timeline import Bucket, Collective, Timeline, Work, simulate
from syncline.records.link_costs import LINKS
from syncline.records.network import Network
from syncline.records.profile import Contention, Overheads, Profile

_COPIES_BEFORE, _COPIES_AFTER = 2, 3
"""Passes over a fragment, each about as long as a copy, to compute its update and to apply the result."""
_NO_OVERHEADS = Overheads(copy_in_s_per_byte=0.0, copy_out_s_per_byte=0.0, hook_s=0.0, work={})


class Losses(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Seconds of a step beyond the computation of a typical rank, by cause."""

    startups_s: float  # start-ups of collectives
    links_s: dict[str, float]  # busy links, by kind: `host`, `rack`, `local`
    tail_s: float  # gradients that wait for their bucket to fill, and so are sent after backward has ended
    straggler_s: float  # waiting for slower ranks
    overhead_s: float  # copies into and out of buckets, hooks, and the exchanges' own computation
    buffers_s: float  # broadcasts of buffers before forward
    software_s: float  # collectives on infinitely fast links: processors, and protocols that do not fill a link

    @classmethod
    def of(cls, whole_s: float, compute_s: float, without: Iterable[tuple[str, float]]) -> Losses:
        """Attribute to each cause the time that removing it saves, so that losses add up. `without` has the causes, and
        the time of the step without them and all earlier ones; the last time does not count."""
        causes, others_s = zip(*without, strict=True)
        # Removing a cause may make a step longer: single gradients are padded one by one. That cause then counts as 0.
        times = list(itertools.accumulate([whole_s, *others_s], min))
        times = [*(max(compute_s, time_s) for time_s in times[:-1]), compute_s]
        lost = {name: before - after for name, (before, after) in zip(causes, itertools.pairwise(times), strict=True)}
        links_s = {name: lost.pop(name) for name in causes if name in LINKS}
        names = [field.removesuffix("_s") for field in cls.__struct_fields__ if field != "links_s"]
        return cls(links_s=links_s, **{f"{name}_s": lost.get(name, 0.0) for name in names})

    @property
    def by_cause(self) -> dict[str, float]:
        """Seconds by cause; a link's cause is its name."""
        single = ("startups", "tail", "straggler", "overhead", "buffers", "software")
        return {name: getattr(self, f"{name}_s") for name in single} | self.links_s


@dataclass(frozen=True)
class Prediction:
    """One step of one schedule on one cluster. Properties that need further simulations are computed on first use."""

    profile: Profile
    network: Network
    schedule: Schedule
    paced: bool
    topology: Topology  # with all causes, so that exchanges choose the same paths when a cause is removed
    overheads: bool = True  # whether this cause of loss is included, as those below
    straggler: bool = True
    buffers: bool = True
    iteration_s: float = field(init=False)
    timeline: Timeline = field(init=False)  # the exchanges, in seconds from the start of backward

    def __post_init__(self) -> None:
        for name, value in zip(("iteration_s", "timeline"), self._simulated(), strict=True):
            object.__setattr__(self, name, value)

    @property
    def hosts(self) -> int:
        return self.network.hosts

    @property
    def ranks(self) -> int:
        return self.network.ranks

    @property
    def compute_s(self) -> float:
        """Time of the step on a typical rank alone."""
        return self.profile.step_s

    @property
    def backward_s(self) -> float:
        """Backward of the slowest rank."""
        return self._pace[1]

    @property
    def scaling(self) -> float:
        """Scaling efficiency: time of computation divided by the time of the step; 1 if nothing is lost."""
        return self.compute_s / self.iteration_s if self.iteration_s else 1.0

    @property
    def sent_bytes(self) -> int:
        """Bytes per step sent by the busiest rank; for updates, the mean over the steps."""
        costs = zip(self._costs, self.schedule.periods, strict=True)
        return round(sum(phase.sent_bytes / period for cost, period in costs for phase in cost.phases))

    @property
    def link_bytes(self) -> Mapping[str, int]:
        """Bytes per step through the busiest link of each kind; for updates, the mean over the steps."""
        total = {link.name: 0.0 for link in self.network.links}
        for cost, period in zip(self._costs, self.schedule.periods, strict=True):
            for phase in cost.phases:
                loads = self.network.loads(phase.kind, phase.elements, phase.itemsize, phase.level)
                for name, nbytes in loads.items():
                    total[name] += nbytes / period
        return {name: round(nbytes) for name, nbytes in total.items()}

    @functools.cached_property
    def low_s(self) -> float:
        """Time of the step at the low ends of the network's intervals and the profile's quartiles."""
        bound, spread = dataclasses.replace(self, network=self.network.bound(high=False)), self.profile.spread
        faster_s = 0.0 if spread is None else min(0.0, spread.low_s - self.compute_s)
        return max(self.compute_s, min(bound.iteration_s, self.iteration_s)) + faster_s

    @functools.cached_property
    def high_s(self) -> float:
        """Time of the step at the high ends of the network's intervals and the profile's quartiles."""
        bound, spread = dataclasses.replace(self, network=self.network.bound(high=True)), self.profile.spread
        slower_s = 0.0 if spread is None else max(0.0, spread.high_s - self.compute_s)
        return max(bound.iteration_s, self.iteration_s) + slower_s

    @functools.cached_property
    def losses(self) -> Losses:
        """Remove one cause after the other, and attribute the time that each saves to it."""
        without = ((name, other.iteration_s) for name, other in self._without_causes())
        return Losses.of(self.iteration_s, self.compute_s, without)

    def _without_causes(self) -> Iterator[tuple[str, Prediction]]:
        """Yield the causes of loss, and the step without them and all earlier ones. The busiest link is the last."""
        replace, link_bytes = dataclasses.replace, self.link_bytes
        busy_s = {link.name: link_bytes[link.name] / link.bytes_per_s for link in self.network.links}
        yield "buffers", (left := replace(self, buffers=False))
        yield "overhead", (left := replace(left, overheads=False))
        yield "startups", (left := replace(left, network=left.network.without(startups=True)))
        yield "tail", (left := replace(left, schedule=self.schedule.one_by_one()))
        for name in sorted(busy_s, key=lambda name: busy_s[name]):
            yield name, (left := replace(left, network=left.network.without(link=name)))
        yield "software", (left := replace(left, network=left.network.without(software=True)))
        yield "straggler", replace(left, straggler=False)

    def _simulated(self) -> tuple[float, Timeline]:
        """Return the time of the step, and the timeline of its exchanges."""
        if self.schedule.updates is not None:
            return self._simulated_updates(self.schedule.updates.delay)
        profile, schedule = self.profile, self.schedule
        forward_s, backward_s, update_s = self._pace
        ready_s, thread_s = self._ready(self._own, backward_s)
        buffers = profile.buffers if self.buffers else ()
        waits_s = self._contention.exchanges["dense"].alone.fixed_s if self._contention is not None else 0.0
        buffers_s = sum(waits_s + solo_s(self.network, "broadcast", entry.bytes, 1) for entry in buffers)
        if schedule.overlaps and self.ranks > 1:
            contents = schedule.contents(profile)
            halves = (schedule.exchange, schedule.gather)
            found = list(overlap.reductions(self.network, self.topology, contents, ready_s, *halves))
            found = [bucket.after_work(work_s) for bucket, work_s in zip(found, self._own_work_s, strict=True)]
            lossless = schedule.exchange.lossless
            whole = overlap.best_whole(found, forward_s, thread_s, update_s) if lossless else frozenset[int]()
            step_s, timeline = overlap.overlapped(found, forward_s, thread_s, whole, update_s)
            return buffers_s + step_s + self._waiting_s, timeline
        timeline = self._exchanges(range(len(schedule.buckets)), ready_s, thread_s)
        end_s = thread_s + timeline.lost_s
        for index, nbytes in enumerate(schedule.bucket_bytes(profile)):
            end_s = max(end_s, timeline.end_s[str(index)]) + self._own.copy_out_s_per_byte * nbytes
        return buffers_s + forward_s + end_s + update_s + self._waiting_s, timeline

    def _simulated_updates(self, delay: int) -> tuple[float, Timeline]:
        """Return the mean time of a step in which updates are exchanged, and the timeline of the busiest one.

        Each step computes, applies the results that are due, and sends the fragments whose turn it is. With a delay,
        what was sent goes on during the next steps, and the exchanges of one step wait for those of the last.
        """
        fragments, compute_s = self.schedule.fragments, sum(self._pace)
        sizes = self.schedule.bucket_bytes(self.profile)
        before_s, after_s = (n * self._own.copy_in_s_per_byte for n in (_COPIES_BEFORE, _COPIES_AFTER))
        turns: dict[tuple[int, ...], Timeline] = {}
        busiest = Timeline((), {})
        period, most_bytes = max(self.schedule.periods, default=1), -1
        flights: deque[tuple[int, int, float]] = deque()  # fragment, step in which its result is due, end of exchange
        now_s = free_s = began_s = lost_s = 0.0
        for step in range(2 * period):
            if step == period:
                began_s = now_s  # lanes are as busy as they will stay
            now_s += compute_s + lost_s
            due = tuple(
                index
                for index, fragment in enumerate(fragments)
                if (step - fragment.turn) % fragment.period == 0 and (self.buffers or not fragment.is_buffers)
            )
            now_s = self._applied_s(flights, step, now_s, after_s, sizes)
            if due:
                ready_s = list(itertools.accumulate(before_s * sizes[index] for index in due))
                turns[due] = turns.get(due) or self._exchanges(due, ready_s, delay * compute_s)
                lost_s = turns[due].lost_s
                # With a delay, a rank that is late now has steps to catch up before another one waits for it.
                now_s += (0.0 if delay else self._waiting_s) + self._own.hook_s * len(due)
                later_s = max(0.0, free_s - now_s)  # lanes still send what the last step sent
                ends = [(index, step + delay, now_s + later_s + turns[due].end_s[str(index)]) for index in due]
                flights.extend(ends)
                free_s = max(end_s for *_, end_s in ends)
                now_s += ready_s[-1]
                if (sent := sum(sizes[index] for index in due)) > most_bytes:
                    most_bytes, busiest = sent, turns[due]
            now_s = self._applied_s(flights, step, now_s, after_s, sizes)
        return (now_s - began_s) / period, busiest.shifted(self._pace[1] + self._pace[2])

    def _applied_s(
        self, flights: deque[tuple[int, int, float]], step: int, now_s: float, s_per_byte: float, sizes: Sequence[int]
    ) -> float:
        """Apply the results that are due in this step, and return the time when that is done."""
        while flights and flights[0][1] <= step:
            index, _, end_s = flights.popleft()
            now_s = max(now_s, end_s) + s_per_byte * sizes[index]
        return now_s

    def _exchanges(self, indices: Sequence[int], ready_s: Sequence[float], computing_s: float = 0.0) -> Timeline:
        """Simulate the exchanges of these buckets or fragments, which are handed to their lanes at these times.
        Meanwhile, the model computes for `computing_s`."""
        network, schedule, contention = self.network, self.schedule, self._contention
        exchanges, buckets = schedule.bucket_exchanges, []
        for index, bucket_ready_s in zip(indices, ready_s, strict=True):
            _, exchange = exchanges[index]
            cost, own = self._costs[index], self._own_work[index]
            stages: list[Work | Collective] = []
            for phases in cost.parts:  # equal parts of the exchange's own work are around each collective of a chunk
                part = own.part(cost.chunks * (len(phases) + 1))
                flows = [stage for phase in phases for stage in (flow(network, phase), part)]
                stages += [part, *flows] if own.seconds else flows[::2]
            waits, lane = exchange.waits and len(cost.phases) > 1, index % schedule.lanes
            buckets.append(Bucket(str(index), bucket_ready_s, lane, tuple(stages), cost.chunks, waits))
        links, slowdown, crowding = capacities(network), network.slowdown, network.crowding
        if contention is None:
            return simulate(buckets, links, network.in_flight, slowdown, crowding)
        taken_s_per_byte, sending = contention.taken_s_per_byte, contention.sending
        return simulate(buckets, links, network.in_flight, slowdown, crowding, computing_s, taken_s_per_byte, sending)

    @functools.cached_property
    def _own_work(self) -> list[Work]:
        """Each bucket's own computation, in one piece."""
        if self._contention is None:
            return [Work(seconds) for seconds in self._own_work_s]
        own = []
        sizes = zip(self.schedule.bucket_exchanges, self.schedule.bucket_bytes(self.profile), strict=True)
        for quiet_s, ((name, _), nbytes) in zip(self._own_work_s, sizes, strict=True):
            loaded = self._contention.exchanges.get(name)
            if loaded is None:  # an exchange that was not measured waits as long as an all-reduce does
                loaded, passes_s, nbytes = self._contention.exchanges["dense"], quiet_s, 0
            else:
                passes_s = 0.0
            alone_s, beside_s = passes_s + loaded.alone.of(nbytes), passes_s + loaded.beside.of(nbytes)
            own.append(Work(alone_s, beside_s, loaded.crowded, loaded.taken))
        return own

    @property
    def _contention(self) -> Contention | None:
        """The measured contention. None if it was not measured, or is not included, or computation is replayed."""
        included = self.overheads and not self.paced and self.ranks > 1
        return self.profile.contention if included else None

    @functools.cached_property
    def _own_work_s(self) -> list[float]:
        """The time of each bucket's own computation, around its collectives."""
        sizes = zip(self.schedule.bucket_exchanges, self.schedule.bucket_bytes(self.profile), strict=True)
        works = [(self._own.work.get(name), nbytes) for (name, _), nbytes in sizes]
        return [0.0 if work is None else work.of(nbytes) for work, nbytes in works]

    @property
    def _own(self) -> Overheads:
        """The overheads, if they are included."""
        return (self.profile.overheads if self.overheads and self.ranks > 1 else None) or _NO_OVERHEADS

    @property
    def _waiting_s(self) -> float:
        """Time that a step waits for randomly late ranks, beyond the one that is always slowest."""
        if not self.straggler or self.ranks < 2:
            return 0.0
        always_s = 0.0 if self.profile.slowest is None else self.profile.slowest.step_s - self.profile.step_s
        return max(0.0, self.profile.jitter_s - max(0.0, always_s))

    @property
    def _pace(self) -> tuple[float, float, float]:
        """Forward, backward and update of the slowest rank."""
        profile = self.profile
        slowest = profile.slowest if self.straggler and self.ranks > 1 else None
        if slowest is None or slowest.step_s <= profile.step_s:  # the medians' sum may exceed the step of every rank
            return profile.forward_s, profile.backward_s, profile.update_s
        return slowest.forward_s, slowest.backward_s, slowest.update_s

    def _ready(self, overheads: Overheads, backward_s: float) -> tuple[list[float], float]:
        """Return when each bucket is handed to its lane, and when the thread that runs backward has finished."""
        profile, buckets = self.profile, self.schedule.buckets
        stretch = backward_s / profile.backward_s if profile.backward_s > 0 else 1.0
        bucket_of = {gradient: bucket for bucket, gradients in enumerate(buckets) for gradient in gradients}
        missing = [len(gradients) for gradients in buckets]
        ready_s = [0.0] * len(missing)
        late_s = now_s = 0.0
        for index, gradient in enumerate(profile.gradients):
            bucket, due_s = bucket_of[index], gradient.ready_s * stretch
            extra_s = overheads.copy_in_s_per_byte * gradient.bytes
            missing[bucket] -= 1
            if not missing[bucket] and profile.device != "cuda":
                extra_s += overheads.hook_s  # on CUDA the host is ahead of the device, so hooks do not delay a step
            late_s = (max(0.0, now_s - due_s) if self.paced else late_s) + extra_s
            ready_s[bucket] = now_s = due_s + late_s
        # Buckets are launched in their order, even if a later one is full first.
        ready_s = list(itertools.accumulate(ready_s, max))
        return ready_s, max(now_s, backward_s + (0.0 if self.paced else late_s))

    @functools.cached_property
    def _costs(self) -> list[Cost]:
        """The cost of each bucket's exchange."""
        if self.ranks < 2:
            return [Cost(())] * len(self.schedule.buckets)
        schedule, found = self.schedule, self.schedule.contents(self.profile)
        if schedule.overlaps:
            return [
                overlap.cost(schedule.exchange, schedule.gather, numel, dtype, self.topology) for numel, dtype in found
            ]
        contents = zip(schedule.bucket_exchanges, found, strict=True)
        return [exchange.cost(numel, dtype, self.topology) for (_, exchange), (numel, dtype) in contents]


def predict(
    profile: Profile, network: Network, schedule: Schedule, *, paced: bool = False, topology: Topology | None = None
) -> Prediction:
    """Predict the time of one step. With `paced`, gradients are ready at fixed times, as in a replayed profile, even if
    copies and hooks delay the thread that runs backward. `topology` is the network's, to save time in repeated
    predictions."""
    if topology is None:
        using_levels = [exchange for exchange in schedule.exchanges.values() if isinstance(exchange, UsesLevels)]
        tree = using_levels[0].tree(network.tree, network.ranks) if using_levels else network.tree
        topology = topology_of(network, tree)
    return Prediction(profile, network, schedule, paced, topology)
