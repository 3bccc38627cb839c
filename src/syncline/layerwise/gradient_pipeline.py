"""Move gradients from the backward pass through their exchange to the optimizer, layer by layer.

A gradient stays in its own memory until its bucket is complete and all earlier buckets are submitted. The bucket is
then gathered in a buffer that all buckets of a lane share, exchanged, and scattered back, and the optimizer steps the
parameters that are complete. On CUDA all of this is enqueued on the lane's stream, and gradients are freed once the
backward pass's stream waits for it. On the CPU the lane's thread exchanges, and the thread that runs backward steps the
optimizer, so that parameters never change while the user's code runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from syncline.dist.agreement import agree
from syncline.dist.comm import gather_bytes
from syncline.errors import ExchangeError, UsageError, warn
from syncline.exchange.workspace import Workspace
from syncline.health.meeting import meeting
from syncline.layerwise.backward_pass import Flight, LayerBucket, Pass, counts
from syncline.layerwise.bucketing import BucketPieces, divide, join_residuals, layout_of, split_residuals
from syncline.layerwise.layer_optimizer import LayerOptimizer
from syncline.runtime.bucket_policy import BucketPolicy
from syncline.runtime.bucket_runner import BucketRunner, Residuals
from syncline.runtime.topology import RankTopology
from syncline.runtime.validation import with_layout_of

_AFTER_FAILURE = ". Some layers have taken this step and others have not: resume from a checkpoint"


class GradientPipeline:
    """Exchanges the gradients of each backward pass, and steps the optimizer. All ranks create it together.

    Args:
        group: The ranks that exchange.
        parameters: The trained parameters, by name.
        policy: Chooses the exchange and lane of each bucket.
        optimizer: Steps the parameters.
        timeout: How long a collective may take.
        topology: The topology, for exchanges that need it.
        cap_bytes: The largest size of a bucket.
        backlog_bytes: Bytes of gradients that may wait for their exchange before the backward pass waits.
        find_unused: Whether parameters may get no gradient in a step.
        residuals_on_host: Whether residuals are stored in host memory.
        planned: The buckets of a plan. Without them, the pipeline divides the gradients itself, and again after the
            first backward pass, in the order in which the gradients became ready.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        parameters: Mapping[str, nn.Parameter],
        policy: BucketPolicy,
        optimizer: LayerOptimizer,
        timeout: timedelta,
        *,
        topology: RankTopology | None,
        cap_bytes: int,
        backlog_bytes: int,
        find_unused: bool,
        residuals_on_host: bool,
        planned: BucketPieces | None,
    ) -> None:
        self.group, self._parameters, self._policy, self._optimizer = group, parameters, policy, optimizer
        self._cap_bytes, self._backlog_bytes, self._find_unused = cap_bytes, backlog_bytes, find_unused
        self.device = next(iter(parameters.values())).device
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._incomplete: ExchangeError | None = None
        """Set if the last backward pass ended after only some layers had stepped."""
        self.syncing = True
        """False inside `no_sync`."""
        self.settled = planned is not None
        """Whether the buckets are final: planned, or in the order in which gradients become ready."""
        self._pass = Pass()
        self._dropped = [torch.zeros((), dtype=torch.int64, device=self.device) for _ in range(policy.lanes)]
        """Buckets that were not finite, by lane, because lanes run concurrently."""
        self._warned_dropped = 0
        self.workspaces = [Workspace(self.device, rest_on_host=residuals_on_host) for _ in range(policy.lanes)]
        self.buckets: list[LayerBucket] = []
        self._hooks: list[Any] = []
        self.runner = BucketRunner(group, self.device, policy.lanes, timeout, topology, _AFTER_FAILURE)
        try:
            self.buckets = self._prepare(planned or divide(list(parameters)[::-1], parameters, cap_bytes))
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """Register the hooks through which the backward pass delivers gradients."""
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._arrive) for parameter in self._parameters.values()
        ]

    # --- in the backward pass -----------------------------------------------------------------------------------

    def _arrive(self, parameter: Tensor) -> None:
        """Take a parameter's gradient, which the backward pass has completed."""
        if not self.syncing:
            return
        if self.error is not None:
            raise ExchangeError(f"an earlier exchange of this model failed: {self.error}") from self.error
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
        now.arrived.add(name)
        now.order.append(name)
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
        waiting = bucket.layout.numel * bucket.layout.dtype.itemsize
        while now.in_flight and sum(flight.bytes for flight in now.in_flight) + waiting > self._backlog_bytes:
            self._land(now.in_flight.pop(0))
        on_lane = self.device.type == "cuda"
        flat = self.workspaces[bucket.lane].take("flat", (bucket.layout.numel,), bucket.layout.dtype)
        future = self._or_error(
            lambda: self.runner.submit(now, bucket, flat, lambda: self._run(bucket, gradients, now, apply=on_lane))
        )
        now.in_flight.append(Flight(bucket, future, waiting))

    def _land(self, flight: Flight) -> None:
        """Wait for a bucket and free its gradients. On CUDA only the stream of the backward pass waits."""
        self._or_error(flight.future.wait)
        if self.device.type != "cuda":
            self._apply(flight.bucket, self._pass)
        for name in flight.bucket.ends:
            if not self._optimizer.at_end:
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
            self._land(now.in_flight.pop(0))
        if self._optimizer.at_end:
            flags = torch.stack([counts(bucket, now) for bucket in self.buckets]).tolist()
            names = [
                name
                for bucket, counted in zip(self.buckets, flags, strict=True)
                for name in self._to_step(bucket, now)
                if counted
            ]
            if names:
                self._step(names, now.gradients, torch.ones((), dtype=torch.bool))
        self._optimizer.end()
        self._pass = Pass()
        now.gradients.clear()
        self.runner.end(now)
        if self.device.type != "cuda":
            self._warn_of_dropped(now)
        if not self.settled:
            self._divide_again(now.order)

    def _fill_unused(self) -> None:
        """Submit all buckets at the end of the backward pass, with zeros for parameters that this rank did not use.

        Nothing may be submitted earlier: ranks with different unused parameters would order their collectives
        differently, which can deadlock.
        """
        now, names = self._pass, list(self._parameters)
        for name, parameter in self._parameters.items():
            if name not in now.arrived and parameter.grad is not None:  # accumulated under no_sync
                now.arrived.add(name)
                now.gradients[name], parameter.grad = with_layout_of(parameter.grad, parameter), None
        used = torch.tensor([name in now.arrived for name in names], dtype=torch.int32, device=self.device)
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self.group)
        now.unused = frozenset(name for name, any_rank in zip(names, used.tolist(), strict=True) if not any_rank)
        for name in names:
            if name not in now.arrived:
                now.arrived.add(name)
                now.gradients[name] = torch.zeros_like(self._parameters[name])
        self._submit_ready()

    # --- on a lane ----------------------------------------------------------------------------------------------

    def _run(self, bucket: LayerBucket, gradients: Sequence[Tensor], now: Pass, *, apply: bool) -> None:
        workspace = self.workspaces[bucket.lane]
        flat = workspace.take("flat", (bucket.layout.numel,), bucket.layout.dtype)
        with torch.no_grad():
            parts = [
                (piece.of(gradient), slot.offset)
                for piece, gradient, slot in zip(bucket.pieces, gradients, bucket.layout.slots, strict=True)
            ]
            for part, offset in parts:
                flat[offset : offset + part.numel()].copy_(part)
            self._optimizer.before(bucket.pieces, flat, workspace)
            work = self.runner.exchange(bucket, flat)
            if work is not None:
                work.wait()
            assert bucket.state is not None  # noqa: S101 - it ran
            finite = bucket.state.finite(flat)
            self.runner.settle([bucket], finite)
            flat.masked_fill_(~finite, 0)
            self._optimizer.after(bucket.pieces, flat, finite, workspace)
            for part, offset in parts:
                part.copy_(flat[offset : offset + part.numel()])
        now.finite[bucket.index] = finite
        if apply:
            self._apply(bucket, now)

    def _apply(self, bucket: LayerBucket, now: Pass) -> None:
        """Step the parameters that this bucket completes."""
        self._dropped[bucket.lane] += ~now.finite[bucket.index]
        names = self._to_step(bucket, now)
        if names and not self._optimizer.at_end:
            self._step(names, now.gradients, counts(bucket, now))

    def _to_step(self, bucket: LayerBucket, now: Pass) -> list[str]:
        """Return the parameters that a bucket completes, without those that no rank used.

        If the exchange has residuals, unused parameters step too, because part of a residual may have been applied.
        """
        keeps = self._optimizer.mirror or bucket.exchange.keeps
        return [name for name in bucket.ends if keeps or name not in now.unused]

    def _step(self, names: Sequence[str], gradients: Mapping[str, Tensor], finite: Tensor) -> None:
        self._optimizer.step([(self._parameters[name], gradients[name]) for name in names], finite)

    # --- buckets ------------------------------------------------------------------------------------------------

    def _prepare(self, divided: BucketPieces, residuals: Residuals | None = None) -> list[LayerBucket]:
        """Collective: return buckets with their states. The largest comes first, so that the others fit its buffers."""
        ends: dict[str, int] = {piece.name: index for index, pieces in enumerate(divided) for piece in pieces}
        starts = {piece.name: index for index, pieces in reversed(list(enumerate(divided))) for piece in pieces}
        buckets: dict[int, LayerBucket] = {}
        sizes = {index: sum(piece.numel for piece in pieces) for index, pieces in enumerate(divided)}
        with meeting(self.group, "Layerwise"):
            agree(self.group, {"buckets": len(divided)}, "the division into buckets")
            for index in sorted(sizes, key=lambda index: (-sizes[index], index)):
                pieces = divided[index]
                names = list(dict.fromkeys(piece.name for piece in pieces))
                # All pieces of a parameter use one lane, so the last bucket to run can step the parameter.
                exchange, lane = self._policy.assign(names, starts[pieces[0].name], self.runner.steps)
                layout = layout_of(pieces, self._parameters, self.workspaces[lane])
                self.workspaces[lane].take("flat", (layout.numel,), layout.dtype)
                last = tuple(name for name in names if ends[name] == index)
                before = tuple(other for other in range(index) if last and divided[other][0].name == pieces[0].name)
                bucket = LayerBucket(index, lane, exchange, layout, pieces=pieces, ends=last, before=before)
                own = {} if residuals is None else split_residuals(pieces, residuals, self._parameters)
                self.runner.prepare(bucket, own)
                buckets[index] = bucket
        return [buckets[index] for index in range(len(divided))]

    def _divide_again(self, order: Sequence[str]) -> None:
        """Collective: make new buckets, in the order in which the gradients of rank 0 became ready."""
        self.settled = True
        first = gather_bytes(self.group, "\n".join(order).encode())[0].decode().split("\n")
        rest = [name for name in list(self._parameters)[::-1] if name not in set(first)]
        divided = divide([*first, *rest], self._parameters, self._cap_bytes)
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
            self._parameters,
        )

    # --- buckets that are not finite ----------------------------------------------------------------------------

    @property
    def dropped(self) -> int:
        """How many buckets were dropped because they were not finite. Reading it waits for the device."""
        return sum(int(dropped) for dropped in self._dropped)

    def _warn_of_dropped(self, now: Pass) -> None:
        dropped = self.dropped
        if dropped > self._warned_dropped and self.group.rank() == 0:
            labels = [bucket.label for bucket in self.buckets if not bool(now.finite.get(bucket.index, True))]
            warn(
                f"step {self.runner.steps - 1}: the gradients of {', '.join(labels[:3])} are not finite, so these "
                f"layers skip the step on all ranks ({dropped} buckets dropped so far)"
            )
        self._warned_dropped = dropped

    # --- between steps ------------------------------------------------------------------------------------------

    def check_complete(self) -> None:
        """Raise if an exchange failed, or if the last backward pass was interrupted after some layers had stepped."""
        if self.error is not None:
            raise ExchangeError(f"an earlier exchange of this model failed: {self.error}") from self.error
        now = self._pass
        if not now.arrived:
            return
        missing = [name for name in self._parameters if name not in now.arrived]
        failed = ExchangeError(
            f"the last backward pass ended with {len(now.arrived)} of {len(self._parameters)} gradients"
            f"{f', without the one of {missing[0]}' if missing else ''}. "
            + (
                "Some layers have taken that step and others have not: resume from a checkpoint. "
                if now.submitted
                else "No layer has taken that step. "
            )
            + "If the backward pass raised no error, the model did not use these parameters: pass "
            "find_unused_parameters=True"
        )
        if now.submitted:
            self._incomplete = failed
        else:
            self._pass = Pass()
        raise failed

    def resume(self, divided: BucketPieces, residuals: Residuals, steps: int) -> None:
        """Collective: continue from a checkpoint, after waiting for the buckets of an interrupted backward pass."""
        for flight in self._pass.in_flight:
            flight.future.wait()
        self._pass, self._incomplete = Pass(), None
        self.runner.steps, self.settled = steps, self.settled or steps > 0
        self.buckets = []  # frees the old states first
        self.buckets = self._prepare(divided, residuals)

    @property
    def error(self) -> BaseException | None:
        """Why training cannot continue, if it cannot."""
        return self.runner.error or self._incomplete

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self.runner.close()
        self._hooks, self.buckets, self._pass = [], [], Pass()


def _at_end_of_backward(call: Callable[[], None]) -> None:
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)
