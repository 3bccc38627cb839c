"""A model that is tuned while a script trains it, from the steps that the script makes anyway.

Building the object changes nothing. During the model's forwards, between steps and on all ranks alike, some steps are
profiled, the links are probed, a plan is made, the plan and plain DDP take turns over the script's own steps, and the
faster one stays. All this is a generator: each `yield` returns to the script until it has made its next step, and what
happens between two yields happens inside one forward. The script's data and random numbers stay the same.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from syncline.ddp import reducer
from syncline.ddp.attach import attach
from syncline.ddp.hook import count_samples, weights_of
from syncline.dist.agreement import current_device
from syncline.dist.comm import backend_of, bound_group, gather_bytes
from syncline.errors import SynclineError, UsageError
from syncline.health.watchdog import watch_plain
from syncline.measure.backward_watch import BackwardWatch
from syncline.measure.hooks import Unseen
from syncline.measure.step_watcher import Pass, in_backward
from syncline.measure.steps import Subject
from syncline.plan.choice import Choice, choice_of
from syncline.predict.diagnosis import shares_hint
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.records.profile import Profile
from syncline.records.run_record import ModelRecord
from syncline.runtime.bucket_policy import difference_of, read_plan
from syncline.runtime.topology import hosts_of
from syncline.runtime.validation import check_steps_all, parameters_of
from syncline.tuning.choose import (
    agreed_network,
    choose_for_live,
    find_network,
    has_levels,
    may_be_lossy,
    plain_choice,
    why_outdated,
)
from syncline.tuning.live_model import CannotChangeError, LiveModel, Steps, trained_ids
from syncline.tuning.retuning import Retuning, exposure_drift, steps_until_check
from syncline.tuning.settings import TuneSettings
from syncline.tuning.trials import SETTLING, Contest, Schedule, Trial, reduced, repaid_after
from syncline.units import count_text

_OWN_BUCKETS = " DDP's buckets stay as they are, because a compiled model would have to be compiled again."
_PROFILED = 10  # steps that the profile is made from

_probed: dict[tuple[object, ...], Network] = {}
"""Links, probed once for all models of a script with the same (ranks, backend, allowed exchanges)."""


class Following(LiveModel):
    """A model that `follow` watches: what was measured and done, and how long its steps took."""

    def __init__(
        self,
        ddp: DDP,
        settings: TuneSettings,
        find_scaler: Callable[[], GradScaler | None] | None = None,
        find_optimizer: Callable[[], Optimizer | None] = lambda: None,
        tunes_updates: bool = False,
    ) -> None:
        """Follow a model. `find_scaler` returns the scaler of the loss; by default it is that of the settings.
        `find_optimizer` returns the optimizer whose updates are to be exchanged, or None if it is not known yet. It may
        raise an error that refuses the model, on all ranks alike. With `tunes_updates`, tuning may choose updates."""
        super().__init__(ddp, settings, find_scaler or (lambda: settings.scaler), self._after_step)
        self._find_optimizer, self._tunes_updates = find_optimizer, tunes_updates
        self._hosts: tuple[int, ...] = ()
        self.profile: Profile | None = None
        self.network: Network | None = None
        self.plan: Plan | None = None
        """The plan that was requested or found, applied or not."""
        self.trial: Trial | None = None
        self._hint = ""  # what could be gained with a lower quality
        self._is_stale = False  # whether links have changed since they were probed
        self._outcome = "Nothing was decided yet: the script ended too early."
        bound_group(ddp.process_group, settings.timeout_s)
        self.done = False
        """Whether the decision has been made."""
        self.working = False
        """Whether it is measuring or changing something now. Models built meanwhile are not the script's."""
        self.error: SynclineError | None = None
        """Why the requested exchange or plan could not be applied, if it could not."""
        self._closed = self._in_eval = False
        self._is_first_forward = True  # whether no training forward has begun since the last step
        # Registered before the watcher's hook, so that a step's clock starts when this one has returned. The hook holds
        # the generator, which holds the model while it is profiled: a reference cycle that goes with the model.
        self._watches_drift = settings.retune == "auto"
        work = self._tune_and_watch() if settings.tunes else self._apply_requested()
        before = Unseen(lambda _, *arguments: self._before_forward(work, *arguments))
        self._hook = ddp.register_forward_pre_hook(before, with_kwargs=True)
        self._work = weakref.ref(work)
        self._watcher.watch(ddp, ddp, lambda: self._exchanges_updates)
        self._caps = reducer.own_caps(ddp) if reducer.can_change() else ()
        self._trained = trained_ids(ddp)
        self._watchdog = watch_plain(ddp)

    def describe(self) -> str:
        """Return what was done and why."""
        if not self.done and not self._watcher.step_count and self._watcher.forward_count:
            seen = "Nothing was decided: no backward from the model's output was seen."
            return f"{seen} The output must contain tensors, and the script must call the model, not its forward."
        return self._outcome

    def record(self) -> ModelRecord:
        """Return what is known so far as a record for a file. The model may be gone."""
        known = {"profile": self.profile, "network": self.network, "plan": self.plan}
        return self._log.record(outcome=self.describe(), caps=self._caps, host_of_rank=self._hosts, **known)

    def close(self) -> None:
        """Stop following. What is attached stays attached."""
        self._closed = True
        if (work := self._work()) is not None:
            work.close()
        self._hook.remove()
        if self._step_hook is not None:
            self._step_hook.remove()
        self._watcher.close()
        self._watchdog.stop()

    def _after_step(self, step: Pass) -> None:
        self._is_first_forward = True
        self._in_eval = not self.model.training
        self._log.step_ended(step)
        self._watchdog.step = self._watcher.step_count

    def _before_forward(self, work: Steps, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Continue in the first training forward after a step, which is the same forward on all ranks."""
        ddp = self.model
        if self._closed or not self._is_first_forward or not torch.is_grad_enabled() or in_backward():
            return
        in_training = ddp.training or ddp.module.training or self._in_eval  # Lightning leaves the wrapper in eval mode
        # Updates are attached before the first gradient of a step, so that a resumed step begins with its own weights.
        syncs = ddp.require_backward_grad_sync or self._exchanges_updates or (self._settings.updates and not self.done)
        if not syncs or not in_training:
            return
        self._is_first_forward = False
        with current_device(self._device):
            if self._is_ours and self._log.method != self._method:  # a warm-up is over
                self._log.switch_to(self._method)
            self._log.step_begins(self.handle, decided=self.done and self._is_ours)
            # Another set of trained parameters, as when two models train in turns, is not the step that is tuned.
            if (self.done and not self._watches_drift) or trained_ids(ddp) != self._trained:
                return
            self.working, counted = True, weights_of(ddp) is not None
            try:
                next(work)
            except SynclineError as error:
                self.error, self.done = error, True
                raise
            except StopIteration:
                if not self.done:
                    self._decided()
                self._watches_drift = False
            finally:
                self.working = False
            if not counted and weights_of(ddp) is not None:
                count_samples(ddp, arguments, options)  # the hook that counts was attached in this forward

    def _decided(self) -> None:
        """Note that the steps from now on are those that count."""
        self.done = True
        self._log.switch_to(self._method)
        self._print(self.describe())

    # --- what happens between steps -----------------------------------------------------------------------------

    def _apply_requested(self) -> Steps:
        self._check_untouched()
        self._hosts = hosts_of(self._group)
        settings = self._settings
        optimizer: Optimizer | None = None
        while settings.updates and (optimizer := self._find_optimizer()) is None:
            self._outcome = "Updates were not exchanged: the script ended before its optimizer had stepped twice."
            yield
            self._check_untouched()
        with self._paused():
            if optimizer is not None:
                self._attach_updates(optimizer)
            elif settings.exchange is not None:
                options: dict[str, Any] = {"timeout_s": settings.timeout_s, "network": settings.network}
                scaler = self._find_scaler()
                attach(self.model, settings.exchange, scaler=scaler, shares=settings.shares, **options)
                lossy = "" if settings.exchange.lossless else "lossy "
                self._outcome = f"The {lossy}exchange {settings.exchange!r} is attached, as requested."
            elif settings.plan is not None:
                plan = read_plan(settings.plan, self._group, self._device, "follow")
                difference = difference_of(plan, parameters_of(self.model), self._group, "follow")
                if difference is not None:
                    raise UsageError(f"the plan does not fit: {difference}")
                self.plan = plan
                if not plan.nothing:
                    self._check_changeable()
                    _, links = agreed_network(self._group, self._device, "follow", lambda: settings)
                    self._switch_to(choice_of(plan), links)
                self._outcome = f"The {'' if plan.lossless else 'lossy '}plan is applied, as requested: {plan.reason}"
        self._note_change()
        yield from ()  # no step is needed

    def _attach_updates(self, optimizer: Optimizer) -> None:
        settings = self._settings
        handle = attach(
            self.model,
            settings.exchange,
            optimizer=optimizer,
            timeout_s=settings.timeout_s,
            network=settings.network,
            scaler=self._find_scaler(),
            shares=settings.shares,
            **settings.update_options,
        )
        first = f" from step {self._watcher.step_count} on" if self._watcher.step_count else ""
        described = f"{handle.describe().splitlines()[0]} (lossy): updates of {type(optimizer).__name__}"
        self._outcome = f"As requested, {described}{first}."
        self._watch_steps_of(optimizer)

    def _tune_and_watch(self) -> Steps:
        """Tune. Then, if that was requested, watch how long steps wait, and tune again when links have changed."""
        yield from self._tune_or_keep_plain()
        if not self._watches_drift or self._group.size() != dist.get_world_size():
            return
        self._decided()
        retuning, before, steps = Retuning(time.monotonic(), self.seconds), None, _PROFILED
        try:
            while True:
                yield from self._wait_for_steps(steps)
                with self._paused():
                    stakes = self._stakes(steps)
                    before, steps = before or stakes, steps_until_check(stakes.step_s)
                    drift = self.handle.drift() if self.handle is not None else None
                    if not self._exchanges_updates:
                        drift = drift or exposure_drift(before, stakes)
                    due = retuning.due(drift is not None, time.monotonic())
                    reason = gather_bytes(self._group, (drift or "").encode() if due else b"")[0].decode()  # of rank 0
                if reason:
                    self._print(f"tuning again: {reason.partition(':')[0]}")
                    before_s, self.done, self._is_stale, self.trial = self.seconds, False, True, None
                    yield from self._tune_or_keep_plain()
                    self._outcome = f"Tuned again, after a change of the links. {self._outcome}"
                    self._decided()
                    retuning.tuned(self.seconds - before_s)
                    before, steps = None, _PROFILED
        except CannotChangeError:  # the script takes over
            return

    def _tune_or_keep_plain(self) -> Steps:
        """Tune. If that is not possible, all ranks see the same reason and continue with plain DDP."""
        try:
            before_s = self.seconds
            yield from self._tune()
            (cost_s,) = reduced(self._group, [self.seconds - before_s], dist.ReduceOp.MAX)
            self._outcome += "" if self.profile is None else shares_hint(self.profile)
            self._outcome += f" {repaid_after(cost_s, 0.0 if self.trial is None else self.trial.saved_s)}"
        except CannotChangeError as reason:
            kept = "The trial was stopped and the plan stays" if self._is_ours else "Left alone"
            self._outcome = f"{kept}: {reason}."
        except (SynclineError, ArithmeticError, AssertionError, LookupError, TypeError, ValueError) as error:
            # Ranks share these errors while they measure and plan. A broken connection (a RuntimeError) is raised.
            if self._is_ours and self.handle is not None:
                self._switch_to(None)
            message = str(error).rstrip(".") or type(error).__name__
            self._outcome = f"Plain DDP stays, because tuning failed: {message}."

    def _tune(self) -> Steps:
        self._check_untouched()
        self._hosts = hosts_of(self._group)
        settings = self._settings
        if self._group.size() == 1:
            raise CannotChangeError("there is one rank, which exchanges nothing")
        yield from self._wait_for_steps(SETTLING)
        with BackwardWatch(Subject.of(self.model), None, _PROFILED, 0, last_pass_only=True) as watch:
            yield from self._wait_for_steps(_PROFILED)
            with self._paused():
                optimizer = self._optimizer_to_tune()
                _, links = agreed_network(self._group, self._device, "follow", lambda: settings, optimizer)
                links = None if self._is_stale else links
                if settings.change and not self._is_compiled:
                    self._check_changeable()
                self.profile = profile = watch.profile(self._group)
        if links is None and self._group.size() != dist.get_world_size():
            raise CannotChangeError("its process group is part of the world, which cannot be probed: pass network")
        if links is None:
            yield from self._wait_until_affordable()
        with self._paused():
            self.network = links or self._find_network(profile)
            if self.network is None:
                return
            able = {"updates": optimizer is not None, "own_buckets": self._is_compiled}
            chosen = choose_for_live(self.model, profile, self.network, settings, self._device, **able)
            (self.profile, self.choice), self.plan = chosen, chosen[1].plan
        reason = self._explained(self.choice.reason)
        # The warm-up of updates is too long to try them beside others.
        contenders = [each for each in self.choice.contenders if each.rung == self.choice.rung or not each.warmup]
        if not contenders and self.handle is not None:  # what was better before the links changed
            with self._paused():
                self._switch_to(None)
        if not settings.change or not contenders:
            self._outcome = reason if settings.change else f"Only observed. {reason}"
            return
        yield from self._try(self.choice, contenders, self.network, optimizer)

    def _wait_until_affordable(self) -> Steps:
        """Train on before links are probed where, without loss or levels, only buckets could be better."""
        with self._paused():
            settings, stakes = self._settings, self._stakes(_PROFILED)
            eager = not settings.change or self._is_stale or may_be_lossy(settings) or has_levels(self._group)
            steps = 0 if eager or stakes.why_not_probe else stakes.steps_to_wait(settings.probe_s)
        if steps:
            later = f"links, which allow no more than other buckets, would be probed after {count_text(steps, 'step')}"
            self._outcome = f"Nothing was decided: {later}, so that this costs little."
            yield from self._wait_for_steps(steps)

    def _find_network(self, profile: Profile) -> Network | None:
        """Return the links: probed before, remembered, or probed now. None, with the outcome, if that cannot pay."""
        settings, stakes = self._settings, self._stakes(_PROFILED)
        if settings.change and not self._is_stale and (why_not := stakes.why_not_probe) is not None:
            self.choice = plain_choice(profile, self._group, stakes.step_s, why_not)
            self.plan, self._outcome = self.choice.plan, why_not
            return None
        ranks = tuple(dist.get_process_group_ranks(self._group))
        key = (ranks, backend_of(self._group), settings.allow, settings.quality)
        self._hint = stakes.hint if settings.quality is None and not settings.allow else ""
        if key not in _probed or self._is_stale:
            lossy = may_be_lossy(settings)
            probe_s = stakes.probe_s(settings.probe_s, lossy=lossy) if settings.change else settings.probe_s
            check = functools.partial(why_outdated, self.model, profile, stakes.step_s)
            _probed[key] = find_network(
                self._group, settings, probe_s, fresh=self._is_stale, why_outdated=check, log=self._print
            )
        return _probed[key]

    def _optimizer_to_tune(self) -> Optimizer | None:
        """Return the optimizer whose updates tuning may choose to exchange, if there is one."""
        if not self._tunes_updates or not self._settings.may_exchange_updates:
            return None
        try:
            optimizer = self._find_optimizer()
            if optimizer is not None:
                check_steps_all(optimizer, parameters_of(self.model))
        except UsageError as error:
            self._print(f"updates are not considered: {error}")
            return None
        return optimizer

    def _try(
        self, choice: Choice, contenders: Sequence[Choice], network: Network, optimizer: Optimizer | None
    ) -> Steps:
        """Let plain DDP, the choice and its rivals take turns over the script's own steps, and keep the best."""
        contest = Contest(self._group, contenders)
        schedule = Schedule.on_live_steps(choice.plain_s, keeps=any(each.keeps for each in contenders))
        current: object = self.handle

        def switch_to(turn: Choice | None) -> None:
            nonlocal current
            if turn is not current:
                with self._paused():
                    if turn is not None and current is not None:
                        self._switch_to(None)
                    self._switch_to(turn, network, optimizer)
                current = turn

        for turn in contest.turns(schedule):
            switch_to(turn)
            if turn is not None and turn.warmup:
                self._outcome = f"{turn.reason} The script ended during the warm-up of {turn.warmup} steps."
                yield from self._wait_for_steps(turn.warmup)
            yield from self._wait_for_steps(schedule.settle(turn))
            first = self._watcher.step_count
            yield from self._wait_for_steps(schedule.steps(turn))
            with self._paused():
                contest.note(turn, self._log.step_times_s(first, first + schedule.steps(turn)))
        best, self.trial = contest.best, contest.trial
        switch_to(best if self.trial.won else None)
        self.choice = msgspec.structs.replace(best, rungs=choice.rungs, rivals=())
        self.plan = best.plan
        self._outcome = f"{self._explained(best.reason)} {self.trial.describe('step', best.name)}"
        if any(each.keeps for each in contenders if each is not current):
            self._outcome += " The residuals of what does not stay are dropped."

    def _explained(self, reason: str) -> str:
        return f"{reason}{_OWN_BUCKETS if self._is_compiled else ''}{self._hint}"
