"""The tasks of one step of a sharded model, in the order in which FSDP enqueues them.

Forward computes the units in their order, and backward in the reverse order.
Each unit's parameters are gathered before it computes, and its gradients are reduced after it. Three streams run beside
each other on a GPU: computation, the collectives among shards (one communicator runs one at a time), and the exchange
between replicas. What waits for what:

- The parameters of a unit are gathered while the unit before it computes. In forward, FSDP keeps two gathered units in
  flight; in backward, one.
- A unit's gradients are reduced after its backward. Before the next unit's gradients are copied, computation waits for
  this reduce-scatter, whose input would otherwise need memory, too.
- Replicas exchange a unit after its reduce-scatter. Computation goes on. The optimizer waits for everything.

On CPUs, FSDP waits for each collective, so all of them run one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from syncline.predict.overlap import Line, Transfers
from syncline.predict.streams import Task, run
from syncline.predict.timeline import Span, Timeline

GATHERED, REDUCED, EXCHANGED = "all_gather", "reduce_scatter", "exchange"
"""Names of the spans of a timeline."""
COMPUTE, SHARDS, REPLICAS = "compute", "shards", "replicas"
"""Streams."""


class Collectives(NamedTuple):
    """Collectives that run one after the other, and the own work of their exchange."""

    own_s: float = 0.0
    transfers: Transfers = ()


@dataclass(frozen=True)
class UnitTimes:
    """A unit on a cluster."""

    name: str
    reshards: bool
    copy_in_s: float  # of its gradients, before they are reduced
    copy_out_s: float  # of its parameters, after they are gathered
    gather: Collectives
    reduce: Collectives
    exchange: Collectives  # between replicas


class Step:
    """The tasks of one step, in the order in which FSDP enqueues them."""

    def __init__(self, units: Sequence[UnitTimes], blocks: bool) -> None:
        self.units, self.blocks = units, blocks
        self.tasks: list[Task] = []
        self.labels: dict[int, tuple[str, int, str]] = {}  # of collectives: unit, lane and what
        self._reduced: tuple[int, ...] = ()  # the last reduce-scatter
        self._lines = {SHARDS: Line(), REPLICAS: Line()}
        self._copied: list[tuple[int, ...]] = [(), ()]  # the copies of gathered parameters, in forward
        self._order: list[int] = []  # the units in the order in which forward gathers them

    def forward(self, segments: Sequence[tuple[int, float]]) -> None:
        """Gather and compute the units. The whole model's own unit comes first, wherever forward uses it."""
        for index, unit in enumerate(self.units):
            if not unit.name:
                self._open(index)
        for index, seconds in segments:
            self._open(index)
            self._compute(seconds)

    def _open(self, index: int) -> None:
        if index not in self._order:
            self._order.append(index)
            gathered = self._gather(index, self._copied[-2])
            self._copied.append(self._compute(self.units[index].copy_out_s, gathered))

    def backward(self, segments: Sequence[tuple[int, float]]) -> None:
        """Gather units again, compute them, and reduce their gradients."""
        last = {unit: position for position, (unit, _) in enumerate(segments)}
        before = dict(zip(self._order[1:], self._order, strict=False))  # the unit that comes next in backward
        gathered: dict[int, tuple[int, ...]] = {}
        seen: set[int] = set()
        for position, (index, seconds) in enumerate(segments):
            if index not in seen:
                seen.add(index)
                copied: tuple[int, ...] = self._copied[-1]
                if self.units[index].reshards:
                    if index not in gathered:  # the first one is gathered while forward still computes
                        gathered[index] = self._gather(index, copied)
                    copied = self._compute(self.units[index].copy_out_s, gathered[index])
                following = before.get(index)
                if following is not None and self.units[following].reshards and following not in gathered:
                    gathered[following] = self._gather(following, copied)
            self._compute(seconds)
            if last[index] == position and self.units[index].name:
                self._reduce(index)
        for index, unit in enumerate(self.units):
            if index not in last or not unit.name:
                self._reduce(index)

    def _compute(self, seconds: float, after: tuple[int, ...] = ()) -> tuple[int, ...]:
        self.tasks.append(Task(COMPUTE, seconds, after))
        return (len(self.tasks) - 1,)

    def _gather(self, index: int, after: tuple[int, ...]) -> tuple[int, ...]:
        return self._collective(index, SHARDS, GATHERED, self.units[index].gather, after)

    def _reduce(self, index: int) -> None:
        unit = self.units[index]
        copied = self._compute(unit.copy_in_s, self._reduced)
        self._reduced = self._collective(index, SHARDS, REDUCED, unit.reduce, copied)
        self._collective(index, REPLICAS, EXCHANGED, unit.exchange, self._reduced)

    def _collective(
        self, index: int, stream: str, what: str, collectives: Collectives, after: tuple[int, ...]
    ) -> tuple[int, ...]:
        if not collectives.transfers:
            return after
        line, running = self._lines[stream], COMPUTE if self.blocks else stream
        self.tasks.append(Task(running, collectives.own_s, after, line, collectives.transfers))
        self.labels[len(self.tasks) - 1] = self.units[index].name or "root", int(stream == REPLICAS), what
        return (len(self.tasks) - 1,)

    def timeline(self, slowdown: Mapping[str, float]) -> tuple[float, Timeline]:
        """Return when everything has ended, and the timeline of the collectives."""
        times, end_s = run(self.tasks, slowdown), dict[str, float]()
        spans = []
        for index, (name, lane, what) in self.labels.items():
            spans.append(Span(name, lane, what, *times[index]))
            end_s[name] = times[index][1]
        spans.sort(key=lambda span: span.end_s)
        return max((end_s for _, end_s in times), default=0.0), Timeline(tuple(spans), end_s)
