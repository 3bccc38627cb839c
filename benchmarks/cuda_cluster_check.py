"""Checks that ranks sharing one GPU behave like a cluster: NCCL over shaped links, small messages without time slicing.

    python benchmarks/cuda_cluster_check.py --ranks 4 --rate 1gbit

Runs the same two all-reduces with the CUDA MPS daemon in three places and prints one line for each:

- `inside`: started by the cluster, in its PID namespace, as `ClusterSpec(device="cuda")` does;
- `outside`: started by this process, outside all namespaces;
- `none`: not at all, so that ranks time-slice the GPU.

Exits with 1 if a run fails, if links are not shaped, if the links are faster than they should be, or if an MPS process
is left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from syncline.cluster import ClusterSpec, Rank, format_rate, launch, parse_rate, why_not_shaped
from syncline.cluster.mps import shared_gpu
from syncline.errors import SynclineError

SMALL_BYTES = 4 * 1024
LARGE_BYTES = 32 * 1024 * 1024
PLACES = ("inside", "outside", "none")


def main() -> int:
    parser = argparse.ArgumentParser(description="NCCL over shaped links, on one GPU.")
    parser.add_argument("--ranks", type=int, default=4, help="one host each")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--places", default=",".join(PLACES), help="where the MPS daemon runs")
    arguments = parser.parse_args()
    spec = ClusterSpec(hosts=arguments.ranks, rate_bps=parse_rate(arguments.rate), device="cuda")
    if (reason := why_not_shaped()) is not None:
        print(f"links cannot be shaped here: {reason}")
        return 1
    limit_s = ring_limit_s(spec)
    print(f"{spec.describe()}; a ring needs {limit_s * 1000:.0f} ms for {LARGE_BYTES >> 20} MB")
    print(f"{'MPS':8} {'4 KB all-reduce':>16} {'32 MB all-reduce':>17} {'of the ring limit':>18} {'left behind':>12}")
    good = True
    for place in arguments.places.split(","):
        before = mps_processes()
        try:
            with daemon_at(place):
                small_s, large_s = measure(spec)
        except SynclineError as error:
            print(f"{place:8} failed: {error}")
            good = False
            continue
        left = left_behind(before)
        print(
            f"{place:8} {small_s * 1000:13.2f} ms {large_s * 1000:14.0f} ms {limit_s / large_s:17.0%} {len(left):12}",
            flush=True,
        )
        good = good and not left and large_s > 0.95 * limit_s
    print(f"links at {format_rate(spec.rate_bps)} hold" if good else "something is wrong: see above")
    return 0 if good else 1


def ring_limit_s(spec: ClusterSpec) -> float:
    """What each link must carry in a ring's all-reduce, at the link's rate."""
    return 2 * (spec.world_size - 1) / spec.world_size * LARGE_BYTES * 8 / spec.rate_bps


@contextlib.contextmanager
def daemon_at(place: str) -> Iterator[None]:
    """A daemon that is already there is used as it is; a folder without one means that there is none."""
    with contextlib.ExitStack() as stack:
        if place != "inside":
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
            if place == "outside":
                stack.enter_context(shared_gpu(folder))
            else:
                os.environ["CUDA_MPS_PIPE_DIRECTORY"] = str(folder)
                stack.callback(os.environ.pop, "CUDA_MPS_PIPE_DIRECTORY", None)
        yield


def measure(spec: ClusterSpec) -> tuple[float, float]:
    found = launch(spec, time_all_reduces, deadline_s=150, grace_s=20)
    return max(small for small, _ in found), max(large for _, large in found)


def time_all_reduces(rank: Rank) -> tuple[float, float]:
    torch.cuda.set_device(rank.device)
    rank.init_process_group()
    return median_s(rank, SMALL_BYTES, repeats=200), median_s(rank, LARGE_BYTES, repeats=5)


def median_s(rank: Rank, nbytes: int, repeats: int) -> float:
    data = torch.ones(nbytes // 4, device=rank.device)
    for _ in range(3):
        dist.all_reduce(data)
    torch.cuda.synchronize()
    if not torch.equal(data, torch.full_like(data, float(rank.world_size**3))):
        raise ArithmeticError(f"an all-reduce of {nbytes} bytes has a wrong sum")
    times_s = []
    for _ in range(repeats):
        start = time.perf_counter()
        dist.all_reduce(data)
        torch.cuda.synchronize()
        times_s.append(time.perf_counter() - start)
        data.fill_(1.0)
    return statistics.median(times_s)


def mps_processes() -> set[int]:
    found = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "comm").read_text().startswith("nvidia-cuda-mps"):
                found.add(int(entry.name))
    return found


def left_behind(before: set[int]) -> set[int]:
    end = time.monotonic() + 10
    while (left := mps_processes() - before) and time.monotonic() < end:
        time.sleep(0.2)
    return left


if __name__ == "__main__":
    sys.exit(main())
