"""`syncline predict` and `syncline plan`: predict the time of a step, and find what limits it and the fastest plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import msgspec

from syncline.cli import commands, options, predict_sharded, screen
from syncline.cli.report import typed, write_page
from syncline.cli.screen import say
from syncline.cluster import format_rate, parse_rate
from syncline.errors import SynclineError, UsageError
from syncline.measure.assumed_network import assumed_network
from syncline.plan.ladder import make_choice
from syncline.plan.make import make_plan
from syncline.plan.memory import MemoryPlan, plan_memory
from syncline.plan.rungs import check_quality
from syncline.predict import Losses, Prediction, Schedule, predict
from syncline.predict.diagnosis import diagnose, lost_to
from syncline.predict.memory import FURTHEST
from syncline.predict.schedule import ddp_caps
from syncline.predict.sharded import ShardedPrediction
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.records.profile import Profile
from syncline.report import sentences
from syncline.report.inputs import HOSTS, Forecast, Inputs, resized
from syncline.report.sections.plan import alternatives, buckets, numbers
from syncline.report.sections.step import remedies, step_by_cause
from syncline.units import count_text, format_bytes, milliseconds_text, parse_bytes

_MAX_HOSTS, _MAX_RANKS = 65_536, 1 << 20
_FASTEST_BPS = 10**13  # the fastest link that can be predicted; it may be faster than the fastest emulated link


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One prediction, as JSON."""

    plan: str
    hosts: int
    ranks: int
    rate_bps: int | None
    iteration_ms: float
    low_ms: float
    high_ms: float
    compute_ms: float
    scaling: float
    sent_bytes: int
    lost: Losses


class PredictResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All predictions and the diagnosis, as JSON."""

    model: str
    measured_network: bool
    verdict: str
    culprit: str | None
    remedies: dict[str, float]  # milliseconds per step with each remedy
    rows: list[Row]
    schema: int = 1


def predict_command(args: commands.Predict) -> None:
    screen.check_writable(args.json, args.report)
    model = options.scaled_profile(args.profile, args.scale)
    plans = args.plan or predict_sharded.default_plans(model)
    asked = _host_counts(args.hosts)
    rates = [None] if args.rate is None else [fast_rate(text) for text in args.rate.split(",")]
    cluster = network_of(args.network, args.per_host, rates[0], asked or [4, *HOSTS])
    if args.trunk_rate is not None:
        if args.network is None:
            raise UsageError("--trunk-rate needs a --network that has racks")
        cluster = cluster.with_rate(fast_rate(args.trunk_rate), "rack")
    # One host has no link to extrapolate from.
    counts = asked or list(dict.fromkeys([cluster.hosts, *(HOSTS if cluster.hosts > 1 else ())]))
    if predict_sharded.are_sharded(plans, model):
        _predict_sharded(args, plans, model, cluster, counts, rates)
        return
    schedules = [Schedule.parse(model, text, cluster.backend) for text in plans]
    first_cluster = resized(cluster, counts[0], rates[0])
    diagnosis = diagnose(model, first_cluster, schedules[0])
    _show_prediction(Forecast(model, first_cluster, diagnosis, {schedules[0].describe(): diagnosis.prediction}, {}))
    rows: list[Row] = []
    curves: dict[str, list[Prediction]] = {}
    for schedule in schedules:
        for rate_bps in rates:
            found = [predict(model, resized(cluster, count, rate_bps), schedule) for count in counts]
            rate = "" if len(rates) == 1 else f", {format_rate(rate_bps or 0)}"
            curves.setdefault(schedule.describe() + rate, []).extend(found)
            rows += [_row(prediction, rate_bps) for prediction in found]
    screen.show(numbers(curves), most=len(rows))
    times_ms = {remedy.name: remedy.prediction.iteration_s * 1e3 for remedy in diagnosis.remedies}
    verdict = sentences.diagnosis(diagnosis)
    result = PredictResult(model.model, first_cluster.measured, verdict, diagnosis.culprit, times_ms, rows)
    screen.save(args.json, result)
    inputs = Inputs(model, cluster, schedules=tuple(plans), hosts=tuple(counts), rates_bps=tuple(rates))
    write_page(args.report, dataclasses.replace(inputs, command=typed()), short=True)


def _predict_sharded(
    args: commands.Predict,
    plans: list[str],
    model: Profile,
    cluster: Network,
    counts: list[int],
    rates: Sequence[int | None],
) -> None:
    found = list(predict_sharded.predictions(plans, model, cluster, counts, rates))
    _warn_if_assumed(cluster)
    verdict = predict_sharded.show(found)
    rows = [_row(prediction, rate_bps) for _, rate_bps, prediction in found]
    culprit = next(iter(lost_to(found[0][2].losses)), None)
    screen.save(args.json, PredictResult(model.model, cluster.measured, verdict, culprit, {}, rows))
    inputs = Inputs(model, cluster, hosts=tuple(counts), rates_bps=tuple(rates), sharded=tuple(plans))
    write_page(args.report, dataclasses.replace(inputs, command=typed()), short=True)


def _host_counts(text: str | None) -> list[int]:
    try:
        counts = [] if text is None else [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--hosts {text!r}: must be whole numbers, as in 2,4,8,16") from None
    for count in counts:
        if not 1 <= count <= _MAX_HOSTS:
            raise UsageError(f"--hosts {count}: must be 1 to {_MAX_HOSTS}")
    return list(dict.fromkeys(counts))


def fast_rate(text: str) -> int:
    return parse_rate(text, fastest_bps=_FASTEST_BPS)


def network_of(path: Path | None, per_host: int | None, rate_bps: int | None, counts: list[int]) -> Network:
    """Return the measured network or, without one, a network of Ethernet links at this rate."""
    if path is not None:
        if per_host is not None:
            raise UsageError("--per-host cannot be combined with --network, which has its own ranks per host")
        network = Network.load(path)
        if not network.collectives or not network.links:
            raise UsageError(f"{path}: has no measured collectives: probe again")
        return network
    if rate_bps is None:
        raise UsageError("without --network, the rate of the hosts' links is needed: add --rate, as in --rate 10gbit")
    if per_host is not None and per_host * max(counts) > _MAX_RANKS:
        raise UsageError(f"--per-host {per_host}: with {max(counts)} hosts, that is more than {_MAX_RANKS} ranks")
    return assumed_network(max(2, counts[0]), per_host or 1, rate_bps)


def _row(found: Prediction | ShardedPrediction, rate_bps: int | None) -> Row:
    plan = found.name if isinstance(found, ShardedPrediction) else found.schedule.describe()
    hosts, ranks, sent_bytes = found.hosts, found.ranks, found.sent_bytes
    step, low, high, compute = (1e3 * s for s in (found.iteration_s, found.low_s, found.high_s, found.compute_s))
    return Row(plan, hosts, ranks, rate_bps, step, low, high, compute, found.scaling, sent_bytes, found.losses)


def _show_prediction(forecast: Forecast) -> None:
    network, diagnosis = forecast.network, forecast.diagnosis
    now, link = diagnosis.prediction, network.link("host")
    rate = f", {format_rate(link.nominal_bps)} links" if link is not None and link.nominal_bps else ""
    cluster = f"{count_text(now.hosts, 'host')} × {count_text(now.ranks // now.hosts, 'rank')}{rate}, {network.backend}"
    say(f"{forecast.profile.model}, {now.schedule.describe()} on {cluster}")
    _warn_if_assumed(network)
    say(f"\n{sentences.diagnosis(diagnosis)}\n")
    screen.show(step_by_cause(forecast))
    say()
    if diagnosis.remedies:
        screen.show(remedies(forecast))
        say()


def plan_command(args: commands.Plan) -> None:
    screen.check_writable(args.out, args.json, args.report)
    model = options.scaled_profile(args.profile, args.scale)
    rate_bps = None if args.rate is None else fast_rate(args.rate)
    options.check_positive("--bucket-mb", args.bucket_mb)
    cluster = network_of(args.network, args.per_host, rate_bps, [args.hosts or 4])
    cluster = resized(cluster, args.hosts or cluster.hosts, rate_bps if args.network else None)
    if args.quality is not None and (args.allow or args.memory_budget is not None):
        other = "--allow, which names the methods one by one" if args.allow else "--memory-budget"
        raise UsageError(f"--quality cannot be combined with {other}: leave one of them out")
    if args.memory_budget is not None:
        _plan_memory(args, model, cluster)
        return
    if args.quality is not None:
        _plan_quality(args, model, cluster)
        return
    best = make_plan(model, cluster, options.split(args.allow), caps=ddp_caps(args.bucket_mb))
    for path in (args.out, args.json):
        screen.save(path, best)
    _show_plan(best, args.out or args.json, cluster)
    schedules = ("ddp" if args.bucket_mb is None else f"ddp,bucket_mb={args.bucket_mb:g}",)
    inputs = Inputs(model, cluster, {"the plan": best}, schedules=schedules, command=typed())
    write_page(args.report, inputs, short=True)


def _plan_quality(args: commands.Plan, model: Profile, cluster: Network) -> None:
    """Choose among all methods that a quality permits. A file for `wrap` has buckets, so it excludes some of them."""
    check_quality(args.quality)
    able = dict.fromkeys(("updates", "overlap"), args.out is None)
    choice = make_choice(model, cluster, args.quality or "exact", caps=ddp_caps(args.bucket_mb), **able)
    if args.report is not None and choice.attachment is not None:
        text = "leave it out, or add --out plan.json, which permits exchanges of gradients only"
        raise UsageError(f"--report cannot show {choice.rung}, which would be chosen: {text}")
    screen.save(args.out, choice.plan)
    screen.save(args.json, choice)
    hosts, ranks = len(set(choice.plan.where.host_of_rank)), len(choice.plan.where.host_of_rank)
    each = f" × {ranks // hosts} ranks" if ranks > hosts else ""
    say(f"{choice.plan.model} on {count_text(hosts, 'host')}{each}, {choice.plan.where.backend}")
    _warn_if_assumed(cluster)
    say(f"\n{choice.reason}\n")
    rows = []
    for rung in choice.rungs:
        chosen = "chosen" if rung.rung == choice.rung else ""
        faster = f"{choice.plain_s / rung.iteration_s:.2f}×" if rung.iteration_s else "–"
        lossy = "" if rung.lossless else "lossy"
        rows.append((rung.rung, rung.quality, milliseconds_text(rung.iteration_s), faster, lossy, chosen))
    screen.table(("", "quality", "per step", "faster", "", ""), rows, words=[])
    if args.out is not None:
        say("--out writes buckets, so overlap and updates were left out.", style="dim")
    apply = choice.attachment.code() if choice.attachment is not None else ""
    if not choice.nothing and not apply:
        written = "" if args.out is not None else "write it with --out plan.json, and "
        apply = f'{written}model = syncline.wrap(net, "{args.out or "plan.json"}")'
    say(f"\nApply it: {apply}" if apply else "\nNothing to apply: keep plain DDP", soft_wrap=True)
    inputs = Inputs(model, cluster, {"the plan": choice.plan}, command=typed())
    write_page(args.report, inputs, short=True)


def _show_plan(plan: Plan, path: Path | None, cluster: Network) -> None:
    hosts, ranks = len(set(plan.where.host_of_rank)), len(plan.where.host_of_rank)
    each = f" × {ranks // hosts} ranks" if ranks > hosts else ""
    say(f"{plan.model} on {count_text(hosts, 'host')}{each}, {plan.where.backend}")
    _warn_if_assumed(cluster)
    say(f"\n{plan.reason}\n")
    screen.show(alternatives(plan))
    if not plan.nothing:
        say(f"expected: {plan.low_s * 1e3:.0f}–{plan.high_s * 1e3:.0f} ms per step\n", style="dim")
        screen.show(buckets(plan))
    if path is not None:
        apply = f'Apply it: model = syncline.wrap(net, "{path}")'
        say("\nNothing to apply: keep plain DDP" if plan.nothing else f"\n{apply}")


def _warn_if_assumed(network: Network) -> None:
    if not network.measured:
        say(f"Links are not measured but {network.how}: syncline probe measures yours.", style="yellow")


def _plan_memory(args: commands.Plan, model: Profile, cluster: Network) -> None:
    if args.out is not None:
        raise UsageError("--out writes buckets: apply a memory budget with syncline.Layerwise(memory_budget=…)")
    if args.report is not None:
        raise UsageError("--report cannot be combined with --memory-budget")
    budget = args.memory_budget or ""
    if budget.isdecimal():
        raise UsageError(f"--memory-budget {budget}: add a unit, as in 8GiB or 500MB")
    answer = plan_memory(model, cluster, parse_bytes(budget), options.split(args.allow))
    screen.save(args.json, answer)
    _show_memory(answer, cluster)


def _show_memory(answer: MemoryPlan, cluster: Network) -> None:
    best, plain = answer.rows[0], next(row for row in answer.rows if row.name == "plain DDP")
    budget, unit = format_bytes(answer.budget_bytes), answer.unit
    units = {"sample": "samples", "batch": "batches"}[unit]
    say(f"{answer.model} on {answer.ranks} ranks, {budget} of memory each")
    _warn_if_assumed(cluster)
    if not best.batch:
        least = format_bytes(min(row.least_bytes for row in answer.rows))
        raise SynclineError(f"not even one {unit} fits in {budget}: the smallest budget for one is {least}")
    times = f", {plain.sample_s / best.sample_s:.2f} times plain DDP's rate" if plain.batch and best != plain else ""
    say(
        f"\nBest: {best.name}, {best.batch} {units if best.batch > 1 else unit} per rank and step, "
        f"{best.sample_s * 1e3:.2f} ms per {unit}{times}.\n"
    )
    rows = []
    for row in answer.rows:
        cells = ("–", "", "", "", f"one {unit} needs {format_bytes(row.least_bytes)}")
        if row.batch:
            step, sample = map(milliseconds_text, (row.step_s, row.sample_s))
            cells = (str(row.batch), format_bytes(row.peak_bytes), step, sample, row.about)
        rows.append((row.name if row.lossless else f"{row.name} (lossy)", *cells))
    screen.table(("", "batch", "peak", "step", f"per {unit}", "blocks"), rows, words=[5])
    note = f"batch: {units} per rank and step, up to {FURTHEST} times the measured batch; memory and times of other "
    note += "batches are extrapolated linearly. peak: weights, optimizer state, gradients, residuals and buffers of "
    say(f"{note}exchanges, and activations.", style="dim")
    if unit == "batch":
        say("The profile does not say how many samples its batch has, so whole batches are counted.")
    apply = "Plain DDP fits, and no other method is more than 1 % faster."
    if best.by_layer:
        arguments = f'syncline.{best.exchange}, memory_budget="{budget}", step=step'
        apply = f"Apply it: syncline.Layerwise(net, optimizer, {arguments})"
    elif best.exchange:
        apply = f"Apply it: syncline.attach(model, syncline.{best.exchange})"
    say(apply, soft_wrap=True)
