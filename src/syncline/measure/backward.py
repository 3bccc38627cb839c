"""Measures when each gradient of a model becomes ready, from steps that are made for it.

Every parameter gets a hook that marks the moment its gradient is complete. The model is measured without
communication; what DDP adds on top is measured in `overhead.py`. Where there are several ranks, all compute at the
same time: on a shared host they share its cores and its memory's bandwidth, as they do in training.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from syncline.errors import UsageError
from syncline.measure.steps import (
    Clock,
    Measured,
    StepMarks,
    Subject,
    checked_loss,
    clock_for,
    describe_method,
    merge_over,
    summarise,
    together,
)
from syncline.records.profile import Profile

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
    group: dist.ProcessGroup | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Profile:
    """Run `warmup + steps` training steps of `model` and return the medians of the measured ones.

    `step(model)` runs one forward and returns the loss; it must not call `backward`. Backward is called
    here, because only so is its start known: offsets count from that call. Of a DDP model the module inside
    is measured, without its exchange; of a compiled one the compiled code.

    With a process group (default: the model's, if it is a DDP model, else the default one where there is one) all its
    ranks call this together and get the same profile: medians over the ranks, and each rank's own. They do not
    communicate while they are measured.

    A parameter that gets no gradient counts as ready at 0, which is when DDP marks unused parameters.
    Gradients are `None` afterwards and buffers (BatchNorm's averages) are put back. With an `optimizer` the
    steps are real ones: `update_s` is measured, and parameters, buffers and optimizer state move on. Only those of a
    DDP model are put back then, because its replicas would differ.
    """
    if steps < 1 or warmup < 0:
        raise UsageError(f"steps must be at least 1 and warmup at least 0, not {steps} and {warmup}")
    subject = Subject.of(model)
    if subject.compiled_with_ddp and getattr(subject.ddp, "static_graph", False):
        raise UsageError("a compiled DDP model with static_graph cannot run without communication: measure the module")
    if group is None:
        group = subject.ddp.process_group if subject.ddp is not None else _default_group()
    how = describe_method(subject.device, f"medians of {steps} steps after {warmup} to warm up", optimizer)
    with contextlib.ExitStack() as around:
        if subject.device.type == "cuda":
            around.enter_context(torch.cuda.device(subject.device))
        if optimizer is None:
            around.enter_context(_buffers_kept(subject.model))
        elif subject.ddp is not None:
            around.enter_context(_training_kept(subject.model, optimizer))
        if subject.compiled_with_ddp and subject.ddp is not None:
            around.enter_context(subject.ddp.no_sync())
        clock = clock_for(subject.device)
        run = around.enter_context(_timed(clock, subject, step, optimizer))
        done = 0

        def take(count: int) -> list[StepMarks[Any]]:
            nonlocal done
            marks = []
            for _ in range(count):
                marks.append(run())
                done += 1
                if on_progress is not None:
                    on_progress(done, warmup + steps)
            clock.settle()
            return marks

        def warm_up() -> bytes:
            take(warmup)
            return b""

        def measure() -> Measured:
            times = [one.read(clock) for one in take(steps)]
            return summarise(subject, times, model_name=model_name, how=how, batch=batch)

        together(group, warm_up)
        return merge_over(group, measure)


@contextlib.contextmanager
def _timed(
    clock: Clock[Any], subject: Subject, step: Step, optimizer: torch.optim.Optimizer | None
) -> Iterator[Callable[[], StepMarks[Any]]]:
    """A function that makes one step and marks its moments."""
    ready: dict[str, Any] = {}

    def marker(name: str) -> Callable[[Tensor], None]:
        def mark(_: Tensor) -> None:
            # Checkpointing may complete a gradient in parts: the last one counts, for the order as well.
            ready.pop(name, None)
            ready[name] = clock.mark()

        return mark

    def run() -> StepMarks[Any]:
        nonlocal ready
        _drop_gradients(subject)
        ready = {}
        start = clock.mark()
        loss = checked_loss(step(subject.model))
        backward_start = clock.mark()
        loss.backward()
        backward_end = clock.mark()
        subject.refuse_silent(
            [name for name, p in subject.parameters.items() if p.grad is not None and name not in ready]
        )
        marks = StepMarks(start, backward_start, backward_end, ready)
        if optimizer:
            update_start = clock.mark()
            optimizer.step()
            marks.update = (update_start, clock.mark())
        return marks

    hooks = [p.register_post_accumulate_grad_hook(marker(name)) for name, p in subject.parameters.items()]
    try:
        yield run
    finally:
        for hook in hooks:
            hook.remove()
        _drop_gradients(subject)


def _default_group() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def _drop_gradients(subject: Subject) -> None:
    for p in subject.parameters.values():
        p.grad = None


@contextlib.contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    with _tensors_kept(list(model.buffers())):
        yield


@contextlib.contextmanager
def _training_kept(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    state = copy.deepcopy(optimizer.state_dict())
    with _tensors_kept([*model.parameters(), *model.buffers()]):
        try:
            yield
        finally:
            optimizer.load_state_dict(state)


@contextlib.contextmanager
def _tensors_kept(tensors: list[Tensor]) -> Iterator[None]:
    before = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, saved in before:
                tensor.copy_(saved)
