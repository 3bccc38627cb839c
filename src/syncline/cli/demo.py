"""`syncline demo`: train on an emulated cluster with plain DDP and with `syncline.tune`."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from syncline.bench.demo import BATCH, run_demo
from syncline.cli import commands, options, screen
from syncline.cli.report import typed, write_page
from syncline.cli.screen import say
from syncline.cluster import format_rate, why_not_shaped
from syncline.errors import UsageError
from syncline.records.bench_result import DemoResult
from syncline.report import sentences
from syncline.report.inputs import Inputs
from syncline.report.sections.methods import demo_chart

PAGE = Path("syncline-report.html")
"""The default report, in the current folder."""


def main(args: commands.Demo) -> None:
    spec = options.cluster_spec(commands.ClusterOptions(hosts=args.hosts, per_host=args.per_host, rate=args.rate))
    if spec.world_size < 2:
        raise UsageError("--hosts 1: one rank exchanges nothing; use two or more")
    screen.check_writable(args.json, args.report)
    screen.warn_if_not_shaped()
    screen.err.print(f"Training a CNN on 4,000 real digits, {screen.links(spec, why_not_shaped() is None)}")
    with screen.progress("Tuning, then training with every method in turn") as on_progress:
        result = run_demo(spec, args.steps, tune_s=args.tune, on_progress=on_progress)
    result = msgspec.structs.replace(result, command=typed())
    _show(result)
    screen.save(args.json, result)
    if args.report is not None or os.access(".", os.W_OK):
        say()
        write_page(args.report or PAGE, Inputs(demo=result), short=True)


def _show(result: DemoResult) -> None:
    cluster = result.cluster
    link = f"{format_rate(cluster.rate_bps)} links" if cluster.emulated else "loopback (links are not shaped)"
    say(
        f"A CNN on 4,000 real digits, {result.steps} steps ({result.epochs:.1f} epochs) of {BATCH} images on each "
        f"{'of' if cluster.per_host == 1 else 'rank of'} {cluster.hosts} hosts, {link}\n"
    )
    screen.show(demo_chart(result))
    say("\n" + "\n\n".join(sentences.demo(result)))
