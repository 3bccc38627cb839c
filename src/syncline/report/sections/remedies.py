"""What would make a step faster: every remedy that saves something, simulated."""

from __future__ import annotations

from collections.abc import Iterator

from syncline.predict.diagnosis import Remedy
from syncline.report import commands
from syncline.report.charts import KINDS, Bars, Row, time_bar
from syncline.report.formatting import step_time
from syncline.report.inputs import Inputs, ModelData
from syncline.report.layout import Section

_MOST_REMEDIES = 12


def remedies_section(inputs: Inputs, model: ModelData) -> Iterator[Section]:
    forecast = model.forecast
    if forecast is None or not forecast.diagnosis.remedies:
        return
    now = forecast.diagnosis.prediction
    tooltip = f"now, {forecast.name}: {step_time(now.iteration_s)}"
    bar = time_bar("plain", now.iteration_s, tooltip)
    rows = [Row(f"now: {forecast.name}", (bar,), (step_time(now.iteration_s), "", f"{now.scaling:.0%}", ""))]
    rows += [_remedy(remedy, now.iteration_s) for remedy in forecast.diagnosis.remedies[:_MOST_REMEDIES]]
    chart = Bars(
        "A step with one thing changed",
        tuple(rows),
        ("per step", "saves", "scaling", ""),
        forecast.source,
        limit=(now.compute_s, "computation alone"),
    )
    yield Section(
        "remedies",
        "What would make it faster",
        "Each change was simulated; those that save less than 2 % are left out.",
        [chart],
        commands=commands.for_prediction(inputs),
    )


def _remedy(remedy: Remedy, now_s: float) -> Row:
    seconds = remedy.prediction.iteration_s
    saved = step_time(now_s - seconds)
    kind = "hardware" if remedy.hardware else "lossy" if remedy.lossy else "change"
    caveat = f"; {KINDS[kind]}" if kind != "change" else ""
    bar = time_bar(kind, seconds, f"{remedy.what}: {step_time(seconds)} per step, {saved} less{caveat}")
    cells = (step_time(seconds), saved, f"{remedy.prediction.scaling:.0%}", kind if caveat else "")
    return Row(remedy.what, (bar,), cells)
