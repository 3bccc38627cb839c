"""Which all-to-all reaches the rate of the links, and do two hops of 16 bits take as long as a ring of 16 bits?

Every way takes one turn per round, in the same processes: the backend's all-to-all, the same in rotated rounds (in
round i a rank sends to rank+i and receives from rank−i), and rounds in which the receiver acknowledges; all-reduces of
fp32, bf16 and fp16; an all-gather; and a 16-bit sum in two hops (all-to-all, then all-gather). Times do not include
conversions. Each is printed as a share of line rate: the time in which the busiest link could carry the payload,
headers excluded, divided by the measured time.

    python benchmarks/all_to_all.py --hosts 4 --rate 200mbit --json benchmarks/results/all-to-all-$(date +%F).json
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from syncline.bench.rounds import Contender, Quartiles, combine, take_turns
from syncline.cluster import ClusterSpec, Rank, launch, parse_rate
from syncline.dist.paced import PacedAllToAll
from syncline.files import write_json

_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<unit>kB|MB)", re.IGNORECASE)


@dataclass(frozen=True)
class Way:
    """One way of exchanging, and the share of the fp32 buffer's bytes that its busiest link carries."""

    name: str
    step: Callable[[], None]
    carried: float


def gather(output: Tensor, input: Tensor) -> None:
    (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(output, input)


def rotated(output: Tensor, input: Tensor) -> Callable[[], None]:
    """Return an all-to-all in rounds without acknowledgements. With NCCL each round is one group of two calls."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sent, received = input.view(size, -1), output.view(size, -1)

    def step() -> None:
        received[rank].copy_(sent[rank])
        for turn in range(1, size):
            after, before = (rank + turn) % size, (rank - turn) % size
            if input.is_cuda:
                pair = [dist.P2POp(dist.isend, sent[after], after), dist.P2POp(dist.irecv, received[before], before)]
                works: list[Any] = dist.batch_isend_irecv(pair)
            else:
                works = [dist.irecv(received[before], before), dist.isend(sent[after], after)]
            for work in works:
                work.wait()

    return step


def paced(output: Tensor, input: Tensor) -> Callable[[], None]:
    """Return Syncline's all-to-all: in rounds that the receiver acknowledges, over gloo; in plain rounds over NCCL."""
    if input.is_cuda:
        return rotated(output, input)
    all_to_all, group = PacedAllToAll(), dist.group.WORLD
    assert group is not None
    return lambda: all_to_all(output, input, group=group).wait()


def ways(rank: Rank, nbytes: int) -> list[Way]:
    size = rank.world_size
    elements = nbytes // 4 // size * size
    wide, other = (torch.zeros(elements, device=rank.device) for _ in range(2))
    narrow, brain = (torch.zeros(elements, device=rank.device, dtype=kind) for kind in (torch.float16, torch.bfloat16))
    shard, narrow_shard = wide[: elements // size].clone(), narrow[: elements // size].clone()
    narrow_other = torch.zeros_like(narrow)
    once, twice = (size - 1) / size, 2 * (size - 1) / size
    paced_half = paced(narrow_other, narrow)

    def two_hops() -> None:
        dist.all_to_all_single(narrow_other, narrow)
        gather(narrow, narrow_shard)

    def two_paced_hops() -> None:
        paced_half()
        gather(narrow, narrow_shard)

    return [
        Way("all-to-all, native", lambda: dist.all_to_all_single(other, wide), once),
        Way("all-to-all, rounds", rotated(other, wide), once),
        Way("all-to-all, paced rounds", paced(other, wide), once),
        Way("all-gather", lambda: gather(other, shard), once),
        Way("all-reduce fp32", lambda: dist.all_reduce(wide), twice),
        Way("all-reduce fp16", lambda: dist.all_reduce(narrow), twice / 2),
        Way("all-reduce bf16", lambda: dist.all_reduce(brain), twice / 2),
        Way("two hops of 16 bits, native", two_hops, twice / 2),
        Way("two hops of 16 bits, paced", two_paced_hops, twice / 2),
    ]


def measure(rank: Rank, sizes: list[int], rounds: int, only: str) -> list[Any]:
    rank.init_process_group()
    answers = []
    for nbytes in sizes:
        found = [way for way in ways(rank, nbytes) if way.name.startswith(only)]
        contenders = [Contender(way.name, way.step) for way in found]
        record = take_turns(rank, contenders, warmup=2, rounds=rounds)
        answers.append({"record": record, "carried": {way.name: way.carried * nbytes for way in found}})
    return answers


def parse_size(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"size {text!r}: write 64kB or 8MB")
    return round(float(match["number"]) * (10**3 if match["unit"].lower() == "kb" else 10**6))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--sizes", default="1MB,8MB,32MB", help="bytes of the fp32 buffer of each rank")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="measure only ways whose names begin with this")
    parser.add_argument("--json")
    options = parser.parse_args()
    try:
        sizes = [parse_size(text) for text in options.sizes.split(",")]
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    spec = ClusterSpec(hosts=options.hosts, rate_bps=parse_rate(options.rate), device=options.device)
    print(f"{spec.describe()}, {options.device}, {options.rounds} rounds; share of line rate: median [quartiles]")
    answers = launch(spec, lambda rank: measure(rank, sizes, options.rounds, options.only), deadline_s=1200, grace_s=20)
    rows = []
    for index, nbytes in enumerate(sizes):
        for name, turns in combine([answer[index]["record"] for answer in answers]).items():
            limit_s = answers[0][index]["carried"][name] * 8 / spec.rate_bps
            share = Quartiles.of([limit_s / seconds for seconds in turns.seconds])
            milliseconds = turns.quartiles.median * 1000
            print(
                f"{nbytes / 1e6:7.3g} MB  {name:28} {milliseconds:8.1f} ms   "
                f"{share.median:.3f} [{share.low:.3f}, {share.high:.3f}]",
                flush=True,
            )
            rows.append(
                {
                    "size_bytes": nbytes,
                    "way": name,
                    "ms": milliseconds,
                    "share": share.median,
                    "share_low": share.low,
                    "share_high": share.high,
                }
            )
    if options.json:
        about = {"torch": str(torch.__version__), "cluster": spec.describe(), "device": options.device}
        if options.device == "cuda":
            about["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        write_json(options.json, {**about, "rows": rows})


if __name__ == "__main__":
    main()
