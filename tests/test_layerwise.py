"""Layer by layer: the same mathematics as DDP with the same exchange, on real ranks over gloo."""

from __future__ import annotations

import copy
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

RANKS = 2


class Net(nn.Module):
    """Convolutions, BatchNorm, a weight that is used at both ends, and layers of very different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(12, 24)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(24, 24), nn.BatchNorm1d(24), nn.ReLU()) for _ in range(3)))
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
    trainer = syncline.Layerwise(net(rank.rank), make, exchange, **options)  # other weights: rank 0's count
    scheduler = CosineAnnealingLR(trainer.optimizer, 300)
    for step in range(steps):
        loss_of(trainer, rank.rank, step).backward()
        scheduler.step()
    return trainer


def distance(one: nn.Module, other: nn.Module) -> float:
    """The largest difference of any weight or buffer, as a part of the largest of its tensor."""
    return max(
        float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-6))
        for (_, a), (_, b) in zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    )


def same_everywhere(module: nn.Module) -> bool:
    """Bit for bit, on all ranks."""
    flat = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flat)
    return all(torch.equal(flat, other) for other in everyone)


def momentum(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3, nesterov=True)


def adam(parameters: Any) -> Optimizer:
    return AdamW(parameters, lr=0.003)


@pytest.mark.parametrize("make", [momentum, adam])
def test_two_hundred_steps_are_those_of_ddp(make: Callable[[Any], Optimizer]) -> None:
    def main(rank: Rank) -> tuple[float, bool, int]:
        plain = as_ddp(rank, make, 200)
        trainer = as_layerwise(rank, make, 200, bucket_mb=0.002)
        return distance(trainer.module, plain), same_everywhere(trainer.module), len(trainer._buckets)

    for apart, same, buckets in on_ranks(RANKS, main):
        assert apart < 1e-4
        assert same
        assert buckets > 5


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


class Oracle:
    """U with plain dense buffers, all ranks in one place: what PAPERS calls r, v and w, and an accepted set."""

    def __init__(self, weights: list[Tensor], ranks: int) -> None:
        self.weights = [w.detach().clone() for w in weights]
        self.velocity = [[torch.zeros_like(w) for w in weights] for _ in range(ranks)]
        self.updates = [torch.zeros_like(w, dtype=torch.float64) for w in weights]
        """Everything that any rank has computed, averaged."""

    def accumulate(self, rank: int, gradients: list[Tensor], lr: float, mu: float, decay: float) -> list[Tensor]:
        made = []
        for place, gradient in enumerate(gradients):
            step = gradient + decay * self.weights[place]
            self.velocity[rank][place] = mu * self.velocity[rank][place] + step
            made.append(lr * self.velocity[rank][place])
        return made


def test_mirror_updates_follow_their_algebra() -> None:
    """U with Dense is DDP; with OkTopk what was applied and what waits are together all that was computed."""
    steps, rate, mu, decay = 25, 0.05, 0.9, 1e-3

    def plain_sgd(parameters: Any) -> Optimizer:
        return SGD(parameters, lr=rate, momentum=mu, weight_decay=decay)

    def main(rank: Rank) -> tuple[float, float, float, bool]:
        dense = distance(
            as_layerwise(rank, momentum, 40, mirror=True, bucket_mb=0.004).module, as_ddp(rank, momentum, 40)
        )
        trainer = syncline.Layerwise(
            net(), plain_sgd, syncline.OkTopk(density=0.05), mirror=True, bucket_mb=0.02, broadcast_buffers=False
        )
        names = [name for name, _ in trainer.module.named_parameters()]
        start = [p.detach().clone() for p in trainer.module.parameters()]
        oracle = Oracle(start, rank.world_size)
        total = [torch.zeros_like(w, dtype=torch.float64) for w in start]
        worst = 0.0
        for step in range(steps):
            copied = copy.deepcopy(trainer.module)
            loss_of(copied, rank.rank, step).backward()
            oracle.weights = [p.detach().clone() for p in trainer.module.parameters()]
            gradients = [p.grad for p in copied.parameters() if p.grad is not None]
            mine = oracle.accumulate(rank.rank, gradients, rate, mu, decay)
            loss_of(trainer, rank.rank, step).backward()
            kept = trainer.state_dict()["tensors"]
            for place, name in enumerate(names):
                everyone = mine[place].double()
                dist.all_reduce(everyone)
                total[place] += everyone / rank.world_size
                waits = kept.get(name, {}).get("residual", torch.zeros_like(start[place])).double()
                dist.all_reduce(waits)
                done = start[place].double() - dict(trainer.module.named_parameters())[name].detach().double()
                scale = float(total[place].abs().max()) + 1e-9
                worst = max(worst, float((waits + done - total[place]).abs().max()) / scale)
        velocity = max(
            float((trainer.optimizer.state[p]["momentum_buffer"] - v).abs().max())
            for p, v in zip(trainer.module.parameters(), oracle.velocity[rank.rank], strict=True)
        )
        return dense, worst, velocity, same_everywhere(trainer.module)

    for dense, worst, velocity, same in on_ranks(RANKS, main):
        assert dense < 1e-4
        assert worst < 1e-5
        assert velocity < 1e-6
        assert same


def test_a_checkpoint_goes_on_bit_for_bit() -> None:
    def main(rank: Rank) -> list[bool]:
        same = []
        for make, mirror in ((momentum, True), (adam, False)):
            options: dict[str, Any] = {"mirror": mirror, "bucket_mb": 0.01}
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
