"""Step times on more hosts, predicted, with the measurements there are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from syncline.predict import Prediction
from syncline.records.bench_result import BenchResult, DemoRow
from syncline.records.bench_result import Row as BenchRow
from syncline.report.charts import Lines, Point, Section, Series, Table, count_axis, linear_axis, log_axis
from syncline.report.forecast import Forecast
from syncline.report.inputs import PREDICT, Inputs, ModelData
from syncline.units import count_text, duration_text, milliseconds_text, size_text

_LOGARITHMIC_FROM = 6
"""Range of step times, as a multiple of the computation, from which on the axis is logarithmic."""


def scaling_section(inputs: Inputs, model: ModelData) -> Iterator[Section]:
    forecast = model.forecast
    if forecast is None or not forecast.curves:
        return
    name, predictions = next(iter(forecast.curves.items()))
    last = predictions[-1]
    step, low, high = map(milliseconds_text, (last.iteration_s, last.low_s, last.high_s))
    yield Section(
        "scaling",
        "Scaling to more hosts",
        f"On {count_text(last.hosts, 'host')}, a step with {name} is predicted to take {step}, between {low} and "
        f"{high}: scaling {last.scaling:.0%}.",
        [_chart(forecast, list(_measured(inputs, model, forecast))), numbers(forecast.curves)],
        commands=inputs.again(*PREDICT),
    )


def _chart(forecast: Forecast, measured: list[Point]) -> Lines:
    predictions = [prediction for curve in forecast.curves.values() for prediction in curve]
    compute_s = forecast.diagnosis.prediction.compute_s
    x = count_axis("hosts", [*(p.hosts for p in predictions), *(round(point.x) for point in measured)])
    times_s = [compute_s, *(p.high_s for p in predictions), *(point.y for point in measured)]
    y = linear_axis("per step", times_s, duration_text)
    if 0 < _LOGARITHMIC_FROM * compute_s < max(times_s):
        y = log_axis("per step, logarithmic", times_s, duration_text)
    series = [Series("computation alone", line=((x.low, compute_s), (x.high, compute_s)), dashed=True, color=7)]
    series += [_series(name, curve, color % 8) for color, (name, curve) in enumerate(forecast.curves.items())]
    series += [Series("measured", points=measured, color=6)] if measured else []
    return Lines(
        "Step time by number of hosts",
        x,
        y,
        series,
        forecast.source,
        note="Bands are the ranges below.",
    )


def _series(name: str, predictions: tuple[Prediction, ...], color: int) -> Series:
    points = []
    for prediction in predictions:
        step, low, high = map(milliseconds_text, (prediction.iteration_s, prediction.low_s, prediction.high_s))
        hosts = count_text(prediction.hosts, "host")
        tooltip = f"{name} on {hosts}: {step} per step, {low} to {high}; scaling {prediction.scaling:.0%}"
        points.append(Point(float(prediction.hosts), prediction.iteration_s, tooltip))
    band = [(float(prediction.hosts), prediction.low_s, prediction.high_s) for prediction in predictions]
    return Series(name, [(point.x, point.y) for point in points], points, band, color=color)


def numbers(curves: Mapping[str, Sequence[Prediction]]) -> Table:
    """List predictions, given by the name of their plan and links; a single name is left out."""
    rows = []
    for name, predictions in curves.items():
        for row in predictions:
            spread = f"{milliseconds_text(row.low_s, unit='')}–{milliseconds_text(row.high_s)}"
            cells = (milliseconds_text(row.iteration_s), spread, f"{row.scaling:.0%}", size_text(row.sent_bytes))
            rows.append((*([name] if len(curves) > 1 else []), f"{row.hosts:,}", *cells))
    return Table(
        "Step times in numbers",
        (*(["plan and links"] if len(curves) > 1 else []), "hosts", "per step", "range", "scaling", "sent"),
        rows,
        note="Range: over the 90 % intervals of the network’s measurements (of assumed links: start-ups of 1/3 to 3 "
        "times, and rates of 80 to 100 %) and, with more hosts, over start-ups that grow as in a tree or as in a ring. "
        "Scaling: step time of a single rank, divided by this one. Sent: by the busiest rank.",
    )


def _measured(inputs: Inputs, model: ModelData, forecast: Forecast) -> Iterator[Point]:
    """Yield the step times that a bench, the demo or a run measured."""
    rows: list[tuple[int, BenchRow | DemoRow]] = []
    for result in inputs.benches:
        if _comparable(forecast, result):
            rows += [(result.cluster.hosts, row) for row in result.rows if row.method in ("ddp", "plan", "plan-lossy")]
    if inputs.demo is not None:
        rows += [(inputs.demo.cluster.hosts, row) for row in inputs.demo.rows if row.method != "nosync"]
    for hosts, row in rows:
        yield _point(row.method, hosts, row.step_ms / 1e3, row.step_ms_low / 1e3, row.step_ms_high / 1e3)
    for _, record in model.records[:1]:
        for pace in record.paces if record.host_of_rank else ():
            name = f"{pace.way}, without the optimizer step"
            yield _point(name, len(set(record.host_of_rank)), pace.step_s, pace.low_s, pace.high_s)


def _point(name: str, hosts: int, step_s: float, low_s: float, high_s: float) -> Point:
    tooltip = f"{name}, measured on {count_text(hosts, 'host')}: {milliseconds_text(step_s)} per step"
    return Point(float(hosts), step_s, tooltip, (low_s, high_s))


def _comparable(forecast: Forecast, result: BenchResult) -> bool:
    """Return whether a bench measured the same model on links and hosts of the same kind."""
    network, cluster = forecast.network, result.cluster
    link = network.link("host")
    return (
        result.model.gradient_bytes == forecast.profile.gradient_bytes
        and link is not None
        and link.nominal_bps == cluster.rate_bps
        and cluster.per_host == network.ranks // network.hosts
    )
