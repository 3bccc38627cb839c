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
