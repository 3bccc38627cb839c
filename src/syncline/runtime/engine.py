"""The engine of one attached model: buckets in, averaged buckets out, on lanes.

It knows parameters by name, because buckets change: DDP rebuilds them after the first backward, in the order in which
gradients became ready. A bucket's state is prepared when the bucket is first seen, after all ranks have compared what
they see in it, and moves along by parameter name when the buckets change.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from syncline.dist.agreement import agree
from syncline.dist.comm import close_lanes, open_lanes
from syncline.dist.lane import Job, Phases
from syncline.dist.span import Span, span_of
from syncline.errors import ExchangeError, SynclineError, UsageError, first_line, tell
from syncline.exchange import WORLD, Climbing, Exchange, Layout, Slot, State, Work, stride_in_bucket
from syncline.health.watchdog import Watchdog
from syncline.runtime.bucket_policy import Route
from syncline.runtime.checkpoint import misfit_of
from syncline.runtime.reduction import Reduction
from syncline.runtime.stats import predicted_for, sent_over
from syncline.runtime.topology import Place

_WATCHED = 50
"""Steps of which the median is compared with what was expected."""
_UNSETTLED = 3
"""Steps that prepare buckets, and say nothing."""
_DRIFTED = 1.5

Tensors = Mapping[str, Mapping[str, Tensor]]
"""By parameter name, then by kind, in logical shape."""


@dataclass
class Bucket:
    """A bucket as DDP makes it now."""

    index: int
    lane: int
    exchange: Exchange
    layout: Layout
    state: State | None = None
    """None until all ranks have agreed on the layout."""
    averages: bool = False
    """Its state does, and not the engine."""

    def applied(self, finite: Tensor, used: Mapping[str, Tensor] | None) -> Tensor:
        """Where the result of this bucket was applied: a 0-dim tensor, or one flag per element if some of its
        parameters were `used` and others were not."""
        if used is None:
            return finite
        flags = torch.stack([used[slot.name].to(finite.device) for slot in self.layout.slots])
        sizes = torch.tensor([slot.numel for slot in self.layout.slots], device=flags.device)
        return flags.repeat_interleave(sizes, output_size=self.layout.numel) & finite


@dataclass
class Step:
    """The buckets of one backward pass."""

    jobs: list[Job] = field(default_factory=list)
    submitted: set[int] = field(default_factory=set)
    """The indices of its buckets."""
    unfinished: int = 0
    complete: bool = False
    """Whether DDP's last bucket was submitted. A DDP that skips unused buckets may never submit it."""
    awaits_end: bool = False
    """Whether the autograd engine will say when its backward pass is over."""
    finite: list[Tensor] = field(default_factory=list)
    sent_bytes: dict[str, int] = field(default_factory=dict)
    began_s: float | None = None
    """When its first bucket came, on the host's clock."""
    period_s: float | None = None
    """Since the first bucket of the step before it came."""
    counts: bool = False
    """Whether somebody wants to know how much of what was exchanged is not zero."""
    applied: list[tuple[Tensor, int]] = field(default_factory=list)
    """Where it counts: elements that are not zero, of how many, in each bucket of an exchange that keeps some back."""


@dataclass
class Regrouping:
    """Steps that go in the buckets of a checkpoint, whatever DDP's are."""

    buckets: tuple[tuple[str, ...], ...]
    steps_left: int = 2
    """After which DDP's buckets will not become these any more, and state moves to them."""
    seen: list[tuple[Layout, Tensor]] = field(default_factory=list)
    """DDP's, in this step."""

    @property
    def as_seen(self) -> bool:
        return {tuple(slot.name for slot in layout.slots) for layout, _ in self.seen} == set(self.buckets)


class Engine:
    """Runs the exchanges of one model. All ranks create it together, in the same order as their other groups."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        parameters: Mapping[str, torch.nn.Parameter],
        route: Route,
        timeout: timedelta,
        place: Place | None = None,
        scale: Callable[[], Tensor | None] = lambda: None,
        *,
        reduction: Reduction,
    ) -> None:
        self.route, self.place = route, place
        self._reduction = reduction
        self.error: BaseException | None = None
        self.steps = 0
        self.tracing = False
        """Whether collectives are noted."""
        self.listeners: list[Callable[[Engine, Step], None]] = []
        """Called when a step begins, in the thread that runs backward: the one before is over, and is `last_step`. They
        raise nothing, and hold no engine: that would be a circle."""
        self._since = 0
        """Steps since it was attached, whatever a checkpoint says of those before."""
        self.buckets: dict[tuple[int, ...], Bucket] = {}
        self.last_step = Step()
        self._step = Step()
        self._parameters = dict(parameters)
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._ranks = group.size()
        self._scale = scale
        self._watchdog = Watchdog(group, timeout)
        device = next(iter(parameters.values())).device
        topology = None if place is None else place.topology
        self._groups, self._lanes = open_lanes(group, timeout, route.lanes, device, topology)
        try:
            self._watchdog.start(self._groups, self._lanes)
        except BaseException:
            self.close()
            raise
        self._waiting: dict[str, dict[str, Tensor]] = {}
        """State of a checkpoint or an earlier layout, until the bucket that holds its parameter is prepared."""
        self._regrouping: Regrouping | None = None
        self._counted: dict[str, int] = {}
        self._lock = threading.Lock()

        self._spans_s: deque[float] = deque(maxlen=_WATCHED)
        """Of the last steps, where something is expected of them: from first ready to last end."""
        self._warned = False

    # --- in the thread that runs backward -----------------------------------------------------------------------

    def submit(self, grad_bucket: Any) -> Any:
        """A bucket whose gradients are ready → a future of the averaged bucket. In the same order on all ranks."""
        if self.error is not None:
            told = self._watchdog.explained(self.error)
            raise ExchangeError(f"an earlier exchange of this model failed: {told}") from self.error
        flat: Tensor = grad_bucket.buffer()
        step = self._step_of(grad_bucket)
        if self._regrouping is not None:
            return self._submit_regrouped(self._regrouping, grad_bucket, flat)
        bucket = self._see(grad_bucket, flat)
        lane = self._lanes[bucket.lane]
        if not step.jobs:
            self._begin(step)
        marks = lane.marks(step.jobs[0].marks if step.jobs else None)
        phases = Phases(marks) if self.tracing else None
        job = Job(
            bucket=bucket.index,
            lane=bucket.lane,
            flat=flat,
            run=lambda: self._run(bucket, flat, phases),
            # The first time, ranks meet to compare the bucket and prepare it; but for that, it is the exchange's word.
            waits=bucket.exchange.waits or bucket.state is None,
            on_done=lambda job: self._done(job, bucket, step),
            marks=marks,
            exchange=bucket.exchange,
            phases=phases,
        )
        self._watchdog.begin(job, self.steps)
        with self._lock:
            step.jobs.append(job)
            step.unfinished += 1
        return lane.submit(job)

    def _step_of(self, grad_bucket: Any) -> Step:
        """The step that a bucket belongs to: the one under way, or a new one."""
        if self._step.complete or grad_bucket.index() in self._step.submitted:
            self.conclude()  # a rank that has joined is not told when a step is over
            self._step = Step()
        step = self._step
        step.submitted.add(grad_bucket.index())
        step.complete = grad_bucket.is_last()
        if not step.awaits_end:
            step.awaits_end = self._reduction.when_over(self._backward_is_over)
        return step

    def _backward_is_over(self) -> None:
        step = self._step
        step.awaits_end = False
        if step.complete or self._reduction.finished:
            step.complete = True
            self.conclude()

    def conclude(self) -> None:
        """End the step whose last bucket has been exchanged, if it has not been ended."""
        step = self._step
        if not step.complete or step.awaits_end or step.unfinished or self.error is not None:
            return
        self._step = Step()
        try:
            self._end(step)
        except BaseException as error:
            raise self._fail(max(step.submitted), error) from error

    def _begin(self, step: Step) -> None:
        step.began_s = time.monotonic()
        if self.last_step.began_s is not None:
            step.period_s = step.began_s - self.last_step.began_s
            span = span_of(self.last_step.jobs)
            self._watchdog.stepped(span, step.period_s)
            if self.route.expected_s is not None:
                self._watch(span)
        for listener in tuple(self.listeners):
            listener(self, step)

    def _submit_regrouped(self, regrouping: Regrouping, grad_bucket: Any, flat: Tensor) -> Any:
        """A bucket of a step that goes in the buckets of a checkpoint: all of them together, when the last is here."""
        regrouping.seen.append((self._layout(grad_bucket.parameters(), flat), flat))
        if grad_bucket.is_last():
            try:
                self._run_regrouped(regrouping)
            except BaseException as error:
                raise self._fail(grad_bucket.index(), error) from error
        done: torch.futures.Future[Tensor] = torch.futures.Future(devices=[flat.device] if flat.is_cuda else None)
        done.set_result(flat)
        return done

    def _run_regrouped(self, regrouping: Regrouping) -> None:
        """On the thread and the stream of backward: it is one step or two after a restart."""
        if next(iter(self._parameters.values())).is_cuda:
            torch.cuda.synchronize()  # with what the lanes did before
        step = self._step
        parts = {
            slot.name: flat[slot.offset : slot.offset + slot.numel]
            for layout, flat in regrouping.seen
            for slot in layout.slots
        }
        for index, names in enumerate(regrouping.buckets):
            pieces = [parts[name] for name in names]
            whole = torch.cat(pieces)
            parameters: list[Tensor] = [self._parameters[name] for name in names]
            layout = self._layout(parameters, whole)
            bucket = self.buckets.setdefault(tuple(map(id, parameters)), self._bucket(index, layout))
            work = self._run(bucket, whole)
            if work is not None:
                work.wait()
            assert bucket.state is not None  # noqa: S101 - it ran
            step.finite.append(bucket.state.finite(whole))
            for piece, result in zip(pieces, whole.split([piece.numel() for piece in pieces]), strict=True):
                piece.copy_(result)
        if regrouping.as_seen or regrouping.steps_left == 0:
            self._regrouping = None
        else:
            self._regrouping = Regrouping(regrouping.buckets, regrouping.steps_left - 1)

    def _see(self, grad_bucket: Any, flat: Tensor) -> Bucket:
        parameters = grad_bucket.parameters()
        key = tuple(map(id, parameters))
        if key not in self.buckets:
            if flat.is_sparse:
                raise UsageError("sparse gradients are not supported: build the embedding with sparse=False")
            layout = self._layout(parameters, flat)
            self._retire(layout)
            index = grad_bucket.index()
            self.buckets[key] = self._bucket(index, layout)
        return self.buckets[key]

    def _bucket(self, index: int, layout: Layout) -> Bucket:
        exchange, lane = self.route.way([slot.name for slot in layout.slots], index, self._since)
        return Bucket(index, lane, exchange, layout)

    def _layout(self, parameters: list[Tensor], flat: Tensor) -> Layout:
        slots, offset = [], 0
        for parameter in parameters:
            name = self._names.get(id(parameter))
            if name is None:
                raise ExchangeError("DDP exchanges a parameter that was not there at attach: detach, then attach again")
            real = _as_real(parameter)
            slots.append(Slot(name, tuple(real.shape), stride_in_bucket(real), offset, real.numel()))
            offset += real.numel()
        if offset != flat.numel():
            raise ExchangeError(f"a bucket holds {flat.numel()} elements, its parameters {offset}")
        return Layout(tuple(slots), flat.dtype, flat.device)

    def _retire(self, new: Layout) -> None:
        """Takes buckets apart whose parameters are in another one now, and keeps their state for it."""
        names = {slot.name for slot in new.slots}
        for key, old in list(self.buckets.items()):
            if names & {slot.name for slot in old.layout.slots}:
                if old.state is not None:
                    self._keep(old.state.tensors(old.layout))
                del self.buckets[key]

    def _keep(self, tensors: Tensors) -> None:
        with self._lock:
            for name, kinds in tensors.items():
                self._waiting[name] = {kind: tensor.detach().clone() for kind, tensor in kinds.items()}

    # --- on the lane --------------------------------------------------------------------------------------------

    def _run(self, bucket: Bucket, flat: Tensor, phases: Phases | None = None) -> Work | None:
        if self.error is not None:
            raise ExchangeError(f"an earlier bucket of this step failed: {self._watchdog.explained(self.error)}")
        groups = self._groups[bucket.lane]
        self._watchdog.runs(bucket.lane, self.steps, bucket.index)
        if bucket.state is None:
            bucket.state = self._prepare(bucket)
            bucket.averages = bucket.state.average(1 / self._ranks)
        bucket.state.begin(self.steps, self._scale())
        if not bucket.averages:
            flat.mul_(1 / self._ranks)  # not div_: the very operation with which plain DDP averages
        groups.notes.phases = phases
        try:
            return bucket.exchange.run(flat, bucket.state, groups.comm)
        finally:
            groups.notes.phases = None

    def _prepare(self, bucket: Bucket) -> State:
        layout, comm = bucket.layout, self._groups[bucket.lane].comm
        held = {slot.name: f"{tuple(slot.shape)} at {slot.offset}" for slot in layout.slots}
        self._watchdog.issued(bucket.lane, "agree", WORLD, 0)
        agree(comm.group, {"index": bucket.index, "dtype": str(layout.dtype), **held}, "a gradient bucket")
        state = bucket.exchange.prepare(layout, comm)
        if isinstance(bucket.exchange, Climbing):  # it chose by arithmetic, which other machines may do differently
            self._watchdog.issued(bucket.lane, "agree", WORLD, 0)
            agree(comm.group, {"way": state.describe()}, "the way of a gradient bucket")
        with self._lock:
            mine = {slot.name: self._waiting.pop(slot.name) for slot in layout.slots if slot.name in self._waiting}
        if mine:
            for tensor in (tensor for kinds in mine.values() for tensor in kinds.values()):
                if tensor.is_cuda:  # made on backward's stream, and read on this lane's after we let go of it
                    tensor.record_stream(torch.cuda.current_stream(tensor.device))
            state.load(layout, mine)
        return state

    def _done(self, job: Job, bucket: Bucket, step: Step) -> None:
        if job.error is None:
            try:
                self._succeed(job, bucket, step)
            except BaseException as error:  # noqa: BLE001 - as fatal for the step as an exchange that failed
                job.error = error
        self._watchdog.over(job)
        if job.error is not None:
            job.error = self._fail(job.bucket, job.error)

    def _succeed(self, job: Job, bucket: Bucket, step: Step) -> None:
        # The result is the same on all ranks, so they agree on whether it is finite without asking each other. A bucket
        # that keeps nothing is asked, too, where others do: GradScaler skips the whole step.
        flat, state = job.flat, bucket.state
        assert flat is not None and state is not None  # noqa: S101 - it ran
        finite = [state.finite(flat)] if state.settles or (self.keeps and not bucket.exchange.keeps) else []
        counted = [(flat.count_nonzero(), flat.numel())] if step.counts and bucket.exchange.keeps else []
        with self._lock:
            step.finite += finite
            step.applied += counted
            step.unfinished -= 1

    def _fail(self, bucket: int, error: BaseException) -> BaseException:
        """The error as the user sees it. The step stays unfinished for good, so nothing of it is settled."""
        if not isinstance(error, SynclineError):
            told = f"exchanging bucket {bucket} failed in step {self.steps}: {first_line(error)}"
            preliminary = ExchangeError(told)
            with self._lock:  # what comes next takes seconds, in which others should not begin
                self.error = self.error or preliminary
            failed = ExchangeError(told + self._watchdog.explain(told, cause=error))
            failed.__cause__ = error
            error = failed
            with self._lock:
                self.error = failed if self.error is preliminary else self.error
        elif self.error is None:  # it says all there is to say, here; others should know, and events be left
            self._watchdog.explain(first_line(error), own=True)
        with self._lock:
            self.error = self.error or error
        return error

    def _end(self, step: Step) -> None:
        if step.finite:
            with self._lanes[0].after(self._lanes):
                finite = torch.stack(step.finite).all()
                settling = [bucket for bucket in self.buckets.values() if bucket.state and bucket.state.settles]
                bucketed = {slot.name for bucket in self.buckets.values() for slot in bucket.layout.slots}
                used = self._reduction.used(self._names, bucketed) if settling else None
                for bucket in settling:
                    assert bucket.state is not None  # noqa: S101 - see above
                    bucket.state.settle(bucket.applied(finite, used))
        sent = self.sent_bytes
        step.sent_bytes = {level: sent[level] - self._counted.get(level, 0) for level in sent}
        self._counted = sent
        self.last_step = step
        self.steps += 1
        self._since += 1

    def _watch(self, span: Span | None) -> None:
        """Notes how long the exchange of a step took that is over."""
        if span is not None and self._since > _UNSETTLED:
            self._spans_s.append(span.exchange_s)
        if not self._warned and len(self._spans_s) == _WATCHED and self._groups[0].comm.rank == 0:
            told = self.drift()
            if told is not None:
                self._warned = True
                tell(told)

    def drift(self) -> str | None:
        """How much longer steps take to exchange than was expected, where it matters."""
        expected_s = self.route.expected_s
        if expected_s is None or len(self._spans_s) < _WATCHED // 5:
            return None
        took_s = statistics.median(self._spans_s)
        if took_s <= _DRIFTED * expected_s + 1e-3:
            return None
        return (
            f"exchanging gradients takes {took_s * 1e3:.1f} ms per step, and the plan expected {expected_s * 1e3:.1f}: "
            "the network or the model is not what it was. handle.retune(step) plans anew"
        )

    # --- for the handle -----------------------------------------------------------------------------------------

    @property
    def sent_bytes(self) -> dict[str, int]:
        """By the busiest rank since attach, per level."""
        return sent_over(self._groups)

    @property
    def predicted_sent_bytes(self) -> dict[str, int]:
        """Per step and level, from the exchange's own cost of the buckets there are now."""
        return predicted_for(self.buckets.values(), self._groups)

    @property
    def lanes(self) -> int:
        return len(self._lanes)

    @property
    def ranks(self) -> int:
        return self._ranks

    @property
    def backend(self) -> str:
        return self._groups[0].topology.backend

    @property
    def keeps(self) -> bool:
        """Whether part of what comes in may wait for later steps."""
        return any(exchange.keeps for exchange in self.route.exchanges)

    @property
    def ways(self) -> dict[str, int]:
        """How buckets go, where an exchange has several ways, and how many go so."""
        states = [bucket.state for bucket in self.buckets.values() if bucket.state is not None]
        return dict(Counter(text for state in states if (text := state.describe())))

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        tensors = {name: dict(kinds) for name, kinds in self._waiting.items()}
        for bucket in self.buckets.values():
            if bucket.state is not None:
                for name, kinds in bucket.state.tensors(bucket.layout).items():
                    tensors[name] = {kind: tensor.detach().clone() for kind, tensor in kinds.items()}
        return tensors

    def resting(self) -> Iterator[Mapping[str, Tensor]]:
        """What is kept between steps, by kind, parameter after parameter; not copied as `tensors` does, so not to be
        held on to."""
        yield from self._waiting.values()
        for bucket in self.buckets.values():
            if bucket.state is not None:
                yield from bucket.state.tensors(bucket.layout).values()

    @property
    def bucket_names(self) -> list[list[str]]:
        """What each bucket holds now, for exchanges to which that matters: what they select, they select per bucket."""
        ordered = sorted(self.buckets.values(), key=lambda bucket: bucket.index)
        return [[slot.name for slot in bucket.layout.slots] for bucket in ordered] if self.keeps else []

    def misfit(self, tensors: Tensors, buckets: Sequence[Sequence[str]] = ()) -> str | None:
        """Why these are not of this model and cannot be loaded, if so."""
        shapes = {name: _as_real(parameter).shape for name, parameter in self._parameters.items()}
        return misfit_of(shapes, tensors, (name for names in buckets for name in names))

    def load(self, tensors: Tensors, buckets: Sequence[Sequence[str]] = ()) -> None:
        """What is no `misfit`. `buckets`: those in which the coming steps go until DDP's own are the same; it fills
        them in another order before its first backward than afterwards."""
        self._waiting.clear()
        self._keep(tensors)
        self._regrouping = None
        named = sorted(name for names in buckets for name in names)
        trained = sorted(name for name, parameter in self._parameters.items() if parameter.requires_grad)
        regroups = named == trained and not self._reduction.skips_buckets  # which may not all come
        if regroups and list(map(list, buckets)) != self.bucket_names:
            self._regrouping = Regrouping(tuple(map(tuple, buckets)))
            self.buckets.clear()  # what they hold waits for the ones that come
        for bucket in self.buckets.values():
            if bucket.state is not None:
                names = [slot.name for slot in bucket.layout.slots]
                bucket.state.load(bucket.layout, {n: self._waiting.pop(n) for n in names if n in self._waiting})

    @property
    def straggler(self) -> str | None:
        """Which rank keeps the others waiting, and for how long; known to the first rank."""
        return self._watchdog.straggler

    def close(self) -> None:
        self._watchdog.stop()
        close_lanes(self._lanes, self._groups)
        # Jobs know their engine and it knows them: without this, threads and connections stay until Python looks.
        self._groups, self._lanes, self.buckets, self.listeners = [], [], {}, []
        self.last_step = self._step = Step()


def _as_real(parameter: Tensor) -> Tensor:
    """As DDP puts it into a bucket: a complex parameter as pairs of real numbers."""
    return torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter
