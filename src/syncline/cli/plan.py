"""`syncline plan`: find the fastest plan for a model on a cluster, and show the alternatives."""

from __future__ import annotations

from pathlib import Path

from syncline.cli import options, screen
from syncline.cli.commands.plan import Plan as PlanOptions
from syncline.cli.predict import FASTEST_BPS, assumed, load_network, moved
from syncline.cli.report import typed, write_page
from syncline.cluster import parse_rate
from syncline.errors import SynclineError, UsageError
from syncline.files import write_json
from syncline.plan.make import make_plan
from syncline.plan.memory import MemoryPlan, plan_memory
from syncline.predict.memory import FURTHEST
from syncline.predict.schedule import ddp_caps
from syncline.records.plan import Plan
from syncline.records.profile import load_profile
from syncline.report import formatting
from syncline.report.inputs import Inputs
from syncline.units import format_bytes, parse_bytes

_SHOWN = 8
"""Number of alternatives and of buckets that are listed."""


def plan(args: PlanOptions) -> None:
    with options.one_line_errors("syncline plan"):
        for path in (args.out, args.json, args.report):
            screen.check_writable(path)
        time_scale, size_scale = options.scales(args.scale)
        model = load_profile(args.profile).scaled(time=time_scale, bytes=size_scale)
        rate_bps = None if args.rate is None else parse_rate(args.rate, fastest_bps=FASTEST_BPS)
        options.check_bucket_mb(args.bucket_mb)
        if args.network is not None:
            if args.per_host is not None:
                raise UsageError("--per-host cannot be combined with --network, which has its own ranks per host")
            measured = load_network(args.network, None)
            cluster = moved(measured, args.hosts or measured.hosts, rate_bps)
        else:
            hosts = args.hosts or 4
            cluster = moved(assumed([hosts], args.per_host, rate_bps, None), hosts, None)
        allowed = options.split(args.allow)
        if args.memory_budget is not None:
            if args.out is not None:
                raise UsageError("--out writes buckets: apply a memory budget with syncline.Layerwise(memory_budget=…)")
            if args.report is not None:
                raise UsageError("--report cannot be combined with --memory-budget")
            if args.memory_budget.isdecimal():
                raise UsageError(f"--memory-budget {args.memory_budget}: add a unit, as in 8GiB or 500MB")
            answer = plan_memory(model, cluster, parse_bytes(args.memory_budget), allowed)
            if args.json is not None:
                write_json(args.json, answer)
            _show_memory(answer, cluster.measured)
            return
        best = make_plan(model, cluster, allowed, caps=ddp_caps(args.bucket_mb))
        for path in (args.out, args.json):
            if path is not None:
                best.save(path)
        _show(best, args.out or args.json, cluster.measured)
        if args.report is not None:
            plain = "ddp" if args.bucket_mb is None else f"ddp,bucket_mb={args.bucket_mb:g}"
            inputs = Inputs(model, cluster, {"the plan": best}, schedules=(plain,), command=typed())
            screen.out.print()
            write_page(args.report, inputs, short=True)


def _show(plan: Plan, path: Path | None, measured: bool) -> None:
    hosts, ranks = len(set(plan.where.host_of_rank)), len(plan.where.host_of_rank)
    each = f" × {ranks // hosts} ranks" if ranks > hosts else ""
    screen.out.print(f"{plan.model} on {hosts} host{'s' if hosts > 1 else ''}{each}, {plan.where.backend}")
    if not measured:
        screen.out.print("Links are not measured but assumed: syncline probe measures yours.", style="yellow")
    screen.out.print()
    screen.out.print(plan.reason)
    screen.out.print()
    table = screen.table("", "per step", "faster", "scaling", "")
    if not plan.nothing:
        table.add_row("the plan", *_figures(plan, plan.iteration_s, plan.lossless))
    nothing, *others = plan.alternatives
    table.add_row(nothing.name, *_figures(plan, nothing.iteration_s, True))
    for other in others[:_SHOWN]:
        table.add_row(other.name, *_figures(plan, other.iteration_s, other.lossless))
    screen.out.print(table)
    if len(others) > _SHOWN:
        screen.out.print(f"and {len(others) - _SHOWN} slower alternatives", style="dim")
    if not plan.nothing:
        screen.out.print()
        screen.out.print(f"expected: {plan.low_s * 1e3:.0f}–{plan.high_s * 1e3:.0f} ms per step", style="dim")
        for index, bucket in enumerate(plan.buckets[:_SHOWN]):
            size = sum(gradient.bytes for gradient in plan.gradients if gradient.name in set(bucket.parameters))
            lane = f", lane {bucket.lane}" if plan.lanes > 1 else ""
            count = f"{len(bucket.parameters)} gradient{'s' if len(bucket.parameters) > 1 else ''}"
            exchange = formatting.exchange(plan.exchanges[index])
            line = f"bucket {index}: {count}, {formatting.size(size)}, {exchange}{lane}, from {bucket.parameters[0]}"
            screen.out.print(line, style="dim", no_wrap=True, overflow="ellipsis")
        if len(plan.buckets) > _SHOWN:
            screen.out.print(f"and {len(plan.buckets) - _SHOWN} more buckets", style="dim")
    if path is not None:
        screen.out.print()
        apply = f'Apply it: model = syncline.wrap(net, "{path}")'
        screen.out.print("Nothing to apply: keep plain DDP" if plan.nothing else apply)


def _show_memory(answer: MemoryPlan, measured: bool) -> None:
    best, plain = answer.rows[0], next(row for row in answer.rows if row.name == "plain DDP")
    budget, unit = format_bytes(answer.budget_bytes), answer.unit
    units = {"sample": "samples", "batch": "batches"}[unit]
    screen.out.print(f"{answer.model} on {answer.ranks} ranks, {budget} of memory each")
    if not measured:
        screen.out.print("Links are not measured but assumed: syncline probe measures yours.", style="yellow")
    if not best.batch:
        least = format_bytes(min(row.least_bytes for row in answer.rows))
        raise SynclineError(f"not even one {unit} fits in {budget}: the smallest budget for one is {least}")
    times = f", {plain.sample_s / best.sample_s:.2f} times plain DDP's rate" if plain.batch and best != plain else ""
    screen.out.print(
        f"\nBest: {best.name}, {best.batch} {units if best.batch > 1 else unit} per rank and step, "
        f"{best.sample_s * 1e3:.2f} ms per {unit}{times}.\n"
    )
    table = screen.table("", "batch", "peak", "step", f"per {unit}", "blocks", words="blocks")
    for row in answer.rows:
        name = row.name if row.lossless else f"{row.name} (lossy)"
        if not row.batch:
            table.add_row(name, "–", "", "", "", f"one {unit} needs {format_bytes(row.least_bytes)}")
            continue
        shown = (format_bytes(row.peak_bytes), formatting.step_time(row.step_s), formatting.step_time(row.sample_s))
        table.add_row(name, str(row.batch), *shown, row.about)
    screen.out.print(table)
    screen.out.print(
        f"batch: {units} per rank and step, up to {FURTHEST} times the measured batch; memory and times of other "
        "batches are extrapolated linearly. peak: weights, optimizer state, gradients, residuals and buffers of "
        "exchanges, and activations.",
        style="dim",
    )
    if unit == "batch":
        screen.out.print("The profile does not say how many samples its batch has, so whole batches are counted.")
    if best.by_layer:
        arguments = f'syncline.{best.exchange}, memory_budget="{budget}", step=step'
        screen.out.print(f"Apply it: syncline.Layerwise(net, optimizer, {arguments})", soft_wrap=True)
    elif best.exchange:
        screen.out.print(f"Apply it: syncline.attach(model, syncline.{best.exchange})", soft_wrap=True)
    else:
        screen.out.print("Plain DDP fits, and no other method is more than 1 % faster.")


def _figures(plan: Plan, seconds: float, lossless: bool) -> tuple[str, str, str, str]:
    times = plan.plain_s / seconds if seconds else 1.0
    scaling = f"{plan.compute_s / seconds:.0%}" if seconds else "–"
    return formatting.step_time(seconds), f"{times:.2f}×", scaling, "" if lossless else "lossy"
