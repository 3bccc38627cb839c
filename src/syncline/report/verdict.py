"""What it means, in sentences: each follows from figures that stand beside it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from syncline.predict import Prediction
from syncline.predict.diagnosis import CAUSES, Diagnosis, lost_to
from syncline.records.bench_result import BenchResult, DemoResult
from syncline.records.network import Network
from syncline.records.profile import Profile
from syncline.records.run_record import ModelRecord, Pace
from syncline.report import figures

PLANNED = ("plan", "the plan")
"""As a run calls the way of a plan."""
_PLAIN = "plain DDP"


def of_diagnosis(found: Diagnosis) -> str:
    one = found.prediction
    if one.ranks == 1:
        return "One rank exchanges nothing: there is no scaling to look at."
    lost_s = one.iteration_s - one.compute_s
    if found.culprit is None:
        return f"Scaling is {one.scaling:.0%}: {found.why}."
    share = lost_to(one.losses)[found.culprit] / lost_s
    return (
        f"Scaling is {one.scaling:.0%}: of {figures.step(one.iteration_s)} per step, "
        f"{figures.step(lost_s)} are lost, {min(share, 1.0):.0%} of that to {CAUSES[found.culprit]}: {found.why}."
    )


def of_diagnosis_in_short(found: Diagnosis, name: str, others: Mapping[str, Prediction]) -> str:
    """`name`: what was diagnosed; `others`: plans beside it."""
    one = found.prediction
    if one.ranks == 1:
        return of_diagnosis(found)
    best = min(others, key=lambda other: others[other].iteration_s, default=None)
    if best is not None and others[best].iteration_s < 0.98 * one.iteration_s:
        times = figures.speed(others[best].iteration_s / one.iteration_s)
        took = f"{figures.step(others[best].iteration_s)} per step instead of {figures.step(one.iteration_s)}"
        lossy = "" if others[best].schedule.lossless else " It changes numerics."
        return f"{figures.capital(best)} is predicted to take {took} with {name}: {times}.{lossy}"
    scales = f"{figures.capital(name)} scales to {one.scaling:.0%} on {figures.count(one.hosts, 'host')}"
    if found.culprit is None:
        return f"{scales}: hardly anything is lost."
    lost = f"{figures.step(one.iteration_s - one.compute_s)} of each {figures.step(one.iteration_s)} step are lost"
    return f"{scales}: {lost}, mostly to {CAUSES[found.culprit]}."


def of_demo(result: DemoResult) -> list[str]:
    floor, plain, lossless, bf16 = (result.row(name) for name in ("nosync", "ddp", "tune", "tune-bf16"))
    waiting = max(0.0, 1 - floor.step_ms / plain.step_ms) if plain.step_ms else 0.0
    same = "the same weights bit for bit" if lossless.difference == 0 else "the same weights to summation order"
    gap = abs((bf16.held_out_accuracy or 0) - (plain.held_out_accuracy or 0))
    return [
        f"Plain DDP spends {waiting:.0%} of each step on communication that computation does not hide.",
        f"tune, without loss: {_said(result, 'tune')} In training: {figures.pace(lossless.vs_ddp)}, {same}.",
        f"tune, with 16 bits allowed: {_said(result, 'tune-bf16')} In training: {figures.pace(bf16.vs_ddp)}, and "
        f"accuracy on 1,000 held-out digits differs by {gap * 100:.1f} points.",
    ]


def of_demo_in_short(result: DemoResult) -> str:
    plain, lossless, bf16 = (result.row(name) for name in ("ddp", "tune", "tune-bf16"))
    short = f"A step takes {figures.ms(plain.step_ms)} with plain DDP"
    if abs(lossless.vs_ddp - 1) <= 0.03:
        return f"{short}, which nothing lossless beats, and {figures.ms(bf16.step_ms)} with 16 bits allowed."
    return (
        f"{short}, {figures.ms(lossless.step_ms)} tuned without loss, {figures.ms(bf16.step_ms)} with 16 bits allowed."
    )


def _said(result: DemoResult, method: str) -> str:
    return " ".join(result.said.get(method, "").splitlines())


def of_bench(result: BenchResult) -> str:
    rows = {row.method: row for row in result.rows}
    plain, floor = rows.get("ddp"), rows.get("nosync")
    best = min((row for row in result.rows if row.method != "nosync"), key=lambda row: row.step_ms, default=None)
    if best is None:
        return f"{result.model.name} computes {figures.ms(result.rows[0].step_ms)} per step." if result.rows else ""
    if plain is None:
        return f"The fastest of {len(result.rows)} methods is {best.method}, at {figures.ms(best.step_ms)} per step."
    first = f"Plain DDP takes {figures.ms(plain.step_ms)} per step"
    if floor is not None and plain.step_ms:
        waiting = max(0.0, 1 - floor.step_ms / plain.step_ms)
        first += f", {waiting:.0%} of it communication that nothing hides"
    ratio = best.vs_ddp if best.vs_ddp is not None else best.step_ms / plain.step_ms if plain.step_ms else 1.0
    if best is plain or ratio > 0.97:
        return f"{first}; nothing measured beside it is clearly faster."
    return f"{first}; {best.method} takes {figures.ms(best.step_ms)}: {figures.speed(ratio)}."


def of_forecasts(result: BenchResult) -> str:
    """How far predictions were from what was measured after them."""
    errors = [row.predicted_ms / row.step_ms - 1 for row in result.rows if row.predicted_ms is not None and row.step_ms]
    if not errors:
        return ""
    if len(errors) == 1:
        return f"The prediction, made before the first step, was {_signed(errors[0])} off."
    return (
        f"Predictions, made before the first step, were {_signed(min(errors))} to {_signed(max(errors))} off, "
        f"{statistics.median(map(abs, errors)):.0%} in the median."
    )


def _signed(error: float) -> str:
    return f"{error:+.0%}".replace("-", "−")


def of_run(model: ModelRecord) -> str:
    """How a model's steps went, by the rank whose record this is."""
    last = pace_of(model)
    if last is None:
        return f"{model.name} took {figures.count(model.steps, 'step')}, too few to say how long they take."
    before = next((pace for pace in model.paces if pace.way != last.way and pace.way == _PLAIN), None)
    if before is None or not before.step_s:
        exposed = f", {figures.share(last.exposed_s, last.step_s)} of it communication that nothing hides"
        return f"A step of {model.name} takes {figures.step(last.step_s)} {_with(last.way)}{exposed}."
    ratio = last.step_s / before.step_s
    return (
        f"A step of {model.name} takes {figures.step(last.step_s)} {_with(last.way)}, and took "
        f"{figures.step(before.step_s)} {_with(before.way)}: {figures.pace(ratio)}."
    )


def _with(way: str) -> str:
    if way in PLANNED:
        return "with the plan"
    return "with plain DDP" if way == _PLAIN else f"through {way}"


def pace_of(model: ModelRecord) -> Pace | None:
    """Of the way that gradients went in the end."""
    return next((pace for pace in model.paces if pace.way == model.way), model.paces[-1] if model.paces else None)


def of_network(network: Network) -> str:
    link = network.link("host") or next(iter(network.links), None)
    hosts = f"{figures.count(network.hosts, 'host')} with {figures.count(network.ranks, 'rank')}"
    carries = "" if link is None else f", links that carry {figures.rate(link.bytes_per_s * 8)}"
    started = next((one for one in network.collectives if one.kind == "all_reduce"), None)
    starts = "" if started is None else f"; starting an all-reduce takes {figures.fine(started.startup_s)}"
    return f"{hosts}{carries}{starts}."


def of_profile(profile: Profile) -> str:
    last = profile.gradients[-1]
    early = sum(gradient.bytes for gradient in profile.gradients if gradient.ready_s <= profile.backward_s / 2)
    return (
        f"A step of {profile.model} computes {figures.step(profile.step_s)}, {figures.step(profile.backward_s)} of it "
        f"backward; {figures.share(early, profile.gradient_bytes)} of its {figures.size(profile.gradient_bytes)} of "
        f"gradients are ready half-way through that, the last of them, {last.name}, after {figures.step(last.ready_s)}."
    )
