"""Turn the samples of a probe into a network: links, lines per collective, and the cost of running several at once.

This module needs no process group: rank 0 fits for all ranks.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from syncline.exchange import WORLD, wire
from syncline.measure.fit import Fit, Lines, fit
from syncline.records.link_costs import Collective, Link, Overlap, Point, Startup, Switch
from syncline.records.network import Network

STREAMS = (2, 4)
ITEM_BYTES = 4
SMALL = (4_000, 16_000)
"""Bytes at which the start-up is most of a collective's time."""
_LEAST_S_PER_BYTE = 1e-15
"""Lower limit for a slope, which may come out as 0 if only small sizes were measured."""
_USUALLY_IN_FLIGHT = 2
"""gloo gives each group two threads."""
_CROWDED = 1.05
"""Smaller ratios are noise."""
_SURPRISE = 0.35
"""By how much (as a logarithm) a number must fit better than the usual one, because the expected times are close."""

Key = tuple[Any, ...]
"""What was measured: a level, a collective, elements, …"""


def even_elements(size: float, ranks: int) -> int:
    """Return the number of elements of a buffer of about `size` bytes that splits evenly over the ranks."""
    return max(1, round(size / ITEM_BYTES / ranks)) * ranks


@dataclass(frozen=True)
class Readings:
    """All samples of a probe, by what was measured."""

    backend: str
    hosts: tuple[int, ...]
    """The host of each rank."""
    seconds: dict[Key, list[float]] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return len(self.hosts)

    def add(self, key: Key, value: float) -> None:
        self.seconds.setdefault(key, []).append(value)

    def median(self, *key: object) -> float:
        return statistics.median(self.seconds[key])

    def sweep(self, level: str, kind: str) -> dict[int, list[float]]:
        """Return the samples of one collective, by elements."""
        return {key[2]: times for key, times in self.seconds.items() if key[:2] == (level, kind)}

    def large(self) -> int:
        """Return the bytes from which the link decides, not the start-up: the smallest size of the sweep that takes ten
        times as long as the smallest one."""
        times = {numel * ITEM_BYTES: statistics.median(v) for numel, v in self.sweep(WORLD, "all_reduce").items()}
        tiny_s = times[min(times)]
        return min((size for size, seconds in times.items() if seconds > 10 * tiny_s), default=max(times))

    def rate(self) -> float:
        """Estimate the bytes per second of a link, from the sweep's largest all-reduce."""
        largest = max(self.sweep(WORLD, "all_reduce"))
        return self._sent("all_reduce", largest, self.ranks) / self.median(WORLD, "all_reduce", largest)

    def _sent(self, kind: str, numel: int, ranks: int) -> int:
        return wire.sent_bytes(kind, numel, ITEM_BYTES, ranks, self.backend)

    def fitted(self, cluster: Network, levels: Mapping[str, int], kinds: Sequence[str], burst_bytes: float) -> Network:
        """Return `cluster`, which holds the topology, with fitted links and collectives.

        Args:
            cluster: A network without links and collectives.
            levels: The number of ranks at each level.
            kinds: The collectives that were measured.
            burst_bytes: The burst of the hosts' links.
        """
        fits = {
            (level, kind): fit(
                {self._sent(kind, numel, ranks): times for numel, times in self.sweep(level, kind).items()},
                bursts=burst_bytes > 0,
                switches=self.backend == "nccl",  # gloo uses one protocol for all sizes
            )
            for level, ranks in levels.items()
            for kind in kinds
        }
        linked = msgspec.structs.replace(
            cluster,
            links=_links(cluster, fits, burst_bytes),
            in_flight=self._in_flight(),
            overlap=self._overlap(fits[WORLD, "all_reduce"]),
            startups=tuple(
                Startup(ranks=key[1], seconds=statistics.median(times))
                for key, times in self.seconds.items()
                if key[0] == "startup"
            ),
        )
        collectives = tuple(
            self._collective(linked, level, levels[level], kind, fitted) for (level, kind), fitted in fits.items()
        )
        return msgspec.structs.replace(linked, collectives=collectives)

    def _collective(self, network: Network, level: str, ranks: int, kind: str, fitted: Fit) -> Collective:
        lines = fitted.lines
        numel = 1 << 20
        sent = self._sent(kind, numel, ranks)
        busy_s = network.busy_s(kind, numel, ITEM_BYTES, level)
        link = max(network.links, key=lambda link: busy_s.get(link.name, 0.0))
        link_s_per_byte = busy_s[link.name] / sent
        shared = self._shared_s_per_byte(kind) if level == WORLD else None
        late = lines.late_s_per_byte if shared is None else min(lines.late_s_per_byte, shared)
        # If two collectives at once carry more than one, something other than the link limits a single one. With a
        # breakpoint, the first line describes that already.
        capped = lines.breakpoint is None and late < 0.9 * lines.late_s_per_byte
        load = max(1.0, (late if capped else lines.late_s_per_byte) / link_s_per_byte)
        own, serial_s, switches = 0.0, lines.intercept_s, tuple[Switch, ...]()
        if capped:
            own = lines.late_s_per_byte
        elif lines.breakpoint is not None:
            own = lines.s_per_byte
            serial_s = max(0.0, lines.late_intercept_s + link.burst_bytes / link.bytes_per_s)
            switches = _switches(lines, serial_s)
        return Collective(
            level=level,
            kind=kind,
            ranks=ranks,
            startup_s=fitted.startup_s.value,
            startup_low_s=fitted.startup_s.low,
            startup_high_s=fitted.startup_s.high,
            own_s_per_byte=own,
            serial_s=serial_s,
            load=load,
            residual=lines.residual,
            breakpoint_bytes=None if lines.breakpoint is None else round(lines.breakpoint),
            switches=switches,
            points=self._points(level, ranks, kind, lines),
        )

    def _points(self, level: str, ranks: int, kind: str, lines: Lines) -> tuple[Point, ...]:
        points = []
        for numel, times in sorted(self.sweep(level, kind).items()):
            sent = self._sent(kind, numel, ranks)
            low, median, high = np.quantile(times, [0.25, 0.5, 0.75])
            points.append(
                Point(
                    bytes=numel * ITEM_BYTES,
                    sent_bytes=sent,
                    low_s=float(low),
                    median_s=float(median),
                    high_s=float(high),
                    fitted_s=max(0.0, lines.seconds(sent)),
                    repeats=len(times),
                )
            )
        return tuple(points)

    def _shared_s_per_byte(self, kind: str) -> float | None:
        """Return the seconds per sent byte that a second large collective at the same time adds."""
        numel = even_elements(self.large(), self.ranks)
        if ("streams", kind, numel, 2) not in self.seconds:
            return None
        more_s = self.median("streams", kind, numel, 2) - self.median("streams", kind, numel, 1)
        return max(0.0, more_s) / self._sent(kind, numel, self.ranks)

    def _overlap(self, all_reduce: Fit) -> tuple[Overlap, ...]:
        return tuple(
            Overlap(streams=streams, slowdown=self._slowdown(streams), crowding=self._crowding(streams, all_reduce))
            for streams in STREAMS
        )

    def _slowdown(self, streams: int) -> float:
        return min(float(streams), max(1.0, self._times_longer("streams", streams)))

    def _crowding(self, streams: int, all_reduce: Fit) -> float:
        """Return the time that all-reduces beyond the first add, over the time of their bytes alone.

        More streams cannot crowd a link less, so this is the minimum over this and larger numbers of streams.
        """
        numel = even_elements(self.large(), self.ranks)
        sent = self._sent("all_reduce", numel, self.ranks)
        alone_s = self.median("streams", "all_reduce", numel, 1)
        crowding = min(
            (self.median("streams", "all_reduce", numel, count) - alone_s)
            / max(1e-9, (count - 1) * all_reduce.lines.late_s_per_byte * sent)
            for count in STREAMS
            if count >= streams
        )
        return crowding if crowding > _CROWDED else 1.0

    def _in_flight(self) -> int:
        """Return how many collectives one group runs at a time: the number that best explains the time of four tiny
        all-reduces on one group.

        NCCL's collectives are kernels on one stream, so they always run one after the other.
        """
        if self.backend == "nccl":
            return 1
        slower = {streams: self._slowdown(streams) for streams in STREAMS}
        expected = {1: 4.0, 2: 2 * slower[2], 4: slower[4]}
        measured = self._times_longer("in flight", 4)

        def surprise(count: int) -> float:
            return abs(math.log(expected[count] / measured)) + (0.0 if count == _USUALLY_IN_FLIGHT else _SURPRISE)

        return min(expected, key=surprise)

    def _times_longer(self, what: str, count: int) -> float:
        """Return how many times longer `count` small all-reduces take than a single one."""
        ratios = []
        for size in SMALL:
            numel = even_elements(size, self.ranks)
            alone = self.median("streams", "all_reduce", numel, 1)
            ratios.append(self.median(what, "all_reduce", numel, count) / alone)
        return float(np.exp(np.mean(np.log(ratios))))


def _links(network: Network, fits: dict[tuple[str, str], Fit], burst_bytes: float) -> tuple[Link, ...]:
    """Return the links, with rates from the all-reduce, which uses them most. With racks, whose trunks may hide the
    rate of the hosts' links, rates come from the host-to-host matrix."""
    links = []
    if ("local", "all_reduce") in fits:
        links.append(_link("local", fits["local", "all_reduce"], 1.0, 0.0))
    world = fits[WORLD, "all_reduce"]
    numel = 1 << 20
    sent = wire.sent_bytes("all_reduce", numel, ITEM_BYTES, network.ranks, network.backend)
    if network.hosts == 1:
        return (_link("local", world, 1.0, 0.0),)
    crossing = wire.uplink_bytes("all_reduce", numel, ITEM_BYTES, network.host_of_rank, network.backend) / sent
    if network.racks == 1:
        return (*links, _link("host", world, crossing, burst_bytes))
    matrix, rack = network.matrix_bytes_per_s, network.rack_of_host
    inside = [matrix[a][b] for a in range(network.hosts) for b in range(network.hosts) if a != b and rack[a] == rack[b]]
    shift_sums = [
        sum(
            matrix[a][(a + shift) % network.hosts]
            for a in range(network.hosts)
            if rack[a] == sender and rack[(a + shift) % network.hosts] != sender
        )
        for shift in range(1, network.hosts)
        for sender in range(network.racks)
    ]
    rack_of_rank = [rack[host] for host in network.host_of_rank]
    trunk_crossing = wire.uplink_bytes("all_reduce", numel, ITEM_BYTES, rack_of_rank, network.backend) / sent
    host_rate, trunk_rate = statistics.median(inside), max(shift_sums)
    host = Link(
        name="host",
        bytes_per_s=host_rate,
        low_bytes_per_s=min(inside),
        high_bytes_per_s=max(inside),
        burst_bytes=burst_bytes,
    )
    if trunk_crossing / trunk_rate > crossing / host_rate:  # the trunk limits the all-reduce, which measures it best
        return (*links, host, _link("rack", world, trunk_crossing, burst_bytes))
    trunk = Link(
        name="rack",
        bytes_per_s=trunk_rate,
        low_bytes_per_s=0.9 * trunk_rate,
        high_bytes_per_s=1.1 * trunk_rate,
        burst_bytes=burst_bytes,
    )
    return (*links, host, trunk)


def _switches(lines: Lines, serial_s: float) -> tuple[Switch, ...]:
    """Return the changes of start-up and slope between the first line and the last, which is the link's."""
    switches = []
    for piece, after in itertools.pairwise(lines.pieces[1:]):
        own = piece.s_per_byte if piece.intercept_s >= 0 else lines.seconds(after.from_bytes) / after.from_bytes
        start = Switch(from_bytes=round(piece.from_bytes), startup_s=max(0.0, piece.intercept_s), own_s_per_byte=own)
        switches.append(start)
    last, before = lines.pieces[-1], lines.pieces[-2]
    if last.s_per_byte < before.s_per_byte:  # the link's line is below the extended line of the smaller sizes
        switches.append(Switch(from_bytes=round(last.from_bytes), startup_s=serial_s, own_s_per_byte=0.0))
    return tuple(switches)


def _link(name: str, fitted: Fit, crossing: float, burst_bytes: float) -> Link:
    """Return a link through which `crossing` bytes travel for each sent byte."""
    slope = fitted.late_s_per_byte
    slow, typical, fast = (
        crossing / max(s_per_byte, _LEAST_S_PER_BYTE) for s_per_byte in (slope.high, slope.value, slope.low)
    )
    return Link(
        name=name,
        bytes_per_s=typical,
        low_bytes_per_s=slow,
        high_bytes_per_s=fast,
        burst_bytes=burst_bytes,
    )
