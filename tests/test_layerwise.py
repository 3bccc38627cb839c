"""`Layerwise` gives the results of DDP with the same exchange, on real ranks over gloo."""

from __future__ import annotations

import contextlib
import copy
import gc
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

import syncline
from ddp_helpers import on_ranks
from syncline.cluster import Rank
from syncline.layerwise.layer_optimizer import state_bytes
from syncline.memory_meter import metered
from syncline.models import gpt, zoo

RANKS = 2


class Net(nn.Module):
    """A model with BatchNorm, a weight that is used twice, and layers of very different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(12, 24)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(24, 24), nn.BatchNorm1d(24), nn.ReLU()) for _ in range(3))
        )
        self.wide = nn.Linear(24, 200)
        self.narrow = nn.Linear(200, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inside = self.blocks(self.inward(x))
        inside = inside + self.narrow(F.relu(self.wide(inside)))
        return F.linear(inside, self.inward.weight.t())


def batch(rank: int, step: int, ranks: int = RANKS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(8, 12, generator=generator)
    return x, torch.sin(2 * x)


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Net()


def loss_of(model: Callable[[Tensor], Tensor], rank: int, step: int) -> Tensor:
    x, y = batch(rank, step)
    return F.mse_loss(model(x), y)


def as_ddp(rank: Rank, make: Callable[[Any], Optimizer], steps: int, exchange: Any = None, **ddp: Any) -> nn.Module:
    model = DDP(net(), **ddp)
    if exchange is not None:
        syncline.attach(model, exchange)
    optimizer = make(model.parameters())
    scheduler = CosineAnnealingLR(optimizer, 300)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, rank.rank, step).backward()
        optimizer.step()
        scheduler.step()
    return model.module


def as_layerwise(
    rank: Rank, make: Callable[[Any], Optimizer], steps: int, exchange: Any = None, **options: Any
) -> syncline.Layerwise:
    trainer = syncline.Layerwise(
        net(rank.rank), make, exchange, **options
    )  # other weights on each rank: those of rank 0 are used
    scheduler = CosineAnnealingLR(trainer.optimizer, 300)
    for step in range(steps):
        loss_of(trainer, rank.rank, step).backward()
        scheduler.step()
    return trainer


def distance(one: nn.Module, other: nn.Module) -> float:
    """Return the largest difference of any weight or buffer, relative to the largest value of its tensor."""
    return max(
        float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-6))
        for (_, a), (_, b) in zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    )


def same_everywhere(module: nn.Module) -> bool:
    """Return whether all ranks have the same parameters, bit for bit."""
    flat = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flat)
    return all(torch.equal(flat, other) for other in everyone)


def momentum(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3, nesterov=True)


def plain_sgd(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.01)


def adam(parameters: Any) -> Optimizer:
    return AdamW(parameters, lr=0.003)


@pytest.mark.parametrize("make", [momentum, adam])
def test_a_hundred_steps_are_those_of_ddp(make: Callable[[Any], Optimizer]) -> None:
    def main(rank: Rank) -> tuple[float, bool, int]:
        plain = as_ddp(rank, make, 100)
        trainer = as_layerwise(rank, make, 100, bucket_mb=0.01)
        return distance(trainer.module, plain), same_everywhere(trainer.module), len(trainer._pipeline.buckets)

    for apart, same, buckets in on_ranks(RANKS, main):
        assert apart < 1e-4
        assert same
        assert buckets > 3


@pytest.mark.parametrize(
    "exchange",
    [syncline.OkTopk(density=0.05, warmup=2), syncline.Hierarchical(levels=(2, 1)), syncline.Dense(wire="bf16")],
    ids=["oktopk", "hierarchical", "bf16"],
)
def test_steps_are_those_of_ddp_with_the_same_exchange(exchange: syncline.Exchange) -> None:
    def main(rank: Rank) -> tuple[list[float], bool, float]:
        # One bucket on both sides: what is selected is selected per bucket. Its order is settled after warm-up.
        model, apart = DDP(net(), bucket_cap_mb=100), []
        handle = syncline.attach(model, exchange)
        optimizer = momentum(model.parameters())
        trainer = syncline.Layerwise(net(), momentum, exchange, bucket_mb=100)
        for step in range(30):
            optimizer.zero_grad()
            loss_of(model, rank.rank, step).backward()
            optimizer.step()
            loss_of(trainer, rank.rank, step).backward()
            apart.append(distance(trainer.module, model.module))
        kept = trainer.state_dict()["tensors"]
        theirs = handle.state_dict()["tensors"]
        assert kept.keys() == theirs.keys()
        residual = max(
            (float((kept[name]["residual"] - theirs[name]["residual"]).abs().max()) for name in kept), default=0.0
        )
        assert trainer.stats().sent_bytes == trainer.predicted_sent_bytes()
        return apart, same_everywhere(trainer.module), residual

    for apart, same, residual in on_ranks(RANKS, main):
        assert max(apart) < 1e-5
        assert same
        assert residual < 1e-6


def test_training_resumes_from_a_checkpoint_bit_for_bit() -> None:
    def main(rank: Rank) -> list[bool]:
        same = []
        for make in (momentum, adam):
            options: dict[str, Any] = {"bucket_mb": 0.01}
            straight = as_layerwise(rank, make, 8, syncline.OkTopk(density=0.05), **options)
            first = as_layerwise(rank, make, 4, syncline.OkTopk(density=0.05), **options)
            again = syncline.Layerwise(net(7), make, syncline.OkTopk(density=0.05), **options)
            scheduler = CosineAnnealingLR(again.optimizer, 300)
            again.load_state_dict(first.state_dict())
            scheduler.last_epoch = 4
            for step in range(4, 8):
                loss_of(again, rank.rank, step).backward()
                scheduler.step()
            one, other = straight.state_dict(), again.state_dict()
            same.append(
                all(torch.equal(one["model"][name], other["model"][name]) for name in one["model"])
                and all(
                    torch.equal(kinds[kind], other["tensors"][name][kind])
                    for name, kinds in one["tensors"].items()
                    for kind in kinds
                )
            )
            ordinary = net()
            ordinary.load_state_dict(again.module.state_dict())
        return same

    assert on_ranks(RANKS, main) == [[True, True]] * RANKS


def test_buckets_that_are_not_finite_are_dropped_on_all_ranks_with_a_warning() -> None:
    def main(rank: Rank) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, exchange in (("dense", syncline.Dense()), ("oktopk", syncline.OkTopk(density=0.05))):
            trainer = as_layerwise(rank, momentum, 3, exchange, bucket_mb=0.02)
            before = copy.deepcopy(trainer.state_dict())
            hook = trainer.module.wide.weight.register_hook(  # type: ignore[union-attr]
                lambda gradient: gradient * float("nan") if rank.rank == 1 else gradient
            )
            with pytest.warns(UserWarning, match="not finite") if rank.rank == 0 else contextlib.nullcontext():
                loss_of(trainer, rank.rank, 3).backward()
            hook.remove()
            after = copy.deepcopy(trainer.state_dict())
            moved = {n for n in before["model"] if not torch.equal(before["model"][n], after["model"][n])}
            kept = {
                n
                for n, kinds in after["tensors"].items()
                for kind in kinds
                if not torch.equal(kinds[kind], before["tensors"][n][kind])
            }
            wide = dict(trainer.module.named_parameters())["wide.weight"]
            loss_of(trainer, rank.rank, 4).backward()
            finite = all(bool(torch.isfinite(p).all()) for p in trainer.module.parameters())
            found[name] = {
                "stayed": "wide.weight" not in moved and "wide.weight" not in kept,
                "others moved": "narrow.weight" in moved and "inward.weight" in moved,
                "velocity stayed": torch.equal(*(velocity_of(state, trainer, wide) for state in (before, after))),
                "dropped": trainer.dropped,
                "goes on": finite and same_everywhere(trainer.module),
            }
        return found

    for found in on_ranks(RANKS, main):
        for name, seen in found.items():
            assert seen == {
                "stayed": True, "others moved": True, "velocity stayed": True, "dropped": 1, "goes on": True,
            }, name  # fmt: skip


def velocity_of(state: dict[str, Any], trainer: syncline.Layerwise, parameter: nn.Parameter) -> Tensor:
    """Return the velocity of a parameter from a state dict."""
    place = [id(p) for group in trainer.optimizer.param_groups for p in group["params"]].index(id(parameter))
    velocity: Tensor = state["optimizer"]["state"][place]["momentum_buffer"]
    return velocity


def test_accumulation_clipping_and_unused_parameters_are_as_in_ddp() -> None:
    class Branched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.common, self.rare, self.never = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 12)

        def forward(self, x: Tensor, rare: bool) -> Tensor:
            return self.rare(self.common(x)) if rare else self.common(x)

    def main(rank: Rank) -> dict[str, float]:
        found = {}
        model, optimizer = DDP(net()), None
        optimizer = momentum(model.parameters())
        trainer = syncline.Layerwise(net(), momentum, bucket_mb=0.002)
        for step in range(4):
            optimizer.zero_grad()
            with model.no_sync():
                loss_of(model, rank.rank, 2 * step).backward()
            loss_of(model, rank.rank, 2 * step + 1).backward()
            optimizer.step()
            with trainer.no_sync():
                loss_of(trainer, rank.rank, 2 * step).backward()
            loss_of(trainer, rank.rank, 2 * step + 1).backward()
        found["accumulated"] = distance(trainer.module, model.module)

        model = DDP(net())
        optimizer = momentum(model.parameters())
        trainer = syncline.Layerwise(net(), momentum, bucket_mb=0.002, clip_norm=0.1)
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, rank.rank, step).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            loss_of(trainer, rank.rank, step).backward()
        found["clipped"] = distance(trainer.module, model.module)

        torch.manual_seed(0)
        branched = Branched()
        model = DDP(copy.deepcopy(branched), find_unused_parameters=True)
        optimizer = momentum(model.parameters())
        trainer = syncline.Layerwise(copy.deepcopy(branched), momentum, find_unused_parameters=True)
        for step in range(6):
            x, y = batch(rank.rank, step)
            rare = step % 2 == 0 and rank.rank == 0
            optimizer.zero_grad()
            F.mse_loss(model(x, rare), y).backward()
            optimizer.step()
            F.mse_loss(trainer(x, rare), y).backward()
        found["unused"] = distance(trainer.module, model.module)
        return found

    for found in on_ranks(RANKS, main):
        assert max(found.values()) < 1e-5, found


def test_an_interrupted_backward_is_reported_and_cannot_be_saved() -> None:
    class Trap(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            raise RuntimeError("caught in the trap")

    def main(rank: Rank) -> list[str]:
        said = []
        for place in ("early", "late"):
            trainer = syncline.Layerwise(net(), momentum, bucket_mb=0.002)
            x, y = batch(rank.rank, 0)
            inner = trainer.module
            with pytest.raises(RuntimeError, match="caught in the trap"):
                inside = Trap.apply(inner.inward(x)) if place == "late" else inner.inward(x)
                inside = inner.blocks(inside)
                inside = inside + inner.narrow(F.relu(inner.wide(inside)))
                out = F.linear(inside, inner.inward.weight.t())
                F.mse_loss(Trap.apply(out) if place == "early" else out, y).backward()
            for call in ("backward", "state"):
                try:
                    _ = trainer.state_dict() if call == "state" else loss_of(trainer, rank.rank, 1).backward()
                    said.append(f"{place}: went on")
                except syncline.ExchangeError as error:
                    said.append(f"{place}: {error}")
            trainer.close()
        return said

    for early, early_state, late, late_state in on_ranks(RANKS, main):
        assert early == "early: went on"  # nothing had been exchanged
        assert early_state == "early: went on"
        assert "Some layers have taken that step and others have not: resume from a checkpoint" in late
        assert "failed" in late_state or "taken that step" in late_state


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"exchange": 3}, "is not an exchange"),
        ({"optimizer": 3}, "pass an optimizer, or a function that creates one"),
        ({"optimizer": lambda p: None}, "optimizer is a NoneType: pass an optimizer"),
        ({"optimizer": lambda p: SGD(list(p)[:1], lr=1.0)}, "the optimizer does not have it"),
        ({"optimizer": torch.optim.LBFGS}, "cannot step layer by layer"),
        ({"bucket_mb": 0}, "bucket_mb is 0"),
        ({"residual": "moon"}, "residual is 'moon'"),
        ({"activations": "forget"}, "activations is 'forget'"),
        ({"activations": 3}, "activations is 3"),
        ({"memory_budget": "8GiB"}, "step="),
        ({"memory_budget": "8 potatoes", "step": len}, "not a size of memory"),
        ({"exchange": syncline.OkTopk(momentum=0.9)}, "both have momentum"),
    ],
)
def test_invalid_arguments_are_refused_with_a_reason(changes: dict[str, Any], told: str, one_rank: None) -> None:
    options: dict[str, Any] = {"optimizer": momentum, **changes}
    with pytest.raises(syncline.UsageError, match=told):
        syncline.Layerwise(net(), **options)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (plain_sgd, 0),
        (momentum, 1),
        (adam, 2),
        (torch.optim.Adam, 2),
        (torch.optim.RMSprop, 1),
        (torch.optim.Adagrad, 1),
    ],
)
def test_the_state_size_of_an_optimizer_is_measured(make: Callable[[Any], Optimizer], words: int) -> None:
    assert state_bytes(make([nn.Parameter(torch.zeros(3))])) == pytest.approx(4 * words)


def test_half_precision_autocast_and_ddp_are_refused(one_rank: None) -> None:
    trainer = syncline.Layerwise(net(), momentum)
    with (
        torch.autocast("cpu", torch.float16),
        pytest.raises(syncline.UsageError, match="GradScaler would skip a step only after some layers"),
    ):
        loss_of(trainer, 0, 0)
    trainer.close()
    with pytest.raises(syncline.UsageError, match="not a DistributedDataParallel"):
        syncline.Layerwise(DDP(net()), momentum)


def test_blocks_that_are_recomputed_change_nothing_but_memory(one_rank: None) -> None:
    """Dropout repeats its random numbers, and BatchNorm counts each batch once."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm, self.drop = nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Dropout(0.3)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.drop(F.relu(self.norm(self.layer(x))))

    found = {}
    for way in ("keep", "recompute", "park", "offload"):
        torch.manual_seed(0)
        trainer = syncline.Layerwise(nn.Sequential(*(Block() for _ in range(3))), momentum, activations=way)
        for step in range(5):
            loss_of(trainer, 0, step).backward()
        found[way] = trainer.module.state_dict()
        trainer.close()
        assert "forward" not in trainer.module[0].__dict__
    for way, state in found.items():
        for name, tensor in state.items():
            assert torch.equal(tensor, found["keep"][name]), (way, name)


def test_memory_stays_constant_and_closing_frees_it() -> None:
    def main(rank: Rank) -> tuple[int, int, int, bool]:
        with metered(torch.device("cpu")) as meter:
            model = nn.Sequential(nn.Linear(12, 100), nn.Linear(100, 12))
            start = meter.now()
            trainer = syncline.Layerwise(model, plain_sgd, syncline.OkTopk(density=0.2))
            after = {}
            for step in range(100):
                loss_of(trainer, rank.rank, step).backward()
                after[step] = meter.now()
            kept = bool(trainer.state_dict()["tensors"])
            trainer.close()
            del trainer
            gc.collect()
            return after[4], after[99], meter.now() - start, kept

    for early, late, left, kept in on_ranks(RANKS, main):
        assert early == late
        assert left == 0
        assert kept


def test_residuals_are_not_lost_if_a_parameter_is_unused_or_another_is_not_finite() -> None:
    """Applied updates plus residuals are conserved: for unused layers, and beside a dropped layer with clip_norm."""

    class Branched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.common, self.rare = nn.Linear(12, 12), nn.Linear(12, 12)

        def forward(self, x: Tensor, rare: bool) -> Tensor:
            return self.rare(self.common(x)) if rare else self.common(x)

    def account(trainer: syncline.Layerwise, name: str) -> Tensor:
        """Return the residuals of all ranks minus w/lr: with plain SGD, the sum of all gradients so far."""
        state = trainer.state_dict()
        waits = state["tensors"][name]["residual"].double()
        dist.all_reduce(waits)
        return waits - dict(trainer.module.named_parameters())[name].detach().double() / 0.01

    def main(rank: Rank) -> dict[str, float]:
        found = {}
        torch.manual_seed(0)
        sparse = syncline.OkTopk(density=0.2)
        trainer = syncline.Layerwise(Branched(), plain_sgd, sparse, find_unused_parameters=True, bucket_mb=0.0006)
        for step in range(4):
            x, y = batch(rank.rank, step)
            F.mse_loss(trainer(x, True), y).backward()
        before = account(trainer, "rare.weight")
        x, y = batch(rank.rank, 9)
        F.mse_loss(trainer(x, False), y).backward()
        found["unused"] = float((account(trainer, "rare.weight") - before).abs().max())

        trainer = syncline.Layerwise(net(), plain_sgd, sparse, clip_norm=1e6, bucket_mb=0.02)
        for step in range(3):
            loss_of(trainer, rank.rank, step).backward()
        before = account(trainer, "narrow.weight")
        copied = copy.deepcopy(trainer.module)
        loss_of(copied, rank.rank, 3).backward()
        computed = copied.narrow.weight.grad.double() / rank.world_size
        dist.all_reduce(computed)
        hook = trainer.module.wide.weight.register_hook(lambda gradient: gradient * float("nan"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss_of(trainer, rank.rank, 3).backward()
        hook.remove()
        found["dropped beside it"] = float((account(trainer, "narrow.weight") - before - computed).abs().max())
        return found

    for found in on_ranks(RANKS, main):
        assert max(found.values()) < 1e-3, found


def test_ranks_that_load_different_states_are_refused_and_load_nothing() -> None:
    def main(rank: Rank) -> list[str]:
        said = []
        trainer = as_layerwise(rank, momentum, 3, bucket_mb=0.01)
        saved = copy.deepcopy(trainer.state_dict())
        loss_of(trainer, rank.rank, 3).backward()
        newer = copy.deepcopy(trainer.state_dict())
        broken = {**saved, "model": dict(list(saved["model"].items())[1:])}
        for state in (saved if rank.rank else newer, broken if rank.rank else saved):
            try:
                trainer.load_state_dict(state)
                said.append("loaded")
            except syncline.SynclineError as error:
                said.append(str(error))
        now = trainer.state_dict()
        assert all(torch.equal(newer["model"][name], now["model"][name]) for name in now["model"])
        trainer.load_state_dict(saved)
        said.append(str(trainer.steps))
        return said

    first, second = on_ranks(RANKS, main)
    assert "steps is 4 on rank 0; 3 on rank 1" in first[0]
    assert "inward.weight is (missing) in the state" in second[1]
    assert "inward.weight is (missing) in the state" in first[1]
    assert first[2] == "3"


def test_an_interrupted_backward_is_discarded_with_unused_parameters_too(one_rank: None) -> None:
    trainer = syncline.Layerwise(net(), momentum, find_unused_parameters=True)
    hook = trainer.module.blocks[1][0].weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(trainer, 0, 0).backward()
    hook.remove()
    with pytest.raises(syncline.ExchangeError, match="No layer has taken that step"):
        loss_of(trainer, 0, 1)
    loss_of(trainer, 0, 1).backward()
    assert trainer.steps == 1
    trainer.module.wide.requires_grad_(False)
    with pytest.raises(syncline.UsageError, match="other parameters require gradients"):
        loss_of(trainer, 0, 2)


def test_a_memory_budget_applies_its_choice_to_the_measured_blocks(one_rank: None) -> None:
    """Blocks run in another order than that of their definition, and one does not run at all."""

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, 64))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.layers(x)

    class Crossed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.late = nn.ModuleList([Block(64)])
            self.early = nn.ModuleList([Block(2048), Block(2048), Block(2048)])
            self.never = nn.ModuleList([Block(8)])

        def forward(self, x: Tensor) -> Tensor:
            for block in (*self.early, *self.late):
                x = block(x)
            return x

    model, x = Crossed(), torch.randn(256, 64)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith("never"))

    def step(module: nn.Module) -> Tensor:
        return module(x).square().mean()

    kept = syncline.Layerwise(model, plain_sgd, memory_budget="1GiB", step=step)
    assert kept.choice is not None
    budget = int(kept.choice.peak_bytes) - 2**20
    kept.close()
    trainer = syncline.Layerwise(model, plain_sgd, memory_budget=budget, step=step)
    assert trainer.activations
    assert all(name.startswith("early.") for name in trainer.activations)
    trainer.close()


def test_a_memory_budget_is_met_or_refused_before_training(one_rank: None) -> None:
    torch.manual_seed(0)
    model = gpt.GPT(width=64, layers=4, heads=4)
    inputs, targets = zoo.make_batch("gpt-small", 8)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def step(module: nn.Module) -> Tensor:
        return zoo.loss(module(inputs), targets)

    def sgd(parameters: Any) -> Optimizer:
        return SGD(parameters, lr=0.01, momentum=0.9)

    with pytest.raises(syncline.UsageError, match="memory_budget is 5 MiB, but this batch needs at least") as refused:
        syncline.Layerwise(model, sgd, memory_budget="5MiB", step=step)
    least = re.search(r"needs at least (\S+) MiB: raise", str(refused.value))
    assert least is not None
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    budget = int(float(least[1]) * 2**20)
    with metered(torch.device("cpu"), model.parameters()) as meter:
        trainer = syncline.Layerwise(model, sgd, memory_budget=budget, step=step)
        assert trainer.choice is not None
        assert set(trainer.choice.ways) == {"recompute"}
        for _ in range(2):
            step(trainer).backward()  # type: ignore[arg-type]
        meter.restart()
        step(trainer).backward()  # type: ignore[arg-type]
        assert meter.peak() <= budget
        assert trainer.choice.peak_bytes == pytest.approx(meter.peak(), rel=0.1)
        trainer.close()
    roomy = syncline.Layerwise(model, sgd, memory_budget="4GiB", step=step)
    assert roomy.choice is not None
    assert set(roomy.choice.ways) == {"keep"}
    roomy.close()
