"""Plans, with their reasons, alternatives and buckets; and predicted step times on more hosts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from syncline.exchange import name_of
from syncline.predict import Prediction
from syncline.predict.diagnosis import CAUSES, lost_to
from syncline.predict.sharded import ShardedPrediction
from syncline.records.plan import Alternative, Plan
from syncline.report.charts import (
    Bars,
    Chart,
    Lines,
    Point,
    Row,
    Section,
    Series,
    Table,
    count_axis,
    linear_axis,
    log_axis,
    time_bar,
)
from syncline.report.inputs import PLAN, PREDICT, Forecast, Inputs, ModelData
from syncline.report.sentences import capitalized, share
from syncline.units import count_text, duration_text, milliseconds_range, milliseconds_text, size_text

_MOST_BUCKETS = 40
_LOGARITHMIC_FROM = 6  # range of step times, as a multiple of the computation, that needs a logarithmic axis
_STEEP = 1.6  # ratio of step times on two successive numbers of hosts that needs an explanation
_SIMILAR = 0.03  # relative difference of two predictions that is not worth a sentence


def plan_sections(inputs: Inputs, model: ModelData) -> Iterator[Section]:
    for number, (name, plan) in enumerate(model.plans.items(), 1):
        charts: list[Chart] = [alternatives(plan)] if plan.alternatives else []
        reproduce, lead = inputs.again(*PLAN), plan.reason
        if not plan.nothing:
            charts.append(buckets(plan))
            paths = inputs.files.get("plan", ())[:1]
            reproduce += tuple(("Apply it", f'model = syncline.wrap(net, "{path}")') for path in paths)
        again = None if model.forecast is None else model.forecast.predictions.get(name)
        if again is not None and plan.iteration_s and abs(again.iteration_s / plan.iteration_s - 1) > _SIMILAR:
            lead += (
                f" It was made with other measurements and predicts {milliseconds_text(plan.iteration_s)}; with the "
            )
            lead += f"measurements on this page, the prediction is {milliseconds_text(again.iteration_s)}."
        yield Section("plan" if number == 1 else f"plan-{number}", capitalized(name), lead, charts, commands=reproduce)


def alternatives(plan: Plan) -> Bars:
    nothing, rows = plan.alternatives[0], []
    if not plan.nothing:
        time, low, high = map(milliseconds_text, (plan.iteration_s, plan.low_s, plan.high_s))
        bar = time_bar("chosen", plan.iteration_s, f"the plan: {time}, expected between {low} and {high}")
        rows.append(Row("the plan", (bar,), _cells(plan, plan), quartiles=(plan.low_s, plan.high_s), strong=True))
    for other in plan.alternatives:
        lossy = "" if other.lossless else ", lossy"
        tooltip = f"{other.name}: {milliseconds_text(other.iteration_s)} per step{lossy}"
        bar = time_bar("plain" if other is nothing else "other", other.iteration_s, tooltip)
        rows.append(Row(other.name, (bar,), _cells(plan, other), strong=plan.nothing and other is nothing))
    caption, columns = "The alternatives, and the predicted step time of each", ("per step", "faster", "scaling", "")
    return Bars(caption, rows, columns, "predicted", limit=(plan.compute_s, "computation alone"))


def _cells(plan: Plan, shown: Plan | Alternative) -> tuple[str, str, str, str]:
    seconds = shown.iteration_s
    faster = f"{plan.plain_s / seconds:.2f}×" if seconds else "–"
    return milliseconds_text(seconds), faster, share(plan.compute_s, seconds), "" if shown.lossless else "lossy"


def buckets(plan: Plan) -> Table:
    sizes = {gradient.name: gradient.nbytes for gradient in plan.gradients}
    rows = []
    for index, (bucket, exchange) in enumerate(zip(plan.buckets, plan.exchanges, strict=True)):
        names = bucket.parameters
        gradients = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)})"
        size = size_text(sum(sizes[name] for name in names))
        rows.append((str(index), str(bucket.lane), size, name_of(exchange), gradients))
    hidden = len(rows) - _MOST_BUCKETS
    return Table(
        f"Its {count_text(len(rows), 'bucket')} on {count_text(plan.lanes, 'lane')}",
        ("bucket", "lane", "size", "exchange", "gradients"),
        rows[:_MOST_BUCKETS],
        note=f"{count_text(hidden, 'more bucket')} not shown." if hidden > 0 else "",
    )


def scaling_section(inputs: Inputs, model: ModelData) -> Iterator[Section]:
    forecast = model.forecast
    if forecast is None or not forecast.curves:
        return
    name, predictions = next(iter(forecast.curves.items()))
    last = predictions[-1]
    step, low, high = map(milliseconds_text, (last.iteration_s, last.low_s, last.high_s))
    lead = f"On {count_text(last.hosts, 'host')}, a step with {name} is predicted to take {step}, between {low} and "
    lead = " ".join([f"{lead}{high}: scaling {last.scaling:.0%}.", *_steep(forecast.curves)])
    charts: list[Chart] = [_chart(forecast), numbers(forecast.curves)]
    yield Section("scaling", "Scaling to more hosts", lead, charts, commands=inputs.again(*PREDICT))


def _steep(curves: Mapping[str, Sequence[Prediction]]) -> Iterator[str]:
    """Explain curves that rise steeply: what most of the lost time goes to on the largest number of hosts."""
    for name, predictions in curves.items():
        times_s = [prediction.iteration_s for prediction in predictions]
        last, lost = predictions[-1], lost_to(predictions[-1].losses)
        if lost and any(after_s > _STEEP * before_s for before_s, after_s in itertools.pairwise(times_s)):
            cause, seconds = next(iter(lost.items()))
            grow = ", which grow with the number of hosts" if cause == "startups" else ""
            hosts = count_text(last.hosts, "host")
            yield f"With {name}, {share(seconds, last.iteration_s)} of a step on {hosts} go to {CAUSES[cause]}{grow}."


def _chart(forecast: Forecast) -> Lines:
    predictions = [prediction for curve in forecast.curves.values() for prediction in curve]
    compute_s = forecast.diagnosis.prediction.compute_s
    x = count_axis("hosts", [prediction.hosts for prediction in predictions])
    times_s = [compute_s, *(prediction.high_s for prediction in predictions)]
    y = linear_axis("per step", times_s, duration_text)
    if 0 < _LOGARITHMIC_FROM * compute_s < max(times_s):
        y = log_axis("per step, logarithmic", times_s, duration_text)
    series = [Series("computation alone", line=((x.low, compute_s), (x.high, compute_s)), dashed=True, color=7)]
    series += [_series(name, curve, color % 8) for color, (name, curve) in enumerate(forecast.curves.items())]
    return Lines("Step time by number of hosts", x, y, series, forecast.source, "Bands are the ranges below.")


def _series(name: str, predictions: tuple[Prediction, ...], color: int) -> Series:
    points = []
    for prediction in predictions:
        step, low, high = map(milliseconds_text, (prediction.iteration_s, prediction.low_s, prediction.high_s))
        hosts = count_text(prediction.hosts, "host")
        tooltip = f"{name} on {hosts}: {step} per step, {low} to {high}; scaling {prediction.scaling:.0%}"
        points.append(Point(float(prediction.hosts), prediction.iteration_s, tooltip))
    band = [(float(prediction.hosts), prediction.low_s, prediction.high_s) for prediction in predictions]
    return Series(name, [(point.x, point.y) for point in points], points, band, color=color)


def numbers(curves: Mapping[str, Sequence[Prediction | ShardedPrediction]]) -> Table:
    """List predictions, given by the name of their plan and links; a single name is left out."""
    rows = []
    for name, predictions in curves.items():
        for row in predictions:
            times = milliseconds_text(row.iteration_s), milliseconds_range(row.low_s, row.high_s)
            cells = (name, f"{row.hosts:,}", *times, f"{row.scaling:.0%}", size_text(row.sent_bytes))
            rows.append(cells[len(curves) == 1 :])
    return Table(
        "Step times in numbers",
        ("plan and links", "hosts", "per step", "range", "scaling", "sent")[len(curves) == 1 :],
        rows,
        note="Range: over the 90 % intervals of the network’s measurements (of assumed links: start-ups of 1/3 to 3 "
        "times, and rates of 80 to 100 %) and, with more hosts, over start-ups that grow as in a tree or as in a ring. "
        "Scaling: step time of a single rank, divided by this one. Sent: by the busiest rank.",
    )
