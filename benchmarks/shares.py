"""One host of half the speed: steps with equal batches, with those of `syncline.shares`, and the ideal.

A recorded model is replayed on four emulated hosts. Computing takes a fixed time and a time per sample, and twice as
long on the last host. Replayed computation waits, so hosts do not compete for this machine's cores. Batches are
measured with `syncline.shares` on the running cluster. Then the methods take turns: plain DDP with equal batches;
`attach(model, shares=shares)` with the measured ones; and, as the ideal, plain DDP on hosts of equal speed that are
together as fast as the four, with equal batches. All three send the same bytes over the same links.

    python benchmarks/shares.py --json F --rounds 12
    python benchmarks/shares.py --report F
"""

from __future__ import annotations

import argparse
import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import syncline
from syncline.bench.rounds import Contender, combine, take_turns, training_step
from syncline.cluster import ClusterSpec, Rank, launch
from syncline.files import write_json
from syncline.models.replay import ReplayModel
from syncline.records.profile import Profile, load_profile

MODEL = "resnet50-224px-cuda"
HOSTS, RATE_BPS, TOTAL = 4, 200_000_000, 256
COMPUTE_S, FIXED = 0.4, 0.1  # a step with an equal batch on a host of the usual speed, and the fixed part of it
SLOWNESS = (1.0, 1.0, 1.0, 2.0)
RATIOS = (0.25, 0.75)  # seconds of sending in a step, divided by seconds of computing with an equal batch
STEPS = 3  # that are measured together
LIMIT = 1.08


class Sized(nn.Module):
    """A replayed model whose times depend on the number of samples."""

    def __init__(self, profile: Profile, seed: int, slowness: float) -> None:
        super().__init__()
        self.net, self._slowness = ReplayModel(profile, seed=seed), slowness

    def forward(self, x: Tensor) -> Tensor:
        self.net.pace = self._slowness * (FIXED + (1 - FIXED) * len(x) * HOSTS / TOTAL)
        return self.net()


def scaled(ratio: float) -> Profile:
    profile = load_profile(MODEL)
    sent = ratio * COMPUTE_S * RATE_BPS / 8
    size = sent * HOSTS / (2 * (HOSTS - 1)) / profile.gradient_bytes
    return profile.scaled(time=COMPUTE_S / (profile.forward_s + profile.backward_s), bytes=size)


def step_of_batch(model: nn.Module, samples: int) -> None:
    model(torch.zeros(samples, 1)).backward()


def repeated(step: Any) -> None:
    for _ in range(STEPS):
        step()


def on_cluster(rank: Rank, ratio: float, rounds: int, budget_s: float) -> dict[str, Any]:
    rank.init_process_group(timeout_s=120)
    profile = scaled(ratio)
    caps = {"bucket_cap_mb": max(0.01, profile.gradient_bytes / 8 / 2**20)}
    ideal = statistics.harmonic_mean(SLOWNESS)

    def model(slowness: float) -> DDP:
        return DDP(Sized(profile, rank.rank, slowness), **caps)

    slowness = SLOWNESS[rank.rank]
    shared = model(slowness)
    shares = syncline.shares(shared, step_of_batch, TOTAL, budget_s=budget_s, quiet=rank.rank != 0)
    syncline.attach(shared, shares=shares)
    batches = {"equal": TOTAL // HOSTS, "shares": shares.batch, "ideal": TOTAL // HOSTS}
    models = {"equal": model(slowness), "shares": shared, "ideal": model(ideal)}
    contenders = []
    for name, net in models.items():
        step = training_step(net, partial(net, torch.zeros(batches[name], 1)))
        contenders.append(Contender(name, partial(repeated, step), STEPS))
    record = take_turns(rank, contenders, warmup=2, rounds=rounds)
    measured = {"batches": list(shares.batches), "equal_s": shares.equal_s, "step_s": shares.step_s}
    return {"record": record, "shares": measured}


def study(path: Path, ratios: list[float], rounds: int, budget_s: float) -> None:
    cells = []
    for ratio in ratios:
        main = partial(on_cluster, ratio=ratio, rounds=rounds, budget_s=budget_s)
        answers = launch(ClusterSpec(hosts=HOSTS, rate_bps=RATE_BPS), main, deadline_s=120 + 30 * rounds)
        turns = combine([answer["record"] for answer in answers], dict.fromkeys(("equal", "shares", "ideal"), STEPS))
        rows = {
            name: {
                **turn.quartiles.fields("step_ms", 1e3),
                **turn.ratio_to(turns["ideal"]).fields("vs_ideal"),
                "wire_bytes": round(turn.wire_bytes),
            }
            for name, turn in turns.items()
        }
        cells.append({"ratio": ratio, "shares": answers[0]["shares"], "rows": rows})
    about = {
        "command": "python benchmarks/shares.py",
        "torch": str(torch.__version__),
        "syncline": syncline.__version__,
    }
    cluster = {"hosts": HOSTS, "rate_bps": RATE_BPS, "emulated": True, "slowness": list(SLOWNESS)}
    model = {"profile": MODEL, "compute_s": COMPUTE_S, "fixed": FIXED, "total": TOTAL}
    write_json(path, {"schema": 1, **about, "cluster": cluster, "model": model, "rounds": rounds, "cells": cells})


def report(path: Path) -> int:
    """Print the table, and return 1 if a cell is slower than the limit."""
    result, late = json.loads(path.read_text()), 0
    print("| sending ÷ computing | batches | equal batches | `shares` | ideal | equal ÷ ideal | `shares` ÷ ideal |")
    print("|---|---|---|---|---|---|---|")
    for cell in result["cells"]:
        rows = cell["rows"]
        times = " | ".join(f"{rows[name]['step_ms']:.0f} ms" for name in ("equal", "shares", "ideal"))
        ratios = " | ".join(
            f"{rows[name]['vs_ideal']:.2f} ({rows[name]['vs_ideal_low']:.2f}–{rows[name]['vs_ideal_high']:.2f})"
            for name in ("equal", "shares")
        )
        print(f"| {cell['ratio']} | {', '.join(map(str, cell['shares']['batches']))} | {times} | {ratios} |")
        late += rows["shares"]["vs_ideal"] > LIMIT
    return min(1, late)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--ratios", default=",".join(map(str, RATIOS)))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--budget", type=float, default=12.0, help="seconds for syncline.shares")
    options = parser.parse_args()
    if options.json is not None:
        study(options.json, [float(ratio) for ratio in options.ratios.split(",")], options.rounds, options.budget)
    return report(options.report or options.json)


if __name__ == "__main__":
    raise SystemExit(main())
