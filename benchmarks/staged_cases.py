"""Three clusters with one thing wrong each: does the diagnosis name it, and does its remedy work as predicted?

Too many tiny tensors, a slow trunk between racks, one slow rank. Each is probed and profiled as a user would do it,
diagnosed, and only then measured, as it is and with what was wrong put right.

    python benchmarks/staged_cases.py --json F
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from equal_gradients import equal_gradients
from syncline.bench.methods import Wrapping
from syncline.bench.rounds import Contender, combine, take_turns, training_step
from syncline.cluster import ClusterSpec, Rank, launch
from syncline.files import write_text
from syncline.measure.backward import measure_backward
from syncline.measure.overhead import measure_overheads
from syncline.measure.probe import probe
from syncline.models.replay import ReplayModel
from syncline.predict import Schedule, predict
from syncline.predict.diagnosis import diagnose, lost_to
from syncline.records.network import Network
from syncline.records.profile import Profile, RankTimes, load_profile


@dataclass(frozen=True)
class Case:
    """`put_right` is what a person who believed the diagnosis would change."""

    name: str
    culprit: str
    workload: Profile
    cluster: ClusterSpec
    plan: str
    put_right: Callable[[Case], Case]


def tiny_tensors() -> Profile:
    """400 gradients of 2 kB, one every half millisecond."""
    return equal_gradients(400, 2048, forward_s=0.1, backward_s=0.2)


def resnet() -> Profile:
    return load_profile("resnet50-224px-cuda").scaled(time=8, bytes=0.02)


def with_a_slow_rank(profile: Profile) -> Profile:
    pace = {2: 1.8}
    ranks = tuple(
        RankTimes(
            rank=rank,
            forward_s=profile.forward_s * pace.get(rank, 1.0),
            backward_s=profile.backward_s * pace.get(rank, 1.0),
            update_s=profile.update_s,
        )
        for rank in range(4)
    )
    return msgspec.structs.replace(profile, ranks=ranks)


def replace(case: Case, **changes: Any) -> Case:
    return Case(**{**{name: getattr(case, name) for name in case.__dataclass_fields__}, **changes})


CASES = [
    Case(
        "too many tiny tensors",
        "startups",
        tiny_tensors(),
        ClusterSpec(hosts=4, rate_bps=200_000_000),
        "ddp,bucket_mb=0.001",
        lambda case: replace(case, plan="ddp,bucket_mb=0.25"),
    ),
    Case(
        "a slow trunk",
        "rack",
        resnet(),
        ClusterSpec(hosts=4, rate_bps=200_000_000, racks=2, trunk_rate_bps=40_000_000),
        "ddp,bucket_mb=0.5",
        lambda case: replace(
            case, cluster=ClusterSpec(hosts=4, rate_bps=200_000_000, racks=2, trunk_rate_bps=100_000_000)
        ),
    ),
    Case(
        "one slow rank",
        "straggler",
        with_a_slow_rank(resnet()),
        ClusterSpec(hosts=4, rate_bps=200_000_000),
        "ddp,bucket_mb=0.5",
        lambda case: replace(case, workload=resnet()),
    ),
]


def watched(rank: Rank, case: Case, budget_s: float) -> dict[str, Any]:
    """What a user would run first."""
    rank.init_process_group()
    network = probe(budget_s=budget_s).with_nominal_rates(rank.spec.rate_bps, rank.spec.trunk_rate_bps)
    net = ReplayModel(case.workload, seed=rank.rank, rank=rank.rank)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    profile = measure_backward(
        net, lambda m: m(), steps=6, warmup=2, optimizer=optimizer, model_name=case.workload.model
    )
    profile = msgspec.structs.replace(profile, overheads=measure_overheads(rank.device, topology=rank.world_size))
    return {"network": msgspec.to_builtins(network), "profile": msgspec.to_builtins(profile)}


def measured(case: Case, rounds: int) -> float:
    def main(rank: Rank) -> dict[str, Any]:
        rank.init_process_group()
        net = ReplayModel(case.workload, seed=rank.rank, rank=rank.rank)
        model = Wrapping(rank.device, Schedule.parse(case.workload, case.plan).bucket_mb).ddp(net)
        contender = Contender("it", training_step(model, model))
        return {"record": take_turns(rank, [contender], warmup=3, rounds=rounds)}

    answers = launch(case.cluster, main, deadline_s=300)
    return combine([answer["record"] for answer in answers])["it"].quartiles.median


def remedied_s(profile: Profile, network: Network, before: Case, after: Case) -> float:
    """The prediction for the case put right, from what was measured while it was wrong."""
    if before.cluster != after.cluster and after.cluster.trunk_rate_bps is not None:
        network = network.with_rate(after.cluster.trunk_rate_bps, "rack")
    if before.workload != after.workload:
        profile = msgspec.structs.replace(profile, ranks=(), jitter_s=0.0)
    return predict(profile, network, Schedule.parse(profile, after.plan), paced=True).iteration_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--budget", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    rows = []
    for case in CASES:
        answer = launch(case.cluster, lambda rank, case=case: watched(rank, case, args.budget), deadline_s=300)[0]
        network, profile = msgspec.convert(answer["network"], Network), msgspec.convert(answer["profile"], Profile)
        schedule = Schedule.parse(profile, case.plan)
        found = diagnose(profile, network, schedule)
        better = case.put_right(case)
        row = {
            "case": case.name,
            "culprit": found.culprit,
            "right": found.culprit == case.culprit,
            "why": found.why,
            "first_remedies": [remedy.what for remedy in found.remedies[:3]],
            "lost_ms": {name: seconds * 1e3 for name, seconds in lost_to(found.prediction.losses).items()},
            "predicted_ms": predict(profile, network, schedule, paced=True).iteration_s * 1e3,
            "predicted_put_right_ms": remedied_s(profile, network, case, better) * 1e3,
            "measured_ms": measured(case, args.rounds) * 1e3,
            "measured_put_right_ms": measured(better, args.rounds) * 1e3,
        }
        rows.append(row)
        print(json.dumps(row, indent=1, ensure_ascii=False), flush=True)
    if args.json:
        date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        write_text(args.json, json.dumps({"date": date, "rows": rows}, indent=1, ensure_ascii=False) + "\n")
    raise SystemExit(0 if all(row["right"] for row in rows) else 1)


if __name__ == "__main__":
    main()
