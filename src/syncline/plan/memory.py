"""Compare methods of training under a memory budget: DDP and `Layerwise`, with several exchanges. Each method is
compared at its best batch. DDP is assumed to keep all activations, and to store each gradient once: in its buckets, of
which the gradients are views. `Layerwise` frees gradients when they have been exchanged."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from syncline.errors import UsageError
from syncline.exchange import EXCHANGES, default_lanes
from syncline.plan.search import check_allowed
from syncline.predict import Schedule, memory, predict
from syncline.predict.schedule import DDP_CAPS
from syncline.records.activations import Activations
from syncline.records.bucket_caps import filled
from syncline.records.network import Network
from syncline.records.profile import Profile

_METHODS = {"layerwise, dense": "", **{f"layerwise, {name}": name for name in ("bf16", "int8", "int4", "int3")}}
_METHODS |= {"layerwise, oktopk": "sparse", "plain DDP": "", "DDP, oktopk": "sparse"}
"""The methods that are compared, and which name in `allow` they need."""
_WORD = 4
_AS_FAST = 0.99  # plain DDP is listed first unless another method is faster by more than this factor


class MemoryRow(msgspec.Struct, frozen=True, kw_only=True):
    """One method of training, at its best batch within the budget."""

    name: str
    lossless: bool
    batch: int  # 0 if not even one sample fits
    peak_bytes: float = 0.0
    states_bytes: float = 0.0
    step_s: float = 0.0  # with its exchange
    ways: tuple[tuple[str, str], ...] = ()  # names of blocks, and what happens to their activations
    residual: str = "device"
    by_layer: bool = False  # true for `Layerwise`, false for DDP
    exchange: str = ""  # as Python code; empty for plain DDP
    about: str = ""
    least_bytes: float = 0.0  # the smallest budget with which one sample fits

    @property
    def sample_s(self) -> float:
        return self.step_s / self.batch if self.batch else 0.0


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `syncline plan --memory-budget`."""

    schema: int = 1
    model: str
    budget_bytes: int
    ranks: int
    unit: str  # what `batch` counts: `sample`, or `batch` if the profile does not say how many samples a batch has
    rows: tuple[MemoryRow, ...]
    """Sorted by time per sample; methods that do not fit are last. Plain DDP comes before equally fast methods."""


def plan_memory(profile: Profile, network: Network, budget_bytes: int, allow: Sequence[str] = ()) -> MemoryPlan:
    """Compare methods of training within a memory budget per rank. `allow` adds lossy ones, all but `fp16`."""
    activations = profile.activations
    if activations is None:
        raise UsageError("the profile has no memory measurements: make one with syncline profile --memory")
    allowed = {"", *check_allowed(allow)}
    methods = [name for name, lossy in _METHODS.items() if lossy in allowed]
    rows = [_row(name, profile, network, activations, budget_bytes) for name in methods]
    rows.sort(key=lambda row: row.sample_s * (1.0 if row.exchange else _AS_FAST) if row.batch else math.inf)
    return MemoryPlan(
        model=profile.model,
        budget_bytes=budget_bytes,
        ranks=network.ranks,
        unit="batch" if profile.batch is None else "sample",
        rows=tuple(rows),
    )


def _row(name: str, profile: Profile, network: Network, activations: Activations, budget_bytes: int) -> MemoryRow:
    plain, by_layer = name == "plain DDP", name.startswith("layerwise")
    exchange_name = "dense" if plain else name.rpartition(" ")[2]
    exchange = EXCHANGES[exchange_name]()
    lanes = memory.layerwise_lanes(network.backend) if by_layer else default_lanes(exchange, network.backend)
    caps = (memory.bucket_bytes(profile.gradient_bytes),) if by_layer else DDP_CAPS
    schedule = Schedule(name, filled(profile.gradients, caps), exchange, exchange_name, lanes)
    gradients = activations.elements * _WORD
    bucket = min(memory.bucket_bytes(gradients), gradients)
    waiting = min(gradients, memory.BACKLOG_BUCKETS * bucket + activations.largest_bytes)
    training = memory.Training(
        parameter_bytes=activations.parameter_bytes,
        buffer_bytes=activations.buffer_bytes,
        optimizer_bytes=int(activations.optimizer_bytes * activations.elements),
        residual_bytes=gradients if exchange.keeps else 0,
        # A copy of the bucket; with a residual, also two copies of it and the sums of received entries.
        workspace_bytes=lanes * bucket * (4 if exchange.keeps else 1) if by_layer else 0,
        gradient_bytes=0 if by_layer else gradients,
        waiting_bytes=waiting if by_layer else 0,
        keep_all=not by_layer,
    )

    def step_s(choice: memory.Choice) -> float:
        computed_s = profile.forward_s + profile.backward_s
        factor = choice.step_s / computed_s if computed_s else 1.0
        scaled = msgspec.structs.replace(profile.scaled(time=factor), update_s=profile.update_s)
        return predict(scaled, network, schedule).iteration_s

    choice = memory.best_batch(activations, training, budget_bytes, step_s)
    least_bytes = memory.smallest_budget(activations, training, 1)
    if choice is None:
        return MemoryRow(name=name, lossless=exchange.lossless, batch=0, least_bytes=least_bytes)
    return MemoryRow(
        name=name,
        lossless=exchange.lossless,
        batch=choice.batch,
        peak_bytes=choice.peak_bytes,
        states_bytes=choice.states_bytes,
        step_s=step_s(choice),
        ways=tuple((block.name, way) for block, way in zip(activations.blocks, choice.ways, strict=True)),
        residual=choice.residual,
        by_layer=by_layer,
        exchange="" if plain else repr(exchange),
        about=choice.describe(),
        least_bytes=least_bytes,
    )
