"""A plan: its reason, what it was chosen from, and its buckets."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from syncline.records.plan import Alternative, Plan
from syncline.report.charts import Bars, Chart, Row, Section, Table, time_bar
from syncline.report.inputs import PLAN, Inputs, ModelData
from syncline.report.sentences import capitalized, share
from syncline.units import count_text, milliseconds_text, size_text

_MOST_BUCKETS = 40
_SIMILAR = 0.03
"""Relative difference of two predictions that is not worth a sentence."""


def plan_sections(inputs: Inputs, model: ModelData) -> Iterator[Section]:
    for number, (name, plan) in enumerate(model.plans.items(), 1):
        charts: list[Chart] = [alternatives(plan)] if plan.alternatives else []
        reproduce = inputs.again(*PLAN)
        if not plan.nothing:
            charts.append(buckets(plan))
            if (path := inputs.file("plan")) is not None:
                reproduce += (("Apply it", f'model = syncline.wrap(net, "{path}")'),)
        lead = plan.reason + _outdated(name, plan, model)
        yield Section("plan" if number == 1 else f"plan-{number}", capitalized(name), lead, charts, commands=reproduce)


def _outdated(name: str, plan: Plan, model: ModelData) -> str:
    """Say so if the plan's own prediction differs from the one made with the measurements on this page."""
    again = None if model.forecast is None else model.forecast.predictions.get(name)
    if again is None or not plan.iteration_s or abs(again.iteration_s / plan.iteration_s - 1) <= _SIMILAR:
        return ""
    return (
        f" It was made with other measurements and predicts {milliseconds_text(plan.iteration_s)}; with the "
        f"measurements on this page, the prediction is {milliseconds_text(again.iteration_s)}."
    )


def alternatives(plan: Plan) -> Bars:
    nothing = plan.alternatives[0]
    rows = []
    if not plan.nothing:
        time, low, high = map(milliseconds_text, (plan.iteration_s, plan.low_s, plan.high_s))
        bar = time_bar("chosen", plan.iteration_s, f"the plan: {time}, expected between {low} and {high}")
        rows.append(Row("the plan", (bar,), _cells(plan, plan), quartiles=(plan.low_s, plan.high_s), strong=True))
    for other in plan.alternatives:
        lossy = "" if other.lossless else ", lossy"
        tooltip = f"{other.name}: {milliseconds_text(other.iteration_s)} per step{lossy}"
        bar = time_bar("plain" if other is nothing else "other", other.iteration_s, tooltip)
        rows.append(Row(other.name, (bar,), _cells(plan, other), strong=plan.nothing and other is nothing))
    return Bars(
        "The alternatives, and the predicted step time of each",
        rows,
        ("per step", "faster", "scaling", ""),
        "predicted",
        limit=(plan.compute_s, "computation alone"),
    )


def _cells(plan: Plan, shown: Plan | Alternative) -> tuple[str, str, str, str]:
    seconds = shown.iteration_s
    faster = f"{plan.plain_s / seconds:.2f}×" if seconds else "–"
    return milliseconds_text(seconds), faster, share(plan.compute_s, seconds), "" if shown.lossless else "lossy"


def buckets(plan: Plan) -> Table:
    sizes = {gradient.name: gradient.bytes for gradient in plan.gradients}
    rows = []
    for index, (bucket, exchange) in enumerate(zip(plan.buckets, plan.exchanges, strict=True)):
        names = bucket.parameters
        gradients = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)})"
        size = size_text(sum(sizes[name] for name in names))
        rows.append((str(index), str(bucket.lane), size, _exchange_text(exchange), gradients))
    hidden = len(rows) - _MOST_BUCKETS
    return Table(
        f"Its {count_text(len(rows), 'bucket')} on {count_text(plan.lanes, 'lane')}",
        ("bucket", "lane", "size", "exchange", "gradients"),
        rows[:_MOST_BUCKETS],
        note=f"{count_text(hidden, 'more bucket')} not shown." if hidden > 0 else "",
    )


def _exchange_text(exchange: object) -> str:
    """Format an exchange as its type and those of its settings that differ from the defaults."""
    defaults = type(exchange)()
    parts = []
    for field in dataclasses.fields(exchange):  # type: ignore[arg-type]
        value = getattr(exchange, field.name)
        if value != getattr(defaults, field.name):
            parts.append(f"{field.name}={_exchange_text(value) if dataclasses.is_dataclass(value) else repr(value)}")
    return f"{type(exchange).__name__}({', '.join(parts)})"
