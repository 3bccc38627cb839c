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
from syncline.layerwise.layer_optimizer import LayerOptimizer
from syncline.records.pieces import BucketPieces, Piece, divide
from syncline.runtime.bucket_runner import Bucket, BucketRunner, Residuals, Step
from syncline.runtime.bucketing import join_residuals, layout_of, split_residuals
from syncline.runtime.topology import RankTopology
from syncline.runtime.validation import with_layout_of

_AFTER_FAILURE = ". Some layers have taken this step and others have not: resume from a checkpoint"


@dataclass
class LayerBucket(Bucket):
    """Pieces of gradients that are exchanged together."""

    pieces: tuple[Piece, ...] = ()
    completes: tuple[str, ...] = ()  # parameters whose last piece is in this bucket

    @property
    def label(self) -> str:
        return " to ".join(dict.fromkeys((self.pieces[0].name, self.pieces[-1].name)))

    @property
    def bytes(self) -> int:
        return self.layout.numel * self.layout.dtype.itemsize


@dataclass
class Pass(Step):
    """One backward pass."""

    gradients: dict[str, Tensor] = field(default_factory=dict)  # those that have arrived. The results overwrite them
    arrived: dict[str, None] = field(default_factory=dict)  # parameters whose gradients have arrived, in order
    submitted: int = 0
    in_flight: list[tuple[LayerBucket, Any]] = field(default_factory=list)
    """Buckets that were submitted, with their futures. Their gradients stay in memory until they have finished."""
    finite: dict[int, Tensor] = field(default_factory=dict)  # whether each bucket was finite, by index
    stepping: dict[str, Tensor] = field(default_factory=dict)
    """Whether any piece of a parameter was finite, by name. Then it takes a step, with zeros for its other pieces."""
    unused: frozenset[str] = frozenset()  # parameters that no rank has used


@dataclass(eq=False)
class GradientPipeline:
    """Exchanges the gradients of each backward pass, and steps the optimizer. All ranks create it together."""

    group: dist.ProcessGroup
    parameters: Mapping[str, nn.Parameter]
    exchange: Exchange
    optimizer: LayerOptimizer
    timeout: timedelta
    topology: RankTopology | None
    find_unused: bool
    lanes: int
    cap_bytes: int
    backlog_bytes: int

    def __post_init__(self) -> None:
        self.device = next(iter(self.parameters.values())).device
        self._names = {id(parameter): name for name, parameter in self.parameters.items()}
        self._incomplete: ExchangeError | None = None  # if only some layers stepped in the last backward pass
        self.syncing = True  # false inside `no_sync`
        self._settled = False  # whether the buckets are final, in the order in which gradients became ready
        self._pass = Pass()
        self._dropped = [torch.zeros((), dtype=torch.int64, device=self.device) for _ in range(self.lanes)]
        """Number of buckets that were not finite, by lane, because lanes run concurrently."""
        self.workspaces = [Workspace(self.device) for _ in range(self.lanes)]
        self.buckets: list[LayerBucket] = []
        self._hooks: list[Any] = []
        self.runner = BucketRunner(self.group, self.device, self.lanes, self.timeout, self.topology)
        self.runner.after_failure = _AFTER_FAILURE
        try:
            self._divide(list(self.parameters)[::-1])
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
            remedy = "if checkpointed layers share this weight, pass use_reentrant=False to torch.utils.checkpoint"
            raise UsageError(f"the gradient of {name} arrived twice in one backward pass: {remedy}")
        if self.find_unused and not now.arrived:
            _at_end_of_backward(self._fill_unused)
        self._take(name)
        now.arrived[name] = None
        if not self.find_unused:
            self._submit_ready()

    def _take(self, name: str) -> None:
        parameter = self.parameters[name]
        assert parameter.grad is not None  # noqa: S101 - it was accumulated
        self._pass.gradients[name], parameter.grad = with_layout_of(parameter.grad, parameter), None

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
        future = self.runner.submit(now, bucket, flat, lambda: self._run(bucket, flat, gradients, now))
        now.in_flight.append((bucket, future))

    def _land(self, bucket: LayerBucket, future: Any) -> None:
        """Wait for a bucket and free its gradients. On CUDA only the stream of the backward pass waits."""
        self.runner.wait(future)
        if self.device.type != "cuda":
            self._apply(bucket, self._pass)
        if not self.optimizer.at_end:
            for name in bucket.completes:
                self._pass.gradients.pop(name, None)

    def _finish(self) -> None:
        """Finish the step at the end of the backward pass, when all buckets are submitted."""
        now = self._pass
        while now.in_flight:
            self._land(*now.in_flight.pop(0))
        if self.optimizer.at_end:
            stepping = dict(zip(now.stepping, torch.stack(list(now.stepping.values())).tolist(), strict=True))
            names = [name for bucket in self.buckets for name in self._to_step(bucket, now) if stepping[name]]
            self._step(names, now, torch.ones((), dtype=torch.bool))
        self._pass = Pass()
        now.gradients.clear()
        self.runner.end(now)
        if self.device.type != "cuda" and self.group.rank() == 0:  # on CUDA, reading the flags would wait
            labels = [bucket.label for bucket in self.buckets if not bool(now.finite[bucket.index])]
            skip = f"so these layers skip the step on all ranks ({self.dropped} buckets dropped so far)"
            if labels:
                warn(f"step {self.runner.steps - 1}: the gradients of {', '.join(labels[:3])} are not finite, {skip}")
        if not self._settled:
            self._settled = True
            of_first_rank = gather_bytes(self.group, "\n".join(now.arrived).encode())[0].decode()
            self._divide(of_first_rank.split("\n"))

    def _fill_unused(self) -> None:
        """Submit all buckets at the end of the backward pass, with zeros for parameters that this rank did not use.

        Nothing may be submitted earlier: ranks with different unused parameters would order their collectives
        differently, which can deadlock.
        """
        now, names = self._pass, list(self.parameters)[::-1]
        for name in names:
            if name not in now.arrived and self.parameters[name].grad is not None:  # accumulated under no_sync
                self._take(name)
        used = torch.tensor([name in now.gradients for name in names], dtype=torch.int32, device=self.device)
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self.group)
        now.unused = frozenset(name for name, any_rank in zip(names, used.tolist(), strict=True) if not any_rank)
        for name in names:
            if name not in now.gradients:
                now.gradients[name] = torch.zeros_like(self.parameters[name])
        now.arrived |= dict.fromkeys(names)
        self._submit_ready()

    # --- on a lane ----------------------------------------------------------------------------------------------

    def _run(self, bucket: LayerBucket, flat: Tensor, gradients: Sequence[Tensor], now: Pass) -> None:
        with torch.no_grad():
            parts = [piece.of(gradient) for piece, gradient in zip(bucket.pieces, gradients, strict=True)]
            torch.cat(parts, out=flat)
            finite = self.runner.exchange_and_wait(bucket, flat)
            self.runner.settle([bucket], finite)
            flat.masked_fill_(~finite, 0)
            for part, result in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
                part.copy_(result)
        now.finite[bucket.index] = finite
        for piece in bucket.pieces:
            now.stepping[piece.name] = finite | now.stepping[piece.name] if piece.name in now.stepping else finite
        if self.device.type == "cuda":
            self._apply(bucket, now)

    def _apply(self, bucket: LayerBucket, now: Pass) -> None:
        """Step the parameters that this bucket completes."""
        self._dropped[bucket.lane] += ~now.finite[bucket.index]
        if bucket.completes and not self.optimizer.at_end:
            # A split parameter is alone in its buckets.
            self._step(self._to_step(bucket, now), now, now.stepping[bucket.completes[0]])

    def _to_step(self, bucket: LayerBucket, now: Pass) -> list[str]:
        """Return the parameters that a bucket completes, without those that no rank used."""
        # With residuals, unused parameters step too, because part of a residual may have been applied.
        return [name for name in bucket.completes if self.exchange.keeps or name not in now.unused]

    def _step(self, names: Sequence[str], now: Pass, finite: Tensor) -> None:
        if names:
            self.optimizer.step([(self.parameters[name], now.gradients[name]) for name in names], finite)

    # --- buckets ------------------------------------------------------------------------------------------------

    def _divide(self, order: Sequence[str]) -> None:
        """Collective: divide the gradients into buckets, in the order in which they become ready."""
        divided = divide(order, self.parameters, self.cap_bytes)
        if divided != tuple(bucket.pieces for bucket in self.buckets):
            self._prepare(divided, self.residuals())

    def _prepare(self, divided: BucketPieces, residuals: Residuals) -> None:
        """Collective: replace the buckets. The largest is prepared first, so that the others fit its buffers."""
        self.buckets = []  # frees the old states first
        parts: dict[str, list[int]] = {}
        for index, pieces in enumerate(divided):
            for piece in pieces:
                parts.setdefault(piece.name, []).append(index)
        buckets = []
        with meeting(self.group, "Layerwise"):
            agree(self.group, {"buckets": len(divided)}, "the division into buckets")
            for index in sorted(range(len(divided)), key=lambda index: -sum(piece.numel for piece in divided[index])):
                pieces = divided[index]
                lane = parts[pieces[0].name][0] % self.lanes  # that of its other pieces, so that the last can step it
                layout = layout_of(pieces, self.parameters, self.workspaces[lane])
                self.workspaces[lane].take("flat", (layout.numel,), layout.dtype)
                completes = tuple(piece.name for piece in pieces if parts[piece.name][-1] == index)
                bucket = LayerBucket(index, lane, self.exchange, layout, pieces=pieces, completes=completes)
                self.runner.prepare(bucket, split_residuals(pieces, residuals, self.parameters))
                buckets.append(bucket)
        self.buckets = sorted(buckets, key=lambda bucket: bucket.index)

    def residuals(self) -> Residuals:
        """Return a copy of all residuals in host memory, by parameter name and kind."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        states = [(bucket.pieces, bucket.state.tensors(bucket.layout)) for bucket in self.buckets if bucket.state]
        return join_residuals(states, self.parameters)

    @property
    def dropped(self) -> int:
        """How many buckets were dropped because they were not finite. Reading it waits for the device."""
        return sum(int(dropped) for dropped in self._dropped)

    @property
    def error(self) -> BaseException | None:
        """Why training cannot continue, if it cannot."""
        return self.runner.error or self._incomplete

    def _check_error(self) -> None:
        self.runner.raise_if_failed()
        if self._incomplete is not None:
            raise ExchangeError(f"an earlier step is incomplete: {self._incomplete}") from self._incomplete

    def check_complete(self) -> None:
        """Raise if an exchange failed, or if the last backward pass was interrupted after some layers had stepped."""
        self._check_error()
        now = self._pass
        if not now.arrived:
            return
        without = next((f", without the one of {name}" for name in self.parameters if name not in now.arrived), "")
        taken = "Some layers have taken that step and others have not: resume from a checkpoint"
        failed = ExchangeError(
            f"the last backward pass ended with {len(now.arrived)} of {len(self.parameters)} gradients{without}. "
            f"{taken if now.submitted else 'No layer has taken that step'}. If the backward pass raised no error, the "
            "model did not use these parameters: pass find_unused_parameters=True"
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
        self._prepare(divided, residuals)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self.runner.close()
        self._hooks, self.buckets, self._pass = [], [], Pass()


def _at_end_of_backward(call: Callable[[], None]) -> None:
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)
