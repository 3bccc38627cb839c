"""Hierarchical: sum inside hosts first, so that slow links carry each gradient once per host, not once per rank.

On the wire, ranks form a tree of levels from the inside out: ranks in hosts, hosts in racks. A bucket is summed level
by level up to the outermost one, where `across` sums it, and is then sent back down. Each level below has a shape:

- leader: the group's first rank receives the sum (reduce), takes part in the next level alone, and broadcasts the
  result on the way down. Groups may have any size.
- sharded: a reduce-scatter leaves each rank with the sum of its part. All ranks take part in the next level
  concurrently, each with its part, and gather the results on the way down. A level with unequal groups uses leaders.

Buckets are sent in chunks, in a pipeline: while one chunk is at the slow level, the next is summed inside the hosts.
Ranks idle in the steps that they take no part in, so every group issues its collectives in one order.

Cost, for S bytes on m hosts of q ranks, P = m·q:

- Each uplink carries 2(m−1)/m·S. A flat ring carries 2(P−1)/P·S if ranks are numbered host by host (1.75× as much for 2
  hosts of 4 ranks, 1.17× for 4 hosts of 2), and up to q times that otherwise.
- A bucket takes the time of its slowest level, plus the time that one chunk spends at the other levels.

When it loses: there is one rank per host, or one host (it then runs flat); memory inside a host is slower than the
host's link; or buckets are so small that two start-ups per level take longer than those of a ring. `shape="auto"`
compares the predicted times, and runs flat if that is faster.

Paper: HERO, hierarchical all-reduce as a hook of DistributedDataParallel, CloudCom 2025.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from syncline.errors import UsageError
from syncline.exchange.base import Comm, Exchange, Rounding, State, Work
from syncline.exchange.dense import Dense, Halves, part_of
from syncline.exchange.layout import Layout
from syncline.exchange.packed import Packed
from syncline.exchange.topology import Cost, Level, Phase, Topology, Tree, frozen

SHAPES = ("auto", "leader", "sharded")
_CHUNKS = (1, 2, 4, 8, 16, 32)
_SMALLEST_CHUNK_BYTES = 1 << 16  # smaller chunks would consist mostly of start-ups
_MOST_CHUNKS = 1024


@dataclass(frozen=True)
class BucketPath:
    """The path of a bucket."""

    shapes: tuple[str, ...] = ()  # of each level below the outermost: `leader`, `sharded`; empty for a flat exchange
    chunks: int = 1

    def __str__(self) -> str:
        if not self.shapes:
            return "flat"
        return f"{', then '.join(self.shapes)}, in {self.chunks} chunk{'s' if self.chunks > 1 else ''}"


@dataclass(frozen=True)
class Hierarchical:
    """Sum inside groups of ranks first, and then between the groups.

    Args:
        within: The exchange inside groups.
        across: The exchange at the outermost level, of any type.
        shape: `leader` or `sharded` for every level with equal groups. `auto` chooses the fastest shape for each level
            from the measured links, or a flat exchange if that is faster, regardless of `levels` and `chunks`.
        levels: Group sizes from the inside out, like (4, 2), or nested lists of ranks, like [[0, 1], [2, 3]]. By
            default the hosts and racks that Syncline detects.
        chunks: The number of chunks per bucket, by default the fastest for the measured links.

    Raises:
        UsageError: The settings do not fit together.

    Example:
        >>> handle = syncline.attach(model, syncline.Hierarchical(across=syncline.Dense(wire="bf16")))
    """

    within: Dense = dataclasses.field(default_factory=Dense)
    across: Exchange = dataclasses.field(default_factory=Dense)
    shape: str = "auto"
    levels: Any = None
    chunks: int | None = None
    waits = True

    def __post_init__(self) -> None:
        if (problem := self._problem()) is not None:
            setting, reason = problem
            raise UsageError(f"Hierarchical({setting}={getattr(self, setting)!r}): {reason}")
        object.__setattr__(self, "levels", None if self.levels is None else frozen(self.levels))

    def _problem(self) -> tuple[str, str] | None:
        """Return a setting that does not fit, and why."""
        within, across, chunks = (getattr(self, name) for name in ("within", "across", "chunks"))
        if not isinstance(within, Dense):
            return "within", "within must be a Dense exchange, for example Dense()"
        if isinstance(across, type) or not isinstance(across, Exchange):
            return "across", "pass an exchange, for example Dense()"
        if isinstance(across, Hierarchical):
            return "across", "use one Hierarchical, with as many levels as you need"
        if self.shape not in SHAPES:
            return "shape", f"shape is one of {', '.join(SHAPES)}"
        if self.shape == "leader" and not within.lossless:
            return "within", "leaders receive gradients in their own type: use within=Dense() or shape='sharded'"
        if across.keeps and (self.shape == "sharded" or not within.lossless):
            reason = "its residual must stay on one rank, but shards change ranks when DDP changes its buckets"
            return "across", f"{reason}: use within=Dense() and shape='leader' or 'auto'"
        if chunks is not None and not (type(chunks) is int and 1 <= chunks <= _MOST_CHUNKS):
            return "chunks", f"chunks must be from 1 to {_MOST_CHUNKS}"
        try:
            hash(across)
        except TypeError:
            return "across", "its settings must be hashable: make it a frozen dataclass"
        return None

    @property
    def lossless(self) -> bool:
        return self.within.lossless and self.across.lossless

    @property
    def keeps(self) -> bool:
        return self.across.keeps

    def tree(self, detected: Tree, ranks: int) -> Tree:
        """Return the tree of `levels` if they are set, or the detected one."""
        tree = detected if self.levels is None else Tree.given(self.levels, ranks)
        uneven = next((level for level in tree.levels[:-1] if not level.equal), None)
        if uneven is not None and not self.within.lossless:
            sizes = f"those of {uneven.name} have {' and '.join(map(str, uneven.sizes))} ranks: use within=Dense()"
            raise UsageError(f"Hierarchical(within={self.within!r}) needs groups of equal size, but {sizes}")
        return tree

    def prepare(self, layout: Layout, comm: Comm) -> State:
        path = self.path(layout.numel, layout.dtype, comm.topology)
        if not path.shapes:
            whole = layout.piece(0, layout.numel)
            across = self._flat(comm.topology).prepare(whole, comm)
            return HierarchicalState(path, [Chunk(0, layout.numel, (), whole, across, False)], layout)
        bounds = _bounds(layout.numel, path, comm.topology)
        chunks = [self._prepare_chunk(*bound, layout, path, comm) for bound in bounds]
        return HierarchicalState(path, chunks, layout)

    def run(self, flat: Tensor, state: State, comm: Comm) -> Work | None:
        assert isinstance(state, HierarchicalState)  # noqa: S101 - as prepared
        if not state.path.shapes:
            ((_, across),) = state.crossing
            return self._flat(comm.topology).run(flat, across, comm)
        # In each turn one chunk starts, and all started ones take their next step, the latest first: so a level has
        # its next collective before anything waits for its current one.
        waiting = [self._climb(flat[chunk.start : chunk.stop], chunk, 0, state, comm) for chunk in state.chunks]
        started: list[tuple[Iterator[Work | None], Work | None]] = []
        while waiting or started:
            started = [(steps, None) for steps in waiting[:1]] + started
            del waiting[:1]
            unfinished = []
            for steps, work in started:
                if work is not None:
                    work.wait()
                unfinished += [(steps, next_work) for next_work in itertools.islice(steps, 1)]
            started = unfinished
        state.flag(flat)
        return None

    def _climb(
        self, flat: Tensor, chunk: Chunk, floor: int, state: HierarchicalState, comm: Comm
    ) -> Iterator[Work | None]:
        """Run one chunk from a level up to the outermost one and down again. Yield the collective to wait for before
        the next step, or None for a step in which this rank idles."""
        shapes = state.path.shapes
        group = comm.level(_levels(comm.topology)[floor].name)
        if floor == len(shapes):
            assert group is not None and chunk.across is not None  # noqa: S101 - as prepared
            yield self.across.run(flat, chunk.across, group)
        elif group is None:  # this rank is the only one of its group: idle while other groups reduce and broadcast
            yield None
            yield from self._climb(flat, chunk, floor + 1, state, comm)
            yield None
        elif shapes[floor] == "sharded":
            halves = chunk.halves[floor]
            assert halves is not None  # noqa: S101 - as prepared
            yield halves.scatter(flat, group)
            shard = halves.shard()
            yield from self._climb(shard, chunk, floor + 1, state, comm)
            yield halves.gather(shard, flat, group)
            halves.finish(flat)
        else:
            yield group.reduce(flat, 0)
            if group.rank == 0:
                yield from self._climb(flat, chunk, floor + 1, state, comm)
            else:  # idle for as many steps as the leader takes at the levels above
                yield from itertools.repeat(None, 2 * (len(shapes) - floor - 1) + 1)
            yield group.broadcast(flat, 0)

    def _prepare_chunk(self, start: int, stop: int, layout: Layout, path: BucketPath, comm: Comm) -> Chunk:
        """Return the buffers and state of this rank for one chunk, at all levels that the rank takes part in."""
        levels, halves = _levels(comm.topology), list[Halves | None]()
        across, sparse = self.across, False
        if isinstance(across, Packed) and across.partial:
            sparse = across.part_bytes(stop - start, layout.dtype, levels[-1].ranks) is not None
        layout = layout.piece(start, stop - start)
        for shape, level in zip(path.shapes, levels, strict=False):
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
                    return Chunk(start, stop, tuple(halves), layout, None, sparse)
        top = comm.level(levels[-1].name)
        assert top is not None  # noqa: S101 - the groups of the outermost level have several ranks
        return Chunk(start, stop, tuple(halves), layout, across.prepare(layout, top), sparse)

    def cost(self, numel: int, dtype: torch.dtype, topology: Topology) -> Cost:
        return self._cost(self.path(numel, dtype, topology), numel, dtype, topology)

    @functools.lru_cache(maxsize=512)  # noqa: B019 - about as many as a model has buckets; exchanges are values
    def path(self, numel: int, dtype: torch.dtype, topology: Topology) -> BucketPath:
        """Return the path of a bucket: the one with the lowest predicted time or, without a prediction, the simplest
        one that is not flat."""
        levels, seconds = _levels(topology), topology.seconds
        if len(levels) < 2:
            return BucketPath()
        usual = ["leader", "sharded"] if self.shape == "auto" else [self.shape]
        usual = usual if self.within.lossless else ["sharded"]
        choices = [usual if level.equal and not self.keeps else ["leader"] for level in levels[:-1]]
        most = max(1, numel * dtype.itemsize // _SMALLEST_CHUNK_BYTES)
        counts = [self.chunks] if self.chunks else [count for count in _CHUNKS if count <= most]
        paths = [BucketPath(shapes, count) for count in counts for shapes in itertools.product(*choices)]
        if seconds is None:
            return paths[0]
        if self.shape == "auto" and self.lossless:
            # A flat lossy exchange would also round or drop values between ranks of one host, which was not asked for.
            paths.insert(0, BucketPath())
        return min(paths, key=lambda path: seconds(self._cost(path, numel, dtype, topology)))

    def _flat(self, topology: Topology) -> Exchange:
        """Return the exchange that all ranks run on the flat path: `across`, or `within` if all are on one host."""
        one_host = len(topology.levels) > 1 and _levels(topology) == [topology.levels[0]]
        return self.within if one_host else self.across

    def _cost(self, path: BucketPath, numel: int, dtype: torch.dtype, topology: Topology) -> Cost:
        if not path.shapes:
            return self._flat(topology).cost(numel, dtype, topology)
        bounds = _bounds(numel, path, topology)
        parts = [self._phases(path, stop - start, dtype, topology) for start, stop in bounds]
        return Cost(tuple(itertools.chain(*parts)), len(parts))

    def _phases(self, path: BucketPath, numel: int, dtype: torch.dtype, topology: Topology) -> list[Phase]:
        """Return the phases of one chunk."""
        up, down, levels = list[Phase](), list[Phase](), _levels(topology)
        for floor, shape in enumerate(path.shapes):
            groups = topology.among(levels[floor])
            if shape == "sharded":
                first, last = self.within.halves_cost(numel, dtype, groups)
                numel = part_of(numel, groups.ranks)
                dtype = dtype if self.within.lossless else torch.float32
            else:
                first, last = (Phase.of(kind, numel, dtype.itemsize, groups) for kind in ("reduce", "broadcast"))
                levels = [*levels[: floor + 1], *(level.led_by(levels[floor]) for level in levels[floor + 1 :])]
            up.append(first)
            down.insert(0, last)
        return [*up, *self.across.cost(numel, dtype, topology.among(levels[-1])).phases, *down]

    def rounding(self, dtype: torch.dtype, ranks: int) -> Rounding:
        inside, outside = self.within.rounding(dtype, ranks), self.across.rounding(dtype, ranks)
        levels = max(1, ranks.bit_length() - 1)  # an upper bound: each level at least halves the number of groups
        # Outer levels round sums over up to `ranks` ranks, each up to `ranks` times the largest input.
        return Rounding(
            (1 + inside.of_sum) ** levels * (1 + outside.of_sum) - 1,
            2 * ranks * (levels * inside.of_largest + outside.of_largest),
            2 * ranks * (levels * inside.absolute + outside.absolute),
        )


@dataclass(frozen=True)
class Chunk:
    """The buffers and state of one rank for one chunk."""

    start: int
    stop: int
    halves: tuple[Halves | None, ...]  # reduce-scatter and all-gather of each level; None where it has leaders
    layout: Layout  # of this rank's part at the outermost level
    across: State | None  # state of the outermost exchange; None on ranks that take no part in it
    sparse: bool  # True if the outermost exchange, of several levels, applies only some of the elements


class HierarchicalState(State):
    """The chunks of a bucket. An `across` with a residual has leaders at every level. They hold whole chunks, and which
    ranks lead does not depend on the buckets, so a residual stays on its rank when DDP changes its buckets.

    `applied_here` returns, on every rank, the elements whose result is not zero: which ranks of a host an entry came
    from is not known. A bucket that runs flat returns what its exchange does."""

    def __init__(self, path: BucketPath, chunks: Sequence[Chunk], layout: Layout) -> None:
        self.path, self.chunks = path, chunks
        self._numel, self._device = layout.numel, layout.device
        self._flags: Tensor | None = None
        # Chunks for which this rank runs `across`, with its states.
        self.crossing = [(chunk, chunk.across) for chunk in chunks if chunk.across is not None]

    def describe(self) -> str:
        return str(self.path)

    def begin(self, step: int, scale: Tensor | None = None) -> None:
        for _, state in self.crossing:
            state.begin(step, scale)

    def finite(self, flat: Tensor) -> Tensor:
        flags = [state.finite(flat[chunk.start : chunk.stop]) for chunk, state in self.crossing]
        return torch.stack(flags).all() if len(flags) > 1 else flags[0] if flags else super().finite(flat)

    def track_applied(self) -> None:
        if not self.path.shapes:
            self.crossing[0][1].track_applied()
        elif any(chunk.sparse for chunk in self.chunks):
            self._flags = torch.ones(self._numel, dtype=torch.bool, device=self._device)

    def applied_here(self) -> Tensor | None:
        return self._flags if self.path.shapes else self.crossing[0][1].applied_here()

    def flag(self, flat: Tensor) -> None:
        """Store which elements of a result were applied, if someone asks for it."""
        if self._flags is not None:
            for chunk in self.chunks:
                if chunk.sparse:
                    here = slice(chunk.start, chunk.stop)
                    torch.ne(flat[here], 0, out=self._flags[here])

    @property
    def settles(self) -> bool:
        return any(state.settles for _, state in self.crossing)

    @property
    def state_bytes(self) -> int:
        return sum(state.state_bytes for _, state in self.crossing)

    def kept(self) -> Tensor | None:
        pieces = [kept for _, state in self.crossing if (kept := state.kept()) is not None]
        return torch.cat(pieces) if pieces else None

    def tensors(self, layout: Layout) -> dict[str, dict[str, Tensor]]:
        flats: dict[str, Tensor] = {}
        for chunk, state in self.crossing:
            by_name = state.tensors(chunk.layout)
            for slot in chunk.layout.slots:
                for kind, tensor in by_name.get(slot.name, {}).items():
                    flat = flats.setdefault(kind, tensor.new_zeros(layout.numel))
                    flat[chunk.start + slot.offset :][: slot.numel] = tensor
        return {slot.name: {kind: slot.view(flat) for kind, flat in flats.items()} for slot in layout.slots if flats}

    def load(self, layout: Layout, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        flats: dict[str, Tensor] = {}
        for slot in layout.slots:
            for kind, tensor in tensors.get(slot.name, {}).items():
                slot.view(flats.setdefault(kind, tensor.new_zeros(layout.numel))).copy_(tensor)
        for chunk, state in self.crossing:
            here = {kind: flat[chunk.start : chunk.stop] for kind, flat in flats.items()}
            slots = (slot for slot in chunk.layout.slots if slot.name in tensors)
            pieces = {slot.name: {kind: slot.view(flat) for kind, flat in here.items()} for slot in slots}
            state.load(chunk.layout, pieces)

    def settle(self, applied: Tensor) -> None:
        for chunk, state in self.crossing:
            state.settle(applied if applied.dim() == 0 else applied[chunk.start : chunk.stop])


def _levels(topology: Topology) -> list[Level]:
    """Return the levels that have a group of several ranks."""
    return [level for level in topology.levels if level.ranks > 1]


def _bounds(numel: int, path: BucketPath, topology: Topology) -> list[tuple[int, int]]:
    """Return the bounds of each chunk. All but the last divide evenly among the ranks that share them."""
    levels = zip(path.shapes, _levels(topology), strict=False)
    shared = math.prod(level.ranks for shape, level in levels if shape == "sharded")
    size = max(1, -(-numel // (path.chunks * shared)) * shared)
    return [(start, min(start + size, numel)) for start in range(0, max(1, numel), size)]
