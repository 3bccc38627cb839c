"""Turn the samples of a probe into a network. This module needs no process group: rank 0 fits for all ranks."""

from __future__ import annotations

import itertools
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
SMALL = (4_000, 16_000)  # bytes at which the start-up is most of a collective's time
_LEAST_S_PER_BYTE = 1e-15  # lower limit for a slope, which may come out as 0 if only small sizes were measured
_CROWDED = 1.05  # smaller ratios are noise
_NUMEL = 1 << 20  # the size for which the bytes through links are compared
_IN_FLIGHT = {"nccl": 1, "gloo": 2}
"""Collectives that one group runs at a time: NCCL uses one stream, gloo two threads."""

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

        `levels` has the number of ranks at each level, and `burst_bytes` is the burst of the hosts' links.
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
            in_flight=_IN_FLIGHT[self.backend],
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
        busy_s = network.busy_s(kind, _NUMEL, ITEM_BYTES, level)
        link = max(network.links, key=lambda link: busy_s.get(link.name, 0.0))
        link_s_per_byte = busy_s[link.name] / self._sent(kind, _NUMEL, ranks)
        shared = self._shared_s_per_byte(kind) if level == WORLD else None
        late = lines.last.s_per_byte if shared is None else min(lines.last.s_per_byte, shared)
        # If two collectives at once carry more than one, something other than the link limits a single one. With a
        # breakpoint, the first line describes that already.
        capped = lines.breakpoint is None and late < 0.9 * lines.last.s_per_byte
        own, serial_s = lines.last.s_per_byte if capped else 0.0, lines.first.intercept_s
        switches: tuple[Switch, ...] = ()
        if lines.breakpoint is not None:
            own = lines.first.s_per_byte
            serial_s = max(0.0, lines.last.intercept_s + link.burst_bytes / link.bytes_per_s)
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
            load=max(1.0, (late if capped else lines.last.s_per_byte) / link_s_per_byte),
            residual=lines.residual,
            breakpoint_bytes=None if lines.breakpoint is None else round(lines.breakpoint),
            switches=switches,
            points=tuple(
                self._point(kind, ranks, numel, times, lines)
                for numel, times in sorted(self.sweep(level, kind).items())
            ),
        )

    def _point(self, kind: str, ranks: int, numel: int, times: Sequence[float], lines: Lines) -> Point:
        sent = self._sent(kind, numel, ranks)
        low, median, high = map(float, np.quantile(times, [0.25, 0.5, 0.75]))
        return Point(
            bytes=numel * ITEM_BYTES,
            sent_bytes=sent,
            low_s=low,
            median_s=median,
            high_s=high,
            fitted_s=max(0.0, lines.seconds(sent)),
            repeats=len(times),
        )

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
        """Return how many times longer several small all-reduces at once take than a single one."""
        ratios = []
        for size in SMALL:
            numel = even_elements(size, self.ranks)
            alone = self.median("streams", "all_reduce", numel, 1)
            ratios.append(self.median("streams", "all_reduce", numel, streams) / alone)
        return min(float(streams), max(1.0, float(np.exp(np.mean(np.log(ratios))))))

    def _crowding(self, streams: int, all_reduce: Fit) -> float:
        """Return the time that all-reduces beyond the first add, divided by the time of their bytes.

        More streams cannot crowd a link less, so this is the minimum over this and larger numbers of streams.
        """
        numel = even_elements(self.large(), self.ranks)
        sent = self._sent("all_reduce", numel, self.ranks)
        alone_s = self.median("streams", "all_reduce", numel, 1)
        crowding = min(
            (self.median("streams", "all_reduce", numel, count) - alone_s)
            / max(1e-9, (count - 1) * all_reduce.lines.last.s_per_byte * sent)
            for count in STREAMS
            if count >= streams
        )
        return crowding if crowding > _CROWDED else 1.0


def _links(network: Network, fits: dict[tuple[str, str], Fit], burst_bytes: float) -> tuple[Link, ...]:
    """Return the links, with rates from the all-reduce, which uses them most. With racks, whose trunks may hide the
    rate of the hosts' links, rates come from the host-to-host matrix."""
    world = fits[WORLD, "all_reduce"]
    if network.hosts == 1:
        return (_link("local", world, 1.0, 0.0),)
    links = [_link("local", fits["local", "all_reduce"], 1.0, 0.0)] if ("local", "all_reduce") in fits else []
    crossing = _crossing(network, network.host_of_rank)
    if network.racks == 1:
        return (*links, _link("host", world, crossing, burst_bytes))
    matrix, rack, hosts = network.matrix_bytes_per_s, network.rack_of_host, range(network.hosts)
    inside = [matrix[a][b] for a in hosts for b in hosts if a != b and rack[a] == rack[b]]
    shift_sums = [
        sum(
            matrix[a][(a + shift) % network.hosts]
            for a in hosts
            if rack[a] == sender and rack[(a + shift) % network.hosts] != sender
        )
        for shift in hosts[1:]
        for sender in range(network.racks)
    ]
    trunk_crossing = _crossing(network, [rack[host] for host in network.host_of_rank])
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


def _crossing(network: Network, place_of_rank: Sequence[int]) -> float:
    """Return the bytes of an all-reduce through the uplink of a host or rack, for each byte that a rank sends."""
    sent = wire.sent_bytes("all_reduce", _NUMEL, ITEM_BYTES, network.ranks, network.backend)
    return wire.uplink_bytes("all_reduce", _NUMEL, ITEM_BYTES, place_of_rank, network.backend) / sent


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
    slow, typical, fast = (crossing / max(each, _LEAST_S_PER_BYTE) for each in (slope.high, slope.value, slope.low))
    return Link(name=name, bytes_per_s=typical, low_bytes_per_s=slow, high_bytes_per_s=fast, burst_bytes=burst_bytes)
