"""A small GPT that is sharded inside two hosts, with replicas that exchange through Syncline: does it train as well?

Four real gloo ranks, two replicas of two shards, train a byte-level GPT with AdamW, a cosine schedule and clipping, on
the text of Python's standard library, from the same weights and with the same batches. `hsdp` is PyTorch's own. Sparse
updates begin after a warm-up of 4 bits, a fifth of the steps. Links are not shaped: this is about quality and bytes.

    python benchmarks/fsdp_quality.py --json F [--methods hsdp,int4,local-15] [--steps 300]
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # once, not in every rank
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

import syncline
from simulated_ranks import schedule
from syncline.cluster import ClusterSpec, Rank, launch
from syncline.files import write_text
from syncline.models import zoo
from syncline.models.gpt import GPT
from training import text, windows

WIDTH, LAYERS, HEADS, CONTEXT, WINDOWS = 96, 4, 4, 64, 8
HELD_OUT_WINDOWS = 512
WARMUP_SHARE, LR, CLIP = 0.2, 2e-3, 1.0
METHODS = "hsdp,dense,int4,local-5,local-15"


def options_of(method: str, optimizer: AdamW, steps: int) -> dict[str, Any]:
    if method.startswith("local-"):
        every, warmup = int(method.removeprefix("local-")), round(WARMUP_SHARE * steps)
        exchange = syncline.ChunkedTopk(density=0.03 if every > 5 else 0.01)
        return {"exchange": exchange, "optimizer": optimizer, "every": every, "warmup": warmup}
    return {"exchange": syncline.Quantized(bits=4) if method == "int4" else syncline.Dense()}


def on_rank(rank: Rank, method: str, steps: int, seed: int) -> dict[str, Any]:
    rank.init_process_group(timeout_s=120)
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(seed)
    model: Any = GPT(WIDTH, LAYERS, HEADS, CONTEXT)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    among = mesh if method == "hsdp" else mesh["shard"]
    for block in model.blocks:
        fully_shard(block, mesh=among)
    fully_shard(model, mesh=among)
    optimizer = AdamW(model.parameters(), lr=LR, betas=(0.9, 0.99), weight_decay=0.1)
    handle = None
    if method != "hsdp":
        handle = syncline.attach(model, replicate=mesh["replicate"], **options_of(method, optimizer, steps))
    scheduler = LambdaLR(optimizer, lambda step: schedule(step, steps))
    train, held_out = (part for part in text())
    generator = torch.Generator().manual_seed(1000 * seed + rank.rank)
    for _ in range(steps):
        starts = torch.randint(len(train) - CONTEXT, (WINDOWS,), generator=generator)
        inputs, targets = windows(train, starts, CONTEXT)
        optimizer.zero_grad()
        zoo.loss(model(inputs), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
    sent = None if handle is None else sum(handle.stats().total_sent_bytes.values())
    if handle is not None:
        handle.detach()
    return {"bits": evaluated(model, held_out), "sent_bytes": sent, "parameters": parameters}


@torch.no_grad()
def evaluated(model: nn.Module, held_out: Tensor) -> float:
    """Return the held-out loss in bits per byte. All ranks evaluate, because gathering parameters takes all shards."""
    starts = torch.randint(len(held_out) - CONTEXT, (HELD_OUT_WINDOWS,), generator=torch.Generator().manual_seed(0))
    losses = [
        zoo.loss(model(inputs), targets)
        for inputs, targets in (windows(held_out, s, CONTEXT) for s in starts.split(64))
    ]
    return float(torch.stack(losses).mean()) / math.log(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    text()  # once, before ranks are forked
    about = {"torch": str(torch.__version__), "syncline": syncline.__version__, "steps": args.steps, "seed": args.seed}
    rows: list[dict[str, Any]] = []
    for method in args.methods.split(","):
        began_s = time.monotonic()
        answers = launch(
            ClusterSpec(hosts=4), lambda rank, m=method: on_rank(rank, m, args.steps, args.seed), shaped=False,
            deadline_s=1500,
        )  # fmt: skip
        bits = {answer["bits"] for answer in answers}
        row: dict[str, Any] = {"method": method, **answers[0], "replicas_agree": len(bits) == 1}
        dense = 4 * (answers[0]["parameters"] // 2) * args.steps  # of a rank's shard, between two replicas
        row["fewer_bytes"] = 1.0 if row["sent_bytes"] is None else dense / row["sent_bytes"]
        rows.append(row)
        print(
            f"{method}: {row['bits']:.3f} bits per byte, {row['fewer_bytes']:.1f} times fewer bytes between replicas "
            f"in all, {time.monotonic() - began_s:.0f} s",
            flush=True,
        )
        if args.json:
            date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            write_text(args.json, json.dumps({"date": date, **about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
