"""`syncline bench`: compare methods in one run."""

from __future__ import annotations

import msgspec

from syncline.bench.methods import METHODS, check_methods
from syncline.bench.run import Workload, run_bench
from syncline.cli import options, screen
from syncline.cli.commands.bench import Bench
from syncline.cli.report import typed, write_page
from syncline.cluster import ClusterSpec
from syncline.errors import UsageError
from syncline.files import write_json
from syncline.models import zoo
from syncline.records.bench_result import BenchResult
from syncline.records.network import Network
from syncline.records.profile import load_profile
from syncline.report import formatting
from syncline.report.inputs import Inputs


def bench(args: Bench) -> None:
    with options.one_line_errors("syncline bench"):
        spec = options.cluster_spec(args)
        workload = _workload(args)
        if args.methods.strip() == "list":
            _list_methods()
            return
        methods = options.split(args.methods)
        check_methods(methods)
        options.check_bucket_mb(args.bucket_mb)
        options.check_timeout(args.timeout)
        if args.probe is not None and not (args.probe == 0 or 1 <= args.probe <= 3600):
            raise UsageError(f"--probe {args.probe:g}: must be 1 to 3600 seconds, or 0 for no predictions")
        network = None if args.network is None else Network.load(args.network)
        for path in (args.json, args.report):
            screen.check_writable(path)
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
        try:
            if args.json is not None:
                write_json(args.json, result)
        finally:  # show a run that took minutes even if its file cannot be written
            _show(spec, result)
        if args.report is not None:
            write_page(args.report, Inputs(benches=(result,)), short=True)


def _list_methods() -> None:
    for name, (about, _) in METHODS.items():
        screen.out.print(f"{name}: {about}", soft_wrap=True)


def _workload(args: Bench) -> Workload:
    if args.model is not None and args.replay is not None:
        raise UsageError("--model and --replay exclude each other: use one of them")
    if args.replay is not None:
        profile = load_profile(args.replay)
        time_scale, size_scale = options.scales(args.scale)
        return Workload(profile.model, args.batch, profile.scaled(time=time_scale, bytes=size_scale))
    if args.scale != "1,1":
        raise UsageError("--scale needs a recorded profile: add --replay")
    name = args.model or "cnn"
    zoo.check_name(name)
    return Workload(name, args.batch)


def _show(spec: ClusterSpec, result: BenchResult) -> None:
    model = result.model
    what = f"{model.name} ({model.parameters:,} parameters, {formatting.size(model.gradient_bytes)} of gradients)"
    screen.out.print(f"{what}, {screen.links(spec, result.cluster.emulated)}, {result.rounds} rounds")
    if result.tree:
        screen.out.print(result.tree, highlight=False)
    # The predicted bytes get a column only if they differ from the counted ones.
    mispredicted = any(
        abs((row.predicted_sent_bytes or 0) - row.sent_bytes) > 1e-3 * row.sent_bytes
        for row in result.rows
        if row.sent_bytes and row.predicted_sent_bytes is not None
    )
    bytes_column = ["predicted sent"] if mispredicted else []
    memory = ["peak"] if any(row.peak_bytes for row in result.rows) else []
    table = screen.table("method", "ms/step", "quartiles", "predicted", "× ddp", "sent", *bytes_column, "wire", *memory)
    for row in result.rows:
        table.add_row(
            row.method,
            formatting.milliseconds(row.step_ms, unit=""),
            f"{formatting.milliseconds(row.step_ms_low, unit='')}–{formatting.milliseconds(row.step_ms_high, unit='')}",
            "–" if row.predicted_ms is None else formatting.milliseconds(row.predicted_ms, unit=""),
            "" if row.vs_ddp is None else f"{row.vs_ddp:.2f}",
            formatting.size(row.sent_bytes),
            *([formatting.size(row.predicted_sent_bytes)] if mispredicted else []),
            formatting.size(row.wire_bytes),
            *([formatting.size(row.peak_bytes)] if memory else []),
        )
    screen.out.print(table)
    for row in result.rows:
        screen.out.print(f"{row.method}: {METHODS[row.method][0]}{row.setting and f'; {row.setting}'}", style="dim")
    peaks = "; peak: memory of all tensors on the busiest rank during a step, weights included"
    screen.out.print(
        "predicted: before the first step, from the workload's profile and the links; × ddp: median over the rounds of "
        "the step time divided by DDP's; sent: payload per step of the busiest rank, within its host and between "
        f"hosts{'' if mispredicted else ', as predicted'}; wire: bytes that its host's interface counted, headers "
        f"included{peaks if memory else ''}",
        style="dim",
    )
