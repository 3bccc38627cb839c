"""What a hierarchical exchange gains over flat ones: on hosts of several ranks, with ranks in any order, behind trunks.

Each case is one emulated cluster. Links are probed, every way's step is predicted, then all ways take turns in the same
processes; speed-ups are medians of the rounds' ratios. The gradients are a recorded VGG-16's, scaled to 8 MB, with a
backward of 2 ms, so that nearly nothing hides behind computation: what is compared are the exchanges.

    python benchmarks/hierarchical.py --json benchmarks/results/hierarchical-$(date +%F).json
    python benchmarks/hierarchical.py --cases "2 × 4" --rounds 5
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import syncline
from equal_gradients import equal_gradients
from link_rate import cpu_ticks, stolen_since
from syncline.bench.methods import Wrapping, profile_workload
from syncline.bench.rounds import Contender, combine, take_turns, training_step
from syncline.bench.run import Workload
from syncline.cluster import ClusterSpec, Rank, launch
from syncline.ddp.attach import attach
from syncline.exchange import Dense, Exchange, Hierarchical
from syncline.files import write_json
from syncline.measure.probe import probe
from syncline.predict import Schedule, ddp_buckets, predict
from syncline.predict.exchange_time import topology_of
from syncline.records.profile import Profile, load_profile

MBIT = 1_000_000


@dataclass(frozen=True)
class Way:
    """One way to exchange the same gradients; without an exchange, plain DDP."""

    name: str
    exchange: Exchange | None = None
    lanes: int | None = None


@dataclass(frozen=True)
class Case:
    about: str
    spec: ClusterSpec
    profile: Profile
    ways: tuple[Way, ...]
    limit: str
    """What the busiest link allows at best."""
    bucket_mb: float | None = None


def vgg16(nbytes: int) -> Profile:
    recorded = load_profile("vgg16-cuda")
    return recorded.scaled(time=0.2, bytes=nbytes / recorded.gradient_bytes)


def of_64_kb(count: int) -> Profile:
    """So many gradients of 64 kB."""
    return equal_gradients(count, 64_000, forward_s=0.001, backward_s=0.002)


DDP, FLAT, AUTO = Way("ddp"), Way("dense", Dense()), Way("hierarchical", Hierarchical())
SHAPES = (
    Way("leader", Hierarchical(shape="leader")),
    Way("sharded", Hierarchical(shape="sharded")),
    Way("not pipelined", Hierarchical(shape="sharded", chunks=1)),
)
PAIRS = Hierarchical(levels=[[0, 1], [2, 3], [4, 5], [6, 7]])


def cases() -> dict[str, Case]:
    two_by_four = ClusterSpec(hosts=2, per_host=(4, 4), rate_bps=200 * MBIT)
    four_by_two = ClusterSpec(hosts=4, per_host=(2,) * 4, rate_bps=200 * MBIT)
    scrambled = ClusterSpec(hosts=4, per_host=(2,) * 4, rate_bps=200 * MBIT, rank_order="scrambled")
    racks = ClusterSpec(hosts=4, per_host=(2,) * 4, rate_bps=200 * MBIT, racks=2, trunk_rate_bps=100 * MBIT)
    return {
        "2 × 4": Case("8 MB", two_by_four, vgg16(8_000_000), (DDP, FLAT, AUTO, *SHAPES), "1.75"),
        "2 × 4 settings": Case(
            "8 MB, lanes and chunks",
            two_by_four,
            vgg16(8_000_000),
            (
                DDP,
                AUTO,
                Way("one lane", Hierarchical(), 1),
                Way("4 chunks", Hierarchical(shape="sharded", chunks=4)),
                Way("32 chunks", Hierarchical(shape="sharded", chunks=32)),
            ),
            "1.75",
        ),
        "4 × 2 scrambled": Case("8 MB, ranks dealt over the hosts", scrambled, vgg16(8_000_000), (DDP, AUTO), "2.33"),
        "4 × 2": Case("8 MB, ranks host by host", four_by_two, vgg16(8_000_000), (DDP, FLAT, AUTO), "1.17"),
        "2 × 2 × 2": Case(
            "8 MB, two racks behind 100 Mbit/s",
            racks,
            vgg16(8_000_000),
            (DDP, AUTO, Way("two levels", PAIRS), SHAPES[-1]),
            "1.75",
        ),
        "64 kB": Case("one bucket of 64 kB", two_by_four, of_64_kb(1), (DDP, FLAT, AUTO), "start-ups"),
        "16 × 64 kB": Case(
            "16 buckets of 64 kB",
            two_by_four,
            of_64_kb(16),
            (DDP, FLAT, Way("dense, 4 lanes", Dense(), 4), AUTO, Way("hierarchical, 4 lanes", Hierarchical(), 4)),
            "1.75, and start-ups",
            bucket_mb=0.06,
        ),
    }


def measure(rank: Rank, case: Case, rounds: int, budget_s: float) -> dict[str, Any]:
    rank.init_process_group()
    network = probe(budget_s=budget_s)
    workload = Workload(case.about, 1, case.profile)
    net = workload.build(rank)
    profile = profile_workload(net, lambda model: model(), case.about, topology_of(network))
    contenders, handles, predicted = [], {}, {}
    for way in case.ways:
        ddp = Wrapping(rank.device, case.bucket_mb).ddp(workload.build(rank))
        if way.exchange is not None:
            handles[way.name] = attach(ddp, way.exchange, lanes=way.lanes, network=network)
        contenders.append(Contender(way.name, training_step(ddp, ddp)))
        name = "hierarchical" if isinstance(way.exchange, Hierarchical) else "dense"
        schedule = Schedule(
            name=way.name,
            buckets=ddp_buckets(profile.gradients, case.bucket_mb),
            exchange=way.exchange or Dense(),
            exchange_name=name,
            lanes=handles[way.name].lanes if way.name in handles else 1,
        )
        if getattr(way.exchange, "levels", None) is None:  # other levels than the network's are not predicted
            predicted[way.name] = predict(profile, network, schedule, paced=True).iteration_s * 1e3
    record = take_turns(rank, contenders, warmup=4, rounds=rounds)
    return {
        "record": record,
        "predicted_ms": predicted,
        "tree": next(handle.tree.describe() for handle in handles.values() if handle.tree is not None),
        "ways": {name: handle.paths for name, handle in handles.items()},
        "sent": {name: handle.stats().sent_bytes for name, handle in handles.items()},
        "foreseen": {name: handle.predicted_sent_bytes() for name, handle in handles.items()},
    }


def run(name: str, case: Case, rounds: int, budget_s: float) -> dict[str, Any]:
    before = cpu_ticks()
    answers = launch(case.spec, lambda rank: measure(rank, case, rounds, budget_s), deadline_s=900)
    turns = combine([answer["record"] for answer in answers])
    print(f"\n{name}: {case.about}; limit {case.limit}\n{answers[0]['tree']}", flush=True)
    rows = []
    for way in case.ways:
        ratio, times = turns["ddp"].ratio_to(turns[way.name]), turns[way.name].quartiles
        foreseen = answers[0]["predicted_ms"].get(way.name)
        rows.append(
            {
                "way": way.name,
                "step_ms": times.median * 1e3,
                "step_ms_low": times.low * 1e3,
                "step_ms_high": times.high * 1e3,
                "predicted_ms": foreseen,
                "times_faster": ratio.median,
                "times_faster_low": ratio.low,
                "times_faster_high": ratio.high,
                "wire_bytes": turns[way.name].wire_bytes,
                "sent_bytes": _most(answers, "sent", way.name),
                "predicted_sent_bytes": _most(answers, "foreseen", way.name),
                "ways": answers[0]["ways"].get(way.name, {}),
            }
        )
        said = "" if foreseen is None else f"predicted {foreseen:.0f}"
        chosen = "; ".join(f"{count} × {text}" for text, count in rows[-1]["ways"].items())
        print(
            f"  {way.name:24} {times.median * 1e3:7.1f} ms  {said:14}  {ratio.median:.2f}× "
            f"({ratio.low:.2f}–{ratio.high:.2f})  {chosen}",
            flush=True,
        )
    return {
        "case": name,
        "about": case.about,
        "limit": case.limit,
        "cluster": case.spec.describe(),
        "rank_order": case.spec.rank_order,
        "tree": answers[0]["tree"],
        "rounds": rounds,
        "stolen": stolen_since(before),
        "rows": rows,
    }


def _most(answers: Sequence[dict[str, Any]], what: str, way: str) -> dict[str, int]:
    """Of the busiest rank, by level."""
    levels = {level for answer in answers for level in answer[what].get(way, {})}
    return {level: max(answer[what][way].get(level, 0) for answer in answers) for level in sorted(levels)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = cases()
    parser.add_argument("--cases", nargs="+", choices=list(known), default=list(known), metavar="CASE")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--budget", type=float, default=30.0, help="seconds for probing each cluster's links")
    parser.add_argument("--json")
    options = parser.parse_args()
    results = [run(name, known[name], options.rounds, options.budget) for name in options.cases]
    if options.json:
        about = {"schema": 1, "torch": str(torch.__version__), "syncline": syncline.__version__}
        write_json(options.json, {**about, "cases": results})


if __name__ == "__main__":
    main()
