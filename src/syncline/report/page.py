"""Build the page and write it as one self-contained HTML file: no request to any server, no external font or script."""

from __future__ import annotations

import base64
import datetime
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Any, NamedTuple

import jinja2
import msgspec
from markupsafe import Markup

from syncline._version import __version__
from syncline.files import write_text
from syncline.records.bench_result import BenchResult, DemoResult, DemoRow
from syncline.records.bench_result import Row as BenchRow
from syncline.report import sentences
from syncline.report.charts import Section
from syncline.report.inputs import Inputs, ModelData, all_networks, forecast_for
from syncline.report.sections import all_sections
from syncline.report.sections.sharded import first_prediction
from syncline.units import count_text, duration_text, milliseconds_text, ranks_text, rate_text, size_text

_MOST_MODELS, _MOST_FACTS = 6, 4


class Fact(NamedTuple):
    name: str
    value: str
    note: str  # one of the few large numbers at the top


_BEFORE_UNIT = re.compile(r"(?<=[0-9]) (?=(?:m?s|µs|[kMG]?B|[kMG]?bit/s|hosts?|ranks?)\b)")
"""The space between a number and its unit, at which no line may break."""


class Page(msgspec.Struct, frozen=True):
    about: str  # the model and the cluster
    verdict: str
    more: Sequence[str]  # further sentences below the verdict
    facts: Sequence[Fact]
    sections: Sequence[Section]
    warning: str
    recommendation: str  # one line, if there is one


def write_report(path: str | os.PathLike[str], inputs: Inputs) -> None:
    """Write the page for `inputs` to `path`. An existing file is replaced in one step, or kept if anything fails.

    Example:
        >>> write_report("report.html", read_inputs(["profile.json", "network.json"]))
    """
    write_text(path, render(build_page(inputs)))


def build_page(inputs: Inputs) -> Page:
    """Decide what the page shows; nothing is drawn yet."""
    shown = inputs.models[:_MOST_MODELS]
    models = [msgspec.structs.replace(model, forecast=forecast_for(inputs, model)) for model in shown]
    verdict, *more = [sentence for sentence in _said(inputs, models) if sentence] or ["There is nothing to show yet."]
    facts, sections = list(_facts(inputs, models))[:_MOST_FACTS], list(all_sections(inputs, models))
    warning = " ".join(_warnings(inputs, models))
    advice = _recommendation(inputs, models[0]) if len(models) == 1 else ""
    return Page(_about(inputs, models), verdict, more, facts, sections, warning, advice)


def render(page: Page) -> str:
    """Return the page as HTML."""
    folder = resources.files("syncline") / "report"
    style, script = ((folder / name).read_text("utf-8") for name in ("page.css", "page.js"))
    loader = jinja2.PackageLoader("syncline", "report")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "keep_units": lambda text: _BEFORE_UNIT.sub("\u00a0", text),
        "percent": _percent,
        "digits": lambda value: f"{value:.6g}" if isinstance(value, float) else value,
    }
    now = datetime.datetime.now().astimezone().isoformat(timespec="minutes", sep=" ")
    text = environment.get_template("page.html.j2").render(
        page=page,
        made_by=f"syncline {__version__}, {now}",
        style=Markup(style),  # noqa: S704 - our own file
        script=Markup(script),  # noqa: S704
        policy=f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; img-src data:; "
        "base-uri 'none'; form-action 'none'",
    )
    # Names may contain lone surrogates, which JSON can express and UTF-8 cannot.
    return text.encode("utf-8", "replace").decode()


def _percent(value: float, end: float = 100.0) -> str:
    return f"{100 * max(0.0, value) / end:.3f}%"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _about(inputs: Inputs, models: Sequence[ModelData]) -> str:
    parts, first = [", ".join(model.name for model in models if model.name)], models[0]
    if len(models) == 1:
        known: list[Any] = [*(record for _, record in first.records), *(bench.model for bench in inputs.benches)]
        known += [inputs.demo.model] if inputs.demo is not None and inputs.demo.model is not None else []
        parts += [f"{entry.parameters:,} parameters" for entry in known[:1]]
        sizes = [entry.gradient_bytes for entry in (first.profile, *known) if entry is not None]
        sizes += [sum(gradient.nbytes for gradient in plan.gradients) for plan in first.plans.values()]
        parts += [f"{size_text(nbytes)} of gradients" for nbytes in sizes[:1]]
    return " · ".join(filter(None, [*parts, _cluster(inputs, first)]))


def _cluster(inputs: Inputs, model: ModelData) -> str:
    network = model.network if model.forecast is None else model.forecast.network
    if inputs.demo is not None and inputs.demo.model is not None:
        return sentences.bench_cluster(inputs.demo.cluster)
    if network is None and not model.records and (measured := [inputs.demo] if inputs.demo else inputs.benches):
        return sentences.bench_cluster(measured[0].cluster)
    known = [(record.host_of_rank, record.backend) for _, record in model.records]
    known += [(network.host_of_rank, network.backend)] if network is not None else []
    known += [(plan.where.host_of_rank, plan.where.backend) for plan in model.plans.values()]
    if not known:
        last = None if inputs.failure is None else inputs.failure.last
        return "" if last is None else f"{count_text(last.world_size, 'rank')} · {last.backend}"
    host_of_rank, backend = known[0]
    hosts, ranks = len(set(host_of_rank)), len(host_of_rank)
    parts = [count_text(hosts, "host")] if hosts else []  # a run may not know its hosts
    parts += [count_text(ranks, "rank")] if ranks != hosts else []
    if network is not None and (link := network.link("host")) is not None:
        parts.append(f"{rate_text(link.nominal_bps or link.bytes_per_s * 8)} links")
    return " · ".join(filter(None, [", ".join(parts), backend]))


def _said(inputs: Inputs, models: Sequence[ModelData]) -> list[str]:
    """Return the verdict and the sentences below it: measurements before predictions."""
    said = [] if inputs.failure is None else sentences.failure(inputs.failure)[:2]
    said += [] if inputs.demo is None else sentences.demo(inputs.demo)
    if inputs.runs and not any(model.records for model in models):
        said.append("The script built no DistributedDataParallel model, so there was nothing to record.")
    for record in [record for model in models for _, record in model.records[:1]]:
        said += [sentences.run(record), record.outcome]
        if record.plan is not None and not record.plan.lossless and record.way in sentences.PLAN_NAMES:
            said.append("The plan changes numerics, which was allowed.")
        said.append(sentences.between_steps(record))
    for result in inputs.benches:
        said += [sentences.bench(result), sentences.prediction_error(result)]
    for model in models:
        if inputs.demo is None and not model.records:
            said += [plan.reason for plan in model.plans.values()]
        if (forecast := model.forecast) is not None and not (inputs.demo is not None and inputs.demo.model is not None):
            name = f"{model.name}, {forecast.name}" if len(models) > 1 else forecast.name
            text = sentences.diagnosis(forecast.diagnosis)
            said.append(f"Predicted for {name}: {text[:1].lower()}{text[1:]}")
        if inputs.sharded and (first := first_prediction(inputs, model)) is not None:
            said.append(f"Predicted for {first.name}: {sentences.sharded(first)}")
    if not said:
        said += [sentences.network(network) for network in all_networks(models)]
        said += [sentences.profile(model.profile) for model in models if model.profile is not None]
    return said


def _recommendation(inputs: Inputs, model: ModelData) -> str:
    """Recommend one thing to do: what was measured counts more than what was predicted."""
    if inputs.failure is not None:
        return ""  # the verdict says what to look at
    if inputs.demo is not None:
        return sentences.best_quality(inputs.demo)
    if model.records and (record := model.records[0][1]).way != sentences.PLAIN_DDP:
        return sentences.kept(record)
    if inputs.benches:
        return sentences.best_method(inputs.benches[0])
    if (plan := next(iter(model.plans.values()), None)) is not None:
        return sentences.best_of_plan(plan)
    return "" if model.forecast is None else sentences.best_remedy(model.forecast.diagnosis)


def _facts(inputs: Inputs, models: Sequence[ModelData]) -> Iterator[Fact]:
    """Yield the numbers that people repeat, the most important first."""
    for model in models:
        for pace in model.records[0][1].paces[-2:] if model.records else ():
            yield Fact(pace.way, milliseconds_text(pace.step_s), f"per step of {model.name}, measured")
    if inputs.demo is not None and inputs.demo.model is not None:
        yield from _demo_facts(inputs.demo)
        return
    result = inputs.demo or next(iter(inputs.benches), None)
    if result is not None and result.rows:
        measured: Sequence[BenchRow | DemoRow] = result.rows
        rows = {row.method: row for row in sorted(measured, key=lambda row: row.step_ms)}
        best = next((method for method in rows if method != "nosync"), "nosync")
        for method in dict.fromkeys(name for name in ("nosync", "ddp", best) if name in rows):
            yield Fact(sentences.method(method), milliseconds_text(rows[method].step_ms / 1e3), "per step, measured")
        if inputs.demo is not None:
            accuracy, plain = (inputs.demo.row(name).held_out_accuracy or 0 for name in (best, "ddp"))
            yield Fact("accuracy", f"{accuracy:.1%}", f"plain DDP: {plain:.1%}")
    if (forecast := models[0].forecast) is not None:
        for name, prediction in list(forecast.predictions.items())[:2]:
            yield Fact(name, milliseconds_text(prediction.iteration_s), "per step, predicted")
        now, remedies = forecast.diagnosis.prediction, forecast.diagnosis.remedies
        change = next((remedy for remedy in remedies if not (remedy.lossy or remedy.hardware)), None)
        if change is not None and len(forecast.predictions) == 1:
            yield Fact("best lossless change", milliseconds_text(change.prediction.iteration_s), change.what)
        yield Fact("scaling", f"{now.scaling:.0%}", f"{forecast.name} on {count_text(now.hosts, 'host')}")
        yield Fact("computation", milliseconds_text(now.compute_s), "per step, on a single rank")
    elif (profile := models[0].profile) is not None:
        yield Fact("computation", milliseconds_text(profile.step_s), "per step")
        yield Fact("gradients", size_text(profile.gradient_bytes), count_text(len(profile.gradients), "tensor"))


def _demo_facts(demo: DemoResult) -> Iterator[Fact]:
    plain = demo.row("ddp")
    for row in (demo.row(name) for name in demo.methods if name != "nosync"):
        ratio = sentences.sooner(row, plain)
        note = "plain DDP’s loss was not reached" if ratio is None else f"to the same loss, {ratio:.1f} times sooner"
        note = "to its final held-out loss" if row is plain else "not trained twice" if row.same_as else note
        yield Fact(sentences.demo_method(row), "–" if row.reached_s is None else duration_text(row.reached_s), note)


def _warnings(inputs: Inputs, models: Sequence[ModelData]) -> Iterator[str]:
    """Say what readers must know before they believe the rest."""
    made: list[BenchResult | DemoResult] = [*inputs.benches, *filter(None, [inputs.demo])]
    rates = [result.cluster.rate_bps for result in made if result.cluster.emulated]
    if rates:
        limited = f"links that are limited to {rate_text(rates[0])}"
        yield f"Emulated: the hosts are processes on one machine, behind {limited}."
    elif made:
        yield "The hosts are processes on one machine, and its links were not slowed down."
    elif any(network.one_machine for network in all_networks(models)):
        yield "Emulated: the links were measured between processes on one machine, which share its processors."
    if inputs.failure is None and (unfinished := sentences.unfinished(inputs.runs)):
        yield unfinished
    if 0 < len(inputs.runs) < inputs.runs[0].ranks:
        missing = sorted(set(range(inputs.runs[0].ranks)) - {run.rank for run in inputs.runs})
        yield f"There is no record of {ranks_text(missing, 8)}."
    if any(not network.measured for network in all_networks(models)):
        yield "Link speeds are assumed, not measured: syncline probe measures yours."
    if hidden := len(inputs.models) - len(models):
        yield f"{count_text(hidden, 'more model')} of this script not shown."
