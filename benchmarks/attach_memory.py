"""Compares the peak memory of `attach(model, Dense())` with that of plain DDP, in each of the first steps.

    python benchmarks/attach_memory.py [--device cuda] [--json FILE]

DDP replaces its buckets before the second step. Whatever still holds the first ones then takes as much memory as all
gradients once more. Each run is in processes of its own. On the CPU the peak is the largest resident set of a step
(Linux), which depends on how many of gloo's buffers happen to be in use at once, so the median of several runs counts.
On CUDA it is the largest allocation. Prints one row per method and setting, with the ratio to plain DDP.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import syncline
from syncline.cluster import ClusterSpec, Rank, launch

WIDTH, LAYERS, STEPS = 2000, 6, 5
METHODS = ("ddp", "dense")
_THRESHOLD = "MALLOC_MMAP_THRESHOLD_"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--runs", type=int, default=7, help="of each method; the median of each step counts")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if os.environ.get(_THRESHOLD) is None:
        # glibc keeps freed blocks below this size, and then the resident set would depend on what happened before. It
        # reads the setting when a process starts.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, _THRESHOLD: "65536"})  # noqa: S606
    rows: list[dict[str, Any]] = []
    for view in (False, True):
        runs: dict[str, list[list[int]]] = {method: [] for method in METHODS}
        for _ in range(arguments.runs):  # in turns
            for method in METHODS:
                runs[method].append(peaks_of(method, view, arguments.device))
        peaks = {
            method: [int(statistics.median(step)) for step in zip(*runs[method], strict=True)] for method in METHODS
        }
        for method in METHODS:
            ratios = [mine / plain for mine, plain in zip(peaks[method], peaks["ddp"], strict=True)]
            rows.append(
                {"method": method, "gradient_as_bucket_view": view, "peak_bytes": peaks[method], "of_ddp": ratios}
            )
            shown = "  ".join(f"{peak / 2**20:7.1f}" for peak in peaks[method])
            print(
                f"{method:6} view={view!s:5} peak MiB per step: {shown}   largest ratio {max(ratios):.4f}", flush=True
            )
    if arguments.json is not None:
        gradient_bytes = LAYERS * WIDTH * WIDTH * 4
        document = {
            "device": arguments.device,
            "gradient_bytes": gradient_bytes,
            "torch": str(torch.__version__),
            "rows": rows,
        }
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(document)) + b"\n")
    return 0


def peaks_of(method: str, view: bool, device: str) -> list[int]:
    """The peak of each step, on the rank that takes most."""

    def train(rank: Rank) -> list[int]:
        if device == "cuda":
            torch.cuda.set_device(rank.device)
        rank.init_process_group()
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).to(rank.device)
        model = DDP(net, gradient_as_bucket_view=view, bucket_cap_mb=16)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        if method == "dense":
            syncline.attach(model, syncline.Dense())
        inputs = torch.randn(2, WIDTH, device=rank.device)
        peaks = []
        for _ in range(STEPS):
            restart(rank.device)
            optimizer.zero_grad(set_to_none=True)
            model(inputs).square().mean().backward()
            optimizer.step()
            peaks.append(peak_bytes(rank.device))
        return peaks

    spec = ClusterSpec(hosts=2, device=device)
    found = launch(spec, train, shaped=None if device == "cuda" else False, deadline_s=120)
    return [max(step) for step in zip(*found, strict=True)]


def restart(device: torch.device | str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: torch.device | str) -> int:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) * 1024


if __name__ == "__main__":
    sys.exit(main())
