"""`tune`: measure, plan, try, and apply the faster of plan and plain DDP to a live model, in place.

All ranks profile the model without communication, time some steps of plain DDP, probe the links if that can pay, and
choose an exchange. Plain DDP and the choice then take turns on the model itself, and the faster one stays. The model
remains the same object with the same weights, buffers and gradients, and random number generators keep their state.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from syncline.balance.sample_weights import SampleWeights
from syncline.balance.shares import Shares
from syncline.ddp import reducer
from syncline.ddp.handle import Handle
from syncline.ddp.hook import switch_of, switches, weights_of
from syncline.ddp.overlap_setup import why_not_overlap
from syncline.dist.agreement import current_device
from syncline.dist.comm import bound_group, gather_bytes
from syncline.errors import UsageError
from syncline.health.meeting import meeting
from syncline.health.watchdog import watch_plain
from syncline.measure.backward_watch import watch_backward
from syncline.measure.preserve_state import Weights, restored_on_exit
from syncline.measure.steps import run_on_all_ranks
from syncline.plan.choice import Choice
from syncline.predict.diagnosis import shares_hint
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.records.profile import Profile
from syncline.runtime.topology import NetworkOrFile
from syncline.runtime.validation import check_steps_all, ddp_of, only_device, parameters_of
from syncline.tuning.apply import apply_choice, undone_steps, without_warmup
from syncline.tuning.choose import (
    agreed_network,
    choose_for_live,
    find_network,
    may_be_lossy,
    plain_choice,
    why_outdated,
)
from syncline.tuning.settings import BUDGET_S, MIN_BUDGET_S, TuneSettings
from syncline.tuning.stakes import Stakes
from syncline.tuning.trials import SETTLING, Contest, Schedule, Trial, reduced, repaid_after

Step = Callable[[nn.Module], object]

_PROBE_SHARE, _PROFILE_SHARE, _TRIAL_SHARE = 0.4, 0.15, 0.4  # parts of the budget
_PROFILED = (5, 20)  # fewest and most steps that are profiled
_PLAIN_STEPS = 5  # steps of plain DDP that show how long a step waits for communication


@dataclass(frozen=True)
class Tuned:
    """The result of `tune`, the same on all ranks.

    Attributes:
        plan: The best plan that was found. It may be to do nothing.
        trial: The times of plain DDP and of the plan. None if plain DDP was predicted to be best, so nothing was tried.
        handle: The handle of what is attached. None if plain DDP stays.
        profile: The profile of the model.
        network: The links that the plan was made for. None if too little was at stake to measure them.
        seconds: Time that tuning took.
        choice: What was chosen and tried: the plan, or arguments of `attach`; and what else was considered.
        model: The model.

    Example:
        >>> tuned = syncline.tune(model, step)  # doctest: +SKIP
        >>> print(tuned.describe())  # doctest: +SKIP
    """

    plan: Plan
    trial: Trial | None
    handle: Handle | None
    profile: Profile
    network: Network | None
    seconds: float
    choice: Choice
    model: DDP = field(repr=False)

    def __repr__(self) -> str:
        stays = "plain DDP" if self.handle is None else self.choice.name
        return f"Tuned({type(self.model.module).__name__}: {stays}; describe() says why)"

    def describe(self) -> str:
        """Return the reason for the choice, the result of the trial if there was one, and what tuning cost."""
        lines = [self.choice.reason]
        if self.trial is not None:
            lines.append(self.trial.describe(*self._trial_words))
        if self.model.process_group.size() > 1:
            lines.append(repaid_after(self.seconds, 0.0 if self.trial is None else self.trial.saved_s))
        return "\n".join(lines)

    @property
    def _trial_words(self) -> tuple[str, str]:
        step = "step" if self.trial is not None and self.trial.stepped else "forward and backward"
        return step, self.choice.name


def tune(
    model: nn.Module,
    step: Step,
    *,
    optimizer: Optimizer | None = None,
    quality: str | None = None,
    allow: Sequence[str] = (),
    warmup: int | None = None,
    budget_s: float = BUDGET_S,
    network: NetworkOrFile = None,
    timeout_s: float | None = None,
    scaler: GradScaler | None = None,
    cache: bool = True,
    quiet: bool = False,
) -> Tuned:
    """Find the gentlest fast way for a DDP model to exchange its gradients, and apply it in place.

    All ranks of the model's process group must call `tune` with the same arguments. An exchange that was attached
    before is detached first, as by `handle.detach()`, and its residual is dropped, but gradients are still weighted by
    samples if they were (`shares=` of `attach`). From then on each rank logs one line when another rank stops sending
    heartbeats, with plain DDP too.

    Args:
        model: A DistributedDataParallel model.
        step: Runs one forward and backward on the module it gets, as in training but without an update. It is called
            some dozens of times, with the module inside DDP or with the model itself, so it should reuse one batch.
        optimizer: The optimizer of the model. With it, methods that need one may be chosen: overlap with the next
            forward pass, which is lossless, and with `quality="close"` exchanges of updates. Scripts must know some
            things about each. While `tune` runs it is stepped; its state and the weights are restored.
        quality: How far the choice may go: `"exact"` is lossless, `"same"` also permits compression that was measured
            to train as dense gradients do, and `"close"` also permits methods that were measured to stay behind a
            little. The gentlest method within 5 % of the fastest is chosen. Default: `"exact"`.
        allow: Instead of `quality`: lossy exchanges of gradients that may be used, one by one: "bf16", "fp16", "int8",
            "int4", "int3", "sparse". The fastest is chosen.
        warmup: Steps of gradients in 4 bits before updates are exchanged, if those are chosen, as `quality="close"`
            permits. Default: 300. A fifth of a shorter training is enough.
        budget_s: Time that tuning may take, in seconds. It takes less where little is at stake, but at least some steps
            of plain DDP and of the choice are run.
        network: The links, or the file that `syncline probe` wrote. Without it, the links are probed, unless too little
            is at stake, or they are remembered from an earlier run.
        timeout_s: Timeout of a collective, now and later. It becomes the timeout of the model's process group, as in
            `follow`.
        scaler: The GradScaler of the loss, as in `attach`.
        cache: Whether to remember probed links between runs, in a file under `$XDG_CACHE_HOME`.
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
        >>> tuned = syncline.tune(DDP(net), step, optimizer=optimizer, quality="same")  # doctest: +SKIP
    """
    began_s = time.monotonic()
    ddp = ddp_of(model, "tune")
    check_step(step)
    group: dist.ProcessGroup = ddp.process_group
    parameters = parameters_of(ddp)
    device = only_device(parameters)

    def say(text: str) -> None:
        if not quiet and group.rank() == 0:
            print(f"syncline: {text}", file=sys.stderr)

    def checked() -> TuneSettings:
        if model is not ddp:
            raise UsageError("this model is compiled around DDP: tune the DDP model, and compile it afterwards")
        if network is None and group.size() != dist.get_world_size():
            raise UsageError("the model's process group is a part of the world, which cannot be probed: pass network=")
        if (why_not := reducer.why_not_change(ddp)) is not None:
            raise UsageError(f"{why_not}: see `syncline plan` and syncline.wrap(net, plan)")
        if optimizer is not None:
            check_steps_all(optimizer, parameters)
        return TuneSettings(
            quality=quality,
            allow=allow,
            warmup=warmup,
            budget_s=budget_s,
            network=network,
            timeout_s=timeout_s,
            scaler=scaler,
            cache=cache,
        )

    with current_device(device), meeting(group, "tune", users=True):
        settings, links = agreed_network(group, device, "tune", checked, optimizer)
        bound_group(group, timeout_s)
        # Detaching may change weights, buffers and the optimizer's state, so it comes before these are saved.
        shares = None if (weighted := weights_of(ddp)) is None else weighted.shares
        if was_attached := ddp in switches:
            _detach(ddp)
        with restored_on_exit(ddp.module, device):
            # With a static graph, DDP must be rebuilt: its first step also counts what happens on the module.
            rebuild = was_attached or ddp.static_graph
            weights = Weights(parameters)
            tuner = _Tuner(ddp, step, device, optimizer, scaler, settings, began_s)
            try:
                profile, plain_s = tuner.profile(_PROFILE_SHARE * budget_s, weights)
                hint = ""
                why_not: str | None = "There is only one rank, which has nothing to exchange."
                if links is None and group.size() > 1:
                    if rebuild:
                        _restore_plain(ddp)
                    stakes, rebuild = tuner.stakes(plain_s), True
                    plain_s, why_not = stakes.step_s, stakes.why_not_probe
                    if why_not is None:
                        hint = stakes.hint if quality is None and not allow else ""
                        probe_s = stakes.probe_s(_PROBE_SHARE * budget_s, lossy=may_be_lossy(settings))
                        check = functools.partial(why_outdated, ddp, profile, plain_s)
                        wide = optimizer is not None
                        links = find_network(group, settings, probe_s, overlap=wide, why_outdated=check, log=say)
                if links is None or group.size() == 1:
                    choice = plain_choice(profile, group, plain_s, why_not or "")
                else:
                    able = {"updates": optimizer is not None, "overlap": tuner.can_overlap()}
                    profile, choice = choose_for_live(ddp, profile, links, settings, device, **able)
                trial: Trial | None = None
                if choice.contenders:
                    rebuild = True
                    choice, trial = tuner.try_out(choice, profile, links, weights)
                if hint := hint + ("" if shares is not None else shares_hint(profile)):
                    choice = msgspec.structs.replace(choice, reason=choice.reason + hint)
                run_on_all_ranks(group, lambda: _check_unchanged(weights))
            except BaseException:
                _restore_plain(ddp)
                _weigh(ddp, shares)
                raise
            if rebuild:
                _restore_plain(ddp)
            handle = None
            if trial is not None and trial.won:
                options: dict[str, Any] = {"network": links, "timeout_s": timeout_s, "scaler": scaler}
                handle = apply_choice(ddp, choice, optimizer=optimizer, shares=shares, profile=profile, **options)
            else:
                watch_plain(ddp)
                _weigh(ddp, shares)
            if hasattr(ddp.module, "_orig_mod"):  # compiled: DDP splits the graph where its buckets end
                torch.compiler.reset()
    (seconds,) = reduced(group, [time.monotonic() - began_s], dist.ReduceOp.MAX)
    tuned = Tuned(choice.plan, trial, handle, profile, links, seconds, choice, ddp)
    say(tuned.describe())
    return tuned


@dataclass(frozen=True)
class _Tuner:
    """Runs steps of a model that is tuned."""

    ddp: DDP
    step: Step
    device: torch.device
    optimizer: Optimizer | None
    scaler: GradScaler | None
    settings: TuneSettings
    began_s: float

    @property
    def group(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = self.ddp.process_group
        return group

    def can_overlap(self) -> bool:
        """Return whether the exchange can extend into the next forward pass."""
        return self.optimizer is not None and why_not_overlap(self.ddp, self.optimizer) is None

    def profile(self, budget_s: float, weights: Weights) -> tuple[Profile, float]:
        """Profile the module inside DDP, without communication, on all ranks at once. Collective.

        Returns:
            The profile, and the median step of this rank.
        """
        times_s: list[float] = []
        module: nn.Module = self.ddp.module

        def run(count: int) -> bytes:
            times_s.extend(self._timed(module) for _ in range(count))
            return _check_unchanged(weights) if len(times_s) == 1 else b""

        with watch_backward(module, steps=_PROFILED[1], skip=2, model_name=type(module).__name__) as watch:
            run_on_all_ranks(self.group, lambda: run(1))
            run_on_all_ranks(self.group, lambda: run(1))
            slowest_s = max(*reduced(self.group, times_s[-1:], dist.ReduceOp.MAX), 1e-6)
            count = max(_PROFILED[0], min(_PROFILED[1], int(budget_s / slowest_s)))
            run_on_all_ranks(self.group, lambda: run(count))
            return watch.profile(self.group), statistics.median(times_s[2:])

    def stakes(self, alone_s: float) -> Stakes:
        """Time plain DDP, and return how much longer its steps are than without communication. Collective."""
        times_s = [self._timed(self.ddp) for _ in range(SETTLING + _PLAIN_STEPS)][SETTLING:]
        (slowest_s,) = reduced(self.group, [alone_s], dist.ReduceOp.MAX)
        slowest = reduced(self.group, times_s, dist.ReduceOp.MAX)
        return Stakes(statistics.median(slowest), max(0.0, statistics.median(slowest) - slowest_s))

    def try_out(
        self, choice: Choice, profile: Profile, network: Network | None, weights: Weights
    ) -> tuple[Choice, Trial]:
        """Let plain DDP, the choice and its rivals take turns with the user's step. Collective.

        Returns:
            The best of them, and its comparison with plain DDP.
        """
        left_s = max(MIN_BUDGET_S, self.settings.budget_s - (time.monotonic() - self.began_s))
        (least_s,) = reduced(self.group, [left_s], dist.ReduceOp.MIN)
        contest = Contest(self.group, choice.contenders)
        longest_s = max(choice.plain_s, *(each.iteration_s for each in contest.choices))
        schedule = Schedule.within(_TRIAL_SHARE * least_s, longest_s, 1 + len(contest.choices))
        stepped = self.optimizer if any(each.needs_optimizer for each in contest.choices) else None
        options: dict[str, Any] = {"network": network, "timeout_s": self.settings.timeout_s, "scaler": None}
        options["profile"] = profile
        with undone_steps(stepped, weights, self.scaler):
            for turn in contest.turns(schedule):
                _restore_plain(self.ddp)
                if turn is not None:
                    measured = without_warmup(turn.plan) if turn.attachment is None else turn.plan
                    needed = stepped if turn.needs_optimizer else None
                    applied = msgspec.structs.replace(turn, plan=measured)
                    apply_choice(self.ddp, applied, warmup=0, optimizer=needed, **options)
                settling = schedule.settle(turn)
                count = settling + schedule.steps(turn)
                contest.note(turn, [self._timed(self.ddp, stepped) for _ in range(count)][settling:])
            _restore_plain(self.ddp)
        trial = replace(contest.trial, stepped=stepped is not None)
        return msgspec.structs.replace(contest.best, rungs=choice.rungs, rivals=()), trial

    def _timed(self, module: nn.Module, optimizer: Optimizer | None = None) -> float:
        """Run one step from empty gradients and return its duration. All ranks start a step of DDP together."""
        self.ddp.zero_grad()
        if module is self.ddp and optimizer is None:  # with one, steps follow each other, and hide what they can
            gather_bytes(self.group, b"")
        began_s = time.monotonic()
        self.step(module)
        if optimizer is not None:
            optimizer.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.monotonic() - began_s


def check_step(step: object) -> None:
    """Raise a UsageError unless `step` can be called."""
    if not callable(step):
        text = "pass a function that runs forward and backward on the model it gets"
        raise UsageError(f"tune(model, step): step is {step!r}: {text}")


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


def _detach(ddp: DDP) -> None:
    """Return a model to plain DDP, with its gradients, except those of overlap, which exist only in shards."""
    gradients = [(p, p.grad) for p in ddp.module.parameters() if type(p.grad) is torch.Tensor]
    _restore_plain(ddp)
    for parameter, gradient in gradients:
        parameter.grad = gradient


def _restore_plain(ddp: DDP) -> None:
    ddp.zero_grad()  # gradients may be views of the buckets that are about to go
    reducer.make_plain(ddp)


def _weigh(ddp: DDP, shares: Shares | None) -> None:
    """Weight the gradients of plain DDP by samples again, if they were before."""
    if shares is not None:
        switch_of(ddp).weigh(SampleWeights(ddp.process_group, shares))
