"""`syncline demo`: train on an emulated cluster with plain DDP and with `syncline.tune`."""

from __future__ import annotations

from pathlib import Path

import msgspec
from rich.console import Console

from syncline.bench.demo import BATCH, run_demo
from syncline.cli import options, screen
from syncline.cli.commands.common import ClusterOptions
from syncline.cli.commands.demo import Demo
from syncline.cli.report import typed, write_page
from syncline.cluster import format_rate, why_not_shaped
from syncline.errors import UsageError
from syncline.files import write_json
from syncline.records.bench_result import DemoResult, DemoRow
from syncline.report import formatting, sentences
from syncline.report.inputs import Inputs

PAGE = Path("syncline-report.html")
"""The default report, in the current folder."""

NAMES = {
    "nosync": "no communication",
    "ddp": "plain DDP",
    "tune": "syncline.tune(model, step)",
    "tune-bf16": '… allow=("bf16",)',
}


def demo(args: Demo) -> None:
    with options.one_line_errors("syncline demo"):
        spec = options.cluster_spec(ClusterOptions(hosts=args.hosts, per_host=args.per_host, rate=args.rate))
        if spec.world_size < 2:
            raise UsageError("--hosts 1: one rank exchanges nothing; use two or more")
        for path in (args.json, args.report):
            screen.check_writable(path)
        screen.warn_if_not_shaped()
        screen.err.print(f"Training a CNN on 4,000 real digits, {screen.links(spec, why_not_shaped() is None)}")
        with screen.progress("Tuning, then training with every method in turn") as on_progress:
            result = run_demo(spec, args.steps, tune_s=args.tune, on_progress=on_progress)
        result = msgspec.structs.replace(result, command=typed())
        try:
            if args.json is not None:
                write_json(args.json, result)
        finally:  # show the result even if its file cannot be written
            show(result, screen.out)
        if (page := args.report or _default_page()) is not None:
            screen.out.print()
            write_page(page, Inputs(demo=result), short=True)


def _default_page() -> Path | None:
    """Return the default report, or None if this folder is not writable: the user did not ask for it."""
    try:
        screen.check_writable(PAGE)
    except UsageError:
        return None
    return PAGE


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
            formatting.milliseconds(row.step_ms),
            "" if row.method in ("ddp", "nosync") else f"{1 / row.vs_ddp:.2f}×",
            "" if row.method == "nosync" else formatting.size(row.wire_bytes),
            "" if row.held_out_accuracy is None else f"{row.held_out_accuracy:.1%}",
            _weights(row),
        )
    console.print(table)
    console.print()
    console.print("\n\n".join(sentences.demo(result)))


def _weights(row: DemoRow) -> str:
    if row.method in ("ddp", "nosync") or row.difference is None:
        return ""
    return "identical" if row.difference == 0 else f"± {row.difference:.0e}"
