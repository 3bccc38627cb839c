"""What a training step takes of memory at most, and what to keep, recompute or move away so that it fits.

A step is a forward and a backward over a row of blocks, with something before them (embeddings, a stem) and something
behind (a head and the loss). What the forward of a block leaves for its backward is one of:

- kept: everything that autograd saves;
- recomputed: only its input, and in backward its forward is run again;
- offloaded: everything is saved in the host's memory, and fetched one block ahead of backward;
- parked: recomputed, with its input in the host's memory.

Memory is at its peak at one of few moments: in a block's forward, in the head, or in a block's backward, where what
the blocks before it left is still there. The weights, the optimizer's state, what exchanges keep and work in, and
gradients that wait for their exchange are there all the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from syncline.predict.schedule import MIB
from syncline.records.activations import KEEP, OFFLOAD, PARK, RECOMPUTE, WAYS, Activations, Block

BUCKET_BYTES = 16 * MIB
"""Small: each bucket is a part of what is alive at any time, and large enough to select from. In small models, less."""
_BUCKETS = 16
BACKLOG_BUCKETS = 4
"""So many wait for their exchange at most."""


def bucket_bytes(gradient_bytes: int) -> int:
    """What is exchanged together, layer by layer."""
    return min(BUCKET_BYTES, max(MIB, gradient_bytes // _BUCKETS))


def layerwise_lanes(backend: str) -> int:
    """Gloo's collectives have gaps that another lane fills."""
    return 2 if backend == "gloo" else 1


@dataclass(frozen=True)
class States:
    """What is there all the time, in bytes, each by its name."""

    device: dict[str, int]
    host: dict[str, int] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(self.device.values())


@dataclass(frozen=True)
class Choice:
    """What becomes of each block, and what that comes to."""

    batch: int
    ways: tuple[str, ...]
    residual: str
    """`device` or `host`."""
    peak_bytes: float
    states: States
    step_s: float
    """Computation, with what is recomputed and waited for."""
    plain_s: float
    """The same, if all were kept."""

    def counted(self) -> dict[str, int]:
        """How many blocks go each way."""
        return {way: self.ways.count(way) for way in WAYS if way in self.ways}

    def describe(self) -> str:
        parts = [f"{count} {_DONE[way]}" for way, count in self.counted().items()]
        return ", ".join([*parts, *(["residual on the host"] if self.residual == "host" else [])]) or "none"


_DONE = {KEEP: "kept", RECOMPUTE: "recomputed", OFFLOAD: "offloaded", PARK: "parked"}


def left_behind(block: Block, way: str, batch: float) -> float:
    """Bytes on the device between a block's forward and its backward."""
    if way == KEEP:
        return block.held.at(batch)
    return block.input.at(batch) if way == RECOMPUTE else 0.0


def peak_bytes(activations: Activations, ways: Sequence[str], batch: float, waiting_bytes: float = 0.0) -> float:
    """Of forward and backward alone. `waiting_bytes`: gradients that are there once backward has made them."""
    before = activations.before.at(batch)
    peak, held = before, before
    blocks = list(zip(activations.blocks, ways, strict=True))
    for place, (block, way) in enumerate(blocks):
        # What the last one saved is still on its way to the host.
        leaving = _on_its_way(*blocks[place - 1], batch) if place else 0.0
        peak = max(peak, held + leaving + block.forward_peak.at(batch))
        held += left_behind(block, way, batch)
    peak = max(peak, held + (_on_its_way(*blocks[-1], batch) if blocks else 0.0) + activations.behind_peak.at(batch))
    for place in reversed(range(len(blocks))):
        block, way = blocks[place]
        held -= left_behind(block, way, batch)
        coming = _on_its_way(*blocks[place - 1], batch) if place else 0.0
        stays = block.input.at(batch) if way in (RECOMPUTE, PARK) else 0.0
        # Backward has made the gradients of what comes behind: of about so much.
        made = activations.parameter_bytes * (len(blocks) - 1 - place) / len(blocks)
        here = held + coming + stays + block.backward_peak.at(batch)
        peak = max(peak, min(waiting_bytes, made) + here)
    return max(peak, min(waiting_bytes, activations.parameter_bytes) + activations.before_peak.at(batch))


def _on_its_way(block: Block, way: str, batch: float) -> float:
    """What of a block is on the device only because it is being moved."""
    if way == OFFLOAD:
        return block.held.at(batch)
    return block.input.at(batch) if way == PARK else 0.0


def step_s(activations: Activations, ways: Sequence[str], batch: float) -> float:
    """Computation of a step. What is moved hides behind computation as far as there is some."""
    compute = activations.behind_s.at(batch)
    moved = 0.0
    for block, way in zip(activations.blocks, ways, strict=True):
        compute += block.forward_s.at(batch) + block.backward_s.at(batch)
        if way in (RECOMPUTE, PARK):
            compute += block.forward_s.at(batch)
        if way in (OFFLOAD, PARK):
            moved += 2 * _on_its_way(block, way, batch)
    return max(compute, moved / activations.to_host_bps if moved else 0.0)


@dataclass(frozen=True)
class Training:
    """What a training keeps beside activations: of which the sizes are known without a measurement."""

    parameter_bytes: int
    buffer_bytes: int
    optimizer_bytes: int
    """The optimizer's state."""
    residual_bytes: int
    """What exchanges keep for later."""
    workspace_bytes: int
    """What they work in."""
    gradient_bytes: int = 0
    """Gradients that are there all the time."""
    waiting_bytes: int = 0
    """Gradients that are there in backward, until they are exchanged."""

    def states(self, residual: str) -> States:
        device = {
            "weights": self.parameter_bytes,
            "buffers": self.buffer_bytes,
            "optimizer": self.optimizer_bytes,
            "residual": self.residual_bytes if residual == "device" else 0,
            "exchange": self.workspace_bytes,
            "gradients": self.gradient_bytes,
        }
        return States(device, {} if residual == "device" else {"residual": self.residual_bytes})


def choose(
    activations: Activations,
    training: Training,
    batch: int,
    budget_bytes: float,
    *,
    residual: str | None = None,
    keep_all: bool = False,
) -> Choice | None:
    """The fastest way to take a step of this batch within the budget; None where there is none.

    Starts with everything kept, and gives up, one after the other, what frees most for the time that it costs.
    `residual`: where it must be; None for wherever it costs less. `keep_all`: nothing is given up.
    """
    found: list[Choice] = []
    plain_s = step_s(activations, [KEEP] * len(activations.blocks), batch)
    for place in ("device",) if keep_all else _places(activations, training, residual):
        states = training.states(place)
        find = _all_kept if keep_all else _cheapest_ways
        ways = find(activations, batch, budget_bytes - states.bytes, training.waiting_bytes)
        if ways is None:
            continue
        peak = states.bytes + peak_bytes(activations, ways, batch, training.waiting_bytes)
        seconds = step_s(activations, ways, batch)
        if place == "host" and activations.to_host_bps:  # there and back, every step, beside the computation
            seconds = max(seconds, 2 * training.residual_bytes / activations.to_host_bps)
        found.append(Choice(batch, tuple(ways), place, peak, states, seconds, plain_s))
    return min(found, key=lambda choice: choice.step_s, default=None)


def _places(activations: Activations, training: Training, residual: str | None) -> tuple[str, ...]:
    if residual is not None:
        return (residual,)
    return ("device", "host") if training.residual_bytes and activations.to_host_bps else ("device",)


def _all_kept(activations: Activations, batch: int, room: float, waiting_bytes: float) -> list[str] | None:
    ways = [KEEP] * len(activations.blocks)
    return ways if peak_bytes(activations, ways, batch, waiting_bytes) <= room else None


def _cheapest_ways(activations: Activations, batch: int, room: float, waiting_bytes: float) -> list[str] | None:
    """By giving up one block after the other; or all alike, where that ends in a corner."""

    def fits(ways: Sequence[str]) -> bool:
        return peak_bytes(activations, ways, batch, waiting_bytes) <= room

    alike = [ways for ways in _all_alike(activations) if fits(ways)]
    if not alike:
        return None
    ways: list[str] | None = [KEEP] * len(activations.blocks)
    while ways is not None and not fits(ways):
        ways = _next_given_up(activations, ways, batch)
    return min([*alike, *([] if ways is None else [ways])], key=lambda ways: step_s(activations, ways, batch))


def _all_alike(activations: Activations) -> list[list[str]]:
    return [[way] * len(activations.blocks) for way in (KEEP, *_given_up(activations))]


def _next_given_up(activations: Activations, ways: Sequence[str], batch: int) -> list[str] | None:
    """With one block more given up: the one that frees most for the time that it costs."""
    best: tuple[float, float, list[str]] | None = None
    before_s = step_s(activations, ways, batch)
    for place, block in enumerate(activations.blocks):
        for way in _given_up(activations):
            freed = left_behind(block, ways[place], batch) - left_behind(block, way, batch)
            if freed <= 0:
                continue
            other = [*ways[:place], way, *ways[place + 1 :]]
            rank = (freed / (max(0.0, step_s(activations, other, batch) - before_s) + 1e-9), freed)
            if best is None or rank > best[:2]:
                best = (*rank, other)
    return None if best is None else best[2]


def _given_up(activations: Activations) -> tuple[str, ...]:
    return (RECOMPUTE, OFFLOAD, PARK) if activations.to_host_bps else (RECOMPUTE,)


def smallest_budget(
    activations: Activations, training: Training, batch: int, *, residual: str | None = None, keep_all: bool = False
) -> float:
    """Under which nothing fits."""
    lowest = math.inf
    for place in ("device",) if keep_all else _places(activations, training, residual):
        states = training.states(place)
        for ways in [[KEEP] * len(activations.blocks)] if keep_all else _all_alike(activations):
            lowest = min(lowest, states.bytes + peak_bytes(activations, ways, batch, training.waiting_bytes))
    return lowest


def largest_batch(activations: Activations, training: Training, budget_bytes: float, *, keep_all: bool = False) -> int:
    """That fits in whatever way; 0 where not even one sample does."""

    def fits(batch: int) -> bool:
        return smallest_budget(activations, training, batch, keep_all=keep_all) <= budget_bytes

    if not fits(1):
        return 0
    high = 2
    while fits(high) and high < _LARGEST_BATCH:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


_LARGEST_BATCH = 2**20
FURTHEST = 16
"""Times the largest measured batch: a line is not good for any distance."""


def best_batch(
    activations: Activations,
    training: Training,
    budget_bytes: float,
    step_s: Callable[[Choice], float],
    *,
    keep_all: bool = False,
) -> Choice | None:
    """The batch with which a sample takes least, and how it fits; None where not even one sample does. `step_s`: what a
    step takes with its exchange. The largest is not always the best: what it recomputes may cost more than it
    shares."""
    most = largest_batch(activations, training, budget_bytes, keep_all=keep_all)
    most = min(most, FURTHEST * max(activations.batches))
    tried = {most, *(most * part // 8 for part in range(1, 8)), *(2**power for power in range(21))}
    best: tuple[float, Choice] | None = None
    for batch in sorted(batch for batch in tried if 1 <= batch <= most):
        choice = choose(activations, training, batch, budget_bytes, keep_all=keep_all)
        if choice is not None and (best is None or step_s(choice) / batch < best[0]):
            best = step_s(choice) / batch, choice
    return None if best is None else best[1]
