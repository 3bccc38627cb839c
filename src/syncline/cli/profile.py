"""`syncline profile`: measure when each gradient of a model is ready, and the other local costs of a step."""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from syncline.cli import options, screen
from syncline.cli.commands.common import ClusterOptions
from syncline.cli.commands.profile import Profile as ProfileOptions
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
from syncline.report import formatting
from syncline.units import format_bytes

_STRAGGLES = 1.1
"""A rank is called slow if its step takes this many times the median."""
_NOISY = 3.0
"""Steps are called noisy if their upper quartile is this many times their lower one."""
_LARGEST = 5
"""Number of gradients that are listed."""


@dataclass(frozen=True)
class _Request:
    """The measurement that every rank makes."""

    target: Target
    steps: int
    warmup: int
    memory: bool = False


def profile(args: ProfileOptions) -> None:
    with options.one_line_errors("syncline profile"):
        device = args.device or "cpu"
        if device not in ("cpu", "cuda"):
            raise UsageError(f"--device {device!r}: use cpu or cuda")
        options.check_timeout(args.timeout)
        target = Target(args.target, args.device, args.batch, args.autocast)
        request = _Request(target, args.steps, args.warmup, args.memory)
        under_torchrun = options.under_torchrun()
        first = options.is_first()
        if first:
            screen.check_writable(args.output)
        with screen.progress(f"Measuring {args.target}", shown=first) as on_progress:
            if args.hosts is not None:
                if under_torchrun:
                    raise UsageError("--hosts starts emulated hosts, but torchrun has started ranks: omit it")
                spec = options.cluster_spec(ClusterOptions(hosts=args.hosts, per_host=args.per_host, device=device))
                measured = _on_emulated_hosts(spec, request, args.timeout, on_progress)
            elif args.per_host != "1":
                raise UsageError("--per-host is for emulated hosts: add --hosts")
            else:
                with options.torchrun_group(device) if under_torchrun else nullcontext():
                    measured = _measure(request, options.local_device(device), on_progress)
        if first:
            try:
                if args.output is not None:
                    measured.save(args.output)
            finally:  # show the result even if its file cannot be written
                _show(measured, args.output)


def _measure(request: _Request, device: torch.device, on_progress: Callable[[int, int], None] | None) -> Profile:
    """Measure on one rank or, if there is a default process group, on all its ranks at once."""
    group = dist.group.WORLD if dist.is_initialized() else None
    tasks = []

    def build() -> bytes:
        tasks.append(request.target.build(device))
        return b""

    run_on_all_ranks(group, build)  # so that an error on one rank ends all of them
    task = tasks[0]
    with request.target.blamed():
        profile = measure_backward(
            task.model,
            task.step,
            request.steps,
            request.warmup,
            optimizer=task.optimizer,
            model_name=task.name,
            batch=task.batch,
            group=group,
            on_progress=on_progress,
        )
    ranks = group.size() if group is not None and group.size() > 1 else 4
    where = next(task.model.parameters()).device
    autocast = request.target.autocast
    with request.target.blamed():
        activations = _activations(request.target, task, where) if request.memory else None
    return msgspec.structs.replace(
        profile,
        activations=activations,
        how=f"{profile.how}, {autocast} autocast" if autocast else profile.how,
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
    spec: ClusterSpec, request: _Request, timeout_s: float, on_progress: Callable[[int, int], None]
) -> Profile:
    def main(rank: Rank) -> dict[str, Any]:
        rank.init_process_group()
        say = (lambda done, of: rank.say([done, of])) if rank.rank == 0 else None
        try:
            return {"profile": msgspec.to_builtins(_measure(request, rank.device, say))}
        except SynclineError as error:
            return {"error": str(error), "wrong_use": isinstance(error, UsageError)}

    importlib.import_module(
        "torch._dynamo"
    )  # DDP imports it, which takes seconds: import it once, before the ranks are forked
    # Nothing is sent while steps are measured, so the links need not be emulated.
    answers = launch(spec, main, deadline_s=timeout_s, on_event=lambda _rank, event: on_progress(*event), shaped=False)
    for answer in answers:
        if answer.get("wrong_use"):
            raise UsageError(answer["error"])
    # "rank N: …" repeats the error of another rank, which has more to say.
    for rank, answer in enumerate(answers):
        if "error" in answer and not answer["error"].startswith("rank "):
            raise SynclineError(f"rank {rank}: {answer['error']}")
    return msgspec.convert(answers[0]["profile"], Profile)


def _show(profile: Profile, output: Path | None) -> None:
    say = screen.out.print
    parameters = sum(math.prod(gradient.shape) for gradient in profile.gradients)
    batch = f", batch {profile.batch}" if profile.batch else ""
    nbytes = formatting.size(profile.gradient_bytes)
    say(f"{profile.model}: {parameters:,} parameters, {len(profile.gradients)} gradients of {nbytes}{batch}")
    say(f"{profile.device}: {profile.where}", style="dim")
    say(profile.how, style="dim")
    say()
    for line in _step_lines(profile):
        say(line)
    say()
    table = screen.table("largest gradients", "size", "ready", "of backward")
    for gradient in sorted(profile.gradients, key=lambda gradient: -gradient.bytes)[:_LARGEST]:
        share = gradient.ready_s / profile.backward_s if profile.backward_s else 0.0
        table.add_row(gradient.name, formatting.size(gradient.bytes), _ms(gradient.ready_s), f"{share:.0%}")
    say(table)
    say()
    for line in _overhead_lines(profile):
        say(line, style="dim")
    if profile.activations is not None:
        for line in _memory_lines(profile.activations, profile.batch):
            say(line)
    if output is None:
        say("--output FILE saves this profile for syncline predict and syncline plan", style="dim")


def _step_lines(profile: Profile) -> Iterator[str]:
    step_s = profile.step_s
    # Quartiles of whole steps: on CUDA, a longer forward often means a shorter backward.
    low_high = profile.spread and f"{profile.spread.low_s * 1e3:.1f}–{profile.spread.high_s * 1e3:.1f}"
    update = _ms(profile.update_s) if profile.update_s else "not measured"
    yield f"step      {_ms(step_s)}" + (f" (quartiles of whole steps: {low_high})" if low_high else "")
    if profile.spread is not None and profile.spread.high_s > _NOISY * max(profile.spread.low_s, 1e-9):
        yield "          steps vary too much for reliable plans: profile again while nothing else runs"
    yield f"forward   {_ms(profile.forward_s)}"
    yield f"backward  {_ms(profile.backward_s)}"
    yield f"update    {update}"
    half_s = _half_ready_s(profile.gradients)
    left_s = max(0.0, profile.backward_s - half_s)
    yield f"half of the gradient bytes are ready after {_ms(half_s)}, {_ms(left_s)} before backward ends"
    slowest = profile.slowest
    if slowest is not None and slowest.step_s > _STRAGGLES * step_s:
        yield (
            f"rank {slowest.rank} is a straggler: {_ms(slowest.step_s)} per step, {slowest.step_s / step_s - 1:.0%} "
            "over the median; the other ranks wait for it"
        )
    if profile.ranks:
        yield f"waiting for the slowest of {len(profile.ranks)} ranks costs {_ms(profile.jitter_s)} per step"


def _overhead_lines(profile: Profile) -> Iterator[str]:
    if profile.overheads is not None:
        overheads, nbytes = profile.overheads, profile.gradient_bytes
        yield (
            f"DDP copies gradients: {_ms(overheads.copy_in_s_per_byte * nbytes)} into its buckets, "
            f"{_ms(overheads.copy_out_s_per_byte * nbytes)} out of them, and {overheads.hook_s * 1e6:.0f} µs per bucket"
        )
        times = ", ".join(
            f"{name} {_ms(work.fixed_s + work.s_per_byte * nbytes)}" for name, work in overheads.work.items()
        )
        yield f"computation of each exchange, with all gradients in one bucket: {times}"
    if profile.buffers:
        buffers = ", ".join(f"{formatting.size(entry.bytes)} of {entry.dtype}" for entry in profile.buffers)
        yield f"buffers: {buffers}, broadcast before every forward"


def _memory_lines(activations: Activations, batch: int | None) -> Iterator[str]:
    samples = "a batch" if batch is None else f"{batch} sample{'s' if batch > 1 else ''}"
    largest, blocks = max(activations.batches), len(activations.blocks)
    kept, recomputed = (peak_bytes(activations, [mode] * blocks, largest) for mode in (KEEP, RECOMPUTE))
    yield (
        f"memory    forward and backward of {samples} take {format_bytes(kept)} in addition to weights and gradients; "
        + (
            f"{format_bytes(recomputed)} with all {blocks} blocks recomputed"
            if blocks
            else "the model has no blocks that could be recomputed"
        )
    )


def _half_ready_s(gradients: tuple[Gradient, ...]) -> float:
    """Return the time at which half of the gradient bytes are ready."""
    left = sum(gradient.bytes for gradient in gradients) / 2
    for gradient in gradients:
        left -= gradient.bytes
        if left <= 0:
            return gradient.ready_s
    return gradients[-1].ready_s


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds < 0.01 else formatting.step_time(seconds)
