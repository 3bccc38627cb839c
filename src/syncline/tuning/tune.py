"""`tune`: measure, plan, try, and apply the faster of plan and plain DDP to a live model, in place.

All ranks profile the model without communication, probe the links and make a plan. Plain DDP and the plan then take
turns on the model itself, and the faster one stays. The model remains the same object with the same weights, buffers
and gradients, and random number generators keep their state.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP

from syncline.ddp import buckets
from syncline.ddp.attach import make_planned
from syncline.ddp.handle import Handle
from syncline.ddp.hook import attached_to
from syncline.dist.agreement import current_device
from syncline.dist.comm import bound_group, gather_bytes, group_device
from syncline.errors import UsageError
from syncline.health import meeting
from syncline.health.watchdog import watch_plain
from syncline.measure.backward_watch import watch_backward
from syncline.measure.preserve_state import Weights, restored_on_exit
from syncline.measure.steps import run_on_all_ranks
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.records.profile import Profile
from syncline.runtime.parameters import ddp_of, only_device, parameters_of
from syncline.tuning.settings import BUDGET_S, MIN_BUDGET_S, TuneSettings
from syncline.tuning.trial import Schedule, Trial, Turn, agreed_network, plan_for_live, probe_for

Step = Callable[[nn.Module], object]

_PROBE_SHARE, _PROFILE_SHARE, _TRIAL_SHARE = 0.4, 0.15, 0.4
"""Parts of the budget."""
_PROFILED = (5, 20)
"""Fewest and most steps that are profiled."""


@dataclass(frozen=True)
class Tuned:
    """The result of `tune`, the same on all ranks.

    Attributes:
        plan: The best plan that was found. It may be to do nothing.
        trial: The times of plain DDP and of the plan. None if plain DDP was predicted to be best, so nothing was tried.
        handle: The handle of the attached plan. None if plain DDP stays.
        profile: The profile of the model.
        network: The links that the plan was made for.
        seconds: Time that tuning took.
        model: The model.

    Example:
        >>> tuned = syncline.tune(model, step)  # doctest: +SKIP
        >>> print(tuned.describe())  # doctest: +SKIP
    """

    plan: Plan
    trial: Trial | None
    handle: Handle | None
    profile: Profile
    network: Network
    seconds: float
    model: DDP = field(repr=False)

    def describe(self) -> str:
        """Return the reason for the plan, and the result of the trial if there was one."""
        return "\n".join([self.plan.reason, *([] if self.trial is None else [self.trial.describe()])])


def tune(
    model: nn.Module,
    step: Step,
    *,
    allow: Sequence[str] = (),
    budget_s: float = BUDGET_S,
    network: Network | str | os.PathLike[str] | None = None,
    timeout_s: float | None = None,
    scaler: GradScaler | None = None,
    quiet: bool = False,
) -> Tuned:
    """Find the fastest way for a DDP model to exchange its gradients, and apply it in place.

    All ranks of the model's process group must call `tune` with the same arguments. An exchange that was attached
    before is replaced, and its residual is dropped. From then on each rank logs one line when another rank stops
    sending heartbeats, with plain DDP too.

    Args:
        model: A DistributedDataParallel model.
        step: Runs one forward and backward on the module it gets, as in training but without an update. It is called
            some dozens of times, with the module inside DDP or with the model itself, so it should reuse one batch.
        allow: Lossy exchanges that the plan may use: "bf16", "fp16", "sparse". By default plans are lossless.
        budget_s: Time that tuning may take, in seconds. At least eight steps of plain DDP and of the plan are run.
        network: The links, or the file that `syncline probe` wrote. Without it, the links are probed.
        timeout_s: Timeout of a collective, now and later. It becomes the timeout of the model's process group, as in
            `follow`.
        scaler: The GradScaler of the loss, as in `attach`.
        quiet: Print nothing. By default rank 0 prints what was chosen and why.

    Returns:
        What was found and applied.

    Raises:
        UsageError: An argument is invalid, `step` changed a weight, or this model cannot be tuned.
        MismatchError: The ranks passed different arguments, or one of them failed.

    Example:
        >>> def step(model):  # doctest: +SKIP
        ...     loss_fn(model(inputs), labels).backward()
        >>> tuned = syncline.tune(DDP(net), step)  # doctest: +SKIP
    """
    began_s = time.monotonic()
    ddp = ddp_of(model)
    group: dist.ProcessGroup = ddp.process_group
    parameters = parameters_of(ddp)
    device = only_device(parameters)

    def checked() -> TuneSettings:
        _check_tunable(model, ddp, network)
        return TuneSettings(allow=allow, budget_s=budget_s, network=network, timeout_s=timeout_s, scaler=scaler)

    with current_device(device), meeting.meeting(group, "tune", users=True):
        links = agreed_network(group, device, "tune", checked)
        bound_group(group, timeout_s)
        with restored_on_exit(ddp.module, device):
            # DDP must be rebuilt if something is attached, and with a static graph: its first step also counts what
            # happens on the module.
            rebuild = attached_to(ddp) is not None or bool(getattr(ddp, "static_graph", False))
            trial: Trial | None = None
            weights = Weights(parameters)
            try:
                profile = _profile(ddp, step, group, _PROFILE_SHARE * budget_s, device, weights)
                links = links or probe_for(group, allow, _PROBE_SHARE * budget_s)
                profile, plan = plan_for_live(ddp, profile, links, allow, device)
                rebuild = rebuild or not plan.nothing
                if not plan.nothing:
                    left_s = max(MIN_BUDGET_S, budget_s - (time.monotonic() - began_s))
                    left_s = _TRIAL_SHARE * _reduced(group, left_s, dist.ReduceOp.MIN)
                    trial = _try(ddp, plan, step, left_s, links, timeout_s, device)
                run_on_all_ranks(group, lambda: _check_unchanged(weights))
            except BaseException:
                _restore_plain(ddp)
                raise
            if rebuild:
                _restore_plain(ddp)
            handle = None
            if trial is not None and trial.won:
                handle = make_planned(ddp, plan, network=links, timeout_s=timeout_s, scaler=scaler)
            else:
                watch_plain(ddp)
            if hasattr(ddp.module, "_orig_mod"):  # compiled: DDP splits the graph where its buckets end
                torch.compiler.reset()
    tuned = Tuned(plan, trial, handle, profile, links, time.monotonic() - began_s, ddp)
    if not quiet and group.rank() == 0:
        print(f"syncline: {tuned.describe()}", file=sys.stderr)
    return tuned


def _check_tunable(model: nn.Module, ddp: DDP, network: object) -> None:
    if model is not ddp:
        raise UsageError("this model is compiled around DDP: tune the DDP model, and compile it afterwards")
    if network is None and ddp.process_group.size() != dist.get_world_size():
        raise UsageError("the model's process group is a part of the world, which cannot be probed: pass network=")
    if (why_not := buckets.why_not_change(ddp)) is not None:
        raise UsageError(f"{why_not}: see `syncline plan` and syncline.wrap(net, plan)")


def _reduced(group: dist.ProcessGroup, value: float, op: Any) -> float:
    """Return the smallest or largest value of all ranks. Collective."""
    reduced = torch.tensor([value], dtype=torch.float64, device=group_device(group))
    dist.all_reduce(reduced, op=op, group=group)
    return float(reduced)


def _check_unchanged(weights: Weights) -> bytes:
    """Restore the weights and raise an error if a step has changed one."""
    changed = weights.changed()
    if changed is None:
        return b""
    weights.restore()
    raise UsageError(
        f"step changed {changed}: it must run forward and backward only, without optimizer.step() or other writes to "
        "weights. The weights have been restored. If step ran the optimizer, its state now differs between ranks: "
        "create the optimizer again, or load its state from a checkpoint on every rank"
    )


def _profile(
    ddp: DDP, step: Step, group: dist.ProcessGroup, budget_s: float, device: torch.device, weights: Weights
) -> Profile:
    """Profile the module inside DDP, without communication, on all ranks at once. Collective."""
    times_s: list[float] = []

    def run(count: int, *, check: bool = False) -> bytes:
        times_s.extend(_timed_step(ddp, ddp.module, step, device) for _ in range(count))
        return _check_unchanged(weights) if check else b""

    name = type(ddp.module).__name__
    with watch_backward(ddp.module, steps=_PROFILED[1], skip=2, model_name=name) as watch:
        run_on_all_ranks(group, lambda: run(1, check=True))
        run_on_all_ranks(group, lambda: run(1))
        slowest_s = max(_reduced(group, times_s[-1], dist.ReduceOp.MAX), 1e-6)
        count = max(_PROFILED[0], min(_PROFILED[1], int(budget_s / slowest_s)))
        run_on_all_ranks(group, lambda: run(count))
        return watch.profile(group)


def _try(
    ddp: DDP, plan: Plan, step: Step, budget_s: float, network: Network, timeout_s: float | None, device: torch.device
) -> Trial:
    """Let plain DDP and the plan take turns with the user's step. Collective."""
    group: dist.ProcessGroup = ddp.process_group
    schedule = Schedule.within(budget_s, plan)
    step_s: dict[Turn, list[float]] = {"plain": [], "plan": []}
    for turn in schedule.turns:
        _restore_plain(ddp)
        if turn == "plan":
            make_planned(ddp, plan, network=network, timeout_s=timeout_s)
        times_s = [_timed_step(ddp, ddp, step, device, group) for _ in range(schedule.settling + schedule.counted)]
        step_s[turn] += times_s[schedule.settling :]
    return Trial.of(group, step_s)


def _timed_step(
    ddp: DDP, module: nn.Module, step: Step, device: torch.device, start_with: dist.ProcessGroup | None = None
) -> float:
    """Run one step from empty gradients and return its duration. With a group, all of its ranks start together."""
    _drop_gradients(ddp)
    if start_with is not None:
        gather_bytes(start_with, b"")
    began_s = time.monotonic()
    step(module)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic() - began_s


def _restore_plain(ddp: DDP) -> None:
    _drop_gradients(ddp)  # they may be views of the buckets that are about to go
    buckets.make_plain(ddp)


def _drop_gradients(ddp: DDP) -> None:
    for parameter in ddp.module.parameters():
        parameter.grad = None
