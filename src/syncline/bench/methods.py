"""The methods that a bench compares.

A new method is a new line in `METHODS`. Baselines are PyTorch's own code, with the settings that suit them best.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from syncline.bench.baselines import TopK, with_topk
from syncline.ddp.attach import attach, wrap
from syncline.ddp.handle import Handle, handle_of
from syncline.errors import UsageError
from syncline.exchange import EXCHANGES, AllgatherTopk, Cost, Dense, Exchange, OkTopk, Phase, Topology
from syncline.exchange.wire import sent_bytes
from syncline.layerwise.activations import find_blocks
from syncline.layerwise.trainer import Layerwise
from syncline.plan.make import make_plan, plan_for
from syncline.plan.search import named
from syncline.predict import Schedule, predict
from syncline.predict.schedule import Costed
from syncline.records.bucket_caps import filled
from syncline.records.network import Network
from syncline.records.plan import Plan

if TYPE_CHECKING:
    from syncline.bench.forecast import Forecast


@dataclass
class Prepared:
    """A model that is ready to train with one method."""

    method: str
    model: nn.Module
    handle: Handle | None = None
    setting: str = ""
    """Setting of this variant, such as PowerSGD's rank."""
    cost: Costed | None = None
    """Cost of a baseline's hook. Syncline's exchanges have their own."""
    one_bucket: bool = False
    variant: int = 0
    """Index of this variant in `METHODS`."""
    plan: Plan | None = None
    """Plan of a planned method."""
    trainer: Layerwise | None = None
    """Trainer of a method without DDP. It runs the optimizer itself."""

    @property
    def exchanging(self) -> Handle | Layerwise | None:
        return self.handle if self.handle is not None else self.trainer

    @property
    def name(self) -> str:
        """Name of the method and its setting."""
        fixed = self.plan is not None or self.trainer is not None
        return self.method if fixed else f"{self.method} {self.setting}".strip()

    def chosen(self) -> str:
        """Return the setting, and the paths of the buckets, the most frequent first."""
        counts = {} if self.handle is None else self.handle.ways
        paths = sorted(counts, key=lambda path: -counts[path])
        return "; ".join([*([self.setting] if self.setting else []), *paths])

    def sent_bytes(self) -> int | None:
        """Return the payload that the busiest rank sent in the last step; None if it was not counted."""
        if self.exchanging is not None:
            return sum(self.exchanging.stats().sent_bytes.values())
        if self.method == "ddp" or (self.plan is not None and self.plan.nothing):
            return _ddp_sent_bytes(self.model)
        return 0 if self.method == "nosync" else None

    def predicted_sent_bytes(self, ranks: int) -> int | None:
        if self.exchanging is not None:
            return sum(self.exchanging.predicted_sent_bytes().values())
        if self.method == "ddp" or (self.plan is not None and self.plan.nothing):
            parameters = [p for p in self.model.parameters() if p.requires_grad]
            sizes = {p.element_size() for p in parameters}
            return sum(
                sent_bytes("all_reduce", sum(p.numel() for p in parameters if p.element_size() == size), size, ranks)
                for size in sizes
            )
        return 0 if self.method == "nosync" else None


@dataclass(frozen=True)
class Wrapping:
    """How to build DDP: the same for all methods, unless one needs other settings."""

    device: torch.device
    bucket_mb: float | None = None
    group: dist.ProcessGroup | None = None
    """Default: all ranks."""
    network: Network | None = None
    """Network from which exchanges choose their paths."""
    forecast: Forecast | None = None
    """Inputs of planned methods."""

    def ddp(self, net: nn.Module, bucket_mb: float | None = None, **options: Any) -> DDP:
        cap = bucket_mb if bucket_mb is not None else self.bucket_mb
        ids = [self.device.index] if self.device.type == "cuda" else None
        return DDP(net, device_ids=ids, process_group=self.group, bucket_cap_mb=cap, **options)


Preparation = Callable[[nn.Module, Wrapping], Prepared]

PLANNERS: dict[str, tuple[str, ...]] = {
    "wfbp": (),
    "mgwfbp": (),
    "asc": (),
    "plan": (),
    "plan-lossy": ("bf16", "sparse"),
}
"""Planned methods, and the lossy exchanges that each may use."""


def make_planned(method: str, forecast: Forecast) -> Plan:
    """Make the plan of a method, before anything is measured."""
    profile, network, caps = forecast.profile, forecast.network, forecast.caps
    if method in ("plan", "plan-lossy"):
        return make_plan(profile, network, PLANNERS[method], paced=forecast.paced, caps=caps)
    schedule = named(profile, network, method)
    plain = predict(profile, network, Schedule("ddp", filled(profile.gradients, caps)), paced=forecast.paced)
    chosen = predict(profile, network, schedule, paced=forecast.paced)
    return plan_for(profile, network, chosen, plain_s=plain.iteration_s, reason=f"{method}, as published")


def _planned(method: str) -> Preparation:
    def prepare(net: nn.Module, wrapping: Wrapping) -> Prepared:
        assert wrapping.forecast is not None  # noqa: S101 - run_bench refuses planned methods without one
        plan = make_planned(method, wrapping.forecast)
        if plan.nothing:
            return Prepared(method, wrapping.ddp(net), setting="plain DDP", plan=plan)
        ids = [wrapping.device.index] if wrapping.device.type == "cuda" else None
        ddp = wrap(net, plan, network=wrapping.network, device_ids=ids, process_group=wrapping.group)
        names = " and ".join(dict.fromkeys(type(exchange).__name__ for exchange in plan.exchanges))
        lanes = f", {plan.lanes} lanes" if plan.lanes > 1 else ""
        buckets = f"{len(plan.buckets)} bucket{'s' if len(plan.buckets) > 1 else ''}"
        return Prepared(method, ddp, handle_of(ddp), f"{buckets} through {names}{lanes}", plan=plan)

    return prepare


def _nosync(net: nn.Module, wrapping: Wrapping) -> Prepared:
    return Prepared("nosync", net)


def _ddp(net: nn.Module, wrapping: Wrapping) -> Prepared:
    return Prepared("ddp", wrapping.ddp(net))


def _fp16_hook(net: nn.Module, wrapping: Wrapping) -> Prepared:
    ddp = wrapping.ddp(net)
    ddp.register_comm_hook(wrapping.group, default_hooks.fp16_compress_hook)
    return Prepared("fp16-hook", ddp, cost=_HalfRing())


@dataclass(frozen=True)
class _HalfRing:
    """Cost of PyTorch's fp16 hook: one all-reduce of half the bytes."""

    lossless: bool = False
    waits: bool = False

    def cost(self, numel: int, dtype: torch.dtype, topology: Topology) -> Cost:
        return Cost((Phase.of("all_reduce", numel, 2, topology),))


@dataclass(frozen=True)
class _PowerSGD:
    """Cost of PyTorch's PowerSGD hook: an all-reduce each of uncompressed tensors, left factors and right factors."""

    rank: int
    shapes: tuple[tuple[int, ...], ...]
    lossless: bool = False
    waits: bool = True

    def cost(self, numel: int, dtype: torch.dtype, topology: Topology) -> Cost:
        uncompressed, left, right = 0, 0, 0
        for shape in self.shapes:
            rows = shape[0] if shape else 1
            elements = torch.Size(shape).numel()
            columns = elements // max(rows, 1)
            rank = min(rows, columns, self.rank)
            if (rows + columns) * rank * 2 < elements:  # by default, it compresses what gets smaller than half
                left, right = left + rows * rank, right + columns * rank
            else:
                uncompressed += elements
        itemsize = dtype.itemsize
        return Cost(tuple(Phase.of("all_reduce", n, itemsize, topology) for n in (uncompressed, left, right)))


def _exchange(method: str, exchange: Exchange | None = None, setting: str = "") -> Preparation:
    def prepare(net: nn.Module, wrapping: Wrapping) -> Prepared:
        ddp = wrapping.ddp(net)
        handle = attach(ddp, exchange or EXCHANGES[method](), network=wrapping.network)
        return Prepared(method, ddp, handle, setting)

    return prepare


def _powersgd(rank: int, batched: bool) -> Preparation:
    def prepare(net: nn.Module, wrapping: Wrapping) -> Prepared:
        # A single bucket, because PyTorch's hook fails on gloo with several.
        ddp = wrapping.ddp(net, bucket_mb=1000)
        state = powerSGD_hook.PowerSGDState(
            wrapping.group, matrix_approximation_rank=rank, start_powerSGD_iter=2, batch_tensors_with_same_shape=batched
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        shapes = tuple(tuple(p.shape) for p in net.parameters() if p.requires_grad)
        setting = f"rank {rank}{' batched' if batched else ''}"
        return Prepared("powersgd", ddp, setting=setting, cost=_PowerSGD(rank, shapes), one_bucket=True)

    return prepare


def slow_sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return an SGD optimizer with a learning rate that hardly changes the model."""
    return torch.optim.SGD(parameters, lr=1e-4)


def _sparse_only(net: nn.Module, wrapping: Wrapping) -> Prepared:
    model = with_topk(wrapping.ddp(net, gradient_as_bucket_view=True))
    return Prepared("sparse-only", model, cost=TopK())


def _layerwise(method: str, exchange: Exchange, *, recompute: bool) -> Preparation:
    def prepare(net: nn.Module, wrapping: Wrapping) -> Prepared:
        mode = "recompute" if recompute and find_blocks(net) else "keep"
        trainer = Layerwise(
            net,
            slow_sgd,
            exchange,
            bucket_mb=wrapping.bucket_mb,
            activations=mode,
            network=wrapping.network,
            process_group=wrapping.group,
        )
        count = len(find_blocks(net))
        blocks = f"{count} blocks recomputed" if mode == "recompute" else "all activations kept"
        if recompute and not count:
            blocks = "no blocks, so all activations are kept"
        return Prepared(method, net, setting=blocks, trainer=trainer)

    return prepare


RINGS = frozenset(
    {"nosync", "ddp", "dense", "fp16-hook", "powersgd", "wfbp", "mgwfbp", "asc", "layerwise", "memory-only"}
)
"""Methods that use the same collectives as DDP. So does `plan` if each host has one rank."""

METHODS: dict[str, tuple[str, tuple[Preparation, ...]]] = {
    "nosync": ("computation without communication: the lower bound", (_nosync,)),
    "ddp": ("plain DistributedDataParallel", (_ddp,)),
    "dense": ("Syncline, lossless", (_exchange("dense"),)),
    "bf16": ("Syncline, bf16 on the wire, fp32 sums", (_exchange("bf16"),)),
    "fp16": ("Syncline, scaled fp16 on the wire, fp32 sums", (_exchange("fp16"),)),
    "hierarchical": ("Syncline, lossless, sums inside hosts first", (_exchange("hierarchical"),)),
    "hierarchical+bf16": (
        "Syncline, sums inside hosts first, bf16 at the top",
        (_exchange("hierarchical+bf16"),),
    ),
    "topk-allgather": (
        "baseline: the largest 1 % of each rank, gathered by all ranks, with Syncline's fast selection",
        tuple(_exchange("topk-allgather", AllgatherTopk(values=values), values) for values in ("fp32", "bf16")),
    ),
    "oktopk": ("Syncline, the largest 1 % of the sums; the rest stays in the residual", (_exchange("oktopk"),)),
    "oktopk-0.1%": (
        "Syncline, the largest 0.1 % of the sums",
        (_exchange("oktopk-0.1%", OkTopk(density=0.001)),),
    ),
    "hierarchical+oktopk": (
        "Syncline, sums inside hosts first, the largest 1 % at the top",
        (_exchange("hierarchical+oktopk"),),
    ),
    "wfbp": ("each gradient in its own bucket, as soon as it is ready", (_planned("wfbp"),)),
    "mgwfbp": ("MG-WFBP's fusion, as published", (_planned("mgwfbp"),)),
    "asc": ("ASC-WFBP's fusion on two lanes, as published", (_planned("asc"),)),
    "plan": ("Syncline's plan, lossless", (_planned("plan"),)),
    "plan-lossy": ("Syncline's plan, with bf16 and sparse exchanges allowed", (_planned("plan-lossy"),)),
    "layerwise": (
        "Syncline, layer by layer, lossless: gradients are exchanged, applied and freed during backward",
        (_layerwise("layerwise", Dense(), recompute=False),),
    ),
    "layerwise+oktopk": (
        "Syncline, layer by layer, the largest 1 % of the sums, blocks recomputed",
        (_layerwise("layerwise+oktopk", OkTopk(), recompute=True),),
    ),
    "sparse-only": (
        "baseline: DDP with the usual sparse hook, which needs the least memory: the largest 1 % of each rank",
        (_sparse_only,),
    ),
    "memory-only": (
        "dense, the optimizer runs during backward, blocks recomputed",
        (_layerwise("memory-only", Dense(), recompute=True),),
    ),
    "fp16-hook": ("PyTorch's fp16 hook", (_fp16_hook,)),
    "powersgd": (
        "PyTorch's PowerSGD hook, the fastest of ranks 1, 2 and 4, equal shapes batched or not",
        tuple(_powersgd(rank, batched) for rank in (1, 2, 4) for batched in (False, True)),
    ),
}
"""By name: a description, and the variants, of which the fastest is reported."""


def check_methods(names: list[str]) -> None:
    """Raise `UsageError` if a method is unknown or named twice, or if none is named."""
    if not names:
        raise UsageError(f"no method is named; known: {', '.join(METHODS)}")
    unknown = [name for name in names if name not in METHODS]
    if unknown:
        raise UsageError(f"no method is called {', '.join(unknown)}; known: {', '.join(METHODS)}")
    if len(set(names)) < len(names):
        raise UsageError("a method is named twice")


def _ddp_sent_bytes(model: nn.Module) -> int | None:
    """Compute the bytes from the bucket sizes that DDP logged: a private API of torch, so None if it is missing."""
    if not isinstance(model, DDP):
        return None
    try:
        data = model._get_ddp_logging_data()
        sizes = str(data.get("rebuilt_bucket_sizes") or data["bucket_sizes"])
        ranks = model.process_group.size()
        (itemsize,) = {p.element_size() for p in model.parameters() if p.requires_grad}
        return sum(sent_bytes("all_reduce", int(size) // itemsize, itemsize, ranks) for size in sizes.split(","))
    except (AttributeError, KeyError, ValueError):
        return None
