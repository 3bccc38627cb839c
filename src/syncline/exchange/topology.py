"""Trees and levels of ranks, and the cost of an exchange on them.

In a tree, ranks are in hosts and hosts in racks, or in any nesting that a user writes:

    [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]        two racks of two hosts of two ranks

At the innermost level, the ranks of each list form a group. At the next level, a group has one rank of each list: one
group of the first ranks and, if all lists have the same size, further groups of the second ranks, the third ranks and
so on. A level therefore serves both shapes of a hierarchical exchange: leaders only, or every rank with its shard.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from syncline.errors import UsageError
from syncline.exchange import wire

WORLD = "world"
"""Name of the level that consists of one group with all ranks."""
Unit = int | tuple["Unit", ...]  # a rank, or a group of units
_DEEPEST = 16
_MOST_SHOWN = 12


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
    paced_bytes: int | None = None
    """Smallest buffer whose all-to-all runs in paced rounds; None if it was not measured."""

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

        `elements` is the size of the whole buffer: for an all-gather, of its output.

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
        """Bytes that the busiest rank sends per level. Of unequal groups, those that send most count."""
        total: dict[str, Counter[int]] = {}
        for phase in self.phases:
            total.setdefault(phase.level.name, Counter()).update(dict(phase.sent_by))
        return {level: max(by_size.values()) for level, by_size in total.items()}


@dataclass(frozen=True)
class Tree:
    """A tree in which all ranks have the same depth."""

    root: tuple[Unit, ...]
    names: tuple[str, ...]  # of the levels, from the inside out
    units: tuple[str, ...]  # names for one group at each level below the outermost: `host`, `rack`

    @classmethod
    def of_hosts(cls, host_of_rank: Sequence[int], rack_of_host: Sequence[int] = ()) -> Tree:
        """Return the tree of ranks in hosts and, if there are several racks, hosts in racks."""
        hosts: dict[int, list[Unit]] = {}
        for rank, host in enumerate(host_of_rank):
            hosts.setdefault(host, []).append(rank)
        if len(set(rack_of_host)) < 2:
            return cls(tuple(map(tuple, hosts.values())), ("local", "hosts"), ("host",))
        racks: dict[int, list[Unit]] = {}
        for host, ranks in hosts.items():
            racks.setdefault(rack_of_host[host], []).append(tuple(ranks))
        return cls(tuple(map(tuple, racks.values())), ("local", "hosts", "racks"), ("host", "rack"))

    @classmethod
    def given(cls, levels: Any, ranks: int) -> Tree:
        """Return the tree that a user described, by sizes like (4, 2) or nested lists of ranks, like [[0], [1, 2]]."""
        root = frozen(levels)
        sizes = [unit for unit in root if isinstance(unit, int)]
        if len(sizes) == len(root):
            if min(sizes) < 1:
                raise _wrong(levels, "sizes must be at least 1; to list ranks, nest the lists: [[0, 1], [2, 3]]")
            if len(sizes) > _DEEPEST:
                raise _wrong(levels, f"there may be up to {_DEEPEST} levels")
            if math.prod(sizes) != ranks:
                raise _wrong(levels, f"its sizes multiply to {math.prod(sizes)} ranks, and there are {ranks}")
            root = tuple(range(ranks))
            for size in sizes[:-1]:
                root = tuple(root[start : start + size] for start in range(0, len(root), size))
        depth_of = sorted(_leaves(root))
        if [rank for rank, _ in depth_of] != list(range(ranks)):
            raise _wrong(levels, f"it must name each of the ranks 0 to {ranks - 1} once")
        if len({depth for _, depth in depth_of}) > 1:
            raise _wrong(levels, "every rank must be nested equally deep")
        depth = depth_of[0][1]
        return cls(root, tuple(f"level{number + 1}" for number in range(depth)), ("group",) * (depth - 1))

    @functools.cached_property
    def levels(self) -> tuple[Level, ...]:
        """Levels from the inside out. A unit is represented at the level above it by one rank for each part that the
        levels up to it can divide a bucket into. A level of unequal groups divides nothing, so only its leaders are
        representatives. Groups are sorted as in process groups: the first rank leads, and the i-th holds the i-th
        part."""
        levels = []
        representatives: dict[Unit, list[int]] = {rank: [rank] for rank, _ in _leaves(self.root)}
        for height, name in enumerate(self.names):
            units = _at(self.root, len(self.names) - 1 - height)
            parts = len(units[0]) if len({len(unit) for unit in units}) == 1 else 1
            of_level: list[tuple[int, ...]] = []
            for unit in units:
                members = zip(*(representatives[child] for child in unit), strict=True)
                groups = [tuple(sorted(group)) for group in members]
                representatives[unit] = [group[part] for part in range(parts) for group in groups]
                of_level += groups
            levels.append(Level(name, tuple(of_level)))
        return tuple(levels)

    def describe(self) -> str:
        """Return a line that counts the ranks and units, and a drawing of the tree."""
        parts = [f"{sum(1 for _ in _leaves(self.root))} ranks"]
        for height, unit in enumerate(self.units):
            count = len(_at(self.root, len(self.units) - height))
            parts.append(f"{count} {unit}{'' if count == 1 else 's'}")
        return "\n".join([" in ".join(parts), *self._branches(self.root, len(self.units), "")])

    def _branches(self, unit: tuple[Unit, ...], height: int, indent: str) -> Iterator[str]:
        numbers = {child: number for number, child in enumerate(_at(self.root, len(self.names) - height))}
        children = [child for child in unit if isinstance(child, tuple)]
        for index, child in enumerate(children):
            last = index == len(children) - 1
            if index == _MOST_SHOWN - 1 and not last:
                yield f"{indent}└─ and {len(children) - index} more"
                return
            ranks = f": {'rank' if len(child) == 1 else 'ranks'} {_spans(child)}" if height == 1 else ""
            yield f"{indent}{'└─' if last else '├─'} {self.units[height - 1]} {numbers[child]}{ranks}"
            yield from self._branches(child, height - 1, indent + ("   " if last else "│  "))


def _at(root: tuple[Unit, ...], depth: int) -> list[tuple[Unit, ...]]:
    """Return all units at a depth below the root."""
    units = [root]
    for _ in range(depth):
        units = [child for unit in units for child in unit if isinstance(child, tuple)]
    return units


def frozen(levels: Any) -> tuple[Unit, ...]:
    """Return nested lists as nested tuples, or raise `UsageError` if they contain anything but integers."""

    def freeze(entry: Any, depth: int) -> Any:
        if isinstance(entry, int) and not isinstance(entry, bool):
            return entry
        if not isinstance(entry, list | tuple) or not entry:
            raise _wrong(levels, f"{_short(entry)} is neither a number nor a list of numbers")
        if depth > _DEEPEST:
            raise _wrong(levels, f"there may be up to {_DEEPEST} levels")
        return tuple(freeze(child, depth + 1) for child in entry)

    if not isinstance(levels, list | tuple) or not levels:
        raise _wrong(levels, "write sizes, like (4, 2), or nested lists of ranks, like [[0, 1], [2, 3]]")
    return tuple(freeze(level, 2) for level in levels)


def _leaves(unit: Unit, depth: int = 0) -> Iterator[tuple[int, int]]:
    """Yield each rank, and how deep it is nested."""
    if isinstance(unit, int):
        yield unit, depth
    else:
        for child in unit:
            yield from _leaves(child, depth + 1)


def _spans(unit: Unit) -> str:
    """Format the ranks of a unit as spans, such as `0–3, 7`."""
    runs = itertools.groupby(enumerate(rank for rank, _ in _leaves(unit)), lambda item: item[1] - item[0])
    spans = [[rank for _, rank in run] for _, run in runs]
    return ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}–{span[-1]}" for span in spans)


def _wrong(levels: Any, what: str) -> UsageError:
    return UsageError(f"levels={_short(levels)}: {what}")


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
