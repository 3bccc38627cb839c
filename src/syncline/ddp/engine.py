"""Pass the buckets of a DDP model to the bucket runner, and end its steps.

DDP rebuilds its buckets after the first backward pass, in the order in which gradients became ready. A bucket is
therefore prepared when it first appears, and residuals follow their parameters, by name, from old to new buckets.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from syncline.ddp.reducer import Reduction
from syncline.dist.lane import span_of
from syncline.errors import ExchangeError, UsageError, warn
from syncline.exchange import Layout, Slot, stride_in_bucket
from syncline.runtime import bucket_runner
from syncline.runtime.bucket_policy import BucketPolicy
from syncline.runtime.bucket_runner import Bucket, BucketRunner, Residuals
from syncline.runtime.checkpoint import misfit_of
from syncline.runtime.gradient_engine import GradientEngine, copied, names_in
from syncline.runtime.topology import RankTopology

_SETTLING_STEPS, _DRIFT_STEPS, _DRIFT_FACTOR = 3, 50, 1.5
"""After the first 3 steps, rank 0 warns if the median of the last 50 exchanges is above 1.5 times the planned time."""
_MOST_REGROUPED_STEPS = 3  # number of steps after which DDP's buckets are final


@dataclass
class Step(bucket_runner.Step):
    """One backward pass of a DDP model."""

    submitted: set[tuple[int, ...]] = field(default_factory=set)  # by the `id` of parameters: indices may repeat
    unfinished: int = 0
    complete: bool = False  # whether DDP's last bucket was submitted, which a DDP that skips unused ones may never do
    awaits_end: bool = False  # whether a callback at the end of the backward pass is scheduled
    finite: list[Tensor] = field(default_factory=list)  # whether each bucket is finite, as 0-dim tensors
    pieces: dict[str, Tensor] = field(default_factory=dict)  # if regrouped: gradients by name, as views of buckets


@dataclass(eq=False)
class Engine(GradientEngine):
    """Exchanges the gradients of one model. All ranks create it together, in the same order as their other groups."""

    group: dist.ProcessGroup
    parameters: Mapping[str, torch.nn.Parameter]
    policy: BucketPolicy
    timeout: timedelta
    topology: RankTopology | None
    scale: Callable[[], Tensor | None]  # returns the current loss scale
    reduction: Reduction

    def __post_init__(self) -> None:
        super().__post_init__()
        self.keeps = any(exchange.keeps for exchange in self.policy.exchanges)  # whether any exchange has a residual
        self.buckets: dict[tuple[int, ...], Bucket] = {}  # the buckets, by the `id` of their parameters
        self._step = Step()
        self._names = {id(parameter): name for name, parameter in self.parameters.items()}
        device = next(iter(self.parameters.values())).device
        self.runner = BucketRunner(self.group, device, self.policy.lanes, self.timeout, self.topology)
        self._steps_since_attach = 0  # steps since attach, without those of a checkpoint
        self._regrouped: tuple[tuple[str, ...], ...] = ()  # the buckets of a checkpoint, in the first steps after it
        self._regrouped_steps = 0
        self._spans_s: deque[float] = deque(maxlen=_DRIFT_STEPS)  # durations of the last exchanges, for `drift`
        self._warned = False

    # --- in the thread that runs backward -----------------------------------------------------------------------

    def submit(self, grad_bucket: Any) -> Any:
        """Exchange a bucket whose gradients are ready, and return a future of its average."""
        self.runner.raise_if_failed()
        flat: Tensor = grad_bucket.buffer()
        step = self._step_of(grad_bucket)
        if self._regrouped:
            return self._submit_regrouped(step, grad_bucket, flat)
        bucket = self._bucket_of(grad_bucket.index(), grad_bucket.parameters(), flat)
        if not step.jobs:
            self._check_drift()
        with self._lock:
            step.unfinished += 1
        run = partial(self.runner.exchange, bucket, flat, self.scale(), self._take_residuals)
        waits = bucket.exchange.waits or bucket.state is None  # ranks wait for each other to prepare a bucket
        return self.runner.submit(step, bucket, flat, run, waits=waits, done=partial(self._exchanged, step, bucket))

    def _step_of(self, grad_bucket: Any) -> Step:
        """Return the step of a bucket: the current one, or a new one."""
        key = tuple(map(id, grad_bucket.parameters()))
        if self._step.complete or key in self._step.submitted:
            self.conclude()  # a rank that has joined early gets no callback at the end of a step
            self._step = Step()
        step = self._step
        step.submitted.add(key)
        step.complete = grad_bucket.is_last()
        if not step.awaits_end:
            step.awaits_end = self.reduction.when_over(self._backward_is_over)
        return step

    def _backward_is_over(self) -> None:
        step = self._step
        step.awaits_end = False
        if step.submitted and (step.complete or self.reduction.finished):
            step.complete = True
            self.conclude()

    concludes_together = False  # `conclude` is not collective

    def conclude(self) -> None:
        """End the step whose last bucket has been exchanged, if it has not been ended."""
        step, buckets = self._step, list(self.buckets.values())
        if not step.complete or step.awaits_end or step.unfinished or self.runner.error is not None:
            return
        self._step = Step()
        try:
            if step.finite:
                with self.runner.lanes[0].after(self.runner.lanes):
                    used = None
                    if any(bucket.state is not None and bucket.state.settles for bucket in buckets):
                        bucketed = {name for bucket in buckets for name in names_in(bucket.layout)}
                        used = self.reduction.used(self._names, bucketed)
                    self.runner.settle(buckets, torch.stack(step.finite).all(), used)
            self.runner.end(step)
            self._steps_since_attach += 1
        except Exception as error:
            raise self.runner.fail(f"one of {len(step.submitted)} buckets", error) from error

    # --- buckets ------------------------------------------------------------------------------------------------

    def _bucket_of(self, index: int, parameters: list[Tensor], flat: Tensor) -> Bucket:
        key = tuple(map(id, parameters))
        if key not in self.buckets:
            if flat.is_sparse:
                raise UsageError("sparse gradients are not supported: build the embedding with sparse=False")
            layout = self._layout(parameters, flat)
            for other, old in list(self.buckets.items()):  # remove those whose parameters move, and store residuals
                if not set(names_in(layout)).isdisjoint(names_in(old.layout)):
                    if old.state is not None:
                        with self._lock:
                            self._stored |= copied(old.state.tensors(old.layout))
                    del self.buckets[other]
            exchange, lane = self.policy.assign(names_in(layout), index, self._steps_since_attach)
            self.buckets[key] = Bucket(index, lane, exchange, layout)
        return self.buckets[key]

    def _layout(self, parameters: list[Tensor], flat: Tensor) -> Layout:
        slots, offset = [], 0
        for parameter in parameters:
            name = self._names.get(id(parameter))
            if name is None:
                raise ExchangeError("DDP exchanges a parameter that did not exist at attach: detach, then attach again")
            real = _as_real(parameter)
            slots.append(Slot(name, tuple(real.shape), stride_in_bucket(real), offset, real.numel()))
            offset += real.numel()
        return Layout(tuple(slots), flat.dtype, flat.device)

    # --- on the lane --------------------------------------------------------------------------------------------

    def _exchanged(self, step: Step, bucket: Bucket, flat: Tensor) -> None:
        # The result is the same on all ranks, so they agree on whether it is finite without communication. Buckets
        # without a residual are checked too if others have one, because GradScaler skips the whole step.
        checks = bucket.ready.settles or (self.keeps and not bucket.exchange.keeps)
        finite = [bucket.ready.finite(flat)] if checks else []
        with self._lock:
            step.finite += finite
            step.unfinished -= 1

    # --- steps in the buckets of a checkpoint -------------------------------------------------------------------

    def _submit_regrouped(self, step: Step, grad_bucket: Any, flat: Tensor) -> Any:
        """Collect the gradients of a step, and exchange them regrouped: sparse results depend on the buckets."""
        layout = self._layout(grad_bucket.parameters(), flat)
        step.pieces |= {slot.name: flat[slot.offset : slot.offset + slot.numel] for slot in layout.slots}
        try:
            if all(name in step.pieces for names in self._regrouped for name in names):
                self._run_regrouped(step)
        except BaseException as error:
            raise self.runner.fail(f"bucket {grad_bucket.index()}", error) from error
        return completed(flat)

    def _run_regrouped(self, step: Step) -> None:
        """Exchange a step in the buckets of the checkpoint, on the thread and the stream of backward."""
        if next(iter(self.parameters.values())).is_cuda:
            torch.cuda.synchronize()  # the lanes may still run earlier work
        for index, names in enumerate(self._regrouped):
            pieces = [step.pieces[name] for name in names]
            whole = torch.cat(pieces)
            bucket = self._bucket_of(index, [self.parameters[name] for name in names], whole)
            step.finite.append(self.runner.exchange_and_wait(bucket, whole, self.scale(), self._take_residuals))
            for piece, result in zip(pieces, whole.split([piece.numel() for piece in pieces]), strict=True):
                piece.copy_(result)
        step.pieces.clear()
        ddp_buckets = {tuple(self._names[parameter] for parameter in key) for key in step.submitted}
        self._regrouped_steps += 1
        if ddp_buckets == set(self._regrouped) or self._regrouped_steps == _MOST_REGROUPED_STEPS:
            self._regrouped = ()  # if DDP's buckets still differ, residuals move to them

    def _check_drift(self) -> None:
        """Record how long the exchange of the last step took, and warn once if that is much longer than planned."""
        last_step = self.runner.last_step
        if self.policy.expected_s is None or last_step.began_s is None:
            return
        span = span_of(last_step.jobs)
        if span is not None and self._steps_since_attach > _SETTLING_STEPS + self.policy.warmup:
            self._spans_s.append(span.exchange_s)
        warns = not self._warned and len(self._spans_s) == _DRIFT_STEPS and self.runner.groups[0].comm.rank == 0
        if warns and (text := self.drift()) is not None:
            self._warned = True
            warn(text)

    def drift(self) -> str | None:
        """Describe how much longer exchanges take than planned, or return None if they do not."""
        expected_s = self.policy.expected_s
        took_s = statistics.median(self._spans_s) if len(self._spans_s) >= _DRIFT_STEPS // 5 else 0.0
        if expected_s is None or took_s <= _DRIFT_FACTOR * expected_s + 1e-3:
            return None
        takes = f"{took_s * 1e3:.1f} ms per step, but the plan expected {expected_s * 1e3:.1f}"
        changed = "the network or the model has changed. syncline.tune(model, step) makes a new plan"
        return f"exchanging gradients takes {takes}: {changed}"

    # --- for the handle -----------------------------------------------------------------------------------------

    def predicted_sent_bytes(self) -> dict[str, int]:
        return self.runner.predicted_sent_bytes(self.buckets.values())

    @property
    def bucket_names(self) -> list[list[str]]:
        """The parameters of each bucket; empty without a residual, because a resumed run then does not need them."""
        ordered = sorted(self.buckets.values(), key=lambda bucket: bucket.index)
        return [list(names_in(bucket.layout)) for bucket in ordered] if self.keeps else []

    def misfit(self, tensors: Residuals, buckets: Sequence[Sequence[str]] = ()) -> str | None:
        """Return why a checkpoint does not belong to this model, or None if it does."""
        shapes = {name: _as_real(parameter).shape for name, parameter in self.parameters.items()}
        return misfit_of(shapes, tensors, (name for names in buckets for name in names))

    def load(self, tensors: Residuals, buckets: Sequence[Sequence[str]], steps: int) -> None:
        """Continue from a checkpoint that has no `misfit`, with its buckets until DDP has rebuilt its own."""
        self._stored, self._regrouped, self._regrouped_steps = copied(tensors), (), 0
        self.runner.steps = steps
        named = sorted(name for names in buckets for name in names)
        trained = sorted(name for name, parameter in self.parameters.items() if parameter.requires_grad)
        regroups = named == trained and not self.reduction.skips_buckets  # regrouping needs all buckets
        if regroups and list(map(list, buckets)) != self.bucket_names:
            self._regrouped = tuple(map(tuple, buckets))
            self.buckets.clear()  # their residuals are replaced by the checkpoint's
        self._load_prepared()

    def close(self) -> None:
        """Close the lanes, and drop all buckets."""
        self.runner.close()
        self.buckets, self._step = {}, Step()


def completed(flat: Tensor) -> torch.futures.Future[Tensor]:
    """Return a future that has its result already, for a hook of DDP that has nothing to wait for."""
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[flat.device] if flat.is_cuda else None)
    future.set_result(flat)
    return future


def _as_real(parameter: Tensor) -> Tensor:
    """View a complex parameter as pairs of real numbers, as DDP stores it in a bucket."""
    return torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter
