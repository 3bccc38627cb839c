"""Sparse steps of real models on real NCCL ranks that share one GPU, beside the floor and PyTorch's own compression.

In each process group there is what a user would have: one model and its method, with the floor (no synchronisation)
taking turns with it, so every method is told as a multiple of the floor in the same minute. Methods that bring their
own communicators are not in one process: more streams than the device has queues hold each other up. All
DistributedDataParallel models use their buckets as gradients (`gradient_as_bucket_view`), which spares a copy.

    python benchmarks/sparse_cuda.py --json F
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from prediction_error_cuda import loss_of
from syncline._version import __version__
from syncline.bench.rounds import Contender, combine, take_turns, training_step
from syncline.cluster import ClusterSpec, Rank, launch
from syncline.engine.attach import attach
from syncline.exchange import OkTopk
from syncline.files import write_text

CLUSTERS = {"cuda": [(4, 1000), (8, 10000)], "cpu": [(2, 200)]}
MODELS = {"cuda": ["resnet50-224px", "bert-base"], "cpu": ["mlp"]}
GROUPS = [["oktopk 1%", "oktopk 0.1%"], [f"powersgd rank {rank}" for rank in (1, 2, 4)], ["ddp"]]
WARM_UP = 6
"""Steps in which buckets are rebuilt, kernels compiled and recorded, and PowerSGD begins."""


def prepared(net: torch.nn.Module, method: str, device: torch.device) -> torch.nn.Module:
    if method == "nosync":
        return net
    name, *words = method.split()
    ids = [device.index] if device.type == "cuda" else None
    cap = 1000 if name == "powersgd" and device.type == "cpu" else None  # on gloo its hook fails with several buckets
    model = DDP(net, device_ids=ids, gradient_as_bucket_view=True, bucket_cap_mb=cap)
    if name == "oktopk":
        attach(model, OkTopk(density=float(words[0].rstrip("%")) / 100))
    elif name == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=int(words[1]), start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return model


def on_cluster(rank: Rank, name: str, methods: list[str], rounds: int) -> Any:
    device = rank.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rank.init_process_group(timeout_s=200)
    build, loss = loss_of(name, device)
    contenders = []
    for method in ["nosync", *methods]:
        torch.manual_seed(0)
        model = prepared(build().to(device).train(), method, device)
        contenders.append(Contender(method, training_step(model, functools.partial(loss, model))))
    return take_turns(rank, contenders, warmup=WARM_UP, rounds=rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--only", help="methods whose names begin so")
    args = parser.parse_args()
    rows = []
    for model in MODELS[args.device]:
        for hosts, mbit in CLUSTERS[args.device]:
            spec = ClusterSpec(hosts=hosts, rate_bps=mbit * 10**6, device=args.device)
            for group in GROUPS:
                methods = [method for method in group if method.startswith(args.only or "")]
                if not methods:
                    continue
                rounds = 3 if methods == ["ddp"] else args.rounds  # where it takes seconds, and is not close
                records = launch(
                    spec,
                    lambda rank, model=model, methods=methods, rounds=rounds: on_cluster(rank, model, methods, rounds),
                    deadline_s=300,
                )
                turns = combine(records)
                floor = turns["nosync"]
                for method in methods:
                    times, ratio = turns[method].quartiles, turns[method].ratio_to(floor)
                    row = {
                        "model": model,
                        "hosts": hosts,
                        "rate_bps": spec.rate_bps,
                        "method": method,
                        "rounds": rounds,
                        "step_ms": times.median * 1e3,
                        "step_ms_low": times.low * 1e3,
                        "step_ms_high": times.high * 1e3,
                        "floor_ms": floor.quartiles.median * 1e3,
                        "times_floor": ratio.median,
                        "times_floor_low": ratio.low,
                        "times_floor_high": ratio.high,
                        "wire_bytes": turns[method].wire_bytes,
                    }
                    rows.append(row)
                    print(
                        f"{model} {hosts} × {mbit} Mbit/s {method}: {times.median * 1e3:.1f} ms, floor "
                        f"{row['floor_ms']:.1f}, × {ratio.median:.2f} ({ratio.low:.2f}–{ratio.high:.2f})",
                        flush=True,
                    )
                if args.json:
                    about = {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "syncline": __version__}
                    about |= {"torch": str(torch.__version__)}
                    write_text(args.json, json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
