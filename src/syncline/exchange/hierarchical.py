"""Hierarchical: sums inside hosts first, so that slow links carry each gradient once per host and not once per rank.

After HERO (hierarchical all-reduce as a hook of DistributedDataParallel, CloudCom 2025). Ranks sit in a tree of levels,
from the inside out: ranks in hosts, hosts in racks. A bucket climbs it, crosses at the top, and comes down again. On
the way up each level has one of two shapes:

- leader: the group's sum goes to its first rank, which climbs on alone, and broadcasts the result on the way back.
  Works for groups of any size.
- sharded: a reduce-scatter leaves each rank with the sum of its part; all climb on, side by side, each with its part,
  and gather the results on the way back. Needs groups of equal size; unequal ones take leaders.

Buckets climb in chunks, one close behind the other: while one crosses the slow level, the next is summed inside. So
what a bucket takes is its slowest level, and what the others take of a single chunk. Every rank takes the same steps in
the same order, or stands by while others do, so the collectives of each group are issued in one order.

It is plain summation in another order: equal to a flat all-reduce to rounding, and bit-equal on all ranks.

What each uplink carries of S bytes, m hosts of q ranks: 2(m−1)/m·S, against 2(P−1)/P·S for a flat ring whose ranks are
numbered host by host, and up to q times that for one whose ranks are not. So it gains 1.75× with 2 hosts of 4, 1.17×
with 4 of 2, and where start-ups decide, because few messages wait for each other between hosts.

When it loses: one rank per host, or one host (it then is flat); hosts whose memory is slower than their link; buckets
so small that its start-ups, two per level, are more than the ring's. `shape="auto"` asks what is known of the links,
and runs flat where that is cheaper.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from syncline.errors import UsageError
from syncline.exchange.base import (
    Comm,
    Cost,
    Exchange,
    Layout,
    Level,
    Phase,
    Rounding,
    Slot,
    State,
    Topology,
    Work,
)
from syncline.exchange.dense import Dense, Halves, part_of
from syncline.exchange.tree import Tree, frozen

SHAPES = ("auto", "leader", "sharded")
_CHUNKS = (1, 2, 4, 8, 16, 32)
_SMALLEST_CHUNK_BYTES = 1 << 16
"""Smaller ones are start-ups and little else."""
_MOST_CHUNKS = 1024


@dataclass(frozen=True)
class Way:
    """How a bucket goes: the shape of each level that it climbs, and in how many chunks. No shapes: flat."""

    shapes: tuple[str, ...] = ()
    chunks: int = 1

    def __str__(self) -> str:
        if not self.shapes:
            return "flat"
        return f"{', then '.join(self.shapes)}, in {self.chunks} chunk{'s' if self.chunks > 1 else ''}"


@dataclass(frozen=True)
class Hierarchical:
    """Sums inside groups through `within`, and among them through `across`, which may be any exchange.

    `shape`: `leader` or `sharded` at every level where groups are equal, or `auto`: each level's from what the links
    are known to take, or flat, which may be cheaper whatever `levels` and `chunks` say. `levels`: found by themselves,
    or sizes from the inside out, like (4, 2), or nested lists of ranks, like [[0, 1], [2, 3]]. `chunks`: from what the
    links are known to take, or so many.
    """

    within: Dense = dataclasses.field(default_factory=Dense)
    across: Exchange = dataclasses.field(default_factory=Dense)
    shape: str = "auto"
    levels: Any = None
    chunks: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.within, Dense):
            raise UsageError(f"Hierarchical(within={self.within!r}): inside groups everything travels: use Dense(…)")
        if isinstance(self.across, type) or not isinstance(self.across, Exchange):
            raise UsageError(f"Hierarchical(across={self.across!r}): pass an exchange, for example Dense()")
        if isinstance(self.across, Hierarchical):
            raise UsageError("Hierarchical inside Hierarchical: one is enough, it climbs any number of levels")
        if self.shape not in SHAPES:
            raise UsageError(f"Hierarchical(shape={self.shape!r}): shape is one of {', '.join(SHAPES)}")
        if self.shape == "leader" and not self.within.lossless:
            raise UsageError(
                f"Hierarchical(shape='leader', within={self.within!r}): leaders get gradients as they are: use "
                "within=Dense(), or shape='sharded'"
            )
        if self.across.keeps and (self.shape == "sharded" or not self.within.lossless):
            raise UsageError(
                f"Hierarchical(across={self.across!r}): what it keeps must stay with one rank, and shards change hands "
                "when DDP changes its buckets: use within=Dense() and shape='leader' or 'auto'"
            )
        whole = isinstance(self.chunks, int) and not isinstance(self.chunks, bool)
        if self.chunks is not None and not (whole and 1 <= self.chunks <= _MOST_CHUNKS):
            raise UsageError(f"Hierarchical(chunks={self.chunks!r}): there may be 1 to {_MOST_CHUNKS}")
        object.__setattr__(self, "levels", None if self.levels is None else frozen(self.levels))
        try:
            hash(self)
        except TypeError:
            raise UsageError(
                f"Hierarchical(across={self.across!r}): its settings must be hashable: make it a frozen dataclass"
            ) from None

    @property
    def lossless(self) -> bool:
        return self.within.lossless and self.across.lossless

    @property
    def keeps(self) -> bool:
        return self.across.keeps

    @property
    def waits(self) -> bool:
        return True

    def tree(self, found: Tree, ranks: int) -> Tree:
        """The levels to climb: as given, or as found."""
        tree = found if self.levels is None else Tree.given(self.levels, ranks)
        uneven = next((level for level in tree.levels[:-1] if not level.equal), None)
        if uneven is not None and not self.within.lossless:
            raise UsageError(
                f"Hierarchical(within={self.within!r}) needs groups of equal size, and those of {uneven.name} have "
                f"{' and '.join(map(str, uneven.sizes))} ranks: use within=Dense()"
            )
        return tree

    def prepare(self, layout: Layout, comm: Comm) -> State:
        way = self.way(layout.numel, layout.dtype, comm.topology)
        if not way.shapes:
            return _Flat(self._flat(comm.topology).prepare(layout, comm))
        bounds = _bounds(layout.numel, way, _levels(comm.topology))
        chunks = tuple(self._furnish(start, layout.piece(start, stop - start), way, comm) for start, stop in bounds)
        return _Climbed(way, chunks)

    def run(self, flat: Tensor, state: State, comm: Comm) -> Work | None:
        if isinstance(state, _Flat):
            return self._flat(comm.topology).run(flat, state.inner, comm)
        assert isinstance(state, _Climbed)  # noqa: S101 - as prepared
        levels = _levels(comm.topology)
        _one_behind_the_other(
            [self._climb(flat[chunk.start : chunk.stop], chunk, 0, state.way, levels, comm) for chunk in state.chunks]
        )
        return None

    def _climb(
        self, flat: Tensor, chunk: _Chunk, floor: int, way: Way, levels: Sequence[Level], comm: Comm
    ) -> Iterator[Work | None]:
        """A chunk's steps, up from a floor, across, and down again. Yields what must end before the next one."""
        group = comm.level(levels[floor].name)
        if floor == len(way.shapes):
            assert group is not None and chunk.across is not None  # noqa: S101 - as prepared
            yield self.across.run(flat, chunk.across, group)
        elif group is None:  # alone in a group of one: nobody to sum with, nobody to tell
            yield None
            yield from self._climb(flat, chunk, floor + 1, way, levels, comm)
            yield None
        elif way.shapes[floor] == "sharded":
            halves = chunk.halves[floor]
            assert halves is not None  # noqa: S101 - as prepared
            yield halves.scatter(flat, group)
            shard = halves.shard()
            yield from self._climb(shard, chunk, floor + 1, way, levels, comm)
            yield halves.gather(shard, flat, group)
            halves.finish(flat)
        else:
            yield group.reduce(flat, 0)
            if group.rank == 0:
                yield from self._climb(flat, chunk, floor + 1, way, levels, comm)
            else:  # the leader takes so many steps meanwhile
                yield from itertools.repeat(None, 2 * (len(way.shapes) - floor - 1) + 1)
            yield group.broadcast(flat, 0)

    def _furnish(self, start: int, layout: Layout, way: Way, comm: Comm) -> _Chunk:
        """What this rank needs for one chunk, as far up as it climbs."""
        levels = _levels(comm.topology)
        stop, halves = start + layout.numel, list[Halves | None]()
        for shape, level in zip(way.shapes, levels, strict=False):
            group = comm.level(level.name)
            if shape == "sharded" and group is not None:
                halves.append(self.within.halves(layout, group.size))
                part = part_of(layout.numel, group.size)
                layout = layout.piece(group.rank * part, part)
                if not self.within.lossless:
                    layout = dataclasses.replace(layout, dtype=torch.float32)
            else:
                halves.append(None)
                if group is not None and group.rank != 0:
                    return _Chunk(start, stop, tuple(halves), layout, None)
        top = comm.level(levels[-1].name)
        assert top is not None  # noqa: S101 - whoever gets there meets others
        return _Chunk(start, stop, tuple(halves), layout, self.across.prepare(layout, top))

    # --- what it costs, and so which way it goes ----------------------------------------------------------------

    def cost(self, numel: int, dtype: torch.dtype, topology: Topology) -> Cost:
        return self._cost(self.way(numel, dtype, topology), numel, dtype, topology)

    def way(self, numel: int, dtype: torch.dtype, topology: Topology) -> Way:
        """How a bucket of this size goes."""
        return _cheapest(self, numel, dtype, topology)

    def _ways(self, nbytes: int, topology: Topology) -> list[Way]:
        """The simplest first."""
        levels = _levels(topology)
        if len(levels) < 2:
            return [Way()]
        choices = []
        for level in levels[:-1]:
            if not level.equal or self.keeps:
                choices.append(["leader"])
            elif not self.within.lossless:
                choices.append(["sharded"])
            else:
                choices.append(["leader", "sharded"] if self.shape == "auto" else [self.shape])
        most = max(1, nbytes // _SMALLEST_CHUNK_BYTES)
        counts = [self.chunks] if self.chunks else [count for count in _CHUNKS if count <= most]
        ways = [Way(shapes, count) for count in counts for shapes in itertools.product(*choices)]
        # Flat would do to ranks of one host what was asked for between hosts: only where that changes nothing.
        return [Way(), *ways] if self.shape == "auto" and self.lossless else ways

    def _flat(self, topology: Topology) -> Exchange:
        """What all ranks run together: `across`, but `within` where all of them are in one host."""
        one_host = len(topology.levels) > 1 and _levels(topology) == [topology.levels[0]]
        return self.within if one_host else self.across

    def _cost(self, way: Way, numel: int, dtype: torch.dtype, topology: Topology) -> Cost:
        if not way.shapes:
            return self._flat(topology).cost(numel, dtype, topology)
        bounds = _bounds(numel, way, _levels(topology))
        parts = [self._phases(way, stop - start, dtype, topology) for start, stop in bounds]
        return Cost(tuple(itertools.chain(*parts)), len(parts))

    def _phases(self, way: Way, numel: int, dtype: torch.dtype, topology: Topology) -> list[Phase]:
        """Of one chunk."""
        up: list[Phase] = []
        down: list[Phase] = []
        levels = _levels(topology)
        for floor, shape in enumerate(way.shapes):
            here = topology.among(levels[floor])
            if shape == "sharded":
                there, back = self.within.halves_cost(numel, dtype, here)
                numel = part_of(numel, here.ranks)
                dtype = dtype if self.within.lossless else torch.float32
            else:
                there, back = (Phase.of(kind, numel, dtype.itemsize, here) for kind in ("reduce", "broadcast"))
                levels = [*levels[: floor + 1], *(level.led_by(levels[floor]) for level in levels[floor + 1 :])]
            up.append(there)
            down.insert(0, back)
        return [*up, *self.across.cost(numel, dtype, topology.among(levels[-1])).phases, *down]

    def rounding(self, dtype: torch.dtype, ranks: int) -> Rounding:
        inside, outside = self.within.rounding(dtype, ranks), self.across.rounding(dtype, ranks)
        levels = max(1, ranks.bit_length() - 1)  # at most, inside: each at least halves those who go on
        # What is rounded further up are sums of up to so many, each up to so many times the largest.
        return Rounding(
            (1 + inside.of_sum) ** levels * (1 + outside.of_sum) - 1,
            2 * ranks * (levels * inside.of_largest + outside.of_largest),
            2 * ranks * (levels * inside.absolute + outside.absolute),
        )


def _one_behind_the_other(ways: Sequence[Iterator[Work | None]]) -> None:
    """Every turn a chunk sets out, and those before it take their next step, the latest first: so a level is given its
    next collective before anyone waits for the one that it is at."""
    under_way: list[tuple[Iterator[Work | None], Work | None]] = []
    waiting = iter(ways)
    while True:
        if (chunk := next(waiting, None)) is not None:
            under_way.insert(0, (chunk, None))
        if not under_way:
            return
        ahead = []
        for way, work in under_way:
            if work is not None:
                work.wait()
            for step in way:  # at most one
                ahead.append((way, step))
                break
        under_way = ahead


def _levels(topology: Topology) -> list[Level]:
    """The levels at which anybody meets."""
    return [level for level in topology.levels if level.ranks > 1]


@functools.lru_cache(maxsize=512)  # as many as a model has buckets; each keeps a network in memory
def _cheapest(exchange: Hierarchical, numel: int, dtype: torch.dtype, topology: Topology) -> Way:
    ways = exchange._ways(numel * dtype.itemsize, topology)
    seconds = topology.seconds
    if seconds is None or len(ways) == 1:
        return next((way for way in ways if way.shapes), ways[0])
    return min(ways, key=lambda way: seconds(exchange._cost(way, numel, dtype, topology)))


def _bounds(numel: int, way: Way, levels: Sequence[Level]) -> list[tuple[int, int]]:
    """Where each chunk starts and ends. All but the last divide evenly among the ranks that share them."""
    shared = 1
    for shape, level in zip(way.shapes, levels, strict=False):
        shared *= level.ranks if shape == "sharded" else 1
    size = max(1, -(-numel // (way.chunks * shared)) * shared)
    return [(start, min(start + size, numel)) for start in range(0, max(1, numel), size)]


@dataclass(frozen=True)
class _Chunk:
    """What one rank holds for one chunk."""

    start: int
    stop: int
    """In the bucket."""
    halves: tuple[Halves | None, ...]
    """By level."""
    layout: Layout
    """Of what it takes across."""
    across: State | None
    """Only on ranks that get there."""


class _Flat(State):
    """What the exchange that all ranks run together keeps."""

    def __init__(self, inner: State) -> None:
        self.inner = inner

    def describe(self) -> str:
        return str(Way())

    def begin(self, step: int, scale: Tensor | None = None) -> None:
        self.inner.begin(step, scale)

    def finite(self, flat: Tensor) -> Tensor:
        return self.inner.finite(flat)

    @property
    def rests_bytes(self) -> int:
        return self.inner.rests_bytes

    def kept(self) -> Tensor | None:
        return self.inner.kept()

    def tensors(self, layout: Layout) -> dict[str, dict[str, Tensor]]:
        return self.inner.tensors(layout)

    def load(self, layout: Layout, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.inner.load(layout, tensors)

    @property
    def settles(self) -> bool:
        return self.inner.settles

    def settle(self, applied: Tensor) -> None:
        self.inner.settle(applied)


class _Climbed(State):
    """Buffers, and what `across` keeps of each chunk, on the ranks that lead all the way: one that keeps anything has
    leaders at every level, who hold their chunks whole, and hold them whatever the buckets are."""

    def __init__(self, way: Way, chunks: tuple[_Chunk, ...]) -> None:
        self.way, self.chunks = way, chunks

    def describe(self) -> str:
        return str(self.way)

    def begin(self, step: int, scale: Tensor | None = None) -> None:
        for _, state in self._kept:
            state.begin(step, scale)

    def finite(self, flat: Tensor) -> Tensor:
        if not self._kept:
            return super().finite(flat)
        # Those who keep something lead all the way, with whole chunks.
        return torch.stack([state.finite(flat[chunk.start : chunk.stop]) for chunk, state in self._kept]).all()

    @property
    def settles(self) -> bool:
        return any(state.settles for _, state in self._kept)

    @property
    def _kept(self) -> list[tuple[_Chunk, State]]:
        return [(chunk, chunk.across) for chunk in self.chunks if chunk.across is not None]

    @property
    def rests_bytes(self) -> int:
        return sum(state.rests_bytes for _, state in self._kept)

    def kept(self) -> Tensor | None:
        pieces = [kept for _, state in self._kept if (kept := state.kept()) is not None]
        return torch.cat(pieces) if pieces else None

    def tensors(self, layout: Layout) -> dict[str, dict[str, Tensor]]:
        flats: dict[str, Tensor] = {}
        for chunk, state in self._kept:
            held = state.tensors(chunk.layout)
            for slot in chunk.layout.slots:
                for kind, tensor in held.get(slot.name, {}).items():
                    flat = flats.setdefault(kind, tensor.new_zeros(layout.numel))
                    flat[chunk.start + slot.offset :][: slot.numel] = tensor
        return {slot.name: {kind: slot.view(flat) for kind, flat in flats.items()} for slot in layout.slots if flats}

    def load(self, layout: Layout, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        slots = {slot.name: slot for slot in layout.slots}
        for chunk, state in self._kept:
            pieces: dict[str, dict[str, Tensor]] = {}
            for piece in chunk.layout.slots:
                if not piece.name:  # padding
                    continue
                start = chunk.start + piece.offset - slots[piece.name].offset
                pieces[piece.name] = {
                    kind: _in_memory_order(slots[piece.name], tensor)[start : start + piece.numel]
                    for kind, tensor in tensors.get(piece.name, {}).items()
                }
            state.load(chunk.layout, {name: kinds for name, kinds in pieces.items() if kinds})

    def settle(self, applied: Tensor) -> None:
        for chunk, state in self._kept:
            state.settle(applied if applied.dim() == 0 else applied[chunk.start : chunk.stop])


def _in_memory_order(slot: Slot, tensor: Tensor) -> Tensor:
    """As the parameter lies in a bucket."""
    flat = tensor.new_empty(slot.numel)
    flat.as_strided(slot.shape, slot.stride).copy_(tensor)
    return flat
