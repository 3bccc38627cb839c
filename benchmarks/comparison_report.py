"""Tables of the comparison: each situation's methods by their time to quality. `comparison.py` measures them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainees import Method

WARMUP_SHARE = 0.1
SAME_CURVES = dict.fromkeys(("hierarchical", "fsdp", "hsdp", "hsdp+dense"), "ddp")
SAME_CURVES |= {"hierarchical+int4": "int4", "hierarchical+oktopk-updates": "oktopk-updates"}
"""Lossless methods train as plain DDP does, up to the order of summation. With levels, fewer sums are rounded."""
RUNG_CURVES = {"lossless": "ddp", "overlap": "ddp", "16 bits": "bf16", "8 bits": "int8", "4 bits": "int4"}
RUNG_CURVES |= {"sparse updates": "oktopk-updates", "local steps": "local-15"}
LABELS = {
    "ddp": "plain DDP",
    "fp16-hook": "PyTorch's `fp16_compress_hook`",
    "powersgd": "PyTorch's PowerSGD, rank {}",
    "post-local": "PyTorch's post-local SGD, every {} steps",
    "diloco": "torchft's DiLoCo, every {} steps",
    "1-bit-adam": "DeepSpeed's 1-bit Adam",
    "bf16": '**Syncline** `Dense(wire="bf16")`',
    "int8": "**Syncline** `Quantized(bits=8)`",
    "int4": "**Syncline** `Quantized(bits=4)`",
    "oktopk-updates": "**Syncline** updates, `OkTopk(density=0.01)`",
    "local": "**Syncline** updates, `ChunkedTopk(density=0.03)`, `every={}`",
    "hierarchical": "**Syncline** `Hierarchical()`",
    "hierarchical+int4": "**Syncline** `Hierarchical(across=Quantized(bits=4))`",
    "hierarchical+oktopk-updates": "**Syncline** updates, `Hierarchical(across=OkTopk(density=0.01))`",
    "fsdp": "PyTorch's FSDP2 among all ranks",
    "hsdp": "PyTorch's HSDP",
    "fsdp+int4": "FSDP2, **Syncline** `Quantized(bits=4)`",
    "hsdp+dense": "FSDP2, **Syncline** `Dense()` between replicas",
    "hsdp+int4": "FSDP2, **Syncline** `Quantized(bits=4)` between replicas",
    "hsdp+local": "FSDP2, **Syncline** updates, `ChunkedTopk(density=0.03)`, `every={}`",
}
Cell = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A method in a situation, at its best warm-up and length."""

    method: str
    curve: str
    step_ms: float
    wire_bytes: int
    final_loss: float
    seconds: tuple[float, ...]
    """The time to quality, seed by seed; empty if a seed did not reach it."""
    end_s: float
    """The time at the end of training."""

    @property
    def mean_s(self) -> float:
        return statistics.mean(self.seconds) if self.seconds else float("inf")


def target_of(curves: list[Cell], task: str, tolerance: float) -> float:
    """Return the loss to reach: plain DDP's at the end, the mean over seeds, and a tolerance."""
    finals = [cell["loss"][-1] for cell in curves if (cell["task"], cell["method"]) == (task, "ddp")]
    return statistics.mean(finals) * (1 + tolerance)


def steps_to(cell: Cell, target: float) -> float | None:
    """Return the steps until a training reached a loss, interpolated between evaluations; None if it did not."""
    before_step, before = 0.0, float("inf")
    for step, loss in zip(cell["points"], cell["loss"], strict=True):
        if loss <= target:
            share = (before - target) / (before - loss) if before < float("inf") else 1.0
            return float(before_step + share * (step - before_step))
        before_step, before = step, loss
    return None


def rows_of(clock: Cell, curves: list[Cell], task: str, tolerance: float) -> list[Row]:
    """Return all methods of a situation, the soonest first."""
    target = target_of(curves, task, tolerance)
    by_name: dict[str, list[Cell]] = {}
    for cell in curves:
        if cell["task"] == task:
            by_name.setdefault(cell["method"], []).append(cell)
    rows = []
    for name, measured in clock["rows"].items():
        tried = list(_tried(name, measured, clock, by_name, target))
        if tried:
            rows.append(min(tried, key=lambda row: (row.mean_s, row.final_loss)))
    return sorted(rows, key=lambda row: (row.mean_s, row.final_loss))


def best_rows(clock: Cell, curves: list[Cell], task: str, tolerance: float) -> list[Row]:
    """Return all methods of a situation, the soonest first: of PowerSGD, only the soonest rank."""
    rows: dict[str, Row] = {}
    for row in rows_of(clock, curves, task, tolerance):
        kind = "powersgd" if row.method.startswith("powersgd") else row.method
        rows.setdefault(kind, row)
    return list(rows.values())


def _tried(name: str, measured: Cell, clock: Cell, by_name: dict[str, list[Cell]], target: float) -> Iterator[Row]:
    base = name
    if name.startswith("quality-"):
        base = RUNG_CURVES[clock["choices"][name.removeprefix("quality-")]["rung"]]
    base = SAME_CURVES.get(base, base)
    for label, cells in by_name.items():
        method = Method.named(label, WARMUP_SHARE)
        if method.base != base:
            continue
        warm_ms = clock["rows"][method.warm_method]["step_ms"] if method.warm_method else 0.0
        step_ms = measured["step_ms"]

        def seconds(steps: float, warmup: int, warm_ms: float = warm_ms, step_ms: float = step_ms) -> float:
            return (min(steps, warmup) * warm_ms + max(0.0, steps - warmup) * step_ms) / 1e3

        steps = [(steps_to(cell, target), cell["warmup"]) for cell in cells]
        reached = [seconds(count, warmup) for count, warmup in steps if count is not None]
        end_s = statistics.mean(seconds(cell["points"][-1], cell["warmup"]) for cell in cells)
        final = statistics.mean(cell["loss"][-1] for cell in cells)
        all_reached = tuple(reached) if len(reached) == len(cells) else ()
        yield Row(name, label, step_ms, measured["wire_bytes"], final, all_reached, end_s)


def report(result: Cell, tasks: dict[str, str], tolerance: float) -> None:
    """Print a table for each situation. `tasks` has the task of each situation."""
    for task in dict.fromkeys(tasks.values()):
        names = dict.fromkeys(cell["method"] for cell in result["curves"] if cell["task"] == task)
        if not names:
            continue
        print(f"\n{task}: target {target_of(result['curves'], task, tolerance):.4f}; losses at the end, by seed")
        for name in names:
            cells = [cell for cell in result["curves"] if (cell["task"], cell["method"]) == (task, name)]
            finals = ", ".join(f"{cell['loss'][-1]:.4f} (seed {cell['seed']}, lr {cell['lr']:g})" for cell in cells)
            print(f"  {name:28}{finals}")
    for clock in result["clocks"]:
        rows = rows_of(clock, result["curves"], tasks[clock["situation"]], tolerance)
        plain = next(row for row in rows if row.method in ("ddp", "hsdp"))
        print(f"\n{clock['situation']}: {clock['about']}; {clock['cluster']}")
        print(f"{'method':30}{'curve':24}{'ms/step':>9}{'kB/step':>9}{'loss':>8}{'s to quality':>20}{'sooner':>8}")
        for row in rows:
            took = f"not in {row.end_s:.1f}"
            if row.seconds:
                took = f"{row.mean_s:.1f} ({min(row.seconds):.1f}–{max(row.seconds):.1f})"
            sooner = f"{plain.mean_s / row.mean_s:.1f}×" if row.seconds else ""
            print(
                f"{row.method:30}{row.curve:24}{row.step_ms:9.1f}{row.wire_bytes / 1e3:9.1f}{row.final_loss:8.3f}"
                f"{took:>20}{sooner:>8}"
            )
        for quality, choice in clock["choices"].items():
            print(f"quality={quality}: {'plain DDP' if choice['nothing'] else choice['rung']}")


def label_of(row: Row, choices: Cell) -> str:
    """Return the words for a row of a table of the guide."""
    if row.method.startswith("quality-"):
        quality = row.method.removeprefix("quality-")
        return f'**Syncline** `tune(quality="{quality}")`: {choices[quality]["rung"]}'
    method = Method.named(row.curve, WARMUP_SHARE)
    known = next((key for key in LABELS if row.method == key), None)
    known = known or next(key for key in LABELS if row.method.startswith(f"{key}-"))
    numbers = [part for part in row.method.split("-") if part.isdigit()]
    words = LABELS[known].format(*numbers)
    words += ", `delay=1`" if row.method.endswith("-late") else ""
    return words + (f", × {method.factor:g} steps" if method.factor != 1 else "")


def tables(result: Cell, tasks: dict[str, str], tolerance: float) -> None:
    """Print the tables of the guide, one for each task: the seconds to quality of all methods in all situations."""
    for task in dict.fromkeys(tasks.values()):
        clocks = [clock for clock in result["clocks"] if tasks[clock["situation"]] == task]
        if not clocks:
            continue
        columns: dict[str, dict[str, str]] = {}
        steps: dict[str, dict[str, str]] = {}
        order: dict[str, float] = {}
        for clock in clocks:
            rows = best_rows(clock, result["curves"], task, tolerance)
            plain = next(row for row in rows if row.method in ("ddp", "hsdp"))
            for row in rows:
                label, cell = _in_general(row), f"not in {row.end_s:.0f}"
                if row.seconds:
                    cell = f"{row.mean_s:.0f} ({plain.mean_s / row.mean_s:.1f}×)"
                cell = f"**{cell}**" if row is rows[0] else cell
                if row.method.startswith("quality-"):
                    choice = clock["choices"][row.method.removeprefix("quality-")]
                    cell += f", {choice['rung']}"
                columns.setdefault(label, {})[clock["situation"]] = cell
                steps.setdefault(label, {})[clock["situation"]] = f"{row.step_ms:.0f}"
                order[label] = order.get(label, 1.0) * row.mean_s / plain.mean_s
        names = [clock["situation"] for clock in clocks]
        for cells in (columns, steps):
            print("\n| Method | " + " | ".join(clock["about"] for clock in clocks) + " |")
            print("|---" * (len(clocks) + 1) + "|")
            for label in sorted(cells, key=lambda each: order[each]):
                print(f"| {label} | " + " | ".join(cells[label].get(name, "") for name in names) + " |")


def _in_general(row: Row) -> str:
    """Return the words for a method in several situations."""
    if row.method.startswith("quality-"):
        return f'**Syncline** `tune(quality="{row.method.removeprefix("quality-")}")`'
    if row.method.startswith("powersgd"):
        return "PyTorch's PowerSGD, the best of ranks 2, 4 and 8"
    return label_of(Row(row.method, row.method, 0, 0, 0, (), 0), {})


def draw(result: Cell, tasks: dict[str, str], tolerance: float, path: Path) -> None:
    """Draw the seconds to quality of all methods that reached it, one chart for each situation."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "syncline", "svg.fonttype": "none", "font.size": 8}
    from matplotlib import pyplot

    clocks = result["clocks"]
    figure, grid = pyplot.subplots(len(clocks), 1, figsize=(9, 2.1 * len(clocks)), layout="constrained", squeeze=False)
    for axes, clock in zip(grid.flat, clocks, strict=True):
        rows = [r for r in best_rows(clock, result["curves"], tasks[clock["situation"]], tolerance) if r.seconds]
        labels = [label_of(row, clock["choices"]).replace("**", "").replace("`", "") for row in rows]
        colours = ["tab:blue" if "Syncline" in label else "tab:gray" for label in labels]
        bars = axes.barh(labels, [row.mean_s for row in rows], color=colours)
        axes.bar_label(bars, [f" {row.mean_s:.0f} s" for row in rows])
        axes.set_title(clock["about"], loc="left")
        axes.set(xscale="log", xlim=(min(row.mean_s for row in rows) / 2, 1.3 * max(row.mean_s for row in rows)))
        axes.xaxis.set_visible(False)
        axes.invert_yaxis()
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    figure.suptitle("Seconds until plain DDP's held-out loss (on a logarithmic scale)", fontsize=9)
    figure.savefig(path, metadata={"Date": None})
