"""Results in sentences; the numbers in each are also in a chart."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from syncline.predict import Prediction
from syncline.predict.diagnosis import CAUSES, Diagnosis, lost_to
from syncline.records.bench_result import BenchResult, Cluster, DemoResult
from syncline.records.network import Network
from syncline.records.profile import Profile
from syncline.records.run_record import ModelRecord, Pace
from syncline.report.formatting import (
    capitalized,
    clear_speedup,
    count,
    duration,
    milliseconds,
    rate,
    share,
    size,
    speedup,
    step_time,
)

PLAN_NAMES = ("plan", "the plan")
"""What a run's record calls a plan."""
PLAIN_DDP = "plain DDP"
METHODS = {
    "nosync": "no communication",
    "ddp": PLAIN_DDP,
    "tune": "tuned, lossless",
    "tune-bf16": "tuned, 16 bits allowed",
}
"""Methods of the bench and the demo, in words."""


def diagnosis(found: Diagnosis) -> str:
    """Say how well a schedule scales, and what most of the lost time goes to."""
    prediction = found.prediction
    if prediction.ranks == 1:
        return "One rank exchanges nothing, so there is no scaling to predict."
    if found.culprit is None:
        return f"Scaling is {prediction.scaling:.0%}: {found.why}."
    lost_s = prediction.iteration_s - prediction.compute_s
    part = min(lost_to(prediction.losses)[found.culprit] / lost_s, 1.0)
    return (
        f"Scaling is {prediction.scaling:.0%}: of {step_time(prediction.iteration_s)} per step, {step_time(lost_s)} "
        f"are lost, {part:.0%} of that to {CAUSES[found.culprit]}: {found.why}."
    )


def forecast(found: Diagnosis, name: str, others: Mapping[str, Prediction]) -> str:
    """Sum up the diagnosis of the schedule `name`, and the best of the other schedules if it is faster."""
    prediction = found.prediction
    if prediction.ranks == 1:
        return diagnosis(found)
    best = min(others, key=lambda other: others[other].iteration_s, default=None)
    if best is not None and others[best].iteration_s < 0.98 * prediction.iteration_s:
        seconds, now_s = others[best].iteration_s, prediction.iteration_s
        lossy = "" if others[best].schedule.lossless else " It changes numerics."
        return (
            f"{capitalized(best)} is predicted to take {step_time(seconds)} per step instead of {step_time(now_s)} "
            f"with {name}: {speedup(seconds / now_s)}.{lossy}"
        )
    scaling = f"{capitalized(name)} scales to {prediction.scaling:.0%} on {count(prediction.hosts, 'host')}"
    if found.culprit is None:
        return f"{scaling}: almost no time is lost."
    lost = step_time(prediction.iteration_s - prediction.compute_s)
    return (
        f"{scaling}: {lost} of each {step_time(prediction.iteration_s)} step are lost, mostly to "
        f"{CAUSES[found.culprit]}."
    )


def demo(result: DemoResult) -> list[str]:
    floor, plain, lossless, bf16 = (result.row(name) for name in ("nosync", "ddp", "tune", "tune-bf16"))
    exposed = max(0.0, 1 - floor.step_ms / plain.step_ms) if plain.step_ms else 0.0
    weights = "the same weights, bit for bit" if lossless.difference == 0 else "the same weights to summation order"
    difference = abs((bf16.held_out_accuracy or 0) - (plain.held_out_accuracy or 0))
    outcomes = {method: " ".join(text.split("\n")) for method, text in result.said.items()}
    return [
        f"Plain DDP spends {exposed:.0%} of each step on communication that computation does not hide.",
        f"tune, without loss: {outcomes.get('tune', '')} In training: {clear_speedup(lossless.vs_ddp)}, {weights}.",
        f"tune, with 16 bits allowed: {outcomes.get('tune-bf16', '')} In training: {clear_speedup(bf16.vs_ddp)}; "
        f"accuracy on 1,000 held-out digits differs by {difference * 100:.1f} points.",
    ]


def demo_in_short(result: DemoResult) -> str:
    plain, lossless, bf16 = (result.row(name) for name in ("ddp", "tune", "tune-bf16"))
    start = f"A step takes {milliseconds(plain.step_ms)} with plain DDP"
    end = f"{milliseconds(bf16.step_ms)} with 16 bits allowed."
    if abs(lossless.vs_ddp - 1) <= 0.03:
        return f"{start}, which no lossless plan beats, and {end}"
    return f"{start}, {milliseconds(lossless.step_ms)} tuned without loss, and {end}"


def bench(result: BenchResult) -> str:
    rows = {row.method: row for row in result.rows}
    plain, floor = rows.get("ddp"), rows.get("nosync")
    best = min((row for row in result.rows if row.method != "nosync"), key=lambda row: row.step_ms, default=None)
    if best is None:
        return f"{result.model.name} computes {milliseconds(result.rows[0].step_ms)} per step." if result.rows else ""
    if plain is None:
        return f"The fastest of {len(result.rows)} methods is {best.method}, at {milliseconds(best.step_ms)} per step."
    start = f"Plain DDP takes {milliseconds(plain.step_ms)} per step"
    if floor is not None and plain.step_ms:
        start += f", {max(0.0, 1 - floor.step_ms / plain.step_ms):.0%} of it exposed communication"
    ratio = best.vs_ddp if best.vs_ddp is not None else best.step_ms / plain.step_ms if plain.step_ms else 1.0
    if best is plain or ratio > 0.97:
        return f"{start}; no other method is clearly faster."
    return f"{start}; {best.method} takes {milliseconds(best.step_ms)}: {speedup(ratio)}."


def prediction_error(result: BenchResult) -> str:
    errors = [row.predicted_ms / row.step_ms - 1 for row in result.rows if row.predicted_ms is not None and row.step_ms]
    if not errors:
        return ""
    low, high = (f"{error:+.0%}".replace("-", "−") for error in (min(errors), max(errors)))
    if len(errors) == 1:
        return f"The prediction, made before the first step, was {low} off."
    median = f"{statistics.median(map(abs, errors)):.0%} in the median"
    return f"Predictions, made before the first step, were {low} to {high} off, {median}."


def run(model: ModelRecord) -> str:
    """Say how long a model's steps took, as one rank recorded them."""
    last = last_pace(model)
    if last is None:
        return f"{model.name} took {count(model.steps, 'step')}, too few to say how long they take."
    start = f"A step of {model.name} takes {step_time(last.step_s)} {_with(last.way)}"
    before = next((pace for pace in model.paces if pace.way == PLAIN_DDP != last.way), None)
    if before is None or not before.step_s:
        return f"{start}, {share(last.exposed_s, last.step_s)} of it exposed communication."
    ratio = clear_speedup(last.step_s / before.step_s)
    return f"{start}, and took {step_time(before.step_s)} {_with(before.way)}: {ratio}."


def between_steps(model: ModelRecord) -> str:
    """Say how long the script takes between steps, unless that is next to nothing."""
    pace = last_pace(model)
    if pace is None or pace.between_s < 0.05 * pace.step_s:
        return ""
    return (
        f"Between two steps of {model.name}, {step_time(pace.between_s)} pass: backward passes that only accumulate, "
        "the optimizer, data loading and whatever else the script does."
    )


def _with(way: str) -> str:
    return "with the plan" if way in PLAN_NAMES else "with plain DDP" if way == PLAIN_DDP else f"through {way}"


def last_pace(model: ModelRecord) -> Pace | None:
    """Return the step times of the schedule with which the run ended."""
    return next((pace for pace in model.paces if pace.way == model.way), model.paces[-1] if model.paces else None)


def network(cluster: Network) -> str:
    link = cluster.link("host") or next(iter(cluster.links), None)
    rates = "" if link is None else f", links that carry {rate(link.bytes_per_s * 8)}"
    all_reduce = next((entry for entry in cluster.collectives if entry.kind == "all_reduce"), None)
    startup = "" if all_reduce is None else f"; starting an all-reduce takes {duration(all_reduce.startup_s)}"
    return f"{count(cluster.hosts, 'host')} with {count(cluster.ranks, 'rank')}{rates}{startup}."


def profile(measured: Profile) -> str:
    last, total = measured.gradients[-1], measured.gradient_bytes
    early = sum(gradient.bytes for gradient in measured.gradients if gradient.ready_s <= measured.backward_s / 2)
    return (
        f"A step of {measured.model} computes for {step_time(measured.step_s)}, {step_time(measured.backward_s)} of it "
        f"backward. Half-way through backward, {share(early, total)} of the {size(total)} of gradients are ready; the "
        f"last one, {last.name}, is ready after {step_time(last.ready_s)}."
    )


def bench_cluster(cluster: Cluster) -> str:
    ranks = ""
    if isinstance(cluster.per_host, list):
        ranks = f"{count(sum(cluster.per_host), 'rank')} in all"
    elif cluster.per_host > 1:
        ranks = f"{count(cluster.per_host, 'rank')} each"
    links = f"{rate(cluster.rate_bps)} links" if cluster.emulated else "loopback, links not shaped"
    return ", ".join(filter(None, [count(cluster.hosts, "host"), ranks, links]))
