"""Process groups of replicas that are there at the moment. They need no default process group.

`torch.distributed` creates groups among a fixed number of ranks. These groups are created from the members of a quorum,
through the store of one of them, and are replaced when a member leaves or joins. Their gloo connections listen on the
address of the replica's manager only.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from syncline.dist.comm import GroupComm, LaneGroups, open_connections, open_sockets
from syncline.dist.deadline import TooLateError, within
from syncline.elastic.standing import Member
from syncline.exchange import WORLD, Exchange, Topology
from syncline.runtime.topology import RankTopology, find_topology

T = TypeVar("T")
_world: Any = dist.distributed_c10d._world
_GLOO: Any = dist.ProcessGroupGloo
_BACKEND: Any = dist.ProcessGroup.BackendType.GLOO


@dataclass
class Connections:
    """The process groups of this replica with other members of a quorum. `close` may be called at any time, and by
    another thread: collectives that still run then fail, here and on the other members."""

    key: str
    """The same on all members, and different for all other connections."""
    members: tuple[Member, ...]
    rank: int
    groups: list[Any] = field(default_factory=list)
    comm: GroupComm | None = None
    sockets: set[tuple[int, str]] = field(default_factory=set)
    """The sockets that this process opened meanwhile, and that lead to members."""
    topology: RankTopology | None = None
    is_closed: bool = False

    @property
    def group(self) -> Any:
        """The group of all members."""
        return self.groups[0]

    @property
    def ready(self) -> GroupComm:
        assert self.comm is not None  # noqa: S101 - `connect` has returned
        return self.comm

    def close(self) -> None:
        self.is_closed = True
        groups, self.groups = self.groups, []
        if groups:  # gloo's own `abort` leaves the connections open, and the other members would wait for a timeout
            LaneGroups(GroupComm(groups[0], Topology.flat(len(self.members))), self.sockets).cut()
        for group in groups:
            with contextlib.suppress(RuntimeError):
                group._get_backend(torch.device("cpu")).abort()
            for registry in (_world.pg_map, _world.pg_names, _world.pg_group_ranks, _world.pg_backend_config):
                registry.pop(group, None)
        if self.comm is not None:
            self.comm.siblings.clear()  # a reference cycle


def connect(
    key: str,
    members: Sequence[Member],
    replica: str,
    address: str,
    exchanges: Sequence[Exchange],
    timeout_s: float,
    limit_s: float,
) -> Connections:
    """Collective: connect the members, and create groups for the levels of these exchanges.

    Raises:
        RuntimeError: Not all members connect within `limit_s`.
    """
    rank = [member.replica for member in members].index(replica)
    connections = Connections(key, tuple(members), rank)
    late = threading.Event()

    def attempt() -> None:
        try:
            _connect(connections, address, exchanges, timedelta(seconds=timeout_s), timedelta(seconds=limit_s))
        except BaseException:
            connections.close()
            raise
        if late.is_set():
            connections.close()

    try:
        within(limit_s + 1.0, attempt)
    except TooLateError:
        late.set()
        connections.close()
        raise
    return connections


def _connect(
    made: Connections, address: str, exchanges: Sequence[Exchange], timeout: timedelta, limit: timedelta
) -> None:
    host, _, port = made.members[0].store.rpartition("/")
    before = open_sockets()
    client = TCPStore(host, int(port), None, False, limit, wait_for_workers=False)
    store = PrefixStore(f"syncline/{made.key}", client)
    size = len(made.members)
    group = _group(PrefixStore("world", store), made.rank, size, address, limit)
    made.groups.append(group)
    comm = GroupComm(group, Topology.flat(size))
    open_connections(comm)
    made.sockets |= _connected(open_sockets() - before, made.members)
    made.topology = find_topology(group, exchanges, None)
    topology = comm.topology if made.topology is None else made.topology.topology
    comm = GroupComm(group, topology)
    comm.siblings[WORLD] = comm
    for level in topology.levels:
        index, mine = next(((i, ranks) for i, ranks in enumerate(level.groups) if made.rank in ranks), (0, ()))
        if len(mine) > 1:
            own = _group(PrefixStore(f"{level.name}/{index}", store), mine.index(made.rank), len(mine), address, limit)
            made.groups.append(own)
            sibling = GroupComm(own, topology.among(level), comm.counter, comm.siblings)
            comm.siblings[level.name] = sibling
            open_connections(sibling)
            made.sockets |= _connected(open_sockets() - before, made.members)
    for group in made.groups:  # connecting has its own limit
        group._get_backend(torch.device("cpu"))._set_default_timeout(timeout)
    comm.counter.sent_bytes.clear()
    made.comm = comm


def _group(store: Any, rank: int, size: int, address: str, timeout: timedelta) -> Any:
    """Return a group over gloo that is not derived from a default group. This uses private functions of torch: its
    public ones create groups among the ranks of a default group, whose number is fixed."""
    options = _GLOO._Options()
    options._devices, options._timeout, options._threads = [_GLOO.create_device(hostname=address)], timeout, 2
    backend = _GLOO(store, rank, size, options)
    backend._set_sequence_number_for_group()
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(_BACKEND)
    group._register_backend(torch.device("cpu"), _BACKEND, backend)
    # What `dist.get_backend`, `dist.get_process_group_ranks` and `dist.get_global_rank` read.
    _world.pg_map[group], _world.pg_names[group] = ("gloo", store), f"syncline-elastic-{id(group)}"
    _world.pg_group_ranks[group] = {number: number for number in range(size)}
    _world.pg_backend_config[group] = "cpu:gloo"
    return group


def _connected(sockets: set[tuple[int, str]], members: Sequence[Member]) -> set[tuple[int, str]]:
    """Return the sockets that lead to members: other threads may have opened some at the same time."""
    addresses = {member.store.rpartition("/")[0] for member in members}
    connected = set()
    for descriptor, name in sockets:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.getpeername()[0] in addresses:
                connected.add((descriptor, name))
    return connected


def run_within(limit_s: float, action: Callable[[], T]) -> T:
    """Call `action` without a record of gradients, and raise `TooLateError` if it takes longer than `limit_s`."""

    def call() -> T:
        with torch.no_grad():
            return action()

    return within(limit_s, call)
