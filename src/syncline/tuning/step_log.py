"""Record how long a model's steps take and how their gradients or updates are exchanged, in bounded memory."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from syncline.ddp.handle import Handle
from syncline.dist.comm import backend_of
from syncline.measure.step_watcher import Moments, Pass, StepWatcher, has_passed
from syncline.measure.steps import quartiles
from syncline.records.run_record import MOST_STEPS, BucketSpan, Loss, ModelRecord, Pace, StepSpan
from syncline.runtime.validation import parameters_of

PLAIN = "plain DDP"
_SETTLING = 2  # steps after a change that the statistics leave out
_DETAILED = 3  # steps of each method whose buckets are recorded: the first ones after settling

T = TypeVar("T")


class Thinned(Generic[T]):
    """A bounded sample of an endless series: every n-th item, where n doubles each time the bound is reached."""

    def __init__(self, most: int = MOST_STEPS) -> None:
        self._most, self._every, self._seen = most, 1, 0
        self.kept: list[T] = []

    def append(self, item: T) -> None:
        if self._seen % self._every == 0:
            self.kept.append(item)
            if len(self.kept) >= self._most:
                self.kept = self.kept[::2]
                self._every *= 2
        self._seen += 1


@dataclass
class _Method:
    """The steps of one method: plain DDP, the plan, or an exchange. A method may be used several times."""

    name: str
    steps: int = 0
    settled: Thinned[Moments] = field(default_factory=Thinned)
    buckets: dict[int, tuple[BucketSpan, ...]] = field(default_factory=dict)  # the buckets of detailed steps, by step
    detailed: deque[StepSpan] = field(default_factory=lambda: deque(maxlen=_DETAILED))  # never thinned out
    sent_bytes: int | None = None


class StepLog:
    """Records the steps of a model, which may be gone when the record is written. A watcher calls `step_ended`."""

    def __init__(self, ddp: DDP, watcher: StepWatcher, device: torch.device) -> None:
        self.loss: Tensor | None = None  # the loss of the next step, if it is known
        self._watcher, self._device = watcher, device
        trained = [parameter for parameter in parameters_of(ddp).values() if parameter.requires_grad]
        sizes = {"parameters": sum(p.numel() for p in trained), "gradient_bytes": sum(p.nbytes for p in trained)}
        model = {"name": type(ddp.module).__name__, "backend": backend_of(ddp.process_group), "device": device.type}
        self._about: dict[str, Any] = {**model, **sizes}  # what a record says about the model
        self._method = _Method(PLAIN)
        self._methods = {PLAIN: self._method}
        self._since = 0  # the first step after the last change
        self._unread: deque[tuple[Pass, int, _Method, bool]] = deque()
        """Steps whose marks have not been read yet, with their number and method, and whether the method is settled."""
        self._previous: tuple[Any, float] | None = None  # the end of the last step read, as a mark and in seconds
        self._recent: deque[Moments] = deque(maxlen=256)
        self._spans: Thinned[StepSpan] = Thinned()
        self._losses: Thinned[tuple[int, Tensor]] = Thinned()

    @property
    def method(self) -> str:
        """The method of the next steps."""
        return self._method.name

    def switch_to(self, method: str) -> None:
        """Count the next steps as steps of another method."""
        self._method = self._methods.setdefault(method, _Method(method))
        self._since = self._watcher.step_count
        self._method.buckets.clear()

    def step_ended(self, step: Pass) -> None:
        """Add a step. Runs inside backward, so it reads nothing."""
        number = self._watcher.step_count - 1
        self._unread.append((step, number, self._method, number - self._since >= _SETTLING))
        if self.loss is not None:
            self._losses.append((number, self.loss))
        self.loss = None

    def step_begins(self, handle: Handle | None, *, decided: bool) -> None:
        """Read the steps that have ended. Runs between steps.

        Phases are traced only once the method is `decided`: in a trial, tracing would slow down one of the methods.
        """
        steps = self._watcher.step_count - self._since
        is_detailed = _SETTLING < steps <= _SETTLING + _DETAILED
        if handle is not None:
            if is_detailed:
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)  # in a few steps only
                stats = handle.stats()
                # Updates take turns, so that one step is not typical. Counted bytes equal the predicted mean.
                sent = handle.predicted_sent_bytes() if handle.exchanges_updates else stats.sent_bytes
                self._method.sent_bytes = sum(sent.values())
                number = self._watcher.step_count - 1
                self._method.buckets[number] = stats.buckets
                # Steps are also read between micro-batches, perhaps before their buckets are known.
                read = [moments for moments in self._recent if moments.number == number]
                self._method.detailed += [_span(moments, self._method) for moments in read]
            if decided and steps in (_SETTLING, _SETTLING + _DETAILED):
                handle.trace(steps == _SETTLING)
        self._read(wait=is_detailed)

    def step_times_s(self, first: int, end: int) -> list[float]:
        """Return the durations of recent steps."""
        return [moments.step_s for moments in self.moments(first, end)]

    def moments(self, first: int, end: int) -> list[Moments]:
        """Return the moments of recent steps."""
        self._read(wait=True)
        known = {moments.number: moments for moments in self._recent}
        return [known[number] for number in range(first, end)]

    def record(self, **fields: Any) -> ModelRecord:
        """Return the record of all steps so far. `fields` are the other fields of the record."""
        self._read(wait=True)
        methods = self._methods.values()
        detailed = [span for method in methods for span in method.detailed]
        spans = {span.step: span for span in [*self._spans.kept, *detailed]}
        losses = [Loss(step=number, value=float(loss)) for number, loss in self._losses.kept]
        return ModelRecord(
            steps=self._watcher.step_count,
            way=self._method.name,
            paces=tuple(_pace(method) for method in methods if method.settled.kept),
            spans=tuple(span for _, span in sorted(spans.items())),
            losses=tuple(loss for loss in losses if math.isfinite(loss.value)),
            **self._about,
            **fields,
        )

    def _read(self, *, wait: bool) -> None:
        """Read the marks of steps that have ended; with `wait`, also wait for those that still run on a device."""
        clock = self._watcher.clock
        if wait:
            clock.settle()
        while self._unread and (wait or has_passed(self._unread[0][0].end)):
            step, number, method, is_settled = self._unread.popleft()
            moments = Moments.of(step, number, clock, self._previous)
            self._previous = (step.end, moments.end_s)
            method.steps += 1
            self._recent.append(moments)
            span = _span(moments, method)
            self._spans.append(span)
            if span.buckets:
                method.detailed.append(span)
            if is_settled:
                method.settled.append(moments)


def _span(moments: Moments, method: _Method) -> StepSpan:
    times_s = {field: getattr(moments, field) for field in ("start_s", "backward_s", "backward_end_s", "end_s")}
    buckets = method.buckets.get(moments.number, ())
    return StepSpan(step=moments.number, way=method.name, buckets=buckets, **times_s)


def _pace(method: _Method) -> Pace:
    steps, median = method.settled.kept, statistics.median
    spread = quartiles([moments.step_s for moments in steps])
    return Pace(
        way=method.name,
        steps=method.steps,
        step_s=median(moments.step_s for moments in steps),
        low_s=spread.low_s,
        high_s=spread.high_s,
        forward_s=median(moments.backward_s - moments.start_s for moments in steps),
        backward_s=median(moments.backward_end_s - moments.backward_s for moments in steps),
        exposed_s=median(moments.exposed_s for moments in steps),
        between_s=median([m.between_s for m in steps if m.between_s is not None] or [0.0]),
        sent_bytes=method.sent_bytes,
    )
