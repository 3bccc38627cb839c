"""`attach`: make a DistributedDataParallel model exchange its gradients through an exchange."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP

from syncline.ddp.engine import Engine
from syncline.ddp.handle import Handle
from syncline.ddp.hook import other_hooks, switch_of
from syncline.ddp.reduction import Reduction
from syncline.dist.agreement import current_device, flatten, versions_here
from syncline.dist.comm import backend_of, group_timeout
from syncline.errors import UsageError
from syncline.exchange import Exchange, default_lanes
from syncline.health.heartbeat import shared_heartbeat
from syncline.health.meeting import meeting, together
from syncline.records.network import Network
from syncline.runtime.bucket_policy import BucketPolicy, Uniform
from syncline.runtime.parameters import ddp_of, described_fully, only_device, parameters_of
from syncline.runtime.topology import find_topology, read_network
from syncline.runtime.validation import check_lanes, check_timeout, checked_exchange


def attach(
    model: nn.Module,
    exchange: Exchange | None = None,
    *,
    lanes: int | None = None,
    timeout_s: float | None = None,
    network: Network | str | os.PathLike[str] | None = None,
    scaler: GradScaler | None = None,
) -> Handle:
    """Make a DistributedDataParallel model exchange its gradients through an exchange.

    All ranks of the model's process group call this with the same arguments. It replaces an exchange that was attached
    before. If it raises, the model is unchanged.

    Args:
        model: A DistributedDataParallel model, or the result of `torch.compile` for one.
        exchange: The exchange. Default: `Dense()`.
        lanes: Number of buckets that may be exchanged at the same time, each over its own connections. Default: 2 for
            exchanges over gloo that wait between their collectives, and 1 otherwise.
        timeout_s: Timeout of a collective in seconds. Default: that of the model's process group.
        network: The network, or the file that `syncline probe` wrote. Exchanges that use levels, such as
            `Hierarchical`, find racks and choose paths with it. Without it they detect hosts and assume typical links.
        scaler: The GradScaler of the loss, if there is one. An exchange with a residual needs it, because the residual
            must follow changes of the scale.

    Returns:
        A handle, for statistics, checkpoints and `detach`.

    Raises:
        UsageError: An argument is invalid, the model is not a DDP model, it has another communication hook, or the
            network belongs to another cluster.
        MismatchError: The arguments, the models or the versions differ between ranks, or not all ranks call `attach`.

    Example:
        >>> handle = syncline.attach(DistributedDataParallel(net), syncline.Dense(wire="bf16"))
        >>> train()
        >>> print(handle.stats().sent_bytes)
    """
    ddp = ddp_of(model)
    exchange = checked_exchange(exchange)
    if lanes is None:
        lanes = default_lanes(exchange, backend_of(ddp.process_group))
    check_lanes(lanes)
    check_timeout(timeout_s)
    return attach_policy(ddp, Uniform(exchange, lanes), timeout_s=timeout_s, network=network, scaler=scaler)


def attach_policy(
    ddp: DDP,
    policy: BucketPolicy,
    *,
    timeout_s: float | None = None,
    network: Network | str | os.PathLike[str] | None = None,
    scaler: GradScaler | None = None,
) -> Handle:
    """Attach the exchanges of a bucket policy. See `attach` for the arguments."""
    check_scaler(scaler)
    group: dist.ProcessGroup = ddp.process_group
    timeout = group_timeout(group) if timeout_s is None else timedelta(seconds=timeout_s)
    parameters = parameters_of(ddp)
    device = only_device(parameters)
    reduction = Reduction(ddp)
    reduction.check(any(exchange.keeps for exchange in policy.exchanges))
    with current_device(device), shared_heartbeat():
        with together(group, device, "what is attached", "attach") as fields:
            links = read_network(network, fields)
            fields |= _fingerprint(ddp, policy, parameters)
            fields["scaler"] = scaler is not None and scaler.is_enabled()
        with meeting(group, "attach", users=True):
            topology = find_topology(group, policy.exchanges, links)
            engine = Engine(group, parameters, policy, timeout, topology, lambda: scale_of(scaler), reduction)
    try:
        switch = switch_of(ddp)
    except BaseException:
        engine.close()
        raise
    switch.turn_to(engine)
    return Handle(ddp, switch, engine)


def check_scaler(scaler: object) -> None:
    """Raise a UsageError unless `scaler` is a GradScaler or None."""
    known = all(callable(getattr(scaler, name, None)) for name in ("is_enabled", "get_scale"))
    if scaler is not None and (isinstance(scaler, type) or not known):
        raise UsageError(
            f"scaler is a {type(scaler).__name__}: pass the GradScaler that the loss is scaled with, or leave it out"
        )


def scale_of(scaler: GradScaler | None) -> Tensor | None:
    """Return the current loss scale as a 0-dim tensor, without waiting for the device if torch permits it."""
    if scaler is None or not scaler.is_enabled():
        return None
    get_async = getattr(scaler, "_get_scale_async", None)  # private: `get_scale` waits for the device
    scale: Tensor | None = get_async() if get_async is not None else None
    return torch.tensor(scaler.get_scale()) if scale is None else scale


def _fingerprint(ddp: DDP, policy: BucketPolicy, parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """Return the settings that must match on every rank."""
    flags = {
        "static_graph": bool(getattr(ddp, "static_graph", False)),
        "find_unused_parameters": ddp.find_unused_parameters,
        "skip_all_reduce_unused_params": bool(getattr(ddp, "skip_all_reduce_unused_params", False)),
        "gradient_as_bucket_view": ddp.gradient_as_bucket_view,
        "bucket_bytes_cap": ddp.bucket_bytes_cap,
        "other hooks": other_hooks(ddp),
    }
    versions = {**versions_here(), "backend": backend_of(ddp.process_group)}
    model = {name: described_fully(parameter) for name, parameter in parameters.items()}
    return flatten({**policy.fingerprint(), "ddp": flags, "version": versions, "parameter": model})
