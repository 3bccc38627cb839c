"""Find the topology of a model's ranks, for exchanges that use levels: detected, read from a network, or given."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec
from torch.distributed import ProcessGroup

from syncline.dist.agreement import agree, digest
from syncline.dist.comm import backend_of, gather_bytes
from syncline.errors import UsageError
from syncline.exchange import Exchange, Topology, Tree, UsesLevels
from syncline.measure.assumed_network import assumed_links
from syncline.measure.topology import host_identity, number
from syncline.predict.exchange_time import topology_of
from syncline.records.network import Network
from syncline.records.plan import Plan

T = TypeVar("T", Network, Plan)
NetworkOrFile = Network | str | os.PathLike[str] | None


@dataclass(frozen=True)
class RankTopology:
    """The topology of a model's ranks, equal on all ranks."""

    tree: Tree | None
    """None if no exchange uses levels."""
    topology: Topology
    known: str  # how the link speeds are known: measured or assumed


def find_topology(group: ProcessGroup, exchanges: Sequence[Exchange], network: Network | None) -> RankTopology | None:
    """Collective: return the topology, or None if no exchange uses levels and there is no network. Raise if the network
    is another cluster's.

    Hosts are detected. Racks come from `network`, because only measurements of the links reveal them.
    """
    by_levels = next((exchange for exchange in exchanges if isinstance(exchange, UsesLevels)), None)
    if by_levels is None and network is None:
        return None
    host_of_rank = hosts_of(group)
    links = network or assumed_links(host_of_rank, backend=backend_of(group))
    if network is not None:
        check_network(network, host_of_rank, backend_of(group))
    if by_levels is None:
        flat = Topology.flat(group.size(), backend_of(group))
        return RankTopology(None, replace(flat, paced_bytes=links.paced_bytes), links.how)
    tree = by_levels.tree(links.tree, group.size())
    agree(group, {"tree": repr(tree.root)}, "the topology")
    advice = "pass network= to attach, tune or wrap, to use measured speeds"
    known = links.how if links.measured else f"{links.how}; {advice}"
    return RankTopology(tree, topology_of(links, tree), known)


def hosts_of(group: ProcessGroup) -> tuple[int, ...]:
    """Collective: return the number of each rank's host."""
    return number([data.decode() for data in gather_bytes(group, host_identity().encode())])


def check_network(network: Network, host_of_rank: tuple[int, ...], backend: str) -> None:
    """Raise unless the network was measured on these hosts, with this backend."""
    again, ranks = "probe this cluster again", len(host_of_rank)
    if network.ranks != ranks:
        raise UsageError(f"the network was measured with {network.ranks} ranks, but the model has {ranks}: {again}")
    if number([str(host) for host in network.host_of_rank]) != host_of_rank:
        raise UsageError(f"the network was measured with ranks on other hosts than the model's: {again}")
    if network.backend != backend:
        raise UsageError(f"the network was measured with {network.backend}, but the model uses {backend}: {again}")


def loaded_from(name: str, value: T | str | os.PathLike[str], kind: type[T]) -> T:
    """Return the argument `name`, which is a Plan or a Network, or load it if it is the path of a file."""
    if isinstance(value, kind):
        return value
    if not isinstance(value, str | os.PathLike):
        raise UsageError(f"{name} is a {type(value).__name__}: pass a {kind.__name__}, or the path of its file")
    return kind.load(value)


def read_network(network: NetworkOrFile, fields: dict[str, Any]) -> Network | None:
    """Return the network, or read it from its file. Its digest is added to the fields that ranks compare."""
    loaded = None if network is None else loaded_from("network", network, Network)
    fields["network"] = None if loaded is None else f"digest {digest(msgspec.to_builtins(loaded)).hex()[:8]}"
    return loaded
