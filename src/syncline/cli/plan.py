"""`syncline plan`: find the fastest plan for a model on a cluster, and show the alternatives."""

from __future__ import annotations

from pathlib import Path

from syncline.cli import commands, options, screen
from syncline.cli.predict import assumed, fast_rate, load_network
from syncline.cli.report import typed, write_page
from syncline.cli.screen import say
from syncline.errors import SynclineError, UsageError
from syncline.plan.make import make_plan
from syncline.plan.memory import MemoryPlan, plan_memory
from syncline.predict.memory import FURTHEST
from syncline.predict.schedule import ddp_caps
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.records.profile import Profile
from syncline.report.forecast import resized
from syncline.report.inputs import Inputs
from syncline.report.sections.plan import alternatives, buckets
from syncline.units import count_text, format_bytes, milliseconds_text, parse_bytes


def main(args: commands.Plan) -> None:
    screen.check_writable(args.out, args.json, args.report)
    model = options.scaled_profile(args.profile, args.scale)
    rate_bps = None if args.rate is None else fast_rate(args.rate)
    options.check_positive("--bucket-mb", args.bucket_mb)
    if args.network is not None:
        measured = load_network(args.network, args.per_host)
        cluster = resized(measured, args.hosts or measured.hosts, rate_bps)
    else:
        hosts = args.hosts or 4
        cluster = resized(assumed([hosts], args.per_host, rate_bps), hosts, None)
    if args.memory_budget is not None:
        _plan_memory(args, model, cluster)
        return
    best = make_plan(model, cluster, options.split(args.allow), caps=ddp_caps(args.bucket_mb))
    for path in (args.out, args.json):
        screen.save(path, best)
    _show(best, args.out or args.json, cluster.measured)
    if args.report is not None:
        plain = "ddp" if args.bucket_mb is None else f"ddp,bucket_mb={args.bucket_mb:g}"
        say()
        inputs = Inputs(model, cluster, {"the plan": best}, schedules=(plain,), command=typed())
        write_page(args.report, inputs, short=True)


def _show(plan: Plan, path: Path | None, measured: bool) -> None:
    hosts, ranks = len(set(plan.where.host_of_rank)), len(plan.where.host_of_rank)
    each = f" × {ranks // hosts} ranks" if ranks > hosts else ""
    say(f"{plan.model} on {count_text(hosts, 'host')}{each}, {plan.where.backend}")
    _warn_if_assumed(measured)
    say(f"\n{plan.reason}\n")
    screen.show(alternatives(plan))
    if not plan.nothing:
        say(f"expected: {plan.low_s * 1e3:.0f}–{plan.high_s * 1e3:.0f} ms per step\n", style="dim")
        screen.show(buckets(plan))
    if path is not None:
        apply = f'Apply it: model = syncline.wrap(net, "{path}")'
        say("\nNothing to apply: keep plain DDP" if plan.nothing else f"\n{apply}")


def _warn_if_assumed(measured: bool) -> None:
    if not measured:
        say("Links are not measured but assumed: syncline probe measures yours.", style="yellow")


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
    _show_memory(answer, cluster.measured)


def _show_memory(answer: MemoryPlan, measured: bool) -> None:
    best, plain = answer.rows[0], next(row for row in answer.rows if row.name == "plain DDP")
    budget, unit = format_bytes(answer.budget_bytes), answer.unit
    units = {"sample": "samples", "batch": "batches"}[unit]
    say(f"{answer.model} on {answer.ranks} ranks, {budget} of memory each")
    _warn_if_assumed(measured)
    if not best.batch:
        least = format_bytes(min(row.least_bytes for row in answer.rows))
        raise SynclineError(f"not even one {unit} fits in {budget}: the smallest budget for one is {least}")
    times = f", {plain.sample_s / best.sample_s:.2f} times plain DDP's rate" if plain.batch and best != plain else ""
    say(
        f"\nBest: {best.name}, {best.batch} {units if best.batch > 1 else unit} per rank and step, "
        f"{best.sample_s * 1e3:.2f} ms per {unit}{times}.\n"
    )
    table = screen.table("", "batch", "peak", "step", f"per {unit}", "blocks", words=[5])
    for row in answer.rows:
        name = row.name if row.lossless else f"{row.name} (lossy)"
        if not row.batch:
            table.add_row(name, "–", "", "", "", f"one {unit} needs {format_bytes(row.least_bytes)}")
            continue
        times_taken = milliseconds_text(row.step_s), milliseconds_text(row.sample_s)
        table.add_row(name, str(row.batch), format_bytes(row.peak_bytes), *times_taken, row.about)
    say(table)
    say(
        f"batch: {units} per rank and step, up to {FURTHEST} times the measured batch; memory and times of other "
        "batches are extrapolated linearly. peak: weights, optimizer state, gradients, residuals and buffers of "
        "exchanges, and activations.",
        style="dim",
    )
    if unit == "batch":
        say("The profile does not say how many samples its batch has, so whole batches are counted.")
    if best.by_layer:
        arguments = f'syncline.{best.exchange}, memory_budget="{budget}", step=step'
        say(f"Apply it: syncline.Layerwise(net, optimizer, {arguments})", soft_wrap=True)
    elif best.exchange:
        say(f"Apply it: syncline.attach(model, syncline.{best.exchange})", soft_wrap=True)
    else:
        say("Plain DDP fits, and no other method is more than 1 % faster.")
