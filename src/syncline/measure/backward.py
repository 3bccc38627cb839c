"""Measures when each gradient of a model becomes ready.

Every parameter gets a hook that marks the moment its gradient is complete. On CUDA a mark is an event put
on the stream that computed the gradient, and all events are read after the last step: waiting for the
device at each parameter would stretch the very gaps that communication is to hide in, and waiting between
steps would keep the host from running ahead as it does in training.

The model is measured alone, without communication. What DDP adds on top is not part of these numbers.
"""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from syncline.errors import UsageError
from syncline.measure.profile import Gradient, Profile

Mark = TypeVar("Mark")
Step = Callable[[nn.Module], Tensor]


def measure_backward(
    model: nn.Module,
    step: Step,
    steps: int = 20,
    warmup: int = 5,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    model_name: str | None = None,
    batch: int | None = None,
) -> Profile:
    """Run `warmup + steps` training steps of `model` and return the medians of the measured ones.

    `step(model)` runs one forward and returns the loss; it must not call `backward`. Backward is called
    here, because only so is its start known: offsets count from that call. Of a DDP model the module inside
    is measured, without its exchange.

    A parameter that gets no gradient counts as ready at 0, which is when DDP marks unused parameters.
    Gradients are `None` afterwards and buffers (BatchNorm's averages) are put back. With an `optimizer` the
    steps are real ones: `update_s` is measured, and parameters, buffers and optimizer state move on.
    """
    if steps < 1 or warmup < 0:
        raise UsageError(f"steps must be at least 1 and warmup at least 0, not {steps} and {warmup}")
    if isinstance(model, DistributedDataParallel):
        model = model.module
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    device = _only_device(parameters)
    with contextlib.nullcontext() if optimizer else _buffers_kept(model):
        if device.type == "cuda":
            with torch.cuda.device(device):
                times = _timed_steps(_CudaClock(), model, step, parameters, optimizer, steps, warmup)
        else:
            times = _timed_steps(_HostClock(), model, step, parameters, optimizer, steps, warmup)
    return Profile(
        model=model_name or type(model).__name__,
        gradients=_in_ready_order(parameters, times),
        forward_s=_median_s([one.forward_s for one in times]),
        backward_s=_median_s([one.backward_s for one in times]),
        update_s=_median_s([one.update_s for one in times]) if optimizer else 0.0,
        device=device.type,
        where=describe_hardware(device),
        how=_describe_method(device, steps, warmup, optimizer),
        steps=steps,
        batch=batch,
    )


class _Clock(Protocol[Mark]):
    """Marks moments now and tells the seconds between them later."""

    def mark(self) -> Mark: ...
    def seconds(self, start: Mark, end: Mark) -> float: ...
    def settle(self) -> None:
        """Wait until all marks made so far can be read."""


class _HostClock:
    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def settle(self) -> None:
        pass


class _CudaClock:
    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end)) / 1e3

    def settle(self) -> None:
        torch.cuda.synchronize()


@dataclass
class _StepMarks(Generic[Mark]):
    """The moments of one step, as the clock marked them."""

    start: Mark
    backward_start: Mark
    backward_end: Mark
    update_end: Mark
    ready: dict[str, Mark]


@dataclass(frozen=True)
class _StepTimes:
    """The moments of one step in seconds; `ready_s` counts from the start of backward."""

    forward_s: float
    backward_s: float
    update_s: float
    ready_s: dict[str, float] = field(default_factory=dict)


def _timed_steps(
    clock: _Clock[Mark],
    model: nn.Module,
    step: Step,
    parameters: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    steps: int,
    warmup: int,
) -> list[_StepTimes]:
    ready: dict[str, Mark] = {}

    def marker(name: str) -> Callable[[Tensor], None]:
        def mark(_: Tensor) -> None:
            ready[name] = clock.mark()  # checkpointing may complete a gradient in parts: the last one counts

        return mark

    hooks = [p.register_post_accumulate_grad_hook(marker(name)) for name, p in parameters.items()]
    marks: list[_StepMarks[Mark]] = []
    try:
        for index in range(warmup + steps):
            if index == warmup:
                clock.settle()
            _drop_gradients(parameters)
            ready = {}
            start = clock.mark()
            loss = step(model)
            if not isinstance(loss, Tensor):
                raise UsageError("step must return the loss as a tensor and leave backward to measure_backward")
            backward_start = clock.mark()
            loss.backward()
            backward_end = clock.mark()
            if optimizer:
                optimizer.step()
            if index >= warmup:
                marks.append(_StepMarks(start, backward_start, backward_end, clock.mark(), ready))
        clock.settle()
    finally:
        for hook in hooks:
            hook.remove()
        _drop_gradients(parameters)
    return [
        _StepTimes(
            forward_s=clock.seconds(one.start, one.backward_start),
            backward_s=clock.seconds(one.backward_start, one.backward_end),
            update_s=clock.seconds(one.backward_end, one.update_end),
            ready_s={name: clock.seconds(one.backward_start, mark) for name, mark in one.ready.items()},
        )
        for one in marks
    ]


def _in_ready_order(parameters: dict[str, nn.Parameter], times: list[_StepTimes]) -> tuple[Gradient, ...]:
    """Medians per parameter, sorted; parameters with equal medians keep the order of the last step."""
    arrival = {name: place for place, name in enumerate(times[-1].ready_s)}
    ready_s = {
        name: _median_s([one.ready_s[name] for one in times if name in one.ready_s] or [0.0]) for name in parameters
    }
    order = sorted(parameters, key=lambda name: (ready_s[name], arrival.get(name, -1)))
    return tuple(
        Gradient(
            name=name,
            shape=tuple(parameters[name].shape),
            dtype=str(parameters[name].dtype).removeprefix("torch."),
            bytes=parameters[name].numel() * parameters[name].element_size(),
            ready_s=ready_s[name],
        )
        for name in order
    )


def _median_s(values: list[float]) -> float:
    """To the nanosecond, finer than any clock here; CUDA events of two streams may differ by less than 0."""
    return max(0.0, round(statistics.median(values), 9))


def _only_device(parameters: dict[str, nn.Parameter]) -> torch.device:
    devices = {p.device for p in parameters.values()}
    if not devices:
        raise UsageError("the model has no parameter that requires a gradient")
    if len(devices) > 1:
        raise UsageError(f"the model must sit on one device, not on {', '.join(sorted(map(str, devices)))}")
    device = devices.pop()
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"can measure on cpu and cuda, not on {device.type}")
    return device


def _drop_gradients(parameters: dict[str, nn.Parameter]) -> None:
    for p in parameters.values():
        p.grad = None


@contextlib.contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, saved in before:
                buffer.copy_(saved)


def describe_hardware(device: torch.device) -> str:
    """The processor that did the work, in words; no host names, since profiles are shared."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} logical cores"


def _describe_method(device: torch.device, steps: int, warmup: int, optimizer: torch.optim.Optimizer | None) -> str:
    clock = "CUDA events" if device.type == "cuda" else f"host clock, {torch.get_num_threads()} threads"
    update = type(optimizer).__name__ if optimizer else "no optimizer"
    return f"medians of {steps} steps after {warmup} to warm up, {clock}, {update}, torch {torch.__version__}"
