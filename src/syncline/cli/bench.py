"""`syncline demo`, `syncline bench` and `syncline cluster run`: all that runs on an emulated cluster."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import typer

from syncline.bench.demo import run_demo
from syncline.bench.methods import METHODS, check_methods
from syncline.bench.run import Workload, run_bench
from syncline.cli import commands, options, screen
from syncline.cli.report import typed, write_page
from syncline.cli.screen import say
from syncline.cluster import run_command, why_not_shaped
from syncline.errors import UsageError
from syncline.models import zoo
from syncline.records.bench_result import DemoResult
from syncline.records.network import Network
from syncline.report import sentences
from syncline.report.inputs import Inputs
from syncline.report.sections.demo import reached_chart
from syncline.report.sections.measured import bench_charts, demo_step_chart


def demo_command(args: commands.Demo) -> None:
    spec = options.cluster_spec(commands.ClusterOptions(hosts=args.hosts, per_host=args.per_host, rate=args.rate))
    if spec.world_size < 2:
        raise UsageError("--hosts 1: one rank exchanges nothing; use two or more")
    screen.check_writable(args.json, args.report)
    screen.warn_if_not_shaped()
    screen.err.print(f"A small GPT on Python source code, {screen.links(spec, why_not_shaped() is None)}, emulated")
    with screen.progress("Tuning, then training with every method in turn") as on_progress:
        result = run_demo(spec, args.steps, tune_s=args.tune, on_progress=on_progress)
    result = msgspec.structs.replace(result, command=typed())
    _show_demo(result)
    screen.save(args.json, result)
    page = args.report or (Path("syncline-report.html") if os.access(".", os.W_OK) else None)
    write_page(page, Inputs(demo=result), short=True)


def _show_demo(result: DemoResult) -> None:
    parameters = "" if result.model is None else f" of {result.model.parameters:,} parameters"
    say(f"A small GPT{parameters} on Python source code, AdamW; {sentences.bench_cluster(result.cluster)}\n")
    verdict, *more = sentences.demo(result)
    say(f"{verdict}\n", style="bold")
    for chart in (reached_chart(result), demo_step_chart(result)):
        screen.show(chart)
        say("")
    say("\n\n".join(more) + "\n")


def bench_command(args: commands.Bench) -> None:
    spec = options.cluster_spec(args)
    workload = _workload(args)
    if args.methods.strip() == "list":
        for name, (about, _) in METHODS.items():
            say(f"{name}: {about}", soft_wrap=True)
        return
    methods = options.split(args.methods)
    check_methods(methods)
    options.check_positive("--bucket-mb", args.bucket_mb)
    options.check_positive("--timeout", args.timeout)
    if args.probe:  # 0 is for no predictions
        options.check_seconds("--probe", args.probe)
    network = None if args.network is None else Network.load(args.network)
    screen.check_writable(args.json, args.report)
    screen.warn_if_not_shaped()
    with screen.progress(f"{workload.name}, {spec.describe()}") as on_progress:
        result = run_bench(
            spec,
            workload,
            methods,
            rounds=args.steps,
            bucket_mb=args.bucket_mb,
            timeout_s=args.timeout,
            network=network,
            probe_s=args.probe,
            peak_memory=args.peak_memory,
            on_progress=on_progress,
        )
    result = msgspec.structs.replace(result, command=typed())
    links = screen.links(spec, result.cluster.emulated)
    say(f"{result.model.parameters:,} parameters, {links}", *([result.tree] if result.tree else []), sep="\n")
    for chart in bench_charts(result):
        screen.show(chart, most=len(result.rows))
    for row in result.rows:
        say(f"{row.method}: {METHODS[row.method][0]}{row.setting and f'; {row.setting}'}", style="dim")
    screen.save(args.json, result)
    write_page(args.report, Inputs(benches=(result,)), short=True)


def _workload(args: commands.Bench) -> Workload:
    if args.model is not None and args.replay is not None:
        raise UsageError("--model and --replay exclude each other: use one of them")
    if args.replay is not None:
        profile = options.scaled_profile(args.replay, args.scale)
        return Workload(profile.model, args.batch, profile)
    if args.scale != "1,1":
        raise UsageError("--scale needs a recorded profile: add --replay")
    name = args.model or "cnn"
    zoo.check_name(name)
    return Workload(name, args.batch)


def cluster_command(args: commands.ClusterRun) -> None:
    raise typer.Exit(run_command(options.cluster_spec(args), args.command, per_rank=args.per_rank))
