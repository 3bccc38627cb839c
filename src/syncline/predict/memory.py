"""Predict the peak memory of a training step, and choose which activations to keep, recompute or move to the host.

A step is a forward and a backward over a sequence of blocks. The activations of a block are kept on the device,
recomputed from the block's input, offloaded to host memory and fetched one block ahead of backward, or parked:
recomputed, with the input in host memory.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
class Choice:
    """What happens to each block's activations, and the memory and time that follow."""

    batch: int
    ways: tuple[str, ...]
    residual: str
    """`device` or `host`."""
    peak_bytes: float
    states_bytes: int
    """Bytes that are on the device all the time, such as weights and optimizer state."""
    step_s: float
    """Computation of a step, including recomputation and waiting for transfers."""

    def describe(self) -> str:
        done = {KEEP: "kept", RECOMPUTE: "recomputed", OFFLOAD: "offloaded", PARK: "parked"}
        parts = [f"{self.ways.count(way)} {done[way]}" for way in WAYS if way in self.ways]
        return ", ".join([*parts, *(["residual on the host"] if self.residual == "host" else [])]) or "none"


def held_bytes(block: Block, way: str, batch: float) -> float:
    """Return the bytes on the device between a block's forward and its backward."""
    if way == KEEP:
        return block.held.at(batch)
    return block.input.at(batch) if way == RECOMPUTE else 0.0


def _in_transfer(block: Block, way: str, batch: float) -> float:
    """Return the bytes of a block that are on the device only while they are copied to or from the host."""
    if way == OFFLOAD:
        return block.held.at(batch)
    return block.input.at(batch) if way == PARK else 0.0


def peak_bytes(activations: Activations, ways: Sequence[str], batch: float, waiting_bytes: float = 0.0) -> float:
    """Return the peak of forward and backward alone: in a block's forward, in the head, or in a block's backward.

    `waiting_bytes` is the largest size of the gradients that wait for their exchange.
    """
    before = activations.before.at(batch)
    peak, held = before, before
    blocks = list(zip(activations.blocks, ways, strict=True))
    leaving = 0.0  # the previous block's activations, which are still being copied to the host
    for block, way in blocks:
        peak = max(peak, held + leaving + block.forward_peak.at(batch))
        held += held_bytes(block, way, batch)
        leaving = _in_transfer(block, way, batch)
    peak = max(peak, held + leaving + activations.behind_peak.at(batch))
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


def step_s(activations: Activations, ways: Sequence[str], batch: float) -> float:
    """Return the time of a step without its exchange. Transfers to the host overlap with computation."""
    compute = activations.behind_s.at(batch)
    moved = 0.0
    for block, way in zip(activations.blocks, ways, strict=True):
        compute += block.forward_s.at(batch) + block.backward_s.at(batch)
        if way in (RECOMPUTE, PARK):
            compute += block.forward_s.at(batch)
        moved += 2 * _in_transfer(block, way, batch)
    return max(compute, moved / activations.to_host_bps if moved else 0.0)


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

    def states_bytes(self, residual: str) -> int:
        """Return the bytes that are on the device all the time, with the residual on `device` or `host`."""
        states = self.parameter_bytes + self.buffer_bytes + self.optimizer_bytes
        kept = self.residual_bytes if residual == "device" else 0
        return states + kept + self.workspace_bytes + self.gradient_bytes


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
    for location in _residual_locations(activations, training, residual, keep_all):
        states_bytes = training.states_bytes(location)
        ways = _fastest_ways(activations, batch, budget_bytes - states_bytes, training.waiting_bytes, keep_all)
        if ways is None:
            continue
        peak = states_bytes + peak_bytes(activations, ways, batch, training.waiting_bytes)
        seconds = step_s(activations, ways, batch)
        if location == "host" and activations.to_host_bps:  # copied in both directions during the computation
            seconds = max(seconds, 2 * training.residual_bytes / activations.to_host_bps)
        choices.append(Choice(batch, tuple(ways), location, peak, states_bytes, seconds))
    return min(choices, key=lambda choice: choice.step_s, default=None)


def _residual_locations(
    activations: Activations, training: Training, residual: str | None, keep_all: bool
) -> tuple[str, ...]:
    if residual is not None and not keep_all:
        return (residual,)
    return ("device", "host") if training.residual_bytes and activations.to_host_bps and not keep_all else ("device",)


def _uniform_ways(activations: Activations, keep_all: bool) -> list[list[str]]:
    alternatives = () if keep_all else _alternatives(activations)
    return [[way] * len(activations.blocks) for way in (KEEP, *alternatives)]


def _fastest_ways(
    activations: Activations, batch: int, room: float, waiting_bytes: float, keep_all: bool
) -> list[str] | None:
    """Give up one block after the other until the step fits; or treat all blocks alike, if that is faster."""

    def fits(ways: Sequence[str]) -> bool:
        return peak_bytes(activations, ways, batch, waiting_bytes) <= room

    options = [ways for ways in _uniform_ways(activations, keep_all) if fits(ways)]
    ways: list[str] | None = [KEEP] * len(activations.blocks) if options else None
    while ways is not None and not fits(ways):
        ways = _give_up_one_more(activations, ways, batch)
    if ways is not None:
        options.append(ways)
    return min(options, key=lambda ways: step_s(activations, ways, batch), default=None)


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
    return min(
        training.states_bytes(location) + peak_bytes(activations, ways, batch, training.waiting_bytes)
        for location in _residual_locations(activations, training, residual, keep_all)
        for ways in _uniform_ways(activations, keep_all)
    )


def largest_batch(activations: Activations, training: Training, budget_bytes: float, *, keep_all: bool = False) -> int:
    """Return the largest batch that fits in any way; 0 if not even one sample fits."""

    def fits(batch: int) -> bool:
        return smallest_budget(activations, training, batch, keep_all=keep_all) <= budget_bytes

    high = 1
    while fits(high) and high < 2**20:
        high *= 2
    return bisect.bisect_left(range(1, high), True, key=lambda batch: not fits(batch))


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
    batches = {most, *(most * part // 8 for part in range(1, 8)), *(2**power for power in range(21))}
    choices = [
        choose(activations, training, batch, budget_bytes, keep_all=keep_all)
        for batch in sorted(batches)
        if 1 <= batch <= most
    ]
    fitting = [choice for choice in choices if choice is not None]
    return min(fitting, key=lambda choice: step_s(choice) / choice.batch, default=None)
