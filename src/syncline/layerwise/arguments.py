"""Resolve and check the arguments of `Layerwise`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from syncline.dist.agreement import flatten, versions_here
from syncline.dist.comm import backend_of
from syncline.errors import UsageError
from syncline.exchange import Exchange
from syncline.health.meeting import together
from syncline.layerwise.bucketing import BucketPieces, Piece
from syncline.predict.memory import layerwise_lanes
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.runtime.bucket_policy import BucketPolicy, Planned, Uniform, difference_of, read_plan
from syncline.runtime.parameters import described_fully
from syncline.runtime.topology import read_network
from syncline.runtime.validation import check_lanes, checked_exchange
from syncline.units import parse_bytes


def plan_or_none(
    plan: Plan | str | os.PathLike[str] | None, group: dist.ProcessGroup, device: torch.device, **replaced: Any
) -> Plan | None:
    """Collective: return the plan, or None if there is none or it says to do nothing.

    Args:
        plan: The plan or its file.
        group: The ranks that train.
        device: The model's device.
        replaced: Arguments that a plan replaces, by name, which must be None.
    """
    if plan is None:
        return None
    loaded = read_plan(plan, group, device, "Layerwise")
    if any(value is not None for value in replaced.values()):
        *names, last = replaced
        raise UsageError(f"{', '.join(names)} and {last} come from the plan: leave them out")
    return None if loaded.nothing else loaded


def policy_of(
    exchange: Exchange | None, lanes: int | None, plan: Plan | None, group: dist.ProcessGroup
) -> tuple[Exchange, BucketPolicy]:
    """Return the exchange that represents the trainer, and the policy of its buckets."""
    if lanes is not None:
        check_lanes(lanes)
    exchange = checked_exchange(plan.exchanges[0] if plan is not None else exchange)
    if plan is not None:
        return exchange, Planned(plan, settled_after=0)
    return exchange, Uniform(exchange, lanes or layerwise_lanes(backend_of(group)))


def planned_buckets(
    plan: Plan | None, parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup
) -> BucketPieces | None:
    """Collective: return the buckets of a plan, if any. Raise unless it was made for this model and cluster."""
    if plan is None:
        return None
    different = difference_of(plan, parameters, group, "Layerwise")
    if different is not None:
        raise UsageError(f"the plan was made for another model or cluster: {different}. Plan again, or leave it out")
    return tuple(
        tuple(Piece(name, 0, parameters[name].numel()) for name in bucket.parameters) for bucket in plan.buckets
    )


def budget_of(memory_budget: str | int | None, step: object, activations: object) -> int | None:
    """Return the memory budget in bytes. Raise unless `step` is given with it, and `activations` is not."""
    if memory_budget is None:
        return None
    budget_bytes = parse_bytes(memory_budget)
    if step is None:
        raise UsageError(
            "memory_budget needs step=, a function that runs a forward pass of the module and returns the loss, to "
            "measure the memory of a step"
        )
    if activations is not None:
        raise UsageError("memory_budget chooses what to do with activations: leave out activations")
    return budget_bytes


def agree_on_arguments(
    group: dist.ProcessGroup,
    module: nn.Module,
    network: Network | str | os.PathLike[str] | None,
    **arguments: Any,
) -> Network | None:
    """Collective: return the network, read from its file. Raise unless all arguments are equal on all ranks."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    with together(group, tensors[0][1].device, "the configuration", "Layerwise") as fields:
        loaded = read_network(network, fields)
        parameters = {name: described_fully(tensor) for name, tensor in tensors}
        fields |= flatten({**arguments, "version": versions_here(), "parameter": parameters})
    return loaded


def check_trained(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise unless exactly these parameters require a gradient."""
    trained = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
    if trained != {id(parameter) for parameter in parameters.values()}:
        raise UsageError(
            "other parameters require gradients than when this trainer was created: close() it, and create a new one "
            "after freezing or unfreezing"
        )


def check_autocast(device: torch.device) -> None:
    if torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) == torch.float16:
        raise UsageError(
            "Layerwise does not support autocast to float16: a GradScaler would skip a step only after some layers "
            "have taken it. Use torch.bfloat16, which needs no scaling"
        )
