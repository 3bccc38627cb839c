"""A plan: its reason, what it was chosen from, and its buckets."""

from __future__ import annotations

from collections.abc import Iterator

from syncline.records.plan import Plan
from syncline.report import commands, formatting
from syncline.report.charts import Bars, Chart, Row, Table, time_bar
from syncline.report.formatting import step_time
from syncline.report.inputs import Inputs, ModelData
from syncline.report.layout import Section

_MOST_ALTERNATIVES, _MOST_BUCKETS = 14, 40
_SIMILAR = 0.03
"""Relative difference of two predictions that is not worth a sentence."""


def plan_sections(inputs: Inputs, model: ModelData) -> Iterator[Section]:
    for number, (name, plan) in enumerate(model.plans.items(), 1):
        charts: list[Chart] = [_alternatives(plan)] if plan.alternatives else []
        apply: tuple[tuple[str, str], ...] = ()
        if not plan.nothing:
            charts.append(_buckets(plan))
            path = inputs.file("plan")
            apply = (("Apply it", f'model = syncline.wrap(net, "{path}")'),) if path is not None else ()
        yield Section(
            "plan" if number == 1 else f"plan-{number}",
            formatting.capitalized(name),
            plan.reason + _outdated(name, plan, model),
            charts,
            commands=(*commands.for_plan(inputs), *apply),
        )


def _outdated(name: str, plan: Plan, model: ModelData) -> str:
    """Say so if the plan's own prediction differs from the one made with the measurements on this page."""
    again = None if model.forecast is None else model.forecast.predictions.get(name)
    if again is None or not plan.iteration_s or abs(again.iteration_s / plan.iteration_s - 1) <= _SIMILAR:
        return ""
    return (
        f" It was made with other measurements and predicts {step_time(plan.iteration_s)}; with the measurements on "
        f"this page, the prediction is {step_time(again.iteration_s)}."
    )


def _alternatives(plan: Plan) -> Bars:
    nothing, *others = plan.alternatives
    rows = []
    if not plan.nothing:
        expected = f"expected between {step_time(plan.low_s)} and {step_time(plan.high_s)}"
        bar = time_bar("chosen", plan.iteration_s, f"the plan: {step_time(plan.iteration_s)}, {expected}")
        cells = _cells(plan, plan.iteration_s, plan.lossless)
        rows.append(Row("the plan", (bar,), cells, quartiles=(plan.low_s, plan.high_s), strong=True))
    for other in [nothing, *others[:_MOST_ALTERNATIVES]]:
        tooltip = f"{other.name}: {step_time(other.iteration_s)} per step{'' if other.lossless else ', lossy'}"
        bar = time_bar("plain" if other is nothing else "other", other.iteration_s, tooltip)
        cells = _cells(plan, other.iteration_s, other.lossless)
        rows.append(Row(other.name, (bar,), cells, strong=plan.nothing and other is nothing))
    hidden = len(others) - _MOST_ALTERNATIVES
    return Bars(
        "The alternatives, and the predicted step time of each",
        tuple(rows),
        ("per step", "faster", "scaling", ""),
        "predicted",
        limit=(plan.compute_s, "computation alone"),
        note=f"{formatting.count(hidden, 'slower alternative')} not shown." if hidden > 0 else "",
    )


def _cells(plan: Plan, seconds: float, lossless: bool) -> tuple[str, ...]:
    faster = f"{plan.plain_s / seconds:.2f}×" if seconds else "–"
    return step_time(seconds), faster, formatting.share(plan.compute_s, seconds), "" if lossless else "lossy"


def _buckets(plan: Plan) -> Table:
    sizes = {gradient.name: gradient.bytes for gradient in plan.gradients}
    rows = []
    for index, (bucket, exchange) in enumerate(zip(plan.buckets, plan.exchanges, strict=True)):
        names = bucket.parameters
        gradients = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)})"
        size = formatting.size(sum(sizes[name] for name in names))
        rows.append((str(index), str(bucket.lane), size, formatting.exchange(exchange), gradients))
    hidden = len(rows) - _MOST_BUCKETS
    return Table(
        f"Its {formatting.count(len(rows), 'bucket')} on {formatting.count(plan.lanes, 'lane')}",
        ("bucket", "lane", "size", "exchange", "gradients"),
        rows[:_MOST_BUCKETS],
        note=f"{formatting.count(hidden, 'more bucket')} not shown." if hidden > 0 else "",
    )
