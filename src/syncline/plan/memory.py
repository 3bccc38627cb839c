"""Compare methods of training under a memory budget: DDP and `Layerwise`, with several exchanges.

Each method is compared at its best batch. DDP is assumed to keep all activations, and to store each gradient once: in
its buckets, of which the gradients are views. `Layerwise` frees gradients when they have been exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from syncline.errors import UsageError
from syncline.exchange import EXCHANGES, default_lanes
from syncline.plan.search import check_allowed
from syncline.predict import Schedule, predict
from syncline.predict.memory import (
    BACKLOG_BUCKETS,
    Choice,
    Training,
    best_batch,
    bucket_bytes,
    layerwise_lanes,
    smallest_budget,
)
from syncline.predict.schedule import DDP_CAPS
from syncline.records.activations import Activations
from syncline.records.bucket_caps import filled
from syncline.records.network import Network
from syncline.records.profile import Profile

_WORD = 4
_AS_FAST = 0.99  # plain DDP is listed first unless another method is faster by more than this factor


class MemoryRow(msgspec.Struct, frozen=True, kw_only=True):
    """One method of training, at its best batch within the budget."""

    name: str
    lossless: bool
    batch: int
    """0 if not even one sample fits."""
    peak_bytes: float = 0.0
    states_bytes: float = 0.0
    step_s: float = 0.0
    """Time of a step with its exchange."""
    ways: tuple[tuple[str, str], ...] = ()
    """Names of blocks, and what happens to their activations."""
    residual: str = "device"
    by_layer: bool = False
    """True for `Layerwise`, false for DDP."""
    exchange: str = ""
    """The exchange as Python code; empty for plain DDP."""
    about: str = ""
    least_bytes: float = 0.0
    """The smallest budget with which one sample fits."""

    @property
    def sample_s(self) -> float:
        return self.step_s / self.batch if self.batch else 0.0


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `syncline plan --memory-budget`."""

    schema: int = 1
    model: str
    budget_bytes: int
    ranks: int
    unit: str
    """What `batch` counts: `sample`, or `batch` if the profile does not say how many samples a batch has."""
    rows: tuple[MemoryRow, ...]
    """Sorted by time per sample; methods that do not fit are last. Plain DDP comes before equally fast methods."""


def plan_memory(profile: Profile, network: Network, budget_bytes: int, allow: Sequence[str] = ()) -> MemoryPlan:
    """Compare methods of training within a memory budget per rank.

    Args:
        profile: The model, with activations.
        network: The cluster.
        budget_bytes: The memory budget of each rank.
        allow: Lossy exchanges to include: `bf16`, `sparse`.

    Raises:
        UsageError: The profile has no activations, or `allow` has an unknown name.
    """
    activations = profile.activations
    if activations is None:
        raise UsageError("the profile has no memory measurements: make one with syncline profile --memory")
    check_allowed(allow)
    methods = ["dense", *(["bf16"] if "bf16" in allow else []), *(["oktopk"] if "sparse" in allow else [])]
    named = [(f"layerwise, {name}", name) for name in methods]
    named += [("plain DDP", "ddp"), *([("DDP, oktopk", "oktopk")] if "sparse" in allow else [])]
    rows = [_row(name, profile, network, activations, method, budget_bytes) for name, method in named]
    rows.sort(key=lambda row: row.sample_s * (1.0 if row.exchange else _AS_FAST) if row.batch else math.inf)
    return MemoryPlan(
        model=profile.model,
        budget_bytes=budget_bytes,
        ranks=network.ranks,
        unit="batch" if profile.batch is None else "sample",
        rows=tuple(rows),
    )


def _row(
    name: str, profile: Profile, network: Network, activations: Activations, method: str, budget_bytes: int
) -> MemoryRow:
    by_layer = name.startswith("layerwise")
    exchange_name = "dense" if method == "ddp" else method
    exchange = EXCHANGES[exchange_name]()
    lanes = layerwise_lanes(network.backend) if by_layer else default_lanes(exchange, network.backend)
    caps = (bucket_bytes(profile.gradient_bytes),) if by_layer else DDP_CAPS
    schedule = Schedule(name, filled(profile.gradients, caps), exchange, exchange_name, lanes)
    training = _training(activations, keeps=exchange.keeps, lanes=lanes, by_layer=by_layer)

    def step_s(choice: Choice) -> float:
        computed_s = profile.forward_s + profile.backward_s
        factor = choice.step_s / computed_s if computed_s else 1.0
        scaled = msgspec.structs.replace(profile.scaled(time=factor), update_s=profile.update_s)
        return predict(scaled, network, schedule).iteration_s

    choice = best_batch(activations, training, budget_bytes, step_s, keep_all=not by_layer)
    row = MemoryRow(
        name=name,
        lossless=exchange.lossless,
        batch=0,
        least_bytes=smallest_budget(activations, training, 1, keep_all=not by_layer),
    )
    if choice is None:
        return row
    return msgspec.structs.replace(
        row,
        batch=choice.batch,
        peak_bytes=choice.peak_bytes,
        states_bytes=choice.states_bytes,
        step_s=step_s(choice),
        ways=tuple((block.name, way) for block, way in zip(activations.blocks, choice.ways, strict=True)),
        residual=choice.residual,
        by_layer=by_layer,
        exchange="" if method == "ddp" else repr(exchange),
        about=choice.describe(),
    )


def _training(activations: Activations, *, keeps: bool, lanes: int, by_layer: bool) -> Training:
    gradients = activations.elements * _WORD
    residual = gradients if keeps else 0
    bucket = min(bucket_bytes(gradients), gradients)
    return Training(
        parameter_bytes=activations.parameter_bytes,
        buffer_bytes=activations.buffer_bytes,
        optimizer_bytes=int(activations.optimizer_bytes * activations.elements),
        residual_bytes=residual,
        # A copy of the bucket; with a residual, also two copies of it and the sums of received entries.
        workspace_bytes=lanes * bucket * (4 if keeps else 1) if by_layer else 0,
        gradient_bytes=0 if by_layer else gradients,
        waiting_bytes=min(gradients, BACKLOG_BUCKETS * bucket + activations.largest_bytes) if by_layer else 0,
    )
