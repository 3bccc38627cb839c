"""The sections on the time of a step: measured by method, predicted by cause, and what each remedy would save."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator

from syncline.predict import Prediction
from syncline.predict.diagnosis import CAUSES, Remedy, lost_to
from syncline.report.charts import KINDS, Bar, Bars, Chart, Row, Section, stacked, time_bar
from syncline.report.forecast import Forecast, slowest_forward_and_update_s
from syncline.report.inputs import PREDICT, Inputs, ModelData
from syncline.report.sentences import PLAIN_DDP, PLAN_NAMES, share
from syncline.units import milliseconds_text, size_text

_KIND_OF_CAUSE = {"straggler": "waiting", "overhead": "own"}
"""All other causes are communication."""


def step_section(inputs: Inputs, model: ModelData) -> Iterator[Section]:
    charts: list[Chart] = [*_measured(model), *([] if model.forecast is None else [step_by_cause(model.forecast)])]
    if charts:
        yield Section(
            "step",
            "Where the time of a step goes",
            "Time in which a rank does not compute is lost; the charts show to what, and how much.",
            charts,
            commands=inputs.again(*PREDICT),
        )


def _measured(model: ModelData) -> Iterator[Bars]:
    ways = dict.fromkeys(pace.way for _, record in model.records for pace in record.paces)
    if ways:
        yield Bars(
            "Forward, backward and exposed communication, per step",
            [_measured_row(way, model) for way in ways],
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
    waiting_s = min(median.exposed_s, late_s)
    compute_s, exposed_s = median.forward_s + median.backward_s, median.exposed_s - waiting_s
    parts = [
        ("compute", compute_s, "forward and backward"),
        ("exposed", exposed_s, "exposed communication"),
        ("waiting", waiting_s, f"waiting for rank {slowest}, the slowest"),
    ]
    bars = stacked(((kind, s, f"{way}: {milliseconds_text(s)} of {what}") for kind, s, what in parts), rank=rank)
    predicted_s = _predicted_s(model, way)
    if predicted_s is not None:
        tooltip = f"{way}: {milliseconds_text(predicted_s)} predicted, {milliseconds_text(median.step_s)} measured"
        bars += (Bar("predicted", predicted_s, predicted_s, tooltip, {"predicted_s": predicted_s}),)
    hidden = [
        _covered_s([(bucket.start_s, bucket.end_s) for bucket in span.buckets], span.start_s, span.backward_end_s)
        for _, record in model.records
        for span in record.spans
        if span.way == way and span.buckets
    ]
    cells = (
        milliseconds_text(median.step_s),
        milliseconds_text(median.exposed_s),
        f"{milliseconds_text(median.low_s, unit='')}–{milliseconds_text(median.high_s)}",
        milliseconds_text(statistics.median(hidden)) if hidden else "–",
        size_text(median.sent_bytes),
        f"{median.steps:,}",
    )
    return Row(way, bars, cells, quartiles=(median.low_s, median.high_s))


def _predicted_s(model: ModelData, way: str) -> float | None:
    """Return what the plan predicted, without the optimizer's step, which a run does not measure."""
    plan = model.plans.get("the plan")
    if plan is None or way not in (*PLAN_NAMES, PLAIN_DDP):
        return None
    seconds = plan.iteration_s if way in PLAN_NAMES else plan.plain_s
    return max(0.0, seconds - (0.0 if model.profile is None else model.profile.update_s))


def step_by_cause(forecast: Forecast) -> Bars:
    """Show the first schedule's step cause by cause, with the numbers of the second beside it."""
    shown = dict(itertools.islice(forecast.predictions.items(), 2))  # narrow screens have room for two columns
    first = forecast.diagnosis.prediction
    losses = [lost_to(prediction.losses) for prediction in shown.values()]
    rows = [_cause(KINDS["compute"], "compute", 0.0, [prediction.compute_s for prediction in shown.values()])]
    hidden = [_hidden_s(prediction) for prediction in shown.values()]
    if max(hidden) > 1e-9:
        end_s = min(first.compute_s, slowest_forward_and_update_s(forecast.profile, first)[0] + first.backward_s)
        tooltip = f"hidden behind computation: {milliseconds_text(hidden[0])} of communication that costs no time"
        bar = time_bar("hidden", hidden[0], tooltip, max(0.0, end_s - hidden[0]))
        rows.append(Row("hidden behind it", (bar,), tuple(f"({milliseconds_text(seconds)})" for seconds in hidden)))
    start_s = first.compute_s
    for cause in dict.fromkeys(cause for lost in losses for cause in lost):
        seconds = [lost.get(cause, 0.0) for lost in losses]
        if max(seconds) >= 5e-4 * first.iteration_s:
            rows.append(_cause(CAUSES[cause], _KIND_OF_CAUSE.get(cause, "exposed"), start_s, seconds))
            start_s += seconds[0]
    totals = tuple(milliseconds_text(prediction.iteration_s) for prediction in shown.values())
    rows.append(Row("the whole step", _whole_step(first), totals, strong=True))
    return Bars(
        f"One step with {forecast.name}, cause by cause",
        rows,
        tuple(shown),
        forecast.source,
        note="Causes are removed one after the other and the step is simulated again, so they add up to the whole.",
    )


def _cause(name: str, kind: str, start_s: float, seconds: list[float]) -> Row:
    bar = time_bar(kind, seconds[0], f"{name}: {milliseconds_text(seconds[0])}", start_s)
    return Row(name, (bar,) if seconds[0] > 1e-9 else (), tuple(map(milliseconds_text, seconds)))


def _whole_step(prediction: Prediction) -> tuple[Bar, ...]:
    parts = {"compute": prediction.compute_s, "exposed": 0.0, "waiting": 0.0, "own": 0.0}
    for cause, seconds in lost_to(prediction.losses).items():
        parts[_KIND_OF_CAUSE.get(cause, "exposed")] += seconds
    return stacked(
        (kind, s, f"{KINDS[kind]}: {milliseconds_text(s)}, {share(s, prediction.iteration_s)} of the step")
        for kind, s in parts.items()
    )


def _hidden_s(prediction: Prediction) -> float:
    spans = [(span.start_s, span.end_s) for span in prediction.timeline.spans]
    return _covered_s(spans, 0.0, prediction.backward_s)


def _covered_s(spans: list[tuple[float, float]], low_s: float, high_s: float) -> float:
    """Return how much of the time from `low_s` to `high_s` at least one span covers."""
    total_s, reached_s = 0.0, low_s
    for start_s, end_s in sorted(spans):
        start_s, end_s = max(start_s, reached_s), min(end_s, high_s)
        if end_s > start_s:
            total_s, reached_s = total_s + end_s - start_s, end_s
    return total_s


def remedies_section(inputs: Inputs, model: ModelData) -> Iterator[Section]:
    if model.forecast is not None and model.forecast.diagnosis.remedies:
        lead = "Each change was simulated; those that save less than 2 % are left out."
        charts, reproduce = [remedies(model.forecast)], inputs.again(*PREDICT)
        yield Section("remedies", "What would make it faster", lead, charts, commands=reproduce)


def remedies(forecast: Forecast) -> Bars:
    """Show every remedy that saves something, simulated."""
    now, time = forecast.diagnosis.prediction, milliseconds_text(forecast.diagnosis.prediction.iteration_s)
    bar = time_bar("plain", now.iteration_s, f"now, {forecast.name}: {time}")
    rows = [Row(f"now: {forecast.name}", (bar,), (time, "", f"{now.scaling:.0%}", ""))]
    rows += [_remedy(remedy, now.iteration_s) for remedy in forecast.diagnosis.remedies]
    columns, limit = ("per step", "saves", "scaling", ""), (now.compute_s, "computation alone")
    return Bars("A step with one thing changed", rows, columns, forecast.source, limit)


def _remedy(remedy: Remedy, now_s: float) -> Row:
    seconds = remedy.prediction.iteration_s
    step, saved = milliseconds_text(seconds), milliseconds_text(now_s - seconds)
    kind = "hardware" if remedy.hardware else "lossy" if remedy.lossy else "change"
    caveat = f"; {KINDS[kind]}" if kind != "change" else ""
    bar = time_bar(kind, seconds, f"{remedy.what}: {step} per step, {saved} less{caveat}")
    return Row(remedy.what, (bar,), (step, saved, f"{remedy.prediction.scaling:.0%}", kind if caveat else ""))
