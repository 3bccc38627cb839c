"""`tune`: measure, plan, try, and apply the faster of plan and plain DDP to a live model, in place.

All ranks profile the model without communication, probe the links and make a plan. Plain DDP and the plan then take
turns on the model itself, and the faster one stays. The model remains the same object with the same weights, buffers
and gradients, and random number generators keep their state.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP

from syncline.ddp import reducer
from syncline.ddp.attach import make_planned
from syncline.ddp.handle import Handle
from syncline.ddp.hook import switches
from syncline.dist.agreement import current_device
from syncline.dist.comm import backend_of, bound_group, gather_bytes, group_device
from syncline.errors import UsageError
from syncline.exchange import EXCHANGES, wire
from syncline.health.meeting import meeting, same_on_all_ranks
from syncline.health.watchdog import watch_plain
from syncline.measure.assumed_network import assumed_links
from syncline.measure.backward_watch import watch_backward
from syncline.measure.overhead import measure_overheads
from syncline.measure.preserve_state import Weights, restored_on_exit
from syncline.measure.probe import probe
from syncline.measure.steps import run_on_all_ranks
from syncline.plan.make import make_plan
from syncline.plan.search import options
from syncline.predict.exchange_time import topology_of
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.records.profile import Profile
from syncline.runtime.topology import NetworkOrFile, check_network, hosts_of, read_network
from syncline.runtime.validation import ddp_of, only_device, parameters_of
from syncline.tuning.settings import BUDGET_S, MIN_BUDGET_S, TuneSettings, has_residual

Step = Callable[[nn.Module], object]

_PROBE_SHARE, _PROFILE_SHARE, _TRIAL_SHARE = 0.4, 0.15, 0.4  # parts of the budget
_PROFILED = (5, 20)  # fewest and most steps that are profiled
SETTLING = 3
"""Steps after a change until DDP has rebuilt its buckets and caches are warm."""
_MAX_RATIO = 0.99  # a plan wins if its steps take less than this fraction of plain DDP's time
_LIVE_STEPS, _LONG_STEP_S = 8, 1.0  # steps of a turn of `follow`, which tries fewer if they take longer than this
_BUDGETED_STEPS = (4, 15)

Turn = Literal["plain", "plan"]
_FOUR_TURNS: tuple[Turn, ...] = ("plain", "plan", "plan", "plain")
_TWO_TURNS: tuple[Turn, ...] = ("plain", "plan")


@dataclass(frozen=True)
class Trial:
    """The times of plain DDP and of a plan that took turns: medians over steps. The slowest rank counts."""

    plain_s: float
    plan_s: float
    steps: int
    """Number of counted steps of plain DDP, and as many of the plan."""

    @classmethod
    def of(cls, group: dist.ProcessGroup, step_s: Mapping[Turn, Sequence[float]]) -> Trial:
        """Return the result, given the step times on this rank. Collective: the result is the same on all ranks."""
        slowest = [_reduced(group, step_s[turn], dist.ReduceOp.MAX) for turn in _TWO_TURNS]
        return cls(statistics.median(slowest[0]), statistics.median(slowest[1]), len(step_s["plan"]))

    @property
    def won(self) -> bool:
        """Whether the plan is faster than plain DDP."""
        return self.plan_s < _MAX_RATIO * self.plain_s

    def describe(self, what: str = "forward and backward") -> str:
        """Return one sentence with both times and which of the two is kept."""
        stays = "the plan stays" if self.won else "plain DDP stays"
        return f"Tried: plain DDP {self.plain_s * 1e3:.1f} ms, the plan {self.plan_s * 1e3:.1f} ms per {what}: {stays}."


@dataclass(frozen=True)
class Schedule:
    """Turns of a trial, and the steps in each."""

    turns: tuple[Turn, ...]
    settling: int
    counted: int

    @classmethod
    def within(cls, budget_s: float, plan: Plan) -> Schedule:
        """Return the schedule whose steps fit into a budget, by the plan's own predictions."""
        longest_s = max(plan.plain_s, plan.iteration_s, 1e-6)
        fewest, most = _BUDGETED_STEPS
        turns, settling, counted = _FOUR_TURNS, SETTLING, int(budget_s / (4 * longest_s)) - SETTLING
        if counted < fewest:  # of long steps, a few are enough
            turns, settling, counted = _TWO_TURNS, 2, int(budget_s / (2 * longest_s)) - 2
        return cls(turns, settling, max(2, min(most, counted)))

    @classmethod
    def on_live_steps(cls, plan: Plan) -> Schedule:
        """Return the schedule for a script's own steps."""
        long = plan.plain_s > _LONG_STEP_S
        # Each change of the exchange drops its residual, so a plan with one gets a single turn.
        turns = _TWO_TURNS if long or has_residual(plan) else _FOUR_TURNS
        return cls(turns, 2, _LIVE_STEPS // 2) if long else cls(turns, SETTLING, _LIVE_STEPS)


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
        return self.plan.reason if self.trial is None else f"{self.plan.reason}\n{self.trial.describe()}"


def tune(
    model: nn.Module,
    step: Step,
    *,
    allow: Sequence[str] = (),
    budget_s: float = BUDGET_S,
    network: NetworkOrFile = None,
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
        allow: Lossy exchanges that the plan may use: "bf16", "fp16", "int8", "int4", "int3", "sparse". By default
            plans are lossless.
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
        if model is not ddp:
            raise UsageError("this model is compiled around DDP: tune the DDP model, and compile it afterwards")
        if network is None and group.size() != dist.get_world_size():
            raise UsageError("the model's process group is a part of the world, which cannot be probed: pass network=")
        if (why_not := reducer.why_not_change(ddp)) is not None:
            raise UsageError(f"{why_not}: see `syncline plan` and syncline.wrap(net, plan)")
        return TuneSettings(allow=allow, budget_s=budget_s, network=network, timeout_s=timeout_s, scaler=scaler)

    with current_device(device), meeting(group, "tune", users=True):
        links = agreed_network(group, device, "tune", checked)
        bound_group(group, timeout_s)
        with restored_on_exit(ddp.module, device):
            # DDP must be rebuilt if something is attached, and with a static graph: its first step also counts what
            # happens on the module.
            rebuild = ddp in switches or ddp.static_graph
            trial: Trial | None = None
            weights = Weights(parameters)
            try:
                profile = _profile(ddp, step, _PROFILE_SHARE * budget_s, device, weights)
                links = links or probe_for(group, allow, _PROBE_SHARE * budget_s)
                profile, plan = plan_for_live(ddp, profile, links, allow, device)
                rebuild = rebuild or not plan.nothing
                if not plan.nothing:
                    left_s = max(MIN_BUDGET_S, budget_s - (time.monotonic() - began_s))
                    (least_s,) = _reduced(group, [left_s], dist.ReduceOp.MIN)
                    trial = _try(ddp, plan, step, _TRIAL_SHARE * least_s, device, network=links, timeout_s=timeout_s)
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


def agreed_network(
    group: dist.ProcessGroup, device: torch.device, call: str, check: Callable[[], TuneSettings]
) -> Network | None:
    """Return the network of the settings that `check` returns, if it has one, once all ranks agree. Collective."""
    with same_on_all_ranks(group, device, f"the configuration of {call}", call) as fields:
        settings = check()
        network = read_network(settings.network, fields)
        fields |= {"allow": list(settings.allow), "change": settings.change, "budget_s": settings.budget_s}
        fields |= {"timeout_s": settings.timeout_s, "scaler": settings.scaler is not None}
    if network is not None:
        check_network(network, hosts_of(group), backend_of(group))
    return network


def probe_for(group: dist.ProcessGroup, allowed: Sequence[str], budget_s: float) -> Network:
    """Probe the collectives that a plan may use, and no others. Collective."""
    if group.size() == 1:
        return assumed_links((0,), backend=backend_of(group))
    has_levels = group.size() > len(set(hosts_of(group)))
    kinds = wire.KINDS if allowed or has_levels else ("all_reduce", "broadcast")
    return probe(budget_s=budget_s, kinds=kinds)


def plan_for_live(
    ddp: DDP, profile: Profile, network: Network, allowed: Sequence[str], device: torch.device
) -> tuple[Profile, Plan]:
    """Return the profile with the cost of exchanges on this device, and rank 0's plan. Collective.

    All ranks use the plan of rank 0, because hosts may round differently.
    """
    group: dist.ProcessGroup = ddp.process_group
    exchanges = {name: EXCHANGES[name] for name in options(network, allowed)}
    overheads = measure_overheads(device, exchanges, topology=topology_of(network), group=group)
    profile = msgspec.structs.replace(profile, overheads=overheads)
    caps = reducer.own_caps(ddp)

    def encoded_plan() -> bytes:
        return msgspec.json.encode(make_plan(profile, network, allowed, caps=caps)) if group.rank() == 0 else b""

    return profile, msgspec.json.decode(run_on_all_ranks(group, encoded_plan)[0], type=Plan)


def _reduced(group: dist.ProcessGroup, values: Sequence[float], op: Any) -> list[float]:
    """Return the smallest or largest values of all ranks. Collective."""
    reduced = torch.tensor(values, dtype=torch.float64, device=group_device(group))
    dist.all_reduce(reduced, op=op, group=group)
    return [float(value) for value in reduced]


def _check_unchanged(weights: Weights) -> bytes:
    """Restore the weights and raise an error if a step has changed one."""
    if (changed := weights.changed()) is None:
        return b""
    weights.restore()
    raise UsageError(
        f"step changed {changed}: it must run forward and backward only, without optimizer.step() or other writes to "
        "weights. The weights have been restored. If step ran the optimizer, its state now differs between ranks: "
        "create the optimizer again, or load its state from a checkpoint on every rank"
    )


def _profile(ddp: DDP, step: Step, budget_s: float, device: torch.device, weights: Weights) -> Profile:
    """Profile the module inside DDP, without communication, on all ranks at once. Collective."""
    group: dist.ProcessGroup = ddp.process_group
    times_s: list[float] = []

    def run(count: int) -> bytes:
        times_s.extend(_timed_step(ddp, ddp.module, step, device) for _ in range(count))
        return _check_unchanged(weights) if len(times_s) == 1 else b""

    with watch_backward(ddp.module, steps=_PROFILED[1], skip=2, model_name=type(ddp.module).__name__) as watch:
        run_on_all_ranks(group, lambda: run(1))
        run_on_all_ranks(group, lambda: run(1))
        slowest_s = max(*_reduced(group, times_s[-1:], dist.ReduceOp.MAX), 1e-6)
        count = max(_PROFILED[0], min(_PROFILED[1], int(budget_s / slowest_s)))
        run_on_all_ranks(group, lambda: run(count))
        return watch.profile(group)


def _try(ddp: DDP, plan: Plan, step: Step, budget_s: float, device: torch.device, **options: Any) -> Trial:
    """Let plain DDP and the plan take turns with the user's step. Collective."""
    schedule = Schedule.within(budget_s, plan)
    step_s: dict[Turn, list[float]] = {"plain": [], "plan": []}
    for turn in schedule.turns:
        _restore_plain(ddp)
        if turn == "plan":
            make_planned(ddp, plan, scaler=None, **options)
        count = schedule.settling + schedule.counted
        step_s[turn] += [_timed_step(ddp, ddp, step, device) for _ in range(count)][schedule.settling :]
    return Trial.of(ddp.process_group, step_s)


def _timed_step(ddp: DDP, module: nn.Module, step: Step, device: torch.device) -> float:
    """Run one step from empty gradients and return its duration. All ranks start a step of DDP together."""
    ddp.zero_grad()
    if module is ddp:
        gather_bytes(ddp.process_group, b"")
    began_s = time.monotonic()
    step(module)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic() - began_s


def _restore_plain(ddp: DDP) -> None:
    ddp.zero_grad()  # gradients may be views of the buckets that are about to go
    reducer.make_plain(ddp)
