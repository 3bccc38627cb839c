"""Train on real digits over emulated slow links, with plain DDP and with `syncline.tune`.

`tune` measures, plans, and applies its plan or keeps plain DDP: once with lossless exchanges only, and once with bf16
allowed. Every method trains its own model from the same weights on the same batches, and they take turns step by step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from syncline.bench.methods import Wrapping
from syncline.bench.rounds import Contender, OnProgress, combine, reported_to, take_turns
from syncline.bench.run import cluster_of, network_of
from syncline.cluster import ClusterSpec, Rank, launch
from syncline.cluster.isolation import why_not_shaped
from syncline.measure.probe import probe
from syncline.models import zoo
from syncline.models.data import Digits, digits
from syncline.records.bench_result import DemoResult, DemoRow, Tuning
from syncline.records.network import Network
from syncline.tuning.tune import Tuned, tune

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
    answers = launch(
        spec,
        lambda rank: _train(rank, data, steps, tune_s),
        deadline_s=900.0,
        on_event=reported_to(on_progress),
        shaped=shaped,
    )
    turns = combine([answer["record"] for answer in answers])
    rows = []
    for method in CONTENDERS:
        losses = [answer["losses"][method] for answer in answers]
        rows.append(
            DemoRow(
                method=method,
                **turns[method].step_ms(),
                vs_ddp=turns[method].ratio_to(turns["ddp"]).median,
                wire_bytes=round(turns[method].wire_bytes) if shaped else None,
                held_out_accuracy=answers[0]["accuracy"].get(method),
                difference=answers[0]["difference"].get(method),
                losses=[sum(ranks) / len(ranks) for ranks in zip(*losses, strict=True)],
            )
        )
    first = answers[0]
    return DemoResult(
        cluster_of(spec, shaped),
        steps,
        steps * BATCH * spec.world_size / len(data.train_images),
        rows,
        said=first["said"],
        network=network_of(first["network"], spec, shaped),
        tunings=msgspec.convert(first["tunings"], dict[str, Tuning]),
    )


def _train(rank: Rank, data: Digits, steps: int, tune_s: float) -> dict[str, Any]:
    rank.init_process_group()
    models: dict[str, nn.Module] = {}
    losses: dict[str, list[float]] = {method: [] for method in CONTENDERS}
    said, tunings = {}, {}
    network: Network | None = None
    contenders = []
    for method in CONTENDERS:
        torch.manual_seed(0)
        net = zoo.build_model(MODEL)
        models[method] = model = net if method == "nosync" else Wrapping(rank.device).ddp(net)
        if method in ALLOWED:
            tuned = _tune(rank, model, data, ALLOWED[method], tune_s, network)
            network, said[method] = tuned.network, tuned.describe()
            tunings[method] = Tuning(tuned.profile, tuned.plan)
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


def _tune(
    rank: Rank, model: nn.Module, data: Digits, allow: tuple[str, ...], tune_s: float, network: Network | None
) -> Tuned:
    first = slice(rank.rank * BATCH, (rank.rank + 1) * BATCH)

    def step(model: nn.Module) -> None:
        zoo.loss(model(data.train_images[first]), data.train_labels[first]).backward()

    # Probe every kind of collective, because the second tuning reuses the network and allows more.
    links = probe(budget_s=0.5 * tune_s) if network is None else network
    return tune(model, step, allow=allow, budget_s=tune_s, network=links, quiet=True)


def _training_step(rank: Rank, model: nn.Module, data: Digits, losses: list[float]) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    batches = torch.Generator().manual_seed(1)

    def step() -> None:
        # Every rank draws the same batches and takes its own row.
        drawn = torch.randint(len(data.train_images), (rank.world_size, BATCH), generator=batches)[rank.rank]
        optimizer.zero_grad()
        loss = zoo.loss(model(data.train_images[drawn]), data.train_labels[drawn])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    return step


def _accuracy(model: nn.Module, data: Digits) -> float:
    inner = getattr(model, "module", model).eval()
    with torch.no_grad():
        right = inner(data.held_out_images).argmax(-1) == data.held_out_labels
    return float(right.float().mean())


def _weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
