"""Turn the samples of a probe into a network. This module needs no process group: rank 0 fits for all ranks."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec.structs import replace

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


def measured_kinds(kinds: Sequence[str], ranks: int, backend: str) -> tuple[str, ...]:
    """Return the collectives to measure at a level: `kinds`, and where all-to-alls may run in rounds, those too. NCCL's
    rounds win only over links that have not rested, but links rest before every sample: a constant decides there."""
    paced = wire.protocol("all_to_all", wire.NEVER_BYTES, ranks, WORLD, backend, None) == wire.PACED
    return (*kinds, wire.PACED) if paced and backend == "gloo" and "all_to_all" in kinds else tuple(kinds)


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
        """Return `cluster`, which holds the topology, with fitted links and collectives. `levels` has the number of
        ranks at each level, and `burst_bytes` is the burst of the hosts' links."""
        fits = {
            (level, kind): fit(
                {self._sent(kind, numel, ranks): times for numel, times in self.sweep(level, kind).items()},
                bursts=burst_bytes > 0,
                switches=self.backend == "nccl",  # gloo uses one protocol for all sizes
            )
            for level, ranks in levels.items()
            for kind in measured_kinds(kinds, ranks, self.backend)
        }
        startups = [(key[1], statistics.median(times)) for key, times in self.seconds.items() if key[0] == "startup"]
        linked = replace(
            cluster,
            links=_links(cluster, fits, burst_bytes),
            in_flight=_IN_FLIGHT[self.backend],
            paced_bytes=self._paced_bytes(),
            overlap=tuple(self._overlap(streams, fits[WORLD, "all_reduce"]) for streams in STREAMS),
            startups=tuple(Startup(ranks=ranks, seconds=seconds) for ranks, seconds in startups),
        )
        collectives = [self._collective(linked, level, levels[level], kind, own) for (level, kind), own in fits.items()]
        return replace(linked, collectives=tuple(collectives))

    def _paced_bytes(self) -> int | None:
        """Return the smallest buffer whose all-to-all should run in rounds: the threshold with the shortest times, on
        average over all sizes. None if rounds were not measured."""
        native, paced = self.sweep(WORLD, "all_to_all"), self.sweep(WORLD, wire.PACED)
        sizes = sorted(native.keys() & paced.keys())
        gains = [math.log(statistics.median(native[size]) / statistics.median(paced[size])) for size in sizes]
        if not sizes:
            return None
        first = max(range(len(sizes) + 1), key=lambda index: sum(gains[index:]))
        if first == len(sizes):
            return wire.NEVER_BYTES
        return round(ITEM_BYTES * math.sqrt(sizes[max(0, first - 1)] * sizes[first]))

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
        sweep = sorted(self.sweep(level, kind).items())
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
            points=tuple(self._point(kind, ranks, numel, times, lines) for numel, times in sweep),
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
        return max(0.0, self._added_s(kind, numel, 2)) / self._sent(kind, numel, self.ranks)

    def _added_s(self, kind: str, numel: int, streams: int) -> float:
        """Return how much longer several collectives at once take than a single one."""
        return self.median("streams", kind, numel, streams) - self.median("streams", kind, numel, 1)

    def _overlap(self, streams: int, all_reduce: Fit) -> Overlap:
        """Return how many times longer several small all-reduces at once take than a single one; and the time that
        large ones beyond the first add, divided by the time of their bytes. More streams cannot crowd a link less, so
        this is the minimum over this and larger numbers of streams."""
        sizes = [("streams", "all_reduce", even_elements(size, self.ranks)) for size in SMALL]
        ratios = [self.median(*size, streams) / self.median(*size, 1) for size in sizes]
        numel = even_elements(self.large(), self.ranks)
        sent, slope = self._sent("all_reduce", numel, self.ranks), all_reduce.lines.last.s_per_byte
        more = [count for count in STREAMS if count >= streams]
        crowding = min(self._added_s("all_reduce", numel, n) / max(1e-9, (n - 1) * slope * sent) for n in more)
        return Overlap(
            streams=streams,
            slowdown=min(float(streams), max(1.0, float(np.exp(np.mean(np.log(ratios)))))),
            crowding=crowding if crowding > _CROWDED else 1.0,
        )


def _links(network: Network, fits: dict[tuple[str, str], Fit], burst_bytes: float) -> tuple[Link, ...]:
    """Return the links, with rates from the all-reduce, which uses them most. With racks, whose trunks may hide the
    rate of the hosts' links, rates come from the host-to-host matrix."""
    world = fits[WORLD, "all_reduce"]
    if network.hosts == 1:
        return (_fitted_link("local", world, 1.0, 0.0),)
    links = [_fitted_link("local", fits["local", "all_reduce"], 1.0, 0.0)] if ("local", "all_reduce") in fits else []
    crossing = _crossing(network, network.host_of_rank)
    if network.racks == 1:
        return (*links, _fitted_link("host", world, crossing, burst_bytes))
    matrix, rack, hosts = network.matrix_bytes_per_s, network.rack_of_host, range(network.hosts)
    inside = [matrix[a][b] for a in hosts for b in hosts if a != b and rack[a] == rack[b]]
    shift_sums = []
    for shift, sender in itertools.product(hosts[1:], range(network.racks)):
        pairs = [(a, (a + shift) % network.hosts) for a in hosts if rack[a] == sender]
        shift_sums.append(sum(matrix[a][b] for a, b in pairs if rack[b] != sender))
    trunk_crossing = _crossing(network, [rack[host] for host in network.host_of_rank])
    host_rate, trunk_rate = statistics.median(inside), max(shift_sums)
    host = _link("host", min(inside), host_rate, max(inside), burst_bytes)
    if trunk_crossing / trunk_rate > crossing / host_rate:  # the trunk limits the all-reduce, which measures it best
        return (*links, host, _fitted_link("rack", world, trunk_crossing, burst_bytes))
    return (*links, host, _link("rack", 0.9 * trunk_rate, trunk_rate, 1.1 * trunk_rate, burst_bytes))


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


def _fitted_link(name: str, fitted: Fit, crossing: float, burst_bytes: float) -> Link:
    """Return a link through which `crossing` bytes travel for each sent byte."""
    slope = fitted.late_s_per_byte
    slow, typical, fast = (crossing / max(each, _LEAST_S_PER_BYTE) for each in (slope.high, slope.value, slope.low))
    return _link(name, slow, typical, fast, burst_bytes)


def _link(name: str, low: float, typical: float, high: float, burst_bytes: float) -> Link:
    return Link(name=name, bytes_per_s=typical, low_bytes_per_s=low, high_bytes_per_s=high, burst_bytes=burst_bytes)
