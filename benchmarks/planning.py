"""Plans against DDP, constant bucket sizes and the published planners, on the wire.

Recorded models are replayed on emulated hosts so that what plain DDP sends takes 0.5, 1 and 2 times as long as what it
computes. Emulated links are slow, so times, sizes and bucket caps are scaled alike: DDP's 1 and 25 MB become as much
smaller as the model does. What cannot be scaled is the start-up of a collective; it is printed beside backward.

In each cell the ranks probe the links, profile the workload, plan, and then all methods take turns.

    python benchmarks/planning.py --json F                    # all cells; what is in F is not measured again
    python benchmarks/planning.py --json F --only densenet201-cuda --hosts 4
    python benchmarks/planning.py --adaptive --json F         # DenseNet-201 beside a constant buffer of 64 MB
    python benchmarks/planning.py --report F

A constant buffer is Horovod's: as buckets of 64 MB, and as what is ready at each tick of its clock of 5 ms, scaled as
all times are, up to 64 MB.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from link_rate import cpu_ticks, stolen_since
from syncline._version import __version__
from syncline.bench.methods import make_planned, profile_workload
from syncline.bench.rounds import Contender, combine, take_turns, training_step
from syncline.cluster import ClusterSpec, Rank, launch
from syncline.ddp.attach import wrap
from syncline.ddp.handle import handle_of
from syncline.exchange import EXCHANGES
from syncline.files import write_text
from syncline.measure.probe import probe
from syncline.models.replay import ReplayModel
from syncline.plan import fusion
from syncline.plan.make import plan_for
from syncline.plan.search import options
from syncline.predict import Schedule, predict
from syncline.predict.exchange_time import solo_s, topology_of
from syncline.predict.schedule import DDP_CAPS, MIB
from syncline.records.bucket_caps import filled
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.records.profile import Profile, load_profile

MODELS = ("resnet152-cuda", "densenet201-cuda", "inception-v4-cuda", "bert-base-cuda")
HOSTS = (4, 8)
RATIOS = (0.5, 1.0, 2.0)
RATE_BPS = 200_000_000
COMPUTE_S = {4: 0.5, 8: 0.8}
"""Of a step: more hosts on the same cores have longer start-ups, which should not be all that is seen."""
CONSTANT_MB = (1, 5, 25, 100)
PLANNED = ("wfbp", "mgwfbp", "asc", "plan", "plan-lossy")
PROBE_S = 14.0
ADAPTIVE = ("densenet201-cuda", 4, 0.67)
CYCLE_S, BUFFER_MB = 0.005, 64


def cell(name: str, hosts: int, ratio: float) -> tuple[Profile, float]:
    """The scaled profile, and by how much its sizes were."""
    profile = load_profile(name)
    compute_s = COMPUTE_S[hosts]
    sent = ratio * compute_s * RATE_BPS / 8
    size = sent * hosts / (2 * (hosts - 1)) / profile.gradient_bytes
    return profile.scaled(time=compute_s / profile.step_s, bytes=size), size


def on_cluster(rank: Rank, profile: Profile, size: float, cycle_s: float | None, rounds: int) -> dict[str, Any]:
    rank.init_process_group(timeout_s=300)
    network = probe(budget_s=PROBE_S)
    exchanges = {name: EXCHANGES[name] for name in options(network, ("bf16", "sparse"))}
    net = ReplayModel(profile, seed=rank.rank, rank=rank.rank)
    measured = profile_workload(net, lambda model: model(), profile.model, topology_of(network), exchanges)
    caps = tuple(max(1, int(cap * size)) for cap in DDP_CAPS)
    plans: dict[str, Plan | tuple[int, ...]] = {"ddp": caps}
    constant = CONSTANT_MB if cycle_s is None else (BUFFER_MB,)
    plans |= {f"{mb} MB": (max(1, int(mb * MIB * size)),) for mb in constant}
    if cycle_s is not None:
        plans["cycles"] = clocked(measured, network, cycle_s, BUFFER_MB * MIB * size)
    for method in PLANNED if cycle_s is None else ("plan",):
        plans[method] = make_planned(method, measured, network, paced=True, caps=caps)
    contenders, about, handles = [], {}, {}
    for method, plan in plans.items():
        net = ReplayModel(profile, seed=rank.rank, rank=rank.rank)
        if isinstance(plan, Plan) and not plan.nothing:
            model = wrap(net, plan, network=network)
            handles[method] = handle_of(model)
            lanes, through = plan.lanes, sorted({type(one).__name__ for one in plan.exchanges})
            about[method] = {"buckets": len(plan.buckets), "lanes": lanes, "through": through}
            expected_s = plan.iteration_s
        else:
            layout = caps if isinstance(plan, Plan) else plan
            model = DDP(net, bucket_cap_mb_list=[cap / MIB for cap in layout])
            schedule = Schedule("ddp", filled(measured.gradients, layout))
            about[method] = {"buckets": len(schedule.buckets), "lanes": 1, "through": ["DDP"]}
            expected_s = predict(measured, network, schedule, paced=True).iteration_s
        about[method]["predicted_ms"] = expected_s * 1e3
        contenders.append(Contender(method, training_step(model, model)))
    record = take_turns(rank, contenders, warmup=4, rounds=rounds)
    for method, handle in handles.items():
        about[method]["mismatch"] = handle.mismatch
    startup_s = solo_s(network, "all_reduce", 1, 4)
    return {"record": record, "about": about, "startup_ms": startup_s * 1e3, "backward_ms": measured.backward_s * 1e3}


def clocked(profile: Profile, network: Network, cycle_s: float, buffer_bytes: float) -> Plan:
    """What is ready at each tick of a clock."""
    startup_s = solo_s(network, "all_reduce", 1, 4)
    whole = profile.gradient_bytes
    line = fusion.line(startup_s, (solo_s(network, "all_reduce", whole // 4, 4) - startup_s) / whole)
    ready_s = np.array([gradient.ready_s for gradient in profile.gradients])
    nbytes = np.array([float(gradient.bytes) for gradient in profile.gradients])
    sizes = cycles(fusion.Gradients(ready_s, nbytes, line), cycle_s, buffer_bytes)
    ends = list(itertools.accumulate(sizes))
    buckets = tuple(tuple(range(end - count, end)) for count, end in zip(sizes, ends, strict=True))
    chosen = predict(profile, network, Schedule("cycles", buckets), paced=True)
    return plan_for(chosen, plain_s=chosen.iteration_s, reason="by the clock")


def cycles(gradients: fusion.Gradients, cycle_s: float, buffer_bytes: float) -> tuple[int, ...]:
    """Fuse as Horovod does: at each tick of a clock, all ready gradients form a bucket, up to a size."""
    sizes: list[int] = []
    now_s, first = 0.0, 0
    while first < gradients.count:
        # The first tick at which something is ready.
        now_s += max(1.0, math.ceil((float(gradients.ready_s[first]) - now_s) / cycle_s)) * cycle_s
        last, filled = first, 0.0
        while last < gradients.count and float(gradients.ready_s[last]) <= now_s + 1e-12:
            filled += float(gradients.bytes[last])
            if last > first and filled > buffer_bytes:
                break
            last += 1
        last = max(last, first + 1)
        bucket_bytes = gradients.bytes[first:last].sum(keepdims=True)
        now_s += max(0.0, float(gradients.cost_s(bucket_bytes)[0]) - cycle_s)
        sizes.append(last - first)
        first = last
    return tuple(sizes)


def measure(path: Path, cells: list[tuple[str, int, float]], rounds: int, *, adaptive: bool = False) -> None:
    about = {"schema": 1, "syncline": __version__, "torch": str(torch.__version__), "rate_bps": RATE_BPS}
    result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {**about, "cells": []}
    finished = {(one["model"], one["hosts"], one["ratio"]) for one in result["cells"]}
    for name, count, ratio in cells:
        if (name, count, ratio) in finished:
            continue
        began, ticks = time.monotonic(), cpu_ticks()
        profile, size = cell(name, count, ratio)
        spec = ClusterSpec(hosts=count, rate_bps=RATE_BPS)
        cycle_s = CYCLE_S * COMPUTE_S[count] / load_profile(name).step_s if adaptive else None
        work = partial(on_cluster, profile=profile, size=size, cycle_s=cycle_s, rounds=rounds)
        answers = launch(spec, work, deadline_s=900)
        turns = combine([answer["record"] for answer in answers])
        rows = {}
        for method, found in answers[0]["about"].items():
            times, ratio_to = turns[method].quartiles, turns[method].ratio_to(turns["ddp"])
            rows[method] = {
                "step_ms": times.median * 1e3,
                "step_ms_low": times.low * 1e3,
                "step_ms_high": times.high * 1e3,
                "vs_ddp": ratio_to.median,
                "vs_ddp_low": ratio_to.low,
                "vs_ddp_high": ratio_to.high,
                **found,
            }
        one = {"model": name, "hosts": count, "ratio": ratio, "rounds": rounds, "size_scale": size}
        one |= {"startup_ms": answers[0]["startup_ms"], "backward_ms": answers[0]["backward_ms"], "rows": rows}
        one |= {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "stolen": stolen_since(ticks)}
        result["cells"].append(one)
        write_text(path, json.dumps(result, indent=1) + "\n")
        print(f"{name} {count} hosts × {ratio:g}: {time.monotonic() - began:.0f} s", flush=True)
        print(_line(one), flush=True)


def _line(one: dict[str, Any]) -> str:
    rows = one["rows"]
    return "  " + ", ".join(
        f"{method} {row['step_ms']:.0f} ({row['predicted_ms']:.0f})" for method, row in rows.items()
    )


def report(path: Path) -> None:
    cells = json.loads(path.read_text())["cells"]
    methods = list(cells[0]["rows"])
    print("| model | hosts | comm. / comp. | start-up / backward | " + " | ".join(methods) + " | plan / best other |")
    print("|---" * (len(methods) + 5) + "|")
    worst, errors = [], []
    for one in cells:
        rows = one["rows"]
        others = [row["step_ms"] for method, row in rows.items() if not method.startswith("plan")]
        beside = rows["plan"]["step_ms"] / min(others)
        worst.append((beside, f"{one['model']} {one['hosts']} × {one['ratio']:g}"))
        errors.append(rows["plan"]["predicted_ms"] / rows["plan"]["step_ms"] - 1)
        share = one["startup_ms"] / one["backward_ms"]
        print(
            f"| {one['model'].removesuffix('-cuda')} | {one['hosts']} | {one['ratio']:g} | {share:.1%} | "
            + " | ".join(f"{rows[method]['step_ms']:.0f}" for method in methods)
            + f" | {beside:.3f} |"
        )
    print(
        f"\nPlan beside the best other, worst: {max(worst)}; "
        f"over 1.03 in {sum(beside > 1.03 for beside, _ in worst)} of {len(cells)}"
    )
    wfbp = [one["rows"]["wfbp"]["step_ms"] / one["rows"]["plan"]["step_ms"] for one in cells]
    ddp = [one["rows"]["ddp"]["step_ms"] / one["rows"]["plan"]["step_ms"] for one in cells]
    lossy = [one["rows"]["ddp"]["step_ms"] / one["rows"]["plan-lossy"]["step_ms"] for one in cells]
    for name, values in (("wfbp", wfbp), ("ddp", ddp), ("ddp, for plan-lossy", lossy)):
        print(
            f"Times faster than {name}: {min(values):.2f} to {max(values):.2f}, median {statistics.median(values):.2f}"
        )
    within = sum(abs(error) <= 0.1 for error in errors)
    print(
        f"Plan's prediction within 10 % in {within} of {len(cells)}: {', '.join(f'{error:+.0%}' for error in errors)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--only", action="append", choices=MODELS)
    parser.add_argument("--hosts", type=int, action="append", choices=HOSTS)
    parser.add_argument("--ratio", type=float, action="append", choices=RATIOS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--adaptive", action="store_true", help="one cell, beside a constant buffer")
    args = parser.parse_args()
    models, hosts, ratios = args.only or MODELS, args.hosts or HOSTS, args.ratio or RATIOS
    cells = [(name, count, ratio) for count, ratio, name in itertools.product(hosts, ratios, models)]
    if args.json:
        measure(args.json, [ADAPTIVE] if args.adaptive else cells, args.rounds, adaptive=args.adaptive)
    if args.report:
        report(args.report)


if __name__ == "__main__":
    main()
