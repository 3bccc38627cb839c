"""Results in sentences; the numbers in each are also in a chart."""

from __future__ import annotations

import statistics

from syncline.predict.diagnosis import CAUSES, Diagnosis, lost_to
from syncline.records.bench_result import BenchResult, Cluster, DemoResult
from syncline.records.network import Network
from syncline.records.profile import Profile
from syncline.records.run_record import ModelRecord, Pace
from syncline.report.forecast import Forecast
from syncline.units import count_text, duration_text, milliseconds_text, rate_text, size_text, speedup_text

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
_SAME = 0.03
"""Relative difference of two step times that is not worth a sentence."""


def capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "–"


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
        f"Scaling is {prediction.scaling:.0%}: of {milliseconds_text(prediction.iteration_s)} per step, "
        f"{milliseconds_text(lost_s)} are lost, {part:.0%} of that to {CAUSES[found.culprit]}: {found.why}."
    )


def fastest(made: Forecast) -> str:
    """Say which schedule is the fastest, if it is clearly faster than the first one."""
    now_s, others = made.diagnosis.prediction.iteration_s, made.others
    best = min(others, key=lambda other: others[other].iteration_s, default=None)
    if best is None or others[best].iteration_s >= 0.98 * now_s:
        return ""
    seconds, lossy = others[best].iteration_s, "" if others[best].schedule.lossless else " It changes numerics."
    return (
        f"{capitalized(best)} is predicted to take {milliseconds_text(seconds)} per step instead of "
        f"{milliseconds_text(now_s)} with {made.name}: {speedup_text(seconds / now_s)}.{lossy}"
    )


def demo(result: DemoResult) -> list[str]:
    floor, plain, lossless, bf16 = (result.row(name) for name in ("nosync", "ddp", "tune", "tune-bf16"))
    exposed = max(0.0, 1 - floor.step_ms / plain.step_ms) if plain.step_ms else 0.0
    weights = "the same weights, bit for bit" if lossless.difference == 0 else "the same weights to summation order"
    difference = abs((bf16.held_out_accuracy or 0) - (plain.held_out_accuracy or 0))
    outcomes = {method: " ".join(text.split("\n")) for method, text in result.said.items()}
    return [
        f"Plain DDP spends {exposed:.0%} of each step on communication that computation does not hide.",
        f"tune, without loss: {outcomes.get('tune', '')} In training: {speedup_text(lossless.vs_ddp, _SAME)}, "
        f"{weights}.",
        f"tune, with 16 bits allowed: {outcomes.get('tune-bf16', '')} In training: "
        f"{speedup_text(bf16.vs_ddp, _SAME)}; accuracy on 1,000 held-out digits differs by {difference * 100:.1f} "
        "points.",
    ]


def bench(result: BenchResult) -> str:
    rows = {row.method: row for row in result.rows}
    plain, floor = rows.get("ddp"), rows.get("nosync")
    best = min((row for row in result.rows if row.method != "nosync"), key=lambda row: row.step_ms, default=floor)
    if best is None:
        return ""
    best_time = milliseconds_text(best.step_ms / 1e3)
    if plain is None:
        return f"The fastest of {count_text(len(rows), 'method')} is {best.method}, at {best_time} per step."
    start = f"Plain DDP takes {milliseconds_text(plain.step_ms / 1e3)} per step"
    if floor is not None and plain.step_ms:
        start += f", {max(0.0, 1 - floor.step_ms / plain.step_ms):.0%} of it exposed communication"
    ratio = best.step_ms / max(plain.step_ms, 1e-9) if best.vs_ddp is None else best.vs_ddp
    if best is plain or ratio > 1 - _SAME:
        return f"{start}; no other method is clearly faster."
    return f"{start}; {best.method} takes {best_time}: {speedup_text(ratio)}."


def prediction_error(result: BenchResult) -> str:
    errors = [row.predicted_ms / row.step_ms - 1 for row in result.rows if row.predicted_ms is not None and row.step_ms]
    if not errors:
        return ""
    low, high = (f"{error:+.0%}".replace("-", "−") for error in (min(errors), max(errors)))
    median = f"{statistics.median(map(abs, errors)):.0%} in the median"
    return f"Predictions, made before the first step, were {low} to {high} off, {median}."


def run(model: ModelRecord) -> str:
    """Say how long a model's steps took, as one rank recorded them."""
    last = last_pace(model)
    if last is None:
        return f"{model.name} took {count_text(model.steps, 'step')}, too few to say how long they take."
    start = f"A step of {model.name} takes {milliseconds_text(last.step_s)} {_with(last.way)}"
    before = next((pace for pace in model.paces if pace.way == PLAIN_DDP != last.way), None)
    if before is None or not before.step_s:
        return f"{start}, {share(last.exposed_s, last.step_s)} of it exposed communication."
    ratio = speedup_text(last.step_s / before.step_s, _SAME)
    return f"{start}, and took {milliseconds_text(before.step_s)} {_with(before.way)}: {ratio}."


def between_steps(model: ModelRecord) -> str:
    """Say how long the script takes between steps, unless that is next to nothing."""
    pace = last_pace(model)
    if pace is None or pace.between_s < 0.05 * pace.step_s:
        return ""
    return (
        f"Between two steps of {model.name}, {milliseconds_text(pace.between_s)} pass: backward passes that only "
        "accumulate, the optimizer, data loading and whatever else the script does."
    )


def _with(way: str) -> str:
    return "with the plan" if way in PLAN_NAMES else "with plain DDP" if way == PLAIN_DDP else f"through {way}"


def last_pace(model: ModelRecord) -> Pace | None:
    """Return the step times of the schedule with which the run ended."""
    return next((pace for pace in model.paces if pace.way == model.way), model.paces[-1] if model.paces else None)


def network(cluster: Network) -> str:
    link = cluster.link("host") or next(iter(cluster.links), None)
    rates = "" if link is None else f", links that carry {rate_text(link.bytes_per_s * 8)}"
    all_reduce = next((entry for entry in cluster.collectives if entry.kind == "all_reduce"), None)
    startup = "" if all_reduce is None else f"; starting an all-reduce takes {duration_text(all_reduce.startup_s)}"
    return f"{count_text(cluster.hosts, 'host')} with {count_text(cluster.ranks, 'rank')}{rates}{startup}."


def profile(measured: Profile) -> str:
    last, total = measured.gradients[-1], measured.gradient_bytes
    early = sum(gradient.bytes for gradient in measured.gradients if gradient.ready_s <= measured.backward_s / 2)
    step, backward, ready = map(milliseconds_text, (measured.step_s, measured.backward_s, last.ready_s))
    return (
        f"A step of {measured.model} computes for {step}, {backward} of it backward. Half-way through backward, "
        f"{share(early, total)} of the {size_text(total)} of gradients are ready; the last one, {last.name}, is ready "
        f"after {ready}."
    )


def bench_cluster(cluster: Cluster) -> str:
    ranks = ""
    if isinstance(cluster.per_host, list):
        ranks = f"{count_text(sum(cluster.per_host), 'rank')} in all"
    elif cluster.per_host > 1:
        ranks = f"{count_text(cluster.per_host, 'rank')} each"
    links = f"{rate_text(cluster.rate_bps)} links" if cluster.emulated else "loopback, links not shaped"
    return ", ".join(filter(None, [count_text(cluster.hosts, "host"), ranks, links]))
