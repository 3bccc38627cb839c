"""Sparse steps of real models on real NCCL ranks that share one GPU, beside the floor and PyTorch's own compression.

In each process group there is what a user would have: one model and its method, with the floor (no synchronisation)
taking turns with it. Times are multiples of the floor of the same minute. Methods that bring their own communicators
are not in one process, because streams share the device's queues. All DistributedDataParallel models use their buckets
as gradients (`gradient_as_bucket_view`), which saves a copy.

The methods that exchange updates step fused AdamW, and so does their floor. The others step plain SGD.

    python benchmarks/sparse_cuda.py --json F
    python benchmarks/sparse_cuda.py --only updates --cells gpt2-small@4,bert-base@4,resnet50-224px@8 --json F
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from prediction_error_cuda import loss_of
from syncline._version import __version__
from syncline.bench.rounds import Contender, combine, take_turns, training_step
from syncline.cluster import ClusterSpec, Rank, launch
from syncline.ddp.attach import attach
from syncline.errors import SynclineError
from syncline.exchange import ChunkedTopk, OkTopk
from syncline.files import write_text

RATES_MBIT = {2: 200, 4: 1000, 8: 10000}
"""Rate of the links, by the number of hosts."""
CELLS = {
    "cuda": ["resnet50-224px@4", "resnet50-224px@8", "bert-base@4", "bert-base@8"],
    "cpu": ["mlp@2"],
}
"""Models, and numbers of hosts."""
UPDATES: dict[str, dict[str, Any]] = {
    "updates oktopk 1%": {"exchange": OkTopk(density=0.01)},
    "updates every 15": {"exchange": ChunkedTopk(density=0.03), "every": 15},
    "updates every 15, late": {"exchange": ChunkedTopk(density=0.06), "every": 15, "delay": 1},
}
"""Methods that exchange updates, with the settings of `attach`."""
GROUPS = [["oktopk 1%", "oktopk 0.1%"], [f"powersgd rank {rank}" for rank in (1, 2, 4)], ["ddp"]]
GROUPS += [[name] for name in UPDATES]
WARM_UP = 6
"""Steps in which buckets are rebuilt, kernels compiled and recorded, and PowerSGD begins."""


def prepared(net: torch.nn.Module, method: str, device: torch.device, optimizer: Optimizer | None) -> torch.nn.Module:
    if method == "nosync":
        return net
    name, *words = method.split()
    ids = [device.index] if device.type == "cuda" else None
    cap = 1000 if name == "powersgd" and device.type == "cpu" else None  # on gloo its hook fails with several buckets
    model = DDP(net, device_ids=ids, gradient_as_bucket_view=True, bucket_cap_mb=cap)
    if name == "updates":
        attach(model, optimizer=optimizer, warmup=0, **UPDATES[method])
    elif name == "oktopk":
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
    every = period(methods)
    contenders = []
    for method in ["nosync", *methods]:
        torch.manual_seed(0)
        net = build().to(device).train()
        adamw = methods[0] in UPDATES
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5, fused=device.type == "cuda") if adamw else None
        model = prepared(net, method, device, optimizer)
        step = training_step(model, functools.partial(loss, model), optimizer)
        contenders.append(Contender(method, functools.partial(repeat, step, every), steps=every))
    return take_turns(rank, contenders, warmup=max(2, WARM_UP // every), rounds=rounds)


def repeat(step: Callable[[], None], times: int) -> None:
    for _ in range(times):
        step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--only", help="methods whose names begin so")
    parser.add_argument("--cells", help="MODEL@HOSTS, with commas between them")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    for cell in (args.cells or ",".join(CELLS[args.device])).split(","):
        model, hosts = cell.split("@")
        spec = ClusterSpec(hosts=int(hosts), rate_bps=RATES_MBIT[int(hosts)] * 10**6, device=args.device)
        for group in GROUPS:
            methods = [method for method in group if method.startswith(args.only or "")]
            if not methods:
                continue
            began = time.monotonic()
            try:
                rows += measured(spec, model, methods, args.rounds)
            except SynclineError as error:  # the others go on, and the file has the reason
                failures.append(f"{cell} {methods}: {error}"[:1000])
                print(failures[-1], flush=True)
            print(f"    {time.monotonic() - began:.0f} s", flush=True)
            if args.json:
                about = {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "syncline": __version__}
                about |= {"torch": str(torch.__version__)}
                write_text(args.json, json.dumps({**about, "rows": rows, "failures": failures}, indent=1) + "\n")


def measured(spec: ClusterSpec, model: str, methods: list[str], rounds: int) -> list[dict[str, Any]]:
    """Return a row for each method."""
    every = period(methods)
    if methods == ["ddp"]:  # where it takes seconds, and is not close
        rounds = 3
    elif every > 1:
        rounds = max(5, rounds // every)
    records = launch(spec, lambda rank: on_cluster(rank, model, methods, rounds), deadline_s=300)
    turns = combine(records, dict.fromkeys(["nosync", *methods], every))
    floor = turns["nosync"]
    rows = []
    for method in methods:
        times, ratio = turns[method].quartiles, turns[method].ratio_to(floor)
        row = {
            "model": model,
            "hosts": spec.hosts,
            "rate_bps": spec.rate_bps,
            "method": method,
            "rounds": rounds,
            "steps_per_round": every,
            **times.fields("step_ms", 1e3),
            "floor_ms": floor.quartiles.median * 1e3,
            **ratio.fields("times_floor"),
            "wire_bytes": turns[method].wire_bytes,
        }
        rows.append(row)
        print(
            f"{model} {spec.describe()} {method}: {times.median * 1e3:.1f} ms, floor {row['floor_ms']:.1f}, "
            f"× {ratio.median:.2f} ({ratio.low:.2f}–{ratio.high:.2f})",
            flush=True,
        )
    return rows


def period(methods: list[str]) -> int:
    """Return the number of steps after which the methods begin anew."""
    return max(UPDATES[method].get("every", 1) if method in UPDATES else 1 for method in methods)


if __name__ == "__main__":
    main()
