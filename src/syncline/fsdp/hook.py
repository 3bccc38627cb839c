"""The hooks of a sharded model. FSDP calls them for each unit; a `Switch` selects what they do.

FSDP2 has one all-reduce hook per unit, which it calls with the unit's flat gradient between its reduce-scatter and
the moment at which the gradient is assigned. On the CPU, FSDP's own collectives also run through the switch, so that
one that fails is explained like an exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from syncline.errors import SynclineError, UsageError
from syncline.fsdp.units import Unit
from syncline.runtime.bucket_runner import BucketRunner

_KEY = "_syncline_switch"


class Attached(Protocol):
    """What the hooks of a sharded model need of an engine."""

    @property
    def runner(self) -> BucketRunner: ...
    def finish(self) -> None: ...
    def close(self) -> None: ...


class Switch:
    """Selects what the hooks of a sharded model do: an engine's exchange, or what FSDP would do itself.

    `replicas` are the ranks that have the same shards, if there are several.
    """

    def __init__(self, units: list[Unit], replicas: dist.ProcessGroup | None, explains: bool) -> None:
        self.engine: Any = None
        self.replicas, self.units = replicas, units
        for unit in units:
            inside = unit.inside
            if replicas is not None:
                if (other := inside._all_reduce_hook) is not None:
                    name = getattr(other, "__name__", type(other).__name__)
                    text = f"{unit.label} has an all-reduce hook already ({name}), and FSDP takes only one"
                    raise UsageError(f"{text}: remove yours")
                unit.module.set_all_reduce_hook(partial(self.reduce, unit))
            if explains:
                unit.module.set_custom_all_gather(_Explained(self, unit, inside._all_gather_comm, "gathering"))
                unit.module.set_custom_reduce_scatter(_Explained(self, unit, inside._reduce_scatter_comm, "reducing"))

    def turn_to(self, engine: Attached | None) -> None:
        """Use `engine` from now on, or only FSDP if it is None, and close the engine that was used before."""
        before, self.engine = self.engine, engine
        if before is not None:
            try:
                before.finish()
            finally:
                before.close()

    def reduce(self, unit: Unit, flat: Tensor) -> None:
        """Average a unit's gradients over the replicas, in place. Without an engine, as native HSDP does."""
        if self.engine is not None:
            self.engine.reduce(unit, flat)
        elif self.replicas is not None:
            flat.mul_(1 / self.replicas.size())
            dist.all_reduce(flat, group=self.replicas)
            if flat.is_cuda:  # allocated on another stream, which may reuse its memory
                flat.record_stream(torch.cuda.current_stream(flat.device))


class _Explained:
    """A collective of FSDP among shards that blocks. If it fails, the error names suspects."""

    def __init__(self, switch: Switch, unit: Unit, inner: Any, does: str) -> None:
        self._switch, self._unit, self._inner, self._does = switch, unit, inner, does
        self.allocate: Callable[..., Tensor] = inner.allocate

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        try:
            return self._inner(*arguments, **options)
        except SynclineError:
            raise
        except RuntimeError as error:
            engine = self._switch.engine
            if engine is None:
                raise
            what = "parameters" if self._does == "gathering" else "gradients"
            raise engine.runner.fail(f"the {what} of {self._unit.label} among shards", error) from error


def switch_of(model: nn.Module) -> Switch | None:
    """Return the switch of a sharded model, or None if nothing was ever attached to it."""
    switch: Switch | None = vars(model).get(_KEY)
    return switch


def keep_switch(model: nn.Module, switch: Switch) -> None:
    """Store the switch in the model. It is not in a global table, because it refers to the model."""
    vars(model)[_KEY] = switch
