"""An event simulation of collectives on lanes, over shared links.

A collective begins with its serial start-up. Then its bytes flow at a speed that is limited by its own start-ups and
processors, and by its share of the links (max-min fairness), of which only the busiest of each kind is simulated. An
idle link carries its burst before its rate applies. Concurrent collectives slow each other down (`Network.overlap`).

The model computes meanwhile, and buckets are ready when its computation has come so far. Where both share processors, a
bucket's own work takes longer until the computation has ended, and the computation loses a part of its speed to that
work and to the bytes that are sent.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

_EPSILON = 1e-12
MOST_TAKEN = 0.9
"""Computation keeps at least the rest of its speed."""
_PEAK = 20.0  # speed of a link while it has credit, as a multiple of its rate


@dataclass(frozen=True)
class Work:
    """A bucket's own computation on its lane."""

    seconds: float
    beside_s: float | None = None  # while the model computes; None if that makes no difference
    crowded: float = 1.0  # factor for `seconds` while another lane works, too
    taken: float = 0.0  # the part of its speed that the model's computation loses meanwhile

    def part(self, count: int) -> Work:
        """Return one of `count` equal parts."""
        beside_s = None if self.beside_s is None else self.beside_s / count
        return dataclasses.replace(self, seconds=self.seconds / count, beside_s=beside_s)


@dataclass(frozen=True)
class Collective:
    """One collective and its load on the links."""

    kind: str
    level: str
    serial_s: float  # the part of the start-up before bytes flow
    spread_s: float  # time of the flow after that, alone and on infinitely fast links
    load_bytes: Mapping[str, float]  # through the busiest link of each kind
    sent_bytes: float = 0.0  # by the busiest rank


@dataclass(frozen=True)
class Bucket:
    """A bucket and the time at which it is handed to its lane."""

    name: str
    ready_s: float  # of computation without interference
    lane: int
    stages: tuple[Work | Collective, ...]  # of the first chunk, then of the second, and so on
    chunks: int = 1
    waits: bool = False  # it blocks its lane until it has ended

    @property
    def each(self) -> int:
        """Number of stages of one chunk."""
        return len(self.stages) // self.chunks


@dataclass(frozen=True)
class Span:
    """Start and end of one stage of one bucket."""

    bucket: str
    lane: int
    what: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """The result of a simulation."""

    spans: tuple[Span, ...]  # sorted by their end
    end_s: Mapping[str, float]  # by bucket
    forward: tuple[tuple[float, float], ...] = ()  # when the next forward computes, if exchanges extend into it
    lost_s: float = 0.0  # computing time that the exchanges have taken from the model

    def shifted(self, seconds: float) -> Timeline:
        """Return the timeline with all times later by some seconds."""
        spans = (
            dataclasses.replace(span, start_s=span.start_s + seconds, end_s=span.end_s + seconds) for span in self.spans
        )
        forward = tuple((start_s + seconds, end_s + seconds) for start_s, end_s in self.forward)
        end_s = {name: end_s + seconds for name, end_s in self.end_s.items()}
        return Timeline(tuple(spans), end_s, forward, self.lost_s)


@dataclass(frozen=True)
class Capacity:
    """A link: its rate, and its credit when idle."""

    bytes_per_s: float
    burst_bytes: float = 0.0


@dataclass
class _Active:
    """A running stage."""

    bucket: Bucket
    stage: int
    current: Work | Collective
    started_s: float
    serial_left_s: float
    share_left: float = 1.0  # of the flow, or of the work
    speed: float = 0.0  # share per second; in a serial start-up, start-up seconds per second
    serial: bool = False

    def left_s(self) -> float:
        """Return the seconds until the start-up or the stage ends, at the current speed."""
        left = self.serial_left_s if self.serial else self.share_left
        return left / self.speed if self.speed > 0 else math.inf


@dataclass
class _LinkState:
    capacity: Capacity
    credit_bytes: float
    used_bytes_per_s: float = 0.0

    @property
    def limited(self) -> bool:
        return self.credit_bytes <= _EPSILON * (1 + self.capacity.burst_bytes)

    def until_empty_s(self) -> float:
        drain = self.used_bytes_per_s - self.capacity.bytes_per_s
        return math.inf if self.limited or drain <= 0 else self.credit_bytes / drain

    def pass_time(self, seconds: float) -> None:
        gained = (self.capacity.bytes_per_s - self.used_bytes_per_s) * seconds
        empties = self.until_empty_s() <= seconds * (1 + 1e-9)
        self.credit_bytes = 0.0 if empties else min(self.capacity.burst_bytes, max(0.0, self.credit_bytes + gained))


def simulate(
    buckets: Sequence[Bucket],
    links: Mapping[str, Capacity],
    in_flight: int = 1,
    slowdown: Callable[[int], float] = lambda streams: 1.0,
    crowding: Callable[[int], float] = lambda streams: 1.0,
    computing_s: float = 0.0,
    taken_s_per_byte: float = 0.0,
    sending: float = 1.0,
) -> Timeline:
    """Simulate buckets, those of one lane in the order in which it starts them, over the busiest link of each kind.
    `in_flight` is the number of buckets that a lane runs at a time, and of chunks of a bucket in the same stage. While
    a number of collectives runs, start-ups take longer by the factor `slowdown`, and bytes by the factor `crowding`.
    The model computes for `computing_s`, and loses `taken_s_per_byte` for each byte that a rank sends meanwhile. Bytes
    take longer by the factor `sending` then."""
    simulation = _Simulation(in_flight, slowdown, crowding, computing_s, taken_s_per_byte, sending)
    for bucket in reversed(buckets):
        simulation.queues.setdefault(bucket.lane, []).append(bucket)
    simulation.links = {name: _LinkState(capacity, capacity.burst_bytes) for name, capacity in links.items()}
    while simulation.admit():
        simulation.set_speeds()
        simulation.advance()
    return Timeline(tuple(simulation.spans), simulation.end_s, lost_s=simulation.now_s - simulation.computed_s)


class _Simulation:
    def __init__(
        self,
        in_flight: int,
        slowdown: Callable[[int], float],
        crowding: Callable[[int], float],
        computing_s: float,
        taken_s_per_byte: float,
        sending: float,
    ) -> None:
        self.in_flight, self.slowdown, self.crowding = in_flight, slowdown, crowding
        self.computing_s, self.taken_s_per_byte, self.sending = computing_s, taken_s_per_byte, sending
        self.computed_s, self.pace = 0.0, 1.0  # how far the model has computed, and its speed
        self.queues: dict[int, list[Bucket]] = {}  # lane → buckets that it has not started, the next one last
        self.links: dict[str, _LinkState] = {}
        # Lane → running buckets → number of stages that have not ended.
        self.running: dict[int, dict[str, int]] = collections.defaultdict(dict)
        self.blocked: dict[int, bool] = {}  # lane → whether the last bucket that it started blocks it
        self.ended: set[tuple[str, int]] = set()
        self.now_s = 0.0
        self.active: list[_Active] = []
        self.spans: list[Span] = []
        self.end_s: dict[str, float] = {}

    def admit(self) -> bool:
        """Start the buckets that are ready on lanes that are free. Return whether anything is left to do."""
        for lane, queue in self.queues.items():
            while queue and self._open(lane) and queue[-1].ready_s <= self.computed_s + _EPSILON:
                bucket = queue.pop()
                if not bucket.stages:
                    self.end_s[bucket.name] = self.now_s
                    continue
                self.running[lane][bucket.name] = len(bucket.stages)
                self.blocked[lane] = bucket.waits
                for chunk in range(min(self.in_flight, bucket.chunks)):
                    self._begin(bucket, chunk * bucket.each)
        return bool(self.active) or any(self.queues.values())

    def _open(self, lane: int) -> bool:
        """Return whether the lane can start another bucket."""
        running = self.running[lane]
        return len(running) < self.in_flight and not (running and self.blocked[lane])

    def _begin(self, bucket: Bucket, stage: int) -> None:
        current = bucket.stages[stage]
        serial_s = current.serial_s if isinstance(current, Collective) else 0.0
        self.active.append(_Active(bucket, stage, current, self.now_s, serial_s))

    @property
    def computes(self) -> bool:
        return self.computed_s < self.computing_s - _EPSILON

    def set_speeds(self) -> None:
        slowdown = self.slowdown(max(1, sum(isinstance(active.current, Collective) for active in self.active)))
        sending = self.sending if self.computes else 1.0
        flowing: list[tuple[_Active, Collective, float]] = []
        for active in self.active:
            stage = active.current
            active.serial = active.serial_left_s > _EPSILON
            if isinstance(stage, Work):
                seconds = self._work_s(stage)
                active.speed = 1 / seconds if seconds > 0 else math.inf
            elif active.serial:
                active.speed = 1 / slowdown
            else:
                spread_s = stage.spread_s * slowdown * sending
                flowing.append((active, stage, 1 / spread_s if spread_s > 0 else math.inf))
        self._share_links(flowing, sending)
        self.pace = self._pace([active for active, _, _ in flowing]) if self.computes else 1.0

    def _work_s(self, work: Work) -> float:
        """Return how long a work takes beside what runs now."""
        if self.computes and work.beside_s is not None:
            return work.beside_s
        others = sum(isinstance(active.current, Work) for active in self.active) > 1
        return work.seconds * work.crowded if others else work.seconds

    def _pace(self, flowing: Sequence[_Active]) -> float:
        """Return the speed at which the model computes beside what runs now."""
        pace = 1.0
        for active in self.active:
            if isinstance(active.current, Work):
                pace *= 1 - active.current.taken
        sent_per_s = 0.0
        for active in flowing:
            if isinstance(active.current, Collective) and math.isfinite(active.speed):
                sent_per_s += active.speed * active.current.sent_bytes
        return pace * max(1 - MOST_TAKEN, 1 - sent_per_s * self.taken_s_per_byte)

    def _share_links(self, flowing: list[tuple[_Active, Collective, float]], sending: float) -> None:
        """Share the links by max-min fairness: settle the flows that need less than their share, then the fullest link,
        and repeat with what is left."""
        crowding = self.crowding(max(1, len(flowing))) * sending
        left = {
            name: state.capacity.bytes_per_s * (1.0 if state.limited else _PEAK) / crowding
            for name, state in self.links.items()
        }
        open_flows = list(flowing)
        while open_flows:
            # Each link offers equal shares to its open flows; a flow gets the worst of its offers.
            users = {name: sum(1 for _, stage, _ in open_flows if stage.load_bytes.get(name)) for name in left}
            offers = []  # the flow's speed, and bytes per second of that link
            for _, stage, _ in open_flows:
                loads = [(name, load) for name, load in stage.load_bytes.items() if load and name in left]
                shares = [(left[name] / users[name] / load, left[name] / users[name]) for name, load in loads]
                offers.append(min(shares, default=(math.inf, math.inf)))
            settled = [index for index, (_, _, cap) in enumerate(open_flows) if cap <= offers[index][0]]
            # If every flow wants more than its share, settle the flow on the fullest link.
            settled = settled or [min(range(len(offers)), key=lambda index: offers[index][1])]
            for index in settled:
                active, stage, cap = open_flows[index]
                active.speed = min(cap, offers[index][0])
                for name, load in stage.load_bytes.items():
                    if load and name in left:
                        left[name] = max(0.0, left[name] - active.speed * load)
            open_flows = [flow for index, flow in enumerate(open_flows) if index not in settled]
        for name, state in self.links.items():
            finite = [(active, stage) for active, stage, _ in flowing if math.isfinite(active.speed)]
            used = sum(active.speed * stage.load_bytes.get(name, 0.0) for active, stage in finite)
            state.used_bytes_per_s = crowding * used

    def advance(self) -> None:
        """Let time pass until something changes."""
        waits = [active.left_s() for active in self.active]
        waits += [state.until_empty_s() for state in self.links.values()]
        waiting = [queue[-1].ready_s for lane, queue in self.queues.items() if queue and self._open(lane)]
        waits += [(ready_s - self.computed_s) / self.pace for ready_s in waiting]
        if self.computes:
            waits.append((self.computing_s - self.computed_s) / self.pace)
        seconds = max(0.0, min(waits))
        self.now_s += seconds
        self.computed_s += seconds * self.pace
        for state in self.links.values():
            state.pass_time(seconds)
        done = []
        for active in self.active:
            ends = active.left_s() <= seconds * (1 + 1e-9) + _EPSILON
            if active.serial:
                active.serial_left_s = 0.0 if ends else active.serial_left_s - active.speed * seconds
            elif ends:
                done.append(active)
            else:
                active.share_left -= active.speed * seconds
        for active in done:
            self.active.remove(active)
            self._finish(active)

    def _finish(self, active: _Active) -> None:
        bucket, stage = active.bucket, active.current
        what = stage.kind if isinstance(stage, Collective) else "work"
        self.spans.append(Span(bucket.name, bucket.lane, what, active.started_s, self.now_s))
        self.ended.add((bucket.name, active.stage))
        running = self.running[bucket.lane]
        running[bucket.name] -= 1
        if not running[bucket.name]:
            del running[bucket.name]
            self.end_s[bucket.name] = self.now_s
        # The chunk's next stage and the same stage of a later chunk may have waited for this one.
        position, window = active.stage % bucket.each, self.in_flight * bucket.each
        following, later = active.stage + 1, active.stage + window
        if position + 1 < bucket.each and (following <= window or (bucket.name, following - window) in self.ended):
            self._begin(bucket, following)
        if later < len(bucket.stages) and (position == 0 or (bucket.name, later - 1) in self.ended):
            self._begin(bucket, later)
