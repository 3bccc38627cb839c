"""`Comm` for N ranks inside one process, each on a thread: what the laws and property tests run on.

Stricter than any network. A collective's result appears only in `wait`, so reading it too early is caught; what a rank
contributes is copied when it issues, so a buffer may not be changed afterwards and still count; and ranks that do not
issue the same collectives in the same order, with the same shapes, all get an error that says how they differ.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from syncline.errors import MismatchError
from syncline.exchange import WORLD, Comm, Counter, Topology, Work
from syncline.exchange.wire import sent_bytes

T = TypeVar("T")


@dataclass
class _Meeting:
    """One collective, as far as it has come."""

    call: tuple[object, ...]
    given: dict[int, Tensor] = field(default_factory=dict)


class _Room:
    """Where the ranks of one group meet."""

    def __init__(self, ranks: Sequence[int], deadline_s: float, baton: threading.RLock) -> None:
        self.ranks = tuple(ranks)
        self.deadline_s = deadline_s
        self.changed = threading.Condition(baton)
        self.meetings: list[_Meeting] = []
        self.gone: set[int] = set()
        self.broken: str | None = None

    def give(self, turn: int, member: int, call: tuple[object, ...], tensor: Tensor) -> None:
        with self.changed:
            if turn == len(self.meetings):
                self.meetings.append(_Meeting(call))
            meeting = self.meetings[turn]
            if meeting.call != call:
                self.broken = f"collective {turn}: rank {self.ranks[member]} issued {call}, others {meeting.call}"
            meeting.given[member] = tensor.detach().clone()
            if self.broken or len(meeting.given) == len(self.ranks):
                self.changed.notify_all()

    def take(self, turn: int) -> list[Tensor]:
        """What everyone gave, once they all did."""
        with self.changed:
            meeting = self.meetings[turn]
            members = range(len(self.ranks))
            self.changed.wait_for(
                lambda: self.broken or self.gone - set(meeting.given) or len(meeting.given) == len(members),
                self.deadline_s,
            )
            missing = [self.ranks[member] for member in members if member not in meeting.given]
            if self.broken or missing:
                raise MismatchError(self.broken or f"collective {turn} {meeting.call}: ranks {missing} never came")
            return [meeting.given[member] for member in members]

    def leave(self, member: int) -> None:
        """This member will issue nothing more."""
        with self.changed:
            self.gone.add(member)
            self.changed.notify_all()


@dataclass(frozen=True)
class _LocalWork:
    finish: Callable[[], None]

    def wait(self) -> None:
        self.finish()


class LocalComm:
    """One rank's view of a room."""

    def __init__(
        self, room: _Room, member: int, topology: Topology, counter: Counter, siblings: Mapping[str, LocalComm]
    ) -> None:
        self._room, self._name, self._siblings = room, topology.whole.name, siblings
        self.topology = topology
        self.rank, self.size = member, len(room.ranks)
        self.counter = counter
        self._turn = 0
        self.log: list[tuple[object, ...]] = []
        """What this rank issued, at any level."""

    def level(self, name: str) -> Comm | None:
        return self._siblings.get(name)

    def leave(self) -> None:
        """Ends this rank's part at every level: whoever still waits for it learns so at once."""
        for sibling in self._siblings.values():
            sibling._room.leave(sibling.rank)

    def all_reduce(self, tensor: Tensor) -> Work:
        def finish(given: list[Tensor]) -> None:
            tensor.copy_(_sum(given))

        return self._issue("all_reduce", tensor, tensor, finish)

    def all_to_all(self, output: Tensor, input: Tensor) -> Work:
        def finish(given: list[Tensor]) -> None:
            parts = [theirs.reshape(self.size, -1)[self.rank] for theirs in given]
            for mine, part in zip(output.view(self.size, -1), parts, strict=True):
                mine.copy_(part)

        return self._issue("all_to_all", input, input, finish)

    def all_gather(self, output: Tensor, input: Tensor) -> Work:
        def finish(given: list[Tensor]) -> None:
            for mine, part in zip(output.view(self.size, -1), given, strict=True):
                mine.copy_(part.reshape(-1))

        return self._issue("all_gather", input, output, finish)

    def reduce(self, tensor: Tensor, root: int) -> Work:
        def finish(given: list[Tensor]) -> None:
            if self.rank == root:
                tensor.copy_(_sum(given))
            elif tensor.is_floating_point():
                tensor.fill_(float("nan"))  # "undefined": nobody gets away with using it

        return self._issue("reduce", tensor, tensor, finish, root)

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        def finish(given: list[Tensor]) -> None:
            tensor.copy_(given[root])

        return self._issue("broadcast", tensor, tensor, finish, root)

    def _issue(
        self,
        kind: str,
        given: Tensor,
        whole: Tensor,
        finish: Callable[[list[Tensor]], None],
        root: int | None = None,
    ) -> Work:
        call = (kind, given.numel(), str(given.dtype), root)
        turn, self._turn = self._turn, self._turn + 1
        self._siblings[WORLD].log.append((self._name, *call))
        sent = sent_bytes(kind, whole.numel(), whole.element_size(), self.size)
        self.counter.add(self._name, sent)
        self._room.give(turn, self.rank, call, given)
        return _LocalWork(lambda: finish(self._room.take(turn)))


def run_ranks(topology: Topology | int, main: Callable[[LocalComm], T], *, deadline_s: float = 30.0) -> list[T]:
    """Runs `main(comm)` for every rank, each on a thread, and returns what each returned."""
    baton = threading.RLock()
    comms = local_comms(topology, deadline_s=deadline_s, baton=baton)

    def life(comm: LocalComm) -> T:
        with baton:  # one runs at a time, until it waits for the others: together they would fight for Python's lock
            try:
                return main(comm)
            finally:
                comm.leave()

    with ThreadPoolExecutor(len(comms)) as pool:
        futures = [pool.submit(life, comm) for comm in comms]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:  # a rank that failed leaves the others waiting: its error is the one to show
        raise next((error for error in errors if not isinstance(error, MismatchError)), errors[0])
    return [future.result() for future in futures]


def local_comms(
    topology: Topology | int, *, deadline_s: float = 30.0, baton: threading.RLock | None = None
) -> list[LocalComm]:
    """One Comm per rank, at the level of all ranks. A number means so many, without further levels."""
    baton = baton or threading.RLock()
    whole = Topology.flat(topology) if isinstance(topology, int) else topology
    views: list[dict[str, LocalComm]] = [{} for _ in range(whole.ranks)]
    counters = [Counter() for _ in range(whole.ranks)]
    for level in (whole.whole, *whole.levels):
        here = whole if level is whole.whole else whole.among(level)
        for group in level.groups:
            if len(group) == 1 and level is not whole.whole:
                continue
            room = _Room(group, deadline_s, baton)
            for member, rank in enumerate(group):
                views[rank][level.name] = LocalComm(room, member, here, counters[rank], views[rank])
    return [view[WORLD] for view in views]


def _sum(given: list[Tensor]) -> Tensor:
    total = given[0].clone()
    for theirs in given[1:]:
        total += theirs
    return total
