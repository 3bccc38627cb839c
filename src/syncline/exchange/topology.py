"""Levels of ranks, and the cost of an exchange on them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from syncline.exchange import wire

WORLD = "world"
"""Name of the level that consists of one group with all ranks."""


@dataclass(frozen=True)
class Level:
    """Disjoint groups of ranks that run the same collectives concurrently."""

    name: str
    groups: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> int:
        """Size of the largest group."""
        return max(map(len, self.groups))

    @property
    def sizes(self) -> list[int]:
        """Distinct sizes of the groups, in ascending order."""
        return sorted({len(group) for group in self.groups})

    @property
    def equal(self) -> bool:
        """True if all groups have the same size."""
        return len(self.sizes) == 1

    def led_by(self, below: Level) -> Level:
        """Return this level with only the groups whose first rank is also first in its group at the level below."""
        leaders = {group[0] for group in below.groups}
        return Level(self.name, tuple(group for group in self.groups if group[0] in leaders))


@dataclass(frozen=True)
class Topology:
    """The groups of ranks among which an exchange runs, and the backend that connects them.

    Example:
        >>> Topology.flat(4).ranks
        4
    """

    whole: Level
    """The groups that an exchange sums over. If there are several, each computes its own sum, concurrently."""
    levels: tuple[Level, ...] = ()
    """Subdivisions of `whole`, from the inside out, for exchanges that use levels."""
    backend: str = "gloo"
    seconds: Callable[[Cost], float] | None = None
    """Predicts the time of a cost on these links, for exchanges that choose a path; None if the links are unknown."""

    @property
    def ranks(self) -> int:
        """Number of ranks that an exchange sums over."""
        return self.whole.ranks

    @classmethod
    def flat(cls, ranks: int, backend: str = "gloo") -> Topology:
        """Return a topology of one group without further levels."""
        return cls(Level(WORLD, (tuple(range(ranks)),)), (), backend)

    def among(self, level: Level) -> Topology:
        """Return the topology of an exchange that runs inside each group of `level`."""
        return dataclasses.replace(self, whole=level, levels=())


@dataclass(frozen=True)
class Phase:
    """One collective of an exchange, as a predictor needs it."""

    kind: str
    """The collective, such as `all_reduce`."""
    level: Level
    """The groups that run it concurrently."""
    elements: int
    itemsize: int
    sent_by: tuple[tuple[int, int], ...]
    """Pairs of a group size and the bytes that the busiest rank of such a group sends."""

    @classmethod
    def of(cls, kind: str, elements: int, itemsize: int, topology: Topology) -> Phase:
        """Describe a collective of a kind in `wire.KINDS`, among the groups of `topology.whole`.

        The number of elements is for gathers that of all ranks together.

        Example:
            >>> Phase.of("all_reduce", 1000, 4, Topology.flat(4)).sent_bytes
            6000
        """
        level = topology.whole
        sent = [wire.sent_bytes(kind, elements, itemsize, ranks, topology.backend) for ranks in level.sizes]
        return cls(kind, level, elements, itemsize, tuple(zip(level.sizes, sent, strict=True)))

    @property
    def sent_bytes(self) -> int:
        """Bytes that the busiest rank sends."""
        return max(sent for _, sent in self.sent_by)

    @property
    def ranks(self) -> int:
        """Size of the largest group that runs it."""
        return self.level.ranks


@dataclass(frozen=True)
class Cost:
    """The collectives that an exchange issues for one bucket, in order."""

    phases: tuple[Phase, ...]
    chunks: int = 1
    """Chunks that pass through the phases in a pipeline. `phases` lists the same number for each chunk in turn."""

    @property
    def parts(self) -> tuple[tuple[Phase, ...], ...]:
        """Phases of each chunk."""
        each = len(self.phases) // self.chunks
        return tuple(self.phases[start : start + each] for start in range(0, each * self.chunks, max(each, 1)))

    @property
    def sent_bytes(self) -> dict[str, int]:
        """Bytes sent per level, by a rank of the group size that sends the most in total."""
        total: dict[str, Counter[int]] = {}
        for phase in self.phases:
            total.setdefault(phase.level.name, Counter()).update(dict(phase.sent_by))
        return {level: max(by_size.values()) for level, by_size in total.items()}
