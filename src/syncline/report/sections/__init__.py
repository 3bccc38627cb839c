"""The sections of a page, in order. Each is made by one function, which yields nothing if there is nothing to show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from syncline.report import sentences
from syncline.report.charts import Section, Table
from syncline.report.inputs import Inputs, ModelData, all_networks
from syncline.report.sections.demo import demo_sections
from syncline.report.sections.failure import failure_section
from syncline.report.sections.measured import gradients_section, method_sections, training_section
from syncline.report.sections.network import network_sections
from syncline.report.sections.plan import plan_sections, scaling_section
from syncline.report.sections.ranks import ranks_section
from syncline.report.sections.sharded import sharded_section
from syncline.report.sections.step import remedies_section, step_section, timeline_section
from syncline.units import count_text

_MOST_FILES = 40
_FOR_EACH_MODEL = (
    *(ranks_section, step_section, timeline_section, remedies_section, plan_sections),
    *(scaling_section, sharded_section, training_section, gradients_section),
)


def all_sections(inputs: Inputs, models: Sequence[ModelData]) -> Iterator[Section]:
    yield from failure_section(inputs)
    yield from demo_sections(inputs)
    yield from method_sections(inputs)
    for number, model in enumerate(models, 1):
        for section in (section for make in _FOR_EACH_MODEL for section in make(inputs, model)):
            if len(models) > 1:
                name, title = f"{section.name}-m{number}", f"{section.title}: {model.name}"
                section = msgspec.structs.replace(section, name=name, title=title)
            yield section
    yield from network_sections(inputs, models)
    yield Section("assumptions", "Assumptions", points=list(_assumptions(inputs, models)))
    yield from _sources_section(inputs)


def _assumptions(inputs: Inputs, models: Sequence[ModelData]) -> Iterator[str]:
    networks, forecasts = all_networks(models), [model.forecast for model in models if model.forecast is not None]
    if forecasts:
        yield "Predictions simulate a step as profiled: with the same model, batch and device on every host."
        yield "They assume that communication needs no processor time: where it does, steps take longer than predicted."
    if any(forecast.curves for forecast in forecasts):
        yield "Larger clusters have the same kind of hosts and links, behind a switch that carries all their traffic."
    for network in [network for network in networks if not network.measured][:1]:
        yield f"Links were not measured: {network.how}."
    if any(network.one_machine for network in networks):
        yield "Hosts were emulated on one machine: without latency or loss, and with shared processors."
    if any(not plan.lossless for model in models for plan in model.plans.values()):
        yield "A plan on this page is lossy: it was allowed to change numerics, and a model may train differently."
    if len(inputs.runs) == 1 and inputs.runs[0].ranks > 1:
        shown = f"The run is shown as rank {inputs.runs[0].rank} of {inputs.runs[0].ranks} recorded it"
        yield f"{shown}; syncline report with the run’s folder shows all ranks."
    if inputs.runs:
        yield "Step times of a run are each rank’s own, without the optimizer, data loading and logging."
    if inputs.benches or inputs.demo:
        turn = "block of steps" if inputs.demo is not None and inputs.demo.model is not None else "step"
        yield f"Methods took turns in the same processes, and each {turn} began after the links had been idle."
    yield "docs/assumptions.md in Syncline’s source lists all assumptions, and what breaks its guarantees."


def _sources_section(inputs: Inputs) -> Iterator[Section]:
    about = {
        "profile": [f"{p.model} on {p.where}: {p.how}; {count_text(p.steps, 'step')}" for p in [inputs.profile] if p],
        "network": [", ".join(filter(None, [n.where, n.how, n.date])) for n in [inputs.network] if n],
        "demo": [f"{count_text(d.steps, 'step')}, {sentences.bench_cluster(d.cluster)}" for d in [inputs.demo] if d],
        "plan": [f"{plan.model}: {plan.how}" for plan in inputs.plans.values()],
        "bench": [f"{b.model.name}, {count_text(b.rounds, 'round')}, {b.date}" for b in inputs.benches],
        "failure": [f"{count_text(len(f.reports), 'failure report')}, {f.last.date}" for f in [inputs.failure] if f],
        "run": [f"rank {r.rank} of {r.ranks}, {r.state}, {r.seconds:.0f} s, {r.date}" for r in inputs.runs],
    }
    rows = [(kind, *row) for kind, paths in inputs.files.items() for row in zip(paths, about[kind], strict=True)]
    if rows or inputs.again():
        tables = [Table("Files that were read", ("", "file", "content"), rows[:_MOST_FILES])] if rows else []
        yield Section("sources", "Sources", "", tables, commands=inputs.again())
