"""What a model's steps took and how their gradients went, kept small however long a script runs."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from syncline.dist.comm import backend_of
from syncline.measure.step_timer import Moments, Pacer
from syncline.measure.steps import quartiles
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.records.profile import Profile
from syncline.records.run_record import MOST_STEPS, BucketSpan, Loss, ModelRecord, Pace, PhaseSpan, StepSpan
from syncline.runtime.parameters import parameters_of
from syncline.runtime.stats import Stats

PLAIN = "plain DDP"
_UNSETTLED = 2
"""Steps after a change that count for nothing."""
_IN_DETAIL = 3
"""Steps of each way of which buckets are kept: the first that count."""

T = TypeVar("T")


class Traced(Protocol):
    """The handle of an attached exchange, as far as the log reads it."""

    def stats(self) -> Stats: ...

    def trace(self, on: bool = True) -> None: ...


class Thinned(Generic[T]):
    """Of an endless series every so many-th, so that there are never more than a bound."""

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
class _Way:
    """How gradients went for a while, perhaps several times."""

    name: str
    steps: int = 0
    settled: Thinned[Moments] = field(default_factory=Thinned)
    in_detail: dict[int, tuple[BucketSpan, ...]] = field(default_factory=dict)
    """By step."""
    looked_at: deque[Moments] = field(default_factory=lambda: deque(maxlen=_IN_DETAIL))
    """Those of them, whatever else is thinned out."""
    sent_bytes: int | None = None


class Diary:
    def __init__(self, ddp: DDP, pacer: Pacer, device: torch.device) -> None:
        self._pacer, self._device = pacer, device
        # Now, because the model and its process group may be gone when somebody asks.
        self._name, self._backend = type(ddp.module).__name__, backend_of(ddp.process_group)
        trained = [parameter for parameter in parameters_of(ddp).values() if parameter.requires_grad]
        self._parameters = sum(parameter.numel() for parameter in trained)
        self._bytes = sum(parameter.numel() * parameter.element_size() for parameter in trained)
        self._now = _Way(PLAIN)
        self._ways = {PLAIN: self._now}
        self._changed = 0
        """The step since which gradients go as they do now."""
        self._begun: dict[int, tuple[_Way, int]] = {}
        """By number: the way of steps that are not read yet, and since when it is gone."""
        self._recent: deque[Moments] = deque(maxlen=256)
        self._spans: Thinned[tuple[Moments, str]] = Thinned()
        self._losses: Thinned[tuple[int, Tensor]] = Thinned()
        self._loss: Tensor | None = None

    def goes(self, way: str) -> None:
        """From the next step on."""
        self._now = self._ways.setdefault(way, _Way(way))
        self._changed = self._pacer.steps
        self._now.in_detail.clear()

    def note_loss(self, loss: Tensor) -> None:
        self._loss = loss

    def step_ended(self) -> None:
        """Inside backward: notes only."""
        number = self._pacer.steps - 1
        self._begun[number] = (self._now, self._changed)
        loss, self._loss = self._loss, None
        if loss is not None:
            self._losses.append((number, loss))

    def step_begins(self, handle: Traced | None, *, decided: bool) -> None:
        """Between steps: reads what has ended. When it is `decided` how gradients go, an exchange's phases are noted in
        the few steps that are kept in detail; while ways are compared, that would cost one of them some time."""
        steps = self._pacer.steps - self._changed
        looks = _UNSETTLED < steps <= _UNSETTLED + _IN_DETAIL
        if handle is not None:
            if looks:
                self._look_at_buckets(handle)
            if decided and steps in (_UNSETTLED, _UNSETTLED + _IN_DETAIL):
                handle.trace(steps == _UNSETTLED)
        self._read(wait=looks)

    def step_times_s(self, first: int, end: int) -> list[float]:
        """Of steps that were made a moment ago."""
        self._read(wait=True)
        found = {moments.number: moments.step_s for moments in self._recent}
        return [found[number] for number in range(first, end)]

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
        self._read(wait=True)
        details = {number: spans for way in self._ways.values() for number, spans in way.in_detail.items()}
        spans = {moments.number: (moments, way) for moments, way in self._spans.kept}
        spans |= {m.number: (m, way.name) for way in self._ways.values() for m in way.looked_at}
        return ModelRecord(
            name=self._name,
            parameters=self._parameters,
            gradient_bytes=self._bytes,
            host_of_rank=host_of_rank,
            backend=self._backend,
            device=self._device.type,
            steps=self._pacer.steps,
            outcome=outcome,
            way=self._now.name,
            caps=caps,
            paces=tuple(_pace(way) for way in self._ways.values() if way.settled.kept),
            spans=tuple(
                StepSpan(
                    step=number,
                    way=way,
                    start_s=moments.start_s,
                    backward_s=moments.backward_s,
                    backward_end_s=moments.backward_end_s,
                    end_s=moments.end_s,
                    buckets=details.get(number, ()),
                )
                for number, (moments, way) in sorted(spans.items())
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
        for moments in self._pacer.read(wait=wait):
            way, since = self._begun.pop(moments.number)
            way.steps += 1
            self._recent.append(moments)
            self._spans.append((moments, way.name))
            if moments.number in way.in_detail:
                way.looked_at.append(moments)
            if moments.number - since >= _UNSETTLED:
                way.settled.append(moments)

    def _look_at_buckets(self, handle: Traced) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # a few times in all
        stats = handle.stats()
        self._now.sent_bytes = sum(stats.sent_bytes.values())
        self._now.in_detail[self._pacer.steps - 1] = tuple(
            BucketSpan(
                bucket=one.bucket,
                lane=one.lane,
                bytes=one.bytes,
                exchange=one.exchange,
                ready_s=one.ready_s,
                start_s=one.start_s,
                end_s=one.end_s,
                phases=tuple(PhaseSpan(**dataclasses.asdict(phase)) for phase in one.phases),
            )
            for one in stats.buckets
        )


def _pace(way: _Way) -> Pace:
    moments = way.settled.kept
    between = [one.between_s for one in moments if one.between_s is not None]
    times = [one.step_s for one in moments]
    spread = quartiles(times)
    return Pace(
        way=way.name,
        steps=way.steps,
        step_s=statistics.median(times),
        low_s=spread.low_s,
        high_s=spread.high_s,
        forward_s=statistics.median(one.backward_s - one.start_s for one in moments),
        backward_s=statistics.median(one.backward_end_s - one.backward_s for one in moments),
        exposed_s=statistics.median(one.end_s - one.backward_end_s for one in moments),
        between_s=statistics.median(between) if between else 0.0,
        sent_bytes=way.sent_bytes,
    )
