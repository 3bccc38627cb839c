"""Step times on more hosts, predicted, with the measurements there are."""

from __future__ import annotations

from collections.abc import Iterator

from syncline.records.bench_result import BenchResult, DemoRow
from syncline.records.bench_result import Row as BenchRow
from syncline.report import axes, commands, formatting
from syncline.report.charts import Lines, Point, Series, Table
from syncline.report.forecast import Curve, Forecast
from syncline.report.formatting import step_time
from syncline.report.inputs import Inputs, ModelData
from syncline.report.layout import Section

_LOGARITHMIC_FROM = 6
"""Range of step times, as a multiple of the computation, from which on the axis is logarithmic."""


def scaling_section(inputs: Inputs, model: ModelData) -> Iterator[Section]:
    forecast = model.forecast
    if forecast is None or not forecast.curves:
        return
    first = forecast.curves[0]
    last = first.predictions[-1]
    yield Section(
        "scaling",
        "Scaling to more hosts",
        f"On {formatting.count(last.hosts, 'host')}, a step with {first.name} is predicted to take "
        f"{step_time(last.iteration_s)}, between {step_time(last.low_s)} and {step_time(last.high_s)}: scaling "
        f"{last.scaling:.0%}.",
        [_chart(forecast, [*_benched(inputs, forecast), *_recorded(model)]), _table(forecast)],
        commands=commands.for_prediction(inputs),
    )


def _chart(forecast: Forecast, measured: list[Point]) -> Lines:
    predictions = [prediction for curve in forecast.curves for prediction in curve.predictions]
    compute_s = forecast.diagnosis.prediction.compute_s
    x = axes.counts("hosts", [*(p.hosts for p in predictions), *(round(point.x) for point in measured)])
    times_s = [compute_s, *(p.high_s for p in predictions), *(point.y for point in measured)]
    y = axes.time("per step", times_s)
    if 0 < _LOGARITHMIC_FROM * compute_s < max(times_s):
        y = axes.logarithmic("per step, logarithmic", times_s, formatting.duration)
    series = [Series("computation alone", line=((x.low, compute_s), (x.high, compute_s)), dashed=True, color=7)]
    series += [_series(curve, color) for color, curve in enumerate(forecast.curves)]
    series += [Series("measured", points=measured, color=6)] if measured else []
    return Lines(
        "Step time by number of hosts",
        x,
        y,
        series,
        forecast.source,
        note="Bands show the uncertainty of the network’s measurements and, beyond the measured number of hosts, of "
        "how start-up times grow: as in a tree or as in a ring.",
    )


def _series(curve: Curve, color: int) -> Series:
    points = []
    for prediction in curve.predictions:
        tooltip = (
            f"{curve.name} on {formatting.count(prediction.hosts, 'host')}: {step_time(prediction.iteration_s)} per "
            f"step, {step_time(prediction.low_s)} to {step_time(prediction.high_s)}; scaling {prediction.scaling:.0%}"
        )
        points.append(Point(float(prediction.hosts), prediction.iteration_s, tooltip))
    band = [(float(prediction.hosts), prediction.low_s, prediction.high_s) for prediction in curve.predictions]
    return Series(curve.name, [(point.x, point.y) for point in points], points, band, color=color % 8)


def _table(forecast: Forecast) -> Table:
    first = forecast.curves[0]
    several = len(forecast.curves) > 1
    return Table(
        "The same in numbers" if several else f"The same in numbers: {first.name}",
        ("hosts", *(curve.name for curve in forecast.curves), f"scaling, {first.name}" if several else "scaling"),
        [
            (f"{now[0].hosts:,}", *(step_time(p.iteration_s) for p in now), f"{now[0].scaling:.0%}")
            for now in zip(*(curve.predictions for curve in forecast.curves), strict=True)
        ],
    )


def _benched(inputs: Inputs, forecast: Forecast) -> Iterator[Point]:
    for result in inputs.benches:
        if _comparable(forecast, result):
            for row in result.rows:
                if row.method in ("ddp", "plan", "plan-lossy"):
                    yield _measured_point(row, result.cluster.hosts)
    if inputs.demo is not None:
        for demo_row in inputs.demo.rows:
            if demo_row.method != "nosync":
                yield _measured_point(demo_row, inputs.demo.cluster.hosts)


def _measured_point(row: BenchRow | DemoRow, hosts: int) -> Point:
    time = formatting.milliseconds(row.step_ms)
    tooltip = f"{row.method}, measured on {formatting.count(hosts, 'host')}: {time} per step"
    return Point(float(hosts), row.step_ms / 1e3, tooltip, (row.step_ms_low / 1e3, row.step_ms_high / 1e3))


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


def _recorded(model: ModelData) -> Iterator[Point]:
    for rank, record in model.records[:1]:
        hosts = len(set(record.host_of_rank))
        for pace in record.paces if hosts else ():
            tooltip = (
                f"{pace.way}, measured by rank {rank} on {formatting.count(hosts, 'host')}: {step_time(pace.step_s)} "
                "per step, without the optimizer step"
            )
            yield Point(float(hosts), pace.step_s, tooltip, (pace.low_s, pace.high_s))
