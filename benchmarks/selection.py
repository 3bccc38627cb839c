"""What selecting costs, beside what it cannot cost less than.

    python benchmarks/selection.py --device cuda --json FILE

A bucket is added to what was kept, searched for its largest entries, which are packed into slots, and cleared. The
floor is what must be read and written for that, 20 bytes per element, at the speed with which this device copies,
measured in the same run. Beside it, `torch.topk` of the magnitudes, which does none of the rest. They take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path

import torch

from syncline.kernels import VALUES, Slots, kernels_for

FLOOR_BYTES = 20


def seconds(step: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        step()
        return time.perf_counter() - start
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def quartiles_ms(taken: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    return {name: [round(q * 1e3, 4) for q in statistics.quantiles(times, n=4)] for name, times in taken.items()}


def write_rows(path: Path, rows: Sequence[object], device: torch.device) -> None:
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    text = json.dumps({"date": date.today().isoformat(), "device": name, "torch": torch.__version__, "rows": rows})
    path.write_text(text + "\n")


def measure(
    numel: int, regions: int, density: float, values: str, device: torch.device, rounds: int
) -> dict[str, object]:
    torch.manual_seed(0)
    gradients = torch.randn(numel, device=device) * torch.exp(torch.randn(numel, device=device))
    flat, kept = torch.empty_like(gradients), torch.zeros(2, numel, device=device)
    turn = torch.zeros((), dtype=torch.int32, device=device)
    layout = Slots.of(numel, regions, density, VALUES[values])
    assert layout is not None, "too small to be sparse"
    slots = torch.zeros(regions, layout.bytes, dtype=torch.uint8, device=device)
    kernels = kernels_for(layout, device)
    steps: dict[str, Callable[[], object]] = {
        "pack": lambda: kernels.pack(flat, 0.125, kept, turn, None, slots),
        "copy": lambda: flat.copy_(gradients),
        "topk": lambda: torch.topk(flat.abs(), int(density * numel)),
    }
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(-3, rounds):
        for name, step in steps.items():
            flat.copy_(gradients)
            took = seconds(step, device)
            if number >= 0:
                taken[name].append(took)
        turn.copy_(1 - turn)  # so that it is ordinary steps, one after the other
    pack_s, copy_s, topk_s = (statistics.median(taken[name]) for name in steps)
    floor_s = copy_s * FLOOR_BYTES / 8
    return {
        "numel": numel, "regions": regions, "density": density, "values": values,
        "pack_ms": round(pack_s * 1e3, 4), "floor_ms": round(floor_s * 1e3, 4), "of_floor": round(pack_s / floor_s, 3),
        "topk_ms": round(topk_s * 1e3, 4), "topk_over_pack": round(topk_s / pack_s, 2),
        "copy_gb_per_s": round(8 * numel / copy_s / 1e9, 1),
        "quartiles_ms": quartiles_ms(taken),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--numel", type=int, nargs="+", help="default: up to 2^27 on CUDA, 5.5 M on CPU")
    parser.add_argument("--regions", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    device = torch.device(given.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    numels = given.numel or ([1 << 18, 1 << 20, 1 << 22, 6_553_600, 1 << 27] if device.type == "cuda" else [5_500_000])
    rows = []
    for numel in numels:
        for density, values in ((0.01, "bf16"), (0.001, "bf16"), (0.01, "fp32")):
            row = measure(numel, given.regions, density, values, device, given.rounds)
            rows.append(row)
            print(
                f"{numel:>11,} elements, {density:.1%}, {values}: {row['pack_ms']:.3f} ms, {row['of_floor']:.2f} × the "
                f"floor of {row['floor_ms']:.3f} ms at {row['copy_gb_per_s']} GB/s; topk alone "
                f"{row['topk_over_pack']:.1f} × as long",
                flush=True,
            )
    if given.json:
        write_rows(given.json, rows, device)


if __name__ == "__main__":
    main()
