"""What lanes are for: many small tensors at once.

32 tensors of 16 kB over 4 hosts at 200 Mbit/s: issued asynchronously on one process group, as stock DDP does, against
1, 2, 4 and 8 lanes. The ways take turns in the same processes; ratios are paired round by round.

    python benchmarks/lanes.py --json benchmarks/results/lanes-$(date +%F).json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from syncline.bench.rounds import Contender, Quartiles, combine, take_turns
from syncline.cluster import ClusterSpec, Rank, launch, parse_rate
from syncline.dist.comm import LaneGroups
from syncline.dist.lane import Job, ThreadLane
from syncline.exchange import Dense, State
from syncline.files import write_json


def on_lanes(tensors: list[torch.Tensor], lanes: int) -> Callable[[], None]:
    groups = [LaneGroups.create(dist.group.WORLD, timedelta(seconds=60)) for _ in range(lanes)]
    workers = [ThreadLane(f"lane-{index}") for index in range(lanes)]
    exchange, state = Dense(), State()

    def step() -> None:
        futures = []
        for index, tensor in enumerate(tensors):
            lane = index % lanes

            def run(tensor: torch.Tensor = tensor, lane: int = lane) -> Any:
                return exchange.run(tensor, state, groups[lane].comm)

            job = Job(bucket=index, lane=lane, flat=tensor, run=run, waits=exchange.waits)
            futures.append(workers[lane].submit(job))
        for future in futures:
            future.wait()

    return step


def on_one_group(tensors: list[torch.Tensor]) -> Callable[[], None]:
    def step() -> None:
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()

    return step


def measure(rank: Rank, count: int, nbytes: int, lanes: list[int], rounds: int) -> Any:
    rank.init_process_group()
    tensors = [torch.zeros(nbytes // 4) for _ in range(count)]
    contenders = [Contender("one group", on_one_group(tensors))]
    contenders += [Contender(f"{n} lanes", on_lanes(tensors, n)) for n in lanes]
    return take_turns(rank, contenders, warmup=3, rounds=rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--tensors", type=int, default=32)
    parser.add_argument("--bytes", type=int, default=16_000)
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json")
    options = parser.parse_args()
    spec = ClusterSpec(hosts=options.hosts, rate_bps=parse_rate(options.rate))
    records = launch(
        spec,
        lambda rank: measure(rank, options.tensors, options.bytes, options.lanes, options.rounds),
        deadline_s=600,
    )
    turns = combine(records)
    print(f"{options.tensors} tensors of {options.bytes} bytes, {spec.describe()}, {options.rounds} rounds")
    rows = []
    for name, one in turns.items():
        times = one.quartiles
        faster = Quartiles.of([b / a for a, b in zip(one.seconds, turns["one group"].seconds, strict=True)])
        print(
            f"{name:>10}: {times.median * 1000:6.1f} ms [{times.low * 1000:.1f}, {times.high * 1000:.1f}]"
            f"   {faster.median:.2f}× faster [{faster.low:.2f}, {faster.high:.2f}]"
        )
        rows.append(
            {
                "way": name,
                "ms": times.median * 1000,
                "ms_low": times.low * 1000,
                "ms_high": times.high * 1000,
                "faster": faster.median,
                "faster_low": faster.low,
                "faster_high": faster.high,
            }
        )
    if options.json:
        write_json(options.json, {"tensors": options.tensors, "bytes": options.bytes, "rows": rows})


if __name__ == "__main__":
    main()
