"""The time of one collective, and of a whole exchange, on a network. `records.network` defines the model."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from syncline.exchange import Cost, Phase, Topology, Tree
from syncline.predict.timeline import Bucket, Capacity, Collective, simulate
from syncline.records.link_costs import Collective as FittedCollective
from syncline.records.network import Network

_ROUNDS = 4  # iterations until the pace of chunks and the slowdown that follows from it agree
_MANY = 4  # concurrent collectives that hide each other's latency, so that only the processors' time remains


def topology_of(network: Network, tree: Tree | None = None) -> Topology:
    """Return the topology of a network, with a function for the time of an exchange.

    Its levels are those of `tree`; by default, the network's hosts and racks.
    """
    flat = Topology.flat(network.ranks, network.backend)
    levels, paced_bytes = (tree or network.tree).levels, network.paced_bytes
    return dataclasses.replace(flat, levels=levels, seconds=pricing(network), paced_bytes=paced_bytes)


def flow(network: Network, phase: Phase) -> Collective:
    """Return what the simulation needs to know of one collective."""
    fitted, slowdown = _cost_of(network, phase), _concurrent_groups_slowdown(network, phase)
    least_s = fitted.least_s(phase.sent_bytes) * slowdown
    serial_s = min(fitted.serial_s * slowdown, least_s)
    loads = network.loads(phase.kind, phase.elements, phase.itemsize, phase.level)
    return Collective(
        kind=phase.kind,
        level=phase.level.name,
        serial_s=serial_s,
        spread_s=least_s - serial_s,
        load_bytes={name: nbytes * fitted.load for name, nbytes in loads.items()},
        sent_bytes=phase.sent_bytes,
    )


def _cost_of(network: Network, phase: Phase) -> FittedCollective:
    kind = network.protocol(phase.kind, phase.elements * phase.itemsize, phase.level)
    return network.collective(kind, phase.level)


def _concurrent_groups_slowdown(network: Network, phase: Phase) -> float:
    """Return the factor by which start-ups take longer than measured.

    Groups of one level that cross hosts run at the same time but were measured one at a time. If all hosts are emulated
    on one machine, they share its processors.
    """
    shared = network.one_machine and network.crosses(phase.level.groups)
    return network.slowdown(len(phase.level.groups)) if shared else 1.0


def capacities(network: Network) -> Mapping[str, Capacity]:
    return {link.name: Capacity(link.bytes_per_s, link.burst_bytes) for link in network.links}


def solo_s(network: Network, kind: str, elements: int, itemsize: int) -> float:
    """Return the time of one collective alone, over links that were idle."""
    if network.ranks < 2:
        return 0.0
    phase = Phase.of(kind, elements, itemsize, Topology.flat(network.ranks, network.backend))
    timeline = simulate([Bucket("alone", 0.0, 0, (flow(network, phase),))], capacities(network))
    return timeline.end_s["alone"]


@functools.lru_cache(maxsize=16)  # one function per network, so that topologies of one network are equal
def pricing(network: Network) -> Callable[[Cost], float]:
    """Return a function for the time of one bucket alone.

    It is a formula and not a simulation, because planning evaluates it for every bucket and every path.

    The phases of the first chunk run one after the other. Further chunks follow at the pace of the slowest phase, or of
    the busiest link. Several collectives then run at once, and slow each other down by the measured factors. The
    processors' part of start-ups is added, because processors also serve the links and so cannot hide it.
    """
    rates = {link.name: link.bytes_per_s for link in network.links}
    processor_share = network.slowdown(_MANY) / _MANY
    known: dict[tuple[object, ...], _PhaseTime] = {}

    def alone(phase: Phase) -> _PhaseTime:
        key = (phase.kind, phase.level, phase.elements, phase.itemsize)
        if key not in known:
            transfer = flow(network, phase)
            busy_s = {name: nbytes / rates[name] for name, nbytes in transfer.load_bytes.items()}
            slowdown = _concurrent_groups_slowdown(network, phase)
            startup_s = _cost_of(network, phase).least_s(0) * slowdown
            known[key] = _PhaseTime(transfer.serial_s, transfer.spread_s, startup_s, busy_s)
        return known[key]

    def pace_s(phases: Sequence[_PhaseTime]) -> float:
        """Return the time between chunks. It and the number of concurrent collectives depend on each other, so both are
        computed in a few rounds."""
        links = {name for phase in phases for name in phase.busy_s}
        busiest_s = max((sum(phase.busy_s.get(name, 0.0) for phase in phases) for name in links), default=0.0)
        chunk_s, concurrent = 0.0, 1.0
        for _ in range(_ROUNDS):
            slowdown, crowding = network.slowdown(concurrent), network.crowding(concurrent)
            times_s = [phase.seconds(slowdown, crowding) for phase in phases]
            chunk_s = max(max(times_s, default=0.0) / network.in_flight, busiest_s * crowding)
            concurrent = max(1.0, sum(times_s) / chunk_s) if chunk_s else 1.0
        return chunk_s + processor_share * sum(phase.startup_s for phase in phases)

    def seconds(cost: Cost) -> float:
        parts = [[alone(phase) for phase in part] for part in cost.parts]
        total_s = sum(phase.seconds() for phase in parts[0]) if parts else 0.0
        if len(parts) > 1:  # all chunks but the last have the same size
            total_s += (len(parts) - 2) * pace_s(parts[0]) + pace_s(parts[-1])
        return total_s

    return seconds


@dataclass(frozen=True)
class _PhaseTime:
    """The time of a phase alone."""

    serial_s: float
    spread_s: float
    startup_s: float  # without any bytes
    busy_s: Mapping[str, float]  # by link

    def seconds(self, slowdown: float = 1.0, crowding: float = 1.0) -> float:
        busiest_s = max(self.busy_s.values(), default=0.0)
        return self.serial_s * slowdown + max(self.spread_s * slowdown, crowding * busiest_s)
