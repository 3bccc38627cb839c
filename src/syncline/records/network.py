"""A cluster's links and what collectives over them cost, as data.

The model of one collective, alone, from a standing start, is two lines:

    seconds = max(startup_s + own_s_per_byte · sent,   serial_s + (uplink bytes · load − burst) / link rate)

The first is what latency, software and processors allow however fast the links are, and may change where protocols
switch; the second is the slowest link it crosses. Start-ups are spread over a collective's many messages, so they hide
behind a link that is busy anyway: only `serial_s` of them never does. `sent` are the bytes of the busiest rank. Several
collectives share a link max-min, and slow each other's start-ups down by `overlap`, which is measured, too.

Nothing here needs a cluster: a network that was probed on one can be studied on a laptop.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
import os
from collections.abc import Iterator

import msgspec

from syncline.errors import UsageError
from syncline.exchange import WORLD, Level, Tree, wire
from syncline.files import read_json, write_json
from syncline.records.link_costs import LEVELS, MOST, Collective, Link, Overlap, Startup, check_whole

Groups = tuple[tuple[int, ...], ...]


class Network(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """A cluster as its collectives see it. One that contradicts itself cannot be constructed."""

    schema: int = 1
    backend: str
    device: str
    host_of_rank: tuple[int, ...]
    rack_of_host: tuple[int, ...]
    links: tuple[Link, ...]
    collectives: tuple[Collective, ...]
    in_flight: int
    """Collectives that one process group works on at the same time."""
    overlap: tuple[Overlap, ...] = ()
    startups: tuple[Startup, ...] = ()
    matrix_bytes_per_s: tuple[tuple[float, ...], ...] = ()
    """From host to host, while every host sends to one other; 0 on the diagonal."""
    one_machine: bool = False
    """Hosts are emulated on one machine, so more of them also means less processor for each."""
    measured: bool = True
    where: str = ""
    how: str = ""
    date: str = ""

    def __post_init__(self) -> None:
        _check_placement(self)
        _check_parts(self)

    @property
    def ranks(self) -> int:
        return len(self.host_of_rank)

    @property
    def hosts(self) -> int:
        return len(self.rack_of_host)

    @property
    def racks(self) -> int:
        return len(set(self.rack_of_host))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Network:
        return read_json(path, cls)

    def save(self, path: str | os.PathLike[str]) -> None:
        write_json(path, self)

    @functools.cached_property
    def tree(self) -> Tree:
        """Its ranks in hosts, and in racks where there are several."""
        return Tree.of_hosts(self.host_of_rank, self.rack_of_host)

    def link(self, name: str) -> Link | None:
        return next((link for link in self.links if link.name == name), None)

    def collective(self, kind: str, level: str | Level = WORLD) -> Collective:
        """The fit for this kind; for one that was not measured, the all-reduce's, with its own number of messages.

        Groups that were not measured as they are cost what those of the nearest level do, with their own number of
        ranks: the ranks of a host, one rank of each host, all of them.
        """
        if isinstance(level, str):
            return self._fitted(kind, level)
        known = {entry.level for entry in self.collectives}
        if level.ranks == self.ranks or not known & {"local", "hosts"}:
            nearest = WORLD
        else:
            nearest = "local" if self._inside_hosts(level.groups) and "local" in known else "hosts"
        return self._with_ranks(self._fitted(kind, nearest if nearest in known else WORLD), level.ranks, False)

    def _fitted(self, kind: str, level: str) -> Collective:
        for entry in self.collectives:
            if (entry.kind, entry.level) == (kind, level):
                return entry
        base = next((entry for entry in self.collectives if (entry.kind, entry.level) == ("all_reduce", level)), None)
        if base is None:
            raise UsageError(f"the network has no figures for {kind} at level {level}: probe it again")
        factor = wire.hops(kind, base.ranks, self.backend) / wire.hops("all_reduce", base.ranks, self.backend)
        return msgspec.structs.replace(
            base.scaled(factor, factor, factor),
            kind=kind,
            points=(),
        )

    def ranks_at(self, level: str) -> int:
        """How many meet there; on the fullest host, where hosts differ."""
        if level not in LEVELS:
            raise UsageError(f"level {level} is not known; known: {', '.join(LEVELS)}")
        if level == "local":
            return max(collections.Counter(self.host_of_rank).values())
        return self.hosts if level == "hosts" else self.ranks

    def loads(self, kind: str, elements: int, itemsize: int, level: str | Level = WORLD) -> dict[str, int]:
        """Bytes through the busiest link of each kind that one collective crosses, by the link's name.

        `level`: the whole `world`, one rank of each host (`hosts`), the ranks of a host (`local`), or groups of ranks
        that do the same side by side.
        """
        groups = self._groups_at(level) if isinstance(level, str) else level.groups
        sizes = {len(group) for group in groups}
        if self._inside_hosts(groups):
            found = {"local": max(wire.sent_bytes(kind, elements, itemsize, size, self.backend) for size in sizes)}
        else:
            message = {size: wire.message_bytes(kind, elements, itemsize, size, self.backend) for size in sizes}
            found = {
                name: max(sum(count * message[size] for size, count in uplink) for uplink in uplinks)
                for name, uplinks in self._uplink_messages(kind, groups).items()
            }
        return {name: nbytes for name, nbytes in found.items() if nbytes and self.link(name) is not None}

    def busy_s(self, kind: str, elements: int, itemsize: int, level: str | Level = WORLD) -> dict[str, float]:
        """How long its bytes alone keep the busiest link of each kind busy."""
        rates = {link.name: link.bytes_per_s for link in self.links}
        return {name: nbytes / rates[name] for name, nbytes in self.loads(kind, elements, itemsize, level).items()}

    def _groups_at(self, level: str) -> Groups:
        self.ranks_at(level)  # raises for a level that is not known
        if level == WORLD:
            return (tuple(range(self.ranks)),)
        local, hosts = Tree.of_hosts(self.host_of_rank).levels
        return local.groups if level == "local" else hosts.groups[:1]

    def crosses(self, level: Level) -> bool:
        """Whether its groups reach beyond their hosts."""
        return not self._inside_hosts(level.groups)

    def _inside_hosts(self, groups: Groups) -> bool:
        return all(len({self.host_of_rank[rank] for rank in group}) == 1 for group in groups)

    def _uplink_messages(self, kind: str, groups: Groups) -> dict[str, set[tuple[tuple[int, int], ...]]]:
        """By kind of link: what different uplinks carry, as numbers of messages by the size of the group they are of.
        Counted once for all sizes: among thousands of ranks that takes longer than everything else."""
        if (kind, groups) not in self._known_messages:
            units = {
                "host": self.host_of_rank,
                "rack": [self.rack_of_host[host] for host in self.host_of_rank],
            }
            self._known_messages[kind, groups] = {
                name: wire.uplinks(kind, [[unit[rank] for rank in group] for group in groups], self.backend)
                for name, unit in units.items()
            }
        return self._known_messages[kind, groups]

    @functools.cached_property
    def _known_messages(self) -> dict[tuple[str, Groups], dict[str, set[tuple[tuple[int, int], ...]]]]:
        return {}

    def with_hosts(self, hosts: int, *, same_machine: bool = False) -> Network:
        """As many hosts of the same kind: as many ranks on each as most have, racks as full as they are now.

        Each with processors of its own, or, `same_machine`, emulated on the one machine that was measured.
        """
        if hosts == self.hosts:
            return self
        if hosts < 1:
            raise UsageError(f"hosts is {hosts}: there must be at least 1")
        if self.hosts == 1:
            raise UsageError("the network has one host, so nothing is known of links between hosts: probe at least two")
        counts = collections.Counter(self.host_of_rank)
        per_host = collections.Counter(counts.values()).most_common(1)[0][0]
        per_rack = max(1, math.ceil(self.hosts / self.racks))
        racks = tuple(host // per_rack if self.racks > 1 else 0 for host in range(hosts))
        scrambled = self.host_of_rank != tuple(sorted(self.host_of_rank))
        one_by_one = tuple(host for host in range(hosts) for _ in range(per_host))
        placement = tuple(host for _ in range(per_host) for host in range(hosts)) if scrambled else one_by_one
        ranks_at = {WORLD: len(placement), "hosts": hosts, "local": per_host}
        moved = tuple(
            self._with_ranks(entry, ranks_at[entry.level], same_machine)
            for entry in self.collectives
            if ranks_at[entry.level] > 1
        )
        return msgspec.structs.replace(
            self,
            host_of_rank=placement,
            rack_of_host=racks,
            collectives=moved,
            matrix_bytes_per_s=(),
        )

    def with_rate(self, rate_bps: int, link: str = "host") -> Network:
        """The same cluster with faster or slower links of one kind."""
        if self.link(link) is None:
            raise UsageError(f"the network has no {link} links: it has {', '.join(one.name for one in self.links)}")
        return msgspec.structs.replace(
            self, links=tuple(one.at(rate_bps) if one.name == link else one for one in self.links)
        )

    def with_faster(self, link: str, factor: float) -> Network:
        """The same cluster with links of one kind that are so many times as fast."""
        return msgspec.structs.replace(
            self, links=tuple(one.times(factor) if one.name == link else one for one in self.links)
        )

    def sold_as(self, host_bps: int, rack_bps: int | None = None) -> Network:
        """With the rates that its links are known by."""
        names = {"host": host_bps, "rack": rack_bps}
        return msgspec.structs.replace(
            self, links=tuple(msgspec.structs.replace(one, nominal_bps=names.get(one.name)) for one in self.links)
        )

    def without(self, *, startups: bool = False, software: bool = False, link: str | None = None) -> Network:
        """What if start-ups, software, or one kind of link cost nothing: for telling what a step loses to them."""
        collectives, links = self.collectives, self.links
        if startups:
            collectives = tuple(entry.scaled(0.0, 0.0, 0.0) for entry in collectives)
        if software:
            collectives = tuple(entry.without_software() for entry in collectives)
        if link is not None:
            links = tuple(one for one in links if one.name != link)
        return msgspec.structs.replace(self, collectives=collectives, links=links)

    def bound(self, *, high: bool) -> Network:
        """The network at one end of its confidence intervals: all costs low, or all high."""
        return msgspec.structs.replace(
            self,
            collectives=tuple(
                entry.scaled(1.0, end / entry.startup_s, 1.0)
                if entry.startup_s
                else msgspec.structs.replace(entry, startup_s=end)
                for entry in self.collectives
                for end in (entry.startup_high_s if high else entry.startup_low_s,)
            ),
            links=tuple(
                msgspec.structs.replace(one, bytes_per_s=one.low_bytes_per_s if high else one.high_bytes_per_s)
                for one in self.links
            ),
        )

    def _startup_growth(self, kind: str, before: int, after: int, same_machine: bool) -> tuple[float, float, float]:
        """How much longer start-ups take among `after` ranks than among `before`: low, expected, high.

        Expected: with the messages that wait for each other; on one machine, times what one of them was seen to take
        longer among more ranks. Low: as if a tree were used. High: as if that growth were the network's own.
        """
        hops = wire.hops(kind, after, self.backend) / wire.hops(kind, before, self.backend)
        doublings = (after - 1).bit_length() / (before - 1).bit_length()
        ring = (after - 1) / (before - 1)
        dearer = self._per_hop_growth(before, after)
        expected = hops * (dearer if same_machine else 1.0)
        ends = (doublings, ring, expected, 1.0 if self.one_machine else hops * dearer)
        return min(ends), expected, max(ends)

    def _per_hop_growth(self, before: int, after: int) -> float:
        """One message's time among `after` ranks over the same among `before`, from the sizes that were measured."""
        measured = [
            (entry.ranks, entry.seconds / wire.hops("all_reduce", entry.ranks, self.backend))
            for entry in sorted(self.startups, key=lambda entry: entry.ranks)
            if entry.seconds > 0
        ]
        if len(measured) < 2:
            return 1.0
        (few, cheap), (many, dear) = measured[0], measured[-1]
        exponent = max(0.0, math.log(dear / cheap) / math.log(many / few)) if many > few else 0.0
        return float((after / before) ** min(1.0, exponent))

    def _with_ranks(self, entry: Collective, ranks: int, same_machine: bool) -> Collective:
        if entry.ranks == ranks:
            return entry
        low, expected, high = self._startup_growth(entry.kind, entry.ranks, ranks, same_machine)
        return msgspec.structs.replace(
            entry.scaled(low, expected, high),
            ranks=ranks,
            breakpoint_bytes=None,
            points=(),
        )

    def slowdown(self, streams: float) -> float:
        """Of start-ups while so many collectives run at once: between what was measured, and no better beyond it."""
        known = [(1, 1.0), *sorted((entry.streams, entry.slowdown) for entry in self.overlap)]
        most, at_most = known[-1]
        return _between(known, streams) if streams <= most else max(1.0, at_most * streams / most)

    def crowding(self, streams: float) -> float:
        """Of a full link's bytes while so many collectives share it; beyond what was measured, as for the most."""
        known = [(1, 1.0), *sorted((entry.streams, entry.crowding) for entry in self.overlap)]
        return _between(known, min(streams, known[-1][0]))


def _between(known: list[tuple[int, float]], streams: float) -> float:
    """Along the measured points, straight where both axes count in powers."""
    for (few, at_few), (many, at_many) in itertools.pairwise(known):
        if few <= streams <= many and many > few:
            share = math.log(streams / few) / math.log(many / few)
            return float(at_few ** (1 - share) * at_many**share)
    return known[-1][1]


def _check_placement(network: Network) -> None:
    if network.schema != 1:
        raise ValueError(f"schema: is {network.schema}, and this release knows 1")
    if network.backend not in ("gloo", "nccl"):
        raise ValueError(f"backend: must be gloo or nccl, not {network.backend}")
    if network.device not in ("cpu", "cuda"):
        raise ValueError(f"device: must be cpu or cuda, not {network.device}")
    if set(network.host_of_rank) != set(range(network.hosts)) or not network.hosts:
        raise ValueError("host_of_rank: must name every host of rack_of_host, from 0 up, and no other")
    if set(network.rack_of_host) != set(range(network.racks)):
        raise ValueError("rack_of_host: racks must be numbered from 0 up, without gaps")


def _check_parts(network: Network) -> None:
    check_whole(network, "in_flight", least=1)
    for field, keys in (
        ("links", [link.name for link in network.links]),
        ("collectives", [f"{entry.kind} at level {entry.level}" for entry in network.collectives]),
        ("overlap", [f"{entry.streams} streams" for entry in network.overlap]),
        ("startups", [f"{entry.ranks} ranks" for entry in network.startups]),
    ):
        if repeated := next(_repeated(keys), None):
            raise ValueError(f"{field}: {repeated} appears twice")
    for index, entry in enumerate(network.collectives):
        if entry.ranks != (ranks := network.ranks_at(entry.level)):
            raise ValueError(
                f"collectives[{index}].ranks: is {entry.ranks}, but the network has {ranks} at level {entry.level}"
            )
    rows = network.matrix_bytes_per_s
    if rows and (len(rows) != network.hosts or any(len(row) != network.hosts for row in rows)):
        raise ValueError(f"matrix_bytes_per_s: must have a row and a column for each of the {network.hosts} hosts")
    if any(not 0 <= value <= MOST for row in rows for value in row):
        raise ValueError("matrix_bytes_per_s: holds something else than numbers from 0 up, or what is too large")


def _repeated(keys: list[str]) -> Iterator[str]:
    seen: set[str] = set()
    for key in keys:
        if key in seen:
            yield key
        seen.add(key)
