"""`attach` an exchange to a DistributedDataParallel model, or `wrap` a module in one that follows a plan."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP

from syncline.ddp import buckets
from syncline.ddp.engine import Engine
from syncline.ddp.handle import Handle
from syncline.ddp.hook import other_hook, switch_of
from syncline.ddp.reduction import Reduction
from syncline.dist.agreement import current_device, flatten, versions_here
from syncline.dist.comm import backend_of, bound_group, group_timeout
from syncline.errors import UsageError
from syncline.exchange import Exchange, default_lanes
from syncline.health.heartbeat import shared_heartbeat
from syncline.health.meeting import meeting, same_on_all_ranks
from syncline.health.watchdog import watch_plain
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.runtime.bucket_policy import BucketPolicy, Planned, Uniform, difference_of, read_plan
from syncline.runtime.parameters import ddp_of, described_fully, named_parameters, only_device, parameters_of
from syncline.runtime.topology import find_topology, read_network
from syncline.runtime.validation import check_lanes, check_timeout, checked_exchange, group_or_default


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
        with same_on_all_ranks(group, device, "what is attached", "attach") as fields:
            links = read_network(network, fields)
            fields |= _fingerprint(ddp, policy, parameters)
            fields["scaler"] = scaler is not None and scaler.is_enabled()
        if (other := other_hook(ddp)) is not None:  # on all ranks, because they have agreed
            raise UsageError(f"this model has a communication hook already ({other}): DDP takes only one. Remove yours")
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


def wrap(
    net: nn.Module,
    plan: Plan | str | os.PathLike[str],
    *,
    on_mismatch: str = "refuse",
    network: Network | str | os.PathLike[str] | None = None,
    timeout_s: float | None = None,
    scaler: GradScaler | None = None,
    **ddp_arguments: Any,
) -> DDP:
    """Build a DistributedDataParallel model whose buckets, lanes and exchanges follow a plan.

    All ranks call this with the same plan. `handle_of` returns the model's handle, unless the plan is plain DDP.

    Args:
        net: The module, not yet in DistributedDataParallel.
        plan: The plan, or the path of its file.
        on_mismatch: What to do if the plan was made for another model or cluster: `"refuse"` raises an error, and
            `"fallback"` warns and returns a plain DDP model.
        network, timeout_s, scaler: As for `attach`.
        **ddp_arguments: Further arguments of DistributedDataParallel, except `bucket_cap_mb` and `bucket_cap_mb_list`.

    Returns:
        The DistributedDataParallel model.

    Raises:
        UsageError: An argument is invalid, or the plan was made for another model or cluster.
        MismatchError: The plan or the model differs between ranks, or a rank cannot read the plan.

    Example:
        >>> model = syncline.wrap(net, plan="plan.json")
        >>> print(syncline.handle_of(model).describe())
    """
    for name in ("bucket_cap_mb", "bucket_cap_mb_list"):
        if ddp_arguments.get(name) is not None:
            raise UsageError(f"wrap(…, {name}=…): the plan sets the sizes of buckets: leave {name} out")
    if on_mismatch not in ("refuse", "fallback"):
        raise UsageError(f"on_mismatch is {on_mismatch!r}: it must be one of refuse, fallback")
    check_timeout(timeout_s)
    if isinstance(net, DDP):
        raise UsageError("wrap takes a module, but this one is already in DistributedDataParallel: pass model.module")
    mesh = ddp_arguments.get("device_mesh")
    group = group_or_default(ddp_arguments.get("process_group") if mesh is None else mesh.get_group(0))
    parameters = named_parameters(net, getattr(net, "_ddp_params_and_buffers_to_ignore", ()))
    device = only_device({name: parameter for name, parameter in parameters.items() if parameter.requires_grad})
    with current_device(device):
        loaded = read_plan(plan, group, device, "wrap")
        different = difference_of(loaded, parameters, group, "wrap")
    if different is not None and on_mismatch == "refuse":
        raise UsageError(f"the plan does not fit: {different}. Make a new plan, or pass on_mismatch='fallback'")
    if different is not None or loaded.nothing:
        if different is not None and group.rank() == 0:
            warnings.warn(f"the plan is not applied, and this is plain DDP: {different}", stacklevel=2)
        plain = DDP(net, **ddp_arguments)
        bound_group(group, timeout_s)
        watch_plain(plain)
        return plain
    rebuilt = bool(ddp_arguments.get("static_graph")) or not ddp_arguments.get("find_unused_parameters")
    ddp = DDP(net, **ddp_arguments, **buckets.cap_arguments(loaded.caps, rebuilt=rebuilt))
    buckets.planned_from_the_start(ddp)
    apply(ddp, loaded, network=network, timeout_s=timeout_s, scaler=scaler)
    return ddp


def apply(ddp: DDP, plan: Plan, **options: Any) -> Handle:
    """Attach the exchanges of a plan to a model that has the plan's buckets. The options are those of `attach`."""
    policy = Planned(plan, settled_after=buckets.settled_after(ddp), warns=ddp.process_group.rank() == 0)
    return attach_policy(ddp, policy, **options)


def make_planned(ddp: DDP, plan: Plan, **options: Any) -> Handle:
    """Give a live model the plan's buckets, lanes and exchanges, between steps. Gradients stay views of old buckets."""
    try:
        buckets.change(ddp, plan.caps)
        return apply(ddp, plan, **options)
    except BaseException:
        buckets.make_plain(ddp)
        raise


def check_scaler(scaler: object) -> None:
    """Raise a UsageError unless `scaler` is a GradScaler or None."""
    known = all(callable(getattr(scaler, name, None)) for name in ("is_enabled", "get_scale"))
    if scaler is not None and (isinstance(scaler, type) or not known):
        raise UsageError(f"scaler is a {type(scaler).__name__}: pass the GradScaler of the loss, or leave it out")


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
        "other hook": other_hook(ddp),
    }
    versions = {**versions_here(), "backend": backend_of(ddp.process_group)}
    model = {name: described_fully(parameter) for name, parameter in parameters.items()}
    return flatten({**policy.fingerprint(), "ddp": flags, "version": versions, "parameter": model})
