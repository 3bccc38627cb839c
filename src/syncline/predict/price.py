"""What a collective, and a whole exchange, takes on a network's links: the network's two lines, for given bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from syncline.exchange import WORLD, Cost, Level, Phase, Topology, Tree
from syncline.measure.network import Network
from syncline.predict.timeline import Bucket, Capacity, Collective, simulate


def topology_of(network: Network, tree: Tree | None = None) -> Topology:
    """Who meets whom on this network, at the levels of `tree` or of its own hosts and racks, with what that takes."""
    everyone = Level(WORLD, (tuple(range(network.ranks)),))
    tree = tree or Tree.of_hosts(network.host_of_rank, network.rack_of_host)
    return Topology(everyone, tree.levels, network.backend, seconds=pricing(network))


def flow(network: Network, phase: Phase) -> Collective:
    """See `measure.network`."""
    fitted = network.collective(phase.kind, phase.level)
    least_s = fitted.least_s(phase.sent_bytes)
    serial_s = min(fitted.serial_s, least_s)
    loads = network.loads(phase.kind, phase.elements, phase.itemsize, phase.level)
    return Collective(
        kind=phase.kind,
        level=phase.level.name,
        serial_s=serial_s,
        spread_s=least_s - serial_s,
        load_bytes={name: nbytes * fitted.load for name, nbytes in loads.items()},
    )


def capacities(network: Network) -> Mapping[str, Capacity]:
    return {link.name: Capacity(link.bytes_per_s, link.burst_bytes) for link in network.links}


def solo_s(network: Network, kind: str, elements: int, itemsize: int) -> float:
    """One collective alone, from a standing start."""
    if network.ranks < 2:
        return 0.0
    phase = Phase.of(kind, elements, itemsize, Topology.flat(network.ranks, network.backend))
    timeline = simulate([Bucket("alone", 0.0, 0, (flow(network, phase),))], capacities(network))
    return timeline.end_s["alone"]


def pricing(network: Network) -> Callable[[Cost], float]:
    """Seconds that one bucket takes alone: its chunks enter one behind the other, each as soon as the slowest of its
    phases, or the busiest of its links, has done with the one before. A formula and no simulation, because those who
    choose by it ask for every bucket and every way."""
    rates = {link.name: link.bytes_per_s for link in network.links}
    known: dict[tuple[object, ...], tuple[float, dict[str, float]]] = {}

    def taken(phase: Phase) -> tuple[float, dict[str, float]]:
        """Seconds in all, and of each link."""
        key = (phase.kind, phase.level.name, len(phase.level.groups), phase.elements, phase.itemsize)
        if key not in known:
            alone = flow(network, phase)
            busy_s = {name: nbytes / rates[name] for name, nbytes in alone.load_bytes.items()}
            known[key] = (alone.serial_s + max(alone.spread_s, *busy_s.values(), 0.0), busy_s)
        return known[key]

    def seconds(cost: Cost) -> float:
        total_s = 0.0
        for number, part in enumerate(cost.parts):
            phases = [taken(phase) for phase in part]
            if number == 0:
                total_s += sum(phase_s for phase_s, _ in phases)
                continue
            links = {name for _, busy_s in phases for name in busy_s}
            busiest_s = max((sum(busy_s.get(name, 0.0) for _, busy_s in phases) for name in links), default=0.0)
            total_s += max(busiest_s, *(phase_s for phase_s, _ in phases), 0.0)
        return total_s

    return seconds
