"""Measure when each gradient of a model becomes ready, by running steps for that purpose.

Every parameter gets a hook that marks when its gradient is complete. The model is measured without communication;
`overhead.py` measures what DDP adds. All ranks compute at the same time, because ranks on one host share its cores and
memory bandwidth in training, too.
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
    """Run `warmup + steps` training steps of `model` and return a profile with the medians of the measured steps.

    All ranks of the process group call this function together and get the same profile: medians over the ranks, and
    the times of each rank. The steps do not communicate. For a DDP model, the module inside is measured; for a
    compiled model, the compiled code. A parameter without a gradient counts as ready at 0, which is when DDP marks
    unused parameters.

    Afterwards all gradients are `None`, and buffers such as BatchNorm's averages have their old values. With an
    `optimizer`, the steps do train the model: parameters, buffers and optimizer state change. For a DDP model they are
    restored, because the replicas would differ otherwise.

    Args:
        model: The model, on one device. It may be wrapped in DDP or compiled.
        step: A function that runs one forward pass and returns the loss. It must not call `backward`, because ready
            times are counted from that call.
        steps: Number of measured steps.
        warmup: Number of steps before them.
        optimizer: If given, its `step()` is measured, too.
        model_name: The name in the profile. The default is the name of the model's class.
        batch: Examples per rank and step, stored in the profile.
        group: The ranks that are measured at the same time. The default is the group of a DDP model, else the default
            process group if there is one.
        on_progress: Called after each step with the number of finished steps and of all steps.

    Returns:
        The profile, the same on all ranks.

    Raises:
        UsageError: The model or the step cannot be measured.
        MismatchError: The ranks have different models, or another rank failed.

    Example:
        >>> profile = syncline.measure_backward(net, lambda net: loss_function(net(inputs), targets))
        >>> profile.save("profile.json")
    """
    if steps < 1 or warmup < 0:
        raise UsageError(f"steps must be at least 1 and warmup at least 0, not {steps} and {warmup}")
    subject = Subject.of(model)
    if subject.compiled_with_ddp and getattr(subject.ddp, "static_graph", False):
        raise UsageError(
            "a compiled DDP model with static_graph=True cannot run without communication: pass its module instead"
        )
    if group is None:
        group = subject.ddp.process_group if subject.ddp is not None else _default_group()
    how = describe_method(subject.device, f"medians of {steps} steps after {warmup} to warm up", optimizer)
    with contextlib.ExitStack() as around:
        if subject.device.type == "cuda":
            around.enter_context(torch.cuda.device(subject.device))
        if optimizer is None:
            around.enter_context(_restore_tensors(list(subject.model.buffers())))
        elif subject.ddp is not None:
            around.enter_context(_restore_training(subject.model, optimizer))
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
            times = [marks.read(clock) for marks in take(steps)]
            return summarise(subject, times, model_name=model_name, how=how, batch=batch)

        together(group, warm_up)
        return merge_over(group, measure)


@contextlib.contextmanager
def _timed(
    clock: Clock[Any], subject: Subject, step: Step, optimizer: torch.optim.Optimizer | None
) -> Iterator[Callable[[], StepMarks[Any]]]:
    """Yield a function that runs one step and returns its marks."""
    ready: dict[str, Any] = {}

    def marker(name: str) -> Callable[[Tensor], None]:
        def mark(_: Tensor) -> None:
            # With activation checkpointing this may be called more than once per step: the last call counts.
            ready.pop(name, None)
            ready[name] = clock.mark()

        return mark

    def run() -> StepMarks[Any]:
        nonlocal ready
        _clear_gradients(subject)
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
        _clear_gradients(subject)


def _default_group() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def _clear_gradients(subject: Subject) -> None:
    for p in subject.parameters.values():
        p.grad = None


@contextlib.contextmanager
def _restore_training(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    state = copy.deepcopy(optimizer.state_dict())
    with _restore_tensors([*model.parameters(), *model.buffers()]):
        try:
            yield
        finally:
            optimizer.load_state_dict(state)


@contextlib.contextmanager
def _restore_tensors(tensors: list[Tensor]) -> Iterator[None]:
    before = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, saved in before:
                tensor.copy_(saved)
