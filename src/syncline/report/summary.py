"""The top of the page: which model and cluster, the verdict, what to know before believing it, and a few numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from syncline.records.bench_result import DemoRow
from syncline.records.bench_result import Row as BenchRow
from syncline.records.network import Network
from syncline.records.run_record import FINISHED, RUNNING, RunRecord
from syncline.report import sentences
from syncline.report.inputs import Inputs, ModelData
from syncline.units import count_text, milliseconds_text, ranks_text, rate_text, size_text


@dataclass(frozen=True)
class Fact:
    """One of the few large numbers at the top."""

    name: str
    value: str
    note: str


def about(inputs: Inputs, models: Sequence[ModelData]) -> str:
    first = models[0]
    parts = [", ".join(model.name for model in models if model.name)]
    if len(models) == 1:
        parameters = [record.parameters for _, record in first.records]
        parameters += [bench.model.parameters for bench in inputs.benches]
        parts += [f"{number:,} parameters" for number in parameters[:1]]
        sizes = [first.profile.gradient_bytes] if first.profile is not None else []
        sizes += [record.gradient_bytes for _, record in first.records]
        sizes += [sum(gradient.bytes for gradient in plan.gradients) for plan in first.plans.values()]
        parts += [f"{size_text(nbytes)} of gradients" for nbytes in sizes[:1]]
    return " · ".join(filter(None, [*parts, _cluster(inputs, first)]))


def _cluster(inputs: Inputs, model: ModelData) -> str:
    network = model.network if model.forecast is None else model.forecast.network
    if network is None and not model.records and (measured := [inputs.demo] if inputs.demo else inputs.benches):
        return sentences.bench_cluster(measured[0].cluster)
    known = [(record.host_of_rank, record.backend) for _, record in model.records]
    known += [(network.host_of_rank, network.backend)] if network is not None else []
    known += [(plan.where.host_of_rank, plan.where.backend) for plan in model.plans.values()]
    if not known:
        return ""
    host_of_rank, backend = known[0]
    hosts, ranks = len(set(host_of_rank)), len(host_of_rank)
    parts = [count_text(hosts, "host")] if hosts else []  # a run may not know its hosts
    parts += [count_text(ranks, "rank")] if ranks != hosts else []
    if network is not None and (link := network.link("host")) is not None:
        parts.append(f"{rate_text(link.nominal_bps or link.bytes_per_s * 8)} links")
    return " · ".join(filter(None, [", ".join(parts), backend]))


def all_networks(models: Sequence[ModelData]) -> list[Network]:
    return list(dict.fromkeys(model.network for model in models if model.network is not None))


def verdict_sentences(inputs: Inputs, models: Sequence[ModelData]) -> list[str]:
    """Return the verdict and the sentences below it: measurements before predictions."""
    said: list[str] = []
    if inputs.demo is not None:
        said += sentences.demo(inputs.demo)
    if inputs.runs and not any(model.records for model in models):
        said.append("The script built no DistributedDataParallel model, so there was nothing to record.")
    for model in models:
        for _, record in model.records[:1]:
            said += [sentences.run(record), record.outcome]
            if record.plan is not None and not record.plan.lossless and record.way in sentences.PLAN_NAMES:
                said.append("The plan changes numerics, which was allowed.")
            said.append(sentences.between_steps(record))
    for result in inputs.benches:
        said += [sentences.bench(result), sentences.prediction_error(result)]
    for model in models:
        if (forecast := model.forecast) is not None:
            if not said:
                said += filter(None, [sentences.fastest(forecast)])
            name = f"{model.name}, {forecast.name}" if len(models) > 1 else forecast.name
            text = sentences.diagnosis(forecast.diagnosis)
            said.append(f"Predicted for {name}: {text[:1].lower()}{text[1:]}")
        if inputs.demo is None and not model.records:
            said += [plan.reason for plan in model.plans.values()]
    if not said:
        said += [sentences.network(network) for network in all_networks(models)]
        said += [sentences.profile(model.profile) for model in models if model.profile is not None]
    return [sentence for sentence in said if sentence] or ["There is nothing to show yet."]


def facts(inputs: Inputs, models: Sequence[ModelData]) -> Iterator[Fact]:
    """Yield the numbers that people repeat, the most important first; the page shows four."""
    for model in models:
        for pace in model.records[0][1].paces[-2:] if model.records else ():
            yield Fact(pace.way, milliseconds_text(pace.step_s), f"per step of {model.name}, measured")
    result = inputs.demo or next(iter(inputs.benches), None)
    if result is not None and result.rows:
        measured: Sequence[BenchRow | DemoRow] = result.rows
        rows = {row.method: row for row in sorted(measured, key=lambda row: row.step_ms)}
        best = next((method for method in rows if method != "nosync"), "nosync")
        for method in dict.fromkeys(["nosync", "ddp", best]):
            if method in rows:
                time = milliseconds_text(rows[method].step_ms / 1e3)
                yield Fact(sentences.METHODS.get(method, method), time, "per step, measured")
        if inputs.demo is not None:
            accuracy, plain = (inputs.demo.row(name).held_out_accuracy or 0 for name in (best, "ddp"))
            yield Fact("accuracy", f"{accuracy:.1%}", f"plain DDP: {plain:.1%}")
    forecast = models[0].forecast
    if forecast is not None:
        for name, prediction in list(forecast.predictions.items())[:2]:
            yield Fact(name, milliseconds_text(prediction.iteration_s), "per step, predicted")
        now, remedies = forecast.diagnosis.prediction, forecast.diagnosis.remedies
        change = next((remedy for remedy in remedies if not (remedy.lossy or remedy.hardware)), None)
        if change is not None and not forecast.others:
            yield Fact("best lossless change", milliseconds_text(change.prediction.iteration_s), change.what)
        yield Fact("scaling", f"{now.scaling:.0%}", f"{forecast.name} on {count_text(now.hosts, 'host')}")
        yield Fact("computation", milliseconds_text(now.compute_s), "per step, on a single rank")
    elif (profile := models[0].profile) is not None:
        yield Fact("computation", milliseconds_text(profile.step_s), "per step")
        yield Fact("gradients", size_text(profile.gradient_bytes), count_text(len(profile.gradients), "tensor"))


def warning(inputs: Inputs, models: Sequence[ModelData]) -> str:
    """Say what readers must know before they believe the rest."""
    parts = []
    unfinished = sorted((run for run in inputs.runs if run.ended != FINISHED), key=_likely_cause)
    if unfinished:
        first, *others = unfinished
        text = first.state if len(first.state) <= 160 else f"{first.state[:159]}…"
        before = f", before {count_text(len(others), 'other rank')}" if others else ""
        parts.append(f"The run did not finish: rank {first.rank}{before}: {text}.")
    if 0 < len(inputs.runs) < inputs.runs[0].ranks:
        missing = sorted(set(range(inputs.runs[0].ranks)) - {run.rank for run in inputs.runs})
        parts.append(f"There is no record of {ranks_text(missing, 8)}.")
    if any(not network.measured for network in all_networks(models)):
        parts.append("Link speeds are assumed, not measured: syncline probe measures yours.")
    hidden = len(inputs.models) - len(models)
    if hidden > 0:
        parts.append(f"{count_text(hidden, 'more model')} of this script not shown.")
    return " ".join(parts)


def _likely_cause(run: RunRecord) -> tuple[bool, bool, float]:
    """Sort the rank that failed first to the front: an exception says more than a lost connection."""
    lost = any(word in run.ended for word in ("Connection closed", "Connection reset", "NCCL", "imed out"))
    return run.ended == RUNNING, lost, run.seconds
