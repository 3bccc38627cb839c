"""`syncline bench`: compare methods in one run."""

from __future__ import annotations

import msgspec

from syncline.bench.methods import METHODS, check_methods
from syncline.bench.run import Workload, run_bench
from syncline.cli import commands, options, screen
from syncline.cli.report import typed, write_page
from syncline.cli.screen import say
from syncline.cluster import ClusterSpec
from syncline.errors import UsageError
from syncline.models import zoo
from syncline.records.bench_result import BenchResult
from syncline.records.network import Network
from syncline.report.inputs import Inputs
from syncline.report.sections.methods import bench_charts


def main(args: commands.Bench) -> None:
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
    _show(spec, result)
    screen.save(args.json, result)
    if args.report is not None:
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


def _show(spec: ClusterSpec, result: BenchResult) -> None:
    say(f"{result.model.parameters:,} parameters, {screen.links(spec, result.cluster.emulated)}")
    if result.tree:
        say(result.tree)
    for chart in bench_charts(result):
        screen.show(chart, most=len(result.rows))
    for row in result.rows:
        say(f"{row.method}: {METHODS[row.method][0]}{row.setting and f'; {row.setting}'}", style="dim")
