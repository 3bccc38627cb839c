"""Watch the steps of a model while a script trains it: when they begin and end, and how long they take. A pass is one
backward and the forward before it. If DDP exchanges its gradients, the pass is a step, which ends when DDP has waited
for its buckets. If updates are exchanged, a step has one or more passes and ends after the optimizer's step. On CUDA,
marks are events: nothing waits for the device until the times are read."""

from __future__ import annotations

import dataclasses
import itertools
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.hooks import RemovableHandle

from syncline.measure.hooks import Unseen
from syncline.measure.steps import Clock


@dataclass(eq=False)
class Forward:
    """One forward with gradients."""

    number: int
    start: Any
    started_s: float  # on the host's monotonic clock
    sync: bool  # DDP exchanges its gradients, or the optimizer its updates; a plain module has no DDP
    nested: bool  # it runs inside a backward, as under checkpointing
    exchanged: bool = False  # DDP has exchanged its gradients, which it does once per forward

    def will_exchange(self, trained: Tensor | None) -> bool:
        """Return whether DDP will exchange the gradients of this forward in the current backward."""
        if not self.sync or self.nested or self.exchanged or trained is None or not trained.requires_grad:
            return False
        with torch.enable_grad():
            node: Any = trained.expand_as(trained).grad_fn
        # Whether this backward writes to `.grad`: `autograd.grad` does not. Private: without it, every backward counts.
        writes = getattr(torch._C, "_will_engine_execute_node", lambda _: True)
        return bool(writes(node.next_functions[0][0]))


@dataclass(eq=False)
class Pass:
    """One backward and the forward before it."""

    forward: Forward  # the first of the forwards that this backward goes through
    backward_start: Any
    forwards: list[Forward] = field(default_factory=list)
    ready: dict[str, Any] = field(default_factory=dict)  # by parameter name; only `BackwardWatch` marks this
    backward_end: Any = None
    end: Any = None


@dataclass(frozen=True)
class Moments:
    """The moments of one step, in seconds on the host's monotonic clock."""

    number: int  # counted from 0
    start_s: float
    backward_s: float
    backward_end_s: float
    end_s: float
    between_s: float | None  # since the end of the previous step

    @property
    def step_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def exposed_s(self) -> float:
        """Time that the step waited for communication after backward."""
        return self.end_s - self.backward_end_s

    @classmethod
    def of(cls, step: Pass, number: int, clock: Clock, previous: tuple[Any, float] | None) -> Moments:
        """Read the marks of a step. `previous` is the end of the previous step, as a mark and in seconds. The host runs
        ahead of a device, so the step's start is computed from it by the device's clock."""
        start, start_s, between_s = step.forward.start, step.forward.started_s, None
        if previous is not None:
            between_s = max(0.0, clock.seconds(previous[0], start))
            start_s = previous[1] + between_s
        marks = (step.backward_start, step.backward_end, step.end)
        times_s = [start_s, *(start_s + clock.seconds(start, mark) for mark in marks)]
        # Events of two CUDA streams may be slightly out of order.
        start_s, backward_s, backward_end_s, end_s = itertools.accumulate(times_s, max)
        return cls(number, start_s, backward_s, backward_end_s, end_s, between_s)


class StepWatcher:
    """Records when the forward and backward passes of a model begin and end, from `watch` to `close`. With `on_step`,
    it records only passes that are steps."""

    def __init__(self, device: torch.device, on_step: Callable[[Pass], None] | None = None) -> None:
        """Create a watcher that calls `on_step` inside backward, where it must not use the device or other ranks."""
        self.step_count = 0  # the same on all ranks, because an exchange needs all of them
        self.forward_count = 0  # forwards with gradients
        self.clock = Clock(device)
        self._on_step = on_step
        self._ddp: weakref.ref[DDP] | None = None
        self._forward: Forward | None = None
        self._pass: Pass | None = None  # the backward that runs now
        self._ended: Pass | None = None  # the passes since the last step of an optimizer whose updates are exchanged
        self._exchanges_updates: Callable[[], bool] = lambda: False
        self._hooks: list[RemovableHandle] = []

    def watch(self, model: nn.Module, ddp: DDP | None, exchanges_updates: Callable[[], bool] = lambda: False) -> None:
        """Start watching a module whose forward begins a pass, and the DDP model that exchanges its gradients.

        If `exchanges_updates` returns True, steps end when `optimizer_stepped` is called.
        """
        self._exchanges_updates = exchanges_updates
        self._ddp = None if ddp is None else weakref.ref(ddp)
        self._hooks = [
            model.register_forward_pre_hook(Unseen(lambda *_: self._forward_began())),
            model.register_forward_hook(Unseen(lambda module, _, output: self._forward_ended(module, output))),
        ]

    def close(self) -> None:
        """Stop watching."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._forward = self._pass = self._ended = None

    def optimizer_stepped(self) -> None:
        """End the step, if updates are exchanged. Call it after their exchange."""
        ended, self._ended = self._ended, None
        if ended is not None:
            self._step_ended(ended)

    def _forward_began(self) -> None:
        recomputed = self._pass is not None and in_backward()  # by checkpointing
        if recomputed or not torch.is_grad_enabled() or not self._hooks:
            return
        self._pass = None  # its backward has failed
        ddp = None if self._ddp is None else self._ddp()
        sync = ddp is not None and (bool(ddp.require_backward_grad_sync) or self._exchanges_updates())
        self._forward = Forward(self.forward_count, self.clock.mark(), time.monotonic(), sync, in_backward())

    def _forward_ended(self, model: nn.Module, output: Any) -> None:
        if self._forward is None or not torch.is_grad_enabled():
            return
        forward, self._forward = self._forward, None
        self.forward_count += 1
        trained = next((parameter for parameter in model.parameters() if parameter.requires_grad), None)
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:  # a hook on a parameter that the model returns would stay for good
                tensor.register_hook(lambda _: self._backward_reached(forward, trained))

    def _backward_reached(self, forward: Forward, trained: Tensor | None) -> None:
        if not self._hooks or (self._on_step is not None and not forward.will_exchange(trained)):
            return
        if self._pass is None:
            self._pass = Pass(forward, self.clock.mark())
            # Callbacks run in the order of queueing: this one before DDP's, which waits for communication.
            queue_callback(self._backward_ended)
        elif forward.number < self._pass.forward.number:
            self._pass.forward = forward
        self._pass.forwards.append(forward)

    def _backward_ended(self) -> None:
        ended, self._pass = self._pass, None
        if ended is None or not self._hooks:
            return
        ended.backward_end = self.clock.mark()
        self._pass_ended(ended)
        if self._on_step is not None and self._exchanges_updates():
            if self._ended is not None:  # gradients are accumulated
                ended = dataclasses.replace(
                    ended, forward=self._ended.forward, backward_start=self._ended.backward_start
                )
            self._ended = ended
        elif self._on_step is not None:
            queue_callback(lambda: self._step_ended(ended))  # DDP has queued its callback, so this one runs after it

    def _pass_ended(self, ended: Pass) -> None:
        """Do nothing; a subclass may use the pass."""

    def _step_ended(self, step: Pass) -> None:
        if self._hooks and self._on_step is not None:
            step.end = self.clock.mark()
            for forward in step.forwards:
                forward.exchanged = True
            self.step_count += 1
            self._on_step(step)


def has_passed(mark: Any) -> bool:
    """Return whether a mark can be read without waiting for the device."""
    return bool(mark.query()) if isinstance(mark, torch.cuda.Event) else True


def in_backward() -> bool:
    """Return whether this thread runs inside a backward."""
    current = getattr(torch._C, "_current_graph_task_id", lambda: -1)  # private: without it, no forward is recomputed
    return int(current()) != -1


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Return the tensors in a model's output, however it is nested."""
    if isinstance(output, Tensor):
        yield output
        return
    if dataclasses.is_dataclass(output) and not isinstance(output, Mapping | type):
        output = [getattr(output, entry.name) for entry in dataclasses.fields(output)]
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, list | tuple) else ()
    for part in parts:
        yield from tensors_in(part)


def queue_callback(callback: Callable[[], None]) -> None:
    """Call a function when the backward that runs now has ended, after those that were queued before."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)
