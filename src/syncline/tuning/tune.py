"""`tune`: measure, plan, try, and apply to a live DistributedDataParallel model, in place.

    syncline.tune(model, step)

All ranks profile the model without communication, probe the links, and plan. What the plan promises is then tried
against plain DDP, taking turns on the model itself; the faster of the two stays. The model is the same object before
and after, with the same weights, buffers and gradients, and random numbers go on where they were: training continues
as if nothing had happened, but for the time it takes.
"""

from __future__ import annotations

import os
import statistics
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
from syncline.ddp.attach import check_scaler
from syncline.ddp.handle import Handle
from syncline.ddp.hook import attached_to, other_hooks
from syncline.dist.agreement import current_device
from syncline.dist.comm import backend_of, bound_group, gather_bytes, group_device
from syncline.errors import SynclineError, UsageError
from syncline.health import meeting
from syncline.health.watchdog import watch_plain
from syncline.measure.backward_watch import watch_backward
from syncline.measure.preserve_state import Weights, as_it_was
from syncline.measure.steps import together
from syncline.plan.search import check_allowed
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.records.profile import Profile
from syncline.runtime.parameters import ddp_of, only_device, parameters_of
from syncline.runtime.topology import check_network, hosts_of, mark_of, read_network
from syncline.runtime.validation import check_timeout
from syncline.tuning.replan import make_plain, make_planned, plan_for_live, probe_for

Step = Callable[[nn.Module], object]

BUDGET_S = 45.0
_LEAST_BUDGET_S = 5.0
_PROBE_SHARE, _PROFILE_SHARE, _TRIAL_SHARE = 0.4, 0.15, 0.4
_PROFILED = (5, 20)
"""Steps that are measured: at least, and at most."""
_TRIED = (4, 15)
"""Steps of each of a trial's turns; fewer, of fewer turns, where they are long."""
_SETTLING = 3
"""Steps until DDP's buckets are what they will be, and caches warm."""
_TURNS = ("plain", "plan", "plan", "plain")
_WORTH = 0.99
"""Of plain DDP's time: what a plan must stay under in the trial."""


@dataclass(frozen=True)
class Trial:
    """Median seconds of a forward and a backward, on the slowest rank of each step, in turns."""

    plain_s: float
    plan_s: float
    steps: int
    """Of each."""

    @property
    def won(self) -> bool:
        return self.plan_s < _WORTH * self.plain_s

    def describe(self, what: str = "forward and backward") -> str:
        stays = "the plan stays" if self.won else "plain DDP stays"
        return f"Tried: plain DDP {self.plain_s * 1e3:.1f} ms, the plan {self.plan_s * 1e3:.1f} ms per {what}: {stays}."


@dataclass(frozen=True)
class Tuned:
    """What `tune` found and did; the same on all ranks."""

    plan: Plan
    trial: Trial | None
    """None where there was nothing to try: plain DDP is predicted to be best."""
    handle: Handle | None
    """What is attached now; None where plain DDP is left alone."""
    profile: Profile
    network: Network
    seconds: float
    """That tuning took."""
    model: DDP = field(repr=False)
    arguments: dict[str, Any] = field(default_factory=dict, repr=False)
    """With which it was called."""

    def describe(self) -> str:
        return "\n".join([self.plan.reason, *([] if self.trial is None else [self.trial.describe()])])

    def drift(self) -> str | None:
        """Whether exchanging takes much longer than expected by now, and retuning may pay."""
        return None if self.handle is None else self.handle.drift()

    def retune(self, step: Step, **changed: Any) -> Tuned:
        """`tune` again, with the arguments of the last time but for what is `changed`; links are probed anew unless a
        `network` is passed."""
        return tune(self.model, step, **{**self.arguments, **changed})


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
    """Finds how `model`, a DistributedDataParallel, exchanges its gradients fastest, and has it do so.

    `step(model)` runs one forward and backward on the model that it is given, as in training but without an update. It
    is given the module inside to measure it alone, and the model itself to try the plan; it is called some dozens of
    times, so let it use one batch again and again. All ranks of the model's process group call `tune`, with the same
    arguments. Only what changes no result is tried, unless `allow` names more: "bf16", "fp16", "sparse".

    It takes about `budget_s`, and at least eight steps of plain DDP and of the plan; a `network`, or the file that
    `syncline probe` wrote of it, saves the probing. `scaler`: as for `attach`. Rank 0 says what was chosen and why,
    unless `quiet`. What was attached before is replaced, by the plan or by plain DDP, and what it kept is lost. With
    one rank there is nothing to exchange: `step` runs as it would otherwise, and the model is left alone.

    `timeout_s` is how long a collective may take, now and later, as for `follow`: it becomes the timeout of the model's
    process group. While it is tuned, and afterwards with plain DDP too, each rank logs one line when another rank stops
    sending heartbeats.
    """
    began = time.monotonic()
    ddp = ddp_of(model)
    group: dist.ProcessGroup = ddp.process_group
    parameters = parameters_of(ddp)
    with current_device(only_device(parameters)), meeting.meeting(group, "tune", users=True):
        links, allowed = _agreed(model, ddp, allow, budget_s, network, timeout_s, scaler)
        bound_group(group, timeout_s)
        device = next(iter(parameters.values())).device
        with as_it_was(ddp.module, device):
            # Built anew: what has something attached; and with a static graph, whose first step counts what happens on
            # the module, too.
            rebuilt = attached_to(ddp) is not None or bool(getattr(ddp, "static_graph", False))
            trial: Trial | None = None
            weights = Weights(parameters)
            try:
                profile = _profile(ddp, step, group, _PROFILE_SHARE * budget_s, device, weights)
                links = links or probe_for(group, allowed, _PROBE_SHARE * budget_s)
                profile, plan = plan_for_live(ddp, profile, links, allowed, device)
                rebuilt = rebuilt or not plan.nothing
                if not plan.nothing:
                    left_s = _least(group, max(_LEAST_BUDGET_S, budget_s - (time.monotonic() - began)))
                    trial = _try(ddp, plan, step, group, _TRIAL_SHARE * left_s, links, timeout_s, device)
                together(group, lambda: _check_unchanged(weights))
            except BaseException:
                _plain(ddp)
                raise
            if rebuilt:
                _plain(ddp)
            handle = None
            if trial is not None and trial.won:
                handle = make_planned(ddp, plan, network=links, timeout_s=timeout_s, scaler=scaler)
                handle.tune = tune
            else:
                watch_plain(ddp)
            if hasattr(ddp.module, "_orig_mod"):  # compiled: DDP splits its graph where its buckets end
                torch.compiler.reset()
    arguments = {"allow": allowed, "budget_s": budget_s, "timeout_s": timeout_s, "scaler": scaler, "quiet": quiet}
    tuned = Tuned(plan, trial, handle, profile, links, time.monotonic() - began, ddp, arguments)
    if not quiet and group.rank() == 0:
        print(f"syncline: {tuned.describe()}", file=sys.stderr)
    return tuned


def _agreed(
    model: nn.Module,
    ddp: DDP,
    allow: Sequence[str],
    budget_s: float,
    network: object,
    timeout_s: float | None,
    scaler: GradScaler | None,
) -> tuple[Network | None, tuple[str, ...]]:
    """Collective: what is known of the links, and what is allowed. What is wrong on one rank is refused by all."""
    group: dist.ProcessGroup = ddp.process_group
    with meeting.together(group, only_device(parameters_of(ddp)), "what is tuned", "tune") as fields:
        allowed = check_allowed(allow)
        number = isinstance(budget_s, int | float) and not isinstance(budget_s, bool)
        if not (number and _LEAST_BUDGET_S <= budget_s < 1e6):
            raise UsageError(f"budget_s is {budget_s!r}: measuring takes at least {_LEAST_BUDGET_S:g} s")
        check_timeout(timeout_s)
        check_scaler(scaler)
        if model is not ddp:
            raise UsageError("this model is compiled around DDP: tune the DDP model, and compile it afterwards")
        if network is None and group.size() != dist.get_world_size():
            raise UsageError("the model's process group is a part of the world, which cannot be probed: pass network=")
        if other_hooks(ddp):
            raise UsageError(f"this model has a communication hook already ({other_hooks(ddp)[0]}): DDP takes only one")
        if (why_not := buckets.why_not_change(ddp)) is not None:
            raise UsageError(f"{why_not}: see `syncline plan` and syncline.wrap(net, plan)")
        known = read_network(network)
        if isinstance(known, SynclineError):
            raise known
        fields |= {"allow": list(allowed), "budget_s": budget_s, "scaler": scaler is not None}
        fields |= {"timeout_s": timeout_s, "network": mark_of(known)}
    if known is not None:
        check_network(known, hosts_of(group), backend_of(group))
    return known, allowed


def _least(group: dist.ProcessGroup, value: float) -> float:
    """Collective: of what all ranks have, the same on all."""
    least = torch.tensor([value], dtype=torch.float64, device=group_device(group))
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    return float(least)


def _check_unchanged(weights: Weights) -> bytes:
    """Refuse a step that has changed a weight, after putting all of them back."""
    changed = weights.changed()
    if changed is None:
        return b""
    weights.restore()
    raise UsageError(
        f"step changed {changed}: it must run forward and backward only, without optimizer.step() or other writes to "
        "weights. The weights are as they were. If step ran the optimizer, its state now differs between ranks: make "
        "the optimizer anew, or load its state from a checkpoint on every rank"
    )


def _profile(
    ddp: DDP, step: Step, group: dist.ProcessGroup, budget_s: float, device: torch.device, weights: Weights
) -> Profile:
    """Collective: of the module inside, without communication, on all ranks at once."""
    times: list[float] = []

    def first() -> bytes:
        run(1)
        return _check_unchanged(weights)

    def run(count: int) -> bytes:
        for _ in range(count):
            _drop_gradients(ddp)
            started = time.monotonic()
            step(ddp.module)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.monotonic() - started)
        return b""

    name = type(ddp.module).__name__
    with watch_backward(ddp.module, steps=_PROFILED[1], skip=2, model_name=name) as watch:
        together(group, first)
        together(group, lambda: run(1))
        count = _count(group, _PROFILED, budget_s, times[-1])
        together(group, lambda: run(count))
        return watch.profile(group)


def _count(group: dist.ProcessGroup, bounds: tuple[int, int], budget_s: float, step_s: float) -> int:
    """Collective: how many steps of the slowest rank fit into a time."""
    slowest = torch.tensor([step_s], dtype=torch.float64, device=group_device(group))
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return max(bounds[0], min(bounds[1], int(budget_s / max(float(slowest), 1e-6))))


def _try(
    ddp: DDP,
    plan: Plan,
    step: Step,
    group: dist.ProcessGroup,
    budget_s: float,
    network: Network,
    timeout_s: float | None,
    device: torch.device,
) -> Trial:
    """Collective: plain DDP and the plan, in turns."""
    times: dict[str, list[float]] = {"plain": [], "plan": []}
    longest_s = max(plan.plain_s, plan.iteration_s, 1e-6)
    turns: tuple[str, ...] = _TURNS
    settling = _SETTLING
    count = int(budget_s / (len(turns) * longest_s)) - settling
    if count < _TRIED[0]:  # steps are so long that a few say enough
        turns, settling = _TURNS[:2], 2
        count = int(budget_s / (len(turns) * longest_s)) - settling
    count = max(2, min(_TRIED[1], count))
    for turn in turns:
        _drop_gradients(ddp)
        if turn == "plan":
            make_planned(ddp, plan, network=network, timeout_s=timeout_s)
        else:
            _plain(ddp)
        for number in range(settling + count):
            _drop_gradients(ddp)
            gather_bytes(group, b"")  # all start together
            started = time.monotonic()
            step(ddp)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if number >= settling:
                times[turn].append(time.monotonic() - started)
    everyone = torch.tensor([times["plain"], times["plan"]], dtype=torch.float64, device=group_device(group))
    dist.all_reduce(everyone, op=dist.ReduceOp.MAX, group=group)
    plain_s, plan_s = (statistics.median(row) for row in everyone.tolist())
    return Trial(plain_s, plan_s, len(times["plain"]))


def _plain(ddp: DDP) -> None:
    """Its gradients go: they may be views of the buckets that it has now."""
    _drop_gradients(ddp)
    make_plain(ddp)


def _drop_gradients(ddp: DDP) -> None:
    for parameter in ddp.module.parameters():
        parameter.grad = None
