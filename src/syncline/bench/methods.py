"""The methods that a bench compares, and predictions of their step times before the first one is measured.

A new method is a new line in `METHODS`. Baselines are PyTorch's own code, with the settings that suit them best; they
are not predicted. Syncline's exchanges state their own cost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from syncline.ddp.attach import attach, wrap
from syncline.ddp.handle import Handle, handle_of
from syncline.errors import UsageError
from syncline.exchange import EXCHANGES, AllgatherTopk, Dense, Exchange, OkTopk, Topology
from syncline.exchange.wire import sent_bytes
from syncline.layerwise.activations import find_blocks
from syncline.layerwise.trainer import Layerwise
from syncline.measure.backward import measure_backward
from syncline.measure.overhead import measure_overheads
from syncline.plan.make import make_plan, plan_for
from syncline.plan.search import named
from syncline.predict import Schedule, predict
from syncline.predict.schedule import ddp_caps
from syncline.records.bucket_caps import filled
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.records.profile import Profile


@dataclass
class Prepared:
    """A model that is ready to train with one method."""

    method: str
    model: nn.Module
    handle: Handle | Layerwise | None = None
    """The exchange of a Syncline method. `Layerwise` also runs the optimizer."""
    setting: str = ""
    """Setting of this variant, such as PowerSGD's rank."""
    variant: int = 0
    """Index of this variant in `METHODS`."""
    plan: Plan | None = None
    """Plan of a planned method."""

    @property
    def name(self) -> str:
        """Name of the method and its setting."""
        fixed = self.plan is not None or isinstance(self.handle, Layerwise)
        return self.method if fixed else f"{self.method} {self.setting}".strip()

    def chosen(self) -> str:
        """Return the setting, and the paths of the buckets, the most frequent first."""
        counts = self.handle.ways if isinstance(self.handle, Handle) else {}
        paths = sorted(counts, key=lambda path: -counts[path])
        return "; ".join([*([self.setting] if self.setting else []), *paths])

    def sent_bytes(self, ranks: int) -> int | None:
        """Return the payload that the busiest rank sent in the last step; None if it is not known."""
        if self.handle is not None:
            return sum(self.handle.stats().sent_bytes.values())
        return self.predicted_sent_bytes(ranks)

    def predicted_sent_bytes(self, ranks: int) -> int | None:
        if self.handle is not None:
            return sum(self.handle.predicted_sent_bytes().values())
        if self.method in ("nosync", *HOOKS):
            return None if self.method in HOOKS else 0
        elements = Counter[int]()
        for parameter in self.model.parameters():
            elements[parameter.element_size()] += parameter.numel() if parameter.requires_grad else 0
        return sum(sent_bytes("all_reduce", count, size, ranks) for size, count in elements.items())


@dataclass(frozen=True)
class Forecast:
    """The inputs of all predictions, the same on all ranks."""

    profile: Profile
    network: Network
    paced: bool
    """True for a replay, whose computation is not slowed down by communication."""
    bucket_mb: float | None

    @property
    def caps(self) -> tuple[int, ...]:
        """Sizes in bytes at which DDP closes its buckets."""
        return ddp_caps(self.bucket_mb)

    def predicted_s(self, prepared: Prepared) -> float | None:
        """Predict the seconds per step of a method; None for PyTorch's own hooks.

        The profile has the time of the exchange's own computation under the method's name.
        """
        profile, name, handle = self.profile, prepared.name, prepared.handle
        if prepared.method in HOOKS:
            return None
        if prepared.method == "nosync":
            straggler_s = 0.0 if profile.slowest is None else profile.slowest.step_s - profile.step_s
            return profile.step_s + max(straggler_s, profile.jitter_s)
        if prepared.plan is not None:
            return prepared.plan.iteration_s
        recompute_s, schedule = 0.0, Schedule.of(profile, bucket_mb=self.bucket_mb)
        if isinstance(handle, Layerwise):
            buckets = filled(profile.gradients, (handle.bucket_bytes,))
            schedule = Schedule(name, buckets, handle.exchange, name, handle.lanes)
            recompute_s = profile.forward_s if handle.ways else 0.0
        elif handle is not None:
            schedule = Schedule(name, schedule.buckets, handle.exchange, name, handle.lanes)
        return recompute_s + predict(profile, self.network, schedule, paced=self.paced).iteration_s


@dataclass(frozen=True)
class Wrapping:
    """How to build DDP: the same for all methods, unless one needs other settings."""

    device: torch.device
    bucket_mb: float | None = None
    network: Network | None = None
    """Network from which exchanges choose their paths."""
    forecast: Forecast | None = None
    """Inputs of planned methods."""

    def ddp(self, net: nn.Module, bucket_mb: float | None = None) -> DDP:
        cap = bucket_mb if bucket_mb is not None else self.bucket_mb
        ids = [self.device.index] if self.device.type == "cuda" else None
        return DDP(net, device_ids=ids, bucket_cap_mb=cap)


Preparation = Callable[[str, nn.Module, Wrapping], Prepared]

PLANNERS: dict[str, tuple[str, ...]] = {
    "wfbp": (),
    "mgwfbp": (),
    "asc": (),
    "plan": (),
    "plan-lossy": ("bf16", "sparse"),
}
"""Planned methods, and the lossy exchanges that each may use."""
HOOKS = ("fp16-hook", "powersgd")
"""PyTorch's own hooks. Their bytes and times are not predicted."""


def make_planned(method: str, forecast: Forecast) -> Plan:
    """Make the plan of a method, before anything is measured."""
    profile, network, caps = forecast.profile, forecast.network, forecast.caps
    if method in ("plan", "plan-lossy"):
        return make_plan(profile, network, PLANNERS[method], paced=forecast.paced, caps=caps)
    schedule = named(profile, network, method)
    plain = predict(profile, network, Schedule("ddp", filled(profile.gradients, caps)), paced=forecast.paced)
    chosen = predict(profile, network, schedule, paced=forecast.paced)
    return plan_for(profile, network, chosen, plain_s=plain.iteration_s, reason=f"{method}, as published")


def _planned(method: str, net: nn.Module, wrapping: Wrapping) -> Prepared:
    assert wrapping.forecast is not None  # noqa: S101 - run_bench refuses planned methods without one
    plan = make_planned(method, wrapping.forecast)
    if plan.nothing:
        return Prepared(method, wrapping.ddp(net), setting="plain DDP", plan=plan)
    ids = [wrapping.device.index] if wrapping.device.type == "cuda" else None
    ddp = wrap(net, plan, network=wrapping.network, device_ids=ids)
    names = " and ".join(dict.fromkeys(type(exchange).__name__ for exchange in plan.exchanges))
    lanes = f", {plan.lanes} lanes" if plan.lanes > 1 else ""
    buckets = f"{len(plan.buckets)} bucket{'s' if len(plan.buckets) > 1 else ''}"
    return Prepared(method, ddp, handle_of(ddp), f"{buckets} through {names}{lanes}", plan=plan)


def _nosync(method: str, net: nn.Module, wrapping: Wrapping) -> Prepared:
    return Prepared(method, net)


def _ddp(method: str, net: nn.Module, wrapping: Wrapping) -> Prepared:
    return Prepared(method, wrapping.ddp(net))


def _exchange(method: str, net: nn.Module, wrapping: Wrapping) -> Prepared:
    return _attached(EXCHANGES[method]())(method, net, wrapping)


def _attached(exchange: Exchange, setting: str = "") -> Preparation:
    def prepare(method: str, net: nn.Module, wrapping: Wrapping) -> Prepared:
        ddp = wrapping.ddp(net)
        return Prepared(method, ddp, attach(ddp, exchange, network=wrapping.network), setting)

    return prepare


def _layerwise(exchange: Exchange, *, recompute: bool) -> Preparation:
    def prepare(method: str, net: nn.Module, wrapping: Wrapping) -> Prepared:
        blocks = len(find_blocks(net)) if recompute else 0
        trainer = Layerwise(
            net,
            slow_sgd,
            exchange,
            bucket_mb=wrapping.bucket_mb,
            activations="recompute" if blocks else "keep",
            network=wrapping.network,
        )
        return Prepared(method, net, trainer, f"{blocks} blocks recomputed" if blocks else "all activations kept")

    return prepare


def _fp16_hook(method: str, net: nn.Module, wrapping: Wrapping) -> Prepared:
    ddp = wrapping.ddp(net)
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return Prepared(method, ddp)


def _powersgd(rank: int, batched: bool) -> Preparation:
    def prepare(method: str, net: nn.Module, wrapping: Wrapping) -> Prepared:
        # A single bucket, because PyTorch's hook fails on gloo with several.
        ddp = wrapping.ddp(net, bucket_mb=1000)
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=rank, start_powerSGD_iter=2, batch_tensors_with_same_shape=batched
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return Prepared(method, ddp, setting=f"rank {rank}{' batched' if batched else ''}")

    return prepare


def slow_sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return an SGD optimizer with a learning rate that hardly changes the model."""
    return torch.optim.SGD(parameters, lr=1e-4)


METHODS: dict[str, tuple[str, tuple[Preparation, ...]]] = {
    "nosync": ("computation without communication: the lower bound", (_nosync,)),
    "ddp": ("plain DistributedDataParallel", (_ddp,)),
    "dense": ("Syncline, lossless", (_exchange,)),
    "bf16": ("Syncline, bf16 on the wire, fp32 sums", (_exchange,)),
    "fp16": ("Syncline, scaled fp16 on the wire, fp32 sums", (_exchange,)),
    "hierarchical": ("Syncline, lossless, sums inside hosts first", (_exchange,)),
    "hierarchical+bf16": ("Syncline, sums inside hosts first, bf16 at the top", (_exchange,)),
    "topk-allgather": (
        "baseline: the largest 1 % of each rank, gathered by all ranks, with Syncline's fast selection",
        tuple(_attached(AllgatherTopk(values=values), values) for values in ("fp32", "bf16")),
    ),
    "oktopk": ("Syncline, the largest 1 % of the sums; the rest stays in the residual", (_exchange,)),
    "oktopk-0.1%": ("Syncline, the largest 0.1 % of the sums", (_attached(OkTopk(density=0.001)),)),
    "hierarchical+oktopk": ("Syncline, sums inside hosts first, the largest 1 % at the top", (_exchange,)),
    "wfbp": ("each gradient in its own bucket, as soon as it is ready", (_planned,)),
    "mgwfbp": ("MG-WFBP's fusion, as published", (_planned,)),
    "asc": ("ASC-WFBP's fusion on two lanes, as published", (_planned,)),
    "plan": ("Syncline's plan, lossless", (_planned,)),
    "plan-lossy": ("Syncline's plan, with bf16 and sparse exchanges allowed", (_planned,)),
    "layerwise": (
        "Syncline, layer by layer, lossless: gradients are exchanged, applied and freed during backward",
        (_layerwise(Dense(), recompute=False),),
    ),
    "layerwise+oktopk": (
        "Syncline, layer by layer, the largest 1 % of the sums, blocks recomputed",
        (_layerwise(OkTopk(), recompute=True),),
    ),
    "memory-only": (
        "dense, the optimizer runs during backward, blocks recomputed",
        (_layerwise(Dense(), recompute=True),),
    ),
    "fp16-hook": ("PyTorch's fp16 hook", (_fp16_hook,)),
    "powersgd": (
        "PyTorch's PowerSGD hook, the fastest of ranks 1, 2 and 4, equal shapes batched or not",
        tuple(_powersgd(rank, batched) for rank in (1, 2, 4) for batched in (False, True)),
    ),
}
"""By name: a description, and the variants, of which the fastest is reported."""


def profile_workload(
    net: nn.Module,
    loss_of: Callable[[nn.Module], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    name: str,
    topology: Topology | None = None,
    exchanges: Mapping[str, Callable[[], Exchange]] | None = None,
) -> Profile:
    """Profile the workload on all ranks at once, without communication.

    Args:
        exchanges: Exchanges whose computation on `topology` is measured too. Default: all.
    """
    profile = measure_backward(net, loss_of, steps=8, warmup=3, optimizer=optimizer, model_name=name)
    device = next(net.parameters()).device
    overheads = measure_overheads(device, exchanges, topology=topology or dist.get_world_size(), group=dist.group.WORLD)
    return msgspec.structs.replace(profile, overheads=overheads)


def check_methods(names: list[str]) -> None:
    """Raise `UsageError` if a method is unknown or named twice, or if none is named."""
    if not names:
        raise UsageError(f"no method is named; known: {', '.join(METHODS)}")
    unknown = [name for name in names if name not in METHODS]
    if unknown:
        raise UsageError(f"no method is called {', '.join(unknown)}; known: {', '.join(METHODS)}")
    if len(set(names)) < len(names):
        raise UsageError("a method is named twice")
