"""Hierarchical: sum inside hosts first, so that slow links carry each gradient once per host, not once per rank.

On the wire, ranks form a tree of levels from the inside out: ranks in hosts, hosts in racks. A bucket is summed level
by level up to the outermost one, where `across` sums it, and is then sent back down. Each level below has one of two
shapes:

- leader: the group's first rank receives the sum (reduce), takes part in the next level alone, and broadcasts the
  result on the way down. Groups may have any size.
- sharded: a reduce-scatter leaves each rank with the sum of its part. All ranks take part in the next level
  concurrently, each with its part, and gather the results on the way down. Groups must have equal sizes; a level with
  unequal groups uses leaders.

Buckets are sent in chunks, in a pipeline: while one chunk is at the slow level, the next is summed inside the hosts.
All ranks follow the same schedule, and idle in the steps that they take no part in, so every group issues its
collectives in one order. The result equals a flat all-reduce apart from the order of summation, and is bit-equal on all
ranks.

Cost, for S bytes on m hosts of q ranks, P = m·q:

- Each uplink carries 2(m−1)/m·S. A flat ring carries 2(P−1)/P·S if ranks are numbered host by host, and up to q times
  that otherwise.
- Compared with a ring numbered host by host, uplinks carry 1.75× fewer bytes with 2 hosts of 4 ranks, and 1.17× fewer
  with 4 hosts of 2. Start-ups between hosts also take less time, because fewer messages there depend on each other.
- A bucket takes the time of its slowest level, plus the time that one chunk spends at the other levels.

When it loses:

- There is one rank per host, or one host. It then runs flat.
- Memory inside a host is slower than the host's link.
- Buckets are so small that two start-ups per level take longer than those of a ring. `shape="auto"` compares the
  predicted times, and runs flat if that is faster.

Paper: HERO, hierarchical all-reduce as a hook of DistributedDataParallel, CloudCom 2025.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
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
    State,
    Topology,
    Work,
)
from syncline.exchange.dense import Dense, Halves, part_of
from syncline.exchange.hierarchical_state import Chunk, ClimbedState, FlatState, Way
from syncline.exchange.tree import Tree, frozen

SHAPES = ("auto", "leader", "sharded")
_CHUNKS = (1, 2, 4, 8, 16, 32)
_SMALLEST_CHUNK_BYTES = 1 << 16
"""Smaller chunks would consist mostly of start-ups."""
_MOST_CHUNKS = 1024


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

    def __post_init__(self) -> None:
        if not isinstance(self.within, Dense):
            raise UsageError(
                f"Hierarchical(within={self.within!r}): within must be a Dense exchange, for example Dense()"
            )
        if isinstance(self.across, type) or not isinstance(self.across, Exchange):
            raise UsageError(f"Hierarchical(across={self.across!r}): pass an exchange, for example Dense()")
        if isinstance(self.across, Hierarchical):
            raise UsageError(
                "Hierarchical(across=Hierarchical(…)): use one Hierarchical, with as many levels as you need"
            )
        if self.shape not in SHAPES:
            raise UsageError(f"Hierarchical(shape={self.shape!r}): shape is one of {', '.join(SHAPES)}")
        if self.shape == "leader" and not self.within.lossless:
            raise UsageError(
                f"Hierarchical(shape='leader', within={self.within!r}): leaders receive gradients in their own type: "
                "use within=Dense() or shape='sharded'"
            )
        if self.across.keeps and (self.shape == "sharded" or not self.within.lossless):
            raise UsageError(
                f"Hierarchical(across={self.across!r}): its residual must stay on one rank, but shards change ranks "
                "when DDP changes its buckets: use within=Dense() and shape='leader' or 'auto'"
            )
        whole = isinstance(self.chunks, int) and not isinstance(self.chunks, bool)
        if self.chunks is not None and not (whole and 1 <= self.chunks <= _MOST_CHUNKS):
            raise UsageError(f"Hierarchical(chunks={self.chunks!r}): chunks must be from 1 to {_MOST_CHUNKS}")
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
        """Return the tree of `levels` if they are set, or the detected one."""
        tree = found if self.levels is None else Tree.given(self.levels, ranks)
        uneven = next((level for level in tree.levels[:-1] if not level.equal), None)
        if uneven is not None and not self.within.lossless:
            raise UsageError(
                f"Hierarchical(within={self.within!r}) needs groups of equal size, but those of {uneven.name} have "
                f"{' and '.join(map(str, uneven.sizes))} ranks: use within=Dense()"
            )
        return tree

    def prepare(self, layout: Layout, comm: Comm) -> State:
        path = self.way(layout.numel, layout.dtype, comm.topology)
        if not path.shapes:
            return FlatState(self._flat(comm.topology).prepare(layout, comm))
        bounds = _bounds(layout.numel, path, _levels(comm.topology))
        chunks = tuple(
            self._prepare_chunk(start, layout.piece(start, stop - start), path, comm) for start, stop in bounds
        )
        return ClimbedState(path, chunks)

    def run(self, flat: Tensor, state: State, comm: Comm) -> Work | None:
        if isinstance(state, FlatState):
            return self._flat(comm.topology).run(flat, state.inner, comm)
        assert isinstance(state, ClimbedState)  # noqa: S101 - as prepared
        levels = _levels(comm.topology)
        _run_in_pipeline(
            [self._climb(flat[chunk.start : chunk.stop], chunk, 0, state.path, levels, comm) for chunk in state.chunks]
        )
        return None

    def _climb(
        self, flat: Tensor, chunk: Chunk, floor: int, path: Way, levels: Sequence[Level], comm: Comm
    ) -> Iterator[Work | None]:
        """Run one chunk from a level up to the outermost one and down again.

        Yields:
            The collective to wait for before the next step, or None for a step in which this rank idles.
        """
        group = comm.level(levels[floor].name)
        if floor == len(path.shapes):
            assert group is not None and chunk.across is not None  # noqa: S101 - as prepared
            yield self.across.run(flat, chunk.across, group)
        elif group is None:  # this rank is the only one of its group: idle while other groups reduce and broadcast
            yield None
            yield from self._climb(flat, chunk, floor + 1, path, levels, comm)
            yield None
        elif path.shapes[floor] == "sharded":
            halves = chunk.halves[floor]
            assert halves is not None  # noqa: S101 - as prepared
            yield halves.scatter(flat, group)
            shard = halves.shard()
            yield from self._climb(shard, chunk, floor + 1, path, levels, comm)
            yield halves.gather(shard, flat, group)
            halves.finish(flat)
        else:
            yield group.reduce(flat, 0)
            if group.rank == 0:
                yield from self._climb(flat, chunk, floor + 1, path, levels, comm)
            else:  # idle for as many steps as the leader takes at the levels above
                yield from itertools.repeat(None, 2 * (len(path.shapes) - floor - 1) + 1)
            yield group.broadcast(flat, 0)

    def _prepare_chunk(self, start: int, layout: Layout, path: Way, comm: Comm) -> Chunk:
        """Return the buffers and state of this rank for one chunk, at all levels that the rank takes part in."""
        levels = _levels(comm.topology)
        stop, halves = start + layout.numel, list[Halves | None]()
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
                    return Chunk(start, stop, tuple(halves), layout, None)
        top = comm.level(levels[-1].name)
        assert top is not None  # noqa: S101 - the groups of the outermost level have several ranks
        return Chunk(start, stop, tuple(halves), layout, self.across.prepare(layout, top))

    # --- cost, and the path that it decides ---------------------------------------------------------------------

    def cost(self, numel: int, dtype: torch.dtype, topology: Topology) -> Cost:
        return self._cost(self.way(numel, dtype, topology), numel, dtype, topology)

    def way(self, numel: int, dtype: torch.dtype, topology: Topology) -> Way:
        """Return the path of a bucket of this size."""
        return _cheapest(self, numel, dtype, topology)

    def _paths(self, nbytes: int, topology: Topology) -> list[Way]:
        """Return the possible paths, simplest first."""
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
        paths = [Way(shapes, count) for count in counts for shapes in itertools.product(*choices)]
        # A flat lossy exchange would also round or drop values between ranks of one host, which was not asked for.
        return [Way(), *paths] if self.shape == "auto" and self.lossless else paths

    def _flat(self, topology: Topology) -> Exchange:
        """Return the exchange that all ranks run on the flat path: `across`, or `within` if all are on one host."""
        one_host = len(topology.levels) > 1 and _levels(topology) == [topology.levels[0]]
        return self.within if one_host else self.across

    def _cost(self, path: Way, numel: int, dtype: torch.dtype, topology: Topology) -> Cost:
        if not path.shapes:
            return self._flat(topology).cost(numel, dtype, topology)
        bounds = _bounds(numel, path, _levels(topology))
        parts = [self._phases(path, stop - start, dtype, topology) for start, stop in bounds]
        return Cost(tuple(itertools.chain(*parts)), len(parts))

    def _phases(self, path: Way, numel: int, dtype: torch.dtype, topology: Topology) -> list[Phase]:
        """Return the phases of one chunk."""
        up: list[Phase] = []
        down: list[Phase] = []
        levels = _levels(topology)
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


def _run_in_pipeline(chunks: Sequence[Iterator[Work | None]]) -> None:
    """Run chunks in a pipeline: in each turn one chunk starts, and all started ones take their next step.

    The latest chunk goes first, so that a level has its next collective before anything waits for its current one.
    """
    started: list[tuple[Iterator[Work | None], Work | None]] = []
    waiting = iter(chunks)
    while True:
        if (chunk := next(waiting, None)) is not None:
            started.insert(0, (chunk, None))
        if not started:
            return
        unfinished = []
        for steps, work in started:
            if work is not None:
                work.wait()
            for next_work in steps:  # at most one
                unfinished.append((steps, next_work))
                break
        started = unfinished


def _levels(topology: Topology) -> list[Level]:
    """Return the levels that have a group of several ranks."""
    return [level for level in topology.levels if level.ranks > 1]


@functools.lru_cache(maxsize=512)  # about as many as a model has buckets; each entry keeps a network in memory
def _cheapest(exchange: Hierarchical, numel: int, dtype: torch.dtype, topology: Topology) -> Way:
    """Return the path with the lowest predicted time; without a prediction, the simplest one that is not flat."""
    paths = exchange._paths(numel * dtype.itemsize, topology)
    seconds = topology.seconds
    if seconds is None or len(paths) == 1:
        return next((path for path in paths if path.shapes), paths[0])
    return min(paths, key=lambda path: seconds(exchange._cost(path, numel, dtype, topology)))


def _bounds(numel: int, path: Way, levels: Sequence[Level]) -> list[tuple[int, int]]:
    """Return the bounds of each chunk. All but the last divide evenly among the ranks that share them."""
    shared = 1
    for shape, level in zip(path.shapes, levels, strict=False):
        shared *= level.ranks if shape == "sharded" else 1
    size = max(1, -(-numel // (path.chunks * shared)) * shared)
    return [(start, min(start + size, numel)) for start in range(0, max(1, numel), size)]
