"""Where the time of a step goes: as measured, by schedule, and as predicted, by cause."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator

from syncline.predict import Prediction
from syncline.predict.diagnosis import CAUSES, lost_to
from syncline.report import commands, formatting, sentences
from syncline.report.charts import KINDS, Bar, Bars, Chart, Row, stacked, time_bar
from syncline.report.forecast import Forecast, slowest_forward_and_update_s
from syncline.report.formatting import step_time
from syncline.report.inputs import Inputs, ModelData
from syncline.report.layout import Section

_KIND_OF_CAUSE = {"straggler": "waiting", "overhead": "own"}
"""All other causes are communication."""


def step_section(inputs: Inputs, model: ModelData) -> Iterator[Section]:
    charts: list[Chart] = [*_measured(model), *([] if model.forecast is None else [_waterfall(model.forecast)])]
    if charts:
        yield Section(
            "step",
            "Where the time of a step goes",
            "Time in which a rank does not compute is lost; the charts show to what, and how much.",
            charts,
            commands=commands.for_step(inputs, model),
        )


def _measured(model: ModelData) -> Iterator[Bars]:
    ways = dict.fromkeys(pace.way for _, record in model.records for pace in record.paces)
    if ways:
        yield Bars(
            "Forward, backward and exposed communication, per step",
            tuple(_measured_row(way, model) for way in ways),
            ("per step", "exposed", "quartiles", "hidden", "sent", "steps"),
            "measured",
            note="Without what the script does between steps. Bars show the median rank; whiskers are its quartiles "
            "over steps.",
        )


def _measured_row(way: str, model: ModelData) -> Row:
    """Show the rank whose step time is the median, and for how long it waits for the slowest rank."""
    paces = [(rank, pace) for rank, record in model.records for pace in record.paces if pace.way == way]
    rank, median = sorted(paces, key=lambda entry: entry[1].step_s)[(len(paces) - 1) // 2]
    computing = {rank: pace.forward_s + pace.backward_s for rank, pace in paces}
    slowest = max(computing, key=lambda rank: computing[rank])
    late_s = computing[slowest] - statistics.median(computing.values())
    waiting_s = min(median.exposed_s, late_s) if len(paces) > 1 else 0.0
    compute_s, exposed_s = median.forward_s + median.backward_s, median.exposed_s - waiting_s
    bars = stacked(
        [
            ("compute", compute_s, f"{way}: {step_time(compute_s)} of forward and backward"),
            ("exposed", exposed_s, f"{way}: {step_time(exposed_s)} of exposed communication"),
            ("waiting", waiting_s, f"{way}: {step_time(waiting_s)} of waiting for rank {slowest}, the slowest"),
        ],
        rank=rank,
    )
    predicted_s = _predicted_s(model, way)
    if predicted_s is not None:
        tooltip = f"{way}: {step_time(predicted_s)} predicted, {step_time(median.step_s)} measured"
        bars += (Bar("predicted", predicted_s, predicted_s, tooltip, {"predicted_s": predicted_s}),)
    hidden = [
        covered_s([(bucket.start_s, bucket.end_s) for bucket in span.buckets], span.start_s, span.backward_end_s)
        for _, record in model.records
        for span in record.spans
        if span.way == way and span.buckets
    ]
    cells = (
        step_time(median.step_s),
        step_time(median.exposed_s),
        f"{formatting.milliseconds(median.low_s * 1e3, unit='')}–{step_time(median.high_s)}",
        step_time(statistics.median(hidden)) if hidden else "–",
        formatting.size(median.sent_bytes),
        f"{median.steps:,}",
    )
    return Row(way, bars, cells, quartiles=(median.low_s, median.high_s))


def _predicted_s(model: ModelData, way: str) -> float | None:
    """Return what the plan predicted, without the optimizer's step, which a run does not measure."""
    plan = model.plans.get("the plan")
    if plan is None or not (way in sentences.PLAN_NAMES or way == sentences.PLAIN_DDP):
        return None
    seconds = plan.iteration_s if way in sentences.PLAN_NAMES else plan.plain_s
    return max(0.0, seconds - (0.0 if model.profile is None else model.profile.update_s))


def _waterfall(forecast: Forecast) -> Bars:
    """Show the first schedule's step cause by cause, with the numbers of the second beside it."""
    shown = dict(itertools.islice(forecast.predictions.items(), 2))  # narrow screens have room for two columns
    first = forecast.diagnosis.prediction
    losses = [lost_to(prediction.losses) for prediction in shown.values()]
    causes = dict.fromkeys(cause for lost in losses for cause in lost)
    rows = [_cause(KINDS["compute"], "compute", 0.0, [prediction.compute_s for prediction in shown.values()])]
    hidden = [_hidden_s(prediction) for prediction in shown.values()]
    if max(hidden) > 1e-9:
        end_s = min(first.compute_s, slowest_forward_and_update_s(forecast.profile, first)[0] + first.backward_s)
        tooltip = f"hidden behind computation: {step_time(hidden[0])} of communication that costs no time"
        bar = time_bar("hidden", hidden[0], tooltip, max(0.0, end_s - hidden[0]))
        rows.append(Row("hidden behind it", (bar,), tuple(f"({step_time(seconds)})" for seconds in hidden)))
    start_s = first.compute_s
    for cause in causes:
        seconds = [lost.get(cause, 0.0) for lost in losses]
        if max(seconds) >= 5e-4 * first.iteration_s:
            rows.append(_cause(CAUSES[cause], _KIND_OF_CAUSE.get(cause, "exposed"), start_s, seconds))
            start_s += seconds[0]
    totals = tuple(step_time(prediction.iteration_s) for prediction in shown.values())
    rows.append(Row("the whole step", _whole_step(first), totals, strong=True))
    return Bars(
        f"One step with {forecast.name}, cause by cause",
        tuple(rows),
        tuple(shown),
        forecast.source,
        note="Causes are removed one after the other and the step is simulated again, so they add up to the whole.",
    )


def _cause(name: str, kind: str, start_s: float, seconds: list[float]) -> Row:
    bar = time_bar(kind, seconds[0], f"{name}: {step_time(seconds[0])}", start_s)
    return Row(name, (bar,) if seconds[0] > 1e-9 else (), tuple(map(step_time, seconds)))


def _whole_step(prediction: Prediction) -> tuple[Bar, ...]:
    parts = {"compute": prediction.compute_s, "exposed": 0.0, "waiting": 0.0, "own": 0.0}
    for cause, seconds in lost_to(prediction.losses).items():
        parts[_KIND_OF_CAUSE.get(cause, "exposed")] += seconds
    share = {kind: formatting.share(seconds, prediction.iteration_s) for kind, seconds in parts.items()}
    return stacked(
        (kind, seconds, f"{KINDS[kind]}: {step_time(seconds)}, {share[kind]} of the step")
        for kind, seconds in parts.items()
    )


def _hidden_s(prediction: Prediction) -> float:
    spans = [(span.start_s, span.end_s) for span in prediction.timeline.spans]
    return covered_s(spans, 0.0, prediction.backward_s)


def covered_s(spans: list[tuple[float, float]], low_s: float, high_s: float) -> float:
    """Return how much of the time from `low_s` to `high_s` at least one span covers."""
    total_s, reached_s = 0.0, low_s
    for start_s, end_s in sorted(spans):
        start_s, end_s = max(start_s, reached_s), min(end_s, high_s)
        if end_s > start_s:
            total_s, reached_s = total_s + end_s - start_s, end_s
    return total_s
