"""Train on real digits over emulated slow links, with plain DDP and with `syncline.tune`.

`tune` measures, plans, and applies its plan or keeps plain DDP: once with lossless exchanges only, and once with bf16
allowed. Every method trains its own model from the same weights on the same batches, and they take turns step by step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from syncline.bench.methods import Wrapping
from syncline.bench.rounds import Contender, OnProgress, combine, reports_to, take_turns, training_step
from syncline.bench.run import cluster_of, network_of
from syncline.cluster import ClusterSpec, Rank, launch, why_not_shaped
from syncline.measure.probe import probe
from syncline.models import zoo
from syncline.models.data import Digits, digits
from syncline.records.bench_result import DemoResult, DemoRow, Tuning
from syncline.records.network import Network
from syncline.tuning.tune import tune

MODEL = "cnn"
CONTENDERS = ("nosync", "ddp", "tune", "tune-bf16")
ALLOWED = {"tune": (), "tune-bf16": ("bf16",)}
TUNE_S = 25.0
"""Time budget of one call of `tune`. The first call spends most of it on probing; the second reuses the network."""
BATCH = 32
LEARNING_RATE, MOMENTUM = 0.02, 0.9


def run_demo(
    spec: ClusterSpec, steps: int, *, tune_s: float = TUNE_S, on_progress: OnProgress | None = None
) -> DemoResult:
    """Train with every method of `CONTENDERS` and compare their times, losses and weights."""
    data = digits()  # loaded once, before the ranks are forked
    shaped = why_not_shaped() is None
    main = functools.partial(_train, data=data, steps=steps, tune_s=tune_s)
    answers = launch(spec, main, deadline_s=900.0, on_event=reports_to(on_progress), shaped=shaped)
    turns, first = combine([answer["record"] for answer in answers]), answers[0]
    rows = [
        DemoRow(
            method=method,
            **turns[method].quartiles.fields("step_ms", 1e3),
            vs_ddp=turns[method].ratio_to(turns["ddp"]).median,
            wire_bytes=round(turns[method].wire_bytes) if shaped else None,
            held_out_accuracy=first["accuracy"].get(method),
            difference=first["difference"].get(method),
            losses=[sum(step) / len(step) for step in zip(*(a["losses"][method] for a in answers), strict=True)],
        )
        for method in CONTENDERS
    ]
    epochs = steps * BATCH * spec.world_size / len(data.train_images)
    tunings = msgspec.convert(first["tunings"], dict[str, Tuning])
    network = network_of(first["network"], spec, shaped)
    said, cluster = first["said"], cluster_of(spec, shaped)
    return DemoResult(cluster, steps, epochs, rows, said=said, network=network, tunings=tunings)


def _train(rank: Rank, data: Digits, steps: int, tune_s: float) -> dict[str, Any]:
    rank.init_process_group()
    models: dict[str, nn.Module] = {}
    losses: dict[str, list[float]] = {method: [] for method in CONTENDERS}
    contenders, said, tunings = [], {}, {}
    network: Network | None = None
    own = slice(rank.rank * BATCH, (rank.rank + 1) * BATCH)

    def tuned_step(model: nn.Module) -> None:
        zoo.loss(model(data.train_images[own]), data.train_labels[own]).backward()

    for method in CONTENDERS:
        torch.manual_seed(0)
        net = zoo.build_model(MODEL)
        models[method] = model = net if method == "nosync" else Wrapping(rank.device).ddp(net)
        if method in ALLOWED:
            # Probe every kind of collective, because the second tuning reuses the network and allows more.
            network = network or probe(budget_s=0.5 * tune_s)
            tuned = tune(model, tuned_step, allow=ALLOWED[method], budget_s=tune_s, network=network, quiet=True)
            said[method], tunings[method] = tuned.describe(), Tuning(tuned.profile, tuned.plan)
        contenders.append(Contender(method, _training_step(rank, model, data, losses[method])))
    record = take_turns(rank, contenders, warmup=0, rounds=steps)
    synchronised = {method: model for method, model in models.items() if method != "nosync"}
    plain = _weights(models["ddp"])
    return {
        "record": record,
        "said": said,
        "network": msgspec.to_builtins(network) if rank.rank == 0 else None,
        "tunings": msgspec.to_builtins(tunings) if rank.rank == 0 else {},
        "losses": losses,
        "accuracy": {method: _accuracy(model, data) for method, model in synchronised.items()},
        "difference": {method: (_weights(model) - plain).abs().max().item() for method, model in synchronised.items()},
    }


def _training_step(rank: Rank, model: nn.Module, data: Digits, losses: list[float]) -> Callable[[], None]:
    batches = torch.Generator().manual_seed(1)

    def loss_of() -> Tensor:
        # Every rank draws the same batches and takes its own row.
        drawn = torch.randint(len(data.train_images), (rank.world_size, BATCH), generator=batches)[rank.rank]
        loss = zoo.loss(model(data.train_images[drawn]), data.train_labels[drawn])
        losses.append(loss.item())
        return loss

    return training_step(model, loss_of, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM))


def _accuracy(model: nn.Module, data: Digits) -> float:
    inner = getattr(model, "module", model).eval()
    with torch.no_grad():
        right = inner(data.held_out_images).argmax(-1) == data.held_out_labels
    return float(right.float().mean())


def _weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
