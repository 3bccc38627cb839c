"""Feeds the buckets of one DDP model to the bucket runner, and ends its steps.

DDP's buckets change: it rebuilds them after the first backward, in the order in which gradients became ready. So this
module knows parameters by name. A bucket is prepared when it is first seen, and residuals move along by parameter name
when the buckets change.
"""

from __future__ import annotations

import statistics
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from syncline.ddp.reduction import Reduction
from syncline.dist.span import span_of
from syncline.errors import ExchangeError, UsageError, tell
from syncline.exchange import Layout, Slot, stride_in_bucket
from syncline.runtime import bucket_runner
from syncline.runtime.bucket_policy import BucketPolicy
from syncline.runtime.bucket_runner import Bucket, BucketRunner, Residuals
from syncline.runtime.checkpoint import misfit_of
from syncline.runtime.stats import predicted_for
from syncline.runtime.topology import RankTopology

_WATCHED = 50
"""Number of steps whose median is compared with the plan."""
_UNSETTLED = 3
"""Number of first steps, which prepare buckets, that are not compared."""
_DRIFTED = 1.5


@dataclass
class Step(bucket_runner.Step):
    """One backward pass of a DDP model."""

    submitted: set[int] = field(default_factory=set)
    """The indices of its buckets."""
    unfinished: int = 0
    complete: bool = False
    """Whether DDP's last bucket was submitted. A DDP that skips unused buckets may never submit it."""
    awaits_end: bool = False
    """Whether the autograd engine will say when its backward pass is over."""
    finite: list[Tensor] = field(default_factory=list)


@dataclass
class Regrouping:
    """Steps that use the buckets of a checkpoint, whatever DDP's are."""

    buckets: tuple[tuple[str, ...], ...]
    steps_left: int = 2
    """After these, DDP's buckets will not become the checkpoint's any more, and residuals move to them."""
    seen: list[tuple[Layout, Tensor]] = field(default_factory=list)
    """DDP's buckets in this step."""

    @property
    def as_seen(self) -> bool:
        return {tuple(slot.name for slot in layout.slots) for layout, _ in self.seen} == set(self.buckets)


class Engine:
    """Exchanges the gradients of one model. All ranks create it together, in the same order as their other groups."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        parameters: Mapping[str, torch.nn.Parameter],
        route: BucketPolicy,
        timeout: timedelta,
        place: RankTopology | None = None,
        scale: Callable[[], Tensor | None] = lambda: None,
        *,
        reduction: Reduction,
    ) -> None:
        self.route, self.place = route, place
        self.buckets: dict[tuple[int, ...], Bucket] = {}
        """By the `id` of their parameters."""
        self._reduction, self._scale = reduction, scale
        self._step = Step()
        self._parameters = dict(parameters)
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        device = next(iter(parameters.values())).device
        self.runner = BucketRunner(group, device, route.lanes, timeout, place)
        self._since = 0
        """Steps since attach; a checkpoint may have counted others before."""
        self._waiting: dict[str, dict[str, Tensor]] = {}
        """Residuals of a checkpoint or an earlier layout, until the bucket of their parameter is prepared."""
        self._regrouping: Regrouping | None = None
        self._lock = threading.Lock()
        self._spans_s: deque[float] = deque(maxlen=_WATCHED)
        """Durations of the last exchanges, from first ready to last end, if a plan expects something of them."""
        self._warned = False

    # --- in the thread that runs backward -----------------------------------------------------------------------

    def submit(self, grad_bucket: Any) -> Any:
        """Exchange a bucket whose gradients are ready, and return a future of its average."""
        if self.error is not None:
            raise ExchangeError(f"an earlier exchange of this model failed: {self.runner.explained}") from self.error
        flat: Tensor = grad_bucket.buffer()
        step = self._step_of(grad_bucket)
        if self._regrouping is not None:
            return self._submit_regrouped(self._regrouping, grad_bucket, flat)
        bucket = self._see(grad_bucket, flat)
        if not step.jobs:
            self._watch_drift()
        with self._lock:
            step.unfinished += 1
        return self.runner.submit(
            step,
            bucket,
            flat,
            lambda: self._exchange(bucket, flat),
            waits=bucket.exchange.waits or bucket.state is None,  # to prepare a bucket, ranks wait for each other
            done=lambda result: self._exchanged(bucket, result, step),
        )

    def _exchange(self, bucket: Bucket, flat: Tensor) -> Any:
        return self.runner.exchange(bucket, flat, self._scale(), self._take_waiting)

    def _step_of(self, grad_bucket: Any) -> Step:
        """Return the step that a bucket belongs to: the one under way, or a new one."""
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
            raise self.runner.fail(f"bucket {max(step.submitted)}", error) from error

    def _end(self, step: Step) -> None:
        if step.finite:
            lanes = self.runner.lanes
            with lanes[0].after(lanes):
                buckets = list(self.buckets.values())
                settles = any(bucket.state is not None and bucket.state.settles for bucket in buckets)
                bucketed = {slot.name for bucket in buckets for slot in bucket.layout.slots}
                used = self._reduction.used(self._names, bucketed) if settles else None
                self.runner.settle(buckets, torch.stack(step.finite).all(), used)
        self.runner.end(step)
        self._since += 1

    # --- buckets ------------------------------------------------------------------------------------------------

    def _see(self, grad_bucket: Any, flat: Tensor) -> Bucket:
        parameters = grad_bucket.parameters()
        key = tuple(map(id, parameters))
        if key not in self.buckets:
            if flat.is_sparse:
                raise UsageError("sparse gradients are not supported: build the embedding with sparse=False")
            layout = self._layout(parameters, flat)
            self._retire(layout)
            self.buckets[key] = self._bucket(grad_bucket.index(), layout)
        return self.buckets[key]

    def _bucket(self, index: int, layout: Layout) -> Bucket:
        exchange, lane = self.route.assign([slot.name for slot in layout.slots], index, self._since)
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
        """Remove buckets whose parameters are in a new one now, and keep their residuals for it."""
        names = {slot.name for slot in new.slots}
        for key, old in list(self.buckets.items()):
            if names & {slot.name for slot in old.layout.slots}:
                if old.state is not None:
                    self._keep(old.state.tensors(old.layout))
                del self.buckets[key]

    def _keep(self, residuals: Residuals) -> None:
        with self._lock:
            for name, kinds in residuals.items():
                self._waiting[name] = {kind: tensor.detach().clone() for kind, tensor in kinds.items()}

    # --- on the lane --------------------------------------------------------------------------------------------

    def _take_waiting(self, bucket: Bucket) -> dict[str, dict[str, Tensor]]:
        """The residuals that parameters of this bucket had in other ones."""
        names = [slot.name for slot in bucket.layout.slots]
        with self._lock:
            mine = {name: self._waiting.pop(name) for name in names if name in self._waiting}
        for tensor in (tensor for kinds in mine.values() for tensor in kinds.values()):
            if tensor.is_cuda:  # made on backward's stream, and read on this lane's after the last reference is gone
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return mine

    def _exchanged(self, bucket: Bucket, flat: Tensor, step: Step) -> None:
        # The result is the same on all ranks, so they agree on whether it is finite without asking each other. A bucket
        # without a residual is asked too if others have one: GradScaler skips the whole step.
        state = bucket.state
        assert state is not None  # noqa: S101 - it ran
        finite = [state.finite(flat)] if state.settles or (self.keeps and not bucket.exchange.keeps) else []
        counted = [(flat.count_nonzero(), flat.numel())] if step.counts and bucket.exchange.keeps else []
        with self._lock:
            step.finite += finite
            step.applied += counted
            step.unfinished -= 1

    # --- steps in the buckets of a checkpoint -------------------------------------------------------------------

    def _submit_regrouped(self, regrouping: Regrouping, grad_bucket: Any, flat: Tensor) -> Any:
        """Collect the buckets of a step, and exchange all of them, regrouped, when the last one is here."""
        regrouping.seen.append((self._layout(grad_bucket.parameters(), flat), flat))
        if grad_bucket.is_last():
            try:
                self._run_regrouped(regrouping)
            except BaseException as error:
                raise self.runner.fail(f"bucket {grad_bucket.index()}", error) from error
        done: torch.futures.Future[Tensor] = torch.futures.Future(devices=[flat.device] if flat.is_cuda else None)
        done.set_result(flat)
        return done

    def _run_regrouped(self, regrouping: Regrouping) -> None:
        """On the thread and the stream of backward: this happens in one or two steps after a restart."""
        if next(iter(self._parameters.values())).is_cuda:
            torch.cuda.synchronize()  # the lanes may still be busy with what came before
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
            work = self._exchange(bucket, whole)
            if work is not None:
                work.wait()
            assert bucket.state is not None  # noqa: S101 - it ran
            self._step.finite.append(bucket.state.finite(whole))
            for piece, result in zip(pieces, whole.split([piece.numel() for piece in pieces]), strict=True):
                piece.copy_(result)
        if regrouping.as_seen or regrouping.steps_left == 0:
            self._regrouping = None
        else:
            self._regrouping = Regrouping(regrouping.buckets, regrouping.steps_left - 1)

    # --- whether the plan still fits ----------------------------------------------------------------------------

    def _watch_drift(self) -> None:
        """Record how long the exchange of the last step took, and warn once if that is much longer than planned."""
        if self.route.expected_s is None or self.last_step.began_s is None:
            return
        span = span_of(self.last_step.jobs)
        if span is not None and self._since > _UNSETTLED:
            self._spans_s.append(span.exchange_s)
        if not self._warned and len(self._spans_s) == _WATCHED and self.runner.groups[0].comm.rank == 0:
            text = self.drift()
            if text is not None:
                self._warned = True
                tell(text)

    def drift(self) -> str | None:
        """Return how much longer exchanges take than planned, if it matters."""
        expected_s = self.route.expected_s
        if expected_s is None or len(self._spans_s) < _WATCHED // 5:
            return None
        took_s = statistics.median(self._spans_s)
        if took_s <= _DRIFTED * expected_s + 1e-3:
            return None
        return (
            f"exchanging gradients takes {took_s * 1e3:.1f} ms per step, and the plan expected {expected_s * 1e3:.1f}: "
            "the network or the model has changed. syncline.tune(model, step) makes a new plan"
        )

    # --- for the handle -----------------------------------------------------------------------------------------

    @property
    def error(self) -> BaseException | None:
        return self.runner.error

    @property
    def steps(self) -> int:
        return self.runner.steps

    @property
    def last_step(self) -> bucket_runner.Step:
        return self.runner.last_step

    @property
    def predicted_sent_bytes(self) -> dict[str, int]:
        """Per step and level, from the exchange's own cost of the buckets there are now."""
        return predicted_for(self.buckets.values(), self.runner.groups)

    @property
    def keeps(self) -> bool:
        """Whether any exchange has a residual."""
        return any(exchange.keeps for exchange in self.route.exchanges)

    @property
    def ways(self) -> dict[str, int]:
        """How many buckets take each path, if an exchange has several."""
        states = [bucket.state for bucket in self.buckets.values() if bucket.state is not None]
        return dict(Counter(text for state in states if (text := state.describe())))

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Copies of all residuals."""
        tensors = {name: dict(kinds) for name, kinds in self._waiting.items()}
        for bucket in self.buckets.values():
            if bucket.state is not None:
                for name, kinds in bucket.state.tensors(bucket.layout).items():
                    tensors[name] = {kind: tensor.detach().clone() for kind, tensor in kinds.items()}
        return tensors

    def resting(self) -> Iterator[Mapping[str, Tensor]]:
        """Yield the residuals by kind, parameter after parameter. They are not copies: do not hold on to them."""
        yield from self._waiting.values()
        for bucket in self.buckets.values():
            if bucket.state is not None:
                yield from bucket.state.tensors(bucket.layout).values()

    @property
    def bucket_names(self) -> list[list[str]]:
        """The parameters of each bucket, for exchanges with a residual: they select entries per bucket."""
        ordered = sorted(self.buckets.values(), key=lambda bucket: bucket.index)
        return [[slot.name for slot in bucket.layout.slots] for bucket in ordered] if self.keeps else []

    def misfit(self, tensors: Residuals, buckets: Sequence[Sequence[str]] = ()) -> str | None:
        """Return why a checkpoint does not belong to this model, if it does not."""
        shapes = {name: _as_real(parameter).shape for name, parameter in self._parameters.items()}
        return misfit_of(shapes, tensors, (name for names in buckets for name in names))

    def load(self, tensors: Residuals, buckets: Sequence[Sequence[str]], steps: int) -> None:
        """Continue from a checkpoint that has no `misfit`.

        Args:
            tensors: The residuals.
            buckets: The buckets to use until DDP's are the same. Before its first backward DDP has others.
            steps: The number of steps that the checkpoint counts.
        """
        self._waiting.clear()
        self._keep(tensors)
        self._regrouping = None
        self.runner.steps = steps
        named = sorted(name for names in buckets for name in names)
        trained = sorted(name for name, parameter in self._parameters.items() if parameter.requires_grad)
        regroups = named == trained and not self._reduction.skips_buckets  # which may not all come
        if regroups and list(map(list, buckets)) != self.bucket_names:
            self._regrouping = Regrouping(tuple(map(tuple, buckets)))
            self.buckets.clear()  # their residuals are those of the checkpoint now
        for bucket in self.buckets.values():
            if bucket.state is not None:
                names = [slot.name for slot in bucket.layout.slots]
                bucket.state.load(bucket.layout, {n: self._waiting.pop(n) for n in names if n in self._waiting})

    def close(self) -> None:
        self.runner.close()
        self.buckets, self._step = {}, Step()


def _as_real(parameter: Tensor) -> Tensor:
    """View a complex parameter as pairs of real numbers, as DDP puts it into a bucket."""
    return torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter
