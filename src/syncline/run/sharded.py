"""Models that a script shards with `fully_shard`: attach the exchange that was asked for, or say that they are left
alone. A script does not say which ranks are replicas, so only models that are sharded among all ranks are changed."""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from syncline.ddp.attach import attach
from syncline.errors import SynclineError
from syncline.fsdp.units import is_sharded
from syncline.tuning.settings import TuneSettings

_IN_SCRIPT = "call syncline.attach(model, exchange, replicate=mesh['replicate']) in the script"


class ShardedModels:
    """The sharded models of a script, which are found when their optimizer has stepped for the first time."""

    def __init__(self, settings: TuneSettings, find_scaler: Callable[[], GradScaler | None]) -> None:
        self._settings, self._find_scaler = settings, find_scaler
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.lines: list[str] = []  # what was said about each model

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Look for sharded models in this context."""
        hook = register_optimizer_step_post_hook(self._stepped)
        try:
            yield
        finally:
            hook.remove()

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        if optimizer in self._known:
            return
        self._known.add(optimizer)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not any(hasattr(parameter, "_local_tensor") for parameter in parameters):
            return
        for model in _roots([id(parameter) for parameter in parameters]):
            self.lines.append(self._treat(model))
            if not self._settings.quiet and dist.get_rank() == 0:
                print(f"syncline run: {self.lines[-1]}", file=sys.stderr)

    def _treat(self, model: nn.Module) -> str:
        """Attach to a model between two of its steps, if that was asked for, and return a line about it."""
        name, settings = type(model).__name__.removeprefix("FSDP"), self._settings
        if settings.exchange is None or settings.updates:
            return f"{name} is sharded with fully_shard, and left alone: to exchange between replicas, {_IN_SCRIPT}"
        try:
            handle = attach(model, settings.exchange, timeout_s=settings.timeout_s, scaler=self._find_scaler())
        except SynclineError as error:
            return f"{name} is sharded with fully_shard, and left alone: {error}"
        return f"{name}: {handle.describe()}"


def _roots(parameters: list[int]) -> list[nn.Module]:
    """Return the outermost sharded modules that contain one of these parameters, which are given by `id`.

    Their order is that of their first parameters in the list. It is the same on all ranks; that of `gc` need not be.
    """
    # Not `isinstance`, which asks a weak proxy for the class of its object, and raises if the object is gone.
    found = [entry for entry in gc.get_objects() if issubclass(type(entry), nn.Module) and is_sharded(entry)]
    inner = {id(module) for root in found for module in root.modules() if module is not root}
    roots = [module for module in found if id(module) not in inner]
    positions = {parameter: position for position, parameter in enumerate(parameters)}
    first = [
        min((positions.get(id(p), len(parameters)) for p in root.parameters()), default=len(parameters))
        for root in roots
    ]
    ordered = sorted(zip(first, roots, strict=True), key=lambda entry: entry[0])
    return [root for position, root in ordered if position < len(parameters)]
