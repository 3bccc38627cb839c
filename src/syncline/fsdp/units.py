"""The units of a sharded model: the modules that `fully_shard` was called for, and the parameters that each shards.

A unit's gradients are reduced together, in one flat tensor that contains this rank's shards, padded along the first
dimension. torch has no public way to ask which parameters these are. The private names that this file reads exist in
torch 2.6 and later; `check_supported` refuses a version that lacks the hooks.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from syncline.errors import UsageError
from syncline.exchange import Layout, Slot
from syncline.runtime.local_tensors import local_part
from syncline.runtime.validation import refuse_sparse

_NEEDED = ("set_all_reduce_hook", "set_custom_all_gather", "set_custom_reduce_scatter", "_get_fsdp_state")


@dataclass(frozen=True, eq=False)
class Unit:
    """A module whose parameters are gathered, and whose gradients are reduced, in one collective."""

    index: int
    name: str
    module: Any
    inside: Any  # torch's FSDPParamGroup
    names: Mapping[int, str]  # of the unit's parameters, by `id` of what torch calls FSDPParam

    @property
    def label(self) -> str:
        """Name of the unit in messages."""
        return f"unit {self.name!r}" if self.name else "the root unit"

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The ranks that have the other shards."""
        group: dist.ProcessGroup = self.inside.mesh_info.shard_process_group
        return group

    @property
    def has_divide_factor(self) -> bool:
        """Whether the user has set a factor, which replaces the mean over all ranks."""
        return getattr(self.inside, "gradient_divide_factor", None) is not None

    @property
    def dtype(self) -> torch.dtype:
        """The type in which FSDP reduces the unit's gradients."""
        policy, first = self.inside.mp_policy, self.inside.fsdp_params[0].sharded_param
        dtype: torch.dtype = policy.reduce_dtype or policy.param_dtype or first.dtype
        return dtype

    def gathered_types(self) -> set[torch.dtype]:
        """Return the types in which FSDP gathers the unit's parameters."""
        own = self.inside.mp_policy.param_dtype
        return {own or inside.sharded_param.dtype for inside in self.inside.fsdp_params}

    def trained(self) -> tuple[tuple[str, tuple[int, ...], int], ...]:
        """Return name, shape of this rank's shard and number of its elements with padding, for parameters that require
        a gradient, in the order in which the unit's flat gradient contains them."""
        return tuple(
            (self.names[id(inside)], tuple(inside.sharded_size), math.prod(inside.padded_sharded_param_size))
            for inside in self.inside.fsdp_params
            if inside.sharded_param.requires_grad
        )

    def shard_layout(self, dtype: torch.dtype, device: torch.device) -> Layout:
        """Return the layout of this rank's flat gradient. Padding is a slot without a name."""
        slots, offset = [], 0
        for name, shape, padded in self.trained():
            numel = math.prod(shape)
            if numel:
                slots.append(Slot(name, shape, torch.empty(shape, device="meta").stride(), offset, numel))
            if padded > numel:
                slots.append(Slot("", (padded - numel,), (1,), offset + numel, padded - numel))
            offset += padded
        return Layout(tuple(slots), dtype, device)

    def whole_layout(self, dtype: torch.dtype, device: torch.device) -> Layout:
        """Return the layout of the flat gradient of all shards. Row i contains the i-th shard of each parameter, so a
        parameter is a strided matrix with one row per rank."""
        ranks, row = self.shard_group.size(), sum(padded for *_, padded in self.trained())
        slots, offset = [], 0
        for name, _, padded in self.trained():
            slots.append(Slot(name, (ranks, padded), (row, 1), offset, ranks * padded))
            offset += padded
        return Layout(tuple(slots), dtype, device)


def is_sharded(model: object) -> bool:
    """Return whether `fully_shard` was called for this module itself."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # a sharded model exists only if somebody has imported it
    kind = getattr(fsdp, "FSDPModule", None)
    return kind is not None and isinstance(getattr(model, "_orig_mod", model), kind)


def sharded_model(model: nn.Module) -> nn.Module:
    """Return the sharded module of a model, or of what `torch.compile` made of it. Raise if it is not supported."""
    inner: nn.Module = getattr(model, "_orig_mod", model)
    if type(inner).__name__ == "FullyShardedDataParallel":
        raise UsageError("the model is in FullyShardedDataParallel (FSDP1): shard it with fully_shard (FSDP2) instead")
    if not is_sharded(inner):
        kind = type(inner).__name__
        raise UsageError(
            f"replicate and gather are for sharded models, not for a {kind}: call fully_shard(model, mesh=…) first"
        )
    check_supported(type(inner))
    refuse_sparse(inner)
    dynamo = sys.modules.get("torch._dynamo.config")
    if not getattr(dynamo, "skip_fsdp_hooks", True):
        text = "torch._dynamo.config.skip_fsdp_hooks is False, so compiled code bypasses the hooks of FSDP"
        raise UsageError(f"{text}: set it to True")
    return inner


def check_supported(kind: type) -> None:
    missing = [name for name in _NEEDED if not hasattr(kind, name)]
    if missing:
        raise UsageError(f"torch {torch.__version__} has no FSDPModule.{missing[0]}: use torch 2.11 or later")


def is_in_backward(model: nn.Module) -> bool:
    """Return whether FSDP has begun a backward pass of this model and not ended it."""
    root: Any = model
    return bool(getattr(root._get_fsdp_state()._state_ctx, "post_backward_final_callback_queued", False))


def units_of(model: nn.Module) -> list[Unit]:
    """Return the units of a sharded model, in the order of its modules. Raise if one is not supported."""
    units: list[Unit] = []
    seen: set[int] = set()
    for _, module in model.named_modules():
        if is_sharded(module):
            module.reshard()  # so that named_parameters below finds the shards
    named = {id(parameter): name.replace("_orig_mod.", "") for name, parameter in model.named_parameters()}
    for name, module in model.named_modules():
        if not is_sharded(module):
            continue
        state: Any = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # torch before 2.12
            groups = [group for group in (state._fsdp_param_group,) if group is not None]
        if id(state) in seen or not groups:
            continue
        seen.add(id(state))
        if len(groups) > 1:
            text = f"unit {name!r} shards its parameters on several meshes, and torch has one hook for all of them"
            raise UsageError(f"{text}: use one mesh per unit")
        names = {id(inside): named.get(id(inside.sharded_param), "") for inside in groups[0].fsdp_params}
        units.append(Unit(len(units), name.replace("_orig_mod.", ""), module, groups[0], names))
    _check(model, units)
    return units


def _check(model: nn.Module, units: list[Unit]) -> None:
    managed = {id(inside.sharded_param) for unit in units for inside in unit.inside.fsdp_params}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in managed:
            text = f"{name} is not sharded, so FSDP does not reduce its gradient"
            raise UsageError(f"{text}: call fully_shard(model) for the whole model, too")
        if parameter.is_complex():
            raise UsageError(f"{name} is complex, which is not supported for sharded models")
    if not any(unit.trained() for unit in units):
        raise UsageError("the model has no parameters to exchange")
    first = dist.get_process_group_ranks(units[0].shard_group) if _is_flat(units[0]) else []
    for unit in units:
        kind = type(unit.inside.mesh_info).__name__
        if not _is_flat(unit):
            text = f"{unit.label} is sharded on a 2-D mesh ({kind}), whose all-reduce is PyTorch's own"
            remedy = "fully_shard(model, mesh=mesh['shard']) and attach(model, …, replicate=mesh['replicate'])"
            raise UsageError(f"{text}: use {remedy}")
        if dist.get_process_group_ranks(unit.shard_group) != first:
            raise UsageError(f"{unit.label} is sharded among other ranks than {units[0].label}: use one mesh")
        for inside in unit.inside.fsdp_params:
            if local_part(inside.sharded_param).device.type != torch.device(unit.inside.device).type:
                text = f"the parameters of {unit.label} are offloaded to the CPU (or on the meta device)"
                raise UsageError(f"{text}, which is not supported: use no CPUOffloadPolicy, and attach after loading")


def _is_flat(unit: Unit) -> bool:
    return type(unit.inside.mesh_info).__name__ == "FSDPMeshInfo"
