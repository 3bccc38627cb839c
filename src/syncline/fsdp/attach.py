"""Attach an exchange to a model that is sharded with `fully_shard`. `syncline.attach` calls this."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from syncline.dist.agreement import agree, current_device, flatten, versions_here
from syncline.dist.comm import backend_of, bound_group, gather_bytes, group_timeout
from syncline.errors import UsageError
from syncline.exchange import Exchange, default_lanes
from syncline.exchange.lossy_halves import GATHERS
from syncline.exchange.scatter import Scatter
from syncline.fsdp.engine import ReplicaEngine
from syncline.fsdp.hook import Switch, keep_switch, switch_of
from syncline.fsdp.policy import ShardPolicy, ShardUpdatePolicy
from syncline.fsdp.scatter import ScatterEngine
from syncline.fsdp.units import Unit, is_in_backward, sharded_model, units_of
from syncline.fsdp.updating import ShardUpdating
from syncline.health.meeting import meeting, same_on_all_ranks
from syncline.runtime import validation
from syncline.runtime.bucket_runner import Watched
from syncline.runtime.checkpoint import digest_of_bits
from syncline.runtime.local_tensors import local_part
from syncline.runtime.topology import NetworkOrFile, find_topology, read_network
from syncline.updates.engine import UpdateEngine
from syncline.updates.policy import UpdatePolicy

Scale = Callable[[], Tensor | None]
AnyShardEngine = ReplicaEngine | ScatterEngine | ShardUpdating


def attach_sharded(
    model: nn.Module,
    exchange: Exchange,
    replicate: object,
    gather: str | None,
    updates: UpdatePolicy | None,
    *,
    lanes: int | None,
    timeout_s: float | None,
    network: NetworkOrFile,
    scaler: GradScaler | None,
    scale: Scale,
    optimizer: Optimizer | None,
) -> tuple[nn.Module, Switch, AnyShardEngine]:
    """Collective: exchange gradients or updates between replicas of a sharded model, or, without `replicate`, gradients
    between its shards. See `syncline.attach`."""
    sharded = sharded_model(model)
    units = units_of(sharded)
    world, shard_group = validation.group_or_default(None), units[0].shard_group
    group = shard_group if replicate is None else replicas_group(replicate)
    _check_arguments(exchange, replicate, gather, updates, shard_group)
    gather = None if gather == "fp32" else gather
    if gather is not None:
        _check_gathered(units)
    if replicate is None:
        exchange = Scatter(exchange)
    device = torch.device(units[0].inside.device)
    timeout = group_timeout(world) if timeout_s is None else timedelta(seconds=timeout_s)
    parameters = dict(validation.named_parameters(sharded, ()))
    shards, replicas = shard_group.size(), 1 if replicate is None else group.size()
    if lanes is None:
        lanes = default_lanes(exchange, backend_of(group))
    validation.check_lanes(lanes)
    policy = ShardPolicy(exchange, lanes, shards=shards, replicas=replicas, gather=gather)
    with current_device(device):
        with same_on_all_ranks(world, device, "what is attached", "attach") as fields:
            links = read_network(network, fields)
            if replicate is not None:
                _check_grid(shard_group, group)
                if links is not None and links.ranks != group.size():
                    text = f"the network has {links.ranks} ranks, but exchanges are between {group.size()} replicas"
                    raise UsageError(f"{text}: leave network= out, or probe with one rank per replica")
            described = {name: validation.described_fully(parameter) for name, parameter in parameters.items()}
            versions = {**versions_here(), "backend": backend_of(group)}
            fields |= flatten({**policy.fingerprint(), "version": versions, "parameter": described})
            fields["scaler"] = scaler is not None and scaler.is_enabled()
            if updates is not None and optimizer is not None:
                validation.check_steps_all(optimizer, parameters)
                if not _own_parts(parameters):
                    text = "this rank has no element of any trained parameter, so it has no updates to exchange"
                    raise UsageError(f"{text}: use fewer shards")
                fields |= flatten({**updates.fingerprint(), "optimizer": validation.optimizer_settings(optimizer)})
        switch = switch_of(sharded)
        if switch is not None and switch.engine is not None:
            switch.engine.finish()
        with meeting(world, "attach", users=True):
            if replicate is not None:
                _check_replicas(group, units, parameters)
            topology = find_topology(group, (exchange,), links)
            name = gather_bytes(world, secrets.token_hex(8).encode())[0].decode()
            watched = Watched(world, f"sharded {name}")
            options: dict[str, Any] = {"timeout": timeout, "topology": topology, "watched": watched}
            common: dict[str, Any] = {"shard_group": shard_group, "parameters": parameters, "scale": scale}
            common["in_backward"] = partial(is_in_backward, sharded)

            def gradients(policy: ShardPolicy) -> ReplicaEngine:
                made = ReplicaEngine(group, policy=policy, device=device, **common, **options)
                made.expect([unit.shard_layout(unit.dtype, device) for unit in units])
                return made

            engine: AnyShardEngine
            if replicate is None:
                engine = ScatterEngine(group, policy=policy, device=device, **common, **options)
                engine.expect([unit.whole_layout(unit.dtype, device) for unit in units])
            elif updates is None or optimizer is None:
                engine = gradients(policy)
            else:
                engine = _updating(group, parameters, updates, policy, optimizer, scaler, gradients, options)
    try:
        # A collective among shards outlasts the death of another replica unless it has this timeout, too.
        if group_timeout(shard_group) > timeout:
            bound_group(shard_group, timeout.total_seconds())
        if switch is None:
            switch = Switch(units, None if replicate is None else group, explains=device.type == "cpu")
            keep_switch(sharded, switch)
        elif switch.between != (None if replicate is None else group.group_name):
            raise UsageError("this model was attached with another replicate before: shard a new model")
    except BaseException:
        engine.close()
        raise
    switch.turn_to(engine)
    return sharded, switch, engine


def _updating(
    group: dist.ProcessGroup,
    parameters: dict[str, nn.Parameter],
    updates: UpdatePolicy,
    policy: ShardPolicy,
    optimizer: Optimizer,
    scaler: GradScaler | None,
    gradients: Callable[[ShardPolicy], ReplicaEngine],
    options: dict[str, Any],
) -> ShardUpdating:
    """Collective: create the engine that exchanges updates of shards, and the engine of its warm-up."""
    settings = {entry.name: getattr(updates, entry.name) for entry in dataclasses.fields(updates)}
    sizes = {"lanes": policy.lanes, "shards": policy.shards, "replicas": policy.replicas}
    sized = ShardUpdatePolicy(**{**settings, **sizes})
    watched: Watched = options["watched"]
    own_name = {"watched": watched._replace(name=f"updates {watched.name}")}  # the warm-up has the other one
    engine = UpdateEngine(group, _own_parts(parameters), {}, optimizer, sized, **{**options, **own_name})
    try:
        warm = None
        if updates.warmup:
            exchange = updates.warm_exchange
            lanes = default_lanes(exchange, backend_of(group))
            warm = gradients(dataclasses.replace(policy, exchange=exchange, lanes=lanes))
        return ShardUpdating(engine, warm, optimizer, scaler, options["topology"])
    except BaseException:
        engine.close()
        raise


def _own_parts(parameters: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return the trained parameters of which this rank has elements. Its part of a small one may be empty."""
    return {name: p for name, p in parameters.items() if p.requires_grad and local_part(p).numel()}


def _check_arguments(
    exchange: Exchange, replicate: object, gather: Any, updates: UpdatePolicy | None, shard_group: dist.ProcessGroup
) -> None:
    """Raise if an argument does not fit a model with, or without, replicas."""
    for problem, is_there in {
        f"gather is {gather!r}: it must be one of {', '.join(GATHERS)}": gather is not None and gather not in GATHERS,
        "gather is for a model without replicas: leave it out with replicate=": None not in (gather, replicate),
        "updates are exchanged between replicas: pass replicate=, or leave optimizer= out": (
            replicate is None and updates is not None
        ),
        f"the model is sharded among {shard_group.size()} of {dist.get_world_size()} ranks, so it has replicas: pass "
        "replicate=": replicate is None and shard_group.size() != dist.get_world_size(),
    }.items():
        if is_there:
            raise UsageError(problem)


def _check_gathered(units: list[Unit]) -> None:
    """Raise if FSDP gathers the parameters of a unit as bytes, because they have several types."""
    for unit in units:
        if len(types := sorted({str(dtype).removeprefix("torch.") for dtype in unit.gathered_types()})) > 1:
            text = f"{unit.label} has parameters in {' and '.join(types)}, which FSDP gathers as bytes"
            raise UsageError(f"{text}: leave gather= out, or shard the parameters of one type as a unit of their own")


def replicas_group(replicate: object) -> dist.ProcessGroup:
    """Return the process group of the argument `replicate`: a group, or a one-dimensional device mesh."""
    if isinstance(replicate, dist.ProcessGroup):
        return replicate
    if hasattr(replicate, "get_group") and hasattr(replicate, "ndim"):
        if replicate.ndim != 1:
            text = f"replicate is a device mesh of {replicate.ndim} dimensions"
            raise UsageError(f"{text}: pass the one between replicas, like mesh['replicate']")
        group: dist.ProcessGroup = replicate.get_group()
        return group
    kind = type(replicate).__name__
    raise UsageError(f"replicate is a {kind}: pass a process group, or a device mesh such as mesh['replicate']")


def _check_grid(shard_group: dist.ProcessGroup, group: dist.ProcessGroup) -> None:
    """Raise unless shards and replicas are a grid of all ranks."""
    shards, replicas, ranks = shard_group.size(), group.size(), dist.get_world_size()
    if shards * replicas != ranks:
        text = f"{replicas} replicas of {shards} shards are not all of the job's {ranks} ranks"
        raise UsageError(f"{text}: other parallel dimensions are not supported")
    common = set(dist.get_process_group_ranks(shard_group)) & set(dist.get_process_group_ranks(group))
    if common != {dist.get_rank()}:
        raise UsageError("replicate contains ranks with other shards of this replica: pass the other mesh dimension")


def _check_replicas(group: dist.ProcessGroup, units: list[Unit], parameters: dict[str, nn.Parameter]) -> None:
    """Collective: raise unless the ranks of a group have the same shards, and make their weights equal."""
    fields: dict[str, Any] = {"shard": units[0].shard_group.rank(), "units": len(units)}
    for unit in units:
        fields |= {f"{unit.name}.{name}": f"{shape} of {padded}" for name, shape, padded in unit.trained()}
    agree(group, fields, "the shard of this rank")
    weights = {name: local_part(parameter) for name, parameter in parameters.items()}
    if len(set(gather_bytes(group, digest_of_bits(weights).encode()))) > 1:
        validation.broadcast_from_first(group, list(weights.values()))
