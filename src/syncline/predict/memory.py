"""Predict the peak memory of a training step, and choose which activations to keep, recompute or move to the host. A
step goes forward and backward over a sequence of blocks. A block's activations are kept on the device, recomputed from
its input, offloaded to the host and fetched one block ahead, or parked: recomputed, with the input on the host."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from syncline.predict.schedule import MIB
from syncline.records.activations import KEEP, OFFLOAD, PARK, RECOMPUTE, WAYS, Activations, Block

_BUCKETS = 16
_BUCKET_BYTES = 16 * MIB  # upper limit: small, because several are in memory at a time, but enough to select from
BACKLOG_BUCKETS = 4  # largest number of buckets that wait for their exchange
FURTHEST = 16  # batches are considered up to this multiple of the largest measured one: lines cannot be extended far


def bucket_bytes(gradient_bytes: int) -> int:
    """Return the size of the buckets that `Layerwise` exchanges."""
    return min(_BUCKET_BYTES, max(MIB, gradient_bytes // _BUCKETS))


def layerwise_lanes(backend: str) -> int:
    """Return the number of lanes for `Layerwise`: with gloo, a second lane fills the gaps between collectives."""
    return 2 if backend == "gloo" else 1


@dataclass(frozen=True)
class Choice:
    """The treatment of each block's activations, and the memory and time that follow."""

    batch: int
    ways: tuple[str, ...]
    residual: str  # `device` or `host`
    peak_bytes: float
    states_bytes: int  # on the device all the time, such as weights and optimizer state
    step_s: float  # computation, including recomputation and waiting for transfers

    def describe(self) -> str:
        done = {KEEP: "kept", RECOMPUTE: "recomputed", OFFLOAD: "offloaded", PARK: "parked"}
        parts = [f"{self.ways.count(way)} {done[way]}" for way in WAYS if way in self.ways]
        return ", ".join(parts + ["residual on the host"] * (self.residual == "host")) or "none"


@dataclass(frozen=True)
class Training:
    """Memory of a training without activations. These sizes are known without a measurement."""

    parameter_bytes: int
    buffer_bytes: int
    optimizer_bytes: int
    residual_bytes: int
    workspace_bytes: int  # of the exchanges
    gradient_bytes: int = 0  # gradients that are in memory all the time
    waiting_bytes: int = 0  # gradients that wait for their exchange during backward
    keep_all: bool = False  # all activations must be kept

    def states_bytes(self, residual: str) -> int:
        """Return the bytes that are on the device all the time, with the residual on `device` or `host`."""
        states = self.parameter_bytes + self.buffer_bytes + self.optimizer_bytes
        kept = self.residual_bytes if residual == "device" else 0
        return states + kept + self.workspace_bytes + self.gradient_bytes


def _block_bytes(block: Block, way: str, batch: float) -> tuple[float, float]:
    """Return the bytes that a block has on the device between its forward and its backward, and those that are there
    only while they are copied to or from the host."""
    nbytes = (block.held if way in (KEEP, OFFLOAD) else block.input).at(batch)
    return (nbytes, 0.0) if way in (KEEP, RECOMPUTE) else (0.0, nbytes)


def peak_bytes(activations: Activations, ways: Sequence[str], batch: float, waiting_bytes: float = 0.0) -> float:
    """Return the peak of forward and backward alone: in a block's forward, in the head, or in a block's backward.
    `waiting_bytes` is the largest size of the gradients that wait for their exchange."""
    blocks = activations.blocks
    sizes = [_block_bytes(block, way, batch) for block, way in zip(blocks, ways, strict=True)]
    peak = held = activations.before.at(batch)
    leaving = 0.0  # the previous block's activations, which are still being copied to the host
    for block, (kept, moved) in zip(blocks, sizes, strict=True):
        peak = max(peak, held + leaving + block.forward_peak.at(batch))
        held, leaving = held + kept, moved
    peak = max(peak, held + leaving + activations.behind_peak.at(batch))
    for index in reversed(range(len(blocks))):
        held -= sizes[index][0]
        coming = sizes[index - 1][1] if index else 0.0
        input_bytes = blocks[index].input.at(batch) if ways[index] in (RECOMPUTE, PARK) else 0.0
        # An estimate of the gradients that backward has computed so far: those of the later blocks.
        gradients = activations.parameter_bytes * (len(blocks) - 1 - index) / len(blocks)
        in_use = held + coming + input_bytes + blocks[index].backward_peak.at(batch)
        peak = max(peak, min(waiting_bytes, gradients) + in_use)
    return max(peak, min(waiting_bytes, activations.parameter_bytes) + activations.before_peak.at(batch))


def step_s(activations: Activations, ways: Sequence[str], batch: float) -> float:
    """Return the time of a step without its exchange. Transfers to the host overlap with computation."""
    compute = activations.behind_s.at(batch)
    moved = 0.0
    for block, way in zip(activations.blocks, ways, strict=True):
        compute += block.forward_s.at(batch) + block.backward_s.at(batch)
        if way in (RECOMPUTE, PARK):
            compute += block.forward_s.at(batch)
        moved += 2 * _block_bytes(block, way, batch)[1]
    return max(compute, moved / activations.to_host_bps if moved else 0.0)


def choose(
    activations: Activations, training: Training, batch: int, budget_bytes: float, *, residual: str | None = None
) -> Choice | None:
    """Choose what to do with each block's activations, so that a step of this batch fits and is fastest. `residual` is
    `device` or `host`, or None for whichever takes less time. The result is None if nothing fits."""
    choices: list[Choice] = []
    for location in _residual_locations(activations, training, residual):
        states_bytes = training.states_bytes(location)
        ways = _fastest_ways(activations, training, batch, budget_bytes - states_bytes)
        if ways is None:
            continue
        peak = states_bytes + peak_bytes(activations, ways, batch, training.waiting_bytes)
        seconds = step_s(activations, ways, batch)
        if location == "host" and activations.to_host_bps:  # copied in both directions during the computation
            seconds = max(seconds, 2 * training.residual_bytes / activations.to_host_bps)
        choices.append(Choice(batch, tuple(ways), location, peak, states_bytes, seconds))
    return min(choices, key=lambda choice: choice.step_s, default=None)


def _residual_locations(activations: Activations, training: Training, residual: str | None) -> tuple[str, ...]:
    if residual is not None and not training.keep_all:
        return (residual,)
    movable = training.residual_bytes and activations.to_host_bps and not training.keep_all
    return ("device", "host") if movable else ("device",)


def _possible_ways(activations: Activations, training: Training) -> tuple[str, ...]:
    if training.keep_all:
        return (KEEP,)
    return WAYS if activations.to_host_bps else (KEEP, RECOMPUTE)


def _fastest_ways(activations: Activations, training: Training, batch: int, room: float) -> list[str] | None:
    """Give up one block after the other until the step fits, beginning with all kept; or treat all blocks alike, if
    that is faster."""

    def fits(ways: Sequence[str]) -> bool:
        return peak_bytes(activations, ways, batch, training.waiting_bytes) <= room

    count = len(activations.blocks)
    options = [[way] * count for way in _possible_ways(activations, training) if fits([way] * count)]
    ways: list[str] | None = [KEEP] * count if options else None
    while ways is not None and not fits(ways):
        ways = _give_up_one(activations, training, ways, batch)
    if ways is not None:
        options.append(ways)
    return min(options, key=lambda ways: step_s(activations, ways, batch), default=None)


def _give_up_one(activations: Activations, training: Training, ways: Sequence[str], batch: int) -> list[str] | None:
    """Give up one more block: the one that frees most memory for the time that it costs."""
    before_s = step_s(activations, ways, batch)
    options = []
    for index, block in enumerate(activations.blocks):
        for way in _possible_ways(activations, training):
            freed = _block_bytes(block, ways[index], batch)[0] - _block_bytes(block, way, batch)[0]
            if freed > 0:
                other = [*ways[:index], way, *ways[index + 1 :]]
                slower_s = max(0.0, step_s(activations, other, batch) - before_s)
                options.append((freed / (slower_s + 1e-9), freed, other))
    return max(options, key=lambda option: option[:2])[2] if options else None


def smallest_budget(activations: Activations, training: Training, batch: int, *, residual: str | None = None) -> float:
    """Return the smallest memory budget with which a step of this batch fits."""
    count = len(activations.blocks)
    return min(
        training.states_bytes(location) + peak_bytes(activations, [way] * count, batch, training.waiting_bytes)
        for location in _residual_locations(activations, training, residual)
        for way in _possible_ways(activations, training)
    )


def largest_batch(activations: Activations, training: Training, budget_bytes: float) -> int:
    """Return the largest batch that fits in any way; 0 if not even one sample fits."""

    def fits(batch: int) -> bool:
        return smallest_budget(activations, training, batch) <= budget_bytes

    high = 1
    while fits(high) and high < 2**20:
        high *= 2
    return bisect.bisect_left(range(1, high), True, key=lambda batch: not fits(batch))


def best_batch(
    activations: Activations, training: Training, budget_bytes: float, step_s: Callable[[Choice], float]
) -> Choice | None:
    """Return the choice with the least time per sample, over all batch sizes; None if not even one sample fits. The
    largest batch is not always the best: recomputation may cost more than the larger batch saves. `step_s` returns the
    time of a step with its exchange."""
    most = min(largest_batch(activations, training, budget_bytes), FURTHEST * max(activations.batches))
    batches = {most, *(most * part // 8 for part in range(1, 8)), *(2**power for power in range(21))}
    choices = (choose(activations, training, batch, budget_bytes) for batch in sorted(batches) if 1 <= batch <= most)
    fitting = [choice for choice in choices if choice is not None]
    return min(fitting, key=lambda choice: step_s(choice) / choice.batch, default=None)
