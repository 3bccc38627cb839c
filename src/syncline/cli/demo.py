"""`syncline demo`: the main job on this machine, end to end."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from syncline.bench.demo import BATCH, TUNE_S, DemoResult, DemoRow, run_demo
from syncline.cli import options, screen
from syncline.cluster import format_rate, why_not_shaped
from syncline.files import write_json

NAMES = {
    "nosync": "no communication",
    "ddp": "plain DDP",
    "tune": "syncline.tune(model, step)",
    "tune-bf16": '… allow=("bf16",)',
}


def demo(
    hosts: options.Hosts = 4,
    per_host: options.PerHost = "1",
    rate: options.Rate = "100mbit",
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each method.")] = 60,
    tune: Annotated[float, typer.Option(min=5, max=3600, metavar="SECONDS", help="For each tuning, about.")] = TUNE_S,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result for machines.")] = None,
) -> None:
    """Train on real digits over an emulated slow cluster: plain DDP against what tune makes of it. Under two minutes.

    syncline demo --hosts 4 --rate 100mbit
    """
    with options.one_line_errors("syncline demo"):
        spec = options.cluster_spec(hosts=hosts, per_host=per_host, rate=rate)
        screen.check_writable(json)
        screen.say_if_not_shaped()
        what = f"Training a CNN on 4,000 real digits, {screen.links(spec, why_not_shaped() is None)}"
        screen.err.print(what)
        with screen.progress("Tuning, then every method takes turns") as on_progress:
            result = run_demo(spec, steps, tune_s=tune, on_progress=on_progress)
        try:
            if json is not None:
                write_json(json, result)
        finally:  # as in the bench: what was measured is shown in any case
            show(result, screen.out)


def show(result: DemoResult, console: Console) -> None:
    cluster = result.cluster
    link = f"{format_rate(cluster.rate_bps)} links" if cluster.emulated else "loopback (links are not shaped)"
    console.print(
        f"A CNN on 4,000 real digits, {result.steps} steps ({result.epochs:.1f} epochs) of {BATCH} images on each "
        f"{'of' if cluster.per_host == 1 else 'rank of'} {cluster.hosts} hosts, {link}"
    )
    console.print()
    table = screen.table("", "per step", "faster", "wire", "accuracy", "weights")
    for row in result.rows:
        table.add_row(
            NAMES[row.method],
            screen.ms(row.step_ms),
            "" if row.method in ("ddp", "nosync") else f"{1 / row.vs_ddp:.2f}×",
            "" if row.method == "nosync" else screen.size(row.wire_bytes),
            "" if row.held_out_accuracy is None else f"{row.held_out_accuracy:.1%}",
            _weights(row),
        )
    console.print(table)
    console.print()
    console.print(verdict(result))


def verdict(result: DemoResult) -> str:
    """What it means; each sentence follows from the figures above it."""
    floor, plain, lossless, bf16 = (result.row(name) for name in ("nosync", "ddp", "tune", "tune-bf16"))
    waiting = max(0.0, 1 - floor.step_ms / plain.step_ms)
    same = "the same weights bit for bit" if lossless.difference == 0 else "the same weights to summation order"
    gap = abs((bf16.held_out_accuracy or 0) - (plain.held_out_accuracy or 0))
    parts = [
        f"Plain DDP spends {waiting:.0%} of each step on communication that computation does not hide.",
        f"tune, without loss: {_one_line(result, 'tune')} In training: {_pace(lossless.vs_ddp)}, {same}.",
        f"tune, with 16 bits allowed: {_one_line(result, 'tune-bf16')} In training: {_pace(bf16.vs_ddp)}, and accuracy "
        f"on 1,000 held-out digits differs by {gap * 100:.1f} points.",
    ]
    return "\n\n".join(parts)


def _one_line(result: DemoResult, method: str) -> str:
    return " ".join(result.said.get(method, "").splitlines())


def _pace(ratio: float) -> str:
    return "at the same speed" if abs(ratio - 1) <= 0.03 else screen.speed(ratio)


def _weights(row: DemoRow) -> str:
    if row.method in ("ddp", "nosync") or row.difference is None:
        return ""
    return "identical" if row.difference == 0 else f"± {row.difference:.0e}"
