"""Profile a model's backward from the steps that a running job makes anyway. `watch_backward` lists the limits. Passes
that only accumulate gradients count as forward of the step that uses them, because no communication runs behind them.
Passes whose gradients were dropped, by a GradScaler for example, are left out."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from syncline.errors import UsageError
from syncline.measure.step_watcher import Pass, StepWatcher
from syncline.measure.steps import Measured, StepMarks, Subject, merge_over, summarise
from syncline.records.profile import Profile


def watch_backward(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    steps: int = 20,
    skip: int = 2,
    model_name: str | None = None,
    batch: int | None = None,
) -> BackwardWatch:
    """Watch the steps of a model, to make a profile of them. Training is not affected.

    The call of `loss.backward()` is not visible: backward starts when the gradient of the model's output is ready, so
    the loss and its gradient count as forward. Copies into DDP's buckets, and communication on the same cores, are part
    of the gaps between gradients; `measure_backward` measures without them.

    Args:
        model: The object that the script calls: a plain, DDP or compiled model.
        optimizer: Its optimizer. Without it, a step ends with backward and the profile's `update_s` is 0.
        steps: Number of steps to keep: the last ones.
        skip: Number of first steps to leave out, in which memory is allocated, the model is compiled and DDP rebuilds
            its buckets.
        model_name: The name in the profile. By default that of the model's class.
        batch: The batch size in the profile.

    Returns:
        A context manager that watches while it is entered, and has a method `profile`.

    Raises:
        UsageError: `steps` or `skip` is out of range, or the model cannot be watched.

    Example:
        >>> with syncline.watch_backward(model, optimizer) as watch:  # doctest: +SKIP
        ...     train()
        >>> watch.profile().save("profile.json")  # doctest: +SKIP
    """
    if steps < 1 or skip < 0:
        raise UsageError(f"steps must be at least 1 and skip at least 0, not {steps} and {skip}")
    return BackwardWatch(Subject.of(model, model_name, batch), optimizer, steps, skip)


class BackwardWatch(StepWatcher):
    """Watches passes, gradients and updates of a model while it is entered, and makes a profile of them."""

    def __init__(
        self, subject: Subject, optimizer: Optimizer | None, steps: int, skip: int, last_pass_only: bool = False
    ) -> None:
        """Create a watch like `watch_backward`; `last_pass_only` leaves out passes that only accumulate gradients."""
        super().__init__(subject.device)
        self._last_pass_only = last_pass_only
        self._subject, self._optimizer, self._skip = subject, optimizer, skip
        self._steps: deque[StepMarks] = deque(maxlen=steps)
        self._seen = 0
        self._unused: list[Pass] = []  # passes whose gradients no update has used yet
        # A parameter with a gradient from the last of these passes, and the version of that gradient.
        self._last_gradient: tuple[nn.Parameter, int]
        self._update_start: Any = None

    def __enter__(self) -> BackwardWatch:
        if self._hooks:
            raise UsageError("this model is being watched already: enter the context once")
        model = self._subject.model
        if getattr(model, "_compiled_call_impl", None) is not None:
            instead = "model = torch.compile(model), or measure_backward"
            raise UsageError(f"model.compile() compiles a model's hooks with it, but a watch cannot be: use {instead}")
        self.watch(model, self._subject.ddp)
        # Python's garbage collector does not see what a parameter's hook refers to. A strong reference to a watch,
        # which knows its model, would keep the model alive for good.
        weak_ready = weakref.WeakMethod(self._gradient_ready)

        def ready(name: str) -> None:
            if (gradient_ready := weak_ready()) is not None:
                gradient_ready(name)

        self._hooks += self._subject.on_gradients(ready)
        if self._optimizer is not None:
            self._hooks.append(self._optimizer.register_step_pre_hook(lambda *_: self._update_began()))
            self._hooks.append(self._optimizer.register_step_post_hook(lambda *_: self._update_ended()))
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._unused = []

    @property
    def steps(self) -> int:
        """The number of steps that `profile` would use now."""
        return len(self._steps)

    def profile(self, group: dist.ProcessGroup | None = None) -> Profile:
        """Return a profile of the steps seen so far: their medians. Call it between steps.

        Args:
            group: If given, all ranks of this group call `profile` together and get one profile of them all.

        Raises:
            UsageError: No step was seen.
            MismatchError: The ranks have different models, or another rank could not make its profile.
        """
        return merge_over(group, self._measured)

    def _measured(self) -> Measured:
        if not self._steps:
            raise UsageError(self._why_nothing())
        what = f"medians of {len(self._steps)} steps of a running job"
        return summarise(self._subject, self.clock, self._steps, self._optimizer, what)

    def _why_nothing(self) -> str:
        if self._seen:
            return f"only {self._seen} steps were seen, and the first {self._skip} are left out: train a little longer"
        if not self.forward_count:
            return "the model's forward was not called while it was watched: watch the object that the script calls"
        if self._unused:
            return "the optimizer made no step with the gradients that were seen: is it the one that trains the model?"
        return (
            "no backward from the model's output was seen: a watched step must run forward and backward, the output "
            "must contain tensors that backward starts from, and compiled autograd must be off"
        )

    def _forward_began(self) -> None:
        before = self._forward
        super()._forward_began()
        if self._forward is before:
            return  # this forward is not watched
        if self._unused and not 0 <= self._last_gradient[1] == _version(self._last_gradient[0]):
            self._unused = []  # the gradients were zeroed or unscaled since then, so they are not used
        self._update_start = None  # a closure computes gradients inside the optimizer's step: the two are inseparable

    def _gradient_ready(self, name: str) -> None:
        if self._pass is not None:
            self._pass.ready.pop(name, None)  # checkpointing may complete a gradient in parts: the last one counts
            self._pass.ready[name] = self.clock.mark()

    def _pass_ended(self, ended: Pass) -> None:
        if not ended.ready:
            return
        if self._unused and self._unused[-1].forward.sync:
            self._unused = []  # it was exchanged, but no update followed
        self._unused.append(ended)
        parameter = self._subject.parameters[next(reversed(ended.ready))]
        self._last_gradient = parameter, _version(parameter)
        if self._optimizer is None and (ended.forward.sync or self._subject.ddp is None):
            self._add_step(None)

    def _update_began(self) -> None:
        self._update_start = self.clock.mark()

    def _update_ended(self) -> None:
        if self._update_start is not None and self._unused:
            self._add_step((self._update_start, self.clock.mark()))
        self._unused, self._update_start = [], None

    def _add_step(self, update: tuple[Any, Any] | None) -> None:
        *earlier, last = self._unused
        self._unused = []
        self._seen += 1
        if self._seen > self._skip:
            counted = [] if self._last_pass_only else earlier
            spans = [(each.forward.start, each.backward_end) for each in counted if each.forward is not last.forward]
            marks = last.forward.start, last.backward_start, last.backward_end, last.ready
            self._steps.append(StepMarks(*marks, update, spans))


def _version(parameter: nn.Parameter) -> int:
    """Return a number that changes when the gradient is written to; -1 without a gradient."""
    return -1 if parameter.grad is None else parameter.grad._version
