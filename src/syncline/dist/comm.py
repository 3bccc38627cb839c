"""`Comm` over torch.distributed. Every collective is counted in bytes, and can be traced.

Each lane has its own process groups, so that lanes do not wait for each other's connections. All ranks create these
groups in the same order.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from syncline.dist.deadline import TooLateError, within
from syncline.dist.lane import Lane, Phases, make_lane
from syncline.dist.paced import PacedAllToAll
from syncline.errors import UsageError
from syncline.exchange import WORLD, Comm, Counter, Level, Topology, Work, wire

gather_into: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""`all_gather_into_tensor`, which torch 2.13 renamed."""
reduce_scatter_from: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""`reduce_scatter_tensor`, which torch 2.13 renamed."""

_c10d: Any = dist.distributed_c10d
_group_name = getattr(_c10d, "_process_group_name", None)
"""torch's private function that names new groups. If torch has none, `_fresh_group_name` has no effect."""


@dataclass
class Recorder(Counter):
    """Counts the collectives of one lane, which runs one bucket at a time, and reports them to listeners and traces."""

    phases: Phases | None = None
    """The trace of the current bucket; None if it is not traced."""
    issued: Callable[[str, str, int], None] = lambda kind, level, sent_bytes: None
    """Called before each collective is issued."""


@dataclass(frozen=True)
class GroupComm:
    """A `Comm` for the ranks of one process group; `siblings` are this rank's groups at all levels."""

    group: dist.ProcessGroup
    topology: Topology
    counter: Recorder = field(default_factory=Recorder)
    siblings: dict[str, GroupComm] = field(default_factory=dict)
    paced: PacedAllToAll = field(default_factory=PacedAllToAll)

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()

    def level(self, name: str) -> Comm | None:
        return self.siblings.get(name)

    def all_reduce(self, tensor: Tensor) -> Work:
        return self._issue("all_reduce", tensor, dist.all_reduce, tensor)

    def all_to_all(self, output: Tensor, input: Tensor) -> Work:
        # gloo sends tensors on a GPU only natively.
        paced = self._paced(input.nbytes) and input.is_cuda == (self.topology.backend == "nccl")
        return self._issue("all_to_all", input, self.paced if paced else dist.all_to_all_single, output, input)

    def all_gather(self, output: Tensor, input: Tensor) -> Work:
        if self.size == 2 and not output.is_cuda and self._paced(output.nbytes):
            # An all-to-all in which both ranks get the same. gloo's all-gather has the same problem (`wire.protocol`).
            rows = input.reshape(1, -1).expand(2, -1)
            return self._issue("all_gather", output, self.paced, output.view(2, -1), rows)
        return self._issue("all_gather", output, gather_into, output.view(-1), input.reshape(-1))

    def _paced(self, nbytes: int) -> bool:
        """Return whether an all-to-all of this size runs in rounds."""
        level, backend, paced_bytes = self.topology.whole.name, self.topology.backend, self.topology.paced_bytes
        return wire.protocol("all_to_all", nbytes, self.size, level, backend, paced_bytes) == wire.PACED

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Work:
        return self._issue(wire.REDUCE_SCATTER, input, reduce_scatter_from, output.view(-1), input.reshape(-1))

    def reduce(self, tensor: Tensor, root: int) -> Work:
        return self._issue("reduce", tensor, dist.reduce, tensor, dist.get_global_rank(self.group, root))

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        return self._issue("broadcast", tensor, dist.broadcast, tensor, dist.get_global_rank(self.group, root))

    def _issue(self, kind: str, whole: Tensor, collective: Callable[..., Any], *arguments: Any) -> Work:
        """Record a collective and issue it. `whole` is the tensor whose size decides how many bytes it sends."""
        level, counter = self.topology.whole.name, self.counter
        sent = wire.sent_bytes(kind, whole.numel(), whole.element_size(), self.size, self.topology.backend)
        counter.add(level, sent)
        counter.issued(kind, level, sent)
        traced = None if counter.phases is None else counter.phases.begin(kind, level, sent)
        work = collective(*arguments, group=self.group, async_op=True)
        assert work is not None, "this process is not in the group"  # noqa: S101
        return cast(Work, work) if traced is None else traced(work)


@dataclass(frozen=True)
class LaneGroups:
    """The process groups of one lane: one of all ranks, and this rank's group at each level of the topology."""

    comm: GroupComm
    sockets: set[tuple[int, str]] = field(default_factory=set)
    """Sockets that this process opened while the groups were created: gloo's, and perhaps unrelated ones."""

    @classmethod
    def create(cls, parent: dist.ProcessGroup, timeout: timedelta, topology: Topology | None = None) -> LaneGroups:
        """Collective over the parent's ranks: create the groups of a lane and open their connections. Connections are
        opened now because a group would otherwise open them in its first collective, which can hang past its timeout if
        another rank has died in the meantime. Connecting over a broken link may take minutes, whatever the timeout, and
        cannot be interrupted: with gloo, this raises instead and leaves a thread behind."""
        late = threading.Event()

        def attempt() -> LaneGroups:
            groups = cls._create(parent, timeout, topology)
            if late.is_set():
                groups.destroy()
            return groups

        if backend_of(parent) == "nccl":
            return attempt()
        limit_s = timeout.total_seconds() + max(2.0, 0.25 * timeout.total_seconds())
        try:
            return within(limit_s, attempt)
        except TooLateError as error:
            late.set()
            _c10d._process_group_name = _group_name  # the attempt may have replaced it
            # `health.suspects.is_collective` recognises this error by the word "connection".
            raise RuntimeError(f"no connection to all other ranks within {limit_s:.0f} s") from error

    @classmethod
    def _create(cls, parent: dist.ProcessGroup, timeout: timedelta, topology: Topology | None) -> LaneGroups:
        topology = topology or Topology.flat(parent.size(), backend_of(parent))
        before = open_sockets()
        comm = GroupComm(_new_group(parent, timeout), topology)
        comm.siblings[WORLD] = comm
        groups = cls(comm)
        try:
            open_connections(comm)
            for level in topology.levels:
                group = _new_group(parent, timeout, level)
                if group is not None:
                    sibling = GroupComm(group, topology.among(level), comm.counter, comm.siblings)
                    comm.siblings[level.name] = sibling
                    open_connections(sibling)
        except BaseException:
            groups.destroy()
            raise
        comm.counter.sent_bytes.clear()
        groups.sockets.update(open_sockets() - before)
        return groups

    def cut(self) -> None:
        """Shut down the connections at the end of a program, so that pending collectives fail: gloo has no other way
        to cancel them."""
        for descriptor, _ in self.sockets & open_sockets():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.getpeername()  # raises for gloo's listening socket, which must stay open
                connection.shutdown(socket.SHUT_RDWR)

    def destroy(self) -> None:
        """Destroy the process groups of this lane."""
        if dist.is_initialized():
            for sibling in self.comm.siblings.values():
                with contextlib.suppress(ValueError):  # already destroyed, if torch.distributed was restarted
                    dist.destroy_process_group(sibling.group)
        self.comm.siblings.clear()  # they contain `comm`: a reference cycle, which would keep gloo's threads alive


def open_lanes(
    group: dist.ProcessGroup, timeout: timedelta, count: int, device: torch.device, topology: Topology | None
) -> tuple[list[LaneGroups], list[Lane]]:
    """Collective: open `count` lanes, and return their process groups and the lanes."""
    lane_groups: list[LaneGroups] = []
    lanes: list[Lane] = []
    try:
        for index in range(count):
            lane_groups.append(LaneGroups.create(group, timeout, topology))
            lanes.append(make_lane(device, f"syncline-lane-{index}"))
    except BaseException:
        close_lanes(lanes, lane_groups)
        raise
    return lane_groups, lanes


def close_lanes(lanes: Sequence[Lane], lane_groups: Sequence[LaneGroups]) -> None:
    """Close the lanes, and destroy their groups unless an abandoned job may still use them."""
    for lane in lanes:
        lane.close()
    if not any(lane.stuck for lane in lanes):
        for groups in lane_groups:
            groups.destroy()


def open_sockets() -> set[tuple[int, str]]:
    """Return the open sockets of this process: descriptors and the kernel's names for them. Empty unless on Linux."""
    sockets = set()
    for path in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):
            if (name := str(path.readlink())).startswith("socket:"):
                sockets.add((int(path.name), name))
    return sockets


def _new_group(parent: dist.ProcessGroup, timeout: timedelta, level: Level | None = None) -> Any:
    """Collective over the parent's ranks: create a group of all of them, or this rank's group at a level. Return None
    if this rank is in no group of more than one rank at that level."""
    ranks = dist.get_process_group_ranks(parent)
    options: dict[str, Any] = {"timeout": timeout, "backend": dist.get_backend(parent)}
    groups = [tuple(range(len(ranks)))] if level is None else [group for group in level.groups if len(group) > 1]
    mine = next((group for group in groups if parent.rank() in group), ())
    own_group: Any = None
    if len(ranks) == dist.get_world_size():
        for group in groups:  # NCCL splits a communicator only if all of its ranks take part, members or not
            new = dist.new_group([ranks[member] for member in group], **options)
            own_group = new if group == mine else own_group
    else:  # ranks outside the parent do not attach, and cannot take part
        with _fresh_group_name(parent, f"of {min(mine, default=0)}"):
            if mine:
                members = [ranks[member] for member in mine]
                own_group = dist.new_group(members, use_local_synchronization=True, **options)
    if mine and own_group.rank() != mine.index(parent.rank()):
        raise UsageError("the ranks of the model's process group must be in ascending order: sort them")
    return own_group


def open_connections(comm: GroupComm) -> None:
    """Open the connections of a new group, by running two small collectives."""
    device = group_device(comm.group)
    comm.all_to_all(torch.zeros(comm.size, device=device), torch.zeros(comm.size, device=device)).wait()
    comm.all_reduce(torch.zeros(1, device=device)).wait()


@contextlib.contextmanager
def _fresh_group_name(parent: dist.ProcessGroup, which: str) -> Iterator[None]:
    """Collective over the parent's ranks: give the group that is created inside this context a unique name, the same on
    all of its ranks. `which` distinguishes groups that different ranks create at the same time. torch derives the name
    of such a group from the number of groups that exist. This has two consequences: the name of a destroyed group is
    reused, along with the outdated addresses in the store, and connecting to these hangs; and ranks that are in
    different numbers of groups wait for each other under different names."""
    token = gather_bytes(parent, secrets.token_hex(16).encode())[0].decode()
    _c10d._process_group_name = lambda ranks, use_hashed_name: f"{token} {which}"
    try:
        yield
    finally:
        _c10d._process_group_name = _group_name


def backend_of(group: dist.ProcessGroup) -> str:
    """Return the name of the backend that carries this group's tensors. If the group has one backend per device type,
    as `init_process_group()` creates it, this is the one for CUDA if a GPU is available, else the one for the CPU."""
    name = str(dist.get_backend(group))
    if name != "undefined" and ":" not in name:
        return name
    by_device = dict(part.split(":", 1) for part in dist.get_backend_config(group).split(",") if ":" in part)
    return by_device.get("cuda" if torch.cuda.is_available() else "cpu", name)


def group_device(group: dist.ProcessGroup) -> torch.device:
    """Return the device on which this group's backend expects tensors."""
    if backend_of(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def gather_bytes(group: dist.ProcessGroup, data: bytes) -> list[bytes]:
    """Collective: return every rank's `data`, in rank order. It is not pickled."""
    device, size = group_device(group), group.size()
    length = torch.tensor([len(data)], device=device)
    lengths = torch.zeros(size, dtype=length.dtype, device=device)
    gather_into(lengths, length, group=group)
    longest = max(int(lengths.max()), 1)
    padded = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8).to(device)
    gathered = torch.zeros(size * longest, dtype=torch.uint8, device=device)
    gather_into(gathered, padded, group=group)
    rows = gathered.view(size, longest).cpu().numpy()
    return [row[:count].tobytes() for row, count in zip(rows, lengths.tolist(), strict=True)]


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """Return the timeout of this group, or torch's default if it cannot be read."""
    try:
        return group._get_backend(group_device(group)).options._timeout
    except (AttributeError, RuntimeError):
        return dist.default_pg_timeout if hasattr(dist, "default_pg_timeout") else timedelta(minutes=30)


def bound_group(group: dist.ProcessGroup, timeout_s: float | None) -> None:
    """Limit every later collective of this group to `timeout_s`, including the all-reduces of plain DDP. This uses a
    private function of torch. If it is missing, the group keeps its own timeout."""
    set_timeout = getattr(_c10d, "_set_pg_timeout", None)
    if timeout_s is not None and set_timeout is not None:
        set_timeout(timedelta(seconds=timeout_s), group)
