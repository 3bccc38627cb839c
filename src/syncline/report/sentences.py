"""Results in sentences; the numbers in each are also in a chart."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from syncline.predict.diagnosis import CAUSES, Diagnosis, lost_to
from syncline.predict.sharded import ShardedPrediction
from syncline.records.bench_result import BenchResult, Cluster, DemoResult, DemoRow
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.records.postmortem import Postmortem
from syncline.records.profile import Profile
from syncline.records.run_record import FINISHED, LOST, RUNNING, ModelRecord, Pace, RunRecord
from syncline.units import count_text, duration_text, milliseconds_text, ranks_text, rate_text, size_text, speedup_text

PLAN_NAMES = ("plan", "the plan")  # what a run's record calls a plan
PLAIN_DDP = "plain DDP"
_METHODS = {"nosync": "no communication", "tune": "tuned, lossless", "tune-bf16": "tuned, 16 bits allowed"}
_LOSSLESS = frozenset({"dense", "hierarchical", "overlap", "plan", "tune", "tune-exact", "fsdp", "hsdp"})
_MOST_ACCUSED = 3
_SAME = 0.03  # relative difference of two step times that is not worth a sentence


def capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "–"


def method(name: str) -> str:
    """Return a method of the bench or the demo, in words."""
    return PLAIN_DDP if name == "ddp" else _METHODS.get(name, name)


def diagnosis(found: Diagnosis) -> str:
    """Say how well a schedule scales, and what most of the lost time goes to."""
    prediction, why = found.prediction, found.why
    if prediction.ranks == 1:
        return "One rank exchanges nothing, so there is no scaling to predict."
    if found.culprit is not None:
        lost_s = prediction.iteration_s - prediction.compute_s
        part = min(lost_to(prediction.losses)[found.culprit] / lost_s, 1.0)
        step, lost = milliseconds_text(prediction.iteration_s), milliseconds_text(lost_s)
        why = f"of {step} per step, {lost} are lost, {part:.0%} of that to {CAUSES[found.culprit]}: {why}"
    return f"Scaling is {prediction.scaling:.0%}: {why}."


def demo_method(row: DemoRow) -> str:
    """Return a method of the demo with what tuning chose, in words."""
    return f"tune, {row.method.removeprefix('tune-')}: {row.setting}" if row.setting else method(row.method)


def sooner(row: DemoRow, plain: DemoRow) -> float | None:
    """Return how many times sooner than plain DDP a method reaches its final held-out loss; None if it does not."""
    return None if row.reached_s is None or plain.reached_s is None else plain.reached_s / max(row.reached_s, 1e-9)


def demo(result: DemoResult) -> list[str]:
    """Return the verdict on a demo, and what else matters."""
    if result.model is None:
        return _demo_on_digits(result)
    floor, plain, *tuned = (result.row(name) for name in result.methods)
    exposed = max(0.0, 1 - floor.step_ms / plain.step_ms) if plain.step_ms else 0.0
    seconds = plain.held_out[-1].seconds
    about = f"Plain DDP spends {exposed:.0%} of each step on communication that computation does not hide, and trains "
    said = [f"{about}for {duration_text(seconds)} to a held-out loss of {plain.equal_steps:.2f} bits per byte."]
    said += [_demo_quality(row, result) for row in tuned]
    best = _best(result)
    emulated = result.cluster.emulated
    where = f"emulated links of {rate_text(result.cluster.rate_bps)}" if emulated else "links that were not slowed down"
    if best is None:
        return [f"No quality reaches plain DDP's held-out loss sooner than plain DDP itself, over {where}.", *said]
    quality = f'With quality="{best.method.removeprefix("tune-")}" ({best.setting})'
    now, before = (duration_text(row.reached_s or 0.0) for row in (best, plain))
    verdict = f"{quality}, the model reaches plain DDP's held-out loss {sooner(best, plain):.1f} times sooner: after "
    return [f"{verdict}{now} of training instead of {before}, over {where}.", *said]


def _best(result: DemoResult) -> DemoRow | None:
    """Return the method to recommend: `same` if it is clearly sooner than plain DDP, and else the gentlest that is."""
    plain = result.row("ddp")
    tuned = [result.row(name) for name in result.methods if name.startswith("tune-")]
    named = [row for row in tuned if not row.same_as and (sooner(row, plain) or 0) > 1 + _SAME]
    return next((row for row in named if row.method == "tune-same"), named[0] if named else None)


def best_quality(result: DemoResult) -> str:
    """Recommend a call of `tune` after a demo."""
    if result.model is None:
        return ""
    if (best := _best(result)) is None:
        return "Keep plain DDP: no quality is clearly faster here."
    quality = best.method.removeprefix("tune-")
    return f'Call syncline.tune(model, step, optimizer=optimizer, quality="{quality}").'


def kept(record: ModelRecord) -> str:
    """Recommend what a run ended with, if it was not plain DDP."""
    return f"Keep {'the plan' if record.way in PLAN_NAMES else record.way}: the run ended with it."


def best_method(result: BenchResult) -> str:
    """Recommend the fastest method of a bench, a lossless one if any of these is clearly faster than plain DDP."""
    faster = {row.method: row.vs_ddp for row in result.rows if row.vs_ddp is not None and row.vs_ddp < 1 - _SAME}
    faster.pop("nosync", None)
    if not faster:
        return "Keep plain DDP: no other method is clearly faster here." if len(result.rows) > 2 else ""
    best = min(faster, key=lambda method: (method not in _LOSSLESS, faster[method]))
    lossy = "" if best in _LOSSLESS else ", lossy"
    return f"Use {best}{lossy}: measured {speedup_text(faster[best])} than plain DDP."


def best_of_plan(plan: Plan) -> str:
    """Recommend a plan, or to do nothing if it says so."""
    if plan.nothing:
        return "Keep plain DDP: no plan is clearly faster here."
    now, before = milliseconds_text(plan.iteration_s), milliseconds_text(plan.plain_s)
    lossy = "" if plan.lossless else "lossy "
    return f"Apply the {lossy}plan: {now} per step instead of {before}, predicted."


def best_remedy(found: Diagnosis) -> str:
    """Recommend the change that saves most, or a lossless one that saves nearly as much.

    Changes of hardware, and of what is applied in a step, are recommended only where nothing else helps.
    """
    if not found.remedies:
        return "Change nothing: no simulated change saves more than 2 % of a step."
    easiest = min((remedy.last, remedy.hardware) for remedy in found.remedies)
    remedies = [remedy for remedy in found.remedies if (remedy.last, remedy.hardware) == easiest]
    least_s = min(remedy.prediction.iteration_s for remedy in remedies)
    near = [remedy for remedy in remedies if remedy.prediction.iteration_s <= 1.05 * least_s]
    best = min(near, key=lambda remedy: (remedy.lossy, remedy.prediction.iteration_s))
    now, before = (milliseconds_text(made.iteration_s) for made in (best.prediction, found.prediction))
    lossy = " (lossy)" if best.lossy else ""
    return f"First change: {best.what}{lossy}, predicted to take {now} per step instead of {before}."


def _demo_quality(row: DemoRow, result: DemoResult) -> str:
    plain, start = result.row("ddp"), f'quality="{row.method.removeprefix("tune-")}"'
    if row.same_as:
        return f"{start} keeps plain DDP, because nothing that it permits is clearly faster here."
    ratio, before, now = sooner(row, plain), plain.equal_steps or 0.0, row.equal_steps or 0.0
    text = f"{start} ({row.setting}): {speedup_text(row.vs_ddp, _SAME)} per step"
    if ratio is None:
        text += f", but plain DDP's final loss was not reached in {count_text(row.steps, 'step')}"
    else:
        text += f", and plain DDP's final loss {ratio:.1f} times {'sooner' if ratio >= 1 else 'as soon'}"
    text += f"; at equal steps its loss is {now:.2f}, plain DDP's {before:.2f}."
    if (repaid := repaid_steps(row, result)) is not None:
        took_s, steps = repaid
        text += f" Tuning took {duration_text(took_s)}, which is repaid after {count_text(steps, 'step')}."
    return text


def repaid_steps(row: DemoRow, result: DemoResult) -> tuple[float, int] | None:
    """Return the seconds that a tuning took, and the steps after which they are saved; None if nothing is saved."""
    tuning, saved_ms = result.tunings.get(row.method), result.row("ddp").step_ms - row.step_ms
    if tuning is None or tuning.seconds is None or row.same_as or saved_ms <= 0:
        return None
    return tuning.seconds, max(1, math.ceil(tuning.seconds * 1e3 / saved_ms))


def _demo_on_digits(result: DemoResult) -> list[str]:
    floor, plain, lossless, bf16 = (result.row(name) for name in ("nosync", "ddp", "tune", "tune-bf16"))
    exposed = max(0.0, 1 - floor.step_ms / plain.step_ms) if plain.step_ms else 0.0
    weights = ", bit for bit" if lossless.difference == 0 else " to summation order"
    points = 100 * abs((bf16.held_out_accuracy or 0) - (plain.held_out_accuracy or 0))
    said, said_bf16 = (result.said.get(name, "").replace("\n", " ") for name in ("tune", "tune-bf16"))
    faster, faster_bf16 = (speedup_text(row.vs_ddp, _SAME) for row in (lossless, bf16))
    return [
        f"Plain DDP spends {exposed:.0%} of each step on communication that computation does not hide.",
        f"tune, without loss: {said} In training: {faster}, the same weights{weights}.",
        f"tune, with 16 bits allowed: {said_bf16} In training: {faster_bf16}; accuracy on 1,000 held-out digits "
        f"differs by {points:.1f} points.",
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
    way = "the plan" if last.way in PLAN_NAMES else last.way
    start = f"A step of {model.name} takes {milliseconds_text(last.step_s)} with {way}"
    before = next((pace for pace in model.paces if pace.way == PLAIN_DDP != last.way), None)
    if before is None or not before.step_s:
        return f"{start}, {share(last.exposed_s, last.step_s)} of it exposed communication."
    ratio = speedup_text(last.step_s / before.step_s, _SAME)
    return f"{start}, and took {milliseconds_text(before.step_s)} with {PLAIN_DDP}: {ratio}."


def between_steps(model: ModelRecord) -> str:
    """Say how long the script takes between steps, unless that is next to nothing."""
    pace = last_pace(model)
    if pace is None or pace.between_s < 0.05 * pace.step_s:
        return ""
    activities = "backward passes that only accumulate, the optimizer, data loading and whatever else the script does"
    return f"Between two steps of {model.name}, {milliseconds_text(pace.between_s)} pass: {activities}."


def sharded(prediction: ShardedPrediction) -> str:
    """Say how much of a step is lost, and to what most of it."""
    replicas = prediction.hosts if prediction.method.replicas else 1
    models = f"{count_text(replicas, 'replica')} of {count_text(prediction.shards, 'shard')}"
    step, lost_s = milliseconds_text(prediction.iteration_s), prediction.iteration_s - prediction.compute_s
    text = f"{models} take {step} per step, of which {milliseconds_text(lost_s)} are lost"
    cause = next(iter(lost_to(prediction.losses)), None)
    return f"{text}." if cause is None else f"{text}, most to {CAUSES[cause]}."


def failure(found: Postmortem) -> list[str]:
    """Return the verdict on a failure, and what to look at."""
    where = statistics.mode(report.where for report in found.reports)
    said = []
    for index, accused in enumerate(found.accused[:_MOST_ACCUSED]):
        rank = f"{'Rank' if index == 0 else 'Also rank'} {accused.rank}"
        start = f"{rank} probably made the job fail in {where}" if index == 0 else f"{rank} is suspected"
        own = "" if accused.left_report else " It wrote no failure report itself."
        said.append(f"{start}: {accused.why}, as {ranks_text(accused.by, 8)} saw it.")
        said.append(f"Next: {accused.what_to_do}.{own}")
    if found.apart:
        places = "; ".join(f"{ranks_text(ranks, 8)} in {place}" for place, ranks in found.apart)
        others = tuple(sorted(rank for _, ranks in found.apart[1:] for rank in ranks))
        said.append(f"The ranks waited for each other: {places}.")
        said.append("All ranks must make the same steps and calls, in the same order.")
        said.append(f"Look first at {ranks_text(others, 8)}, for a step or a call that was left out or made twice.")
    elif not found.accused:
        said.append(f"The job failed in {where}, and no failure report names a suspect.")
        said += [f"Look first at {ranks_text(found.missing, 8)}, without a failure report."] if found.missing else []
    if found.earlier:
        said.append(f"The failure reports of {ranks_text(found.earlier, 8)} are of another failure, and left out.")
    return [*said, *(f"Cannot be used: {problem}" for problem in found.damaged)]


def has_failed(run: RunRecord) -> bool:
    """Return whether a rank raised an exception or was killed, and does not still run."""
    return run.ended != FINISHED and (run.ended != RUNNING or run.state.startswith(LOST))


def unfinished(runs: Sequence[RunRecord]) -> str:
    """Say how a run ended if it did not finish; an empty text if it did."""
    records = sorted((run for run in runs if run.ended != FINISHED), key=_likely_cause)
    if not records:
        return ""
    first = records[0]
    text = first.state if len(first.state) <= 160 else f"{first.state[:159]}…"
    before = f", before {count_text(len(records) - 1, 'other rank')}" if len(records) > 1 else ""
    return f"The run did not finish: rank {first.rank}{before}: {text}."


def _likely_cause(run: RunRecord) -> tuple[bool, bool, float]:
    """Sort the rank that failed first to the front: an exception says more than a lost connection."""
    lost = any(word in run.ended for word in ("Connection closed", "Connection reset", "NCCL", "imed out"))
    return run.ended == RUNNING, lost, run.seconds


def last_pace(model: ModelRecord) -> Pace | None:
    """Return the step times of the schedule with which the run ended."""
    return next((pace for pace in model.paces if pace.way == model.way), model.paces[-1] if model.paces else None)


def network(cluster: Network) -> str:
    text = f"{count_text(cluster.hosts, 'host')} with {count_text(cluster.ranks, 'rank')}"
    if link := cluster.link("host") or next(iter(cluster.links), None):
        text += f", links that carry {rate_text(link.bytes_per_s * 8)}"
    if all_reduce := next((entry for entry in cluster.collectives if entry.kind == "all_reduce"), None):
        text += f"; starting an all-reduce takes {duration_text(all_reduce.startup_s)}"
    return f"{text}."


def profile(measured: Profile) -> str:
    last, total = measured.gradients[-1], measured.gradient_bytes
    early = sum(gradient.bytes for gradient in measured.gradients if gradient.ready_s <= measured.backward_s / 2)
    step, backward, ready = map(milliseconds_text, (measured.step_s, measured.backward_s, last.ready_s))
    text = f"A step of {measured.model} computes for {step}, {backward} of it backward. Half-way through backward, "
    text += f"{share(early, total)} of the {size_text(total)} of gradients are ready; the last one, {last.name}, is "
    return f"{text}ready after {ready}."


def bench_cluster(cluster: Cluster) -> str:
    parts = [count_text(cluster.hosts, "emulated host" if cluster.emulated else "host")]
    if isinstance(cluster.per_host, list):
        parts.append(f"{count_text(sum(cluster.per_host), 'rank')} in all")
    elif cluster.per_host > 1:
        parts.append(f"{count_text(cluster.per_host, 'rank')} each")
    links = f"{rate_text(cluster.rate_bps)} links" if cluster.emulated else "loopback, links not shaped"
    return ", ".join([*parts, links])
