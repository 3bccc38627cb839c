"""An event simulation of collectives on lanes, over links that they share.

A lane works its buckets off in order, as many at a time as it may have in flight. A bucket is a list of stages: work of
its own, or a collective; or several chunks with such a list each, which go through it one close behind the other. A
collective first takes its serial start-up; then its bytes flow, never faster than its own
start-ups and processors allow, and never faster than its share of the links it crosses. Shares are max-min: nobody gets
more of a full link than another who wants more, and what one cannot use goes to the others. A link that has rested has
credit: so many bytes pass before its rate counts.

Collectives that run at the same time slow each other's start-ups down, and may get less out of a link together than one
after the other; by how much was measured (`Network.overlap`).

Only busiest links are simulated, one of each kind, so the time this takes does not depend on the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

_EPSILON = 1e-12
_PEAK = 20.0
"""How many times its rate a link carries while it has credit: no wire is infinitely fast."""


@dataclass(frozen=True)
class Work:
    """A bucket's own computation on its lane."""

    seconds: float


@dataclass(frozen=True)
class Collective:
    """One collective, as the links see it."""

    kind: str
    level: str
    serial_s: float
    """Of the start-up, what passes before bytes flow."""
    spread_s: float
    """The least that the flow takes after that, alone and on links of any speed."""
    load_bytes: Mapping[str, float]
    """Through the busiest link of each kind."""


@dataclass(frozen=True)
class Bucket:
    """What a lane is given, and when."""

    name: str
    ready_s: float
    lane: int
    stages: tuple[Work | Collective, ...]
    """Of its first chunk, then of its second, and so on."""
    chunks: int = 1
    waits: bool = False
    """It holds its lane until it has ended."""

    @property
    def each(self) -> int:
        """Stages of a chunk."""
        return len(self.stages) // self.chunks


@dataclass(frozen=True)
class Span:
    """When one stage of one bucket ran."""

    bucket: str
    lane: int
    what: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """When everything happened. `spans` are in the order in which they ended."""

    spans: tuple[Span, ...]
    end_s: Mapping[str, float]
    """By bucket."""


@dataclass(frozen=True)
class Capacity:
    """A link: its rate, and the credit that it has after a rest."""

    bytes_per_s: float
    burst_bytes: float = 0.0


@dataclass
class _Active:
    """A stage that runs."""

    bucket: Bucket
    stage: int
    started_s: float
    serial_left_s: float
    share_left: float = 1.0
    """Of the flow, or of the work."""
    speed: float = 0.0
    """Share per second."""
    serial: bool = False


@dataclass
class _LinkState:
    capacity: Capacity
    credit_bytes: float = field(init=False)
    used_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        self.credit_bytes = self.capacity.burst_bytes

    @property
    def limited(self) -> bool:
        return self.credit_bytes <= _EPSILON * (1 + self.capacity.burst_bytes)

    @property
    def offered_bytes_per_s(self) -> float:
        return self.capacity.bytes_per_s * (1.0 if self.limited else _PEAK)

    def pass_time(self, seconds: float) -> None:
        gained = (self.capacity.bytes_per_s - self.used_bytes_per_s) * seconds
        self.credit_bytes = min(self.capacity.burst_bytes, max(0.0, self.credit_bytes + gained))

    def until_empty_s(self) -> float:
        drain = self.used_bytes_per_s - self.capacity.bytes_per_s
        return math.inf if self.limited or drain <= 0 else self.credit_bytes / drain


def simulate(
    buckets: Sequence[Bucket],
    links: Mapping[str, Capacity],
    in_flight: int = 1,
    slowdown: Callable[[int], float] = lambda streams: 1.0,
    crowding: Callable[[int], float] = lambda streams: 1.0,
    chunks_in_flight: int = 1,
) -> Timeline:
    """Runs `buckets`, each lane in the order they are given, and tells when each stage started and ended.

    `in_flight`: buckets that a lane works on at a time; `chunks_in_flight`: chunks of one bucket that one of its stages
    does. `slowdown` and `crowding`: how much longer start-ups and bytes take while so many collectives run.
    """
    return _Simulation(buckets, links, in_flight, slowdown, crowding, chunks_in_flight).run()


class _Simulation:
    def __init__(
        self,
        buckets: Sequence[Bucket],
        links: Mapping[str, Capacity],
        in_flight: int,
        slowdown: Callable[[int], float],
        crowding: Callable[[int], float],
        chunks_in_flight: int,
    ) -> None:
        self._queues: dict[int, list[Bucket]] = {}
        for bucket in reversed(buckets):
            self._queues.setdefault(bucket.lane, []).append(bucket)
        self._links = {name: _LinkState(capacity) for name, capacity in links.items()}
        self._in_flight, self._slowdown, self._crowding = in_flight, slowdown, crowding
        self._chunks_in_flight = chunks_in_flight
        self._running: dict[int, dict[str, int]] = {lane: {} for lane in self._queues}
        """By lane: buckets under way, and how many of their stages are still to end."""
        self._held: dict[int, bool] = {}
        """By lane: whether the last bucket that it took holds it."""
        self._ended: set[tuple[str, int]] = set()
        self._now_s = 0.0
        self._active: list[_Active] = []
        self._spans: list[Span] = []
        self._end_s: dict[str, float] = {}

    def run(self) -> Timeline:
        while True:
            self._admit()
            if not self._active and not any(self._queues.values()):
                return Timeline(tuple(self._spans), dict(self._end_s))
            self._set_speeds()
            self._advance(self._next_event_s())

    def _admit(self) -> None:
        for lane, queue in self._queues.items():
            running = self._running[lane]
            while queue and self._open(lane) and queue[-1].ready_s <= self._now_s + _EPSILON:
                bucket = queue.pop()
                if not bucket.stages:
                    self._end_s[bucket.name] = self._now_s
                    continue
                running[bucket.name] = len(bucket.stages)
                self._held[lane] = bucket.waits
                for chunk in range(min(self._chunks_in_flight, bucket.chunks)):
                    self._begin(bucket, chunk * bucket.each)

    def _open(self, lane: int) -> bool:
        """Whether the lane takes another bucket."""
        running = self._running[lane]
        return len(running) < self._in_flight and not (running and self._held[lane])

    def _begin(self, bucket: Bucket, stage: int) -> None:
        current = bucket.stages[stage]
        serial_s = current.serial_s if isinstance(current, Collective) else 0.0
        self._active.append(_Active(bucket, stage, self._now_s, serial_s))

    def _follow(self, bucket: Bucket, stage: int) -> None:
        """Starts what waited for a stage to end: the chunk's next one, and the same one of a later chunk."""
        chunk, place = divmod(stage, bucket.each)
        if place + 1 < bucket.each:
            before = chunk - self._chunks_in_flight
            if before < 0 or (bucket.name, before * bucket.each + place + 1) in self._ended:
                self._begin(bucket, stage + 1)
        later = chunk + self._chunks_in_flight
        if later < bucket.chunks and (place == 0 or (bucket.name, later * bucket.each + place - 1) in self._ended):
            self._begin(bucket, later * bucket.each + place)

    def _set_speeds(self) -> None:
        collectives = [one for one in self._active if isinstance(one.bucket.stages[one.stage], Collective)]
        slower = self._slowdown(max(1, len(collectives)))
        flowing: list[tuple[_Active, Collective, float]] = []
        for one in self._active:
            stage = one.bucket.stages[one.stage]
            one.serial = False
            if isinstance(stage, Work):
                one.speed = 1 / stage.seconds if stage.seconds > 0 else math.inf
            elif one.serial_left_s > _EPSILON:
                one.serial, one.speed = True, 1 / slower
            else:
                cap = 1 / (stage.spread_s * slower) if stage.spread_s > 0 else math.inf
                flowing.append((one, stage, cap))
        self._share_links(flowing)

    def _share_links(self, flowing: list[tuple[_Active, Collective, float]]) -> None:
        """Max-min: raise everyone's part of the fullest link alike, and fix those who can take no more."""
        crowding = self._crowding(max(1, len(flowing)))
        left = {name: state.offered_bytes_per_s / crowding for name, state in self._links.items()}
        open_flows = list(flowing)
        while open_flows:
            # Each link offers equal parts to the flows that are still open; a flow takes its worst offer.
            users = {name: sum(1 for _, stage, _ in open_flows if stage.load_bytes.get(name)) for name in left}
            offers = [_worst_offer(stage, left, users) for _, stage, _ in open_flows]
            content = [place for place, (_, _, cap) in enumerate(open_flows) if cap <= offers[place][0]]
            # If nobody can do without its part, the fullest link is the first to be settled.
            fixed = content or [min(range(len(offers)), key=lambda place: offers[place][1])]
            for place in fixed:
                one, stage, cap = open_flows[place]
                one.speed = min(cap, offers[place][0])
                for name, load in stage.load_bytes.items():
                    if load and name in left:
                        left[name] = max(0.0, left[name] - one.speed * load)
            open_flows = [flow for place, flow in enumerate(open_flows) if place not in fixed]
        for name, state in self._links.items():
            state.used_bytes_per_s = crowding * sum(
                one.speed * stage.load_bytes.get(name, 0.0) for one, stage, _ in flowing if math.isfinite(one.speed)
            )

    def _next_event_s(self) -> float:
        """Seconds until something changes."""
        waits = [_left_s(one) for one in self._active]
        waits += [state.until_empty_s() for state in self._links.values()]
        for lane, queue in self._queues.items():
            if queue and self._open(lane):
                waits.append(queue[-1].ready_s - self._now_s)
        return max(0.0, min(waits))

    def _advance(self, seconds: float) -> None:
        self._now_s += seconds
        for state in self._links.values():
            empties = state.until_empty_s() <= seconds * (1 + 1e-9)
            state.pass_time(seconds)
            if empties:
                state.credit_bytes = 0.0
        done = []
        for one in self._active:
            ends = _left_s(one) <= seconds * (1 + 1e-9) + _EPSILON
            if one.serial:
                one.serial_left_s = 0.0 if ends else one.serial_left_s - one.speed * seconds
            elif ends:
                done.append(one)
            else:
                one.share_left -= one.speed * seconds
        for one in done:
            self._active.remove(one)
            self._finish(one)

    def _finish(self, one: _Active) -> None:
        stage = one.bucket.stages[one.stage]
        what = stage.kind if isinstance(stage, Collective) else "work"
        bucket = one.bucket
        self._spans.append(Span(bucket.name, bucket.lane, what, one.started_s, self._now_s))
        self._ended.add((bucket.name, one.stage))
        running = self._running[bucket.lane]
        running[bucket.name] -= 1
        if not running[bucket.name]:
            del running[bucket.name]
            self._end_s[bucket.name] = self._now_s
        self._follow(bucket, one.stage)


def _worst_offer(stage: Collective, left: Mapping[str, float], users: Mapping[str, int]) -> tuple[float, float]:
    """The least of what its links offer a flow: as its own speed, and as a part of that link."""
    offers = [
        (left[name] / users[name] / load, left[name] / users[name])
        for name, load in stage.load_bytes.items()
        if load and name in left
    ]
    return min(offers, default=(math.inf, math.inf))


def _left_s(one: _Active) -> float:
    if one.serial:
        return one.serial_left_s / one.speed
    if math.isinf(one.speed):
        return 0.0
    return one.share_left / one.speed if one.speed > 0 else math.inf
