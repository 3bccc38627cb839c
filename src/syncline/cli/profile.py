"""`syncline profile`: measure when each gradient of a model is ready, and the other local costs of a step."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from syncline.cli import commands, options, screen
from syncline.cli.screen import say
from syncline.cluster import ClusterSpec, Rank, launch
from syncline.errors import SynclineError, UsageError
from syncline.layerwise.layer_optimizer import state_bytes
from syncline.layerwise.measure_blocks import measure_activations
from syncline.measure.backward import measure_backward
from syncline.measure.overhead import measure_overheads
from syncline.measure.steps import run_on_all_ranks
from syncline.models.target import Target, Task
from syncline.predict.memory import peak_bytes
from syncline.records.activations import KEEP, RECOMPUTE, Activations
from syncline.records.profile import Gradient, Profile
from syncline.units import count_text, duration_text, format_bytes, size_text

_STRAGGLES = 1.1
"""A rank is called slow if its step takes this many times the median."""
_NOISY = 3.0
"""Steps are called noisy if their upper quartile is this many times their lower one."""
_LARGEST = 5
"""Number of gradients that are listed."""


def main(args: commands.Profile) -> None:
    device = args.device or "cpu"
    options.check_positive("--timeout", args.timeout)
    target = Target(args.target, args.device, args.batch, args.autocast)
    under_torchrun, first = options.under_torchrun(), options.is_first()
    if first:
        screen.check_writable(args.output)
    with screen.progress(f"Measuring {args.target}", shown=first) as on_progress:
        if args.hosts is not None:
            if under_torchrun:
                raise UsageError("--hosts starts emulated hosts, but torchrun has started ranks: omit it")
            cluster = commands.ClusterOptions(hosts=args.hosts, per_host=args.per_host, device=device)
            measured = _on_emulated_hosts(options.cluster_spec(cluster), args, target, on_progress)
        elif args.per_host != "1":
            raise UsageError("--per-host is for emulated hosts: add --hosts")
        else:
            with options.torchrun_group(device) if under_torchrun else nullcontext():
                measured = _measure(args, target, options.local_device(device), on_progress)
    if first:
        _show(measured)
        screen.save(args.output, measured, "Profile")
        if args.output is None:
            say("--output FILE saves this profile for syncline predict and syncline plan", style="dim")


def _measure(
    args: commands.Profile, target: Target, device: torch.device, on_progress: Callable[[int, int], None] | None
) -> Profile:
    """Measure on one rank or, if there is a default process group, on all its ranks at once."""
    group = dist.group.WORLD if dist.is_initialized() else None
    tasks = []

    def build() -> bytes:
        tasks.append(target.build(device))
        return b""

    run_on_all_ranks(group, build)  # so that an error on one rank ends all of them
    task = tasks[0]
    where = next(task.model.parameters()).device
    with target.blamed():
        profile = measure_backward(
            task.model,
            task.step,
            args.steps,
            args.warmup,
            optimizer=task.optimizer,
            model_name=task.name,
            batch=task.batch,
            group=group,
            on_progress=on_progress,
        )
        activations = _activations(target, task, where) if args.memory else None
    ranks = group.size() if group is not None and group.size() > 1 else 4
    return msgspec.structs.replace(
        profile,
        activations=activations,
        how=f"{profile.how}, {target.autocast} autocast" if target.autocast else profile.how,
        overheads=measure_overheads(where, topology=ranks, group=group),
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


def _on_emulated_hosts(
    spec: ClusterSpec, args: commands.Profile, target: Target, on_progress: Callable[[int, int], None]
) -> Profile:
    def on_rank(rank: Rank) -> dict[str, Any]:
        rank.init_process_group()
        report = (lambda done, of: rank.say([done, of])) if rank.rank == 0 else None
        try:
            return {"profile": msgspec.to_builtins(_measure(args, target, rank.device, report))}
        except SynclineError as error:
            return {"error": str(error), "wrong_use": isinstance(error, UsageError)}

    # DDP imports it, which takes seconds: import it once, before the ranks are forked.
    importlib.import_module("torch._dynamo")
    # Nothing is sent while steps are measured, so the links need not be emulated.
    answers = launch(
        spec, on_rank, deadline_s=args.timeout, on_event=lambda _rank, event: on_progress(*event), shaped=False
    )
    for answer in answers:
        if answer.get("wrong_use"):
            raise UsageError(answer["error"])
    # "rank N: …" repeats the error of another rank, which has more to say.
    for rank, answer in enumerate(answers):
        if "error" in answer and not answer["error"].startswith("rank "):
            raise SynclineError(f"rank {rank}: {answer['error']}")
    return msgspec.convert(answers[0]["profile"], Profile)


def _show(profile: Profile) -> None:
    parameters = sum(math.prod(gradient.shape) for gradient in profile.gradients)
    batch = f", batch {profile.batch}" if profile.batch else ""
    nbytes = size_text(profile.gradient_bytes)
    say(f"{profile.model}: {parameters:,} parameters, {len(profile.gradients)} gradients of {nbytes}{batch}")
    say(f"{profile.device}: {profile.where}\n{profile.how}\n", style="dim")
    say("\n".join(_step_lines(profile)))
    say()
    table = screen.table("largest gradients", "size", "ready", "of backward")
    for gradient in sorted(profile.gradients, key=lambda gradient: -gradient.bytes)[:_LARGEST]:
        share = gradient.ready_s / profile.backward_s if profile.backward_s else 0.0
        table.add_row(gradient.name, size_text(gradient.bytes), duration_text(gradient.ready_s), f"{share:.0%}")
    say(table)
    say()
    for line in _overhead_lines(profile):
        say(line, style="dim")
    if profile.activations is not None:
        say(_memory_line(profile.activations, profile.batch))


def _step_lines(profile: Profile) -> Iterator[str]:
    step_s, spread, slowest = profile.step_s, profile.spread, profile.slowest
    # Quartiles of whole steps: on CUDA, a longer forward often means a shorter backward.
    quartiles = ""
    if spread is not None:
        quartiles = f" (quartiles of whole steps: {spread.low_s * 1e3:.1f}–{spread.high_s * 1e3:.1f})"
    yield f"step      {duration_text(step_s)}{quartiles}"
    if spread is not None and spread.high_s > _NOISY * max(spread.low_s, 1e-9):
        yield "          steps vary too much for reliable plans: profile again while nothing else runs"
    yield f"forward   {duration_text(profile.forward_s)}"
    yield f"backward  {duration_text(profile.backward_s)}"
    yield f"update    {duration_text(profile.update_s) if profile.update_s else 'not measured'}"
    half_s = _half_ready_s(profile.gradients)
    left = duration_text(max(0.0, profile.backward_s - half_s))
    yield f"half of the gradient bytes are ready after {duration_text(half_s)}, {left} before backward ends"
    if slowest is not None and slowest.step_s > _STRAGGLES * step_s:
        yield (
            f"rank {slowest.rank} is a straggler: {duration_text(slowest.step_s)} per step, "
            f"{slowest.step_s / step_s - 1:.0%} over the median; the other ranks wait for it"
        )
    if profile.ranks:
        waiting = duration_text(profile.jitter_s)
        yield f"waiting for the slowest of {len(profile.ranks)} ranks costs {waiting} per step"


def _overhead_lines(profile: Profile) -> Iterator[str]:
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


def _memory_line(activations: Activations, batch: int | None) -> str:
    samples = "a batch" if batch is None else count_text(batch, "sample")
    largest, blocks = max(activations.batches), len(activations.blocks)
    kept, recomputed = (format_bytes(peak_bytes(activations, [mode] * blocks, largest)) for mode in (KEEP, RECOMPUTE))
    with_blocks = f"{recomputed} with all {blocks} blocks recomputed"
    end = with_blocks if blocks else "the model has no blocks that could be recomputed"
    return f"memory    forward and backward of {samples} take {kept} in addition to weights and gradients; {end}"


def _half_ready_s(gradients: tuple[Gradient, ...]) -> float:
    """Return the time at which half of the gradient bytes are ready."""
    totals = list(itertools.accumulate(gradient.bytes for gradient in gradients))
    return next(gradient.ready_s for gradient, ready in zip(gradients, totals, strict=True) if 2 * ready >= totals[-1])
