"""`syncline profile` and `syncline probe`: measure a model, and the links and collectives of a cluster."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from syncline.bench.run import probe_emulated
from syncline.cli import commands, options, screen
from syncline.cli.screen import say
from syncline.dist.comm import backend_of
from syncline.errors import UsageError
from syncline.exchange import EXCHANGES, WORLD, Topology
from syncline.fsdp.profile import profile_sharded
from syncline.fsdp.units import is_sharded
from syncline.layerwise.layer_optimizer import state_bytes
from syncline.layerwise.memory_budget import measure_activations
from syncline.measure.backward import measure_backward
from syncline.measure.load import measure_contention
from syncline.measure.overhead import measure_overheads
from syncline.measure.probe import probe
from syncline.measure.steps import run_on_all_ranks
from syncline.models.target import Target, Task
from syncline.predict.memory import peak_bytes
from syncline.records.activations import KEEP, RECOMPUTE, Activations
from syncline.records.link_costs import Collective
from syncline.records.network import Network
from syncline.records.profile import Profile
from syncline.report import sentences
from syncline.report.charts import Table
from syncline.report.sections.network import collectives, links
from syncline.units import count_text, duration_text, format_bytes, size_text

_STRAGGLES = 1.1  # a rank is called slow if its step takes this many times the median
_NOISY = 3.0  # steps are called noisy if their upper quartile is this many times their lower one
_LARGEST = 5  # number of gradients that are listed


def profile_command(args: commands.Profile) -> None:
    device, first = args.device or "cpu", options.is_first()
    target = Target(args.target, args.device, args.batch, args.autocast)
    if first:
        screen.check_writable(args.output)
    with (
        screen.progress(f"Measuring {args.target}", shown=first) as on_progress,
        options.torchrun_group(device) if options.under_torchrun() else nullcontext(),
    ):
        measured = _measure(args, target, options.local_device(device), on_progress)
    if first:
        _show_profile(measured)
        screen.save(args.output, measured, "Profile")
        if args.output is None:
            say("--output FILE saves this profile for syncline predict and syncline plan", style="dim")


def _measure(
    args: commands.Profile, target: Target, device: torch.device, on_progress: Callable[[int, int], None]
) -> Profile:
    """Measure on one rank or, if there is a default process group, on all its ranks at once."""
    group = dist.group.WORLD if dist.is_initialized() else None
    if args.contention and (group is None or group.size() < 2):
        raise UsageError("--contention needs at least two ranks, which share processors: run it under torchrun")
    tasks: list[Task] = []

    def build() -> bytes:
        tasks.append(target.build(device))
        return b""

    run_on_all_ranks(group, build)  # so that an error on one rank ends all of them
    task = tasks[0]
    where = next(task.model.parameters()).device
    with target.blamed():
        arguments = task.model, task.step, args.steps, args.warmup
        options: dict[str, Any] = {"optimizer": task.optimizer, "model_name": task.name, "batch": task.batch}
        if is_sharded(task.model):
            for name in ("memory", "contention"):
                if getattr(args, name):
                    raise UsageError(f"--{name} is not for sharded models: leave it out")
            profile = profile_sharded(*arguments, **options, on_progress=on_progress)
        else:
            profile = measure_backward(*arguments, **options, group=group, on_progress=on_progress)
        activations = _activations(target, task, where) if args.memory else None
    ranks = group.size() if group is not None and group.size() > 1 else 4
    how = f"{profile.how}, {target.autocast} autocast" if target.autocast else profile.how
    overheads = measure_overheads(where, topology=ranks, group=group)
    contention = None
    if args.contention and group is not None:
        topology, optimizer = Topology.flat(group.size(), backend_of(group)), task.optimizer
        contention = measure_contention(task.model, task.step, optimizer, EXCHANGES, topology, group=group)
    return msgspec.structs.replace(
        profile, activations=activations, how=how, overheads=overheads, contention=contention
    )


def _activations(target: Target, task: Task, device: torch.device) -> Activations:
    """Measure at the profiled batch and, if it can be chosen, at half of it, for a linear extrapolation."""
    steps = {task.batch or 1: task.step}
    if task.batch is not None and task.batch > 1:
        half = task.batch // 2
        steps[half] = dataclasses.replace(target, batch=half).build(device).step
    activations = measure_activations(task.model, steps)
    per_element = 0.0 if task.optimizer is None else state_bytes(task.optimizer)
    return msgspec.structs.replace(activations, optimizer_bytes=per_element)


def _show_profile(profile: Profile) -> None:
    parameters = sum(math.prod(gradient.shape) for gradient in profile.gradients)
    batch = f", batch {profile.batch}" if profile.batch else ""
    nbytes = size_text(profile.gradient_bytes)
    say(f"{profile.model}: {parameters:,} parameters, {len(profile.gradients)} gradients of {nbytes}{batch}")
    say(f"{profile.device}: {profile.where}\n{profile.how}\n", style="dim")
    say("\n".join(_step_lines(profile)) + "\n")
    rows = []
    for gradient in sorted(profile.gradients, key=lambda gradient: -gradient.bytes)[:_LARGEST]:
        share = gradient.ready_s / profile.backward_s if profile.backward_s else 0.0
        rows.append((gradient.name, size_text(gradient.bytes), duration_text(gradient.ready_s), f"{share:.0%}"))
    screen.table(("largest gradients", "size", "ready", "of backward"), rows)
    say()
    for line in _other_lines(profile):
        say(line, style="dim")


def _step_lines(profile: Profile) -> Iterator[str]:
    step_s, spread, slowest = profile.step_s, profile.spread, profile.slowest
    quartiles = ""
    if spread is not None:  # of whole steps, because on CUDA a longer forward often means a shorter backward
        quartiles = f" (quartiles of whole steps: {spread.low_s * 1e3:.1f}–{spread.high_s * 1e3:.1f})"
    yield f"step      {duration_text(step_s)}{quartiles}"
    if spread is not None and spread.high_s > _NOISY * max(spread.low_s, 1e-9):
        yield "          steps vary too much for reliable plans: profile again while nothing else runs"
    yield f"forward   {duration_text(profile.forward_s)}"
    yield f"backward  {duration_text(profile.backward_s)}"
    yield f"update    {duration_text(profile.update_s) if profile.update_s else 'not measured'}"
    yield sentences.profile(profile)
    if slowest is not None and slowest.step_s > _STRAGGLES * step_s:
        over = f"{slowest.step_s / step_s - 1:.0%} over the median; the other ranks wait for it"
        yield f"rank {slowest.rank} is a straggler: {duration_text(slowest.step_s)} per step, {over}"
    if profile.ranks:
        waiting = duration_text(profile.jitter_s)
        yield f"waiting for the slowest of {len(profile.ranks)} ranks costs {waiting} per step"


def _other_lines(profile: Profile) -> Iterator[str]:
    if profile.overheads is not None:
        overheads, nbytes = profile.overheads, profile.gradient_bytes
        copies = (overheads.copy_in_s_per_byte * nbytes, overheads.copy_out_s_per_byte * nbytes, overheads.hook_s)
        copy_in, copy_out, hook = map(duration_text, copies)
        yield f"DDP copies gradients: {copy_in} into its buckets, {copy_out} out of them, and {hook} per bucket"
        times = {name: duration_text(work.fixed_s + work.s_per_byte * nbytes) for name, work in overheads.work.items()}
        texts = ", ".join(f"{name} {time}" for name, time in times.items())
        yield f"computation of each exchange, with all gradients in one bucket: {texts}"
    if profile.buffers:
        buffers = ", ".join(f"{size_text(entry.bytes)} of {entry.dtype}" for entry in profile.buffers)
        yield f"buffers: {buffers}, broadcast before every forward"
    if (found := profile.activations) is not None:
        samples = "a batch" if profile.batch is None else count_text(profile.batch, "sample")
        largest, blocks = max(found.batches), len(found.blocks)
        kept, recomputed = (format_bytes(peak_bytes(found, [mode] * blocks, largest)) for mode in (KEEP, RECOMPUTE))
        end = f"{recomputed} with all {blocks} blocks recomputed" if blocks else "no block could be recomputed"
        yield f"memory: forward and backward of {samples} take {kept} in addition to weights and gradients; {end}"


_WIDEST_MATRIX = 16


def probe_command(args: commands.Probe) -> None:
    options.check_seconds("--budget", args.budget)
    first = options.is_first()
    if first:
        screen.check_writable(args.output)
    with screen.progress("Probing", shown=first) as on_progress:
        if options.under_torchrun():
            if changed := options.changed(args, "device", "output", "budget", "every"):
                problem = "describes an emulated cluster, but torchrun has started a real one: omit it"
                raise UsageError(f"{changed[0]} {problem}")
            with options.torchrun_group(args.device):
                network = probe(budget_s=args.budget, on_progress=lambda done, of: on_progress(round(done), round(of)))
        else:
            spec = options.cluster_spec(args)
            if spec.world_size < 2:
                raise UsageError("probe needs at least two ranks: with one, there is no link to measure")
            screen.warn_if_not_shaped()
            network = probe_emulated(spec, args.budget, on_progress)
    if first:
        _show_network(network, args.every)
        screen.save(args.output, network, "Network")


def _show_network(network: Network, every: bool) -> None:
    racks = ": racks found from the rates between hosts" if network.racks > 1 else ""
    tree, _, branches = network.tree.describe().partition("\n")
    say(f"{tree}{racks}\n{branches}\n")
    screen.show(links(network))
    say(f"\n{_summary(network)}\n")
    for entry in network.collectives:
        if every or (entry.level, entry.kind) == (WORLD, "all_reduce"):
            screen.show(_sweep(entry), most=len(entry.points))
            say()
    screen.show(collectives(network), most=len(network.collectives))
    if network.matrix_bytes_per_s and network.hosts <= _WIDEST_MATRIX:
        say()
        say("From host to host, in Mbit/s, while every host sends to one other:")
        rows = [[f"{rate * 8 / 1e6:,.0f}" for rate in row] for row in network.matrix_bytes_per_s]
        for host, row in enumerate(rows):
            row[host] = ""
        screen.table(("from", *(f"to {n}" for n in range(len(rows)))), [(f"{n}", *row) for n, row in enumerate(rows)])


def _summary(network: Network) -> str:
    startup_ms = network.collective("all_reduce").startup_s * 1e3
    parts = [f"A tiny all-reduce among {network.ranks} ranks takes {startup_ms:.3g} ms."]
    if network.overlap:
        overlaps = (f"{one.streams} at once take {one.slowdown:.2f} times as long as one" for one in network.overlap)
        parts.append(f"{'; '.join(overlaps)}. One process group runs {network.in_flight} at a time.")
    if network.one_machine:
        parts.append("All hosts are on one machine and share its processors.")
    return " ".join(parts)


def _sweep(entry: Collective) -> Table:
    rows = []
    for point in entry.points:
        time_s, bandwidths = point.median_s, (point.bytes / point.median_s, point.sent_bytes / point.median_s)
        times = f"{time_s * 1e3:.2f}", f"{point.low_s * 1e3:.2f}–{point.high_s * 1e3:.2f}"
        rates = (f"{rate / 1e6:.1f}" for rate in bandwidths)
        fit = f"{point.fitted_s / time_s - 1:+.0%}"
        rows.append((size_text(point.bytes), size_text(point.sent_bytes), *times, *rates, fit, str(point.repeats)))
    return Table(
        f"{entry.kind} among {entry.ranks} ranks ({entry.level})",
        ("size", "sent", "time, ms", "quartiles", "algbw", "busbw", "fit", "samples"),
        rows,
        note="size: bytes of the buffer; sent: bytes of the busiest rank; algbw, busbw: size and sent divided by time, "
        "in MB/s",
    )
