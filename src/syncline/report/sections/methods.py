"""Methods side by side: the results of a bench, and of the demo."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from syncline.records.bench_result import BenchResult, DemoResult, DemoRow
from syncline.records.bench_result import Row as BenchRow
from syncline.report import sentences
from syncline.report.charts import Bar, Bars, Row, Section
from syncline.report.inputs import Commands, Inputs
from syncline.units import count_text, milliseconds_text, size_text


def bench_sections(inputs: Inputs) -> Iterator[Section]:
    for number, result in enumerate(inputs.benches, 1):
        yield Section(
            "bench" if number == 1 else f"bench-{number}",
            f"Methods compared: {sentences.bench_cluster(result.cluster)}",
            " ".join(filter(None, [sentences.bench(result), sentences.prediction_error(result)])),
            list(bench_charts(result)),
            commands=_again(result.command),
        )


def bench_charts(result: BenchResult) -> Iterator[Bars]:
    """Compare step times and, if it was measured, peak memory."""
    floor_s = _floor_s(result.rows)
    rows, peaks = [], []
    for row in result.rows:
        predicted = "–" if row.predicted_ms is None else milliseconds_text(row.predicted_ms / 1e3)
        cells = (predicted, size_text(row.sent_bytes), size_text(row.wire_bytes))
        rows.append(_row(row, row.method, floor_s, *cells, predicted_ms=row.predicted_ms, note=row.setting))
        if peak := row.peak_bytes:
            bar = Bar("other", 0.0, peak, f"{row.method}: {size_text(peak)} peak", {"peak_bytes": peak})
            peaks.append(Row(row.method, (bar,), (size_text(peak), size_text(row.states_bytes))))
    gradients = f"{size_text(result.model.gradient_bytes)} of gradients"
    caption = f"{result.model.name}, {gradients}, {count_text(result.rounds, 'round')}"
    yield _methods(caption, rows, ("predicted", "sent", "wire"), floor_s)
    if peaks:
        caption = "Peak memory of the rank that uses most"
        yield Bars(caption, peaks, ("peak", "between steps"), "measured", unit="bytes")


def demo_section(inputs: Inputs) -> Iterator[Section]:
    if (result := inputs.demo) is not None:
        yield Section(
            "demo",
            f"Training compared: {sentences.bench_cluster(result.cluster)}",
            "Each method trains its own copy of the model, from the same weights and on the same batches; they take "
            "turns.",
            [demo_chart(result)],
            commands=_again(result.command),
        )


def demo_chart(result: DemoResult) -> Bars:
    floor_s = _floor_s(result.rows)
    rows = []
    for row in result.rows:
        accuracy = "–" if row.held_out_accuracy is None else f"{row.held_out_accuracy:.1%}"
        name = sentences.METHODS.get(row.method, row.method)
        rows.append(_row(row, name, floor_s, size_text(row.wire_bytes), accuracy))
    return _methods(f"A CNN on real digits, {count_text(result.steps, 'step')}", rows, ("wire", "accuracy"), floor_s)


def _again(command: str) -> Commands:
    return (("Measure again", command),) if command else ()


def _floor_s(rows: Sequence[BenchRow | DemoRow]) -> float | None:
    """Return the step time without communication, if it was measured."""
    return next((row.step_ms / 1e3 for row in rows if row.method == "nosync"), None)


def _methods(caption: str, rows: Sequence[Row], columns: tuple[str, ...], floor_s: float | None) -> Bars:
    return Bars(
        caption,
        rows,
        ("per step", "×\u00a0DDP", "quartiles", *columns),
        "measured",
        limit=None if floor_s is None else (floor_s, "computation alone"),
        note="Medians and quartiles over rounds in which all methods take turns. × DDP is the median of each round’s "
        "ratio to plain DDP. Bytes are those of the busiest rank, or of its host’s interface (wire), per step.",
    )


def _row(
    row: BenchRow | DemoRow,
    name: str,
    floor_s: float | None,
    *cells: str,
    predicted_ms: float | None = None,
    note: str = "",
) -> Row:
    step_s, low_s, high_s = (value / 1e3 for value in (row.step_ms, row.step_ms_low, row.step_ms_high))
    step, low, high = map(milliseconds_text, (step_s, low_s, high_s))
    tooltip = f"{name}: {step} per step, quartiles {low} to {high}"
    data: dict[str, str | float] = {"method": row.method, "step_ms": row.step_ms}
    if floor_s is None:
        bars = [Bar("other", 0.0, step_s, tooltip, data)]
    else:
        bars = [Bar("compute", 0.0, min(floor_s, step_s), tooltip, data)]
        if step_s > floor_s:
            tooltip += f"; {milliseconds_text(step_s - floor_s)} more than computation alone"
            bars.append(Bar("exposed", floor_s, step_s, tooltip, data))
    if predicted_ms is not None:
        tooltip = f"{name}: {milliseconds_text(predicted_ms / 1e3)} predicted, {step} measured"
        bars.append(Bar("predicted", predicted_ms / 1e3, predicted_ms / 1e3, tooltip, {"predicted_ms": predicted_ms}))
    ratio = "–" if row.vs_ddp is None else f"{row.vs_ddp:.2f}"
    quartiles = f"{milliseconds_text(low_s, unit='')}–{milliseconds_text(high_s, unit='')}"
    strong = row.method in ("tune", "plan")
    return Row(name, tuple(bars), (step, ratio, quartiles, *cells), (low_s, high_s), note, strong)
