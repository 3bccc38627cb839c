"""`attach` an exchange to a DistributedDataParallel model, or `wrap` a module in one that follows a plan."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from syncline.balance.sample_weights import SampleWeights
from syncline.balance.shares import Shares
from syncline.ddp import reducer
from syncline.ddp.elastic import attach_elastic
from syncline.ddp.engine import Engine
from syncline.ddp.handle import Handle
from syncline.ddp.hook import other_hook, switch_of, switches
from syncline.ddp.overlap_setup import check_overlap, make_overlapping, with_best_caps
from syncline.ddp.overlapping import Overlapping, OverlapPolicy
from syncline.ddp.reducer import Reduction
from syncline.ddp.updating import DdpUpdating
from syncline.dist.agreement import current_device, flatten, versions_here
from syncline.dist.comm import backend_of, bound_group, group_timeout
from syncline.elastic.manager import Manager
from syncline.errors import UsageError
from syncline.exchange import Exchange, default_lanes
from syncline.fsdp.attach import attach_sharded
from syncline.fsdp.units import is_sharded
from syncline.health.meeting import meeting, same_on_all_ranks
from syncline.health.watchdog import watch_plain
from syncline.overlap.shards import check_elementwise
from syncline.records.plan import Plan
from syncline.records.profile import Profile
from syncline.runtime import validation
from syncline.runtime.bucket_policy import BucketPolicy, Planned, Uniform, difference_of, read_plan
from syncline.runtime.topology import NetworkOrFile, RankTopology, find_topology, read_network
from syncline.runtime.validation import ddp_of, described_fully, named_parameters, only_device, parameters_of
from syncline.updates.engine import UpdateEngine
from syncline.updates.policy import Nesterov, UpdatePolicy, checked_policy

_FOR_UPDATES = "every, warmup, delay and outer are for updates: pass optimizer= too, or leave them out"
_FLAGS = ("static_graph", "find_unused_parameters", "skip_all_reduce_unused_params", "gradient_as_bucket_view")


def attach(
    model: nn.Module,
    exchange: Exchange | None = None,
    *,
    replicate: ProcessGroup | DeviceMesh | None = None,
    optimizer: Optimizer | None = None,
    every: int = 1,
    warmup: int | None = None,
    delay: int = 0,
    outer: Nesterov | None = None,
    overlap: str | None = None,
    gather: str | None = None,
    lanes: int | None = None,
    timeout_s: float | None = None,
    network: NetworkOrFile = None,
    profile: Profile | str | os.PathLike[str] | None = None,
    scaler: GradScaler | None = None,
    shares: Shares | None = None,
    manager: Manager | None = None,
) -> Handle:
    """Make a DDP or FSDP2 model exchange its gradients, or its optimizer's updates, through an exchange.

    With `optimizer`, each rank steps it with its own gradients, and ranks exchange what the steps have changed. Use it
    for sparse exchanges with AdamW, which trains badly with sparse gradients. The training loop stays as it is.

    With `overlap="forward"`, the exchange extends into the next forward pass: gradients are summed in shards during
    backward, the optimizer steps this rank's shards, and the new weights are gathered while forward runs. This is
    lossless with `Dense()` and `Hierarchical()`.

    A model that is sharded with `fully_shard` on a 1-D mesh exchanges between its replicas with `replicate`.

    With a `manager`, each process is a replica that may die, leave and join at any time. The model is a plain module,
    and there is no process group.

    All ranks of the model's process group call this with the same arguments. It replaces an exchange that was attached
    before. If it raises, the model is unchanged, except that an exchange with `overlap` may be detached.

    Args:
        model: A DistributedDataParallel model, a model sharded with `fully_shard`, or the result of `torch.compile` for
            one of them.
        exchange: The exchange. Default: `Dense()`.
        replicate: For a sharded model, the ranks that have the same shard in other replicas: a process group, or a 1-D
            device mesh such as `mesh["replicate"]`. All ranks of the job are replicas times shards. Without it, the
            gradients of a sharded model are sent to the owners of shards through `Dense` or `Quantized`.
        optimizer: The optimizer of all parameters of the model, to exchange updates. Gradients are not synchronised
            then: clipping, for example, uses the norm of this rank's own gradients.
        every: Number of steps of the optimizer between two exchanges of the same weights. Parts of the weights take
            turns.
        warmup: Number of steps to exchange gradients in 4 bits before updates. Default: 300 for exchanges that select
            entries and for `every` > 1, and 0 otherwise. Training is worse if it is less than about 10 % of the steps.
        delay: Number of steps after which the result of an exchange is applied, less than `every`. Meanwhile, the
            exchange runs in the background.
        outer: An optimizer of the common weights, with the mean update as its gradient. Default: subtract the mean
            update from the weights.
        overlap: `"forward"`, with `Dense`, `Quantized` or `Hierarchical()` and an `optimizer` that treats every element
            by itself, such as AdamW and SGD. Each rank then has its shard of the optimizer's state, and the exchange
            decides how gradients are sent to the owners of shards. Clip with `handle.clip_grad_norm_`.
        gather: With `overlap`, or for a sharded model without replicas: gather parameters in `"bf16"` or `"fp16"`. All
            ranks then compute with rounded parameters, and the owner of a shard keeps it in fp32. Default: gather
            parameters in their own type.
        lanes: Number of buckets that may be exchanged at the same time, each over its own connections. Default: 2 for
            exchanges over gloo that wait between their collectives, and 1 otherwise.
        timeout_s: Timeout of a collective in seconds. Default: that of the model's process group.
        network: The network, or the file that `syncline probe` wrote. Exchanges that use levels, such as
            `Hierarchical`, find racks and choose paths with it. Without it they detect hosts and assume typical links.
        profile: The model's profile, or the file that `syncline profile` wrote. With `overlap` and a `network`, the
            model gets buckets of the size with which a step should take the least time, until `detach` or another
            `attach`.
        scaler: The GradScaler of the loss, if there is one. Residuals must follow changes of its scale. With updates, a
            rank whose scaler skips a step must still take part in the exchange.
        shares: The result of `syncline.shares`, or `syncline.Shares(batches)`, if ranks have batches of different
            sizes. Gradients, or updates, are then weighted by the samples that each rank has computed. The loss of each
            rank must be the mean over its own samples.
        manager: The `syncline.elastic.Manager` of this process, to exchange updates with the replicas that are there
            whenever an exchange is due. The call returns when the first exchange can begin, or with the weights and the
            optimizer's state of a replica that already trains. Pass `optimizer` and `every` too. `timeout_s` is then
            the time in which 16 MB of weights must be exchanged, by default 8 s.

    Returns:
        A handle, for statistics, checkpoints and `detach`.

    Raises:
        UsageError: An argument is invalid, the model has another hook, or the network belongs to another cluster.
        MismatchError: The arguments, the models or the versions differ between ranks, or not all ranks call `attach`.

    Example:
        >>> handle = syncline.attach(DistributedDataParallel(net), syncline.Dense(wire="bf16"))
        >>> print(handle.stats().sent_bytes)
    """
    exchange = validation.checked_exchange(exchange)
    validation.check_positive(timeout_s=timeout_s)
    if manager is not None:
        others = {"replicate": replicate, "overlap": overlap, "gather": gather, "network": network, "profile": profile}
        unsupported = {name: value is not None for name, value in {**others, "lanes": lanes, "shares": shares}.items()}
        unsupported |= {"warmup": bool(warmup), "delay": bool(delay)}
        return attach_elastic(model, exchange, manager, optimizer, every, outer, timeout_s, unsupported)
    if replicate is not None or is_sharded(model):
        if shares is not None:
            raise UsageError("shares is for DDP: FSDP averages gradients inside a replica before they can be weighted")
        if overlap is not None:
            raise UsageError("overlap='forward' is for DDP: FSDP gathers parameters behind the forward pass by itself")
        updating = (optimizer, every, warmup, delay, outer)
        return _attach_sharded(model, exchange, (replicate, gather), updating, lanes, timeout_s, network, scaler)
    ddp = ddp_of(model)
    requested_lanes = lanes
    if lanes is None:
        lanes = default_lanes(exchange, backend_of(ddp.process_group))
    validation.check_lanes(lanes)
    policy: BucketPolicy | UpdatePolicy | OverlapPolicy = Uniform(exchange, lanes)
    if overlap is not None:
        lanes = 1 if requested_lanes is None else lanes
        check_overlap(
            model,
            exchange,
            overlap,
            gather or "fp32",
            optimizer,
            lanes,
            (every, warmup, delay, outer) == (1, None, 0, None),
        )
        policy = OverlapPolicy(exchange, 1, gather=gather or "fp32")
        if profile is not None:
            policy = with_best_caps(ddp, policy, profile, network)
    elif profile is not None:
        raise UsageError("profile is for the buckets of overlap='forward': pass that too, or leave it out")
    elif gather is not None:
        raise UsageError("gather is for weights that are gathered: pass overlap='forward' too, or leave it out")
    elif optimizer is not None:
        policy = checked_policy(exchange, lanes, every, warmup, delay, outer)
    elif (every, warmup, delay, outer) != (1, None, 0, None):
        raise UsageError(_FOR_UPDATES)
    options: dict[str, Any] = {"timeout_s": timeout_s, "network": network, "scaler": scaler}
    return attach_policy(ddp, policy, optimizer=optimizer, shares=shares, **options)


def _attach_sharded(
    model: nn.Module,
    exchange: Exchange,
    between: tuple[ProcessGroup | DeviceMesh | None, str | None],
    updating: tuple[Optimizer | None, int, int | None, int, Nesterov | None],
    lanes: int | None,
    timeout_s: float | None,
    network: NetworkOrFile,
    scaler: GradScaler | None,
) -> Handle:
    """Attach to a model that is sharded with `fully_shard`."""
    validation.check_scaler(scaler)
    optimizer, *settings = updating
    if optimizer is None and settings != [1, None, 0, None]:
        raise UsageError(_FOR_UPDATES)
    options: dict[str, Any] = {"lanes": lanes, "timeout_s": timeout_s, "network": network, "scaler": scaler}
    options["scale"] = lambda: validation.scale_of(scaler)
    updates = None if optimizer is None else checked_policy(exchange, lanes or 1, *settings)
    return Handle(*attach_sharded(model, exchange, *between, updates, optimizer=optimizer, **options))


def attach_policy(
    ddp: DDP,
    policy: BucketPolicy | UpdatePolicy | OverlapPolicy,
    *,
    timeout_s: float | None,
    network: NetworkOrFile,
    scaler: GradScaler | None,
    optimizer: Optimizer | None = None,
    shares: Shares | None = None,
) -> Handle:
    """Attach the exchanges of a policy. See `attach` for the arguments."""
    validation.check_scaler(scaler)
    group: dist.ProcessGroup = ddp.process_group
    timeout = group_timeout(group) if timeout_s is None else timedelta(seconds=timeout_s)
    parameters = parameters_of(ddp)
    device = only_device(parameters)
    reduction = Reduction(ddp)
    reduction.check(any(exchange.keeps for exchange in policy.exchanges))
    with current_device(device):
        with same_on_all_ranks(group, device, "what is attached", "attach") as fields:
            links = read_network(network, fields)
            flags = {name: getattr(ddp, name, False) for name in _FLAGS}  # earlier versions of torch lack some
            flags |= {"bucket_bytes_cap": ddp.bucket_bytes_cap, "other hook": other_hook(ddp)}
            versions = {**versions_here(), "backend": backend_of(group)}
            described = {name: described_fully(parameter) for name, parameter in parameters.items()}
            fields |= flatten({**policy.fingerprint(), "ddp": flags, "version": versions, "parameter": described})
            fields["scaler"] = scaler is not None and scaler.is_enabled()
            fields |= flatten({"shares": None if shares is None else _checked(shares, group).fingerprint()})
            if optimizer is not None:
                validation.check_steps_all(optimizer, parameters)
                if not isinstance(policy, UpdatePolicy):
                    check_elementwise(optimizer)
                fields |= flatten({"optimizer": validation.optimizer_settings(optimizer)})
        if (other := other_hook(ddp)) is not None:  # on all ranks, because they have agreed
            raise UsageError(f"this model has a communication hook already ({other}): DDP takes only one. Remove yours")
        if (before := switches.get(ddp)) is not None and before.engine is not None:
            if isinstance(before.engine, Overlapping):
                before.turn_to(None)  # weights are no longer in shards, whatever follows
            else:
                before.engine.finish()
        weights = None if shares is None else SampleWeights(group, shares)
        with meeting(group, "attach", users=True):
            topology = find_topology(group, policy.exchanges, links)
            made = partial(Engine, group, parameters, timeout=timeout, topology=topology, reduction=reduction)
            made = partial(made, scale=lambda: validation.scale_of(scaler))
            engine: Engine | DdpUpdating | Overlapping
            if not isinstance(policy, UpdatePolicy | OverlapPolicy):
                engine = made(policy=policy)
            else:
                assert optimizer is not None  # noqa: S101 - `attach` made the policy because there is one
                if isinstance(policy, UpdatePolicy):
                    engine = _updating(ddp, policy, optimizer, scaler, made, topology, timeout, weights)
                else:
                    scale = partial(validation.scale_of, scaler)
                    engine = make_overlapping(ddp, policy, optimizer, made, reduction, timeout, topology, scale)
    try:
        if not isinstance(policy, Planned):  # a planned model has its buckets already
            reducer.set_caps(ddp, policy.caps if isinstance(policy, OverlapPolicy) else ())
        switch = switch_of(ddp)
    except BaseException:
        engine.close()
        raise
    switch.turn_to(engine)
    switch.weigh(weights)
    return Handle(ddp, switch, engine)


def _checked(shares: Any, group: dist.ProcessGroup) -> Shares:
    """Raise a UsageError unless these are the shares of the ranks of this group."""
    if not isinstance(shares, Shares):
        raise UsageError(f"shares is {shares!r}: pass what syncline.shares returned, or syncline.Shares(batches)")
    if (len(shares.batches), shares.rank) != (group.size(), group.rank()):
        text = f"shares has batches for {len(shares.batches)} ranks, and is that of rank {shares.rank}"
        here = f"this is rank {group.rank()} of the model's {group.size()}"
        raise UsageError(f"{text}, but {here}: measure again with syncline.shares")
    return shares


def _updating(
    ddp: DDP,
    policy: UpdatePolicy,
    optimizer: Optimizer,
    scaler: GradScaler | None,
    make_engine: Callable[..., Engine],
    topology: RankTopology | None,
    timeout: timedelta,
    weights: SampleWeights | None,
) -> DdpUpdating:
    """Collective: create the engine that exchanges updates, and the engine of its warm-up."""
    group: dist.ProcessGroup = ddp.process_group
    trained = {name: parameter for name, parameter in parameters_of(ddp).items() if parameter.requires_grad}
    buffers = validation.buffers_of(ddp) if ddp.broadcast_buffers else {}
    updates = UpdateEngine(group, trained, buffers, optimizer, policy, timeout, topology, weights=weights)
    try:
        warm = None
        if policy.warmup:
            exchange = policy.warm_exchange
            warm = make_engine(policy=Uniform(exchange, default_lanes(exchange, backend_of(group))))
        return DdpUpdating(ddp, updates, warm, optimizer, scaler, topology)
    except BaseException:
        updates.close()
        raise


def wrap(
    net: nn.Module,
    plan: Plan | str | os.PathLike[str],
    *,
    on_mismatch: str = "refuse",
    network: NetworkOrFile = None,
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
    validation.check_positive(timeout_s=timeout_s)
    if isinstance(net, DDP):
        raise UsageError("wrap takes a module, but this one is already in DistributedDataParallel: pass model.module")
    mesh = ddp_arguments.get("device_mesh")
    group = validation.group_or_default(ddp_arguments.get("process_group") if mesh is None else mesh.get_group(0))
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
    rebuilt = bool(ddp_arguments.get("static_graph") or not ddp_arguments.get("find_unused_parameters"))
    ddp = DDP(net, **ddp_arguments, **reducer.cap_arguments(loaded.caps, rebuilt=rebuilt))
    reducer.planned_from_the_start(ddp)
    make_planned(ddp, loaded, built=True, network=network, timeout_s=timeout_s, scaler=scaler)
    return ddp


def make_planned(ddp: DDP, plan: Plan, *, built: bool = False, **options: Any) -> Handle:
    """Give a live model the plan's buckets, unless it was `built` with them, and its exchanges, between steps.

    The options are those of `attach`. Gradients stay views of the old buckets.
    """
    try:
        if not built:
            reducer.change(ddp, plan.caps)
        settled_after = 2 if ddp.static_graph else int(reducer.rebuilds(ddp))
        policy = Planned(plan, settled_after=settled_after, warns=ddp.process_group.rank() == 0)
        return attach_policy(ddp, policy, **options)
    except BaseException:
        if not built:
            reducer.make_plain(ddp)
        raise
