"""One bench: build every method's model on every rank, let them take turns, put the rows together."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from syncline._version import __version__
from syncline.bench.methods import METHODS, Prepared, Wrapping, check_methods
from syncline.bench.result import BenchResult, Cluster, Model, Row
from syncline.bench.rounds import Contender, Turns, combine, reported_to, take_turns
from syncline.cluster import ClusterSpec, Rank, launch
from syncline.cluster.isolation import why_not_shaped
from syncline.errors import UsageError
from syncline.measure.profile import Profile
from syncline.models import zoo
from syncline.models.replay import ReplayModel

WARMUP = 4
"""Rounds before the first that counts: DDP rebuilds its buckets after one, PowerSGD starts to compress after two."""


@dataclass(frozen=True)
class Workload:
    """What is trained: a model by name, or a recorded profile that is replayed."""

    name: str
    batch: int
    profile: Profile | None = None

    def build(self, rank: int) -> nn.Module:
        if self.profile is not None:
            return ReplayModel(self.profile, seed=rank)
        torch.manual_seed(0)
        return zoo.build_model(self.name)

    def loss_of(self, model: nn.Module, rank: int, device: torch.device) -> Callable[[], torch.Tensor]:
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
    on_progress: Callable[[int, int], None] | None = None,
) -> BenchResult:
    """Measures `methods` on the emulated cluster, in one run."""
    check_methods(list(methods))
    if rounds < 1:
        raise UsageError(f"steps is {rounds}: a bench needs at least one")

    shaped = why_not_shaped() is None
    answers = launch(
        spec,
        lambda rank: _measure(rank, workload, methods, rounds, bucket_mb),
        deadline_s=timeout_s,
        on_event=reported_to(on_progress),
        shaped=shaped,
    )
    turns = combine([answer["record"] for answer in answers])
    about = [answer["about"] for answer in answers]
    rows = [_row(method, turns, about, shaped) for method in methods]
    return BenchResult(
        cluster=Cluster.of(spec, shaped),
        model=Model(workload.name, answers[0]["parameters"], answers[0]["gradient_bytes"]),
        rows=rows,
        rounds=rounds,
        batch=None if workload.profile is not None else workload.batch,
        torch=str(torch.__version__),
        syncline=__version__,
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )


def _measure(
    rank: Rank, workload: Workload, methods: Sequence[str], rounds: int, bucket_mb: float | None
) -> dict[str, Any]:
    """On one rank."""
    if rank.spec.device == "cuda":
        torch.cuda.set_device(rank.device)
    rank.init_process_group()
    wrapping = Wrapping(rank.device, bucket_mb)
    prepared: dict[str, Prepared] = {}
    contenders = []
    for method in methods:
        for prepare in METHODS[method][1]:
            net = workload.build(rank.rank).to(rank.device)
            one = prepare(net, wrapping)
            name = f"{method} {one.setting}".strip()
            prepared[name] = one
            contenders.append(Contender(name, _training_step(one.model, workload, rank)))
    record = take_turns(rank, contenders, warmup=WARMUP, rounds=rounds)
    about = {
        name: {
            "method": one.method,
            "setting": one.setting,
            "sent": one.sent_bytes(),
            "predicted": one.predicted_sent_bytes(rank.world_size),
        }
        for name, one in prepared.items()
    }
    parameters = [p for p in next(iter(prepared.values())).model.parameters() if p.requires_grad]
    return {
        "record": record,
        "about": about,
        "parameters": sum(p.numel() for p in parameters),
        "gradient_bytes": sum(p.numel() * p.element_size() for p in parameters),
    }


def _training_step(model: nn.Module, workload: Workload, rank: Rank) -> Callable[[], None]:
    loss_of = workload.loss_of(model, rank.rank, rank.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        loss_of().backward()
        optimizer.step()

    return step


def _row(method: str, turns: dict[str, Turns], about: list[dict[str, Any]], shaped: bool) -> Row:
    """Of the method's fastest variant."""
    variants = [name for name in turns if about[0][name]["method"] == method]
    best = min(variants, key=lambda name: turns[name].quartiles.median)
    times = turns[best].quartiles
    ratio = turns[best].ratio_to(turns["ddp"]) if "ddp" in turns else None
    return Row(
        method=method,
        step_ms=times.median * 1000,
        step_ms_low=times.low * 1000,
        step_ms_high=times.high * 1000,
        sent_bytes=_largest(answer[best]["sent"] for answer in about),
        predicted_ms=None,
        predicted_sent_bytes=_largest(answer[best]["predicted"] for answer in about),
        wire_bytes=round(turns[best].wire_bytes) if shaped else None,
        vs_ddp=ratio.median if ratio else None,
        vs_ddp_low=ratio.low if ratio else None,
        vs_ddp_high=ratio.high if ratio else None,
        setting=about[0][best]["setting"],
    )


def _largest(values: Any) -> int | None:
    known = [value for value in values if value is not None]
    return max(known) if known else None
