"""Run a bench: build the model of every method on every rank, let the methods take turns, and make the result."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import functools
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import nn

from syncline._version import __version__
from syncline.bench.methods import (
    METHODS,
    PLANNERS,
    Prepared,
    Wrapping,
    check_methods,
    profile_workload,
    slow_sgd,
)
from syncline.bench.rounds import Contender, OnProgress, combine, report_progress, reports_to, take_turns, training_step
from syncline.bench.sharded import check_sharded, probe_for_shards, profile_shards
from syncline.cluster import ClusterSpec, Rank, format_rate, launch, links, why_not_shaped
from syncline.ddp.handle import Handle
from syncline.errors import UsageError
from syncline.exchange import EXCHANGES
from syncline.layerwise.trainer import Layerwise
from syncline.measure.probe import probe
from syncline.memory_meter import metered
from syncline.models import zoo
from syncline.models.replay import ReplayModel
from syncline.plan.search import options
from syncline.predict.exchange_time import topology_of
from syncline.predict.schedule import OVERLAP
from syncline.predict.sharded import SHARDED
from syncline.records.bench_result import BenchResult, Cluster, Model, Row
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.records.profile import Profile

PROBE_S, PROBE_LEVELS_S = 12.0, 30.0
"""Default time for probing, without and with several ranks per host, where collectives on each level are measured too.
`syncline probe` takes longer and is more accurate."""
WARMUP = 4
"""Rounds that are not measured: DDP rebuilds its buckets after one, PowerSGD starts to compress after two."""


@dataclass(frozen=True)
class Workload:
    """The model to train: by name, or a recorded profile that is replayed."""

    name: str
    batch: int
    profile: Profile | None = None

    def build(self, rank: Rank) -> nn.Module:
        if self.profile is not None:
            return ReplayModel(self.profile, seed=rank.rank, rank=rank.rank).to(rank.device)
        torch.manual_seed(0)
        return zoo.build_model(self.name).to(rank.device)

    def loss_of(self, model: Callable[..., torch.Tensor], rank: Rank) -> Callable[[], torch.Tensor]:
        if self.profile is not None:
            return lambda: model()
        generator = torch.Generator().manual_seed(rank.rank)
        inputs, targets = (t.to(rank.device) for t in zoo.make_batch(self.name, self.batch, generator))
        return lambda: zoo.loss(model(inputs), targets)


def run_bench(
    spec: ClusterSpec,
    workload: Workload,
    methods: Sequence[str],
    *,
    rounds: int,
    bucket_mb: float | None = None,
    timeout_s: float = 1800.0,
    network: Network | None = None,
    probe_s: float | None = None,
    peak_memory: bool = False,
    on_progress: OnProgress | None = None,
) -> BenchResult:
    """Predict and then measure `rounds` steps of each method on the emulated cluster, in one run.

    If a method's steps differ, as those of local steps do, each of its rounds is a whole period of them.

    Args:
        network: Network to predict from. Default: probe the links for about `probe_s`; 0 for no predictions.
        peak_memory: Measure the memory of each method, by training another model with it afterwards.
    """
    check_methods(list(methods))
    check_sharded(methods, spec, workload.profile is not None)
    if rounds < 1:
        raise UsageError(f"steps is {rounds}: must be 1 or more")
    if network is not None:
        _check_network(network, spec)
    shaped = why_not_shaped() is None
    default_s = PROBE_LEVELS_S if max(spec.per_host) > 1 and spec.hosts > 1 else PROBE_S
    budget_s = default_s if probe_s is None else probe_s
    for planned in [method for method in methods if method in PLANNERS]:
        if spec.world_size == 1:
            raise UsageError(f"{planned} needs at least two ranks: add hosts, or ranks per host")
        if network is None and not budget_s:
            raise UsageError(f"{planned} needs a network to plan from: omit --probe 0, or add --network")

    def main(rank: Rank) -> dict[str, Any]:
        return _measure(rank, workload, methods, rounds, bucket_mb, network, budget_s, peak_memory)

    answers = launch(spec, main, deadline_s=timeout_s, on_event=reports_to(on_progress), shaped=shaped)
    first, about = answers[0], [answer["about"] for answer in answers]
    turns = combine([answer["record"] for answer in answers], first["periods"])
    return BenchResult(
        cluster=cluster_of(spec, shaped),
        model=Model(workload.name, first["parameters"], first["gradient_bytes"]),
        rows=[_row(method, turns, about, shaped) for method in methods],
        rounds=rounds,
        batch=None if workload.profile is not None else workload.batch,
        torch=str(torch.__version__),
        syncline=__version__,
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        tree=first["tree"],
        network=None if first["network"] is None else network_of(first["network"], spec, shaped),
        profile=msgspec.convert(first["profile"], Profile | None),
        plans=msgspec.convert(first["plans"], dict[str, Plan]),
        sharded_profile=msgspec.convert(first["sharded_profile"], Profile | None),
    )


def _check_network(network: Network, spec: ClusterSpec) -> None:
    """Raise `UsageError` if the network is of another cluster than the bench."""
    nominal_bps = getattr(network.link("host"), "nominal_bps", None)
    rates = f"{format_rate(nominal_bps or 0)}, but the bench's are {format_rate(spec.rate_bps)}"
    hosts = tuple(host for host, _ in spec.slots)
    for problem, is_there in {
        f"the network has {network.ranks} ranks, but the bench has {spec.world_size}": network.ranks != spec.world_size,
        "the network's ranks are on other hosts than the bench's": network.host_of_rank != hosts,
        f"the network was probed on {network.device}, not on {spec.device}": network.device != spec.device,
        f"the network's links are {rates}": nominal_bps not in (None, spec.rate_bps),
        "the network has no measured collectives": not network.collectives or not network.links,
    }.items():
        if is_there:
            raise UsageError(f"{problem}: probe again with the bench's options")


def _measure(
    rank: Rank,
    workload: Workload,
    methods: Sequence[str],
    rounds: int,
    bucket_mb: float | None,
    network: Network | None,
    probe_s: float,
    peak_memory: bool,
) -> dict[str, Any]:
    """Measure on one rank."""
    rank.init_process_group()
    per_host, shards = rank.spec.per_host[0], [method for method in methods if method in SHARDED]
    if network is None and probe_s and rank.world_size > 1:
        network = probe_for_shards(rank.device, per_host, probe_s) if shards else probe(budget_s=probe_s)
    wrapping = Wrapping(rank.device, bucket_mb, network, per_host=per_host)
    unplanned = _prepare(rank, workload, [method for method in methods if method not in PLANNERS], wrapping)
    if network is not None:
        profile = _profile(rank, workload, network, methods, unplanned)
        wrapping = dataclasses.replace(wrapping, profile=profile, paced=workload.profile is not None)
    if network is not None and shards:
        net = workload.build(rank)
        subject = net, workload.loss_of(net, rank), slow_sgd, workload.name
        sharded_profile = profile_shards(*subject, rank.device, per_host, shards)
        wrapping = dataclasses.replace(wrapping, sharded_profile=sharded_profile)
    planned = _prepare(rank, workload, [method for method in methods if method in PLANNERS], wrapping)
    prepared = {**unplanned, **planned}
    predicted_ms = {name: wrapping.predicted_ms(variant) for name, variant in prepared.items()}
    periods = {name: variant.period for name, variant in prepared.items()}
    contenders = [_contender(name, variant, workload, rank) for name, variant in prepared.items()]
    record = take_turns(rank, contenders, warmup=WARMUP, rounds=rounds)
    about = {
        name: {
            "method": variant.method,
            "setting": variant.chosen(),
            "sent_bytes": variant.sent_bytes(rank.world_size),
            "predicted_sent_bytes": variant.predicted_sent_bytes(rank.world_size),
            "predicted_ms": predicted_ms[name],
            **(_memory_of(rank, workload, variant, wrapping) if peak_memory else {}),
        }
        for name, variant in prepared.items()
    }
    parameters = next(iter(prepared.values())).trained
    trees = [variant.handle.tree for variant in prepared.values() if variant.handle is not None]
    plans = {name: variant.plan for name, variant in planned.items()}
    profiles = {"profile": wrapping.profile, "sharded_profile": wrapping.sharded_profile}
    inputs = {"network": network, **profiles, "plans": plans}
    return {
        "record": record,
        "about": about,
        "periods": periods,
        **(msgspec.to_builtins(inputs) if rank.rank == 0 else {}),
        "tree": next((tree.describe() for tree in trees if tree is not None), ""),
        "parameters": sum(p.numel() for p in parameters),
        "gradient_bytes": sum(p.nbytes for p in parameters),
    }


def _prepare(rank: Rank, workload: Workload, methods: Sequence[str], wrapping: Wrapping) -> dict[str, Prepared]:
    """Build a model for each variant of each method; return them by name."""
    prepared = [
        dataclasses.replace(prepare(method, workload.build(rank), wrapping), variant=index)
        for method in methods
        for index, prepare in enumerate(METHODS[method][1])
    ]
    return {variant.name: variant for variant in prepared}


def _profile(
    rank: Rank, workload: Workload, network: Network, methods: Sequence[str], prepared: dict[str, Prepared]
) -> Profile:
    """Profile the workload, and the exchanges of these methods."""
    net = workload.build(rank)
    unsharded = {name: variant for name, variant in prepared.items() if variant.method not in SHARDED}
    handles = {name: variant.handle for name, variant in unsharded.items() if variant.handle is not None}
    exchanges: dict[str, Any] = {n: functools.partial(copy.copy, handle.exchange) for n, handle in handles.items()}
    for allowed in [PLANNERS[method] for method in methods if method in PLANNERS]:
        exchanges |= {name: EXCHANGES[name] for name in options(network, allowed)}
    loss_of = workload.loss_of(net, rank)
    contention = workload.profile is None  # a replay waits instead of computing
    return profile_workload(net, lambda _: loss_of(), workload.name, topology_of(network), exchanges, contention)


def _contender(name: str, prepared: Prepared, workload: Workload, rank: Rank) -> Contender:
    """Return what takes the training steps of one period."""
    trainer = prepared.handle if isinstance(prepared.handle, Layerwise) else None
    handle = prepared.handle if isinstance(prepared.handle, Handle) else None
    loss_of = workload.loss_of(trainer or prepared.model, rank)
    if trainer is not None:
        return Contender(name, lambda: loss_of().backward())
    step, period = training_step(prepared.model, loss_of, prepared.optimizer), prepared.period
    if prepared.optimizer is None or handle is None:
        return Contender(name, step)

    def steps() -> None:
        for _ in range(period):
            step()

    def steps_and_wait() -> None:
        steps()
        handle.wait()  # otherwise, the end of a delayed exchange would not be measured

    if prepared.method == OVERLAP:
        return Contender(name, steps, period, lead=step, lead_steps=1, settle=handle.wait)
    return Contender(name, steps_and_wait, period)


def _memory_of(rank: Rank, workload: Workload, measured: Prepared, wrapping: Wrapping) -> dict[str, int]:
    """Measure the memory of one more model with this method, without what is allocated already."""
    gc.collect()
    net = workload.build(rank)
    tensors = [*net.parameters(), *net.buffers()]
    with metered(rank.device, tensors) as meter:
        base = meter.now() - sum(tensor.nbytes for tensor in tensors)
        prepared = METHODS[measured.method][1][measured.variant](measured.method, net, wrapping)
        step = _contender(measured.name, prepared, workload, rank).step
        for _ in range(WARMUP):
            step()
        meter.restart()
        states = meter.now() - base
        step()
        memory = {"peak_bytes": meter.peak() - base, "states_bytes": states}
    if isinstance(prepared.handle, Layerwise):
        prepared.handle.close()
    return memory


def _row(method: str, turns: dict[str, Any], about: list[dict[str, Any]], shaped: bool) -> Row:
    """Make the row of a method, from its fastest variant."""
    variants = [name for name in turns if about[0][name]["method"] == method]
    best = min(variants, key=lambda name: turns[name].quartiles.median)
    largest: dict[str, Any] = {}
    for field in ("sent_bytes", "predicted_sent_bytes", "predicted_ms", "peak_bytes", "states_bytes"):
        values = [value for answer in about if (value := answer[best].get(field)) is not None]
        largest[field] = max(values, default=None)
    return Row(
        method=method,
        **turns[best].quartiles.fields("step_ms", 1e3),
        **largest,
        **(turns[best].ratio_to(turns["ddp"]).fields("vs_ddp") if "ddp" in turns else {}),
        wire_bytes=round(turns[best].wire_bytes) if shaped else None,
        setting=about[0][best]["setting"],
    )


def cluster_of(spec: ClusterSpec, emulated: bool) -> Cluster:
    same = len(set(spec.per_host)) == 1
    fields = dataclasses.asdict(spec) | {"per_host": spec.per_host[0] if same else list(spec.per_host)}
    return Cluster(**fields, emulated=emulated, burst_bytes=links.burst_bytes(spec.rate_bps) if emulated else None)


def network_of(answer: object, spec: ClusterSpec, emulated: bool) -> Network:
    """Return the network that a rank probed, with the nominal rates of emulated links."""
    network = msgspec.convert(answer, Network)
    return network.with_nominal_rates(spec.rate_bps, spec.trunk_rate_bps) if emulated else network


def probe_emulated(spec: ClusterSpec, budget_s: float, on_progress: OnProgress | None = None) -> Network:
    """Probe the links of an emulated cluster; the result has their nominal rates too."""

    def main(rank: Rank) -> object:
        rank.init_process_group(timeout_s=max(60.0, 4 * budget_s))
        report = functools.partial(report_progress, rank) if rank.rank == 0 else None
        return msgspec.to_builtins(probe(budget_s=budget_s, on_progress=report))

    answers = launch(spec, main, deadline_s=120 + 6 * budget_s, on_event=reports_to(on_progress))
    return network_of(answers[0], spec, why_not_shaped() is None)
