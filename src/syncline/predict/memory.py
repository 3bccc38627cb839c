"""Predict the peak memory of a training step, and choose which activations to keep, recompute or move to the host.

A step is a forward and a backward over a sequence of blocks, with layers before them (embeddings, a stem) and behind
them (a head and the loss). The activations of a block are one of:

- kept: everything that autograd saves stays on the device;
- recomputed: only the input stays, and backward runs the block's forward again;
- offloaded: everything is saved in host memory, and fetched one block ahead of backward;
- parked: recomputed, with the input in host memory.

Memory use peaks in a block's forward, in the head, or in a block's backward, while the activations of earlier blocks
are still held. Weights, optimizer state, residuals, workspaces of the exchanges, and gradients that wait for their
exchange are added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from syncline.predict.schedule import MIB
from syncline.records.activations import KEEP, OFFLOAD, PARK, RECOMPUTE, WAYS, Activations, Block

BUCKET_BYTES = 16 * MIB
"""Upper limit of `Layerwise` buckets: small, because several are in memory at a time, but enough to select from."""
_BUCKETS = 16
BACKLOG_BUCKETS = 4
"""Largest number of buckets that wait for their exchange."""


def bucket_bytes(gradient_bytes: int) -> int:
    """Return the size of the buckets that `Layerwise` exchanges."""
    return min(BUCKET_BYTES, max(MIB, gradient_bytes // _BUCKETS))


def layerwise_lanes(backend: str) -> int:
    """Return the number of lanes for `Layerwise`: with gloo, a second lane fills the gaps between collectives."""
    return 2 if backend == "gloo" else 1


@dataclass(frozen=True)
class States:
    """Bytes that are in use all the time, by name."""

    device: dict[str, int]
    host: dict[str, int] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(self.device.values())


@dataclass(frozen=True)
class Choice:
    """What happens to each block's activations, and the memory and time that follow."""

    batch: int
    ways: tuple[str, ...]
    residual: str
    """`device` or `host`."""
    peak_bytes: float
    states: States
    step_s: float
    """Computation of a step, including recomputation and waiting for transfers."""
    plain_s: float
    """Computation of a step if all activations were kept."""

    def counted(self) -> dict[str, int]:
        """Return the number of blocks that are kept, recomputed, offloaded and parked."""
        return {way: self.ways.count(way) for way in WAYS if way in self.ways}

    def describe(self) -> str:
        parts = [f"{count} {_DONE[way]}" for way, count in self.counted().items()]
        return ", ".join([*parts, *(["residual on the host"] if self.residual == "host" else [])]) or "none"


_DONE = {KEEP: "kept", RECOMPUTE: "recomputed", OFFLOAD: "offloaded", PARK: "parked"}


def held_bytes(block: Block, way: str, batch: float) -> float:
    """Return the bytes on the device between a block's forward and its backward."""
    if way == KEEP:
        return block.held.at(batch)
    return block.input.at(batch) if way == RECOMPUTE else 0.0


def peak_bytes(activations: Activations, ways: Sequence[str], batch: float, waiting_bytes: float = 0.0) -> float:
    """Return the peak of forward and backward alone.

    `waiting_bytes` is the most that gradients take that wait for their exchange.
    """
    before = activations.before.at(batch)
    peak, held = before, before
    blocks = list(zip(activations.blocks, ways, strict=True))
    for index, (block, way) in enumerate(blocks):
        # The previous block's activations are still being copied to the host.
        leaving = _in_transfer(*blocks[index - 1], batch) if index else 0.0
        peak = max(peak, held + leaving + block.forward_peak.at(batch))
        held += held_bytes(block, way, batch)
    peak = max(peak, held + (_in_transfer(*blocks[-1], batch) if blocks else 0.0) + activations.behind_peak.at(batch))
    for index in reversed(range(len(blocks))):
        block, way = blocks[index]
        held -= held_bytes(block, way, batch)
        coming = _in_transfer(*blocks[index - 1], batch) if index else 0.0
        input_bytes = block.input.at(batch) if way in (RECOMPUTE, PARK) else 0.0
        # An estimate of the gradients that backward has computed so far: those of the later blocks.
        gradients = activations.parameter_bytes * (len(blocks) - 1 - index) / len(blocks)
        in_use = held + coming + input_bytes + block.backward_peak.at(batch)
        peak = max(peak, min(waiting_bytes, gradients) + in_use)
    return max(peak, min(waiting_bytes, activations.parameter_bytes) + activations.before_peak.at(batch))


def _in_transfer(block: Block, way: str, batch: float) -> float:
    """Return the bytes of a block that are on the device only while they are copied to or from the host."""
    if way == OFFLOAD:
        return block.held.at(batch)
    return block.input.at(batch) if way == PARK else 0.0


def step_s(activations: Activations, ways: Sequence[str], batch: float) -> float:
    """Return the time of a step without its exchange. Transfers to the host overlap with computation."""
    compute = activations.behind_s.at(batch)
    moved = 0.0
    for block, way in zip(activations.blocks, ways, strict=True):
        compute += block.forward_s.at(batch) + block.backward_s.at(batch)
        if way in (RECOMPUTE, PARK):
            compute += block.forward_s.at(batch)
        if way in (OFFLOAD, PARK):
            moved += 2 * _in_transfer(block, way, batch)
    return max(compute, moved / activations.to_host_bps if moved else 0.0)


@dataclass(frozen=True)
class Training:
    """Memory of a training without activations. These sizes are known without a measurement."""

    parameter_bytes: int
    buffer_bytes: int
    optimizer_bytes: int
    residual_bytes: int
    workspace_bytes: int
    """Workspaces of the exchanges."""
    gradient_bytes: int = 0
    """Gradients that are in memory all the time."""
    waiting_bytes: int = 0
    """Gradients that wait for their exchange during backward."""

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
    """Choose what to do with each block's activations, so that a step of this batch fits and is fastest.

    The search starts with all activations kept. Then it gives up one block after the other: the one that frees most
    memory for the time that it costs.

    Args:
        activations: The measured memory and time of each block.
        training: The memory of everything else.
        batch: The batch size.
        budget_bytes: The memory budget.
        residual: `device` or `host`; None for whichever takes less time.
        keep_all: Whether all activations must be kept.

    Returns:
        The choice, or None if nothing fits.
    """
    choices: list[Choice] = []
    plain_s = step_s(activations, [KEEP] * len(activations.blocks), batch)
    for location in ("device",) if keep_all else _residual_locations(activations, training, residual):
        states = training.states(location)
        find = _all_kept if keep_all else _cheapest_ways
        ways = find(activations, batch, budget_bytes - states.bytes, training.waiting_bytes)
        if ways is None:
            continue
        peak = states.bytes + peak_bytes(activations, ways, batch, training.waiting_bytes)
        seconds = step_s(activations, ways, batch)
        if location == "host" and activations.to_host_bps:  # copied in both directions during the computation
            seconds = max(seconds, 2 * training.residual_bytes / activations.to_host_bps)
        choices.append(Choice(batch, tuple(ways), location, peak, states, seconds, plain_s))
    return min(choices, key=lambda choice: choice.step_s, default=None)


def _residual_locations(activations: Activations, training: Training, residual: str | None) -> tuple[str, ...]:
    if residual is not None:
        return (residual,)
    return ("device", "host") if training.residual_bytes and activations.to_host_bps else ("device",)


def _all_kept(activations: Activations, batch: int, room: float, waiting_bytes: float) -> list[str] | None:
    ways = [KEEP] * len(activations.blocks)
    return ways if peak_bytes(activations, ways, batch, waiting_bytes) <= room else None


def _cheapest_ways(activations: Activations, batch: int, room: float, waiting_bytes: float) -> list[str] | None:
    """Give up one block after the other until the step fits; or treat all blocks alike, if that is faster."""

    def fits(ways: Sequence[str]) -> bool:
        return peak_bytes(activations, ways, batch, waiting_bytes) <= room

    uniform = [ways for ways in _uniform_ways(activations) if fits(ways)]
    if not uniform:
        return None
    ways: list[str] | None = [KEEP] * len(activations.blocks)
    while ways is not None and not fits(ways):
        ways = _give_up_one_more(activations, ways, batch)
    return min([*uniform, *([] if ways is None else [ways])], key=lambda ways: step_s(activations, ways, batch))


def _uniform_ways(activations: Activations) -> list[list[str]]:
    return [[way] * len(activations.blocks) for way in (KEEP, *_alternatives(activations))]


def _give_up_one_more(activations: Activations, ways: Sequence[str], batch: int) -> list[str] | None:
    """Give up one more block: the one that frees most memory for the time that it costs."""
    best: tuple[float, float, list[str]] | None = None
    before_s = step_s(activations, ways, batch)
    for index, block in enumerate(activations.blocks):
        for way in _alternatives(activations):
            freed = held_bytes(block, ways[index], batch) - held_bytes(block, way, batch)
            if freed <= 0:
                continue
            other = [*ways[:index], way, *ways[index + 1 :]]
            rank = (freed / (max(0.0, step_s(activations, other, batch) - before_s) + 1e-9), freed)
            if best is None or rank > best[:2]:
                best = (*rank, other)
    return None if best is None else best[2]


def _alternatives(activations: Activations) -> tuple[str, ...]:
    """Return what can be done with a block's activations instead of keeping them."""
    return (RECOMPUTE, OFFLOAD, PARK) if activations.to_host_bps else (RECOMPUTE,)


def smallest_budget(
    activations: Activations, training: Training, batch: int, *, residual: str | None = None, keep_all: bool = False
) -> float:
    """Return the smallest memory budget with which a step of this batch fits."""
    lowest = math.inf
    for location in ("device",) if keep_all else _residual_locations(activations, training, residual):
        states = training.states(location)
        for ways in [[KEEP] * len(activations.blocks)] if keep_all else _uniform_ways(activations):
            lowest = min(lowest, states.bytes + peak_bytes(activations, ways, batch, training.waiting_bytes))
    return lowest


def largest_batch(activations: Activations, training: Training, budget_bytes: float, *, keep_all: bool = False) -> int:
    """Return the largest batch that fits in any way; 0 if not even one sample fits."""

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
"""Batches are considered up to this multiple of the largest measured batch, because a line cannot be extended far."""


def best_batch(
    activations: Activations,
    training: Training,
    budget_bytes: float,
    step_s: Callable[[Choice], float],
    *,
    keep_all: bool = False,
) -> Choice | None:
    """Return the choice with the least time per sample, over all batch sizes; None if not even one sample fits.

    The largest batch is not always the best: recomputation may cost more than the larger batch saves. `step_s` returns
    the time of a step with its exchange.
    """
    most = largest_batch(activations, training, budget_bytes, keep_all=keep_all)
    most = min(most, FURTHEST * max(activations.batches))
    tried = {most, *(most * part // 8 for part in range(1, 8)), *(2**power for power in range(21))}
    best: tuple[float, Choice] | None = None
    for batch in sorted(batch for batch in tried if 1 <= batch <= most):
        choice = choose(activations, training, batch, budget_bytes, keep_all=keep_all)
        if choice is not None and (best is None or step_s(choice) / batch < best[0]):
            best = step_s(choice) / batch, choice
    return None if best is None else best[1]
