"""How fast a DDP model's steps are, all of them, as a running script makes them.

A step is the forward and backward whose gradients are exchanged, up to the moment at which all of them have been.
Four moments of it are marked: forward starts, backward reaches the model's output, the last gradient is there, DDP has
waited for its buckets. What lies between the last two is communication that computation did not hide. Passes that only
accumulate gradients lie between steps.

On CUDA the moments are events on the stream that computes: nothing waits for the device until somebody reads.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.hooks import RemovableHandle

from syncline.measure.backward_watch import in_backward, tensors_in
from syncline.measure.hooks import Unseen
from syncline.measure.steps import Clock, clock_for


@dataclass(frozen=True)
class Moments:
    """Of one step: seconds on the host's monotonic clock."""

    number: int
    """Counted from 0."""
    start_s: float
    backward_s: float
    backward_end_s: float
    end_s: float
    between_s: float | None
    """Since the end of the step before."""

    @property
    def step_s(self) -> float:
        return self.end_s - self.start_s


@dataclass
class _Marks:
    start: Any
    started_s: float
    number: int = -1
    backward: Any = None
    backward_end: Any = None
    end: Any = None

    def read(self, clock: Clock[Any], before: tuple[Any, float] | None) -> Moments:
        """`before`: the end of the last step, as it was marked and in seconds. A host runs ahead of its device, so a
        step begins so long after it as the device says. Events of several streams may differ by less than nothing."""
        between_s = None if before is None else max(0.0, clock.seconds(before[0], self.start))
        start_s = self.started_s if before is None or between_s is None else before[1] + between_s
        times = [start_s]
        for mark in (self.backward, self.backward_end, self.end):
            times.append(max(times[-1], start_s + clock.seconds(self.start, mark)))
        return Moments(self.number, times[0], times[1], times[2], times[3], between_s)


class Pacer:
    """Marks the steps of a model from now on; `close` ends it."""

    def __init__(self, ddp: DDP, device: torch.device, on_step: Callable[[], None] | None = None) -> None:
        """`on_step` is called at the end of each step, inside backward: it may make notes, and nothing else."""
        self.steps = 0
        """That have been exchanged so far: the same on all ranks, because an exchange takes all of them."""
        self.forwards = 0
        """With gradients."""
        self._clock = clock_for(device)
        self._on_step = on_step
        self._before: tuple[Any, float] | None = None
        self._forward: _Marks | None = None
        self._now: _Marks | None = None
        self._forwards: list[_Marks] = []
        """That this backward goes through."""
        self._unread: deque[_Marks] = deque()
        self._hooks: list[RemovableHandle] = [
            ddp.register_forward_pre_hook(Unseen(lambda *_: self._forward_began())),
            ddp.register_forward_hook(Unseen(lambda module, _, output: self._forward_ended(module, output))),
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def read(self, *, wait: bool = False) -> list[Moments]:
        """Steps that ended since the last time; with `wait`, also those that a device is still at."""
        if wait:
            self._clock.settle()
        done = []
        while self._unread and (wait or _passed(self._unread[0].end)):
            marks = self._unread.popleft()
            done.append(marks.read(self._clock, self._before))
            self._before = (marks.end, done[-1].end_s)
        return done

    def _forward_began(self) -> None:
        if not torch.is_grad_enabled() or in_backward():
            return
        self._now = None  # of a backward that failed
        self._forward = _Marks(self._clock.mark(), time.monotonic())

    def _forward_ended(self, ddp: Any, output: Any) -> None:
        if self._forward is None or not torch.is_grad_enabled() or in_backward():
            return
        marks, self._forward = self._forward, None
        self.forwards += 1
        trained = next((parameter for parameter in ddp.parameters() if parameter.requires_grad), None)
        if not ddp.require_backward_grad_sync or trained is None:
            return
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:  # a hook on a parameter that is handed out would stay for good
                tensor.register_hook(lambda _, marks=marks: self._backward_reached(marks, trained))

    def _backward_reached(self, marks: _Marks, trained: Tensor) -> None:
        """DDP exchanges once per forward, in the first backward that accumulates gradients in parameters."""
        if not self._hooks or marks.end is not None or not _accumulates(trained):
            return
        if self._now is None:
            self._forwards = []
            marks.backward = self._clock.mark()
            self._now = marks
            # Before DDP's own, which waits for communication: callbacks run in the order in which they were queued.
            _queue(self._backward_ended)
        elif marks.started_s < self._now.started_s:  # one backward through several forwards began with the first
            marks.backward, self._now = self._now.backward, marks
        self._forwards.append(marks)

    def _backward_ended(self) -> None:
        if self._now is not None:
            self._now.backward_end = self._clock.mark()
            _queue(self._step_ended)  # after DDP's, which is queued by now

    def _step_ended(self) -> None:
        marks, self._now = self._now, None
        if marks is None or not self._hooks:
            return
        marks.number, end = self.steps, self._clock.mark()
        for one in self._forwards:
            one.end = end
        self._forwards = []
        self.steps += 1
        self._unread.append(marks)
        if self._on_step is not None:
            self._on_step()


def _accumulates(parameter: Tensor) -> bool:
    """Whether the backward that runs now leaves something in `.grad`, as `autograd.grad` does not."""
    will_run = getattr(torch._C, "_will_engine_execute_node", None)  # private: without it, every backward does
    if will_run is None or not parameter.requires_grad:
        return parameter.requires_grad
    with torch.enable_grad():
        node: Any = parameter.expand_as(parameter).grad_fn
    return bool(will_run(node.next_functions[0][0]))


def _queue(callback: Callable[[], None]) -> None:
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def _passed(mark: Any) -> bool:
    return bool(mark.query()) if isinstance(mark, torch.cuda.Event) else True
