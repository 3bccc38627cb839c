"""Exchange the gradients of the units of a sharded model, and end its steps.

FSDP reduces the gradients of a unit when its backward pass is over, and calls us with a flat tensor. A unit is a
bucket. On CUDA, FSDP calls us on a stream of its own: the exchange is enqueued on its lane's stream after what that
stream contains, and FSDP's stream waits for it, but the host does not. On the CPU, FSDP needs the result at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from syncline.errors import UsageError
from syncline.exchange import Exchange, Layout, Slot
from syncline.fsdp.policy import ShardPolicy
from syncline.fsdp.units import Unit
from syncline.runtime import bucket_runner
from syncline.runtime.backward_end import when_backward_ends
from syncline.runtime.bucket_runner import Bucket, BucketRunner, Residuals, Watched
from syncline.runtime.checkpoint import misfit_of
from syncline.runtime.gradient_engine import GradientEngine, copied
from syncline.runtime.topology import RankTopology

Key = tuple[int, int, torch.dtype, tuple[str, ...]]
"""Index of a unit, number of elements and type of its flat gradient, and the parameters in it."""


@dataclass
class Step(bucket_runner.Step):
    """One backward pass of a sharded model."""

    buckets: dict[Key, Bucket] = field(default_factory=dict)
    unfinished: int = 0
    awaits_end: bool = False  # whether a callback at the end of the backward pass is scheduled
    finite: list[Tensor] = field(default_factory=list)  # whether each result is finite, as 0-dim tensors


@dataclass(eq=False)
class ShardEngine(GradientEngine):
    """Exchanges the gradients of one sharded model: between replicas, which have the same shards, or between shards.

    All ranks create it together, in the same order as their other groups.
    """

    group: dist.ProcessGroup  # the ranks that exchange buckets
    shard_group: dist.ProcessGroup  # the ranks whose shards are one model
    parameters: Mapping[str, nn.Parameter]
    policy: ShardPolicy
    timeout: timedelta
    topology: RankTopology | None
    scale: Callable[[], Tensor | None]  # returns the current loss scale
    watched: Watched
    device: torch.device
    in_backward: Callable[[], bool]  # returns whether FSDP is inside a backward pass

    def __post_init__(self) -> None:
        super().__post_init__()
        self.keeps = any(exchange.keeps for exchange in self.policy.exchanges)
        self.buckets: dict[Key, Bucket] = {}
        self._shapes: dict[str, torch.Size] = {}  # of residuals, by parameter
        self._expected: list[Bucket] = []  # the units, before their gradients were seen
        self._step = Step()
        lanes, topology = self.policy.lanes, self.topology
        self.runner = BucketRunner(self.group, self.device, lanes, self.timeout, topology, self.watched)

    def expect(self, layouts: Sequence[Layout]) -> None:
        """Set the layouts of the units, for predictions and for the residuals that a checkpoint may contain."""
        buckets = (Bucket(index, 0, self.policy.exchange, layout) for index, layout in enumerate(layouts))
        self._expected = [bucket for bucket in buckets if bucket.layout.numel]
        self._shapes = {slot.name: torch.Size(slot.shape) for layout in layouts for slot in layout.slots if slot.name}

    # --- in the thread that runs backward -----------------------------------------------------------------------

    def exchange(self, unit: Unit, flat: Tensor, layout: Layout, exchange: Exchange | None = None) -> Bucket:
        """Exchange the flat gradient of a unit in place, through the policy's exchange or this one. On CUDA, the
        current stream waits for the result."""
        self.runner.raise_if_failed()
        bucket, step = self._bucket_of(unit, flat, layout, exchange or self.policy.exchange)
        if flat.is_cuda:  # allocated on FSDP's stream for reduce-scatters, which may free it before this one is done
            flat.record_stream(torch.cuda.current_stream(flat.device))
        run = partial(self.runner.exchange, bucket, flat, self.scale(), self._take_residuals)
        waits = bucket.exchange.waits or bucket.state is None  # ranks wait for each other to prepare a bucket
        done = partial(self._exchanged, step, bucket)
        self.runner.wait(self.runner.submit(step, bucket, flat, run, waits=waits, done=done))
        return bucket

    def _bucket_of(self, unit: Unit, flat: Tensor, layout: Layout, exchange: Exchange) -> tuple[Bucket, Step]:
        if layout.numel != flat.numel():
            if self.keeps:
                text = f"{unit.label} has gradients for some of its parameters only, and residuals need all of them"
                raise UsageError(
                    f"{text}: call set_reduce_scatter_unused_params(True), freeze the rest, or use Dense()"
                )
            layout = Layout(
                (Slot(unit.name or "root", (flat.numel(),), (1,), 0, flat.numel()),), flat.dtype, flat.device
            )
        key = unit.index, flat.numel(), flat.dtype, tuple(slot.name for slot in layout.slots)
        if key not in self.buckets:
            _, lane = self.policy.assign((), unit.index, 0)
            self.buckets[key] = Bucket(unit.index, lane, exchange, layout)
        if self.buckets[key].exchange != exchange:
            text = f"FSDP has changed between the mean and the sum of the gradients of {unit.label}"
            raise UsageError(f"{text}: set the divide factor and the type of gradients before attach")
        if key in self._step.buckets:  # another backward pass, which no callback reported
            self._step.awaits_end = False
            self.conclude()
        step = self._step
        step.buckets[key] = self.buckets[key]
        step.unfinished += 1
        if not step.awaits_end:
            step.awaits_end = when_backward_ends(self._backward_is_over)
        return self.buckets[key], step

    def _backward_is_over(self) -> None:
        self._step.awaits_end = False
        if not self.in_backward():  # it is after a nested backward pass, of activation checkpointing
            self.conclude()

    @property
    def concludes_together(self) -> bool:
        """Whether `conclude` is collective."""
        return self.keeps and self.shard_group.size() > 1

    def conclude(self) -> None:
        """End the step whose units have been exchanged, if it has not been ended. Collective among shards if there are
        residuals."""
        step = self._step
        if not step.buckets or step.awaits_end or step.unfinished or self.runner.error is not None:
            return
        self._step = Step()
        settling = [bucket for bucket in step.buckets.values() if bucket.state is not None and bucket.state.settles]
        try:
            if settling:
                with self.runner.lanes[0].after(self.runner.lanes):
                    self.runner.settle(settling, self._on_all_shards(torch.stack(step.finite).all()))
            self.runner.end(step)
        except Exception as error:
            raise self.runner.fail("the flags of finite gradients among shards", error) from error

    def _on_all_shards(self, finite: Tensor) -> Tensor:
        """Return whether the results are finite on all shards: a GradScaler skips the step of all of them otherwise."""
        flag = finite.to(torch.float32)
        if self.shard_group.size() > 1:
            dist.all_reduce(flag, dist.ReduceOp.MIN, group=self.shard_group)
        return flag > 0

    # --- on the lane --------------------------------------------------------------------------------------------

    def _exchanged(self, step: Step, bucket: Bucket, flat: Tensor) -> None:
        if self.keeps or bucket.ready.settles:  # also for units that are sent dense: a GradScaler skips the whole step
            step.finite.append(bucket.ready.finite(flat))
        step.unfinished -= 1

    # --- for the handle -----------------------------------------------------------------------------------------

    def predicted_sent_bytes(self) -> dict[str, int]:
        return self.runner.predicted_sent_bytes(self.buckets.values() or self._expected)

    def drift(self) -> str | None:
        return None

    def residuals(self) -> dict[str, Mapping[str, Tensor]]:
        """Return all residuals by parameter name and kind, as the base class does, without those of padding."""
        return {name: kinds for name, kinds in super().residuals().items() if name}

    @property
    def bucket_names(self) -> list[list[str]]:
        """Empty: units are always the same, so a resumed run need not restore them."""
        return []

    def misfit(self, tensors: Residuals, buckets: Sequence[Sequence[str]] = ()) -> str | None:
        """Return why a checkpoint does not belong to this rank's shards, or None if it does."""
        return misfit_of(self._shapes, tensors, (name for names in buckets for name in names))

    def load(self, tensors: Residuals, buckets: Sequence[Sequence[str]], steps: int) -> None:
        """Continue from a checkpoint that has no `misfit`."""
        self._stored = copied(tensors)
        self.runner.steps = steps
        self._load_prepared()

    def close(self) -> None:
        """Close the lanes, and drop all buckets."""
        self.runner.close()
        self.buckets, self._expected, self._step = {}, [], Step()


class ReplicaEngine(ShardEngine):
    """Averages the gradients of each shard over the replicas, after FSDP has averaged them over the shards."""

    def reduce(self, unit: Unit, flat: Tensor) -> None:
        """Replace this rank's flat gradient of a unit by its mean over the replicas."""
        if not unit.inside.all_reduce_grads:
            text = "set_requires_all_reduce(False) does not accumulate gradients here, because FSDP ignores it"
            raise UsageError(f"{text}: use set_requires_gradient_sync(False)")
        if unit.has_divide_factor:  # as in native HSDP, it replaces the mean over all ranks
            flat.mul_(self.group.size())
        self.exchange(unit, flat, unit.shard_layout(flat.dtype, flat.device))
