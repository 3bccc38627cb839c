"""`Comm` over torch.distributed: thin, and it keeps the books.

Groups belong to one lane each, so that lanes do not wait for each other's connections, and are created by all ranks in
the same order.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from syncline.dist.deadline import TooLateError, within
from syncline.dist.lane import Lane, Phases, make_lane
from syncline.errors import UsageError
from syncline.exchange import WORLD, Comm, Counter, Level, Topology, Work
from syncline.exchange.wire import sent_bytes

gather_into: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""torch 2.13 renamed it; 2.11 has only the old name."""


_c10d: Any = dist.distributed_c10d
_group_name = getattr(_c10d, "_process_group_name", None)
"""How torch names groups: private, and a torch without it names them in some other way."""


@dataclass
class Notes:
    """Of one lane, which runs one bucket at a time."""

    phases: Phases | None = None
    """Where collectives are noted that are issued now; None while nobody traces them."""
    issued: Callable[[str, str, int], None] = lambda kind, level, sent_bytes: None
    """Told of each, before it is issued."""


@dataclass(frozen=True)
class GroupComm:
    """The ranks of one process group; `siblings` are this rank's groups at the other levels."""

    group: dist.ProcessGroup
    topology: Topology
    counter: Counter
    siblings: Mapping[str, GroupComm] = field(default_factory=dict)
    notes: Notes = field(default_factory=Notes)

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()

    def level(self, name: str) -> Comm | None:
        return self.siblings.get(name)

    def all_reduce(self, tensor: Tensor) -> Work:
        noted = self._count("all_reduce", tensor)
        return self._issued(dist.all_reduce(tensor, group=self.group, async_op=True), noted)

    def all_to_all(self, output: Tensor, input: Tensor) -> Work:
        noted = self._count("all_to_all", input)
        return self._issued(dist.all_to_all_single(output, input, group=self.group, async_op=True), noted)

    def all_gather(self, output: Tensor, input: Tensor) -> Work:
        noted = self._count("all_gather", output)
        return self._issued(gather_into(output.view(-1), input.reshape(-1), group=self.group, async_op=True), noted)

    def reduce(self, tensor: Tensor, root: int) -> Work:
        noted = self._count("reduce", tensor)
        to = dist.get_global_rank(self.group, root)
        return self._issued(dist.reduce(tensor, to, group=self.group, async_op=True), noted)

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        noted = self._count("broadcast", tensor)
        source = dist.get_global_rank(self.group, root)
        return self._issued(dist.broadcast(tensor, source, group=self.group, async_op=True), noted)

    def _count(self, kind: str, whole: Tensor) -> Callable[[Any], Work] | None:
        """What to make of the work for its end to be noted, where it is."""
        level = self.topology.whole.name
        sent = sent_bytes(kind, whole.numel(), whole.element_size(), self.size, self.topology.backend)
        self.counter.add(level, sent)
        self.notes.issued(kind, level, sent)
        phases = self.notes.phases
        return None if phases is None else phases.begin(kind, level, sent)

    @staticmethod
    def _issued(work: Any, noted: Callable[[Any], Work] | None) -> Work:
        assert work is not None, "this process is not in the group"  # noqa: S101
        return cast(Work, work) if noted is None else noted(work)


@dataclass(frozen=True)
class LaneGroups:
    """The process groups of one lane: of all ranks, and of this rank at each level that the lane's exchange climbs."""

    comm: GroupComm
    counter: Counter
    siblings: dict[str, GroupComm]
    notes: Notes
    sockets: set[tuple[int, str]] = field(default_factory=set)
    """Of this process, that came with them: gloo's connections, and perhaps others of the same moment."""

    @property
    def topology(self) -> Topology:
        return self.comm.topology

    @classmethod
    def create(cls, parent: dist.ProcessGroup, timeout: timedelta, topology: Topology | None = None) -> LaneGroups:
        """Collective over the parent's ranks: new connections of the lane's own, opened right away.

        A group's first collective would open them lazily, and can hang past its timeout if a peer died meanwhile.
        """
        if backend_of(parent) == "nccl":
            return cls._create(parent, timeout, topology)
        limit_s = timeout.total_seconds() + max(2.0, 0.25 * timeout.total_seconds())
        return _within(limit_s, lambda: cls._create(parent, timeout, topology))

    @classmethod
    def _create(cls, parent: dist.ProcessGroup, timeout: timedelta, topology: Topology | None) -> LaneGroups:
        topology = topology or Topology.flat(parent.size(), backend_of(parent))
        counter, notes = Counter(), Notes()
        siblings: dict[str, GroupComm] = {}
        before = _sockets()
        comm = GroupComm(_new_group(parent, timeout), topology, counter, siblings, notes)
        groups = cls(comm, counter, siblings, notes)
        siblings[WORLD] = groups.comm
        try:
            _warm(groups.comm)
            for level in topology.levels:
                group = _new_group(parent, timeout, level)
                if group is not None:
                    siblings[level.name] = GroupComm(group, topology.among(level), counter, siblings, notes)
                    _warm(siblings[level.name])
        except BaseException:
            groups.destroy()
            raise
        counter.sent_bytes.clear()
        groups.sockets.update(_sockets() - before)
        return groups

    def cut(self) -> None:
        """Ends what is under way: gloo cannot be asked to, but it fails when its connections do. At the end of a
        program, when they are closed anyway."""
        for descriptor, _ in self.sockets & _sockets():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
                one.getpeername()  # gloo has one that listens, too, and does not bear to lose it
                one.shutdown(socket.SHUT_RDWR)

    def destroy(self) -> None:
        if dist.is_initialized():
            for sibling in self.comm.siblings.values():
                with contextlib.suppress(ValueError):  # gone already, if torch.distributed was ended and started again
                    dist.destroy_process_group(sibling.group)
        self.siblings.clear()  # a comm is among its own siblings: a cycle that would keep its group's threads alive


def open_lanes(
    group: dist.ProcessGroup, timeout: timedelta, count: int, device: torch.device, topology: Topology | None
) -> tuple[list[LaneGroups], list[Lane]]:
    """Collective: so many lanes, and the groups of each."""
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
    for lane in lanes:
        lane.close()
    if not any(lane.stuck for lane in lanes):  # else what was given up still uses them
        for groups in lane_groups:
            groups.destroy()


def _within(limit_s: float, create: Callable[[], LaneGroups]) -> LaneGroups:
    """What it creates, or an error when it has not in time: connecting over a link that was cut may take minutes,
    whatever the timeout, and cannot be interrupted."""
    late = threading.Event()

    def attempt() -> LaneGroups:
        made = create()
        if late.is_set():
            made.destroy()
        return made

    try:
        return within(limit_s, attempt)
    except TooLateError as error:
        late.set()
        if _group_name is not None:
            _c10d._process_group_name = _group_name  # which the attempt may have changed
        raise RuntimeError(f"no connection to all other ranks within {limit_s:.0f} s") from error


def _sockets() -> set[tuple[int, str]]:
    """This process's, by their descriptors and the kernel's names for them; on Linux."""
    found = set()
    for path in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):
            if (name := str(path.readlink())).startswith("socket:"):
                found.add((int(path.name), name))
    return found


def _new_group(parent: dist.ProcessGroup, timeout: timedelta, level: Level | None = None) -> Any:
    """Collective over the parent's ranks: a group of all of them, or each one's group at a level; None for ranks that
    meet nobody there."""
    ranks = dist.get_process_group_ranks(parent)
    options: dict[str, Any] = {"timeout": timeout, "backend": dist.get_backend(parent)}
    groups = [tuple(range(len(ranks)))] if level is None else [group for group in level.groups if len(group) > 1]
    mine = next((group for group in groups if parent.rank() in group), ())
    made: Any = None
    if len(ranks) == dist.get_world_size():
        for group in groups:  # NCCL splits a communicator only if all of its ranks take part, outsiders among them
            new = dist.new_group([ranks[member] for member in group], **options)
            made = new if group == mine else made
    else:  # ranks outside of the parent do not attach, and cannot take part
        with _fresh_group_name(parent, f"of {min(mine, default=0)}"):
            if mine:
                members = [ranks[member] for member in mine]
                made = dist.new_group(members, use_local_synchronization=True, **options)
    if mine and made.rank() != mine.index(parent.rank()):
        raise UsageError("the model's process group numbers its ranks in another order than the world does: sort them")
    return made


def _warm(comm: GroupComm) -> GroupComm:
    """Opens a new group's connections."""
    comm.all_to_all(*_pair(comm.size, comm.group)).wait()
    comm.all_reduce(_pair(1, comm.group)[0]).wait()
    return comm


@contextlib.contextmanager
def _fresh_group_name(parent: dist.ProcessGroup, which: str) -> Iterator[None]:
    """Collective. Names the group that is created inside as no other was, the same on all of its ranks.

    torch names a group of a part of the world after how many groups there are. So a destroyed group's name comes back,
    with the addresses that its ranks once left in the store, and connecting to those hangs; and ranks that are in
    different numbers of groups wait for each other under different names. `which` tells groups apart that parts of the
    parent's ranks create at the same time.
    """
    if _group_name is None:
        yield
        return
    token = gather_bytes(parent, secrets.token_hex(16).encode())[0].decode()
    _c10d._process_group_name = lambda ranks, use_hashed_name: f"{token} {which}"
    try:
        yield
    finally:
        _c10d._process_group_name = _group_name


def backend_of(group: dist.ProcessGroup) -> str:
    """What carries this group's tensors: of a group with one for each kind of device, as `init_process_group()` without
    an argument makes it, a GPU's where there is one."""
    name = str(dist.get_backend(group))
    if name != "undefined" and ":" not in name:
        return name
    each = dict(part.split(":", 1) for part in dist.get_backend_config(group).split(",") if ":" in part)
    return each.get("cuda" if torch.cuda.is_available() else "cpu", name)


def group_device(group: dist.ProcessGroup) -> torch.device:
    """Where a tensor must be for this group to carry it."""
    if backend_of(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def gather_bytes(group: dist.ProcessGroup, data: bytes) -> list[bytes]:
    """Every rank's `data`, in rank order; no pickle."""
    device, size = group_device(group), group.size()
    length = torch.tensor([len(data)], device=device)
    lengths = torch.zeros(size, dtype=length.dtype, device=device)
    gather_into(lengths, length, group=group)
    longest = max(int(lengths.max()), 1)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)].to(device)
    everyone = torch.zeros(size * longest, dtype=torch.uint8, device=device)
    gather_into(everyone, padded, group=group)
    rows = everyone.view(size, longest).cpu()
    return [bytes(row[:count].tolist()) for row, count in zip(rows, lengths.tolist(), strict=True)]


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """The timeout that the user gave this group; torch's default where it cannot be read."""
    try:
        return group._get_backend(group_device(group)).options._timeout
    except (AttributeError, RuntimeError):
        return dist.default_pg_timeout if hasattr(dist, "default_pg_timeout") else timedelta(minutes=30)


def bound_group(group: dist.ProcessGroup, timeout_s: float | None) -> None:
    """Limit every later collective of this group to `timeout_s`, plain DDP's all-reduces among them.

    torch has only a private function for a group that exists. Where it is missing, a group keeps its own timeout.
    """
    set_timeout = getattr(_c10d, "_set_pg_timeout", None)
    if timeout_s is not None and set_timeout is not None:
        set_timeout(timedelta(seconds=timeout_s), group)


def _pair(numel: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    device = group_device(group)
    return torch.zeros(numel, device=device), torch.zeros(numel, device=device)
