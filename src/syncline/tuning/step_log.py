"""Record how long a model's steps take and how their gradients are exchanged, in bounded memory."""

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
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.records.profile import Profile
from syncline.records.run_record import MOST_STEPS, BucketSpan, Loss, ModelRecord, Pace, StepSpan
from syncline.runtime.parameters import parameters_of

PLAIN = "plain DDP"
_SETTLING = 2
"""Steps after a change that the statistics leave out."""
_DETAILED = 3
"""Steps of each method whose buckets are recorded: the first ones after settling."""

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
    buckets: dict[int, tuple[BucketSpan, ...]] = field(default_factory=dict)
    """The buckets of detailed steps, by step."""
    detailed: deque[Moments] = field(default_factory=lambda: deque(maxlen=_DETAILED))
    """The detailed steps, which are kept when others are thinned out."""
    sent_bytes: int | None = None


@dataclass(frozen=True)
class _Unread:
    """A step whose marks have not been read yet."""

    step: Pass
    number: int
    method: _Method
    since: int
    """The first step after the last change."""


class StepLog:
    """Records the steps of a model."""

    def __init__(self, ddp: DDP, watcher: StepWatcher, device: torch.device) -> None:
        """Create the log of a model, without a reference to it: it may be gone when the record is written.

        The watcher of the model's steps must call `step_ended`.
        """
        self._watcher, self._device = watcher, device
        self._name, self._backend = type(ddp.module).__name__, backend_of(ddp.process_group)
        trained = [parameter for parameter in parameters_of(ddp).values() if parameter.requires_grad]
        self._parameters = sum(parameter.numel() for parameter in trained)
        self._bytes = sum(parameter.numel() * parameter.element_size() for parameter in trained)
        self._method = _Method(PLAIN)
        self._methods = {PLAIN: self._method}
        self._since = 0
        """The first step after the last change."""
        self._unread: deque[_Unread] = deque()
        self._previous: tuple[Any, float] | None = None
        """The end of the last step that was read, as a mark and in seconds."""
        self._recent: deque[Moments] = deque(maxlen=256)
        self._spans: Thinned[tuple[Moments, str]] = Thinned()
        self._losses: Thinned[tuple[int, Tensor]] = Thinned()
        self.loss: Tensor | None = None
        """The loss of the next step, if it is known."""

    def switch_to(self, method: str) -> None:
        """Count the next steps as steps of another method."""
        self._method = self._methods.setdefault(method, _Method(method))
        self._since = self._watcher.step_count
        self._method.buckets.clear()

    def step_ended(self, step: Pass) -> None:
        """Add a step. Runs inside backward, so it reads nothing."""
        number = self._watcher.step_count - 1
        self._unread.append(_Unread(step, number, self._method, self._since))
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
                self._method.sent_bytes = sum(stats.sent_bytes.values())
                self._method.buckets[self._watcher.step_count - 1] = stats.buckets
            if decided and steps in (_SETTLING, _SETTLING + _DETAILED):
                handle.trace(steps == _SETTLING)
        self._read(wait=is_detailed)

    def step_times_s(self, first: int, end: int) -> list[float]:
        """Return the durations of recent steps."""
        self._read(wait=True)
        step_s = {moments.number: moments.step_s for moments in self._recent}
        return [step_s[number] for number in range(first, end)]

    def record(
        self,
        *,
        outcome: str,
        caps: tuple[int, ...],
        profile: Profile | None,
        network: Network | None,
        plan: Plan | None,
        host_of_rank: tuple[int, ...],
    ) -> ModelRecord:
        """Return the record of all steps so far."""
        self._read(wait=True)
        methods = self._methods.values()
        buckets = {number: spans for method in methods for number, spans in method.buckets.items()}
        spans = {moments.number: (moments, name) for moments, name in self._spans.kept}
        spans |= {moments.number: (moments, method.name) for method in methods for moments in method.detailed}
        return ModelRecord(
            name=self._name,
            parameters=self._parameters,
            gradient_bytes=self._bytes,
            host_of_rank=host_of_rank,
            backend=self._backend,
            device=self._device.type,
            steps=self._watcher.step_count,
            outcome=outcome,
            way=self._method.name,
            caps=caps,
            paces=tuple(_pace(method) for method in methods if method.settled.kept),
            spans=tuple(
                StepSpan(
                    step=number,
                    way=name,
                    start_s=moments.start_s,
                    backward_s=moments.backward_s,
                    backward_end_s=moments.backward_end_s,
                    end_s=moments.end_s,
                    buckets=buckets.get(number, ()),
                )
                for number, (moments, name) in sorted(spans.items())
            ),
            losses=tuple(
                Loss(step=number, value=value)
                for number, loss in self._losses.kept
                if math.isfinite(value := float(loss))
            ),
            profile=profile,
            network=network,
            plan=plan,
        )

    def _read(self, *, wait: bool) -> None:
        """Read the marks of steps that have ended; with `wait`, also of those that a device still works on."""
        clock = self._watcher.clock
        if wait:
            clock.settle()
        while self._unread and (wait or has_passed(self._unread[0].step.end)):
            unread = self._unread.popleft()
            moments = Moments.of(unread.step, unread.number, clock, self._previous)
            self._previous = (unread.step.end, moments.end_s)
            method = unread.method
            method.steps += 1
            self._recent.append(moments)
            self._spans.append((moments, method.name))
            if moments.number in method.buckets:
                method.detailed.append(moments)
            if moments.number - unread.since >= _SETTLING:
                method.settled.append(moments)


def _pace(method: _Method) -> Pace:
    steps = method.settled.kept
    between_s = [moments.between_s for moments in steps if moments.between_s is not None]
    step_s = [moments.step_s for moments in steps]
    spread = quartiles(step_s)
    return Pace(
        way=method.name,
        steps=method.steps,
        step_s=statistics.median(step_s),
        low_s=spread.low_s,
        high_s=spread.high_s,
        forward_s=statistics.median(moments.backward_s - moments.start_s for moments in steps),
        backward_s=statistics.median(moments.backward_end_s - moments.backward_s for moments in steps),
        exposed_s=statistics.median(moments.end_s - moments.backward_end_s for moments in steps),
        between_s=statistics.median(between_s) if between_s else 0.0,
        sent_bytes=method.sent_bytes,
    )
