"""`Comm` for N ranks inside one process, each on a thread, for the tests of the laws.

It is stricter than a real network: a collective copies its input when it is issued, and its result appears only in
`wait`. If ranks issue different collectives, or the same ones in a different order or with different shapes, all of
them get an error that shows the difference.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from syncline.errors import MismatchError
from syncline.exchange import WORLD, Comm, Counter, Topology, Work
from syncline.exchange.wire import REDUCE_SCATTER, sent_bytes

T = TypeVar("T")


class _Group:
    """The ranks of one group, and their collectives."""

    def __init__(self, ranks: Sequence[int], deadline_s: float, lock: threading.RLock) -> None:
        self.ranks, self.deadline_s = tuple(ranks), deadline_s
        self.changed = threading.Condition(lock)
        self.calls: list[tuple[object, ...]] = []
        """Kind and shape of each collective, which must be the same on all ranks."""
        self.inputs: list[dict[int, Tensor]] = []
        """The inputs of the members that have issued each collective."""
        self.finished: set[int] = set()
        """Members that will issue nothing more."""
        self.mismatch: str | None = None

    def issue(self, index: int, member: int, call: tuple[object, ...], tensor: Tensor) -> None:
        """Add a member's input to the collective of this index."""
        with self.changed:
            if index == len(self.calls):
                self.calls.append(call)
                self.inputs.append({})
            if self.calls[index] != call:
                others = self.calls[index]
                self.mismatch = f"collective {index}: rank {self.ranks[member]} issued {call}, others {others}"
            self.inputs[index][member] = tensor.detach().clone()
            if self.mismatch or len(self.inputs[index]) == len(self.ranks):
                self.changed.notify_all()

    def wait(self, index: int) -> list[Tensor]:
        """Wait until all members have issued the collective of this index, and return their inputs."""
        inputs, members = self.inputs[index], range(len(self.ranks))

        def decided() -> bool:
            return bool(self.mismatch or self.finished - inputs.keys() or len(inputs) == len(members))

        with self.changed:
            self.changed.wait_for(decided, self.deadline_s)
            missing = [self.ranks[member] for member in members if member not in inputs]
            if self.mismatch or missing:
                absent = f"collective {index} {self.calls[index]}: ranks {missing} did not take part"
                raise MismatchError(self.mismatch or absent)
            return [inputs[member] for member in members]

    def leave(self, member: int) -> None:
        """Record that a member will issue nothing more."""
        with self.changed:
            self.finished.add(member)
            if len(self.finished) == len(self.ranks):  # comms refer to each other, so their memory is freed late
                self.inputs.clear()
            self.changed.notify_all()


@dataclass(frozen=True)
class _LocalWork:
    wait: Callable[[], None]


class LocalComm:
    """A `Comm` for one rank of a group inside this process."""

    def __init__(
        self, group: _Group, member: int, topology: Topology, counter: Counter, siblings: Mapping[str, LocalComm]
    ) -> None:
        self._group, self._siblings = group, siblings
        self.topology, self.counter = topology, counter
        self.rank, self.size = member, len(group.ranks)
        self._issued = 0
        self.log: list[tuple[object, ...]] = []
        """The collectives that this rank has issued, at all levels. Only the comm of all ranks has a log."""

    def level(self, name: str) -> Comm | None:
        return self._siblings.get(name)

    def leave(self) -> None:
        """Record that this rank issues nothing more, at any level, so that ranks that wait for it fail at once."""
        for sibling in self._siblings.values():
            sibling._group.leave(sibling.rank)

    def all_reduce(self, tensor: Tensor) -> Work:
        return self._issue("all_reduce", tensor, tensor)

    def all_to_all(self, output: Tensor, input: Tensor) -> Work:
        return self._issue("all_to_all", output, input)

    def all_gather(self, output: Tensor, input: Tensor) -> Work:
        return self._issue("all_gather", output, input)

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Work:
        return self._issue(REDUCE_SCATTER, output, input)

    def reduce(self, tensor: Tensor, root: int) -> Work:
        return self._issue("reduce", tensor, tensor, root)

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        return self._issue("broadcast", tensor, tensor, root)

    def _issue(self, kind: str, output: Tensor, input: Tensor, root: int | None = None) -> Work:
        call, name = (kind, input.numel(), str(input.dtype), root), self.topology.whole.name
        index, self._issued = self._issued, self._issued + 1
        self._siblings[WORLD].log.append((name, *call))
        whole = input if kind == REDUCE_SCATTER else output
        self.counter.add(name, sent_bytes(kind, whole.numel(), whole.element_size(), self.size))
        self._group.issue(index, self.rank, call, input)
        return _LocalWork(lambda: self._finish(kind, output, self._group.wait(index), root))

    def _finish(self, kind: str, output: Tensor, inputs: list[Tensor], root: int | None) -> None:
        """Write the result of a collective, given the inputs of all ranks."""
        if kind == "broadcast":
            output.copy_(inputs[root or 0])
        elif kind == "reduce" and self.rank != root:
            if output.is_floating_point():
                output.fill_(float("nan"))  # undefined by the contract: NaN shows an exchange that uses it
        elif kind in ("all_reduce", "reduce", REDUCE_SCATTER):
            total = sum(inputs[1:], inputs[0])
            output.copy_(total.view(self.size, -1)[self.rank] if kind == REDUCE_SCATTER else total)
        else:
            for row, sent in zip(output.view(self.size, -1), inputs, strict=True):
                row.copy_(sent.reshape(-1) if kind == "all_gather" else sent.reshape(self.size, -1)[self.rank])


def run_ranks(topology: Topology | int, main: Callable[[LocalComm], T], *, deadline_s: float = 30.0) -> list[T]:
    """Run `main(comm)` for every rank, each on a thread, and return the results in rank order.

    Args:
        topology: The ranks and their levels, or the number of ranks without levels.
        main: The program of one rank.
        deadline_s: Seconds that a rank waits in a collective for the others.

    Raises:
        MismatchError: The ranks did not issue the same collectives.
        Exception: The first other exception that a rank raises.
    """
    lock = threading.RLock()
    comms = _local_comms(Topology.flat(topology) if isinstance(topology, int) else topology, deadline_s, lock)

    def run_rank(comm: LocalComm) -> T:
        with lock:  # one rank runs at a time, until it waits: this avoids contention for Python's global lock
            try:
                return main(comm)
            finally:
                comm.leave()

    with ThreadPoolExecutor(len(comms)) as pool:
        futures = [pool.submit(run_rank, comm) for comm in comms]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:  # the others fail because they wait for a rank that failed: show the error of that rank
        raise next((error for error in errors if not isinstance(error, MismatchError)), errors[0])
    return [future.result() for future in futures]


def _local_comms(topology: Topology, deadline_s: float, lock: threading.RLock) -> list[LocalComm]:
    """Return one comm per rank, at the level of all ranks."""
    comms: list[dict[str, LocalComm]] = [{} for _ in range(topology.ranks)]
    counters = [Counter() for _ in comms]
    for level in (topology.whole, *topology.levels):
        whole = level is topology.whole
        for ranks in level.groups:
            group = _Group(ranks, deadline_s, lock)
            for member, rank in enumerate(ranks if whole or len(ranks) > 1 else ()):
                level_topology = topology if whole else topology.among(level)
                comms[rank][level.name] = LocalComm(group, member, level_topology, counters[rank], comms[rank])
    return [by_level[WORLD] for by_level in comms]
