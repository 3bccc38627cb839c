"""Sum gradients in shards during backward, step the optimizer on shards, and gather weights behind the next forward.

A bucket's way through a training step:

1. When its gradients are ready, a lane reduce-scatters them: each rank gets the average of its own shard.
2. `optimizer.step()` waits for all shards, and steps this rank's.
3. The new weights are gathered in the order in which the forward pass needs them. A parameter is pending until its
   weights have arrived, and its first use waits for them.

A bucket may also be all-reduced as a whole during backward. All ranks then step all of it, and nothing is gathered.
This pays for some of the buckets, if the links would otherwise be idle during backward.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.dist.agreement import current_device
from syncline.dist.comm import gather_bytes
from syncline.errors import SynclineError, UsageError, warn
from syncline.exchange import Dense, Exchange, Layout, Quantized
from syncline.exchange.halves import AllReduce
from syncline.exchange.lossy_halves import MasterState, halves_of, owners_of
from syncline.exchange.workspace import Workspace
from syncline.health.meeting import meeting
from syncline.overlap import guards
from syncline.overlap.shards import ShardedBucket, ShardedOptimizer
from syncline.runtime.bucket_runner import Bucket, BucketRunner, Residuals, Step
from syncline.runtime.topology import RankTopology

_increment_version = getattr(torch.autograd.graph, "increment_version", None)  # torch 2.4 does not have it
_ORDER_KNOWN_AFTER = 2  # forward passes with shards


@dataclass(eq=False)
class OverlapBucket:
    """A bucket whose exchange extends into the next forward pass."""

    sharded: ShardedBucket
    reduced: Bucket  # its gradients
    gathered: Bucket  # its weights, unless the bucket is whole
    names: tuple[str, ...]
    gradient: Tensor | None = None  # this rank's shard of the last gradients
    settled: bool = True  # whether the residual contains the errors of the last gradients
    reducing: Any = None  # a future, while gradients are being summed
    gathering: Any = None  # a future, while weights are being gathered


class OverlapEngine:
    """Exchanges the gradients and weights of one model. All ranks create it together."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        parameters: Mapping[str, nn.Parameter],
        optimizer: Optimizer,
        timeout: timedelta,
        reuses_gradients: bool,
        exchange: Exchange | None = None,
        gather: str = "fp32",
        scale: Callable[[], Tensor | None] = lambda: None,
        topology: RankTopology | None = None,
    ) -> None:
        """`reuses_gradients` says whether a parameter's gradient is always the same tensor, a view of DDP's bucket.

        Gradients are sent as `exchange` sends them to the owners of parts, and weights in the format `gather`. `scale`
        returns the current loss scale.
        """
        self.group, self.parameters, self._optimizer = group, parameters, optimizer
        self._exchange, self._gather, self._scale = exchange or Dense(), gather, scale
        self._reuses_gradients = reuses_gradients
        self.device = next(iter(parameters.values())).device
        self.buckets: list[OverlapBucket] = []  # in the order in which gradients are ready
        self.optimizer: ShardedOptimizer | None = None  # once weights are in shards
        self._order: list[OverlapBucket] = []  # in which weights are gathered
        self._used: list[OverlapBucket] = []  # in the order in which the last forward pass used them
        self._withheld: dict[str, Tensor] = {}  # gradients that must not be used, if they are reused
        self._lock = threading.RLock()
        self._stream: Any = None  # of the last step, on CUDA
        self._steps = 0  # of the optimizer, with shards
        self._step = Step()
        self._summed: list[OverlapBucket] = []  # buckets whose gradients the step has begun to sum
        self.runner = BucketRunner(group, self.device, 1, timeout, topology)

    def start(
        self, layouts: Sequence[Layout], whole: Collection[int], order: Sequence[int], residuals: Residuals
    ) -> None:
        """Collective: move the weights of these buckets into shards. Those with an index in `whole` stay whole.

        Weights are gathered in this `order`, until it is known in which order the forward pass uses them.
        """
        ranks, rank = self.group.size(), self.group.rank()
        workspace, topology = Workspace(self.device), self.runner.groups[0].comm.topology
        owned, entire = owners_of(self._exchange, topology), self._exchange
        if isinstance(entire, Dense | Quantized):
            entire = AllReduce()
        with meeting(self.group, "optimizer.step()"), torch.no_grad():
            # The largest first, so that the others share its buffers.
            for index, layout in sorted(enumerate(layouts), key=lambda item: -item[1].numel):
                shared = Layout(layout.slots, layout.dtype, layout.device, workspace)
                names = tuple(slot.name for slot in layout.slots)
                scatter, gather, part = halves_of(self._exchange, self._gather, layout.numel, layout.dtype, topology)
                reduced = Bucket(index, 0, entire if index in whole else scatter, shared)
                gathered = Bucket(index, 0, gather, shared)
                self.runner.prepare(reduced, {name: residuals[name] for name in names if name in residuals})
                if index not in whole:
                    self.runner.prepare(gathered, {})
                master = gathered.state.master if isinstance(gathered.state, MasterState) else None
                sharded = ShardedBucket(layout, ranks, rank, part, index in whole, master, owned)
                sharded.move_in(self.parameters)
                if master is not None:
                    master.copy_(sharded.own)
                self.buckets.append(OverlapBucket(sharded, reduced, gathered, names))
        self.buckets.sort(key=lambda bucket: bucket.reduced.index)
        self._order = [self.buckets[index] for index in order if index not in whole]
        parts = [bucket.sharded for bucket in self.buckets]
        self.optimizer = ShardedOptimizer(self._optimizer, self.parameters, parts, self.group)

    # --- during backward ------------------------------------------------------------------------------------------

    def reduce(self, bucket: OverlapBucket, flat: Tensor) -> None:
        """Begin to sum the gradients of a bucket. `flat` must not change until `wait` has returned."""
        self.runner.raise_if_failed()
        for name in bucket.names:
            if type(self.parameters[name].grad) is guards.UnfinishedGradient:
                text = f"the gradient of {name} was not set to zero since the last synchronised backward pass"
                raise UsageError(f"{text}: call optimizer.zero_grad(), and accumulate gradients under no_sync()")
        if bucket in self._summed:  # the script has not stepped the last gradients
            self._settle(applied=False)
            self.end_step()
        self._summed.append(bucket)
        run = partial(self.runner.exchange, bucket.reduced, flat, self._scale())
        bucket.reducing = self.runner.submit(self._step, bucket.reduced, flat, run)
        bucket.gradient = getattr(bucket.reduced.ready, "gradient", flat)
        bucket.settled = not bucket.reduced.ready.settles

    def _settle(self, *, applied: bool) -> None:
        """Commit the residuals of the last step, or restore those from before it."""
        buckets = [bucket for bucket in self.buckets if not bucket.settled]
        if buckets:
            with self.runner.lanes[0].after(self.runner.lanes):
                for bucket in buckets:
                    finite = getattr(bucket.reduced.ready, "finite_here", None)
                    kept = finite if applied and finite is not None else torch.full((), applied, device=self.device)
                    self.runner.settle([bucket.reduced], kept)
                    bucket.settled = True

    def end_step(self) -> None:
        """Count a step: weights that were gathered behind its forward, and gradients of its backward."""
        if self._summed:
            self.runner.end(self._step)
            self._step, self._summed = Step(), []

    def backward_is_over(self) -> None:
        """Forbid the use of the gradients of this rank alone."""
        for bucket in self.buckets:
            if bucket.reducing is not None:
                for name in bucket.names:
                    gradient = self.parameters[name].grad
                    if gradient is not None:
                        guards.withhold(gradient, name, self)
                        if self._reuses_gradients:
                            self._withheld[name] = gradient

    def release_if_zeroed(self, name: str) -> None:
        """Allow the use of a gradient that `zero_grad` has removed. DDP may use its memory again for the next one."""
        if self.parameters[name].grad is None and name in self._withheld:
            guards.release(self._withheld.pop(name))

    # --- between backward and the next forward --------------------------------------------------------------------

    def wait(self) -> None:
        """Wait until all gradients of the last backward pass are summed."""
        for bucket in self.buckets:
            if bucket.reducing is not None:
                self._wait_for(bucket.reducing)
                bucket.reducing = None

    @contextlib.contextmanager
    def explained(self, what: str) -> Iterator[None]:
        """Explain a collective that fails inside this context like a failed exchange, with suspects."""
        try:
            yield
        except SynclineError:
            raise
        except RuntimeError as error:
            raise self.runner.fail(what, error) from error

    def _wait_for(self, future: Any) -> None:
        self.runner.wait(future)

    def zero(self, name: str) -> bool:
        """Set this rank's shard of a parameter's gradient to zero. Return False if the optimizer has stepped it."""
        self.wait()  # an exchange may still read the gradient
        bucket = next(bucket for bucket in self.buckets if name in bucket.names)
        if bucket.gradient is None:
            return False
        for piece, gradient in zip(bucket.sharded.pieces, bucket.sharded.gradients(bucket.gradient), strict=True):
            if piece.name == name:
                gradient.zero_()
        return True

    def _pieces(self) -> list[tuple[OverlapBucket, str, Tensor, Tensor]]:
        """Return the pieces of this rank that have a gradient: bucket, parameter, weights and gradient."""
        found = []
        for bucket in self.buckets:
            if bucket.gradient is not None:
                pieces, shards = bucket.sharded.pieces, bucket.sharded.shards
                gradients = bucket.sharded.gradients(bucket.gradient)
                for piece, shard, gradient in zip(pieces, shards, gradients, strict=True):
                    if type(self.parameters[piece.name].grad) is guards.UnfinishedGradient:
                        found.append((bucket, piece.name, shard, gradient))
        return found

    def unscale(self, dtype: torch.dtype, found_inf: Tensor, inverse_scale: Tensor) -> None:
        self.wait()
        gradients = [gradient for _, _, _, gradient in self._pieces() if gradient.dtype == dtype]
        if gradients:
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inverse_scale)
        with self.explained("the flags of finite gradients"):
            dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=self.group)

    def clip_grad_norm(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """Collective: scale all gradients so that their norm is at most `max_norm`, and return the norm before."""
        self.wait()
        pieces = self._pieces()
        counted = [g for bucket, _, _, g in pieces if not bucket.sharded.whole or self.group.rank() == 0]
        wide = torch.float32
        for bucket in self.buckets:
            wide = torch.promote_types(wide, bucket.sharded.layout.dtype)
        norms = torch._foreach_norm(counted, norm_type, dtype=wide) if counted else ()  # few kernels on a GPU
        zero = torch.zeros((), dtype=wide, device=self.device)
        if norm_type == float("inf"):
            total = torch.stack([*norms, zero]).amax()
            with self.explained("the norm of gradients"):
                dist.all_reduce(total, op=dist.ReduceOp.MAX, group=self.group)
        else:
            total = torch.stack([*norms, zero]).pow(norm_type).sum()
            with self.explained("the norm of gradients"):
                dist.all_reduce(total, group=self.group)
            total = total.pow(1 / norm_type)
        if error_if_nonfinite and not bool(torch.isfinite(total)):
            raise RuntimeError(f"the norm of the gradients is {float(total)}, so they cannot be clipped")
        scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)  # as torch.nn.utils.clip_grad_norm_ computes it
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for _, _, _, gradient in pieces:
            by_type.setdefault(gradient.dtype, []).append(gradient)
        for dtype, gradients in by_type.items():
            torch._foreach_mul_(gradients, scale.to(dtype))
        return total

    def before_step(self) -> None:
        """Let the optimizer see this rank's pieces and their gradients."""
        assert self.optimizer is not None  # noqa: S101
        for name in (name for bucket in self.buckets for name in bucket.names):
            if type(self.parameters[name].grad) not in (type(None), guards.UnfinishedGradient):
                text = f"the gradient of {name} is not that of a synchronised backward pass"
                raise UsageError(f"{text}: end accumulation outside no_sync(), and call zero_grad() after each step")
        self.wait()
        self.wait_for_weights()
        with torch.no_grad():
            for bucket in self.buckets:
                bucket.sharded.move_in(self.parameters)  # the script may have given a parameter other memory
                if isinstance(bucket.gathered.state, MasterState):
                    bucket.gathered.state.take_changes(bucket.sharded.own, bucket.sharded.rank)
        self.optimizer.enter()
        for _, _, shard, gradient in self._pieces():
            shard.grad = gradient

    def after_step(self) -> None:
        """Begin to gather the weights that the optimizer has changed."""
        assert self.optimizer is not None  # noqa: S101
        self.optimizer.leave()
        self._settle(applied=True)
        self.end_step()
        self._steps += 1
        if self.device.type == "cuda":
            self._stream = torch.cuda.current_stream(self.device)
        if self._steps == _ORDER_KNOWN_AFTER:
            self._agree_on_order()
        self._used = []
        stepped = [bucket for bucket in self._order if bucket.gradient is not None]
        for bucket in self.buckets:
            if bucket.gradient is not None and _increment_version is not None:
                # Shards have other version counters: a graph that saved the old weights must not use the new ones.
                _increment_version([self.parameters[name] for name in bucket.names])
            bucket.gradient = None
        for bucket in stepped:
            run = partial(self.runner.exchange, bucket.gathered, bucket.sharded.weights)
            bucket.gathering = self.runner.submit(self._step, bucket.gathered, bucket.sharded.weights, run)
        for bucket in stepped:
            parameters = [self.parameters[name] for name in bucket.names]
            if all(map(guards.can_guard, parameters)):
                for parameter in parameters:
                    guards.make_pending(parameter, partial(self.wait_for_bucket, bucket))
            else:
                self.wait_for_bucket(bucket)

    def _agree_on_order(self) -> None:
        """Collective: gather weights in the order in which the forward pass of the first rank used them."""
        used = [self.buckets.index(bucket) for bucket in self._used]
        with self.explained("the order of weights"):
            first = json.loads(gather_bytes(self.group, json.dumps(used).encode())[0])
        others = [bucket for bucket in self._order if self.buckets.index(bucket) not in first]
        self._order = [self.buckets[index] for index in first] + others

    # --- when weights are used ------------------------------------------------------------------------------------

    def wait_for_bucket(self, bucket: OverlapBucket) -> None:
        """Wait for the weights of a bucket, and let its parameters be used."""
        with self._lock, current_device(self.device):
            if bucket.gathering is None:
                return
            self._wait_for(bucket.gathering)
            if self._stream is not None and self._stream != torch.cuda.current_stream(self.device):
                with torch.cuda.stream(self._stream):  # the training's stream must not read too early, either
                    self._wait_for(bucket.gathering)
            bucket.gathering = None
            self._used.append(bucket)
            for name in bucket.names:
                guards.make_ready(self.parameters[name])

    def wait_for_weights(self) -> None:
        """Wait for all weights that are being gathered."""
        for bucket in self._order:
            self.wait_for_bucket(bucket)

    def residuals(self) -> dict[str, Mapping[str, Tensor]]:
        """Return all residuals by parameter name and kind."""
        residuals: dict[str, Mapping[str, Tensor]] = {}
        for bucket in self.buckets:
            residuals |= bucket.reduced.ready.tensors(bucket.reduced.layout)
        return residuals

    def load(self, residuals: Residuals) -> None:
        """Replace all residuals."""
        for bucket in self.buckets:
            mine = {name: residuals[name] for name in bucket.names if name in residuals}
            bucket.reduced.ready.load(bucket.reduced.layout, mine)

    def predicted_sent_bytes(self) -> dict[str, int]:
        """Return the bytes that a step should send, per level."""
        every = [bucket.reduced for bucket in self.buckets]
        every += [bucket.gathered for bucket in self.buckets if not bucket.sharded.whole]
        return self.runner.predicted_sent_bytes(every)

    def finish(self) -> None:
        """Collective: give the optimizer its whole state again, and the parameters memory of their own.

        Raises:
            UsageError: The optimizer has not stepped the last gradients, which exist only in shards.
        """
        if self._pieces():
            raise UsageError("the last gradients were not stepped: call optimizer.step() or zero_grad() before detach")
        self.wait()
        self.wait_for_weights()
        with torch.no_grad():
            if self.optimizer is not None:
                with self.explained("the optimizer's state"):
                    self.optimizer.make_whole()
                    for bucket in self.buckets:
                        bucket.sharded.move_out(self.parameters, self.group)
        self.buckets, self._order, self.optimizer = [], [], None

    def close(self) -> None:
        """Close the lanes."""
        for bucket in self.buckets:  # after an error; the weights are then of no use
            for name in bucket.names:
                guards.make_ready(self.parameters[name])
        if self.buckets and self.runner.error is not None:
            text = "an exchange failed, so the weights and the optimizer's state of this model are incomplete"
            warn(f"{text}: load a checkpoint before you use them")
        for parameter in self.parameters.values():
            if type(parameter.grad) is guards.UnfinishedGradient:
                parameter.grad = None
        for gradient in self._withheld.values():
            guards.release(gradient)
        self._withheld = {}
        if self.optimizer is not None:
            self.optimizer.leave()
            self.optimizer.drop_shards()
        self.runner.close()
        self.buckets, self._order = [], []
