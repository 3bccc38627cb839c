"""Does an emulated link hold its rate at every size?

All-reduces of 1, 4 and 32 MB over 4 and 8 hosts at 100 and 200 Mbit/s, as multiples of the ring's limit
2(P−1)/P·S/rate: from a standing start (links idle, their burst credit full) and back to back. Headers are about
4 % of an Ethernet frame, so 1.04 is what a perfect link gives.

    python benchmarks/link_rate.py --json benchmarks/results/link-rate-$(date +%F).json
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from syncline.cluster import ClusterSpec, Rank, launch
from syncline.cluster import links as shaping
from syncline.files import write_json

SIZES_MB = (1, 4, 32)
SETTLED = 0.02  # more of the CPU than this taken away, and it is not the links that were measured
IDLE_S = 0.06  # long enough for every token bucket to fill


def measure(rank: Rank, repeats: dict[int, int]) -> dict[str, Any]:
    rank.init_process_group()
    times: dict[str, Any] = {}
    for size, count in repeats.items():
        tensor = torch.zeros(size * 250_000)
        dist.all_reduce(tensor)
        standing = []
        for _ in range(count):
            dist.barrier()
            time.sleep(IDLE_S)
            dist.barrier()
            start = time.monotonic()
            dist.all_reduce(tensor)
            standing.append(time.monotonic() - start)
        dist.barrier()
        start = time.monotonic()
        for _ in range(count):
            dist.all_reduce(tensor)
        times[str(size)] = [statistics.median(standing), (time.monotonic() - start) / count]
    return times


def cpu_ticks() -> tuple[int, int]:
    """All ticks so far, and those that the machine's own host took away."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(ticks), ticks[7]


def stolen_since(before: tuple[int, int]) -> float:
    """The share of all ticks since then that the machine's own host took away."""
    total, stolen = cpu_ticks()
    return round((stolen - before[1]) / max(1, total - before[0]), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--mbit", type=int, nargs="+", default=[100, 200])
    parser.add_argument("--burst-ms", type=float, nargs="+", help="try other bursts than the one in use")
    parser.add_argument("--json")
    options = parser.parse_args()
    rows = []
    before = cpu_ticks()
    print("burst B    Mbit/s  hosts  size MB  standing start  back to back   (× the ring's limit)")
    for burst_ms in options.burst_ms or [None]:
        if burst_ms is not None:
            shaping.BURST_S, shaping.MIN_BURST_BYTES = burst_ms / 1000, 1600
        for mbit in options.mbit:
            for hosts in options.hosts:
                spec = ClusterSpec(hosts=hosts, rate_bps=mbit * 10**6)
                repeats = {size: 9 if size <= 4 else 3 for size in SIZES_MB}
                answers = launch(spec, lambda rank, repeats=repeats: measure(rank, repeats), deadline_s=600)
                for size in SIZES_MB:
                    limit = 2 * (hosts - 1) / hosts * size * 8 / mbit
                    standing, steady = (max(a[str(size)][i] for a in answers) / limit for i in (0, 1))
                    burst = shaping.burst_bytes(spec.rate_bps)
                    print(f"{burst:7d} {mbit:8d} {hosts:6d} {size:8d} {standing:15.3f} {steady:13.3f}", flush=True)
                    rows.append(
                        {
                            "burst_bytes": burst,
                            "rate_bps": spec.rate_bps,
                            "hosts": hosts,
                            "size_bytes": size * 10**6,
                            "standing_start": round(standing, 4),
                            "back_to_back": round(steady, 4),
                        }
                    )
    stolen = stolen_since(before)
    print(f"{stolen:.1%} of the CPU was taken away by the machine's host{': disturbed' if stolen > SETTLED else ''}")
    if options.json:
        write_json(options.json, {"torch": str(torch.__version__), "stolen": stolen, "rows": rows})


if __name__ == "__main__":
    main()
