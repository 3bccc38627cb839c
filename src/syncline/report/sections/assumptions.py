"""The end of the page: what the results assume, and which files and commands they come from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from syncline.report import sentences
from syncline.report.charts import Section, Table
from syncline.report.inputs import Inputs, ModelData
from syncline.report.summary import all_networks
from syncline.units import count_text

_MOST_FILES = 40


def assumptions_section(inputs: Inputs, models: Sequence[ModelData]) -> Iterator[Section]:
    yield Section("assumptions", "Assumptions", points=list(_assumptions(inputs, models)))


def _assumptions(inputs: Inputs, models: Sequence[ModelData]) -> Iterator[str]:
    networks, forecasts = all_networks(models), [model.forecast for model in models if model.forecast is not None]
    if forecasts:
        yield (
            "Predictions simulate one step from the profile and the network. They assume that communication needs no "
            "processor time: where it competes with computation, steps take longer than predicted."
        )
        yield "Computation is as profiled: the same model, batch and device on every host."
    if any(forecast.curves for forecast in forecasts):
        yield (
            "Clusters with more hosts than were measured have the same kind of hosts and links, behind a switch that "
            "carries all of their traffic."
        )
    for network in [network for network in networks if not network.measured][:1]:
        yield f"Links were not measured: {network.how}."
    if any(network.one_machine for network in networks):
        yield "Hosts were emulated on one machine: without latency or loss, and with shared processors."
    if any(not plan.lossless for model in models for plan in model.plans.values()):
        yield "A plan on this page is lossy: it was allowed to change numerics, and a model may train differently."
    if len(inputs.runs) == 1 and inputs.runs[0].ranks > 1:
        run = inputs.runs[0]
        yield (
            f"The run is shown as rank {run.rank} of {run.ranks} recorded it; syncline report with the run’s folder "
            "shows all ranks."
        )
    if inputs.runs:
        yield "Step times of a run are each rank’s own, without the optimizer, data loading and logging."
    if inputs.benches or inputs.demo:
        yield "Methods took turns in the same processes, and each step began after the links had been idle."
    yield "docs/assumptions.md in Syncline’s source lists all assumptions, and what breaks its guarantees."


def sources_section(inputs: Inputs) -> Iterator[Section]:
    about = _descriptions(inputs)
    rows = [
        (kind, path, description)
        for kind, paths in inputs.files.items()
        for path, description in zip(paths, about[kind], strict=True)
    ]
    reproduce = inputs.again()
    if rows or reproduce:
        tables = [Table("Files that were read", ("", "file", "content"), rows[:_MOST_FILES])] if rows else []
        yield Section("sources", "Sources", "", tables, commands=reproduce)


def _descriptions(inputs: Inputs) -> dict[str, list[str]]:
    """Describe the files of each kind."""
    return {
        "profile": [f"{p.model} on {p.where}: {p.how}; {count_text(p.steps, 'step')}" for p in [inputs.profile] if p],
        "network": [", ".join(filter(None, [n.where, n.how, n.date])) for n in [inputs.network] if n],
        "demo": [f"{count_text(d.steps, 'step')}, {sentences.bench_cluster(d.cluster)}" for d in [inputs.demo] if d],
        "plan": [f"{plan.model}: {plan.how}" for plan in inputs.plans.values()],
        "bench": [f"{b.model.name}, {count_text(b.rounds, 'round')}, {b.date}" for b in inputs.benches],
        "run": [f"rank {r.rank} of {r.ranks}, {r.state}, {r.seconds:.0f} s, {r.date}" for r in inputs.runs],
    }
