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
    Forecast,
    Prepared,
    Wrapping,
    check_methods,
    profile_workload,
    slow_sgd,
)
from syncline.bench.rounds import (
    Contender,
    OnProgress,
    Turns,
    combine,
    finish,
    report_progress,
    reported_to,
    take_turns,
    training_step,
)
from syncline.cluster import ClusterSpec, Rank, format_rate, launch
from syncline.cluster.isolation import why_not_shaped
from syncline.errors import UsageError
from syncline.exchange import EXCHANGES, Exchange
from syncline.layerwise.trainer import Layerwise
from syncline.measure.probe import probe
from syncline.memory_meter import metered
from syncline.models import zoo
from syncline.models.replay import ReplayModel
from syncline.plan.search import options
from syncline.predict.exchange_time import topology_of
from syncline.records.bench_result import BenchResult, Cluster, Model, Row
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.records.profile import Profile

PROBE_S = 12.0
"""Default time for probing. `syncline probe` takes longer and is more accurate."""
PROBE_LEVELS_S = 30.0
"""The same if hosts have several ranks, because collectives on each level are measured too."""
WARMUP = 4
"""Rounds that are not measured: DDP rebuilds its buckets after one, PowerSGD starts to compress after two."""


@dataclass(frozen=True)
class Workload:
    """The model to train: by name, or a recorded profile that is replayed."""

    name: str
    batch: int
    profile: Profile | None = None

    def build(self, rank: int) -> nn.Module:
        if self.profile is not None:
            return ReplayModel(self.profile, seed=rank, rank=rank)
        torch.manual_seed(0)
        return zoo.build_model(self.name)

    def loss_of(
        self, model: Callable[..., torch.Tensor], rank: int, device: torch.device
    ) -> Callable[[], torch.Tensor]:
        if self.profile is not None:
            return lambda: model()
        generator = torch.Generator().manual_seed(rank)
        inputs, targets = (t.to(device) for t in zoo.make_batch(self.name, self.batch, generator))
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
    """Predict and then measure `methods` on the emulated cluster, in one run.

    Args:
        rounds: Number of steps that each method takes.
        network: Network to predict from. Default: probe the links.
        probe_s: Approximate time for probing; 0 for no predictions.
        peak_memory: Measure the memory of each method, by training another model with it afterwards.

    Raises:
        UsageError: If a method is unknown, or `network` is of another cluster.
    """
    check_methods(list(methods))
    if rounds < 1:
        raise UsageError(f"steps is {rounds}: must be 1 or more")
    if network is not None:
        _check_network(network, spec)

    shaped = why_not_shaped() is None
    default_s = PROBE_LEVELS_S if max(spec.per_host) > 1 and spec.hosts > 1 else PROBE_S
    budget_s = default_s if probe_s is None else probe_s
    planned = next((method for method in methods if method in PLANNERS), None)
    if planned is not None and spec.world_size == 1:
        raise UsageError(f"{planned} needs at least two ranks: add hosts, or ranks per host")
    if planned is not None and network is None and not budget_s:
        raise UsageError(f"{planned} needs a network to plan from: omit --probe 0, or add --network")
    answers = launch(
        spec,
        lambda rank: _measure(rank, workload, methods, rounds, bucket_mb, network, budget_s, peak_memory),
        deadline_s=timeout_s,
        on_event=reported_to(on_progress),
        shaped=shaped,
    )
    turns = combine([answer["record"] for answer in answers])
    about = [answer["about"] for answer in answers]
    first = answers[0]
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
    )


def _check_network(network: Network, spec: ClusterSpec) -> None:
    """Raise `UsageError` if the network is of another cluster than the bench."""
    advice = "probe again with the bench's options"
    if network.ranks != spec.world_size:
        raise UsageError(f"the network has {network.ranks} ranks, but the bench has {spec.world_size}: {advice}")
    placement = {rank: host for host in range(spec.hosts) for rank in spec.ranks_of(host)}
    if network.host_of_rank != tuple(placement[rank] for rank in range(spec.world_size)):
        raise UsageError(f"the network's ranks are on other hosts than the bench's: {advice}")
    if network.device != spec.device:
        raise UsageError(f"the network was probed on {network.device}, but the bench runs on {spec.device}: {advice}")
    link = network.link("host")
    if link is not None and link.nominal_bps not in (None, spec.rate_bps):
        rates = f"{format_rate(link.nominal_bps or 0)}, but the bench's are {format_rate(spec.rate_bps)}"
        raise UsageError(f"the network's links are {rates}: {advice}")
    if not network.collectives or not network.links:
        raise UsageError(f"the network has no measured collectives: {advice}")


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
    if network is None and probe_s and rank.world_size > 1:
        network = probe(budget_s=probe_s)
    wrapping = Wrapping(rank.device, bucket_mb, network=network)
    unplanned = _prepare(rank, workload, [method for method in methods if method not in PLANNERS], wrapping)
    forecast = None
    if network is not None:
        profile = _profile(rank, workload, network, methods, unplanned)
        forecast = Forecast(profile, network, workload.profile is not None, bucket_mb)
    wrapping = dataclasses.replace(wrapping, forecast=forecast)
    planned = _prepare(rank, workload, [method for method in methods if method in PLANNERS], wrapping)
    prepared = {**unplanned, **planned}
    predicted_s = {} if forecast is None else {name: forecast.predicted_s(v) for name, v in prepared.items()}
    contenders = [Contender(name, _training_step(variant, workload, rank)) for name, variant in prepared.items()]
    record = take_turns(rank, contenders, warmup=WARMUP, rounds=rounds)
    about = {
        name: {
            "method": variant.method,
            "setting": variant.chosen(),
            "sent": variant.sent_bytes(rank.world_size),
            "predicted": variant.predicted_sent_bytes(rank.world_size),
            "predicted_s": predicted_s.get(name),
            **(_memory_of(rank, workload, variant, wrapping) if peak_memory else {}),
        }
        for name, variant in prepared.items()
    }
    parameters = [p for p in next(iter(prepared.values())).model.parameters() if p.requires_grad]
    trees = [variant.handle.tree for variant in prepared.values() if variant.handle is not None]
    plans = {name: variant.plan for name, variant in planned.items()}
    inputs = {"network": network, "profile": forecast and forecast.profile, "plans": plans}
    return {
        "record": record,
        "about": about,
        **(msgspec.to_builtins(inputs) if rank.rank == 0 else {}),
        "tree": next((tree.describe() for tree in trees if tree is not None), ""),
        "parameters": sum(p.numel() for p in parameters),
        "gradient_bytes": sum(p.numel() * p.element_size() for p in parameters),
    }


def _prepare(rank: Rank, workload: Workload, methods: Sequence[str], wrapping: Wrapping) -> dict[str, Prepared]:
    """Build a model for each variant of each method; return them by name."""
    prepared = [
        dataclasses.replace(prepare(method, workload.build(rank.rank).to(rank.device), wrapping), variant=variant)
        for method in methods
        for variant, prepare in enumerate(METHODS[method][1])
    ]
    return {variant.name: variant for variant in prepared}


def _profile(
    rank: Rank, workload: Workload, network: Network, methods: Sequence[str], prepared: dict[str, Prepared]
) -> Profile:
    """Profile the workload, and the exchanges of these methods."""
    net = workload.build(rank.rank).to(rank.device)
    loss_of = workload.loss_of(net, rank.rank, rank.device)
    exchanges: dict[str, Callable[[], Exchange]] = {
        name: functools.partial(copy.copy, variant.handle.exchange)
        for name, variant in prepared.items()
        if variant.handle is not None
    }
    for allowed in [PLANNERS[method] for method in methods if method in PLANNERS]:
        exchanges |= {name: EXCHANGES[name] for name in options(network, allowed)}
    optimizer = slow_sgd(net.parameters())
    return profile_workload(net, lambda _: loss_of(), optimizer, workload.name, topology_of(network), exchanges)


def _training_step(prepared: Prepared, workload: Workload, rank: Rank) -> Callable[[], None]:
    if not isinstance(prepared.handle, Layerwise):
        return training_step(prepared.model, workload.loss_of(prepared.model, rank.rank, rank.device))
    loss_of = workload.loss_of(prepared.handle, rank.rank, rank.device)
    return lambda: loss_of().backward()


def _memory_of(rank: Rank, workload: Workload, measured: Prepared, wrapping: Wrapping) -> dict[str, int]:
    """Measure the memory of one more model with this method, without what is allocated already."""
    gc.collect()
    prepare = METHODS[measured.method][1][measured.variant]
    net = workload.build(rank.rank).to(rank.device)
    with metered(rank.device, [*net.parameters(), *net.buffers()]) as meter:
        weights = sum(tensor.numel() * tensor.element_size() for tensor in [*net.parameters(), *net.buffers()])
        base = meter.now() - weights
        prepared = prepare(measured.method, net, wrapping)
        step = _training_step(prepared, workload, rank)
        for _ in range(WARMUP):
            step()
        meter.restart()
        states = meter.now() - base
        step()
        finish(rank)
        memory = {"peak_bytes": meter.peak() - base, "states_bytes": states}
    if isinstance(prepared.handle, Layerwise):
        prepared.handle.close()
    return memory


def _row(method: str, turns: dict[str, Turns], about: list[dict[str, Any]], shaped: bool) -> Row:
    """Make the row of a method, from its fastest variant."""
    variants = [name for name in turns if about[0][name]["method"] == method]
    best = min(variants, key=lambda name: turns[name].quartiles.median)
    ratio = turns[best].ratio_to(turns["ddp"]) if "ddp" in turns else None
    return Row(
        method=method,
        **turns[best].step_ms(),
        sent_bytes=_largest(answer[best]["sent"] for answer in about),
        predicted_ms=None if (expected := about[0][best]["predicted_s"]) is None else expected * 1000,
        predicted_sent_bytes=_largest(answer[best]["predicted"] for answer in about),
        wire_bytes=round(turns[best].wire_bytes) if shaped else None,
        vs_ddp=ratio.median if ratio else None,
        vs_ddp_low=ratio.low if ratio else None,
        vs_ddp_high=ratio.high if ratio else None,
        setting=about[0][best]["setting"],
        peak_bytes=_largest(answer[best].get("peak_bytes") for answer in about),
        states_bytes=_largest(answer[best].get("states_bytes") for answer in about),
    )


def _largest(values: Any) -> int | None:
    return max((value for value in values if value is not None), default=None)


def cluster_of(spec: ClusterSpec, emulated: bool) -> Cluster:
    burst_bytes = None
    if emulated:
        from syncline.cluster import links  # needs pyroute2

        burst_bytes = links.burst_bytes(spec.rate_bps)
    same = len(set(spec.per_host)) == 1
    fields = dataclasses.asdict(spec) | {"per_host": spec.per_host[0] if same else list(spec.per_host)}
    return Cluster(**fields, emulated=emulated, burst_bytes=burst_bytes)


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

    answers = launch(spec, main, deadline_s=120 + 6 * budget_s, on_event=reported_to(on_progress))
    return network_of(answers[0], spec, why_not_shaped() is None)
