"""The hooks of a sharded model. FSDP calls them for each unit; a `Switch` selects what they do.

FSDP2 has one all-reduce hook per unit, which it calls with the unit's flat gradient between its reduce-scatter and
the moment at which the gradient is assigned. A model without replicas has a custom reduce-scatter and all-gather
instead. On the CPU, FSDP's own collectives also run through the switch, so that one that fails is explained like an
exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from syncline.errors import SynclineError, UsageError
from syncline.fsdp.units import Unit
from syncline.runtime.switch import EngineSwitch

_KEY = "_syncline_switch"


class Switch(EngineSwitch[Any]):
    """Selects what the hooks of a sharded model do: an engine's exchange, or what FSDP would do itself.

    `replicas` are the ranks that have the same shards, if there are several.
    """

    def __init__(self, units: list[Unit], replicas: dist.ProcessGroup | None, explains: bool) -> None:
        super().__init__()
        self.replicas = replicas
        for unit in units if replicas is not None else ():
            if (other := unit.inside._all_reduce_hook) is not None:
                name = getattr(other, "__name__", type(other).__name__)
                text = f"{unit.label} has an all-reduce hook already ({name}), and FSDP takes only one"
                raise UsageError(f"{text}: remove yours")
        for unit in units:
            inside = unit.inside
            if replicas is not None:
                unit.module.set_all_reduce_hook(partial(self.reduce, unit))
            else:
                unit.module.set_custom_reduce_scatter(_ReduceScatter(self, unit, inside._reduce_scatter_comm))
                unit.module.set_custom_all_gather(_AllGather(self, unit, inside._all_gather_comm))
            if explains:
                unit.module.set_custom_all_gather(_Explained(self, unit, inside._all_gather_comm, "parameters"))
                unit.module.set_custom_reduce_scatter(_Explained(self, unit, inside._reduce_scatter_comm, "gradients"))

    @property
    def between(self) -> str | None:
        """Name of the group of replicas, or None without replicas."""
        return None if self.replicas is None else self.replicas.group_name

    def reduce(self, unit: Unit, flat: Tensor) -> None:
        """Average a unit's gradients over the replicas, in place. Without an engine, as native HSDP does."""
        if self.engine is not None:
            self.engine.reduce(unit, flat)
        elif self.replicas is not None:
            if not unit.has_divide_factor:
                flat.mul_(1 / self.replicas.size())
            dist.all_reduce(flat, group=self.replicas)
            if flat.is_cuda:  # allocated on another stream, which may reuse its memory
                flat.record_stream(torch.cuda.current_stream(flat.device))


class _Comm:
    """A collective of FSDP, in the form in which `set_custom_all_gather` and `set_custom_reduce_scatter` take it."""

    def __init__(self, switch: Switch, unit: Unit, inner: Any) -> None:
        self._switch, self._unit, self._inner = switch, unit, inner
        self.allocate: Callable[..., Tensor] = inner.allocate


class _ReduceScatter(_Comm):
    """A reduce-scatter by the engine's exchange, or FSDP's own without an engine."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        engine = self._switch.engine
        if engine is None:
            return self._inner(output_tensor, input_tensor, group, op, async_op)
        return engine.reduce_scatter(self._unit, output_tensor, input_tensor, op)


class _AllGather(_Comm):
    """An all-gather by the engine, or FSDP's own without an engine."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        engine = self._switch.engine
        if engine is None:
            return self._inner(output_tensor, input_tensor, group, async_op)
        plain = partial(self._inner, async_op=async_op)
        return engine.gather(output_tensor, input_tensor, group, plain)


class _Explained(_Comm):
    """A collective of FSDP among shards that blocks. If it fails, the error names suspects."""

    def __init__(self, switch: Switch, unit: Unit, inner: Any, what: str) -> None:
        super().__init__(switch, unit, inner)
        self._what = what

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        engine = self._switch.engine
        if engine is None:
            return self._inner(*arguments, **options)
        engine.runner.count_collective()
        try:
            return self._inner(*arguments, **options)
        except SynclineError:
            raise
        except RuntimeError as error:
            raise engine.runner.fail(f"the {self._what} of {self._unit.label} among shards", error) from error


def switch_of(model: nn.Module) -> Switch | None:
    """Return the switch of a sharded model, or None if nothing was ever attached to it."""
    switch: Switch | None = vars(model).get(_KEY)
    return switch


def keep_switch(model: nn.Module, switch: Switch) -> None:
    """Store the switch in the model. It is not in a global table, because it refers to the model."""
    vars(model)[_KEY] = switch
