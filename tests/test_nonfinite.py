"""A step that is not finite on one rank: through every exchange it costs no message more, leaves no trace in what is
kept, and means to a GradScaler what it means in plain DDP; also if earlier buckets of the step are exchanged already.

Over real ranks. That each exchange sees what is not finite is a law (`test_laws.py`); that whole trainings with an
overflow equal plain DDP's is in `test_ddp_semantics.py`.
"""

from __future__ import annotations

import dataclasses
import os
import time
import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import syncline
from ddp_helpers import Mlp, batch, on_ranks, seeded
from exchanges import ErrorFeedback
from syncline.cluster import Rank
from syncline.exchange import EXCHANGES, Exchange, Hierarchical, OkTopk

RANKS, BAD_RANK = 4, 3
WIDTH = 32
BUCKET_MB = 0.004
SCALE = 256.0


@dataclass(frozen=True)
class Bad:
    """A step in which one gradient is not finite."""

    bucket: str
    parameter: str
    culprit: float


STEPS = 7
BAD_STEPS = {3: Bad("first bucket", "last.weight", torch.nan), 5: Bad("last bucket", "first.weight", -torch.inf)}
"""After those in which DDP rebuilds its buckets, each between two good steps."""


def made(name: str) -> Exchange:
    """As the laws have it, dense enough for small buckets to be sparse, on two hosts of two."""
    exchange: Any = EXCHANGES[name]()
    if isinstance(exchange, Hierarchical):
        across: Any = exchange.across
        across = dataclasses.replace(across, density=0.2) if hasattr(across, "density") else across
        return dataclasses.replace(exchange, across=across, levels=(2, 2))
    return dataclasses.replace(exchange, density=0.2) if hasattr(exchange, "density") else exchange  # type: ignore[no-any-return]


VARIANTS: dict[str, Exchange] = {
    **{name: made(name) for name in EXCHANGES},
    "oktopk+momentum": OkTopk(density=0.2, momentum=0.5),
    "hierarchical+oktopk+momentum": Hierarchical(across=OkTopk(density=0.2, momentum=0.5), levels=(2, 2)),
}
LAYERWISE: dict[str, Exchange] = {**VARIANTS, "feedback": ErrorFeedback()}


@dataclass
class Seen:
    """Of one training."""

    parameters: list[dict[str, Tensor]] = field(default_factory=list)
    """After each step."""
    kept: list[dict[str, Tensor]] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    found: list[bool] = field(default_factory=list)
    """Whether the scaler saw something that is not finite."""
    sent: list[dict[str, int]] = field(default_factory=list)
    messages: list[int] = field(default_factory=list)
    """Collectives of every group there is, in each step."""
    in_order: bool = True
    """Whether the first bucket had been exchanged when the last one was ready, in all bad steps."""


def spoil(culprit: float, rank: int) -> Any:
    """→ a gradient hook: one entry of one rank."""

    def hook(gradient: Tensor) -> Tensor:
        spoiled = gradient.clone()
        if rank == BAD_RANK:
            spoiled.view(-1)[gradient.numel() // 2] = culprit
        return spoiled

    return hook


def collectives() -> int:
    return sum(group._get_sequence_number_for_group() for group in dist.distributed_c10d._world.pg_map)


def kept_by(holder: Any) -> dict[str, Tensor]:
    tensors = holder.state_dict()["tensors"]
    return {f"{name}/{kind}": tensor.clone() for name, kinds in tensors.items() for kind, tensor in kinds.items()}


def trained(rank: int, exchange: Exchange | None, *, without_bad_steps: bool = False) -> Seen:
    """Through DDP, with a GradScaler. If bad steps are left out, only the scale moves as if they had been there."""
    model = DDP(seeded(lambda: Mlp(WIDTH)), bucket_cap_mb=BUCKET_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=1000)
    handle = None if exchange is None else syncline.attach(model, exchange, scaler=scaler)
    net = model.module
    seen = Seen()
    for number in range(STEPS):
        before = collectives()
        hooks = []
        optimizer.zero_grad()
        bad = BAD_STEPS.get(number)
        if bad is not None and without_bad_steps:
            scaler.update(scaler.get_scale() / 2)
            continue
        if bad is not None:
            hooks.append(net.get_parameter(bad.parameter).register_hook(spoil(bad.culprit, rank)))
        if number >= min(BAD_STEPS) and handle is not None:
            hooks.append(net.first.weight.register_hook(lambda _: wait_for_first_bucket(handle)))
        scaler.scale(model(batch(rank, number, 8, WIDTH)).square().mean()).backward()
        scaler.unscale_(optimizer)
        seen.found.append(any(bool(t) for t in scaler._found_inf_per_device(optimizer).values()))
        scaler.step(optimizer)
        scaler.update()
        for hook in hooks:
            hook.remove()
        seen.messages.append(collectives() - before)
        seen.scales.append(scaler.get_scale())
        seen.parameters.append({name: p.detach().clone() for name, p in net.named_parameters()})
        if handle is not None:
            stats = handle.stats()
            seen.kept.append(kept_by(handle))
            seen.sent.append(stats.sent_bytes)
            if bad is not None:
                seen.in_order &= stats.buckets[0].end_s <= stats.buckets[-1].ready_s and len(stats.buckets) > 1
    if handle is not None:
        handle.detach()
    return seen


def wait_for_first_bucket(handle: syncline.Handle) -> None:
    """So that what comes last meets a step of which something has been exchanged."""
    end_s = time.monotonic() + 20
    while time.monotonic() < end_s:
        jobs = handle._engine._step.jobs
        if jobs and jobs[0].marks.seconds() is not None:
            return
        os.sched_yield()
    raise AssertionError("the first bucket was not exchanged before the last was ready")


def same(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.fixture(scope="module")
def through_ddp() -> list[dict[str, list[str]]]:
    """What is wrong, by rank and exchange. One launch for all: starting ranks is most of the time."""

    def main(rank: Rank) -> dict[str, list[str]]:
        plain = trained(rank.rank, None)
        return {name: wrong_in_ddp(rank.rank, exchange, plain) for name, exchange in VARIANTS.items()}

    return on_ranks(RANKS, main)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_step_that_is_not_finite_leaves_no_trace_and_costs_nothing_more(
    name: str, through_ddp: list[dict[str, list[str]]]
) -> None:
    assert [found[name] for found in through_ddp] == [[]] * RANKS


def wrong_in_ddp(rank: int, exchange: Exchange, plain: Seen) -> list[str]:
    seen, clean = trained(rank, exchange), trained(rank, exchange, without_bad_steps=True)
    checks = {
        "its buckets were not exchanged one after the other": seen.in_order,
        "other scales than in plain DDP": seen.scales == plain.scales,
        "the scaler saw something else than in plain DDP": seen.found == plain.found
        and seen.found == [number in BAD_STEPS for number in range(STEPS)],
    }
    if exchange.keeps and not (isinstance(exchange, Hierarchical) and rank % 2):  # only leaders keep something
        checks["nothing was kept, so nothing is tested"] = any(bool(t.any()) for t in seen.kept[-1].values())
    for earlier, (number, bad) in enumerate(BAD_STEPS.items()):
        without = number - earlier  # the number of the next step in the training without bad steps
        of_step = {
            "other bytes than in a finite step": seen.sent[number] == seen.sent[number - 1],
            "more messages than in a finite step": seen.messages[number] == seen.messages[number - 1] > 0,
            "what is kept has changed": same(seen.kept[number], seen.kept[number - 1]),
            "parameters have changed": same(seen.parameters[number], seen.parameters[number - 1]),
            "the next step is another than without it": same(seen.parameters[number + 1], clean.parameters[without]),
            "something else is kept than without it": same(seen.kept[number + 1], clean.kept[without]),
            "the next step did nothing": not same(seen.parameters[number + 1], seen.parameters[number]),
        }
        checks |= {f"{bad.bucket}: {what}": holds for what, holds in of_step.items()}
    return [what for what, holds in checks.items() if not holds]


@pytest.fixture(scope="module")
def layer_by_layer() -> list[dict[str, list[str]]]:
    def main(rank: Rank) -> dict[str, list[str]]:
        return {name: wrong_layer_by_layer(rank.rank, exchange) for name, exchange in LAYERWISE.items()}

    return on_ranks(RANKS, main)


@pytest.mark.parametrize("name", LAYERWISE)
def test_layer_by_layer_a_bucket_that_is_not_finite_stays_as_it_was(
    name: str, layer_by_layer: list[dict[str, list[str]]]
) -> None:
    """The other layers take their step: some had, when the last bucket came."""
    assert [found[name] for found in layer_by_layer] == [[]] * RANKS


def wrong_layer_by_layer(rank: int, exchange: Exchange) -> list[str]:
    inner = exchange.across if isinstance(exchange, Hierarchical) else exchange
    momentum = 0.0 if getattr(inner, "momentum", 0.0) else 0.9
    trainer = syncline.Layerwise(
        seeded(lambda: Mlp(WIDTH)),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=momentum),
        exchange,
        bucket_mb=BUCKET_MB,
    )
    seen = Seen()
    for number in range(STEPS):
        before, hook = collectives(), None
        if (bad := BAD_STEPS.get(number)) is not None:
            hook = trainer.module.get_parameter(bad.parameter).register_hook(spoil(bad.culprit, rank))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # rank 0 tells what was dropped
            trainer(batch(rank, number, 8, WIDTH)).square().mean().backward()
        if hook is not None:
            hook.remove()
        seen.messages.append(collectives() - before)
        seen.sent.append(trainer.stats().sent_bytes)
        seen.kept.append(kept_by(trainer))
        seen.parameters.append({**weights_and_velocities(trainer)})
    everyone = torch.cat([tensor.view(-1) for tensor in seen.parameters[-1].values()])
    gathered = [torch.empty_like(everyone) for _ in range(RANKS)]
    dist.all_gather(gathered, everyone)
    checks = {
        "not one bucket was dropped in each bad step": trainer.dropped == len(BAD_STEPS),
        "not finite": all(bool(torch.isfinite(t).all()) for t in (seen.parameters[-1] | seen.kept[-1]).values()),
        "ranks differ": all(torch.equal(one, everyone) for one in gathered),
    }
    for number, bad in BAD_STEPS.items():
        (dropped,) = [b for b in trainer._pipeline.buckets if bad.parameter in {piece.name for piece in b.pieces}]
        names = {piece.name for piece in dropped.pieces}
        weights = [part(seen.parameters[step], names, True) for step in (number - 1, number, number + 1)]
        others = [part(seen.parameters[step], names, False) for step in (number - 1, number)]
        kept = [part(seen.kept[step], names, True) for step in (number - 1, number)]
        of_step = {
            "other bytes than in a finite step": seen.sent[number] == seen.sent[number - 1],
            "more messages than in a finite step": seen.messages[number] == seen.messages[number - 1] > 0,
            "its layers have changed": same(weights[0], weights[1]),
            "what is kept of them has changed": same(*kept),
            "other layers did not take their step": bool(others[0]) and not same(*others),
            "its layers did not take the next step": not same(weights[1], weights[2]),
        }
        checks |= {f"{bad.bucket}: {what}": holds for what, holds in of_step.items()}
    trainer.close()
    return [what for what, holds in checks.items() if not holds]


def weights_and_velocities(trainer: syncline.Layerwise) -> dict[str, Tensor]:
    found = {}
    for name, parameter in trainer.module.named_parameters():
        found[name] = parameter.detach().clone()
        velocity = trainer.optimizer.state[parameter].get("momentum_buffer")
        if velocity is not None:
            found[f"{name}/velocity"] = velocity.clone()
    return found


def part(tensors: dict[str, Tensor], names: set[str], inside: bool) -> dict[str, Tensor]:
    """Of these parameters, or of all others."""
    return {key: tensor for key, tensor in tensors.items() if (key.split("/")[0] in names) == inside}
