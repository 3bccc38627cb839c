"""Apply a choice to a live model, and steps of an optimizer that are undone afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from syncline.balance.shares import Shares
from syncline.ddp.attach import attach, make_planned
from syncline.ddp.handle import Handle
from syncline.exchange import made_of
from syncline.measure.preserve_state import Weights
from syncline.plan.choice import Choice
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.records.profile import Profile
from syncline.runtime.validation import scale_of

_SMALL_STEP = 1e-3  # factor for learning rates while steps are only timed, so that weights stay of a usual size


def apply_choice(
    ddp: DDP,
    choice: Choice,
    *,
    network: Network | None,
    timeout_s: float | None,
    scaler: GradScaler | None,
    optimizer: Optimizer | None = None,
    warmup: int | None = None,
    shares: Shares | None = None,
    profile: Profile | None = None,
) -> Handle:
    """Apply a choice between steps. `warmup` replaces that of the choice's updates, to measure what follows it. Overlap
    needs the `profile` that the choice was made from, if that decides its buckets."""
    options: dict[str, Any] = {"network": network, "timeout_s": timeout_s, "scaler": scaler, "shares": shares}
    arguments = choice.attachment
    if arguments is None:
        return make_planned(ddp, choice.plan, **options)
    exchange = made_of(arguments.exchange)
    if arguments.overlap:
        options["profile"] = profile if arguments.sized else None
        return attach(ddp, exchange, optimizer=optimizer, overlap="forward", **options)
    if arguments.updates:
        steps = choice.warmup if warmup is None else warmup
        return attach(ddp, exchange, optimizer=optimizer, every=arguments.every, warmup=steps, **options)
    return attach(ddp, exchange, lanes=arguments.lanes, **options)


def without_warmup(plan: Plan) -> Plan:
    """Return the plan with sparse exchanges that begin at once, to measure them."""
    buckets = []
    for bucket in plan.buckets:
        described = dict(bucket.exchange)
        if "warmup" in described:
            described["warmup"] = 0
        if "warmup" in described.get("across", {}):
            described["across"] = {**described["across"], "warmup": 0}
        buckets.append(msgspec.structs.replace(bucket, exchange=described))
    return msgspec.structs.replace(plan, buckets=tuple(buckets))


@contextlib.contextmanager
def undone_steps(optimizer: Optimizer | None, weights: Weights, scaler: GradScaler | None) -> Iterator[None]:
    """Let the optimizer step in this context with a state of its own, and restore weights and state on exit."""
    if optimizer is None:
        yield
        return
    scale = scale_of(scaler)
    factor = _SMALL_STEP / (1.0 if scale is None else float(scale))
    state, rates = dict(optimizer.state), [group.get("lr") for group in optimizer.param_groups]
    optimizer.state.clear()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if rate is not None:
            group["lr"] = rate * factor
    try:
        yield
    finally:
        optimizer.state.clear()
        optimizer.state.update(state)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate
        with torch.no_grad():
            weights.restore()
