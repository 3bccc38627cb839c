"""Training progress: losses, and how long each step took."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from syncline.records.run_record import ModelRecord
from syncline.report import axes, commands, sentences
from syncline.report.charts import Lines, Point, Series
from syncline.report.formatting import step_time
from syncline.report.inputs import Inputs, ModelData
from syncline.report.layout import Section

_MOST_LINE_POINTS, _MOST_POINTS, _MOST_RANKS = 400, 40, 4

Curves = dict[str, list[tuple[int, float]]]
"""By name: steps and values."""


def training_section(inputs: Inputs, model: ModelData) -> Iterator[Section]:
    charts, reproduce = [], commands.for_run(inputs)
    if inputs.demo is not None:
        reproduce = commands.for_demo(inputs.demo)
        if not model.records:
            rows = [row for row in inputs.demo.rows if row.method != "nosync"]
            curves = {sentences.METHODS.get(row.method, row.method): list(enumerate(row.losses)) for row in rows}
            charts.append(_losses("Loss by step, averaged over the ranks", curves))
    recorded = [(rank, record) for rank, record in model.records if record.losses][:_MOST_RANKS]
    if recorded:
        curves = {f"rank {rank}": [(loss.step, loss.value) for loss in record.losses] for rank, record in recorded}
        charts.append(_losses("Loss by step, as backward was called on it", curves))
    for rank, record in model.records[:1]:
        charts += _step_times(rank, record)
    if charts:
        yield Section("training", "Training progress", "", charts, commands=reproduce)


def _losses(caption: str, curves: Curves) -> Lines:
    series = [
        Series(
            name,
            _thinned(points, _MOST_LINE_POINTS),
            [
                Point(step, value, f"{name}, step {step:,}: loss {value:.4g}")
                for step, value in _thinned(points, _MOST_POINTS)
            ],
            color=color % 8,
        )
        for color, (name, points) in enumerate(curves.items())
    ]
    y = axes.linear("loss", [value for points in curves.values() for _, value in points], lambda value: f"{value:g}")
    return Lines(caption, _steps_axis(curves), y, series, "measured", quiet=True)


def _steps_axis(curves: Curves) -> axes.Axis:
    steps = [float(step) for points in curves.values() for step, _ in points]
    return axes.linear("step", steps, lambda value: f"{value:,.0f}", margin=1.0)


def _thinned(points: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """Keep about `most` points, evenly spread, and always the last."""
    kept = list(points[:: max(1, math.ceil(len(points) / most))])
    return kept if not points or kept[-1] == points[-1] else [*kept, points[-1]]


def _step_times(rank: int, record: ModelRecord) -> Iterator[Lines]:
    curves: Curves = {}
    for span in record.spans:
        curves.setdefault(span.way, []).append((span.step, span.end_s - span.start_s))
    if len(record.spans) < 2:
        return
    seconds = sorted(value for points in curves.values() for _, value in points)
    # A single step of minutes, for a checkpoint or a download, would flatten all others: draw it at the top edge.
    most_s = min(seconds[min(len(seconds) - 1, int(0.98 * len(seconds)))] * 1.25, seconds[-1])
    series = [
        Series(
            way,
            points=[
                Point(step, min(value, most_s), f"step {step:,}, {way}: {step_time(value)}")
                for step, value in _thinned(points, 3 * _MOST_POINTS)
            ],
            color=color % 8,
        )
        for color, (way, points) in enumerate(curves.items())
    ]
    y = axes.time("per step", [most_s])
    yield Lines(f"Step times, rank {rank}", _steps_axis(curves), y, series, "measured")
