"""A training script that knows nothing of Syncline: what `syncline run` is for."""

import argparse
import contextlib
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=64)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--models", type=int, default=1)
parser.add_argument("--crash-at", type=int)
parser.add_argument("--optimizers", choices=["one", "early", "two", "none"], default="one")
parser.add_argument("--scaler", action="store_true")
parser.add_argument("--losses", type=Path, required=True)
arguments = parser.parse_args()


def net() -> nn.Module:
    deep = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU())]
    return nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.1), *deep, nn.Linear(64, 10))


class ByHand:
    """What a script may do instead of an optimizer of torch."""

    def __init__(self, parameters) -> None:
        self.parameters = list(parameters)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.parameters:
            parameter.sub_(parameter.grad, alpha=0.05)


def main() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    nets = [net() for _ in range(arguments.models)]
    if arguments.optimizers == "early":  # before DDP
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9) for each in nets]
    models = [DDP(each, bucket_cap_mb=0.005) for each in nets]
    if arguments.optimizers in ("one", "two"):
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in models]
    if arguments.optimizers == "none":
        optimizers = [ByHand(model.parameters()) for model in models]
    if arguments.optimizers == "two":
        other = torch.optim.Adam(models[0].module[0].parameters())
        other.zero_grad()
    scaler = torch.amp.GradScaler("cpu", enabled=arguments.scaler, init_scale=64.0, growth_interval=3)
    torch.manual_seed(dist.get_rank() + 1)  # data and dropout are drawn from the same numbers: both show a disturbance
    losses = []
    for step in range(arguments.steps):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            for part in range(arguments.accumulate):
                inputs = torch.randn(16, 32)
                last = part == arguments.accumulate - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    loss = nn.functional.cross_entropy(model(inputs), inputs[:, :10].argmax(1))
                    scaler.scale(loss).backward()
            if arguments.optimizers == "none":
                optimizer.step()
            else:
                if arguments.scaler and step == 5 and dist.get_rank() == 1:  # only this rank's scaler skips the step
                    next(model.parameters()).grad.fill_(torch.inf)
                scaler.step(optimizer)
                scaler.update()
            losses.append(loss.item())
        if step % 20 == 19:  # what validation does: no gradients, and not on all ranks
            with torch.no_grad():
                models[0].module(torch.randn(4, 32))
        if step == arguments.crash_at:
            raise RuntimeError("half-way")
    weights = [float(parameter.detach().double().sum()) for parameter in models[0].parameters()]
    (arguments.losses / f"weights-{dist.get_rank()}.json").write_text(json.dumps(weights))
    (arguments.losses / f"losses-{dist.get_rank()}.json").write_text(json.dumps(losses))


main()
