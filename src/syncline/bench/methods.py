"""The methods that a bench compares, and predictions of their step times before the first one is measured.

Every exchange of `EXCHANGES` is a method. Another method is a new line in `METHODS`. Baselines are PyTorch's own code,
with the settings that suit them best; they are not predicted. Syncline's exchanges state their own cost.

Every method steps the same optimizer, plain SGD with a tiny learning rate, and its time is part of the step.
"""

from __future__ import annotations

import dataclasses
import functools
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

from syncline.bench import sharded
from syncline.ddp.attach import attach, wrap
from syncline.ddp.handle import Handle, handle_of
from syncline.errors import UsageError
from syncline.exchange import EXCHANGES, AllgatherTopk, Dense, Exchange, OkTopk, Quantized, Topology
from syncline.exchange.wire import sent_bytes
from syncline.layerwise.activations import find_blocks
from syncline.layerwise.trainer import Layerwise
from syncline.measure.backward import measure_backward
from syncline.measure.load import measure_contention
from syncline.measure.overhead import measure_overheads
from syncline.plan.make import make_plan, plan_for
from syncline.plan.search import named
from syncline.predict import Schedule, predict
from syncline.predict.schedule import OVERLAP, UPDATES, ddp_caps
from syncline.predict.sharded import SHARDED, predict_sharded
from syncline.records.bucket_caps import filled
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.records.profile import Profile
from syncline.tuning.apply import without_warmup
from syncline.units import count_text, size_text


@dataclass
class Prepared:
    """A model that is ready to train with one method."""

    method: str
    model: nn.Module
    handle: Handle | Layerwise | None = None
    """The exchange of a Syncline method. `Layerwise` also runs the optimizer."""
    setting: str = ""
    """Setting of this variant, such as PowerSGD's rank."""
    plan: Plan | None = None
    """Plan of a planned method."""
    variant: int = 0
    """Index of this variant in `METHODS`."""
    optimizer: torch.optim.Optimizer | None = None
    """Optimizer whose updates are exchanged."""
    native_bytes: int | None = None
    """Bytes per step of FSDP's own collectives, as far as they are compared."""

    @property
    def name(self) -> str:
        """Name of the method and, if it has several variants, the setting."""
        return f"{self.method} {self.setting}" if len(METHODS[self.method][1]) > 1 else self.method

    @property
    def trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @property
    def period(self) -> int:
        """Number of steps that are measured together: 1, unless updates take turns, or steps overlap."""
        if self.method == OVERLAP:
            return _OVERLAPPING_STEPS
        return self.handle.period if isinstance(self.handle, Handle) else 1

    def chosen(self) -> str:
        """Return the setting, and the paths of the buckets, the most frequent first."""
        paths = Counter(self.handle.paths if isinstance(self.handle, Handle) else {}).most_common()
        return "; ".join(filter(None, [self.setting, *(path for path, _ in paths)]))

    def sent_bytes(self, ranks: int) -> int | None:
        """Return the payload per step that the busiest rank sent; None if it is not known.

        That is the payload of the last step or, if updates are exchanged, the mean over all steps, in whole periods.
        """
        if self.optimizer is not None and self.handle is not None and self.method != OVERLAP:
            stats = self.handle.stats()
            return sum(round(total / stats.steps) for total in stats.total_sent_bytes.values())
        counted = None if self.handle is None else sum(self.handle.stats().sent_bytes.values()) + self._native
        return self.predicted_sent_bytes(ranks) if counted is None else counted

    @property
    def _native(self) -> int:
        return self.native_bytes or 0

    def predicted_sent_bytes(self, ranks: int) -> int | None:
        if self.handle is not None:
            return sum(self.handle.predicted_sent_bytes().values()) + self._native
        if self.method in (*HOOKS, *SHARDED):
            return self.native_bytes
        elements = Counter[int]()
        for parameter in self.trained if self.method != "nosync" else ():
            elements[parameter.element_size()] += parameter.numel()
        return sum(sent_bytes("all_reduce", count, size, ranks) for size, count in elements.items())


@dataclass(frozen=True)
class Wrapping:
    """How to build DDP, which is the same for all methods unless one needs other settings, and how to predict."""

    device: torch.device
    bucket_mb: float | None = None
    network: Network | None = None
    """Network from which exchanges choose their paths."""
    profile: Profile | None = None
    """Profile for predictions and planned methods, the same on all ranks. Without it, nothing is predicted."""
    sharded_profile: Profile | None = None
    """Profile of a sharded model, for predictions of such methods."""
    per_host: int = 1
    """Ranks on each host, for methods that shard models inside hosts."""
    paced: bool = False
    """True for a replay, whose computation is not slowed down by communication."""

    @property
    def device_ids(self) -> list[int] | None:
        return [self.device.index] if self.device.type == "cuda" else None

    def ddp(self, net: nn.Module, bucket_mb: float | None = None) -> DDP:
        return DDP(net, device_ids=self.device_ids, bucket_cap_mb=self.bucket_mb if bucket_mb is None else bucket_mb)

    def predicted_ms(self, prepared: Prepared) -> float | None:
        """Predict the time per step of a method; None for PyTorch's own hooks.

        The profile has the time of the exchange's own computation under the method's name.
        """
        profile, name, handle = self.profile, prepared.name, prepared.handle
        if prepared.method in SHARDED and self.sharded_profile is not None and self.network is not None:
            return predict_sharded(self.sharded_profile, self.network, prepared.method).iteration_s * 1e3
        if prepared.method in (*HOOKS, *SHARDED) or profile is None or self.network is None:
            return None
        if prepared.method == "nosync":
            straggler_s = 0.0 if profile.slowest is None else profile.slowest.step_s - profile.step_s
            return (profile.step_s + max(straggler_s, profile.jitter_s)) * 1e3
        if prepared.plan is not None:
            return prepared.plan.iteration_s * 1e3
        recompute_s, schedule = 0.0, Schedule.of(profile, bucket_mb=self.bucket_mb)
        if prepared.method == OVERLAP:
            schedule = Schedule.of(profile, OVERLAP, bucket_mb=self.bucket_mb)
            if isinstance(handle, Handle) and handle.caps:
                schedule = dataclasses.replace(schedule, buckets=filled(profile.gradients, handle.caps))
        elif prepared.method in UPDATES and handle is not None:
            updates = dataclasses.replace(UPDATES[prepared.method], exchange_name=name)
            schedule = Schedule.of_updates(profile, name, updates, handle.lanes)
        elif handle is not None:
            buckets = schedule.buckets
            if isinstance(handle, Layerwise):
                buckets = filled(profile.gradients, (handle.bucket_bytes,))
                recompute_s = profile.forward_s if handle.activations else 0.0
            schedule = Schedule(name, buckets, handle.exchange, name, handle.lanes)
        return (recompute_s + predict(profile, self.network, schedule, paced=self.paced).iteration_s) * 1e3


Preparation = Callable[[str, nn.Module, Wrapping], Prepared]

PLANNERS: dict[str, tuple[str, ...]] = dict.fromkeys(("wfbp", "mgwfbp", "asc", "plan"), ())
PLANNERS["plan-lossy"] = ("bf16", "sparse")
"""Planned methods, and the lossy exchanges that each may use."""
_OVERLAPPING_STEPS = 4
HOOKS = ("fp16-hook", "powersgd")
"""PyTorch's own hooks. Their bytes and times are not predicted."""


def make_planned(method: str, profile: Profile, network: Network, *, paced: bool, caps: tuple[int, ...]) -> Plan:
    """Make the plan of a method, before anything is measured. DDP closes its buckets at `caps` bytes."""
    if method in ("plan", "plan-lossy"):
        # A bench takes fewer steps than a warm-up has, and measures what follows it.
        return without_warmup(make_plan(profile, network, PLANNERS[method], paced=paced, caps=caps))
    plain = predict(profile, network, Schedule("ddp", filled(profile.gradients, caps)), paced=paced)
    chosen = predict(profile, network, named(profile, network, method), paced=paced)
    return plan_for(chosen, plain_s=plain.iteration_s, reason=f"{method}, as published")


def _planned(method: str, net: nn.Module, wrapping: Wrapping) -> Prepared:
    profile, network = wrapping.profile, wrapping.network
    assert profile is not None and network is not None  # noqa: S101 - run_bench refuses it otherwise
    plan = make_planned(method, profile, network, paced=wrapping.paced, caps=ddp_caps(wrapping.bucket_mb))
    if plan.nothing:
        return Prepared(method, wrapping.ddp(net), setting="plain DDP", plan=plan)
    ddp = wrap(net, plan, network=wrapping.network, device_ids=wrapping.device_ids)
    names = " and ".join(dict.fromkeys(type(exchange).__name__ for exchange in plan.exchanges))
    lanes = f", {plan.lanes} lanes" if plan.lanes > 1 else ""
    setting = f"{count_text(len(plan.buckets), 'bucket')} through {names}{lanes}"
    return Prepared(method, ddp, handle_of(ddp), setting, plan)


def _attached(exchange: Exchange, setting: str = "") -> Preparation:
    def prepare(method: str, net: nn.Module, wrapping: Wrapping) -> Prepared:
        ddp = wrapping.ddp(net)
        return Prepared(method, ddp, attach(ddp, exchange, network=wrapping.network), setting)

    return prepare


def _updates(method: str, net: nn.Module, wrapping: Wrapping) -> Prepared:
    ddp, updates = wrapping.ddp(net), UPDATES[method]
    optimizer = slow_sgd(ddp.parameters())
    options: dict[str, Any] = {"optimizer": optimizer, "every": updates.every, "delay": updates.delay, "warmup": 0}
    handle = attach(ddp, updates.exchange, network=wrapping.network, **options)
    return Prepared(method, ddp, handle, optimizer=optimizer)


def _overlap(method: str, net: nn.Module, wrapping: Wrapping) -> Prepared:
    ddp = wrapping.ddp(net)
    optimizer = slow_sgd(ddp.parameters())
    # Without a size that the user chose, predictions choose it.
    profile = wrapping.profile if wrapping.bucket_mb is None and wrapping.network is not None else None
    options: dict[str, Any] = {"network": wrapping.network, "profile": profile}
    handle = attach(ddp, Dense(), optimizer=optimizer, overlap="forward", **options)
    setting = f"buckets of {size_text(handle.caps[0])}" if handle.caps else ""
    return Prepared(method, ddp, handle, setting, optimizer=optimizer)


def _native_shards(replicas: bool) -> Preparation:
    def prepare(method: str, net: nn.Module, wrapping: Wrapping) -> Prepared:
        backend = "nccl" if wrapping.device.type == "cuda" else "gloo"
        sent = sharded.native_bytes(net, wrapping.per_host, backend, replicas=replicas)
        model, _ = sharded.shard_model(net, wrapping.device, wrapping.per_host, native=True, replicas=replicas)
        return Prepared(method, model, native_bytes=sent)

    return prepare


def _shards(exchange: Exchange, replicas: bool) -> Preparation:
    def prepare(method: str, net: nn.Module, wrapping: Wrapping) -> Prepared:
        backend, gathered = "nccl" if wrapping.device.type == "cuda" else "gloo", 0
        if not replicas:
            gathered = sharded.native_bytes(net, wrapping.per_host, backend, replicas=False, gradients=False)
        handle = sharded.attached(net, wrapping.device, wrapping.per_host, exchange, replicas=replicas)
        return Prepared(method, net, handle, native_bytes=gathered)

    return prepare


def _shard_updates(method: str, net: nn.Module, wrapping: Wrapping) -> Prepared:
    updates = UPDATES["local-15"]
    model, between = sharded.shard_model(net, wrapping.device, wrapping.per_host, native=False, replicas=True)
    optimizer = slow_sgd(model.parameters())
    options: dict[str, Any] = {"every": updates.every, "delay": updates.delay, "warmup": 0}
    handle = attach(model, updates.exchange, replicate=between, optimizer=optimizer, **options)
    return Prepared(method, model, handle, optimizer=optimizer)


def _layerwise(exchange: Exchange, recompute: bool) -> Preparation:
    def prepare(method: str, net: nn.Module, wrapping: Wrapping) -> Prepared:
        blocks = len(find_blocks(net)) if recompute else 0
        activations, cap = "recompute" if blocks else "keep", wrapping.bucket_mb
        trainer = Layerwise(net, slow_sgd, exchange, bucket_mb=cap, activations=activations, network=wrapping.network)
        return Prepared(method, net, trainer, f"{blocks} blocks recomputed" if blocks else "all activations kept")

    return prepare


def _hooked(hook: Any, setting: str = "", state_of: Any = lambda: None, mb: float | None = None) -> Preparation:
    def prepare(method: str, net: nn.Module, wrapping: Wrapping) -> Prepared:
        ddp = wrapping.ddp(net, mb)
        ddp.register_comm_hook(state_of(), hook)
        return Prepared(method, ddp, setting=setting)

    return prepare


def _powersgd(rank: int, batched: bool) -> Preparation:
    # It starts to compress in the third step, with a single bucket, because PyTorch's hook fails on gloo with several.
    state_of = functools.partial(powerSGD_hook.PowerSGDState, None, rank, 2, batch_tensors_with_same_shape=batched)
    return _hooked(powerSGD_hook.powerSGD_hook, f"rank {rank}{' batched' if batched else ''}", state_of, mb=1000)


def slow_sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return an SGD optimizer with a learning rate that hardly changes the model."""
    return torch.optim.SGD(parameters, lr=1e-4)


METHODS: dict[str, tuple[str, tuple[Preparation, ...]]] = {
    "nosync": ("computation without communication: the lower bound", (lambda method, net, _: Prepared(method, net),)),
    "ddp": ("plain DistributedDataParallel", (lambda method, net, wrapping: Prepared(method, wrapping.ddp(net)),)),
    **{name: (f"Syncline's {make()}", (_attached(make()),)) for name, make in EXCHANGES.items()},
    "topk-allgather": (
        "baseline: the largest 1 % of each rank, gathered by all ranks, with Syncline's fast selection",
        tuple(_attached(AllgatherTopk(values=values), values) for values in ("fp32", "bf16")),
    ),
    "oktopk-0.1%": ("Syncline, the largest 0.1 % of the sums", (_attached(OkTopk(density=0.001)),)),
    "oktopk-updates": ("Syncline, the largest 1 % of the optimizer's updates in every step", (_updates,)),
    "local-15": ("Syncline, the largest 3 % of updates, of each part of the weights every 15 steps", (_updates,)),
    "local-15-late": ("the same, applied one step later, so that computation hides the exchange", (_updates,)),
    OVERLAP: ("Syncline, lossless: weights are gathered behind the next forward pass", (_overlap,)),
    "wfbp": ("each gradient in its own bucket, as soon as it is ready", (_planned,)),
    "mgwfbp": ("MG-WFBP's fusion, as published", (_planned,)),
    "asc": ("ASC-WFBP's fusion on two lanes, as published", (_planned,)),
    "plan": ("Syncline's plan, lossless", (_planned,)),
    "plan-lossy": ("Syncline's plan, with bf16 and sparse exchanges allowed", (_planned,)),
    "layerwise": ("Syncline, layer by layer: gradients are freed during backward", (_layerwise(Dense(), False),)),
    "layerwise+oktopk": ("layer by layer, the largest 1 % of sums, blocks recomputed", (_layerwise(OkTopk(), True),)),
    "memory-only": ("dense, the optimizer runs during backward, blocks recomputed", (_layerwise(Dense(), True),)),
    "fsdp": ("PyTorch's FSDP2, among all ranks", (_native_shards(False),)),
    "fsdp+int4": ("FSDP2 among all ranks, Syncline sends gradients in 4 bits", (_shards(Quantized(bits=4), False),)),
    "hsdp": ("PyTorch's HSDP: FSDP2 inside each host, all-reduce between replicas", (_native_shards(True),)),
    "hsdp+dense": ("FSDP2 inside each host, Syncline between replicas, lossless", (_shards(Dense(), True),)),
    "hsdp+int4": ("FSDP2 inside each host, Syncline in 4 bits between", (_shards(Quantized(bits=4), True),)),
    "hsdp+local-15": ("FSDP2 inside each host, updates as in local-15 between", (_shard_updates,)),
    "fp16-hook": ("PyTorch's fp16 hook", (_hooked(default_hooks.fp16_compress_hook),)),
    "powersgd": (
        "PyTorch's PowerSGD hook, the fastest of ranks 1, 2 and 4, equal shapes batched or not",
        tuple(_powersgd(rank, batched) for rank in (1, 2, 4) for batched in (False, True)),
    ),
}
"""By name: a description, and the variants, of which the fastest is reported."""


def profile_workload(
    net: nn.Module,
    loss_of: Callable[[nn.Module], torch.Tensor],
    name: str,
    topology: Topology | None = None,
    exchanges: Mapping[str, Callable[[], Exchange]] | None = None,
    contention: bool = False,
) -> Profile:
    """Profile the workload on all ranks, without communication, and the computation of `exchanges`, by default all.
    With `contention`, measure what computation and these exchanges take from each other, too."""
    optimizer, device = slow_sgd(net.parameters()), next(net.parameters()).device
    ranks, measured = topology or Topology.flat(dist.get_world_size()), None
    overheads = measure_overheads(device, exchanges, topology=ranks, group=dist.group.WORLD)
    if contention and ranks.ranks > 1:
        measured = measure_contention(net, loss_of, optimizer, EXCHANGES if exchanges is None else exchanges, ranks)
    # Last, because a machine's speed changes within seconds, and the methods are measured right after this.
    profile = measure_backward(net, loss_of, steps=16, warmup=3, optimizer=optimizer, model_name=name)
    return msgspec.structs.replace(profile, overheads=overheads, contention=measured)


def check_methods(names: list[str]) -> None:
    """Raise `UsageError` if a method is unknown or named twice, or if none is named."""
    unknown = [name for name in names if name not in METHODS]
    if unknown or not names:
        problem = f"called {', '.join(unknown)}" if unknown else "named"
        raise UsageError(f"no method is {problem}; known: {', '.join(METHODS)}")
    if len(set(names)) < len(names):
        raise UsageError("a method is named twice")
