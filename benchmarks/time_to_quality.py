"""How long it takes to train a GPT to the held-out loss that plain DDP reaches, by the clock, over slow links.

Real processes on an emulated cluster train a byte-level GPT with AdamW, a cosine schedule and clipping, on the text of
Python's standard library. All methods start from the same weights and draw the same batches, seed by seed. A method's
clock runs while it trains, its warm-up included, and stands still while rank 0 evaluates.

    python benchmarks/time_to_quality.py --json F [--methods ddp,int4,…] [--steps 600] [--seeds 1]
    python benchmarks/time_to_quality.py --report F --plot P.svg

The target is the held-out loss at the end of plain DDP's training (the mean over seeds). `--lr` applies to all methods;
`--sweep` prints the loss of dense training with several rates, to choose it, in one process and with another seed.
Trainings that are in the file are not repeated. A method with a factor, such as `local-15x1.2`, trains for that many
times the steps, and its schedule is as long.

Methods are named as in trainees.py. Warm-ups take a fifth of the steps, unless the name says otherwise.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

import syncline
from link_rate import cpu_ticks, stolen_since
from simulated_ranks import schedule
from syncline.cluster import ClusterSpec, Rank, launch
from syncline.files import write_json
from syncline.models import zoo
from syncline.models.gpt import GPT
from trainees import Method, Trainee, prepare
from training import read, text, windows

HOSTS, RATE_BPS = 4, 200_000_000
WIDTH, LAYERS, HEADS, CONTEXT, WINDOWS = 256, 4, 4, 64, 2
HELD_OUT_WINDOWS = 512
WARMUP_SHARE = 0.2
POINTS = 15
RATES = (5e-4, 1e-3, 2e-3, 4e-3)
METHODS = "ddp,fp16-hook,powersgd-1:warm2,powersgd-4:warm2,post-local-8,int4,oktopk-updates,local-15,local-15-late"


@dataclass(frozen=True)
class Run:
    """One training."""

    method: str
    seed: int
    lr: float
    steps: int

    @property
    def parsed(self) -> Method:
        return Method.named(self.method, WARMUP_SHARE)

    @property
    def length(self) -> int:
        """The number of steps of this method."""
        return round(self.steps * self.parsed.factor)

    @property
    def warmup(self) -> int:
        return self.parsed.warmup(self.length)


def prepare_run(run: Run, rank: Rank) -> Trainee:
    """Build the model of a run, and attach its method."""
    torch.manual_seed(run.seed)
    net = GPT(width=WIDTH, layers=LAYERS, heads=HEADS, context=CONTEXT)
    optimize = partial(AdamW, lr=run.lr, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
    return prepare(run.parsed, net, optimize, rank, warmup=run.warmup, clip=1.0)


def train(rank: Rank, run: Run) -> dict[str, Any]:
    """Train on this rank, and return the curve on rank 0."""
    torch.set_num_threads(1)
    rank.init_process_group(300.0)
    source, held_out = text()
    trainee = prepare_run(run, rank)
    scheduler = LambdaLR(trainee.inner, partial(schedule, steps=run.length))
    generator = torch.Generator().manual_seed(run.seed)
    points = {round(run.length * number / POINTS) for number in range(1, POINTS + 1)}
    clock_s, curve, times_s, ticks = 0.0, [], [], cpu_ticks()
    for step in range(1, run.length + 1):
        starts = torch.randint(len(source) - CONTEXT, (HOSTS, WINDOWS), generator=generator)[rank.rank]
        began_s = time.monotonic()
        inputs, targets = windows(source, starts, CONTEXT)
        trainee.step(lambda model, x=inputs, y=targets: zoo.loss(model(x), y))  # type: ignore[misc]
        scheduler.step()
        times_s.append(time.monotonic() - began_s)
        clock_s += times_s[-1]
        if step in points:
            with trainee.evaluated() as model:
                if rank.rank == 0:
                    curve.append((step, clock_s, held_out_bits(model, held_out)))
            dist.barrier()  # so that no rank waits for rank 0's evaluation while its clock runs
    trainee.close()
    if rank.rank:
        return {}
    late = times_s[run.warmup :]
    warm_ms = 1e3 * statistics.median(times_s[: run.warmup]) if run.warmup else None
    return {
        "method": run.method,
        "seed": run.seed,
        "lr": run.lr,
        "steps": run.length,
        "points": [step for step, _, _ in curve],
        "seconds": [round(seconds, 3) for _, seconds, _ in curve],
        "bits": [round(bits, 5) for _, _, bits in curve],
        "step_ms_warmup": warm_ms and round(warm_ms, 2),
        "step_ms": round(1e3 * statistics.mean(late), 2),
        "step_ms_median": round(1e3 * statistics.median(late), 2),
        "sent_bytes": None if trainee.handle is None else trainee.handle.stats().total_sent_bytes,
        "stolen": round(stolen_since(ticks), 4),
    }


def held_out_bits(model: nn.Module, source: Tensor) -> float:
    """Return the held-out loss in bits per byte."""
    torch.set_num_threads(2)  # the other ranks wait
    bits = bits_of(model, source)
    torch.set_num_threads(1)
    return bits


@torch.no_grad()
def bits_of(net: nn.Module, source: Tensor) -> float:
    """Return the loss of a model on held-out text, in bits per byte."""
    starts = torch.randint(len(source) - CONTEXT, (HELD_OUT_WINDOWS,), generator=torch.Generator().manual_seed(0))
    net.eval()
    losses = [zoo.loss(net(x), y).item() for x, y in (windows(source, s, CONTEXT) for s in starts.split(64))]
    net.train()
    return statistics.mean(losses) / math.log(2)


def sweep(steps: int) -> None:
    """Print the held-out loss of dense training with each learning rate, in one process that has all ranks' batches."""
    source, held_out = text()
    for lr in RATES:
        torch.manual_seed(100)
        net = GPT(width=WIDTH, layers=LAYERS, heads=HEADS, context=CONTEXT)
        optimizer = AdamW(net.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
        scheduler = LambdaLR(optimizer, partial(schedule, steps=steps))
        generator = torch.Generator().manual_seed(100)
        for _ in range(steps):
            starts = torch.randint(len(source) - CONTEXT, (HOSTS * WINDOWS,), generator=generator)
            inputs, targets = windows(source, starts, CONTEXT)
            optimizer.zero_grad()
            zoo.loss(net(inputs), targets).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        print(f"lr {lr:g}: {bits_of(net, held_out):.3f} bits", flush=True)


# --- the study --------------------------------------------------------------------------------------------------------


def study(path: Path, runs: list[Run]) -> None:
    parameters = sum(p.numel() for p in GPT(width=WIDTH, layers=LAYERS, heads=HEADS, context=CONTEXT).parameters())
    about = {
        "schema": 1,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "torch": str(torch.__version__),
        "syncline": syncline.__version__,
        "cluster": {"hosts": HOSTS, "rate_bps": RATE_BPS, "emulated": True},
        "model": {"name": "GPT", "parameters": parameters, "bytes_per_rank_and_step": WINDOWS * CONTEXT},
        "cells": [],
    }
    result: dict[str, Any] = read(path) if path.exists() else about
    text()  # before ranks are forked
    for run in runs:
        if any(_is_of(cell, run) for cell in result["cells"]):
            continue
        began_s = time.monotonic()
        spec = ClusterSpec(hosts=HOSTS, rate_bps=RATE_BPS)
        cell = launch(spec, partial(train, run=run), deadline_s=3600)[0]
        result["cells"].append(cell)
        write_json(path, result)
        took_s = time.monotonic() - began_s
        print(
            f"{run.method:16} seed {run.seed} lr {run.lr:g}: {cell['bits'][-1]:.3f} bits, {cell['seconds'][-1]:.0f} s, "
            f"{cell['step_ms']:.0f} ms per step, {took_s:.0f} s in all",
            flush=True,
        )


def _is_of(cell: dict[str, Any], run: Run) -> bool:
    return (cell["method"], cell["seed"], cell["lr"]) == (run.method, run.seed, run.lr)


def seconds_to(cell: dict[str, Any], target: float) -> float | None:
    """Return when a training reached a loss, interpolated between evaluations; None if it did not."""
    before_s, before = 0.0, 8.0
    for seconds, bits in zip(cell["seconds"], cell["bits"], strict=True):
        if bits <= target:
            share = (before - target) / (before - bits) if before > bits else 1.0
            return float(before_s + share * (seconds - before_s))
        before_s, before = seconds, bits
    return None


def report(result: dict[str, Any], plot: Path | None) -> None:
    by_method: dict[str, list[dict[str, Any]]] = {}
    for cell in result["cells"]:
        by_method.setdefault(cell["method"], []).append(cell)
    target = statistics.mean(cell["bits"][-1] for cell in by_method["ddp"])
    plain_s = statistics.mean(seconds_to(cell, target) or cell["seconds"][-1] for cell in by_method["ddp"])
    print(f"target: {target:.3f} bits per byte, plain DDP's loss at the end, after {plain_s:.0f} s")
    print(f"{'method':18}{'seeds':>6}{'ms per step':>13}{'final bits':>12}{'s to target':>13}{'sooner':>8}")
    for method, cells in by_method.items():
        times = [seconds_to(cell, target) for cell in cells]
        reached = [seconds for seconds in times if seconds is not None]
        took = f"{statistics.mean(reached):.0f}" if len(reached) == len(cells) else "not reached"
        sooner = f"{plain_s / statistics.mean(reached):.1f}×" if len(reached) == len(cells) else ""
        step_ms = statistics.mean(cell["step_ms"] for cell in cells)
        bits = statistics.mean(cell["bits"][-1] for cell in cells)
        print(f"{method:18}{len(cells):>6}{step_ms:>13.0f}{bits:>12.3f}{took:>13}{sooner:>8}")
    if plot is not None:
        draw(by_method, target, plot)


def draw(by_method: dict[str, list[dict[str, Any]]], target: float, path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "syncline"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.2), layout="constrained")
    for method, cells in by_method.items():
        for number, cell in enumerate(cells):
            colour = {} if number == 0 else {"color": axes.lines[-1].get_color()}
            label = method if number == 0 else None
            axes.plot(cell["seconds"], cell["bits"], label=label, linewidth=1.4, **colour)
    axes.axhline(target, color="0.4", linestyle=":", linewidth=1)
    worst = max(cell["bits"][0] for cells in by_method.values() for cell in cells)
    axes.set(xlabel="seconds of training", ylabel="held-out bits per byte", xscale="log")
    axes.set_ylim(target - 0.1, min(worst, target + 1.5))
    axes.set_title(f"{HOSTS} emulated hosts at {RATE_BPS // 10**6} Mbit/s; dotted: plain DDP's final loss", fontsize=10)
    axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--sweep", action="store_true", help="train densely with several learning rates")
    parser.add_argument("--report", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    make: Callable[..., Run] = partial(Run, steps=options.steps)
    if options.json is not None:
        runs = [make(m, seed, options.lr) for seed in range(options.seeds) for m in options.methods.split(",")]
        study(options.json, runs)
    if options.report is not None:
        report(read(options.report), options.plot)
    if options.sweep:
        sweep(options.steps)
    if options.json is None and options.report is None and not options.sweep:
        parser.error("pass --json FILE to train, --sweep, or --report FILE")


if __name__ == "__main__":
    main()
