"""Overlap with the next forward beside plain DDP and FSDP2, on real NCCL ranks that share one GPU.

All methods train the same model in fp32 with bf16 autocast and the same AdamW, send the same bytes, and take turns in
the same processes. A turn is a few steps with the optimizer's own, timed from the end of one optimizer step to the end
of another on the device. `overlap` begins a turn with a step that is not timed, so that the first forward has weights
to wait for. `nosync` is the floor: the computation of all ranks, which share the GPU, without communication. `fsdp2` is
PyTorch's `fully_shard` with `reshard_after_forward=False`, a unit per transformer block or stage of a ResNet, and
prefetching of the next unit.

    python benchmarks/overlap_cuda.py --json F [--budget 240] [--only gpt2-small 8x10000 overlap ddp]

Each cell is written as soon as it is measured. If one fails, its error is written, and its methods run one by one.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import time
import unittest.mock
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import syncline
from prediction_error_cuda import loss_of
from syncline.bench.rounds import Contender, combine, take_turns, training_step
from syncline.cluster import ClusterSpec, Rank, launch
from syncline.files import write_text

CELLS = {  # model, hosts, Mbit/s, timed steps in a turn, share of the remaining time
    "cuda": [
        ("resnet50-224px", 8, 10_000, 4, 0.15),
        ("gpt2-small", 8, 10_000, 3, 0.32),
        ("resnet50-224px", 4, 1_000, 3, 0.38),
        ("gpt2-small", 4, 1_000, 2, 1.0),
    ],
    "cpu": [("mlp", 2, 200, 2, 1.0)],
}
METHODS = ["nosync", "ddp", "overlap", "overlap-halves", "fsdp2"]
"""`overlap-halves` may not all-reduce any bucket as a whole."""
SLOW_METHODS = ["ddp", "overlap", "fsdp2"]
"""Methods of cells in which a step takes seconds: there is no time for more, and less to see."""
LEAST_S = 45.0
"""Time without which a cell is not begun."""


@dataclass
class Method:
    """A model that trains with one method, after its first steps."""

    contender: Contender
    step_s: float
    about: dict[str, Any]


def prepared(rank: Rank, model: str, method: str, steps: int) -> Method:
    device = rank.device
    on_gpu = device.type == "cuda"
    build, loss = loss_of(model, device)
    before_bytes = torch.cuda.memory_allocated() if on_gpu else 0
    torch.manual_seed(0)
    net = build().to(device).train()
    if hasattr(net, "config"):
        net.config.use_cache = False  # of keys and values, which training does not need
    trained, handle = net, None
    if method.startswith(("ddp", "overlap")):
        ids = [device.index] if on_gpu else None
        trained = DDP(net, device_ids=ids, gradient_as_bucket_view=True)
    elif method.startswith("fsdp2"):
        shard(net, device, dist.get_world_size())
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-5, fused=True)
    if method.startswith("overlap"):
        handle = syncline.attach(trained, optimizer=optimizer, overlap="forward")
    step = training_step(trained, functools.partial(loss, trained), optimizer)
    warm, in_shards = min(2, steps - 1), handle is None  # fewer where a step takes seconds
    while not in_shards or warm:
        with chooses_no_whole_bucket() if method == "overlap-halves" else contextlib.nullcontext():
            step()
        warm -= in_shards
        in_shards = handle is None or handle._attached._warm is None
    settle = (lambda: None) if handle is None else handle.wait
    settle()
    dist.barrier(device_ids=[0] if on_gpu else None)
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began_s = time.monotonic()
    step()
    if on_gpu:
        torch.cuda.synchronize()
    step_s = time.monotonic() - began_s
    about = {
        "peak_bytes": torch.cuda.max_memory_allocated() - before_bytes if on_gpu else None,
        "optimizer_state_bytes": state_bytes(optimizer),
    }
    if handle is not None:
        kinds = [type(bucket.exchange).__name__ for bucket in handle._attached.buckets.values()]
        about |= {"buckets": len(kinds), "whole_buckets": kinds.count("AllReduce")}
    lead = step if handle is not None else (lambda: None)
    contender = Contender(
        method,
        functools.partial(repeated, step, steps),
        steps,
        lead=lead,
        lead_steps=int(handle is not None),
        settle=settle,
    )
    return Method(contender, step_s, about)


def chooses_no_whole_bucket() -> contextlib.AbstractContextManager[Any]:
    return unittest.mock.patch("syncline.predict.overlap.best_whole", lambda *_: frozenset())


def repeated(step: Callable[[], None], times: int) -> None:
    for _ in range(times):
        step()


def shard(net: nn.Module, device: torch.device, ranks: int) -> None:
    """Shard a model as suits FSDP2 best, so that parameters are gathered once per step, in fp32 like DDP's."""
    from torch.distributed.device_mesh import init_device_mesh

    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        from torch.distributed._composable.fsdp import fully_shard
    options = {"mesh": init_device_mesh(device.type, (ranks,)), "reshard_after_forward": False}
    units = units_of(net)
    for unit in units:
        fully_shard(unit, **options)
    fully_shard(net, **options)
    for unit, following in zip([net, *units], [*units, None], strict=True):
        if following is not None and hasattr(unit, "set_modules_to_forward_prefetch"):
            unit.set_modules_to_forward_prefetch([following])


def units_of(net: nn.Module) -> list[nn.Module]:
    """Return transformer blocks, or the stages of a ResNet, or else all children with parameters."""
    if hasattr(net, "transformer"):
        return list(net.transformer.h)
    if hasattr(net, "layer4"):
        return [net.layer1, net.layer2, net.layer3, net.layer4]
    return [child for child in net.children() if any(True for _ in child.parameters())]


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    total = 0
    for values in optimizer.state.values():
        for value in values.values():
            if isinstance(value, torch.Tensor) and value.dim():
                local = value.to_local() if hasattr(value, "to_local") else value
                total += local.nbytes
    return total


def on_cluster(rank: Rank, model: str, methods: list[str], steps: int, rounds: int, budget_s: float) -> Any:
    began_s = time.monotonic()
    rank.init_process_group(timeout_s=120)
    ready = []
    for method in methods:
        ready.append(prepared(rank, model, method, steps))
        if rank.rank == 0:
            rank.say(f"{method}: {ready[-1].step_s * 1e3:.0f} ms, {time.monotonic() - began_s:.0f} s so far")
    contenders = [method.contender for method in ready]
    round_s = sum(one.step_s * (one.contender.steps + one.contender.lead_steps) for one in ready)
    possible = int((budget_s - (time.monotonic() - began_s)) / round_s)
    chosen = torch.tensor([max(1, min(rounds, possible))], device=rank.device)
    dist.broadcast(chosen, 0)
    record = take_turns(rank, contenders, warmup=0, rounds=int(chosen))
    return {"record": record, "about": {one.contender.name: one.about for one in ready}}


def measure(spec: ClusterSpec, model: str, methods: list[str], steps: int, rounds: int, budget_s: float) -> Any:
    """Return a row per method."""
    answers = launch(
        spec,
        lambda rank: on_cluster(rank, model, methods, steps, rounds, budget_s),
        deadline_s=budget_s + 90,
        on_event=lambda _, event: print(f"  {event}" if isinstance(event, str) else f"  round {event}", flush=True),
    )
    turns = combine([answer["record"] for answer in answers], dict.fromkeys(methods, steps))
    rows = []
    for method in methods:
        about = [answer["about"][method] for answer in answers]
        largest = {key: max((one[key] for one in about), default=None) for key in about[0] if about[0][key] is not None}
        row = {"method": method, "rounds": len(turns[method].seconds), "steps": steps, **about[0], **largest}
        row |= turns[method].quartiles.fields("step_ms", 1e3)
        if "ddp" in methods:
            row |= turns["ddp"].ratio_to(turns[method]).fields("speedup_over_ddp")
        row["wire_bytes"] = turns[method].wire_bytes
        rows.append(row)
        print(text_of(row), flush=True)
    return rows


def text_of(row: dict[str, Any]) -> str:
    gain = f", {row['speedup_over_ddp']:.2f}× DDP's speed" if "speedup_over_ddp" in row else ""
    peak = f", peak {row['peak_bytes'] / 1e9:.2f} GB" if row["peak_bytes"] is not None else ""
    whole = f", {row['whole_buckets']} of {row['buckets']} buckets whole" if "buckets" in row else ""
    times = f"{row['step_ms']:.0f} ms ({row['step_ms_low']:.0f}–{row['step_ms_high']:.0f})"
    return f"  {row['method']}: {times}{gain}{peak}, state {row['optimizer_state_bytes'] / 1e6:.0f} MB{whole}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=8, help="at most")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds for everything")
    parser.add_argument("--only", nargs="*", default=[], help="models, clusters such as 8x10000, and methods")
    options = parser.parse_args()
    end_s = time.monotonic() + options.budget
    result = {
        "schema": 1,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "syncline": syncline.__version__,
        "torch": str(torch.__version__),
        "cells": [],
    }
    wanted = set(options.only)

    def selected(names: list[str]) -> list[str]:
        return [name for name in names if name in wanted] or names

    models = selected(list(dict.fromkeys(cell[0] for cell in CELLS[options.device])))
    clusters = selected(list(dict.fromkeys(f"{cell[1]}x{cell[2]}" for cell in CELLS[options.device])))
    cells = [cell for cell in CELLS[options.device] if cell[0] in models and f"{cell[1]}x{cell[2]}" in clusters]
    for number, (model, hosts, mbit, steps, share) in enumerate(cells, 1):
        left_s = end_s - time.monotonic()
        slow = model == "gpt2-small" and mbit <= 1_000
        methods = [method for method in selected(METHODS) if method in SLOW_METHODS or not slow]
        cell: dict[str, Any] = {"model": model, "hosts": hosts, "rate_bps": mbit * 10**6}
        print(f"{model}, {hosts} × {mbit} Mbit/s ({left_s:.0f} s left)", flush=True)
        spec = ClusterSpec(hosts=hosts, rate_bps=mbit * 10**6, device=options.device)
        if left_s < LEAST_S:
            cell["error"] = f"skipped: {left_s:.0f} s were left"
        else:
            budget_s = left_s * (1.0 if number == len(cells) else share) - 10
            try:
                cell["rows"] = measure(spec, model, methods, steps, options.rounds, budget_s)
            except Exception as error:  # noqa: BLE001 - other cells may work
                cell |= {"error": str(error)[-4000:], "rows": []}
                print(f"  failed: {cell['error']}", flush=True)
                for method in methods:
                    if (left_s := end_s - time.monotonic()) > LEAST_S:
                        try:
                            cell["rows"] += measure(spec, model, [method], steps, 2, 0.3 * left_s)
                        except Exception as alone:  # noqa: BLE001
                            cell["rows"].append({"method": method, "error": str(alone)[-4000:]})
                            print(f"  {method} failed: {alone}", flush=True)
        result["cells"].append(cell)
        if options.json:
            write_text(options.json, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
