"""Move gradients from the backward pass through their exchange to the optimizer, layer by layer.

A gradient stays in its own memory until its bucket is complete and all earlier buckets are submitted. The bucket is
then gathered in a buffer that all buckets of a lane share, exchanged, and scattered back, and the optimizer steps the
parameters that are complete. On CUDA all of this is enqueued on the lane's stream, and gradients are freed once the
backward pass's stream waits for it. On the CPU the lane's thread exchanges, and the thread that runs backward steps the
optimizer, so that parameters never change while the user's code runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from syncline.dist.agreement import agree
from syncline.dist.comm import gather_bytes
from syncline.errors import ExchangeError, UsageError, warn
from syncline.exchange import Exchange
from syncline.exchange.workspace import Workspace
from syncline.health.meeting import meeting
from syncline.layerwise.bucketing import BucketPieces, Piece, divide, join_residuals, layout_of, split_residuals
from syncline.layerwise.layer_optimizer import LayerOptimizer
from syncline.runtime.bucket_runner import Bucket, BucketRunner, Residuals, Step
from syncline.runtime.topology import RankTopology
from syncline.runtime.validation import with_layout_of

_AFTER_FAILURE = ". Some layers have taken this step and others have not: resume from a checkpoint"


@dataclass
class LayerBucket(Bucket):
    """Pieces of gradients that are exchanged together."""

    pieces: tuple[Piece, ...] = ()
    completes: tuple[str, ...] = ()
    """Parameters whose last piece is in this bucket."""
    earlier: tuple[int, ...] = ()
    """If this bucket has the last piece of a split parameter: indices of the buckets with the other pieces."""

    @property
    def label(self) -> str:
        return self.pieces[0].name if len(self.pieces) == 1 else f"{self.pieces[0].name} to {self.pieces[-1].name}"

    @property
    def bytes(self) -> int:
        return self.layout.numel * self.layout.dtype.itemsize


@dataclass
class Pass(Step):
    """One backward pass."""

    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Gradients that have arrived, by name. The results overwrite them."""
    arrived: dict[str, None] = field(default_factory=dict)
    """Names of the parameters whose gradients have arrived, in that order."""
    submitted: int = 0
    in_flight: list[tuple[LayerBucket, Any]] = field(default_factory=list)
    """Buckets that were submitted, with their futures. Their gradients stay in memory until they have finished."""
    finite: dict[int, Tensor] = field(default_factory=dict)
    """Whether each bucket was finite, by index."""
    unused: frozenset[str] = frozenset()
    """Parameters that no rank has used."""


class GradientPipeline:
    """Exchanges the gradients of each backward pass, and steps the optimizer. All ranks create it together.

    Gradients are divided into buckets twice: now, and after the first backward pass, in the order in which they became
    ready.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        parameters: Mapping[str, nn.Parameter],
        exchange: Exchange,
        optimizer: LayerOptimizer,
        timeout: timedelta,
        *,
        lanes: int,
        topology: RankTopology | None,
        cap_bytes: int,
        backlog_bytes: int,
        find_unused: bool,
        residuals_on_host: bool,
    ) -> None:
        self.group, self.parameters, self.exchange, self.optimizer = group, parameters, exchange, optimizer
        self.lanes, self.topology, self.cap_bytes, self.backlog_bytes = lanes, topology, cap_bytes, backlog_bytes
        self._find_unused = find_unused
        self.device = next(iter(parameters.values())).device
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._incomplete: ExchangeError | None = None
        """Set if the last backward pass ended after only some layers had stepped."""
        self.syncing = True
        """False inside `no_sync`."""
        self._settled = False
        """Whether the buckets are final: in the order in which gradients become ready."""
        self._pass = Pass()
        self._dropped = [torch.zeros((), dtype=torch.int64, device=self.device) for _ in range(lanes)]
        """Number of buckets that were not finite, by lane, because lanes run concurrently."""
        self.workspaces = [Workspace(self.device, rest_on_host=residuals_on_host) for _ in range(lanes)]
        self.buckets: list[LayerBucket] = []
        self._hooks: list[Any] = []
        self.runner = BucketRunner(group, self.device, lanes, timeout, topology, _AFTER_FAILURE)
        try:
            self.buckets = self._prepare(divide(list(parameters)[::-1], parameters, cap_bytes), {})
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """Register the hooks through which the backward pass delivers gradients."""
        self._hooks = [p.register_post_accumulate_grad_hook(self._arrive) for p in self.parameters.values()]

    # --- in the backward pass -----------------------------------------------------------------------------------

    def _arrive(self, parameter: Tensor) -> None:
        """Take a parameter's gradient, which the backward pass has completed."""
        if not self.syncing:
            return
        self._check_error()
        name, now = self._names[id(parameter)], self._pass
        if name in now.arrived:
            raise UsageError(
                f"the gradient of {name} arrived twice in one backward pass: if several checkpointed layers share this "
                "weight, pass use_reentrant=False to torch.utils.checkpoint"
            )
        gradient = parameter.grad
        assert gradient is not None  # noqa: S101 - it has just been accumulated
        parameter.grad = None
        first = not now.arrived
        now.arrived[name] = None
        now.gradients[name] = with_layout_of(gradient, parameter)
        del gradient
        if not self._find_unused:
            self._submit_ready()
        elif first:
            _at_end_of_backward(self._fill_unused)

    def _submit_ready(self) -> None:
        """Submit the complete buckets in their fixed order, which is the same on all ranks."""
        now = self._pass
        while now.submitted < len(self.buckets):
            bucket = self.buckets[now.submitted]
            if any(piece.name not in now.arrived for piece in bucket.pieces):
                return
            now.submitted += 1
            self._submit(bucket)
        _at_end_of_backward(self._finish)

    def _submit(self, bucket: LayerBucket) -> None:
        now = self._pass
        gradients = [now.gradients[piece.name] for piece in bucket.pieces]
        while now.in_flight and sum(other.bytes for other, _ in now.in_flight) + bucket.bytes > self.backlog_bytes:
            self._land(*now.in_flight.pop(0))
        flat = self.workspaces[bucket.lane].take("flat", (bucket.layout.numel,), bucket.layout.dtype)
        future = self._or_error(
            lambda: self.runner.submit(now, bucket, flat, lambda: self._run(bucket, flat, gradients, now))
        )
        now.in_flight.append((bucket, future))

    def _land(self, bucket: LayerBucket, future: Any) -> None:
        """Wait for a bucket and free its gradients. On CUDA only the stream of the backward pass waits."""
        self._or_error(future.wait)
        if self.device.type != "cuda":
            self._apply(bucket, self._pass)
        if not self.optimizer.at_end:
            for name in bucket.completes:
                self._pass.gradients.pop(name, None)

    def _or_error(self, call: Callable[[], Any]) -> Any:
        """Return the result of `call`. If the runner has failed, raise its error instead of the future's copy."""
        try:
            return call()
        except BaseException as error:
            if self.runner.error is not None:
                raise self.runner.error from error
            raise

    def _finish(self) -> None:
        """Finish the step at the end of the backward pass, when all buckets are submitted."""
        now = self._pass
        while now.in_flight:
            self._land(*now.in_flight.pop(0))
        if self.optimizer.at_end:
            flags = torch.stack([_steps(bucket, now) for bucket in self.buckets]).tolist()
            stepping = [bucket for bucket, steps in zip(self.buckets, flags, strict=True) if steps]
            names = [name for bucket in stepping for name in _names_to_step(bucket, now)]
            if names:
                self._step(names, now, torch.ones((), dtype=torch.bool))
        self._pass = Pass()
        now.gradients.clear()
        self.runner.end(now)
        if self.device.type != "cuda":
            self._warn_of_dropped(now)
        if not self._settled:
            self._divide_again(list(now.arrived))

    def _fill_unused(self) -> None:
        """Submit all buckets at the end of the backward pass, with zeros for parameters that this rank did not use.

        Nothing may be submitted earlier: ranks with different unused parameters would order their collectives
        differently, which can deadlock.
        """
        now, names = self._pass, list(self.parameters)[::-1]
        for name in names:
            parameter = self.parameters[name]
            if name not in now.arrived and parameter.grad is not None:  # accumulated under no_sync
                now.arrived[name] = None
                now.gradients[name], parameter.grad = with_layout_of(parameter.grad, parameter), None
        used = torch.tensor([name in now.arrived for name in names], dtype=torch.int32, device=self.device)
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self.group)
        now.unused = frozenset(name for name, any_rank in zip(names, used.tolist(), strict=True) if not any_rank)
        for name in names:
            if name not in now.arrived:
                now.arrived[name] = None
                now.gradients[name] = torch.zeros_like(self.parameters[name])
        self._submit_ready()

    # --- on a lane ----------------------------------------------------------------------------------------------

    def _run(self, bucket: LayerBucket, flat: Tensor, gradients: Sequence[Tensor], now: Pass) -> None:
        with torch.no_grad():
            parts = [
                (piece.of(gradient), slot.offset)
                for piece, gradient, slot in zip(bucket.pieces, gradients, bucket.layout.slots, strict=True)
            ]
            for part, offset in parts:
                flat[offset : offset + part.numel()].copy_(part)
            work = self.runner.exchange(bucket, flat)
            if work is not None:
                work.wait()
            assert bucket.state is not None  # noqa: S101 - it ran
            finite = bucket.state.finite(flat)
            self.runner.settle([bucket], finite)
            flat.masked_fill_(~finite, 0)
            for part, offset in parts:
                part.copy_(flat[offset : offset + part.numel()])
        now.finite[bucket.index] = finite
        if self.device.type == "cuda":
            self._apply(bucket, now)

    def _apply(self, bucket: LayerBucket, now: Pass) -> None:
        """Step the parameters that this bucket completes."""
        self._dropped[bucket.lane] += ~now.finite[bucket.index]
        names = _names_to_step(bucket, now)
        if names and not self.optimizer.at_end:
            self._step(names, now, _steps(bucket, now))

    def _step(self, names: Sequence[str], now: Pass, finite: Tensor) -> None:
        self.optimizer.step([(self.parameters[name], now.gradients[name]) for name in names], finite)

    # --- buckets ------------------------------------------------------------------------------------------------

    def _prepare(self, divided: BucketPieces, residuals: Residuals) -> list[LayerBucket]:
        """Collective: return buckets with their states. The largest comes first, so that the others fit its buffers."""
        parts: dict[str, list[int]] = {}
        for index, pieces in enumerate(divided):
            for piece in pieces:
                parts.setdefault(piece.name, []).append(index)
        by_size = sorted(range(len(divided)), key=lambda index: -sum(piece.numel for piece in divided[index]))
        buckets = []
        with meeting(self.group, "Layerwise"):
            agree(self.group, {"buckets": len(divided)}, "the division into buckets")
            for index in by_size:
                pieces = divided[index]
                first, *others = parts[pieces[0].name]
                lane = first % self.lanes  # one for all pieces of a parameter, so that the last bucket can step it
                layout = layout_of(pieces, self.parameters, self.workspaces[lane])
                self.workspaces[lane].take("flat", (layout.numel,), layout.dtype)
                completes = tuple(piece.name for piece in pieces if parts[piece.name][-1] == index)
                earlier = (first, *others[:-1]) if completes and others else ()
                bucket = LayerBucket(
                    index, lane, self.exchange, layout, pieces=pieces, completes=completes, earlier=earlier
                )
                self.runner.prepare(bucket, split_residuals(pieces, residuals, self.parameters))
                buckets.append(bucket)
        return sorted(buckets, key=lambda bucket: bucket.index)

    def _divide_again(self, order: Sequence[str]) -> None:
        """Collective: make new buckets, in the order in which the gradients of rank 0 became ready."""
        self._settled = True
        first = gather_bytes(self.group, "\n".join(order).encode())[0].decode().split("\n")
        divided = divide(first, self.parameters, self.cap_bytes)
        if divided != tuple(bucket.pieces for bucket in self.buckets):
            residuals = self.residuals()
            self.buckets = []  # frees the old states first
            self.buckets = self._prepare(divided, residuals)

    def residuals(self) -> dict[str, dict[str, Tensor]]:
        """Return a copy of all residuals in host memory, by parameter name and kind."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return join_residuals(
            [(bucket.pieces, bucket.state.tensors(bucket.layout)) for bucket in self.buckets if bucket.state],
            self.parameters,
        )

    # --- buckets that are not finite ----------------------------------------------------------------------------

    @property
    def dropped(self) -> int:
        """How many buckets were dropped because they were not finite. Reading it waits for the device."""
        return sum(int(dropped) for dropped in self._dropped)

    def _warn_of_dropped(self, now: Pass) -> None:
        labels = [bucket.label for bucket in self.buckets if not bool(now.finite[bucket.index])]
        if labels and self.group.rank() == 0:
            warn(
                f"step {self.runner.steps - 1}: the gradients of {', '.join(labels[:3])} are not finite, so these "
                f"layers skip the step on all ranks ({self.dropped} buckets dropped so far)"
            )

    # --- between steps ------------------------------------------------------------------------------------------

    @property
    def error(self) -> BaseException | None:
        """Why training cannot continue, if it cannot."""
        return self.runner.error or self._incomplete

    def _check_error(self) -> None:
        if self.error is not None:
            raise ExchangeError(f"an earlier exchange of this model failed: {self.error}") from self.error

    def check_complete(self) -> None:
        """Raise if an exchange failed, or if the last backward pass was interrupted after some layers had stepped."""
        self._check_error()
        now = self._pass
        if not now.arrived:
            return
        missing = [name for name in self.parameters if name not in now.arrived]
        state = "No layer has taken that step"
        if now.submitted:
            state = "Some layers have taken that step and others have not: resume from a checkpoint"
        failed = ExchangeError(
            f"the last backward pass ended with {len(now.arrived)} of {len(self.parameters)} gradients"
            f"{f', without the one of {missing[0]}' if missing else ''}. {state}. If the backward pass raised no "
            "error, the model did not use these parameters: pass find_unused_parameters=True"
        )
        if now.submitted:
            self._incomplete = failed
        else:
            self._pass = Pass()
        raise failed

    def resume(self, divided: BucketPieces, residuals: Residuals, steps: int) -> None:
        """Collective: continue from a checkpoint, after waiting for the buckets of an interrupted backward pass."""
        for _, future in self._pass.in_flight:
            future.wait()
        self._pass, self._incomplete = Pass(), None
        self.runner.steps, self._settled = steps, self._settled or steps > 0
        self.buckets = []  # frees the old states first
        self.buckets = self._prepare(divided, residuals)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self.runner.close()
        self._hooks, self.buckets, self._pass = [], [], Pass()


def _names_to_step(bucket: LayerBucket, now: Pass) -> list[str]:
    """Return the parameters that a bucket completes, without those that no rank used.

    If the exchange has residuals, unused parameters step too, because part of a residual may have been applied.
    """
    return [name for name in bucket.completes if bucket.exchange.keeps or name not in now.unused]


def _steps(bucket: LayerBucket, now: Pass) -> Tensor:
    """Return whether the parameters that a bucket completes take a step.

    A parameter in several buckets takes a step if any of its pieces was finite. The result of the others is zero.
    """
    if not bucket.earlier:
        return now.finite[bucket.index]
    return torch.stack([now.finite[index] for index in (bucket.index, *bucket.earlier)]).any()


def _at_end_of_backward(call: Callable[[], None]) -> None:
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)
