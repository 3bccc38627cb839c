"""Measure the steps of a sharded model without communication between replicas.

The ready time of a gradient is when FSDP has reduced its unit, on the stream on which it calls the all-reduce hook. So
the profile contains the work and the collectives of FSDP among the shards. A model that is sharded among one rank alone
has no collectives, and its profile can be used to predict any number of shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from syncline.errors import UsageError
from syncline.fsdp.hook import switch_of
from syncline.fsdp.units import Unit, sharded_model, units_of
from syncline.measure.backward import Step, measure_backward
from syncline.measure.steps import Subject
from syncline.records.profile import Profile
from syncline.records.sharding import ProfiledUnit, Sharding


@dataclass(frozen=True)
class ShardedSubject(Subject):
    """A sharded model to measure."""

    units: Sequence[Unit] = ()

    def on_gradients(self, ready: Callable[[str], None]) -> list[RemovableHandle]:
        """Call a function with the name of each parameter whose gradient FSDP has reduced."""
        for unit in self.units:
            if unit.inside._all_reduce_hook is not None:
                raise UsageError(f"{unit.label} has an all-reduce hook already, and FSDP takes only one: remove it")
        return [_watch(unit, ready) for unit in self.units]


def profile_sharded(
    model: nn.Module,
    step: Step,
    steps: int = 20,
    warmup: int = 5,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    model_name: str | None = None,
    batch: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Profile:
    """Run `warmup + steps` training steps of a model that `fully_shard` has prepared on a 1-D mesh, and return a
    profile with the medians of the measured steps. All ranks of the job call it together.

    Arguments are those of `measure_backward`. With an `optimizer`, the steps train the model; each replica by itself.

    Raises:
        UsageError: The model is not supported, or an exchange is attached to it.
    """
    if switch_of(getattr(model, "_orig_mod", model)) is not None:
        raise UsageError("an exchange was attached to the model: profile it before attach")
    inner = sharded_model(model)
    units = units_of(inner)
    parameters = {name.replace("_orig_mod.", ""): p for name, p in inner.named_parameters() if p.requires_grad}
    name, device = model_name or type(inner).__name__.removeprefix("FSDP"), torch.device(units[0].inside.device)
    subject = ShardedSubject(model, name, None, parameters, (), device, batch, units)

    def progressed(done: int, of: int) -> None:
        # FSDP's collectives align the ranks of a host, which share its cores. Without collectives, they would drift
        # apart, and some would find the cores idle.
        if device.type == "cpu":
            dist.barrier()
        if on_progress is not None:
            on_progress(done, of)

    options: dict[str, Any] = {"optimizer": optimizer, "on_progress": progressed, "group": dist.group.WORLD}
    profile = measure_backward(subject, step, steps, warmup, **options)
    shards = units[0].shard_group.size()
    if shards == 1:
        _check_cast(units)
    sharding = Sharding(units=tuple(map(profiled, units)), measured_shards=shards)
    how = f"{profile.how}, sharded among {shards} ranks by FSDP2"
    return msgspec.structs.replace(profile, sharding=sharding, how=how)


def _check_cast(units: Sequence[Unit]) -> None:
    """Raise if parameters were not cast to the type that the policy names, as in old versions with one shard."""
    for unit in units:
        for inside in unit.inside.fsdp_params:
            used = {output.dtype for output in inside.all_gather_outputs}
            if inside.param_dtype is not None and used - {inside.param_dtype}:
                text = f"torch {torch.__version__} ignores param_dtype of {unit.label} if it is sharded among one rank"
                raise UsageError(f"{text}: profile it with parameters of that type")


def profiled(unit: Unit) -> ProfiledUnit:
    """Describe a unit for a profile."""
    inside = unit.inside
    frozen = [entry.sharded_param for entry in inside.fsdp_params if not entry.sharded_param.requires_grad]
    gathered = {str(dtype).removeprefix("torch.") for dtype in unit.gathered_types()}
    if len(gathered) > 1:
        text = f"{unit.label} has parameters in {' and '.join(sorted(gathered))}"
        raise UsageError(f"{text}: shard the parameters of one type as a unit of their own")
    return ProfiledUnit(
        name=unit.name,
        gradients=tuple(name for name, *_ in unit.trained()),
        gathered=gathered.pop(),
        reduced=str(unit.dtype).removeprefix("torch."),
        reshards=bool(inside._reshard_after_forward),
        frozen_elements=sum(math.prod(parameter.shape) for parameter in frozen),
    )


def _watch(unit: Unit, ready: Callable[[str], None]) -> RemovableHandle:
    """Call a function with the names of a unit's parameters, whenever FSDP has reduced their gradients."""
    names = [name for name, *_ in unit.trained()]

    def reduced(_: Tensor) -> None:
        for name in names:
            ready(name)

    unit.module.set_all_reduce_hook(reduced)
    removed: RemovableHandle = _Removal(unit)  # type: ignore[assignment]
    return removed


@dataclass(frozen=True)
class _Removal:
    """Removes the hook of a unit."""

    unit: Unit

    def remove(self) -> None:
        self.unit.inside._all_reduce_hook = None
