"""The links of a cluster, and the cost of collectives. The time of one collective alone is the larger of two limits:

    seconds = max(startup_s + own_s_per_byte · sent,   serial_s + (uplink bytes · load − burst) / link rate)

The first is latency, software and processors; the second is the slowest link. `sent` counts the bytes of the busiest
rank. Several collectives share a link by max-min fairness, and slow down each other's start-ups by the measured
`overlap`.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
from collections.abc import Callable
from typing import Annotated

from msgspec.structs import replace

from syncline.errors import UsageError
from syncline.exchange import WORLD, Level, Tree, wire
from syncline.files import JsonFile
from syncline.records.fields import Amount, Count, Device, PositiveCount, Schema, check_unique, one_of
from syncline.records.link_costs import LEVELS, Beside, Collective, Link, Overlap, Startup

Groups = tuple[tuple[int, ...], ...]
_LIKE = {
    wire.PACED: "all_to_all",
    wire.REDUCE_SCATTER: "all_gather",
}  # kinds whose cost applies if one was not measured


class Network(JsonFile, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """A cluster: its topology, the rates of its links, and the cost of collectives.

    The constructor raises `ValueError`, which names the field, if fields contradict each other.

    Example:
        >>> network = syncline.Network.load("network.json")
        >>> larger = network.with_hosts(16).with_rate(25_000_000_000)
    """

    schema: Schema = 1
    backend: Annotated[str, one_of("gloo", "nccl")]
    device: Device
    host_of_rank: tuple[int, ...]
    rack_of_host: tuple[int, ...]
    links: tuple[Link, ...]
    collectives: tuple[Collective, ...]
    in_flight: PositiveCount
    """Number of collectives that one process group runs at the same time."""
    overlap: tuple[Overlap, ...] = ()
    startups: tuple[Startup, ...] = ()
    matrix_bytes_per_s: tuple[tuple[Amount, ...], ...] = ()
    """Rates from host to host, while every host sends to one other; 0 on the diagonal."""
    one_machine: bool = False
    """Whether the hosts are emulated on one machine, and so share its processors."""
    paced_bytes: Count | None = None
    """Smallest buffer whose all-to-all between hosts runs in paced rounds; null if that was not measured."""
    beside: Beside | None = None
    """How collectives inside hosts and between hosts slow each other down; null if it was not measured."""
    measured: bool = True
    where: str = ""
    how: str = ""
    date: str = ""

    def __post_init__(self) -> None:
        if set(self.host_of_rank) != set(range(self.hosts)) or not self.hosts:
            raise ValueError("host_of_rank: must name every host of rack_of_host, numbered from 0, and no other")
        if set(self.rack_of_host) != set(range(self.racks)):
            raise ValueError("rack_of_host: racks must be numbered from 0, without gaps")
        check_unique("links", (link.name for link in self.links))
        check_unique("collectives", (f"{entry.kind} at level {entry.level}" for entry in self.collectives))
        check_unique("overlap", (f"{entry.streams} streams" for entry in self.overlap))
        check_unique("startups", (f"{entry.ranks} ranks" for entry in self.startups))
        for index, entry in enumerate(self.collectives):
            if entry.ranks != (ranks := self.ranks_at(entry.level)):
                problem = f"is {entry.ranks}, but the network has {ranks} at level {entry.level}"
                raise ValueError(f"collectives[{index}].ranks: {problem}")
        rows = self.matrix_bytes_per_s
        if rows and {len(rows), *map(len, rows)} != {self.hosts}:
            raise ValueError(f"matrix_bytes_per_s: must have a row and a column for each of the {self.hosts} hosts")

    @property
    def ranks(self) -> int:
        return len(self.host_of_rank)

    @property
    def hosts(self) -> int:
        return len(self.rack_of_host)

    @property
    def racks(self) -> int:
        return len(set(self.rack_of_host))

    @functools.cached_property
    def tree(self) -> Tree:
        """The ranks grouped by host, and by rack if there are several racks."""
        return Tree.of_hosts(self.host_of_rank, self.rack_of_host)

    def link(self, name: str) -> Link | None:
        return next((link for link in self.links if link.name == name), None)

    def collective(self, kind: str, level: str | Level = WORLD) -> Collective:
        """Return the cost of a kind of collective at a level. A kind that was not measured costs as an all-reduce,
        scaled by the number of messages. A level that was not measured costs as the nearest measured one, scaled to the
        level's number of ranks."""
        if isinstance(level, str):
            return self._fitted(kind, level)
        known = {entry.level for entry in self.collectives}
        nearest = "hosts" if self.crosses(level.groups) or "local" not in known else "local"
        if level.ranks == self.ranks or nearest not in known:
            nearest = WORLD
        return self._with_ranks(self._fitted(kind, nearest), level.ranks, False)

    def _fitted(self, kind: str, level: str) -> Collective:
        known = {entry.kind: entry for entry in self.collectives if entry.level == level}
        if kind not in known:
            kind = _LIKE.get(kind, kind)
        if kind in known:
            return known[kind]
        if (base := known.get("all_reduce")) is None:
            raise UsageError(f"the network has no figures for {kind} at level {level}: probe it again")
        factor = wire.hops(kind, base.ranks, self.backend) / wire.hops("all_reduce", base.ranks, self.backend)
        return replace(base.scaled(factor, factor, factor), kind=kind, points=())

    def protocol(self, kind: str, nbytes: int, level: Level) -> str:
        """Return the kind of collective whose cost applies to a buffer of `nbytes`."""
        return wire.protocol(kind, nbytes, level.ranks, level.name, self.backend, self.paced_bytes)

    def ranks_at(self, level: str) -> int:
        """Return the number of ranks in a group of this level; for `local`, on the host with most ranks."""
        if level not in LEVELS:
            raise UsageError(f"level {level} is not known; known: {', '.join(LEVELS)}")
        if level == "local":
            return max(collections.Counter(self.host_of_rank).values())
        return self.hosts if level == "hosts" else self.ranks

    def loads(self, kind: str, elements: int, itemsize: int, level: str | Level = WORLD) -> dict[str, int]:
        """Return the bytes of one collective through the busiest link of each kind, by the link's name. `level` is
        `world`, `hosts` (one rank of each host), `local` (the ranks of a host), or a level whose groups run the same
        collective side by side."""
        groups = self._groups_at(level) if isinstance(level, str) else level.groups
        sizes = {len(group) for group in groups}
        if not self.crosses(groups):
            loads = {"local": max(wire.sent_bytes(kind, elements, itemsize, size, self.backend) for size in sizes)}
        else:
            message = {size: wire.message_bytes(kind, elements, itemsize, size, self.backend) for size in sizes}
            loads = {
                name: max(sum(count * message[size] for size, count in uplink) for uplink in uplinks)
                for name, uplinks in self._uplink_messages(kind, groups).items()
            }
        return {name: nbytes for name, nbytes in loads.items() if nbytes and self.link(name) is not None}

    def busy_s(self, kind: str, elements: int, itemsize: int, level: str | Level = WORLD) -> dict[str, float]:
        """Return how long a collective's bytes occupy the busiest link of each kind."""
        rates = {link.name: link.bytes_per_s for link in self.links}
        return {name: nbytes / rates[name] for name, nbytes in self.loads(kind, elements, itemsize, level).items()}

    def _groups_at(self, level: str) -> Groups:
        self.ranks_at(level)  # raises if the level is unknown
        if level == WORLD:
            return (tuple(range(self.ranks)),)
        local, hosts = Tree.of_hosts(self.host_of_rank).levels
        return local.groups if level == "local" else hosts.groups[:1]

    def crosses(self, groups: Groups) -> bool:
        """Return whether a group contains ranks of different hosts."""
        return not all(len({self.host_of_rank[rank] for rank in group}) == 1 for group in groups)

    def _uplink_messages(self, kind: str, groups: Groups) -> dict[str, set[tuple[tuple[int, int], ...]]]:
        """Return, for each kind of link, the different loads of its uplinks: pairs of a group's size and a number of
        messages. They are cached, because counting them among thousands of ranks takes longer than everything else."""
        if (kind, groups) not in self._known_messages:
            racks = [self.rack_of_host[host] for host in self.host_of_rank]
            self._known_messages[kind, groups] = {
                name: wire.uplinks(kind, [[unit[rank] for rank in group] for group in groups], self.backend)
                for name, unit in (("host", self.host_of_rank), ("rack", racks))
            }
        return self._known_messages[kind, groups]

    @functools.cached_property
    def _known_messages(self) -> dict[tuple[str, Groups], dict[str, set[tuple[tuple[int, int], ...]]]]:
        return {}

    def with_hosts(self, hosts: int, *, same_machine: bool = False) -> Network:
        """Return the network with another number of hosts of the same kind.

        Each host has the most common number of ranks, and racks have as many hosts as now.

        Args:
            hosts: The number of hosts.
            same_machine: Whether the hosts are emulated on the measured machine, and so share its processors.

        Raises:
            UsageError: `hosts` is less than 1, or the network has only one host.
        """
        if hosts == self.hosts:
            return self
        if hosts < 1:
            raise UsageError(f"hosts must be at least 1, not {hosts}")
        if self.hosts == 1:
            raise UsageError("the network has one host, so nothing is known of links between hosts: probe at least two")
        counts = collections.Counter(self.host_of_rank)
        per_host = collections.Counter(counts.values()).most_common(1)[0][0]
        per_rack = max(1, math.ceil(self.hosts / self.racks))
        racks = tuple(host // per_rack if self.racks > 1 else 0 for host in range(hosts))
        host_of_rank = tuple(range(hosts)) * per_host
        if self.host_of_rank == tuple(sorted(self.host_of_rank)):  # the ranks are numbered host by host
            host_of_rank = tuple(sorted(host_of_rank))
        ranks_at = {WORLD: len(host_of_rank), "hosts": hosts, "local": per_host}
        several = (entry for entry in self.collectives if ranks_at[entry.level] > 1)
        scaled = tuple(self._with_ranks(entry, ranks_at[entry.level], same_machine) for entry in several)
        return replace(self, host_of_rank=host_of_rank, rack_of_host=racks, collectives=scaled, matrix_bytes_per_s=())

    def with_rate(self, rate_bps: int, link: str = "host") -> Network:
        """Return the network with another nominal rate for one kind of link.

        Args:
            rate_bps: Bits per second.
            link: `host`, `rack` or `local`.

        Raises:
            UsageError: The network has no such link.
        """
        if self.link(link) is None:
            raise UsageError(f"the network has no {link} links: it has {', '.join(known.name for known in self.links)}")
        return self._with_links(lambda old: old.at(rate_bps) if old.name == link else old)

    def with_faster(self, link: str, factor: float) -> Network:
        """Return the network with the rate of one kind of link multiplied by `factor`."""
        return self._with_links(lambda old: old.times(factor) if old.name == link else old)

    def with_nominal_rates(self, host_bps: int, rack_bps: int | None = None) -> Network:
        """Return the network with the given nominal rates; the measured rates stay the same."""
        nominal = {"host": host_bps, "rack": rack_bps}
        return self._with_links(lambda old: replace(old, nominal_bps=nominal.get(old.name)))

    def _with_links(self, change: Callable[[Link], Link]) -> Network:
        return replace(self, links=tuple(map(change, self.links)))

    def without(self, *, startups: bool = False, software: bool = False, link: str | None = None) -> Network:
        """Return the network as if start-ups, software or one kind of link took no time, to find what they cost."""
        collectives, links = self.collectives, self.links
        if startups:
            collectives = tuple(entry.scaled(0.0, 0.0, 0.0) for entry in collectives)
        if software:
            collectives = tuple(entry.without_software() for entry in collectives)
        if link is not None:
            links = tuple(other for other in links if other.name != link)
        return replace(self, collectives=collectives, links=links)

    def bound(self, *, high: bool) -> Network:
        """Return the network with all costs at the lower or upper ends of their confidence intervals."""

        def at_end(entry: Collective) -> Collective:
            end_s = entry.startup_high_s if high else entry.startup_low_s
            if not entry.startup_s:
                return replace(entry, startup_s=end_s)
            return entry.scaled(1.0, end_s / entry.startup_s, 1.0)

        rated = self._with_links(
            lambda old: replace(old, bytes_per_s=old.low_bytes_per_s if high else old.high_bytes_per_s)
        )
        return replace(rated, collectives=tuple(map(at_end, self.collectives)))

    def _startup_growth(self, kind: str, before: int, after: int, same_machine: bool) -> tuple[float, float, float]:
        """Return the factors by which start-ups grow from `before` to `after` ranks: low, expected, high. The expected
        factor is the growth of the number of sequential messages; on one machine, multiplied by the measured growth of
        the time per message. The low end assumes a tree. The high end assumes that the time per message grows on a real
        network, too."""
        hops = wire.hops(kind, after, self.backend) / wire.hops(kind, before, self.backend)
        doublings = (after - 1).bit_length() / (before - 1).bit_length()
        ring = (after - 1) / (before - 1)
        per_hop = self._per_hop_growth(before, after)
        expected = hops * (per_hop if same_machine else 1.0)
        ends = (doublings, ring, expected, 1.0 if self.one_machine else hops * per_hop)
        return min(ends), expected, max(ends)

    def _per_hop_growth(self, before: int, after: int) -> float:
        """Return the growth of the time per message from `before` to `after` ranks, from the measured start-ups."""
        measured = [
            (entry.ranks, entry.seconds / wire.hops("all_reduce", entry.ranks, self.backend))
            for entry in sorted(self.startups, key=lambda entry: entry.ranks)
            if entry.seconds > 0
        ]
        if len(measured) < 2:
            return 1.0
        (few, at_few_s), (many, at_many_s) = measured[0], measured[-1]
        exponent = max(0.0, math.log(at_many_s / at_few_s) / math.log(many / few)) if many > few else 0.0
        return float((after / before) ** min(1.0, exponent))

    def _with_ranks(self, entry: Collective, ranks: int, same_machine: bool) -> Collective:
        if entry.ranks == ranks:
            return entry
        low, expected, high = self._startup_growth(entry.kind, entry.ranks, ranks, same_machine)
        scaled = entry.scaled(low, expected, high)
        return replace(scaled, ranks=ranks, breakpoint_bytes=None, points=())

    def slowdown(self, streams: float) -> float:
        """Return the factor by which start-ups take longer while `streams` collectives run."""
        known = [(1, 1.0), *sorted((entry.streams, entry.slowdown) for entry in self.overlap)]
        most, at_most = known[-1]
        return _interpolate(known, streams) if streams <= most else max(1.0, at_most * streams / most)

    def crowding(self, streams: float) -> float:
        """Return the factor by which bytes take longer on a full link that `streams` collectives share."""
        known = [(1, 1.0), *sorted((entry.streams, entry.crowding) for entry in self.overlap)]
        return _interpolate(known, min(streams, known[-1][0]))


def _interpolate(known: list[tuple[int, float]], streams: float) -> float:
    """Interpolate linearly on logarithmic axes."""
    for (few, at_few), (many, at_many) in itertools.pairwise(known):
        if few <= streams <= many and many > few:
            share = math.log(streams / few) / math.log(many / few)
            return float(at_few ** (1 - share) * at_many**share)
    return known[-1][1]
