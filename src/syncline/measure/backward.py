"""Measure when each gradient of a model becomes ready, by running steps without communication for that purpose. All
ranks compute at the same time, because ranks on one host share its cores and memory bandwidth in training, too."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from syncline.dist.agreement import current_device
from syncline.errors import UsageError
from syncline.measure.preserve_state import Weights, restored_on_exit
from syncline.measure.steps import Clock, StepMarks, Subject, checked_loss, merge_over, run_on_all_ranks, summarise
from syncline.records.profile import Profile

Step = Callable[[nn.Module], Tensor]


def measure_backward(
    model: nn.Module | Subject,
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

    Afterwards gradients, random number generators and buffers such as BatchNorm's averages have their old values. With
    an `optimizer`, the steps do train the model: parameters, buffers and optimizer state change, and gradients are
    `None`. For a DDP model all are restored, because the replicas would differ otherwise.

    Args:
        model: The model, on one device. It may be wrapped in DDP or compiled. `syncline.fsdp.profile` passes sharded
            ones.
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
    subject = model if isinstance(model, Subject) else Subject.of(model, model_name, batch)
    # From torch.compile(DDP(net)), DDP cannot be removed.
    compiled_ddp = subject.ddp if subject.ddp is not None and subject.model is not subject.ddp.module else None
    if getattr(compiled_ddp, "static_graph", False):
        why = "a compiled DDP model with static_graph=True cannot run without communication"
        raise UsageError(f"{why}: pass its module instead")
    if group is None and subject.ddp is not None:
        group = subject.ddp.process_group
    elif group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    clock, marks = Clock(subject.device), list[StepMarks]()
    ready: dict[str, Any] = {}

    def mark(name: str) -> None:
        ready.pop(name, None)  # with activation checkpointing a gradient may be completed in parts: the last one counts
        ready[name] = clock.mark()

    def take(count: int) -> bytes:
        for _ in range(count):
            subject.model.zero_grad()
            ready.clear()
            start = clock.mark()
            loss = checked_loss(step(subject.model))
            backward_start = clock.mark()
            loss.backward()
            marks.append(StepMarks(start, backward_start, clock.mark(), dict(ready)))
            silent = [name for name, p in subject.parameters.items() if p.grad is not None and name not in ready]
            if silent:
                more = f" and {len(silent) - 1} more" if len(silent) > 1 else ""
                why = "but its hook did not fire, so its ready time cannot be measured"
                raise UsageError(f"{silent[0]}{more} got a gradient, {why}; turn compiled autograd off while measuring")
            if optimizer is not None:
                update_start = clock.mark()
                optimizer.step()
                marks[-1].update = (update_start, clock.mark())
            if on_progress is not None:
                on_progress(len(marks), warmup + steps)
        clock.settle()
        return b""

    with contextlib.ExitStack() as around:
        around.enter_context(current_device(subject.device))
        if optimizer is None or subject.ddp is not None:
            around.enter_context(restored_on_exit(subject.model, subject.device))
        if optimizer is not None and subject.ddp is not None:
            around.callback(Weights(dict(subject.model.named_parameters())).restore)
            around.callback(optimizer.load_state_dict, copy.deepcopy(optimizer.state_dict()))
        if compiled_ddp is not None:
            around.enter_context(compiled_ddp.no_sync())
        around.callback(subject.model.zero_grad)
        for hook in subject.on_gradients(mark):
            around.callback(hook.remove)
        run_on_all_ranks(group, lambda: take(warmup))
        run_on_all_ranks(group, lambda: take(steps))
    what = f"medians of {steps} steps after {warmup} to warm up"
    return merge_over(group, lambda: summarise(subject, clock, marks[warmup:], optimizer, what))
