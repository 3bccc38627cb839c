"""How well models train layer by layer with a sparse exchange of gradients (G), beside plain DDP.

A CNN on real digits, four real ranks, several seeds, the same batches and first weights for every method of a seed.
What is reported is the accuracy on held-out digits after the last step, and over the last tenth of all steps.

    python benchmarks/layerwise_training.py --json F
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

import syncline
from syncline.cluster import ClusterSpec, Rank, launch
from syncline.files import write_text
from syncline.models.data import digits
from syncline.models.zoo import cnn

RANKS, BATCH = 4, 16
DENSITY = 0.01
METHODS = ("ddp", "G", "G, momentum in the exchange")


def trained(method: str, net: nn.Module, lr: float) -> tuple[Callable[..., Any], Optimizer, Callable[[], None]]:
    """What to call, its optimizer, and what to do after backward."""

    def sgd(parameters: Any, momentum: float = 0.9) -> Optimizer:
        return SGD(parameters, lr=lr, momentum=momentum)

    if method == "ddp":
        model = DDP(net)
        optimizer = sgd(model.parameters())

        def step() -> None:
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step
    momentum = 0.9 if method == "G, momentum in the exchange" else 0.0
    exchange = syncline.OkTopk(density=DENSITY, momentum=momentum)
    trainer = syncline.Layerwise(net, lambda p: sgd(p, 0.9 - momentum), exchange)
    return trainer, trainer.optimizer, lambda: None


def run(rank: Rank, steps: int, seeds: int, lr: float) -> Any:
    torch.set_num_threads(1)
    rank.init_process_group(timeout_s=300)
    data, found = digits(), dict[str, list[dict[str, float]]]()
    for seed in range(seeds):
        for method in METHODS:
            torch.manual_seed(seed)
            net = cnn()
            call, optimizer, after = trained(method, net, lr)
            scheduler = CosineAnnealingLR(optimizer, steps)
            draw = torch.Generator().manual_seed(1000 + seed)
            accuracy = []
            for number in range(steps):
                chosen = torch.randint(len(data.train_labels), (RANKS, BATCH), generator=draw)[rank.rank]
                F.cross_entropy(call(data.train_images[chosen]), data.train_labels[chosen]).backward()
                after()
                scheduler.step()
                if number % (steps // 20) == steps // 20 - 1 and number >= steps * 0.85:
                    accuracy.append(held_out(net))
            row = {"last": held_out(net), "late": statistics.fmean(accuracy)}
            found.setdefault(method, []).append(row)
            if rank.rank == 0:
                rank.say(f"seed {seed}, {method}: {row}")
    return found


def held_out(net: nn.Module) -> float:
    data = digits()
    net.eval()
    with torch.no_grad():
        right = (net(data.held_out_images).argmax(1) == data.held_out_labels).float().mean()
    net.train()
    return 100 * float(right)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    answers = launch(
        ClusterSpec(hosts=RANKS),
        lambda rank: run(rank, args.steps, args.seeds, args.lr),
        shaped=False,
        deadline_s=3600,
        on_event=lambda _, event: print(event, flush=True),
    )
    found = answers[0]
    for method in METHODS:
        late = [row["late"] for row in found[method]]
        apart = [row["late"] - base["late"] for row, base in zip(found[method], found["G"], strict=True)]
        print(
            f"{method:28} {statistics.fmean(late):6.2f} ± {statistics.stdev(late):.2f} %, "
            f"less G: {statistics.fmean(apart):+.2f} ± {statistics.stdev(apart):.2f}"
        )
    if args.json:
        about = {"steps": args.steps, "lr": args.lr, "ranks": RANKS, "batch": BATCH, "density": DENSITY}
        write_text(args.json, json.dumps({**about, "found": found}, indent=1))


if __name__ == "__main__":
    main()
