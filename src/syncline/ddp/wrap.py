"""`wrap`: build a DistributedDataParallel model that follows a plan."""

from __future__ import annotations

import os
import warnings
from typing import Any

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP

from syncline.ddp import buckets
from syncline.ddp.attach import attach_policy
from syncline.ddp.handle import Handle
from syncline.dist.agreement import current_device
from syncline.dist.comm import bound_group
from syncline.errors import UsageError
from syncline.health.watchdog import watch_plain
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.runtime.bucket_policy import Planned, difference_of, read_plan
from syncline.runtime.parameters import named_parameters, only_device
from syncline.runtime.validation import check_timeout, group_or_default

ON_MISMATCH = ("refuse", "fallback")


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
    if on_mismatch not in ON_MISMATCH:
        raise UsageError(f"on_mismatch is {on_mismatch!r}: it must be one of {', '.join(ON_MISMATCH)}")
    check_timeout(timeout_s)
    if isinstance(net, DDP):
        raise UsageError("wrap takes a module, but this one is already in DistributedDataParallel: pass model.module")
    mesh = ddp_arguments.get("device_mesh")
    group = group_or_default(ddp_arguments.get("process_group") if mesh is None else mesh.get_group(0))
    parameters = named_parameters(net, getattr(net, "_ddp_params_and_buffers_to_ignore", ()))
    device = only_device(parameters)
    with current_device(device):
        loaded = read_plan(plan, group, device, "wrap")
        different = difference_of(loaded, parameters, group, "wrap")
    if different is not None and on_mismatch == "refuse":
        raise UsageError(f"the plan is for something else: {different}. Plan again, or pass on_mismatch='fallback'")
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
    """Give a live model the plan's buckets, lanes and exchanges. Collective, between steps.

    Gradients that are views of DDP's old buckets stay views of those.
    """
    try:
        buckets.change(ddp, plan.caps)
        return apply(ddp, plan, **options)
    except BaseException:
        buckets.make_plain(ddp)
        raise
