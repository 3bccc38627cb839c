"""Measurements: methods side by side, losses and step times of a training, and when the gradients are ready."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from syncline.records.bench_result import BenchResult, DemoResult, DemoRow
from syncline.records.bench_result import Row as BenchRow
from syncline.records.profile import Profile
from syncline.records.run_record import ModelRecord
from syncline.report import sentences
from syncline.report.charts import Axis, Bar, Bars, Lines, Point, Row, Section, Series, linear_axis
from syncline.report.inputs import PROFILE, Inputs, ModelData
from syncline.units import count_text, duration_text, milliseconds_range, milliseconds_text, size_text

_MOST_LINE_POINTS, _MOST_POINTS, _MOST_RANKS = 600, 40, 4

Curves = dict[str, list[tuple[int, float]]]  # steps and values, by name


def method_sections(inputs: Inputs) -> Iterator[Section]:
    if (demo := inputs.demo) is not None and demo.model is None:
        lead = "Each method trains its own copy of the model, from the same weights and on the same batches; they take "
        yield _section("demo", "Training", demo, f"{lead}turns.", [digits_chart(demo)])
    for number, result in enumerate(inputs.benches, 1):
        lead = " ".join(filter(None, [sentences.bench(result), sentences.prediction_error(result)]))
        name = "bench" if number == 1 else f"bench-{number}"
        yield _section(name, "Methods", result, lead, list(bench_charts(result)))


def _section(name: str, what: str, result: BenchResult | DemoResult, lead: str, charts: list[Bars]) -> Section:
    title = f"{what} compared: {sentences.bench_cluster(result.cluster)}"
    return Section(name, title, lead, charts, commands=[("Measure again", result.command)] if result.command else [])


def bench_charts(result: BenchResult) -> Iterator[Bars]:
    """Compare step times and, if it was measured, peak memory."""
    cells, peaks = [], []
    for row in result.rows:
        predicted = "–" if row.predicted_ms is None else milliseconds_text(row.predicted_ms / 1e3)
        cells.append((predicted, size_text(row.sent_bytes), size_text(row.wire_bytes)))
        if peak := row.peak_bytes:
            bar = Bar("other", 0.0, peak, f"{row.method}: {size_text(peak)} peak", {"peak_bytes": peak})
            peaks.append(Row(row.method, (bar,), (size_text(peak), size_text(row.states_bytes))))
    gradients = f"{size_text(result.model.gradient_bytes)} of gradients"
    caption = f"{result.model.name}, {gradients}, {count_text(result.rounds, 'round')}"
    yield _methods(caption, result, ("predicted", "sent", "wire"), cells)
    if peaks:
        caption = "Peak memory of the rank that uses most"
        yield Bars(caption, peaks, ("peak", "between steps"), "measured", unit="bytes")


def digits_chart(result: DemoResult) -> Bars:
    """Compare the methods of a demo that trained a CNN on digits, as releases until 0.2 did."""
    accuracies = ("–" if row.held_out_accuracy is None else f"{row.held_out_accuracy:.1%}" for row in result.rows)
    cells = [(size_text(row.wire_bytes), accuracy) for row, accuracy in zip(result.rows, accuracies, strict=True)]
    return _methods(f"A CNN on real digits, {count_text(result.steps, 'step')}", result, ("wire", "accuracy"), cells)


def demo_step_chart(result: DemoResult) -> Bars:
    cells = [(size_text(row.wire_bytes),) for row in result.rows]
    blocks = count_text(len(result.row("ddp").held_out) - 1, "block")
    chart = _methods(f"Time and bytes per step, {blocks} of each method", result, ("sent",), cells)
    note = "Medians and quartiles over blocks of steps. × DDP is the median of each round’s ratio to plain DDP. Sent: "
    note += "mean bytes per step on the busiest host’s interface, a warm-up included."
    return msgspec.structs.replace(chart, note=note)


def _methods(
    caption: str, result: BenchResult | DemoResult, columns: tuple[str, ...], cells: Sequence[tuple[str, ...]]
) -> Bars:
    rows: list[BenchRow | DemoRow] = [*result.rows]
    floor_s = next((row.step_ms / 1e3 for row in rows if row.method == "nosync"), None)
    return Bars(
        caption,
        [_row(row, floor_s, others) for row, others in zip(rows, cells, strict=True)],
        ("per step", "×\u00a0DDP", "quartiles", *columns),
        "measured",
        limit=None if floor_s is None else (floor_s, "computation alone"),
        note="Medians and quartiles over rounds in which all methods take turns. × DDP is the median of each round’s "
        "ratio to plain DDP. Bytes are those of the busiest rank, or of its host’s interface (wire), per step.",
    )


def _row(row: BenchRow | DemoRow, floor_s: float | None, cells: tuple[str, ...]) -> Row:
    bench = row if isinstance(row, BenchRow) else None
    name = row.method if isinstance(row, BenchRow) else sentences.demo_method(row)
    note, predicted_ms = ("", None) if bench is None else (bench.setting, bench.predicted_ms)
    step_s, low_s, high_s = (value / 1e3 for value in (row.step_ms, row.step_ms_low, row.step_ms_high))
    step, low, high = map(milliseconds_text, (step_s, low_s, high_s))
    tooltip = f"{name}: {step} per step, quartiles {low} to {high}"
    data: dict[str, str | float] = {"method": row.method, "step_ms": row.step_ms}
    compute_s = step_s if floor_s is None else min(floor_s, step_s)
    bars = [Bar("other" if floor_s is None else "compute", 0.0, compute_s, tooltip, data)]
    if step_s > compute_s:
        tooltip += f"; {milliseconds_text(step_s - compute_s)} more than computation alone"
        bars.append(Bar("exposed", compute_s, step_s, tooltip, data))
    if predicted_ms is not None:
        tooltip = f"{name}: {milliseconds_text(predicted_ms / 1e3)} predicted, {step} measured"
        bars.append(Bar("predicted", predicted_ms / 1e3, predicted_ms / 1e3, tooltip, {"predicted_ms": predicted_ms}))
    ratio = "–" if row.vs_ddp is None else f"{row.vs_ddp:.2f}"
    texts = (step, ratio, milliseconds_range(low_s, high_s, unit=""), *cells)
    return Row(name, tuple(bars), texts, (low_s, high_s), note, strong=row.method in ("tune", "plan"))


def training_section(inputs: Inputs, model: ModelData) -> Iterator[Section]:
    charts = []
    if inputs.demo is not None and not model.records:
        rows = [row for row in inputs.demo.rows if row.method != "nosync" and not row.same_as]
        curves = {sentences.demo_method(row): list(enumerate(row.losses)) for row in rows}
        caption = "Loss by step, averaged over the ranks"
        charts.append(_losses(caption if inputs.demo.model is None else f"Training {caption.lower()}, in nats", curves))
    recorded = [(rank, record) for rank, record in model.records if record.losses][:_MOST_RANKS]
    if recorded:
        curves = {f"rank {rank}": [(loss.step, loss.value) for loss in record.losses] for rank, record in recorded}
        charts.append(_losses("Loss by step, as backward was called on it", curves))
    for rank, record in model.records[:1]:
        if len(record.spans) > 1:
            charts.append(_step_times(rank, record))
    if charts:
        yield Section("training", "Training progress", "", charts, commands=inputs.again())


def _losses(caption: str, curves: Curves) -> Lines:
    y = linear_axis("loss", [value for points in curves.values() for _, value in points], lambda value: f"{value:g}")
    return _by_step(caption, curves, y, "loss {:.4g}".format, lines=True)


def _step_times(rank: int, record: ModelRecord) -> Lines:
    seconds = sorted(span.end_s - span.start_s for span in record.spans)
    # A single step of minutes, for a checkpoint or a download, would flatten all others: draw it at the top edge.
    most_s = min(seconds[min(len(seconds) - 1, int(0.98 * len(seconds)))] * 1.25, seconds[-1])
    curves: Curves = {}
    for span in record.spans:
        curves.setdefault(span.way, []).append((span.step, span.end_s - span.start_s))
    y = linear_axis("per step", [most_s], duration_text)
    return _by_step(f"Step times, rank {rank}", curves, y, milliseconds_text, most_s)


def _by_step(
    caption: str, curves: Curves, y: Axis, text: Callable[[float], str], most: float = math.inf, lines: bool = False
) -> Lines:
    series = []
    for color, (name, curve) in enumerate(curves.items()):
        shown = _thinned(curve, _MOST_POINTS)
        points = [Point(step, min(value, most), f"{name}, step {step:,}: {text(value)}") for step, value in shown]
        series.append(Series(name, _thinned(curve, _MOST_LINE_POINTS) if lines else (), points, color=color % 8))
    steps = [float(step) for curve in curves.values() for step, _ in curve]
    x = linear_axis("step", steps, lambda value: f"{value:,.0f}", margin=1.0)
    return Lines(caption, x, y, series, "measured", quiet=lines)


def _thinned(points: Sequence[tuple[Any, float]], most: int) -> list[tuple[Any, float]]:
    """Keep about `most` points, evenly spread, and always the last."""
    kept = list(points[:: max(1, math.ceil(len(points) / most))])
    return kept if not points or kept[-1] == points[-1] else [*kept, points[-1]]


def gradients_section(inputs: Inputs, model: ModelData) -> Iterator[Section]:
    if (profile := model.profile) is not None:
        lead, reproduce = sentences.profile(profile), inputs.again(*PROFILE)
        yield Section("model", "When gradients are ready", lead, [_ready(profile)], commands=reproduce)


def _ready(profile: Profile) -> Lines:
    total, line, points = 0, [(0.0, 0.0)], []
    for gradient in profile.gradients:
        line.append((gradient.ready_s, float(total)))
        total += gradient.bytes
        line.append((gradient.ready_s, float(total)))
        tooltip = f"{gradient.name}: {size_text(gradient.bytes)}, ready {duration_text(gradient.ready_s)} after "
        tooltip += f"backward started; {size_text(total)} by then"
        points.append((gradient.bytes, Point(gradient.ready_s, float(total), tooltip)))
    largest = sorted(points, key=lambda entry: -entry[0])[:_MOST_POINTS]
    shown = sorted((point for _, point in largest), key=lambda point: point.x)
    hidden = len(points) - len(shown)
    return Lines(
        f"{count_text(len(points), 'gradient')}, {size_text(total)}, in the order of backward",
        linear_axis("since backward started", [profile.backward_s], duration_text, margin=1.0),
        linear_axis("ready so far", [float(total)], size_text),
        [Series("gradients", _thinned(line, _MOST_LINE_POINTS), shown)],
        "measured",
        f"Points are the {len(shown)} largest gradients; the {hidden:,} others are only in the line." if hidden else "",
    )
