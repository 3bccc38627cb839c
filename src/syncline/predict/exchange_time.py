"""What a collective, and a whole exchange, takes on a network's links: the network's two lines, for given bytes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from syncline.exchange import Cost, Phase, Topology, Tree
from syncline.predict.timeline import Bucket, Capacity, Collective, simulate
from syncline.records.network import Network

_ROUNDS = 4
"""Until a pace and what it does to itself agree."""
_MANY = 4
"""Collectives at once, among which a start-up's waiting is hidden, and only its work is left."""


def topology_of(network: Network, tree: Tree | None = None) -> Topology:
    """Who meets whom on this network, at the levels of `tree` or of its own hosts and racks, with what that takes."""
    flat = Topology.flat(network.ranks, network.backend)
    return dataclasses.replace(flat, levels=(tree or network.tree).levels, seconds=pricing(network))


def flow(network: Network, phase: Phase) -> Collective:
    """See `records.network`."""
    fitted, slower = network.collective(phase.kind, phase.level), _side_by_side(network, phase)
    least_s = fitted.least_s(phase.sent_bytes) * slower
    serial_s = min(fitted.serial_s * slower, least_s)
    loads = network.loads(phase.kind, phase.elements, phase.itemsize, phase.level)
    return Collective(
        kind=phase.kind,
        level=phase.level.name,
        serial_s=serial_s,
        spread_s=least_s - serial_s,
        load_bytes={name: nbytes * fitted.load for name, nbytes in loads.items()},
    )


def _side_by_side(network: Network, phase: Phase) -> float:
    """How much longer start-ups take than measured: groups that cross hosts side by side were measured one at a time,
    and on one machine they share its processors."""
    shared = network.one_machine and network.crosses(phase.level)
    return network.slowdown(len(phase.level.groups)) if shared else 1.0


def capacities(network: Network) -> Mapping[str, Capacity]:
    return {link.name: Capacity(link.bytes_per_s, link.burst_bytes) for link in network.links}


def solo_s(network: Network, kind: str, elements: int, itemsize: int) -> float:
    """One collective alone, from a standing start."""
    if network.ranks < 2:
        return 0.0
    phase = Phase.of(kind, elements, itemsize, Topology.flat(network.ranks, network.backend))
    timeline = simulate([Bucket("alone", 0.0, 0, (flow(network, phase),))], capacities(network))
    return timeline.end_s["alone"]


@functools.lru_cache(maxsize=16)  # one object for one network, so that topologies of it are equal
def pricing(network: Network) -> Callable[[Cost], float]:
    """Seconds that one bucket takes alone. A formula and no simulation, because those who choose by it ask for every
    bucket and every way.

    Its first chunk takes its phases one after the other. The others come in at the pace of the slowest phase, or of the
    busiest link; so many collectives are then under way at once, and slow each other down by what was measured. What
    start-ups take of processors comes on top: it does not hide behind links that processors serve, too.
    """
    rates = {link.name: link.bytes_per_s for link in network.links}
    work = network.slowdown(_MANY) / _MANY
    known: dict[tuple[object, ...], _Taken] = {}

    def taken(phase: Phase) -> _Taken:
        key = (phase.kind, phase.level, phase.elements, phase.itemsize)
        if key not in known:
            alone = flow(network, phase)
            busy_s = {name: nbytes / rates[name] for name, nbytes in alone.load_bytes.items()}
            startup_s = network.collective(phase.kind, phase.level).least_s(0) * _side_by_side(network, phase)
            known[key] = _Taken(alone.serial_s, alone.spread_s, startup_s, busy_s)
        return known[key]

    def pace_s(phases: Sequence[_Taken]) -> float:
        """From one chunk to the next. How many are under way and how slow that makes them follow from each other."""
        links = {name for phase in phases for name in phase.busy_s}
        busiest_s = max((sum(phase.busy_s.get(name, 0.0) for phase in phases) for name in links), default=0.0)
        found_s, at_once = 0.0, 1.0
        for _ in range(_ROUNDS):
            slower, crowding = network.slowdown(at_once), network.crowding(at_once)
            times_s = [phase.seconds(slower, crowding) for phase in phases]
            found_s = max(max(times_s, default=0.0) / network.in_flight, busiest_s * crowding)
            at_once = max(1.0, sum(times_s) / found_s) if found_s else 1.0
        return found_s + work * sum(phase.startup_s for phase in phases)

    def seconds(cost: Cost) -> float:
        parts = [[taken(phase) for phase in part] for part in cost.parts]
        total_s = sum(phase.seconds() for phase in parts[0]) if parts else 0.0
        if len(parts) > 1:  # all but the last are of one size
            total_s += (len(parts) - 2) * pace_s(parts[0]) + pace_s(parts[-1])
        return total_s

    return seconds


@dataclass(frozen=True)
class _Taken:
    """What a phase takes alone."""

    serial_s: float
    spread_s: float
    startup_s: float
    """Without any bytes."""
    busy_s: Mapping[str, float]
    """Of each link."""

    def seconds(self, slower: float = 1.0, crowding: float = 1.0) -> float:
        return self.serial_s * slower + max(self.spread_s * slower, crowding * max(self.busy_s.values(), default=0.0))
