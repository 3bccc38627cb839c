"""`syncline profile`: when each gradient of a model is ready, and what else a step costs without a network."""

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
from syncline.cluster import ClusterSpec, Rank, launch
from syncline.errors import SynclineError, UsageError
from syncline.layerwise.layer_optimizer import state_bytes
from syncline.layerwise.measure_blocks import measure_activations
from syncline.measure.backward import measure_backward
from syncline.measure.overhead import measure_overheads
from syncline.measure.steps import together
from syncline.models.target import Target, Task
from syncline.predict.memory import peak_bytes
from syncline.records.activations import KEEP, RECOMPUTE, Activations
from syncline.records.profile import Gradient, Profile
from syncline.report import formatting
from syncline.units import format_bytes

_STRAGGLES = 1.1
_NOISY = 3.0
"""Upper over lower quartile of a step."""
_TOP = 5


@dataclass(frozen=True)
class _Request:
    """What to measure, on each rank alike."""

    target: Target
    steps: int
    warmup: int
    memory: bool = False


def profile(
    target: str,
    *,
    output: Path | None,
    device: str | None,
    steps: int,
    warmup: int,
    batch: int | None,
    autocast: str | None,
    memory: bool,
    hosts: int | None,
    per_host: str,
    timeout: float,
) -> None:
    with options.one_line_errors("syncline profile"):
        if device not in (None, "cpu", "cuda"):
            raise UsageError(f"--device {device!r}: use cpu or cuda")
        if not 0 < timeout < 1e9:
            raise UsageError(f"--timeout {timeout:g}: a run needs a positive number of seconds")
        request = _Request(Target(target, device, batch, autocast), steps, warmup, memory)
        under_torchrun = options.under_torchrun()
        first = options.is_first()
        if first:
            screen.check_writable(output)
        with screen.progress(f"Measuring {target}", shown=first) as on_progress:
            if hosts is not None:
                if under_torchrun:
                    raise UsageError("--hosts starts ranks of its own, and torchrun has started this one: choose one")
                spec = options.cluster_spec(ClusterOptions(hosts, per_host, device=device or "cpu"))
                found = _on_emulated_hosts(spec, request, timeout, on_progress)
            elif per_host != "1":
                raise UsageError("--per-host is for emulated hosts: add --hosts")
            else:
                with options.torchrun_group(device or "cpu") if under_torchrun else nullcontext():
                    found = _measure(request, options.local_device(device or "cpu"), on_progress)
        if first:
            try:
                if output is not None:
                    found.save(output)
            finally:  # as in the bench: what was measured is shown in any case
                _show(found, output)


def _measure(request: _Request, device: torch.device, on_progress: Callable[[int, int], None] | None) -> Profile:
    """On one rank; with a default process group, on all its ranks together."""
    group = dist.group.WORLD if dist.is_initialized() else None
    made = []

    def build() -> bytes:
        made.append(request.target.build(device))
        return b""

    together(group, build)
    task = made[0]
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
    """At the batch that is profiled and at half of it, where that can be asked for: the rest is a line."""
    steps = {task.batch or 1: task.step}
    if task.batch is not None and task.batch > 1:
        half = task.batch // 2
        steps[half] = dataclasses.replace(target, batch=half).build(device).step
    found = measure_activations(task.model, steps)
    per_element = 0.0 if task.optimizer is None else state_bytes(task.optimizer)
    return msgspec.structs.replace(found, optimizer_bytes=per_element)


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

    importlib.import_module("torch._dynamo")  # DDP imports it, and that takes seconds: once here, not in every rank
    # Nothing is sent while steps are measured, so links need no shape.
    answers = launch(spec, main, deadline_s=timeout_s, on_event=lambda _rank, event: on_progress(*event), shaped=False)
    for answer in answers:
        if answer.get("wrong_use"):
            raise UsageError(answer["error"])
    # A rank that was told of another's failure says less than that one.
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
    for gradient in sorted(profile.gradients, key=lambda one: -one.bytes)[:_TOP]:
        share = gradient.ready_s / profile.backward_s if profile.backward_s else 0.0
        table.add_row(gradient.name, formatting.size(gradient.bytes), _ms(gradient.ready_s), f"{share:.0%}")
    say(table)
    say()
    for line in _beside_lines(profile):
        say(line, style="dim")
    if profile.activations is not None:
        for line in _memory_lines(profile.activations, profile.batch):
            say(line)
    if output is None:
        say("--output FILE keeps this for syncline predict", style="dim")


def _step_lines(profile: Profile) -> Iterator[str]:
    step_s = profile.step_s
    # Not around the sum of medians: on CUDA, what forward takes longer backward often takes less.
    low_high = profile.spread and f"{profile.spread.low_s * 1e3:.1f}–{profile.spread.high_s * 1e3:.1f}"
    update = _ms(profile.update_s) if profile.update_s else "not measured"
    yield f"step      {_ms(step_s)}" + (f" (quartiles of whole steps: {low_high})" if low_high else "")
    if profile.spread is not None and profile.spread.high_s > _NOISY * max(profile.spread.low_s, 1e-9):
        yield "          they vary so much that plans from this are guesses: profile again while nothing else runs"
    yield f"forward   {_ms(profile.forward_s)}"
    yield f"backward  {_ms(profile.backward_s)}"
    yield f"update    {update}"
    half_s = _half_ready_s(profile.gradients)
    left_s = max(0.0, profile.backward_s - half_s)
    yield f"half of the bytes are ready after {_ms(half_s)}; {_ms(left_s)} of backward are left"
    slowest = profile.slowest
    if slowest is not None and slowest.step_s > _STRAGGLES * step_s:
        yield (
            f"rank {slowest.rank} is slow: {_ms(slowest.step_s)} a step, {slowest.step_s / step_s - 1:.0%} over the "
            "median; the others wait"
        )
    if profile.ranks:
        yield f"waiting for whoever is slowest costs {_ms(profile.jitter_s)} a step, over {len(profile.ranks)} ranks"


def _beside_lines(profile: Profile) -> Iterator[str]:
    if profile.overheads is not None:
        over, nbytes = profile.overheads, profile.gradient_bytes
        yield (
            f"DDP's copies: {_ms(over.copy_in_s_per_byte * nbytes)} into its buckets, "
            f"{_ms(over.copy_out_s_per_byte * nbytes)} out of them; {over.hook_s * 1e6:.0f} µs per bucket"
        )
        work = ", ".join(f"{name} {_ms(one.fixed_s + one.s_per_byte * nbytes)}" for name, one in over.work.items())
        yield f"exchanges' own work on one bucket: {work}"
    if profile.buffers:
        buffers = ", ".join(f"{formatting.size(entry.bytes)} of {entry.dtype}" for entry in profile.buffers)
        yield f"buffers: {buffers}, broadcast before every forward"


def _memory_lines(found: Activations, batch: int | None) -> Iterator[str]:
    samples = "a batch" if batch is None else f"{batch} sample{'s' if batch > 1 else ''}"
    batch = max(found.batches)
    kept, again = (peak_bytes(found, [way] * len(found.blocks), batch) for way in (KEEP, RECOMPUTE))
    yield (
        f"memory    forward and backward of {samples} take {format_bytes(kept)} beside weights and gradients; "
        + (
            f"{format_bytes(again)} with all {len(found.blocks)} blocks recomputed"
            if found.blocks
            else "it has no blocks that could be recomputed"
        )
    )


def _half_ready_s(gradients: tuple[Gradient, ...]) -> float:
    """When half of the bytes are there."""
    left = sum(gradient.bytes for gradient in gradients) / 2
    for gradient in gradients:
        left -= gradient.bytes
        if left <= 0:
            return gradient.ready_s
    return gradients[-1].ready_s


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds < 0.01 else formatting.step_time(seconds)
