"""`syncline bench`: methods side by side in one run."""

from __future__ import annotations

from pathlib import Path

import msgspec

from syncline.bench.methods import METHODS, check_methods
from syncline.bench.run import Workload, run_bench
from syncline.cli import options, screen
from syncline.cli.commands.common import ClusterOptions
from syncline.cli.report import typed, write_page
from syncline.cluster import ClusterSpec
from syncline.errors import UsageError
from syncline.files import write_json
from syncline.models.zoo import MODELS, build_model
from syncline.records.bench_result import BenchResult
from syncline.records.network import Network
from syncline.records.profile import load_profile
from syncline.report import formatting
from syncline.report.inputs import Inputs


def bench(
    cluster: ClusterOptions,
    *,
    model: str | None,
    replay: str | None,
    scale: str,
    methods: str,
    steps: int,
    batch: int,
    bucket_mb: float | None,
    network: Path | None,
    probe: float | None,
    peak_memory: bool,
    timeout: float,
    json: Path | None,
    report: Path | None,
) -> None:
    with options.one_line_errors("syncline bench"):
        spec = options.cluster_spec(cluster)
        workload = _workload(model, replay, scale, batch)
        if methods.strip() == "list":
            _list_methods()
            return
        names = [name.strip() for name in methods.split(",") if name.strip()]
        check_methods(names)
        if bucket_mb is not None and not 0 < bucket_mb < 1e6:
            raise UsageError(f"--bucket-mb {bucket_mb:g}: a bucket needs a positive size, in MB")
        if not 0 < timeout < 1e9:
            raise UsageError(f"--timeout {timeout:g}: a run needs a positive number of seconds")
        if probe is not None and not (probe == 0 or 1 <= probe <= 3600):
            raise UsageError(f"--probe {probe:g}: probing takes 1 to 3600 seconds; 0 for no predictions")
        known = None if network is None else Network.load(network)
        for path in (json, report):
            screen.check_writable(path)
        screen.say_if_not_shaped()
        with screen.progress(f"{workload.name}, {spec.describe()}") as on_progress:
            result = run_bench(
                spec,
                workload,
                names,
                rounds=steps,
                bucket_mb=bucket_mb,
                timeout_s=timeout,
                network=known,
                probe_s=probe,
                peak_memory=peak_memory,
                on_progress=on_progress,
            )
        result = msgspec.structs.replace(result, command=typed())
        try:
            if json is not None:
                write_json(json, result)
        finally:  # a run that took minutes is shown, whatever became of its file
            _show(spec, result)
        if report is not None:
            write_page(report, Inputs(benches=(result,)), short=True)


def _list_methods() -> None:
    for name, (about, _) in METHODS.items():
        screen.out.print(f"{name}: {about}", soft_wrap=True)


def _workload(model: str | None, replay: str | None, scale: str, batch: int) -> Workload:
    if model is not None and replay is not None:
        raise UsageError("--model and --replay exclude each other: name one of them")
    if replay is not None:
        profile = load_profile(replay)
        time_scale, size_scale = options.scales(scale)
        return Workload(profile.model, batch, profile.scaled(time=time_scale, bytes=size_scale))
    if scale != "1,1":
        raise UsageError("--scale is for a replayed profile: add --replay")
    name = model or "cnn"
    if name not in MODELS:
        build_model(name)  # raises, and says which there are
    return Workload(name, batch)


def _show(spec: ClusterSpec, result: BenchResult) -> None:
    model = result.model
    what = f"{model.name} ({model.parameters:,} parameters, {formatting.size(model.gradient_bytes)} of gradients)"
    screen.out.print(f"{what}, {screen.links(spec, result.cluster.emulated)}, {result.rounds} rounds")
    if result.tree:
        screen.out.print(result.tree, highlight=False)
    # What was sent as foreseen need not be said twice.
    surprising = any(
        abs((row.predicted_sent_bytes or 0) - row.sent_bytes) > 1e-3 * row.sent_bytes
        for row in result.rows
        if row.sent_bytes and row.predicted_sent_bytes is not None
    )
    foreseen = ["foreseen"] if surprising else []
    memory = ["peak"] if any(row.peak_bytes for row in result.rows) else []
    table = screen.table("method", "ms/step", "quartiles", "predicted", "× ddp", "sent", *foreseen, "wire", *memory)
    for row in result.rows:
        table.add_row(
            row.method,
            formatting.milliseconds(row.step_ms, unit=""),
            f"{formatting.milliseconds(row.step_ms_low, unit='')}–{formatting.milliseconds(row.step_ms_high, unit='')}",
            "–" if row.predicted_ms is None else formatting.milliseconds(row.predicted_ms, unit=""),
            "" if row.vs_ddp is None else f"{row.vs_ddp:.2f}",
            formatting.size(row.sent_bytes),
            *([formatting.size(row.predicted_sent_bytes)] if surprising else []),
            formatting.size(row.wire_bytes),
            *([formatting.size(row.peak_bytes)] if memory else []),
        )
    screen.out.print(table)
    for row in result.rows:
        screen.out.print(f"{row.method}: {METHODS[row.method][0]}{row.setting and f'; {row.setting}'}", style="dim")
    peaks = "; peak: the most bytes that tensors of the busiest rank took in a step, weights included"
    screen.out.print(
        "predicted: before the first step was taken, from the workload's profile and the links; × ddp: median of the "
        f"rounds' ratios of step times; sent: payload per step of the busiest rank, inside its host and between hosts, "
        f"as counted{', and as foreseen' if surprising else '; all as foreseen'}; wire: what its host's interface "
        f"counted, headers included{peaks if memory else ''}",
        style="dim",
    )
