"""The top of the page: which model and cluster, the verdict, what to know before believing it, and a few numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from syncline.records.network import Network
from syncline.records.run_record import FINISHED, RUNNING, RunRecord
from syncline.report import formatting, sentences
from syncline.report.inputs import Inputs, ModelData
from syncline.report.layout import Fact
from syncline.units import ranks_text

LINK_NAMES = {"host": "hosts’ links", "rack": "links between racks", "local": "links inside hosts"}


def about(inputs: Inputs, models: Sequence[ModelData]) -> str:
    names = [model.name for model in models if model.name]
    parts = [" and ".join([*([", ".join(names[:-1])] if names[1:] else []), *names[-1:]])]
    if len(models) == 1:
        parameters = inputs.benches[0].model.parameters if inputs.benches else 0
        if models[0].records:
            parameters = models[0].records[0][1].parameters
        parts.append(f"{parameters:,} parameters" if parameters else "")
        gradient_bytes = models[0].gradient_bytes
        parts.append(f"{formatting.size(gradient_bytes)} of gradients" if gradient_bytes else "")
    parts.append(_cluster(inputs, models[0]))
    return " · ".join(filter(None, parts))


def _cluster(inputs: Inputs, model: ModelData) -> str:
    if model.records:
        record = model.records[0][1]
        return _hosts(record.host_of_rank, record.backend, model.network)
    network = model.network if model.forecast is None else model.forecast.network
    if network is not None:
        return _hosts(network.host_of_rank, network.backend, network)
    if inputs.demo is not None:
        return sentences.bench_cluster(inputs.demo.cluster)
    if inputs.benches:
        return sentences.bench_cluster(inputs.benches[0].cluster)
    plan = next(iter(model.plans.values()), None)
    return "" if plan is None else _hosts(plan.where.host_of_rank, plan.where.backend, None)


def _hosts(host_of_rank: tuple[int, ...], backend: str, network: Network | None) -> str:
    if not host_of_rank:  # not recorded
        return backend
    hosts, ranks = len(set(host_of_rank)), len(host_of_rank)
    parts = [formatting.count(hosts, "host"), formatting.count(ranks, "rank") if ranks != hosts else ""]
    link = None if network is None else network.link("host")
    if link is not None:
        parts.append(f"{formatting.rate(link.nominal_bps or link.bytes_per_s * 8)} links")
    return f"{', '.join(filter(None, parts))} · {backend}"


def all_networks(models: Sequence[ModelData]) -> list[Network]:
    return list(dict.fromkeys(model.network for model in models if model.network is not None))


def verdict_sentences(inputs: Inputs, models: Sequence[ModelData]) -> list[str]:
    """Return the verdict and the sentences below it: measurements before predictions."""
    found: list[str] = []
    if inputs.demo is not None:
        found += [sentences.demo_in_short(inputs.demo), *sentences.demo(inputs.demo)]
    if inputs.runs and not any(model.records for model in models):
        found.append("The script built no DistributedDataParallel model, so there was nothing to record.")
    for model in models:
        for _, record in model.records[:1]:
            found += [sentences.run(record), record.outcome]
            if record.plan is not None and not record.plan.lossless and record.way in sentences.PLAN_NAMES:
                found.append("The plan changes numerics, which was allowed.")
            found.append(sentences.between_steps(record))
    for result in inputs.benches:
        found += [sentences.bench(result), sentences.prediction_error(result)]
    for model in models:
        if (forecast := model.forecast) is not None:
            if not found:
                found.append(sentences.forecast(forecast.diagnosis, forecast.name, forecast.others))
            name = f"{model.name}, {forecast.name}" if len(models) > 1 else forecast.name
            text = sentences.diagnosis(forecast.diagnosis)
            found.append(f"Predicted for {name}: {text[:1].lower()}{text[1:]}")
        if inputs.demo is None and not model.records:
            found += [plan.reason for plan in model.plans.values()]
    if not found:
        found += [sentences.network(network) for network in all_networks(models)]
        found += [sentences.profile(model.profile) for model in models if model.profile is not None]
    return [sentence for sentence in found if sentence] or ["There is nothing to show yet."]


def facts(inputs: Inputs, models: Sequence[ModelData]) -> Iterator[Fact]:
    """Yield the numbers that people repeat, the most important first; the page shows four."""
    demo, forecast = inputs.demo, models[0].forecast
    if demo is not None:
        plain, best = demo.row("ddp"), min(demo.rows[1:], key=lambda row: row.step_ms)
        yield Fact("plain DDP", formatting.milliseconds(plain.step_ms), "per step, measured")
        if best is not plain:
            note = f"{formatting.clear_speedup(best.vs_ddp)}, measured"
            yield Fact(sentences.METHODS.get(best.method, best.method), formatting.milliseconds(best.step_ms), note)
        yield Fact("no communication", formatting.milliseconds(demo.row("nosync").step_ms), "the lower bound, measured")
        if best.held_out_accuracy is not None:
            yield Fact("accuracy", f"{best.held_out_accuracy:.1%}", f"plain DDP: {plain.held_out_accuracy or 0:.1%}")
        return
    for model in models:
        for pace in model.records[0][1].paces[-2:] if model.records else ():
            yield Fact(pace.way, formatting.step_time(pace.step_s), f"per step of {model.name}, measured")
    for result in inputs.benches[:1]:
        rows = {row.method: row for row in sorted(result.rows, key=lambda row: row.step_ms)}
        fastest = [method for method in rows if method != "nosync"][:1]
        for method in dict.fromkeys(["nosync", "ddp", *fastest]):
            if method in rows:
                time = formatting.milliseconds(rows[method].step_ms)
                name = {"nosync": "no communication", "ddp": "plain DDP"}.get(method, method)
                yield Fact(name, time, "per step, measured")
    if forecast is not None:
        for name, prediction in list(forecast.predictions.items())[:2]:
            yield Fact(name, formatting.step_time(prediction.iteration_s), "per step, predicted")
        first, remedies = forecast.diagnosis.prediction, forecast.diagnosis.remedies
        change = next((remedy for remedy in remedies if not (remedy.lossy or remedy.hardware)), None)
        if change is not None and not forecast.others:
            time = formatting.step_time(change.prediction.iteration_s)
            yield Fact("best lossless change", time, change.what)
        yield Fact("scaling", f"{first.scaling:.0%}", f"{forecast.name} on {formatting.count(first.hosts, 'host')}")
        yield Fact("computation", formatting.step_time(first.compute_s), "per step, on a single rank")
        return
    profile, network = models[0].profile, models[0].network
    if profile is not None:
        yield Fact("computation", formatting.step_time(profile.step_s), "per step")
        gradients = formatting.count(len(profile.gradients), "tensor")
        yield Fact("gradients", formatting.size(profile.gradient_bytes), gradients)
    for plan in models[0].plans.values():
        yield Fact("plain DDP", formatting.step_time(plan.plain_s), "per step, predicted")
        if not plan.nothing:
            yield Fact("the plan", formatting.step_time(plan.iteration_s), "per step, predicted")
    for link in network.links[:2] if network is not None else ():
        source = "measured" if network is not None and network.measured else "assumed"
        yield Fact(LINK_NAMES.get(link.name, link.name), formatting.rate(link.bytes_per_s * 8), source)


def _likely_cause(run: RunRecord) -> tuple[bool, bool, float]:
    """Sort the rank that failed first to the front: an exception says more than a lost connection."""
    lost = any(word in run.ended for word in ("Connection closed", "Connection reset", "NCCL", "imed out"))
    return run.ended == RUNNING, lost, run.seconds


def warning(inputs: Inputs, models: Sequence[ModelData]) -> str:
    """Say what readers must know before they believe the rest."""
    parts = []
    unfinished = sorted((run for run in inputs.runs if run.ended != FINISHED), key=_likely_cause)
    if unfinished:
        first, *others = unfinished
        text = first.state if len(first.state) <= 160 else f"{first.state[:159]}…"
        before = f", before {formatting.count(len(others), 'other rank')}" if others else ""
        parts.append(f"The run did not finish: rank {first.rank}{before}: {text}.")
    if 0 < len(inputs.runs) < inputs.runs[0].ranks:
        missing = sorted(set(range(inputs.runs[0].ranks)) - {run.rank for run in inputs.runs})
        parts.append(f"There is no record of {ranks_text(missing, 8)}.")
    if any(not network.measured for network in all_networks(models)):
        parts.append("Link speeds are assumed, not measured: syncline probe measures yours.")
    hidden = len(inputs.models) - len(models)
    if hidden > 0:
        parts.append(f"{formatting.count(hidden, 'more model')} of this script not shown.")
    return " ".join(parts)
