"""What to train with under a memory budget: the batch, what is kept of it, and what a sample then takes.

Methods are compared at the batch that suits each best. Plain DDP keeps everything, and its gradients twice over: in its
buckets, and nowhere else if they are views of those, which is what is assumed. Layer by layer, gradients are freed as
they are exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from syncline.errors import UsageError
from syncline.exchange import EXCHANGES, default_lanes
from syncline.plan.search import ALLOWED
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
_AS_FAST = 0.99
"""Less is no difference."""


class MemoryRow(msgspec.Struct, frozen=True, kw_only=True):
    """One way to train, at its best batch within the budget."""

    name: str
    lossless: bool
    batch: int
    """0: not even one sample fits."""
    peak_bytes: float = 0.0
    states_bytes: float = 0.0
    step_s: float = 0.0
    """With the exchange."""
    ways: tuple[tuple[str, str], ...] = ()
    """By block."""
    residual: str = "device"
    by_layer: bool = False
    """With `Layerwise`; with DDP if not."""
    exchange: str = ""
    """Nothing for DDP as it is."""
    about: str = ""
    least_bytes: float = 0.0
    """The smallest budget with which one sample would fit."""

    @property
    def sample_s(self) -> float:
        return self.step_s / self.batch if self.batch else 0.0


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What `syncline plan --memory-budget` answers."""

    schema: int = 1
    model: str
    budget_bytes: int
    ranks: int
    unit: str
    """What is counted: a sample, or a batch of which the profile does not say how many it has."""
    rows: tuple[MemoryRow, ...]
    """The least time per sample first; what does not fit last. DDP as it is before what is as fast."""


def plan_memory(profile: Profile, network: Network, budget_bytes: int, allow: Sequence[str] = ()) -> MemoryPlan:
    if profile.activations is None:
        raise UsageError("the profile says nothing of memory: make one with syncline profile --memory")
    unknown = [name for name in allow if name not in ALLOWED]
    if unknown:
        raise UsageError(f"allow {unknown[0]!r} is unknown: it is one of {', '.join(ALLOWED)}")
    found = profile.activations
    methods = ["dense", *(["bf16"] if "bf16" in allow else []), *(["oktopk"] if "sparse" in allow else [])]
    rows = [_row(f"layerwise, {name}", profile, network, found, name, budget_bytes) for name in methods]
    rows.append(_row("plain DDP", profile, network, found, "ddp", budget_bytes))
    if "sparse" in allow:
        rows.append(_row("DDP, oktopk", profile, network, found, "oktopk", budget_bytes))
    rows.sort(key=lambda row: row.sample_s * (1.0 if row.exchange else _AS_FAST) if row.batch else math.inf)
    return MemoryPlan(
        model=profile.model,
        budget_bytes=budget_bytes,
        ranks=network.ranks,
        unit="batch" if profile.batch is None else "sample",
        rows=tuple(rows),
    )


def _row(
    name: str, profile: Profile, network: Network, found: Activations, method: str, budget_bytes: int
) -> MemoryRow:
    by_layer = name.startswith("layerwise")
    exchange = EXCHANGES["dense" if method == "ddp" else method]()
    lanes = layerwise_lanes(network.backend) if by_layer else default_lanes(exchange, network.backend)
    caps = (bucket_bytes(profile.gradient_bytes),) if by_layer else DDP_CAPS
    schedule = Schedule(name, filled(profile.gradients, caps), exchange, "dense" if method == "ddp" else method, lanes)
    training = _training(found, keeps=exchange.keeps, lanes=lanes, by_layer=by_layer)
    considered = found if by_layer else msgspec.structs.replace(found, to_host_bps=0.0)
    choice = best_batch(
        considered,
        training,
        budget_bytes,
        step_s=lambda choice: _iteration_s(profile, network, schedule, choice),
        keep_all=not by_layer,
    )
    least = smallest_budget(considered, training, 1, keep_all=not by_layer)
    if choice is None:
        return MemoryRow(name=name, lossless=exchange.lossless, batch=0, least_bytes=least)
    return MemoryRow(
        name=name,
        lossless=exchange.lossless,
        batch=choice.batch,
        peak_bytes=choice.peak_bytes,
        states_bytes=choice.states.bytes,
        step_s=_iteration_s(profile, network, schedule, choice),
        ways=tuple((block.name, way) for block, way in zip(found.blocks, choice.ways, strict=True)),
        residual=choice.residual,
        by_layer=by_layer,
        exchange="" if method == "ddp" else repr(exchange),
        about=choice.describe(),
        least_bytes=least,
    )


def _iteration_s(profile: Profile, network: Network, schedule: Schedule, choice: Choice) -> float:
    computed_s = profile.forward_s + profile.backward_s
    factor = choice.step_s / computed_s if computed_s else 1.0
    scaled = msgspec.structs.replace(profile.scaled(time=factor), update_s=profile.update_s)
    return predict(scaled, network, schedule).iteration_s


def _training(found: Activations, *, keeps: bool, lanes: int, by_layer: bool) -> Training:
    gradients = found.elements * _WORD
    residual = gradients if keeps else 0
    bucket = min(bucket_bytes(gradients), gradients)
    return Training(
        parameter_bytes=found.parameter_bytes,
        buffer_bytes=found.buffer_bytes,
        optimizer_bytes=int(found.optimizer_bytes * found.elements),
        residual_bytes=residual,
        # A bucket's own copy, both of its residual, and sums of the entries that arrive.
        workspace_bytes=lanes * bucket * (4 if keeps else 1) if by_layer else 0,
        gradient_bytes=0 if by_layer else gradients,
        waiting_bytes=min(gradients, BACKLOG_BUCKETS * bucket + found.largest_bytes) if by_layer else 0,
    )
