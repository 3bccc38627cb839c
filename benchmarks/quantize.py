"""What quantising costs, beside copying the same number of bytes.

    python benchmarks/quantize.py --device cuda --json FILE

Each pass of `syncline.Quantized` takes turns with a copy within this device's memory:

- encode: gradients and residual are read, and codes and the new residual are written.
- total: the parts of all ranks are read and summed, and codes and the residual of one part are written.
- decode: codes are read, and the bucket is written.

The floor of a pass is the time in which the copy would move the pass's bytes. A bucket is divided among `--ranks`
ranks, so encode leaves out 1 of as many parts, and total works on one.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from selection import quartiles_ms, seconds, write_rows
from syncline.kernels import BITS, Blocks, block_kernels_for


def measure(
    numel: int, ranks: int, bits: int, block: int, feedback: bool, device: torch.device, rounds: int
) -> dict[str, object]:
    torch.manual_seed(0)
    gradients = torch.randn(numel, device=device) * torch.exp(torch.randn(numel, device=device))
    flat, share, rank = gradients.clone(), 1 / ranks, 0
    layout = Blocks(numel, ranks, bits, block)
    kernels = block_kernels_for(layout, device)
    kept = torch.zeros(2, numel, device=device) if feedback else None
    turn = torch.zeros((), dtype=torch.int32, device=device)
    mine = torch.zeros(ranks, layout.bytes, dtype=torch.uint8, device=device)
    theirs, row = torch.zeros_like(mine), torch.zeros_like(mine[0])
    steps: dict[str, Callable[[], object]] = {
        "copy": lambda: flat.copy_(gradients),
        "encode": lambda: kernels.encode(flat, share, kept, turn, None, rank, mine),
        "total": lambda: kernels.total(theirs, flat, share, kept, turn, rank, row),
        "decode": lambda: kernels.decode(theirs, flat),
    }
    codes, words = ranks * layout.bytes, 4 * numel
    kept_bytes = words if feedback else 0
    moved = {
        "encode": words + 2 * kept_bytes + codes * (ranks - 1) / ranks,
        "total": codes + ((2 * kept_bytes if feedback else words) / ranks),
        "decode": codes + words,
    }
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(-3, rounds):
        for name, step in steps.items():
            took = seconds(step, device)
            if number >= 0:
                taken[name].append(took)
            if name == "encode":
                theirs.copy_(mine)
                theirs[rank] = mine[-1]  # the rank's own row is never written
        turn.copy_(1 - turn)  # as in training
    medians = {name: statistics.median(times) for name, times in taken.items()}
    floors = {name: medians["copy"] * nbytes / (2 * words) for name, nbytes in moved.items()}
    whole_s, floor_s = (sum(times[name] for name in moved) for times in (medians, floors))
    return {
        "numel": numel, "ranks": ranks, "bits": bits, "block": block, "error_feedback": feedback,
        "copy_gb_per_s": round(2 * words / medians["copy"] / 1e9, 1),
        **{f"{name}_ms": round(medians[name] * 1e3, 4) for name in moved},
        **{f"{name}_of_floor": round(medians[name] / floors[name], 3) for name in moved},
        "all_ms": round(whole_s * 1e3, 4), "all_of_floor": round(whole_s / floor_s, 3),
        "quartiles_ms": quartiles_ms(taken),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--numel", type=int, nargs="+", help="default: up to 2^27 on CUDA, 6.5 and 32 M on the CPU")
    parser.add_argument("--bits", type=int, nargs="+", default=list(BITS), choices=BITS)
    parser.add_argument("--block", type=int, default=256)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1, help="of torch, on the CPU")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    device = torch.device(given.device)
    torch.set_num_threads(given.threads)
    numels = given.numel or ([1 << 20, 6_553_600, 1 << 25, 1 << 27] if device.type == "cuda" else [6_553_600, 1 << 25])
    rows = []
    for numel in numels:
        for bits in given.bits:
            for feedback in (True, False):
                row = measure(numel, given.ranks, bits, given.block, feedback, device, given.rounds)
                rows.append(row)
                passes = ", ".join(
                    f"{name} {row[f'{name}_ms']:.3f} ms ({row[f'{name}_of_floor']:.2f} ×)"
                    for name in ("encode", "total", "decode", "all")
                )
                what = f"{numel:>11,} elements, {bits} bits{'' if feedback else ', no error feedback'}"
                print(f"{what}: {passes} the floor at {row['copy_gb_per_s']} GB/s", flush=True)
    if given.json:
        write_rows(given.json, rows, device)


if __name__ == "__main__":
    main()
