"""Weights gathered behind the next forward pass, beside plain DDP: recorded models on emulated hosts.

Models are replayed so that what plain DDP sends takes 0.7, 1 and 1.5 times as long as what it computes. Emulated links
are slow, so times, sizes and bucket caps are scaled alike. Methods take turns. Each turn of a method begins with a step
that is not measured, and takes the time of the next ones, so that every measured forward has weights to wait for.

    python benchmarks/overlap.py --json F                 # what is in F is not measured again
    python benchmarks/overlap.py --json F --only bert-base-cuda --ratios 1
    python benchmarks/overlap.py --report F

`overlap` has DDP's buckets, `overlap-small` has buckets of a fifth of their size, and `ddp-small` is plain DDP with
these. `overlap-best` has buckets of the size that predictions choose. Speed-ups are over the faster of the two plain
DDPs, round by round. The method that is `chosen` is the one that predictions, made before the first step, say is the
fastest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import syncline
from link_rate import cpu_ticks, stolen_since
from syncline.bench.methods import profile_workload, slow_sgd
from syncline.bench.rounds import Contender, combine, take_turns, training_step
from syncline.cluster import ClusterSpec, Rank, launch
from syncline.files import write_text
from syncline.measure.probe import probe
from syncline.models.replay import ReplayModel
from syncline.predict import Schedule, predict
from syncline.predict.bucket_size import best_overlap
from syncline.predict.exchange_time import topology_of
from syncline.predict.schedule import DDP_CAPS, MIB
from syncline.records.bucket_caps import filled
from syncline.records.profile import Profile, load_profile

MODELS = ("resnet152-cuda", "bert-base-cuda", "gpt2-small-cuda")
RATIOS = (0.7, 1.0, 1.5)
HOSTS, RATE_BPS, COMPUTE_S = 4, 200_000_000, 0.5
STEPS = 3  # that are measured together
PROBE_S = 12.0


def scaled(name: str, ratio: float) -> tuple[Profile, float]:
    """Return the scaled profile, and the factor of its sizes."""
    profile = load_profile(name)
    sent = ratio * COMPUTE_S * RATE_BPS / 8
    size = sent * HOSTS / (2 * (HOSTS - 1)) / profile.gradient_bytes
    return profile.scaled(time=COMPUTE_S / profile.step_s, bytes=size), size


def on_cluster(rank: Rank, profile: Profile, size: float, rounds: int) -> dict[str, Any]:
    rank.init_process_group(timeout_s=300)
    network = probe(budget_s=PROBE_S)
    net = ReplayModel(profile, seed=rank.rank, rank=rank.rank)
    exchanges = {"dense": syncline.Dense}
    measured = profile_workload(net, lambda model: model(), profile.model, topology_of(network), exchanges)
    caps = {
        "": [max(1, int(cap * size)) for cap in DDP_CAPS],
        "-small": [max(1, int(cap * size / 5)) for cap in DDP_CAPS],
    }
    best = best_overlap(measured, network, caps=caps[""], paced=True)[1]
    caps["-best"] = list(best)
    contenders, about, handles = [], {}, {}
    for kind, limits in caps.items():
        for method in ("overlap",) if kind == "-best" else ("ddp", "overlap"):
            model = DDP(
                ReplayModel(profile, seed=rank.rank, rank=rank.rank), bucket_cap_mb_list=[c / MIB for c in limits]
            )
            optimizer = slow_sgd(model.parameters())
            step = training_step(model, model, optimizer)
            handle = syncline.attach(model, optimizer=optimizer, overlap="forward") if method == "overlap" else None
            settle = (lambda: None) if handle is None else handle.wait
            handles[method + kind] = handle
            contenders.append(
                Contender(method + kind, partial(repeated, step), STEPS, lead=step, lead_steps=1, settle=settle)
            )
            schedule = Schedule(method, filled(measured.gradients, tuple(limits)), overlaps=method == "overlap")
            expected_s = predict(measured, network, schedule, paced=True).iteration_s
            about[method + kind] = {"buckets": len(schedule.buckets), "predicted_ms": expected_s * 1e3}
    record = take_turns(rank, contenders, warmup=2, rounds=rounds)
    for method, handle in handles.items():
        if handle is not None:
            about[method] |= {"sent_bytes": handle.stats().sent_bytes, "predicted_bytes": handle.predicted_sent_bytes()}
            about[method]["whole"] = sum(
                type(b.exchange).__name__ == "AllReduce" for b in handle._attached.buckets.values()
            )
    return {
        "record": record,
        "about": about,
        "forward_ms": measured.forward_s * 1e3,
        "backward_ms": measured.backward_s * 1e3,
    }


def repeated(step: Any) -> None:
    for _ in range(STEPS):
        step()


def study(path: Path, models: list[str], ratios: list[float], rounds: int) -> None:
    result = (
        json.loads(path.read_text())
        if path.exists()
        else {
            "schema": 1,
            "command": "python benchmarks/overlap.py",
            "torch": str(torch.__version__),
            "syncline": syncline.__version__,
            "cluster": {"hosts": HOSTS, "rate_bps": RATE_BPS, "emulated": True},
            "cells": [],
        }
    )
    for name in models:
        for ratio in ratios:
            if any((cell["model"], cell["ratio"]) == (name, ratio) for cell in result["cells"]):
                continue
            profile, size = scaled(name, ratio)
            began_s, ticks = time.monotonic(), cpu_ticks()
            answers = launch(
                ClusterSpec(hosts=HOSTS, rate_bps=RATE_BPS),
                partial(on_cluster, profile=profile, size=size, rounds=rounds),
                deadline_s=1800,
            )
            about = answers[0]["about"]
            turns = combine([answer["record"] for answer in answers], dict.fromkeys(about, STEPS))
            best = (
                turns["ddp"]
                if turns["ddp"].quartiles.median <= turns["ddp-small"].quartiles.median
                else turns["ddp-small"]
            )
            rows = {
                method: {
                    **turns[method].quartiles.fields("step_ms", 1e3),
                    **about[method],
                    "of_ddp": turns[method].ratio_to(turns["ddp"]).median,
                    "of_best_ddp": turns[method].ratio_to(best).median,
                }
                for method in about
            }
            cell = {
                "model": name,
                "ratio": ratio,
                "rounds": rounds,
                "rows": rows,
                "stolen": round(stolen_since(ticks), 4),
            }
            cell |= {key: answers[0][key] for key in ("forward_ms", "backward_ms")}
            result["cells"].append(cell)
            write_text(path, json.dumps(result, indent=1))
            print(text_of(cell), f"({time.monotonic() - began_s:.0f} s)", flush=True)


def text_of(cell: dict[str, Any]) -> str:
    parts = []
    for method, row in cell["rows"].items():
        whole = f", {row['whole']} whole" if "whole" in row else ""
        about = f"predicted {row['predicted_ms']:.0f}, {row['buckets']} buckets{whole}"
        parts.append(f"{method} {row['step_ms']:.0f} ms ({about})")
    gain = 1 / cell["rows"][chosen_of(cell)]["of_best_ddp"]
    return f"{cell['model']} × {cell['ratio']}: {'; '.join(parts)}; chosen: {chosen_of(cell)}, {gain:.2f}×"


def chosen_of(cell: dict[str, Any]) -> str:
    """Return the method that was predicted to be the fastest, and by at least 2 % if it is not plain DDP."""
    rows = cell["rows"]
    best = min(rows, key=lambda method: float(rows[method]["predicted_ms"]))
    return best if rows[best]["predicted_ms"] < 0.98 * rows["ddp"]["predicted_ms"] else "ddp"


def report(path: Path) -> None:
    cells = json.loads(path.read_text())["cells"]
    print("| Model | Communication / computation | Plain DDP | Overlap | predicted | Speed-up | Chosen |")
    print("|---|---|---|---|---|---|---|")
    errors = []
    for cell in cells:
        rows = cell["rows"]
        errors += [abs(row["predicted_ms"] / row["step_ms"] - 1) for row in rows.values()]
        plain_ms = min(rows["ddp"]["step_ms"], rows["ddp-small"]["step_ms"])
        overlaps = [method for method in rows if method.startswith("overlap")]
        best = min(overlaps, key=lambda method: float(rows[method]["predicted_ms"]))
        gain, name = 1 / rows[best]["of_best_ddp"], cell["model"].removesuffix("-cuda")
        times = f"{plain_ms:.0f} ms | {rows[best]['step_ms']:.0f} ms | {rows[best]['predicted_ms']:.0f} ms"
        print(f"| {name} | {cell['ratio']} | {times} | {gain:.2f}× | {chosen_of(cell)} |")
    print(f"prediction errors: median {statistics.median(errors):.1%}, largest {max(errors):.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", default=list(MODELS))
    parser.add_argument("--ratios", nargs="*", type=float, default=list(RATIOS))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--report", type=Path)
    options = parser.parse_args()
    if options.json is not None:
        study(options.json, options.only, options.ratios, options.rounds)
    if options.report is not None:
        report(options.report)


if __name__ == "__main__":
    main()
