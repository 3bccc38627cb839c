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
from syncline.errors import SynclineError, UsageError
from syncline.exchange import Exchange
from syncline.health.meeting import meet
from syncline.layerwise.bucketing import BucketPieces, Piece
from syncline.predict.memory import layerwise_lanes
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.runtime.bucket_policy import BucketPolicy, Planned, Uniform, difference_of, read_plan
from syncline.runtime.parameters import described, described_fully
from syncline.runtime.topology import mark_of, read_network
from syncline.runtime.validation import check_lanes, checked_exchange


def policy_of(
    plan: Plan | str | os.PathLike[str] | None,
    exchange: Exchange | None,
    lanes: int | None,
    bucket_mb: float | None,
    parameters: Mapping[str, nn.Parameter],
    group: dist.ProcessGroup,
) -> tuple[Exchange, BucketPolicy, BucketPieces | None]:
    """Collective: return the exchange that represents the trainer, the policy of its buckets, and a plan's buckets."""
    if plan is not None:
        device = next(iter(parameters.values())).device
        loaded = read_plan(plan, group, device, "Layerwise")
        if any(value is not None for value in (exchange, lanes, bucket_mb)):
            raise UsageError("exchange, lanes and bucket_mb come from the plan: leave them out")
        if not loaded.nothing:
            shapes = {name: described(parameter) for name, parameter in parameters.items()}
            difference = difference_of(loaded, shapes, group, device.type, "Layerwise")
            if difference is not None:
                raise UsageError(
                    f"the plan was made for another model or cluster: {difference}. Plan again, or leave it out"
                )
            buckets = tuple(
                tuple(Piece(name, 0, parameters[name].numel()) for name in bucket.parameters)
                for bucket in loaded.buckets
            )
            return loaded.exchanges[0], Planned(loaded, settled_after=0), buckets
    if lanes is not None:
        check_lanes(lanes)
    exchange = checked_exchange(exchange)
    return exchange, Uniform(exchange, lanes or layerwise_lanes(backend_of(group))), None


def agree_on_arguments(
    group: dist.ProcessGroup, module: nn.Module, network: Network | str | os.PathLike[str] | None, **arguments: Any
) -> Network | None:
    """Collective: return the network, read from its file. Raise unless all arguments are equal on all ranks."""
    loaded = read_network(network)
    tensors = [*module.named_parameters(), *module.named_buffers()]
    parameters = {name: described_fully(tensor) for name, tensor in tensors}
    fields = {**arguments, "version": versions_here(), "parameter": parameters, "network": mark_of(loaded)}
    meet(group, flatten(fields), "the configuration", "Layerwise")
    if isinstance(loaded, SynclineError):
        raise loaded
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
