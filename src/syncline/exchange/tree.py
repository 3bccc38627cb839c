"""Trees of ranks: ranks in hosts, hosts in racks, or any nesting that a user writes.

    [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]        two racks of two hosts of two ranks

At the innermost level, the ranks of each list form a group. At the next level, a group has one rank of each list: one
group of the first ranks and, if all lists have the same size, further groups of the second ranks, the third ranks and
so on. A level therefore serves both shapes of a hierarchical exchange: leaders only, or every rank with its shard.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from syncline.errors import UsageError
from syncline.exchange.topology import Level

Unit = int | tuple["Unit", ...]
"""A rank, or a group of units."""

_DEEPEST = 16
_MOST_SHOWN = 12


@dataclass(frozen=True)
class Tree:
    """A tree in which all ranks have the same depth."""

    root: tuple[Unit, ...]
    names: tuple[str, ...]
    """Names of the levels, from the inside out."""
    units: tuple[str, ...]
    """Names for one group at each level below the outermost: `host`, `rack`."""

    @classmethod
    def of_hosts(cls, host_of_rank: Sequence[int], rack_of_host: Sequence[int] = ()) -> Tree:
        """Return the tree of ranks in hosts and, if there are several racks, hosts in racks."""
        hosts: dict[int, tuple[int, ...]] = {}
        for rank, host in enumerate(host_of_rank):
            hosts[host] = (*hosts.get(host, ()), rank)
        if len(set(rack_of_host)) < 2:
            return cls(tuple(hosts.values()), ("local", "hosts"), ("host",))
        racks: dict[int, tuple[Unit, ...]] = {}
        for host, ranks in hosts.items():
            racks[rack_of_host[host]] = (*racks.get(rack_of_host[host], ()), ranks)
        return cls(tuple(racks.values()), ("local", "hosts", "racks"), ("host", "rack"))

    @classmethod
    def given(cls, levels: Any, ranks: int) -> Tree:
        """Return the tree that a user described, by sizes like (4, 2) or nested lists of ranks like [[0, 1], [2, 3]].

        Raises:
            UsageError: The levels do not contain each rank once, or not at the same depth.
        """
        units = frozen(levels)
        sizes = tuple(unit for unit in units if isinstance(unit, int))
        root = _from_sizes(sizes, ranks) if len(sizes) == len(units) else units
        if sorted(_ranks(root)) != list(range(ranks)):
            raise _wrong(levels, f"it must name each of the ranks 0 to {ranks - 1} once")
        if len(depths := _depths(root)) > 1:
            raise _wrong(levels, "every rank must be nested equally deep")
        (depth,) = depths
        names = tuple(f"level{number + 1}" for number in range(depth))
        return cls(root, names, ("group",) * (depth - 1))

    @functools.cached_property
    def levels(self) -> tuple[Level, ...]:
        """Levels from the inside out."""
        units = [_at(self.root, depth) for depth in reversed(range(len(self.names)))]
        equal = [len({len(unit) for unit in level}) == 1 for level in units]
        return tuple(
            Level(name, tuple(group for unit in units[height] for group in _groups(unit, height, equal)))
            for height, name in enumerate(self.names)
        )

    def describe(self) -> str:
        """Return a line that counts the ranks and units, and a drawing of the tree."""
        parts = [f"{len(_ranks(self.root))} ranks"]
        for height, unit in enumerate(self.units):
            count = len(_at(self.root, len(self.units) - height))
            parts.append(f"{count} {unit}{'' if count == 1 else 's'}")
        return "\n".join([" in ".join(parts), *self._branches(self.root, len(self.units), "")])

    def _branches(self, unit: tuple[Unit, ...], height: int, indent: str) -> Iterator[str]:
        if height == 0:
            return
        for index, child in enumerate(unit):
            assert isinstance(child, tuple)  # noqa: S101 - all ranks are equally deep
            last = index == len(unit) - 1
            if index == _MOST_SHOWN - 1 and not last:
                yield f"{indent}└─ and {len(unit) - index} more"
                return
            text = f"{self.units[height - 1]} {self._numbers[child]}"
            if height == 1:
                text += f": {'rank' if len(child) == 1 else 'ranks'} {_spans(child)}"
            yield f"{indent}{'└─' if last else '├─'} {text}"
            yield from self._branches(child, height - 1, indent + ("   " if last else "│  "))

    @functools.cached_property
    def _numbers(self) -> dict[tuple[Unit, ...], int]:
        """Number of each unit among those of its level."""
        return {unit: number for depth in range(len(self.names)) for number, unit in enumerate(_at(self.root, depth))}


def _groups(unit: tuple[Unit, ...], height: int, equal: Sequence[bool]) -> list[tuple[int, ...]]:
    """Return the groups of a unit: for each part of a bucket, the ranks of its children that hold this part, sorted as
    in process groups: the first rank leads, and the i-th holds the i-th part."""
    members = [_representatives(child, height - 1, equal) for child in unit]
    return [tuple(sorted(group)) for group in zip(*members, strict=True)]


def _representatives(unit: Unit, height: int, equal: Sequence[bool]) -> list[int]:
    """Return the ranks that represent a unit at the level above it: one for each part that the levels up to it can
    divide a bucket into. A level of unequal groups divides nothing, so only its leaders are representatives."""
    if isinstance(unit, int):
        return [unit]
    groups = _groups(unit, height, equal)
    return [group[part] for part in range(len(unit) if equal[height] else 1) for group in groups]


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


def _from_sizes(sizes: Sequence[int], ranks: int) -> tuple[Unit, ...]:
    if min(sizes) < 1:
        raise _wrong(sizes, "sizes must be at least 1; to list ranks, nest the lists: [[0, 1], [2, 3]]")
    if len(sizes) > _DEEPEST:
        raise _wrong(sizes, f"there may be up to {_DEEPEST} levels")
    if math.prod(sizes) != ranks:
        raise _wrong(sizes, f"its sizes multiply to {math.prod(sizes)} ranks, and there are {ranks}")
    units: tuple[Unit, ...] = tuple(range(ranks))
    for size in sizes[:-1]:
        units = tuple(units[start : start + size] for start in range(0, len(units), size))
    return units


def _ranks(unit: Unit) -> list[int]:
    return [unit] if isinstance(unit, int) else [rank for child in unit for rank in _ranks(child)]


def _depths(unit: Unit) -> set[int]:
    """Return the depths at which ranks are nested."""
    return {0} if isinstance(unit, int) else {1 + depth for child in unit for depth in _depths(child)}


def _spans(ranks: Sequence[Unit]) -> str:
    """Format ranks as spans, such as `0–3, 7`."""
    numbers = [rank for rank in ranks if isinstance(rank, int)]
    runs = itertools.groupby(enumerate(numbers), lambda item: item[1] - item[0])
    spans = [[rank for _, rank in run] for _, run in runs]
    return ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}–{span[-1]}" for span in spans)


def _wrong(levels: Any, what: str) -> UsageError:
    return UsageError(f"levels={_short(levels)}: {what}")


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
