"""The communication hook of a DDP model.

DDP accepts one hook per model, which cannot be removed, and calls it with each bucket whose gradients are ready. Its
state is a `Switch`, which selects plain all-reduce, as DDP does it without a hook, or the engine of an exchange.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.hooks import RemovableHandle

from syncline.balance.sample_weights import SampleWeights
from syncline.errors import SynclineError, UsageError
from syncline.measure.hooks import Unseen
from syncline.runtime.bucket_runner import BucketRunner
from syncline.runtime.switch import Closable, EngineSwitch


class Attached(Closable, Protocol):
    """The interface of an engine to the hook of a model."""

    @property
    def exchanges_gradients(self) -> bool:
        """False if backward passes do not synchronise."""

    @property
    def runner(self) -> BucketRunner: ...

    def submit(self, bucket: Any) -> Any:
        """Exchange a bucket of DDP, and return a future of its average."""


switches: weakref.WeakKeyDictionary[DDP, Switch] = weakref.WeakKeyDictionary()
"""The switch of each model that has our hook."""


class Switch(EngineSwitch[Attached]):
    """Selects what the hook of a model does."""

    def __init__(self, ddp: DDP) -> None:
        super().__init__()
        self._ddp = weakref.ref(ddp)  # DDP holds its hook's state, so a strong reference would be a cycle
        self.group: dist.ProcessGroup = ddp.process_group
        self.hooks: list[RemovableHandle] = []  # the forward hook that refuses `no_sync()` with a static graph
        self.weights: SampleWeights | None = None  # by which gradients are multiplied, if batches are unequal
        self._counts: RemovableHandle | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copied or unpickled DDP model has a new reducer without a hook

    def exchange(self, bucket: Any) -> Any:
        """Exchange a bucket of DDP, and return a future of its average."""
        ddp = self._ddp()
        if ddp is not None and ddp._join_config.enable and not ddp._divide_by_initial_world_size:
            text = "no DDP hook can support join(divide_by_initial_world_size=False), and results would be wrong"
            raise UsageError(f"{text}: use join() with its default")
        if self.weights is not None and (self.engine is None or self.engine.exchanges_gradients):
            with self.explained():
                bucket.buffer().mul_(self.weights.of_gradients())
        if self.engine is not None:
            return self.engine.submit(bucket)
        flat = bucket.buffer()
        flat.mul_(1 / self.group.size())  # as DDP does it without a hook: scale, then sum
        work = dist.all_reduce(flat, group=self.group, async_op=True)
        return work.get_future().then(lambda finished: finished.value()[0])

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Name suspects if the all-reduce of the numbers of samples fails in this context."""
        try:
            yield
        except RuntimeError as error:
            if self.engine is None or isinstance(error, SynclineError):
                raise
            raise self.engine.runner.fail("the numbers of samples", error) from error

    def weigh(self, weights: SampleWeights | None) -> None:
        """Multiply gradients by these weights from now on, or by none."""
        if self._counts is not None:
            self._counts.remove()
        ddp, self.weights, self._counts = self._ddp(), weights, None
        if ddp is not None and weights is not None:
            self._counts = ddp.register_forward_pre_hook(Unseen(count_samples), with_kwargs=True)


def _syncline_hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP wants these names, and no annotations
    return state.exchange(bucket)


def switch_of(ddp: DDP) -> Switch:
    """Return the switch of a model. The first call registers the hook, which fails if there is an `other_hook`."""
    if ddp not in switches:
        switch = Switch(ddp)
        try:
            ddp.register_comm_hook(switch, _syncline_hook)
        except RuntimeError:  # a hook that was registered with the reducer itself
            forget(ddp)
            raise
        switches[ddp] = switch
        if ddp.static_graph:
            switch.hooks.append(ddp.register_forward_pre_hook(_refuse_no_sync))
    return switches[ddp]


def weights_of(ddp: DDP) -> SampleWeights | None:
    """Return the weights by which gradients of a model are multiplied, if batches are unequal."""
    switch = switches.get(ddp)
    return None if switch is None else switch.weights


def forget(ddp: DDP) -> None:
    """Remove all traces of the hook from a model, whose next reducer will then have none."""
    switch = switches.pop(ddp, None)
    if switch is not None:
        switch.turn_to(None)
        switch.weigh(None)
        for hook in switch.hooks:
            hook.remove()
    ddp._comm_hooks[:] = [(hook, state) for hook, state in ddp._comm_hooks if hook is not _syncline_hook]


def other_hook(ddp: DDP) -> str | None:
    """Return the name of a communication hook that does not belong to Syncline, or None if there is none."""
    name = str(ddp._get_ddp_logging_data().get("comm_hook", ""))
    return name if name not in ("", _syncline_hook.__qualname__) else None


def count_samples(ddp: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Count the samples of a forward pass with these arguments, if gradients are weighted by them."""
    switch = switches.get(cast(DDP, ddp))
    if switch is None or switch.weights is None or not torch.is_grad_enabled():
        return
    if cast(DDP, ddp)._join_config.enable:
        text = "join() is not supported with shares, because a rank that has joined counts no samples"
        raise UsageError(f"{text}. shares.sampler gives all ranks the same number of steps")
    exchanges = switch.engine is None or switch.engine.exchanges_gradients
    with switch.explained():
        switch.weights.forward(args, kwargs, synchronises=exchanges and bool(ddp.require_backward_grad_sync))


def _refuse_no_sync(ddp: nn.Module, args: Any) -> None:
    switch = switches.get(cast(DDP, ddp))
    engine = None if switch is None else switch.engine
    if engine is not None and engine.exchanges_gradients and not ddp.require_backward_grad_sync:
        text = "no_sync() with static_graph=True silently stops reducing gradients (a defect of DDP)"
        raise UsageError(f"{text}: build the model without static_graph, or accumulate without no_sync()")
