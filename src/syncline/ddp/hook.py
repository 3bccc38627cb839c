"""The DDP side: one hook function that never changes, and everything swappable behind it.

DDP takes one hook per model, once, and calls it with each bucket as its gradients become ready. It wants a plain
function with parameters called `state` and `bucket`, without annotations. What the hook does is decided by the `Switch`
that it gets as state: plain all-reduce, as DDP alone would do it, or the engine of the attached exchange.
"""

from __future__ import annotations

import weakref
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.hooks import RemovableHandle

from syncline.ddp.engine import Engine
from syncline.errors import UsageError

_switches: weakref.WeakKeyDictionary[DDP, Switch] = weakref.WeakKeyDictionary()


class Switch:
    """What a model's hook does at the moment."""

    def __init__(self, ddp: DDP) -> None:
        self._ddp = weakref.ref(ddp)  # DDP keeps its hook's state: a strong reference would keep both forever
        self.group: dist.ProcessGroup = ddp.process_group
        self.engine: Engine | None = None
        self.guard: RemovableHandle | None = None
        """Refuses what a static graph cannot do."""

    def __reduce__(self) -> tuple[Any, ...]:
        # A copied or unpickled DDP has a reducer of its own, without a hook: there, this is nothing.
        return type(None), ()

    def turn_to(self, engine: Engine | None) -> None:
        """Has the hook use `engine`, or do as plain DDP does; ends the engine that it used before."""
        before, self.engine = self.engine, engine
        if before is not None:
            before.close()

    def exchange(self, bucket: Any) -> Any:
        self._refuse_effective_world_size()
        if self.engine is not None:
            return self.engine.submit(bucket)
        return _plain(self.group, bucket.buffer())

    def _refuse_effective_world_size(self) -> None:
        ddp = self._ddp()
        joining = getattr(getattr(ddp, "_join_config", None), "enable", False)
        if joining and not getattr(ddp, "_divide_by_initial_world_size", True):
            raise UsageError(
                "join(divide_by_initial_world_size=False) cannot be honoured by any DDP hook, and results would be "
                "wrong without a word: use join() with its default"
            )


def _syncline_hook(state, bucket):  # type: ignore[no-untyped-def]
    return state.exchange(bucket)


def switch_of(ddp: DDP) -> Switch:
    """The model's switch; registers the hook the first time."""
    if ddp not in _switches:
        switch = Switch(ddp)
        try:
            ddp.register_comm_hook(switch, _syncline_hook)
        except RuntimeError as error:
            if "can only be called once" not in str(error):
                raise
            _forget_registration(ddp)
            raise UsageError(
                "this model has a communication hook already, and DDP takes only one: "
                "attach to the model before registering yours, or leave yours out"
            ) from None
        _switches[ddp] = switch
        if getattr(ddp, "static_graph", False):
            switch.guard = ddp.register_forward_pre_hook(_refuse_no_sync)
    return _switches[ddp]


def forget(ddp: DDP) -> None:
    """The next reducer of this model is one without our hook: as if it had never been there."""
    switch = _switches.pop(ddp, None)
    if switch is not None:
        switch.turn_to(None)
        if switch.guard is not None:
            switch.guard.remove()
    hooks = getattr(ddp, "_comm_hooks", [])
    hooks[:] = [(hook, state) for hook, state in hooks if hook is not _syncline_hook]


def attached_to(ddp: DDP) -> Switch | None:
    """The model's switch, where it has one."""
    return _switches.get(ddp)


def other_hooks(ddp: DDP) -> list[str]:
    """The names of hooks that others have registered."""
    return [hook.__qualname__ for hook, _ in getattr(ddp, "_comm_hooks", ()) if hook is not _syncline_hook]


def _forget_registration(ddp: DDP) -> None:
    """DDP makes a note of a hook before it refuses it."""
    hooks = getattr(ddp, "_comm_hooks", [])
    if hooks and hooks[-1][0] is _syncline_hook:
        hooks.pop()
    if hooks:
        cast(Any, ddp.logger)._set_comm_hook_name(hooks[-1][0].__qualname__)


def _refuse_no_sync(ddp: nn.Module, args: Any) -> None:
    switch = _switches.get(cast(DDP, ddp))
    if switch is not None and switch.engine is not None and not ddp.require_backward_grad_sync:
        raise UsageError(
            "no_sync() with static_graph=True silently stops reducing gradients (a defect of DDP): "
            "build the model without static_graph, or accumulate without no_sync()"
        )


def _plain(group: dist.ProcessGroup, flat: torch.Tensor) -> Any:
    """What DDP does without a hook: average, then sum."""
    flat.mul_(1 / group.size())
    work = dist.all_reduce(flat, group=group, async_op=True)
    return work.get_future().then(lambda finished: finished.value()[0])
