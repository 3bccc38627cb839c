"""Hide half of a DDP model's exchange behind its next forward pass.

In its first steps, an ordinary engine all-reduces DDP's buckets, until these are final and have been measured. Then
their weights move into shards. DDP's hook only begins to sum a bucket, hooks of the optimizer step the shards and begin
to gather weights, and the use of a parameter waits for its weights (`overlap.guards`).
"""

from __future__ import annotations

import contextlib
import json
import statistics
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from syncline.ddp import reducer
from syncline.ddp.engine import Engine, completed
from syncline.ddp.reducer import Reduction
from syncline.dist.comm import gather_bytes
from syncline.dist.lane import Marks
from syncline.errors import ExchangeError, UsageError
from syncline.exchange import Layout, settings
from syncline.measure.hooks import Unseen
from syncline.overlap import guards
from syncline.overlap.buffers import BufferBroadcast
from syncline.overlap.engine import OverlapBucket, OverlapEngine
from syncline.predict import overlap
from syncline.runtime.bucket_policy import Uniform
from syncline.runtime.bucket_runner import Bucket, BucketRunner, Residuals
from syncline.runtime.checkpoint import misfit_of
from syncline.runtime.gradient_engine import copied
from syncline.runtime.stats import Stats
from syncline.runtime.topology import RankTopology

_USE = "use "
_MEASURED_STEPS = 4  # steps with DDP's final buckets, before weights move into shards


@dataclass(frozen=True)
class OverlapPolicy(Uniform):
    """The settings of an exchange that overlaps with the next forward pass."""

    gather: str = "fp32"  # the format in which weights are gathered
    caps: tuple[int, ...] = ()  # the sizes of buckets in bytes, if they were changed

    def settings(self) -> dict[str, Any]:
        own = {"type": "Overlap", "exchange": settings(self.exchange)}
        return own if self.gather == "fp32" else {**own, "gather": self.gather}

    def fingerprint(self) -> dict[str, Any]:
        return {"overlap": self.settings(), "lanes": self.lanes}

    def __str__(self) -> str:
        gather = "" if self.gather == "fp32" else f" and gathers weights in {self.gather}"
        return f"{self.exchange!r}, which overlaps with the next forward pass{gather},"


class Overlapping:
    """The exchange of gradients and weights that is attached to a model."""

    exchanges_gradients = True

    def __init__(
        self,
        ddp: DDP,
        engine: OverlapEngine,
        warm: Engine,
        optimizer: Optimizer,
        policy: OverlapPolicy,
        reduction: Reduction,
        topology: RankTopology | None,
    ) -> None:
        self._ddp = weakref.ref(ddp)  # the model holds its hook, which holds this object
        self._engine, self._optimizer, self._reduction = engine, optimizer, reduction
        self._buffers = BufferBroadcast(engine)
        self._warm: Engine | None = warm
        self.policy, self.topology, self.keeps = policy, topology, policy.exchange.keeps
        self._stored: Residuals = {}  # residuals of a checkpoint, until weights are in shards
        final_after = 2 if ddp.static_graph else int(reducer.rebuilds(ddp))
        changes = bool(policy.caps) or reducer.is_changed(ddp)  # then DDP builds its buckets once more
        if getattr(ddp, "_has_rebuilt_buckets", False) and not changes:
            final_after = 0
        self._warm_steps = final_after + _MEASURED_STEPS
        self._forward: Marks | None = None  # from the start to the end of the last forward pass, with uses of weights
        self._measured: list[tuple[Marks | None, list[Marks]]] = []  # per step: the forward pass, and the buckets
        self._sent_warm: dict[str, int] = {}
        self._keys: list[tuple[int, ...]] = []  # of the buckets since the last step, in the order of their submission
        self._by_key: dict[tuple[int, ...], OverlapBucket] = {}
        self._in_backward = False
        self._gathers_state = False  # whether `optimizer.state_dict()` is called on all ranks, by this object
        self.steps = self._steps_since_attach = 0  # of the optimizer; the former includes those of a checkpoint
        self._is_compiled = any(hasattr(m, "_orig_mod") or m._compiled_call_impl for m in ddp.module.modules())
        itself = weakref.ref(self)  # the optimizer and the model hold their hooks
        self._hooks: list[Any] = [
            optimizer.register_step_pre_hook(lambda _, args, kwargs: _call(itself, "_before_step", args, kwargs)),
            optimizer.register_step_post_hook(lambda *_: _call(itself, "_after_step")),
            optimizer.register_state_dict_pre_hook(lambda _: _call(itself, "_check_state_dict")),
            optimizer.register_load_state_dict_pre_hook(lambda *_: _call(itself, "_leave")),
            optimizer.register_load_state_dict_post_hook(lambda _: _call(itself, "_shard_state")),
            ddp.register_forward_pre_hook(Unseen(lambda *_: _call(itself, "_before_forward"))),
            ddp.register_forward_hook(Unseen(lambda *_: _call(itself, "_after_forward"))),
        ]
        # Modules wait, too: their forward may read parameters without a function of torch, like C++ extensions.
        names = {id(parameter): name for name, parameter in engine.parameters.items()}
        for module in ddp.module.modules():
            if own := tuple(module.parameters(recurse=False)):
                used = tuple(names[id(parameter)] for parameter in own if id(parameter) in names)
                before = Unseen(partial(_before_module, itself, own, used))
                self._hooks.append(module.register_forward_pre_hook(before))

        if ddp.gradient_as_bucket_view:  # DDP reuses a gradient's tensor, so its class must be reset after `zero_grad`
            for name, parameter in engine.parameters.items():
                zeroed = partial(_call, itself, "_release_if_zeroed", name)
                if parameter.requires_grad:
                    self._hooks.append(parameter.register_hook(lambda _, zeroed=zeroed: zeroed()))

    # --- a training step, in the order of calls -------------------------------------------------------------------

    def _before_forward(self) -> None:
        if self._warm is not None:
            if torch.is_grad_enabled():
                self._forward = self._warm.runner.lanes[0].marks(None)
        else:
            self._engine.wait()  # if the script did not step the optimizer, an exchange may still read DDP's buckets
            self._leave()
            if (ddp := self._ddp()) is not None:
                self._buffers.receive(ddp)
            if self._is_compiled or not torch.is_grad_enabled():
                self._engine.wait_for_weights()

    def _leave(self) -> None:
        """Return the groups of an optimizer whose step has failed to it."""
        if self._engine.optimizer is not None:
            self._engine.optimizer.leave()

    def _after_forward(self) -> None:
        if self._warm is not None and self._forward is not None and torch.is_grad_enabled():
            self._forward.mark("end")

    def submit(self, bucket: Any) -> Any:
        """Begin to exchange a bucket. Before weights are in shards, return a future of its average."""
        ddp = self._ddp()
        if ddp is not None and ddp._join_config.enable:
            text = "join() is not supported with overlap='forward': a rank that has joined steps no optimizer"
            raise UsageError(f"{text}. Give all ranks the same number of steps")
        key = tuple(map(id, bucket.parameters()))
        if self._warm is not None:
            self._keys.append(key)
            return self._warm.submit(bucket)
        flat: Tensor = bucket.buffer()
        known = self._by_key.get(key)
        if known is None:
            raise ExchangeError("DDP has changed its buckets since weights were moved into shards: attach again")
        if not self._in_backward:
            self._in_backward = self._reduction.when_over(self._backward_is_over)
        self._engine.reduce(known, flat)
        # DDP must not wait: the future has this rank's own gradients, which nobody may use.
        return completed(flat)

    def _release_if_zeroed(self, name: str) -> None:
        self._engine.release_if_zeroed(name)

    def _backward_is_over(self) -> None:
        self._in_backward = False
        self._engine.backward_is_over()

    def _before_step(self, args: Any, kwargs: Any) -> None:
        if any(callable(value) for value in (*args, *kwargs.values())):
            raise UsageError("optimizer.step(closure) is not supported with overlap='forward': call backward before it")
        if self._warm is None:
            self._engine.before_step()

    def _after_step(self) -> None:
        self.steps += 1
        self._steps_since_attach += 1
        if self._warm is None:
            if (ddp := self._ddp()) is not None:
                self._buffers.send(ddp)
            self._engine.after_step()
            return
        self._warm.conclude()
        self._measured.append((self._forward, [job.marks for job in self._warm.runner.last_step.jobs]))
        if self._steps_since_attach >= self._warm_steps:
            self._move_into_shards()
        self._keys = []

    # --- from all-reduces to shards -------------------------------------------------------------------------------

    def _move_into_shards(self) -> None:
        """Collective: move weights and the optimizer's state into shards."""
        assert self._warm is not None  # noqa: S101
        warm, self._warm = self._warm, None
        # The last backward pass shows the order. The index of a bucket may be from before DDP has rebuilt the others.
        buckets = [(key, warm.buckets[key]) for key in self._keys[-len(warm.buckets) :]]
        whole, order = self._choice([bucket.layout for _, bucket in buckets])
        own = json.dumps([sorted(whole), order]).encode()
        with self._engine.explained("the choice of whole buckets"):
            whole, order = json.loads(gather_bytes(self._engine.group, own)[0])  # the choice of the first rank
        self._sent_warm = warm.runner.sent_bytes
        self._engine.runner.steps = warm.runner.steps
        self._engine.runner.tracing = warm.runner.tracing
        warm.close()
        self._engine.start([bucket.layout for _, bucket in buckets], whole, order, self._stored)
        self._measured, self._stored, self._forward = [], {}, None
        keys = [key for key, _ in buckets]
        self._by_key = dict(zip(keys, self._engine.buckets, strict=True))

    def _choice(self, layouts: Sequence[Layout]) -> tuple[list[int], list[int]]:
        """Return which buckets to all-reduce as a whole, and the order in which to gather the weights of the others, by
        what was measured with final buckets."""
        if self._engine.device.type == "cuda":
            torch.cuda.synchronize(self._engine.device)  # once: the host may be more than a step ahead of the device
        measured = [_step_times(forward, marks) for forward, marks in self._measured[-_MEASURED_STEPS + 1 :]]
        steps = [times for times in measured if times is not None and len(times.buckets) == len(layouts)]
        if not steps:
            return [], list(reversed(range(len(layouts))))
        buckets = []
        for layout, times in zip(layouts, zip(*(step.buckets for step in steps), strict=True), strict=True):
            ready_s, took_s = (statistics.median(values) for values in zip(*times, strict=True))
            uses = [step.used_s[slot.name] for step in steps for slot in layout.slots if slot.name in step.used_s]
            buckets.append(overlap.BucketTimes.measured(ready_s, took_s, min(uses, default=None), self.policy.gather))
        forward_s, backward_s = statistics.median(step.forward_s for step in steps), buckets[-1].ready_s
        order = overlap.gather_order(buckets, forward_s, backward_s)
        whole = overlap.best_whole(buckets, forward_s, backward_s) if self.policy.exchange.lossless else ()
        return list(whole), order

    # --- the optimizer's state ------------------------------------------------------------------------------------

    def _check_state_dict(self) -> None:
        if self._warm is None and self._engine.optimizer is not None and not self._gathers_state:
            text = "this rank has only its shard of the optimizer's state"
            raise UsageError(
                f"{text}: call handle.optimizer_state_dict() on all ranks instead of optimizer.state_dict()"
            )

    def _shard_state(self) -> None:
        if self._engine.optimizer is not None:
            self._engine.optimizer.drop_shards()
            self._engine.optimizer.shard_state()

    def optimizer_state_dict(self) -> dict[str, Any]:
        """Collective: return the whole state of the optimizer, as without shards."""
        if self._engine.optimizer is None:
            state: dict[str, Any] = self._optimizer.state_dict()
            return state
        self._gathers_state = True
        try:
            with torch.no_grad(), self._engine.explained("the optimizer's state"):
                return self._engine.optimizer.whole_state_dict()
        finally:
            self._gathers_state = False

    def clip_grad_norm(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """Collective: clip the gradients, and return their norm."""
        if self._warm is None:
            with torch.no_grad():
                return self._engine.clip_grad_norm(max_norm, norm_type, error_if_nonfinite)
        parameters = self._engine.parameters.values()
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)

    # --- for the handle -------------------------------------------------------------------------------------------

    @property
    def runner(self) -> BucketRunner:
        return self._engine.runner if self._warm is None else self._warm.runner

    @property
    def buckets(self) -> Mapping[Any, Bucket]:
        if self._warm is not None:
            return self._warm.buckets
        return {index: bucket.reduced for index, bucket in enumerate(self._engine.buckets)}

    @property
    def bucket_names(self) -> list[list[str]]:
        return []  # a resumed run need not have the same ones

    concludes_together = False  # `conclude` is not collective

    def conclude(self) -> None:
        if self._warm is not None:
            self._warm.conclude()

    def drift(self) -> str | None:
        return None

    def stats(self) -> Stats:
        stats = self.runner.stats()
        return replace(stats, total_sent_bytes=dict(Counter(stats.total_sent_bytes) + Counter(self._sent_warm)))

    def predicted_sent_bytes(self) -> dict[str, int]:
        return self._engine.predicted_sent_bytes() if self._warm is None else self._warm.predicted_sent_bytes()

    def residuals(self) -> Residuals:
        return self._stored if self._warm is not None else self._engine.residuals()

    def misfit(self, tensors: Residuals, buckets: Sequence[Sequence[str]] = ()) -> str | None:
        return misfit_of({name: parameter.shape for name, parameter in self._engine.parameters.items()}, tensors)

    def load(self, tensors: Residuals, buckets: Sequence[Sequence[str]], steps: int) -> None:
        """Continue from a checkpoint. Weights and the optimizer's state are the script's to load."""
        self.steps = self.runner.steps = steps
        if self._warm is not None:
            self._stored = copied(tensors)
        else:
            self._engine.load(tensors)

    def synced(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def wait(self) -> None:
        """Wait for all weights that are being gathered."""
        if self._warm is None:
            self._engine.wait_for_weights()

    def finish(self) -> None:
        """Collective: give the optimizer its whole state again."""
        if self._warm is None and self.runner.error is None and self._engine.optimizer is not None:
            self._engine.finish()

    def close(self) -> None:
        """Remove all hooks, and close the lanes."""
        for hook in self._hooks:
            hook.remove()
        if self._warm is not None:
            self._warm.close()
        self._engine.close()


@dataclass(frozen=True)
class _StepTimes:
    """The times that were measured in one step."""

    forward_s: float
    used_s: Mapping[str, float]  # by parameter, from the start of forward until its first use
    buckets: list[tuple[float, float]]  # per bucket: ready after the end of forward, and the time of its exchange


def _step_times(forward: Marks | None, buckets: Sequence[Marks]) -> _StepTimes | None:
    """Return the times of a step, or None if one of them is not known."""
    clock = buckets[0] if buckets else None
    passed = None if forward is None else forward.seconds(clock)
    times = [marks.seconds(clock) for marks in buckets]
    if passed is None or not times:
        return None
    link_s, found = 0.0, []
    for seconds in times:
        if seconds is None:
            return None
        found.append((seconds["ready"] - passed["end"], seconds["end"] - max(seconds["start"], link_s)))
        link_s = seconds["end"]
    used_s: dict[str, float] = {}
    for what, at_s in sorted(passed.items(), key=lambda item: item[1]):
        if what.startswith(_USE):
            for name in what.removeprefix(_USE).split("\n"):
                used_s.setdefault(name, at_s - passed["ready"])
    return _StepTimes(passed["end"] - passed["ready"], used_s, found)


def _before_module(
    itself: weakref.ref[Overlapping], parameters: Sequence[nn.Parameter], names: tuple[str, ...], *_: object
) -> None:
    """Wait for the weights of a module, or record in a measured step when they are used."""
    overlapping = itself()
    if overlapping is not None and overlapping._warm is not None:
        if overlapping._forward is not None and names:
            overlapping._forward.mark(_USE + "\n".join(names))
        return
    for parameter in parameters:
        guards.wait_for(parameter)


def _call(itself: weakref.ref[Overlapping], method: str, *arguments: Any) -> None:
    overlapping = itself()
    if overlapping is not None:
        getattr(overlapping, method)(*arguments)
