"""When the gradients are ready: the profile."""

from __future__ import annotations

from collections.abc import Iterator

from syncline.records.profile import Profile
from syncline.report import axes, commands, formatting, sentences
from syncline.report.charts import Lines, Point, Series
from syncline.report.inputs import Inputs, ModelData
from syncline.report.layout import Section

_MOST_LINE_POINTS, _MOST_POINTS = 600, 40


def gradients_section(inputs: Inputs, model: ModelData) -> Iterator[Section]:
    if model.profile is not None:
        yield Section(
            "model",
            "When gradients are ready",
            sentences.profile(model.profile),
            [_chart(model.profile)],
            commands=commands.for_profile(inputs),
        )


def _chart(profile: Profile) -> Lines:
    total, line, points = 0, [(0.0, 0.0)], []
    for gradient in profile.gradients:
        line.append((gradient.ready_s, float(total)))
        total += gradient.bytes
        line.append((gradient.ready_s, float(total)))
        tooltip = (
            f"{gradient.name}: {formatting.size(gradient.bytes)}, ready {formatting.duration(gradient.ready_s)} after "
            f"backward started; {formatting.size(total)} by then"
        )
        points.append((gradient.bytes, Point(gradient.ready_s, float(total), tooltip)))
    largest = sorted(points, key=lambda entry: -entry[0])[:_MOST_POINTS]
    shown = sorted((point for _, point in largest), key=lambda point: point.x)
    hidden = len(points) - len(shown)
    return Lines(
        f"{formatting.count(len(points), 'gradient')}, {formatting.size(total)}, in the order of backward",
        axes.time("since backward started", [profile.backward_s], margin=1.0),
        axes.linear("ready so far", [float(total)], formatting.axis_size),
        [Series("gradients", [*line[:: max(1, len(line) // _MOST_LINE_POINTS)], line[-1]], shown)],
        "measured",
        note=f"Points are the {len(shown)} largest gradients; the {hidden:,} others are only in the line."
        if hidden
        else "",
    )
