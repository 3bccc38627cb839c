"""Methods side by side: the results of a bench, and of the demo."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from syncline.records.bench_result import BenchResult, DemoRow
from syncline.records.bench_result import Row as BenchRow
from syncline.report import commands, formatting, sentences
from syncline.report.charts import Bar, Bars, Row
from syncline.report.formatting import milliseconds
from syncline.report.inputs import Inputs
from syncline.report.layout import Section


def bench_sections(inputs: Inputs) -> Iterator[Section]:
    for number, result in enumerate(inputs.benches, 1):
        floor_ms = _floor_ms(result.rows)
        rows = [
            _row(
                row,
                row.method,
                floor_ms,
                "–" if row.predicted_ms is None else milliseconds(row.predicted_ms),
                formatting.size(row.sent_bytes if row.sent_bytes is not None else row.wire_bytes),
                predicted_ms=row.predicted_ms,
                note=row.setting,
            )
            for row in result.rows
        ]
        gradients = f"{formatting.size(result.model.gradient_bytes)} of gradients"
        caption = f"{result.model.name}, {gradients}, {formatting.count(result.rounds, 'round')}"
        yield Section(
            "bench" if number == 1 else f"bench-{number}",
            f"Methods compared: {sentences.bench_cluster(result.cluster)}",
            " ".join(filter(None, [sentences.bench(result), sentences.prediction_error(result)])),
            [_methods(caption, rows, ("predicted", "sent"), floor_ms), *_peak_memory(result)],
            commands=commands.for_bench(result),
        )


def demo_section(inputs: Inputs) -> Iterator[Section]:
    result = inputs.demo
    if result is None:
        return
    floor_ms = _floor_ms(result.rows)
    rows = [
        _row(
            row,
            sentences.METHODS.get(row.method, row.method),
            floor_ms,
            formatting.size(row.wire_bytes),
            "–" if row.held_out_accuracy is None else f"{row.held_out_accuracy:.1%}",
        )
        for row in result.rows
    ]
    caption = f"A CNN on real digits, {formatting.count(result.steps, 'step')}"
    yield Section(
        "demo",
        f"Training compared: {sentences.bench_cluster(result.cluster)}",
        "Each method trains its own copy of the model, from the same weights and on the same batches; they take turns.",
        [_methods(caption, rows, ("wire", "accuracy"), floor_ms)],
        commands=commands.for_demo(result),
    )


def _floor_ms(rows: Sequence[BenchRow | DemoRow]) -> float | None:
    """Return the step time without communication, if it was measured."""
    return next((row.step_ms for row in rows if row.method == "nosync"), None)


def _methods(caption: str, rows: Sequence[Row], columns: tuple[str, ...], floor_ms: float | None) -> Bars:
    return Bars(
        caption,
        tuple(rows),
        ("per step", "×\u00a0DDP", "quartiles", *columns),
        "measured",
        limit=None if floor_ms is None else (floor_ms / 1e3, "computation alone"),
        note="Medians over rounds in which all methods take turns; whiskers are quartiles. × DDP is the median of each "
        "round’s ratio to plain DDP.",
    )


def _row(
    row: BenchRow | DemoRow,
    name: str,
    floor_ms: float | None,
    *cells: str,
    predicted_ms: float | None = None,
    note: str = "",
) -> Row:
    step, low, high = (milliseconds(value) for value in (row.step_ms, row.step_ms_low, row.step_ms_high))
    tooltip = f"{name}: {step} per step, quartiles {low} to {high}"
    if predicted_ms is not None:
        tooltip += f", {milliseconds(predicted_ms)} predicted"
    data: dict[str, str | float] = {"method": row.method, "step_ms": row.step_ms}
    if floor_ms is None:
        bars = [Bar("other", 0.0, row.step_ms / 1e3, tooltip, data)]
    else:
        split_ms = min(floor_ms, row.step_ms)
        bars = [Bar("compute", 0.0, split_ms / 1e3, tooltip, data)]
        if row.step_ms > split_ms:
            tooltip += f"; {milliseconds(row.step_ms - split_ms)} more than computation alone"
            bars.append(Bar("exposed", split_ms / 1e3, row.step_ms / 1e3, tooltip, data))
    if predicted_ms is not None:
        tooltip = f"{name}: {milliseconds(predicted_ms)} predicted, {step} measured"
        bars.append(Bar("predicted", predicted_ms / 1e3, predicted_ms / 1e3, tooltip, {"predicted_ms": predicted_ms}))
    ratio = "–" if row.vs_ddp is None else f"{row.vs_ddp:.2f}"
    quartiles = f"{milliseconds(row.step_ms_low, unit='')}–{milliseconds(row.step_ms_high, unit='')}"
    return Row(
        name,
        tuple(bars),
        (step, ratio, quartiles, *cells),
        quartiles=(row.step_ms_low / 1e3, row.step_ms_high / 1e3),
        note=note,
        strong=row.method in ("tune", "plan"),
    )


def _peak_memory(result: BenchResult) -> Iterator[Bars]:
    peaks = [(row, row.peak_bytes) for row in result.rows if row.peak_bytes]
    if peaks:
        yield Bars(
            "Peak memory of the rank that uses most",
            tuple(
                Row(
                    row.method,
                    (Bar("other", 0.0, peak, f"{row.method}: {formatting.size(peak)} peak", {"peak_bytes": peak}),),
                    (formatting.size(peak), formatting.size(row.states_bytes)),
                )
                for row, peak in peaks
            ),
            ("peak", "between steps"),
            "measured",
            unit="bytes",
        )
