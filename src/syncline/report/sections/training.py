"""Training progress: losses and step times of a run; and, from the profile, when the gradients are ready."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from syncline.records.profile import Profile
from syncline.records.run_record import ModelRecord
from syncline.report import sentences
from syncline.report.charts import Axis, Lines, Point, Section, Series, linear_axis
from syncline.report.inputs import PROFILE, Inputs, ModelData
from syncline.units import count_text, duration_text, milliseconds_text, size_text

_MOST_LINE_POINTS, _MOST_POINTS, _MOST_RANKS = 600, 40, 4
_T = TypeVar("_T")

Curve = list[tuple[int, float]]
"""Steps and values."""
Curves = dict[str, Curve]


def training_section(inputs: Inputs, model: ModelData) -> Iterator[Section]:
    charts = []
    if inputs.demo is not None and not model.records:
        rows = [row for row in inputs.demo.rows if row.method != "nosync"]
        curves = {sentences.METHODS.get(row.method, row.method): list(enumerate(row.losses)) for row in rows}
        charts.append(_losses("Loss by step, averaged over the ranks", curves))
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
    series = [
        Series(name, _thinned(points, _MOST_LINE_POINTS), _points(name, points, "loss {:.4g}".format), color=color % 8)
        for color, (name, points) in enumerate(curves.items())
    ]
    return Lines(caption, _steps_axis(curves), y, series, "measured", quiet=True)


def _step_times(rank: int, record: ModelRecord) -> Lines:
    seconds = sorted(span.end_s - span.start_s for span in record.spans)
    # A single step of minutes, for a checkpoint or a download, would flatten all others: draw it at the top edge.
    most_s = min(seconds[min(len(seconds) - 1, int(0.98 * len(seconds)))] * 1.25, seconds[-1])
    curves: Curves = {}
    for span in record.spans:
        curves.setdefault(span.way, []).append((span.step, span.end_s - span.start_s))
    series = [
        Series(way, points=_points(way, points, milliseconds_text, most_s), color=color % 8)
        for color, (way, points) in enumerate(curves.items())
    ]
    y = linear_axis("per step", [most_s], duration_text)
    return Lines(f"Step times, rank {rank}", _steps_axis(curves), y, series, "measured")


def _points(name: str, points: Curve, text: Callable[[float], str], most: float = math.inf) -> list[Point]:
    return [
        Point(step, min(value, most), f"{name}, step {step:,}: {text(value)}")
        for step, value in _thinned(points, _MOST_POINTS)
    ]


def _steps_axis(curves: Curves) -> Axis:
    steps = [float(step) for points in curves.values() for step, _ in points]
    return linear_axis("step", steps, lambda value: f"{value:,.0f}", margin=1.0)


def _thinned(points: Sequence[_T], most: int) -> list[_T]:
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
        tooltip = (
            f"{gradient.name}: {size_text(gradient.bytes)}, ready {duration_text(gradient.ready_s)} after backward "
            f"started; {size_text(total)} by then"
        )
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
