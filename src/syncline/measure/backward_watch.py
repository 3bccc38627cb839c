"""Measures a model's backward from the steps that a running job makes anyway.

    with watch_backward(model, optimizer) as watch:
        train_for_a_while()
    watch.profile().save("profile.json")

What it cannot see:

- where `loss.backward()` is called: backward starts when the gradient of the model's output is there, so the loss and
  its gradient count as forward;
- computation apart from communication: copies into DDP's buckets, and what communication takes of the same cores, are
  part of the gaps between gradients. `measure_backward` measures without them;
- the broadcast of buffers in `torch.compile(DDP(net))`, which counts as forward there, and not elsewhere.

Passes that only accumulate gradients count as forward of the step that uses them: nothing can hide behind them. Passes
whose gradients were thrown away, by a GradScaler for one, are left out.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from syncline.errors import UsageError
from syncline.measure.hooks import Unseen
from syncline.measure.steps import (
    Measured,
    StepMarks,
    Subject,
    clock_for,
    describe_method,
    merge_over,
    summarise,
)
from syncline.records.profile import Profile


def watch_backward(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    steps: int = 20,
    skip: int = 2,
    model_name: str | None = None,
    batch: int | None = None,
) -> BackwardWatch:
    """Watches the steps of a plain, DDP or compiled `model` until the returned context is left; training is the same.

    Pass the object that the script calls. Keeps the last `steps` steps, from number `skip` on: the first ones allocate,
    compile and rebuild DDP's buckets. Without an `optimizer` a step ends with backward, and `update_s` is 0.
    """
    if steps < 1 or skip < 0:
        raise UsageError(f"steps must be at least 1 and skip at least 0, not {steps} and {skip}")
    return BackwardWatch(Subject.of(model), optimizer, steps, skip, model_name, batch)


@dataclass
class _Forward:
    number: int
    start: Any
    sync: bool
    """Whether its backward is exchanged; of a plain module it is not."""


@dataclass
class _Pass:
    """One forward and backward; its end comes last."""

    forward: _Forward
    backward_start: Any
    ready: dict[str, Any] = field(default_factory=dict)
    backward_end: Any = None
    left: tuple[nn.Parameter, int] | None = None
    """One of the parameters, and the version of its gradient when backward ended."""

    def is_kept(self) -> bool:
        """Whether its gradients are still there, as backward left them: nobody zeroed or unscaled them."""
        if self.left is None:
            return False
        parameter, version = self.left
        return parameter.grad is not None and parameter.grad._version == version


class BackwardWatch:
    """Sees the steps of a model from `__enter__` to `__exit__`, and tells what it saw."""

    def __init__(
        self,
        subject: Subject,
        optimizer: torch.optim.Optimizer | None,
        steps: int,
        skip: int,
        model_name: str | None = None,
        batch: int | None = None,
        *,
        last_pass_only: bool = False,
    ) -> None:
        """`last_pass_only`: without the passes that only accumulate gradients, which are then no part of a step."""
        self._last_pass_only = last_pass_only
        self._subject, self._optimizer, self._skip = subject, optimizer, skip
        self._model_name, self._batch = model_name, batch
        self._clock = clock_for(subject.device)
        self._steps: deque[StepMarks[Any]] = deque(maxlen=steps)
        self._seen = 0
        self._forwards = 0
        self._start: Any = None
        self._now: _Pass | None = None
        self._waiting: list[_Pass] = []
        self._update_start: Any = None
        self._versions: dict[str, int | None] | None = None
        self._silent: list[str] | None = None
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> BackwardWatch:
        if self._hooks:
            raise UsageError("this model is being watched already: enter the context once")
        model = self._subject.model
        if getattr(model, "_compiled_call_impl", None) is not None:
            raise UsageError(
                "model.compile() compiles a model's hooks with it, and a watch cannot be compiled: use "
                "model = torch.compile(model), or measure_backward"
            )
        self._hooks = [
            model.register_forward_pre_hook(Unseen(lambda *_: self._forward_began())),
            model.register_forward_hook(Unseen(lambda _module, _inputs, output: self._forward_ended(output))),
        ]
        # What a parameter's hook holds Python cannot see: a watch that knows its model would keep it for good.
        watch = weakref.ref(self)

        def ready(parameter: Tensor, name: str) -> None:
            if (watching := watch()) is not None:
                watching._gradient(name, parameter)

        for name, p in self._subject.parameters.items():
            self._hooks.append(p.register_post_accumulate_grad_hook(lambda p, name=name: ready(p, name)))
        if self._optimizer is not None:
            self._hooks.append(self._optimizer.register_step_pre_hook(lambda *_: self._update_began()))
            self._hooks.append(self._optimizer.register_step_post_hook(lambda *_: self._update_ended()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._now, self._start, self._waiting = None, None, []

    @property
    def steps(self) -> int:
        """How many steps `profile` would use now."""
        return len(self._steps)

    def profile(self, group: dist.ProcessGroup | None = None) -> Profile:
        """The medians of the steps seen so far, at any time between steps.

        With a process group all its ranks call this together, and get one profile of them all.
        """
        return merge_over(group, self._measured)

    def _measured(self) -> Measured:
        self._subject.refuse_silent(self._silent or [])
        if not self._steps:
            raise UsageError(self._why_nothing())
        self._clock.settle()
        times = [marks.read(self._clock) for marks in self._steps]
        what = f"medians of {len(times)} steps of a running job"
        how = describe_method(self._subject.device, what, self._optimizer)
        return summarise(self._subject, times, model_name=self._model_name, how=how, batch=self._batch)

    def _why_nothing(self) -> str:
        if self._seen:
            return f"only {self._seen} steps were seen, and the first {self._skip} are left out: train a little longer"
        if not self._forwards:
            return "the model's forward was not called while it was watched: watch the object that the script calls"
        if self._waiting:
            return "the optimizer made no step with the gradients that were seen: is it the one that trains the model?"
        return (
            "no backward from the model's output was seen: a step that is watched runs forward and backward, as in "
            "training; and the model's output must hold tensors that backward starts from, "
            "without compiled autograd"
        )

    def _forward_began(self) -> None:
        if not torch.is_grad_enabled() or not self._hooks:
            return
        if self._now is not None and in_backward():
            return  # checkpointing computes it again
        self._now = None  # of a backward that failed
        if self._waiting and not self._waiting[-1].is_kept():
            self._waiting = []
        self._update_start = None  # a closure computes gradients inside the optimizer's step: not to be told apart
        self._start = self._clock.mark()

    def _forward_ended(self, output: Any) -> None:
        if self._start is None or not torch.is_grad_enabled():
            return
        ddp = self._subject.ddp
        sync = ddp is not None and bool(ddp.require_backward_grad_sync)
        forward = _Forward(self._forwards, self._start, sync)
        self._forwards += 1
        self._start = None
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:  # a hook on a parameter that is handed out would stay for good
                tensor.register_hook(lambda _, forward=forward: self._backward_reached(forward))

    def _backward_reached(self, forward: _Forward) -> None:
        if not self._hooks:
            return
        if self._now is None:
            if self._silent is None:
                self._versions = self._gradient_versions()
            self._now = _Pass(forward, self._clock.mark())
            # Before DDP's own callback, which waits for communication: callbacks run in the order they were queued.
            queue: Any = torch.autograd.Variable._execution_engine
            queue.queue_callback(self._backward_ended)
        elif forward.number < self._now.forward.number:
            self._now.forward = forward  # one backward through several forwards began with the first of them

    def _gradient(self, name: str, parameter: Tensor) -> None:
        if self._now is not None:
            self._now.ready.pop(name, None)  # checkpointing may complete a gradient in parts: the last one counts
            self._now.ready[name] = self._clock.mark()

    def _backward_ended(self) -> None:
        ended, self._now = self._now, None
        if ended is None or not self._hooks:
            return
        ended.backward_end = self._clock.mark()
        self._find_silent(ended)
        last = next(reversed(ended.ready), None)
        if last is None:
            return
        parameter = self._subject.parameters[last]
        ended.left = (parameter, parameter.grad._version) if parameter.grad is not None else None
        if self._waiting and self._waiting[-1].forward.sync:
            self._waiting = []  # exchanged already, and not followed by an update
        self._waiting.append(ended)
        if self._optimizer is None and (ended.forward.sync or self._subject.ddp is None):
            self._step_ended(None)

    def _update_began(self) -> None:
        self._update_start = self._clock.mark()

    def _update_ended(self) -> None:
        if self._update_start is not None and self._waiting:
            self._step_ended((self._update_start, self._clock.mark()))
        self._waiting, self._update_start = [], None

    def _step_ended(self, update: tuple[Any, Any] | None) -> None:
        *earlier, last = self._waiting
        self._waiting = []
        self._seen += 1
        if self._seen > self._skip:
            spans = [(one.forward.start, one.backward_end) for one in earlier if one.forward is not last.forward]
            spans = [] if self._last_pass_only else spans
            self._steps.append(
                StepMarks(last.forward.start, last.backward_start, last.backward_end, last.ready, update, spans)
            )

    def _gradient_versions(self) -> dict[str, int | None]:
        return {name: None if p.grad is None else p.grad._version for name, p in self._subject.parameters.items()}

    def _find_silent(self, ended: _Pass) -> None:
        """Once: what got a gradient in the first pass without a word from its hook."""
        if self._silent is None and self._versions is not None:
            after = self._gradient_versions()
            self._silent = [
                name for name, before in self._versions.items() if after[name] != before and name not in ended.ready
            ]
        self._versions = None


def in_backward() -> bool:
    current = getattr(torch._C, "_current_graph_task_id", None)  # private: without it nothing is computed again
    return current is not None and int(current()) != -1


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Those in a model's output, however it is nested."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors_in(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from tensors_in(value)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for entry in dataclasses.fields(output):
            yield from tensors_in(getattr(output, entry.name))
