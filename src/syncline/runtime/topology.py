"""Where a model's ranks sit, for exchanges that climb levels: found by themselves, read from a network, or given."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch.distributed as dist

from syncline.dist.agreement import agree, digest
from syncline.dist.comm import backend_of, gather_bytes
from syncline.errors import SynclineError, UsageError
from syncline.exchange import Climbing, Exchange, Topology, Tree
from syncline.measure.assumed_network import assumed_links
from syncline.measure.topology import host_identity, number
from syncline.predict.exchange_time import topology_of
from syncline.records.network import Network


@dataclass(frozen=True)
class Place:
    """The same on all ranks."""

    tree: Tree
    topology: Topology
    known: str
    """Where its knowledge of links comes from."""


def find_place(group: dist.ProcessGroup, exchanges: Sequence[Exchange], network: Network | None) -> Place | None:
    """Collective; None where no exchange asks. Hosts are found by what ranks say of themselves, racks are the
    network's: they show only in what links carry."""
    climbing = next((exchange for exchange in exchanges if isinstance(exchange, Climbing)), None)
    if climbing is None and network is None:
        return None
    host_of_rank = hosts_of(group)
    if network is not None:
        check_network(network, host_of_rank, backend_of(group))
    if climbing is None:
        return None
    links = network or assumed_links(host_of_rank, backend=backend_of(group))
    tree = climbing.tree(links.tree, group.size())
    agree(group, {"tree": repr(tree.root)}, "where ranks sit")
    known = links.how if links.measured else f"{links.how}; attach(…, network=…) chooses by measured ones"
    return Place(tree, topology_of(links, tree), known)


def hosts_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Collective: by rank, the number of its host."""
    return number([data.decode() for data in gather_bytes(group, host_identity().encode())])


def check_network(network: Network, host_of_rank: tuple[int, ...], backend: str) -> None:
    again = "probe this cluster again"
    if network.ranks != len(host_of_rank):
        raise UsageError(f"the network is one of {network.ranks} ranks, and the model has {len(host_of_rank)}: {again}")
    if number([str(host) for host in network.host_of_rank]) != host_of_rank:
        raise UsageError(f"the network's ranks sit on other hosts than the model's: {again}")
    if network.backend != backend:
        raise UsageError(f"the network was probed over {network.backend}, and the model uses {backend}: {again}")


def read_network(network: object) -> Network | SynclineError | None:
    """An error is returned: what one rank cannot read is an error for all of them, once they have met."""
    if network is None or isinstance(network, Network):
        return network
    if not isinstance(network, str | os.PathLike):
        kind = type(network).__name__
        return UsageError(f"network is a {kind}: pass a Network, or the file that syncline probe wrote")
    try:
        return Network.load(network)
    except SynclineError as error:
        return error


def mark_of(network: Network | SynclineError | None) -> str | None:
    """Ranks choose by it, so it has to be the same file; what it says is none of a fingerprint's business."""
    if isinstance(network, SynclineError):
        return f"unreadable: {network}"
    return None if network is None else f"one with digest {digest(msgspec.to_builtins(network)).hex()[:8]}"
