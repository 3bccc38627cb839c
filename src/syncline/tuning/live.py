"""What `follow` does to a model between the steps of the script that trains it.

Applying a given exchange or plan, and tuning, are generators: each `yield` returns to the script until it has made its
next step. Everything between two yields happens inside one forward, on all ranks alike.
"""

from __future__ import annotations

import contextlib
import sys
import time
import weakref
from collections.abc import Callable, Generator, Iterator

import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP

from syncline.ddp import buckets
from syncline.ddp.attach import attach, make_planned
from syncline.ddp.handle import Handle, handle_if_attached
from syncline.ddp.hook import Switch, attached_to, other_hook
from syncline.dist.comm import backend_of
from syncline.errors import SynclineError, UsageError
from syncline.measure.backward_watch import BackwardWatch
from syncline.measure.preserve_state import same_random_numbers
from syncline.measure.step_watcher import StepWatcher
from syncline.measure.steps import Subject
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.records.profile import Profile
from syncline.runtime.bucket_policy import difference_of, read_plan
from syncline.runtime.parameters import only_device, parameters_of
from syncline.runtime.stats import name_of
from syncline.runtime.topology import hosts_of
from syncline.tuning.settings import TuneSettings, has_residual
from syncline.tuning.step_log import PLAIN, StepLog
from syncline.tuning.trial import SETTLING, Schedule, Trial, Turn, agreed_network, plan_for_live, probe_for

_PROFILED = 10
"""Steps that the profile is made from."""

Steps = Generator[None, None, None]
"""Each `yield` stands for one training step."""

_probed: dict[tuple[object, ...], Network] = {}
"""Links that were probed in this process, by (ranks, backend, allowed exchanges)."""


class _CannotChangeError(UsageError):
    """The model cannot be changed. Raised on all ranks alike; the message is the reason."""


class LiveTuner:
    """Changes a model between steps. It refers to the model weakly, because the model's hooks refer to it."""

    _watcher: StepWatcher
    _log: StepLog

    def __init__(self, ddp: DDP, settings: TuneSettings, find_scaler: Callable[[], GradScaler | None]) -> None:
        self._ddp = weakref.ref(ddp)
        self._settings, self._find_scaler = settings, find_scaler
        self._group: dist.ProcessGroup = ddp.process_group
        self._device = only_device(parameters_of(ddp))
        self._hosts: tuple[int, ...] = ()
        self._attached: weakref.ref[Switch] | None = None
        """What this object attached, as opposed to what the script attached."""
        self.profile: Profile | None = None
        self.network: Network | None = None
        self.plan: Plan | None = None
        """The plan that was given or found, applied or not."""
        self.trial: Trial | None = None
        self.seconds = 0.0
        """Time that the script has waited for measurements and changes."""
        self._outcome = "Nothing was decided yet: the script ended too early."

    @property
    def model(self) -> DDP:
        """The model. Raises a `UsageError` if it no longer exists."""
        if (ddp := self._ddp()) is None:
            raise UsageError("the model that was followed no longer exists")
        return ddp

    @property
    def handle(self) -> Handle | None:
        """The handle of what is attached now, or None."""
        return handle_if_attached(self.model)

    @property
    def _is_ours(self) -> bool:
        """Whether this object attached what is attached now."""
        switch = attached_to(self.model)
        return switch is not None and self._attached is not None and self._attached() is switch

    @property
    def _method(self) -> str:
        """The name of what exchanges the gradients now, as in run records."""
        if self.handle is None:
            return PLAIN
        return "the plan" if self.handle.plan is not None else name_of(self.handle.exchange)

    def _print(self, text: str) -> None:
        if not self._settings.quiet and self._group.rank() == 0:
            print(f"syncline: {type(self.model.module).__name__}: {text}", file=sys.stderr, flush=True)

    def _apply_given(self) -> Steps:
        self._check_untouched()
        self._hosts = hosts_of(self._group)
        settings, scaler = self._settings, self._find_scaler()
        with self._paused():
            if settings.exchange is not None:
                network, timeout_s = settings.network, settings.timeout_s
                attach(self.model, settings.exchange, timeout_s=timeout_s, network=network, scaler=scaler)
                self._outcome = f"{settings.exchange!r} is attached, as requested."
            elif settings.plan is not None:
                plan = read_plan(settings.plan, self._group, self._device, "follow")
                difference = difference_of(plan, parameters_of(self.model), self._group, "follow")
                if difference is not None:
                    raise UsageError(f"the plan does not fit: {difference}")
                self.plan = plan
                if not plan.nothing:
                    self._check_changeable()
                    self._switch_to_plan(plan, agreed_network(self._group, self._device, "follow", lambda: settings))
                self._outcome = f"The plan is applied, as requested: {plan.reason}"
        self._note_change()
        yield from ()  # no step is needed

    # --- tuning -------------------------------------------------------------------------------------------------

    def _tune_or_keep_plain(self) -> Steps:
        """Tune. If that is not possible, all ranks see the same reason and continue with plain DDP."""
        try:
            yield from self._tune()
        except _CannotChangeError as reason:
            kept = "The trial was stopped and the plan stays" if self._is_ours else "Left alone"
            self._outcome = f"{kept}: {reason}."
        except (SynclineError, ArithmeticError, AssertionError, LookupError, TypeError, ValueError) as error:
            # Ranks share these errors while they measure and plan. A broken connection (a RuntimeError) is raised.
            if self._is_ours:
                self._switch_to_plain()
            message = str(error).rstrip(".") or type(error).__name__
            self._outcome = f"Plain DDP stays, because tuning failed: {message}."

    def _tune(self) -> Steps:
        self._check_untouched()
        self._hosts = hosts_of(self._group)
        settings = self._settings
        if self._group.size() == 1:
            raise _CannotChangeError("there is one rank, which exchanges nothing")
        yield from self._wait_for_steps(SETTLING)
        if hasattr(self.model.module, "_orig_mod"):
            raise _CannotChangeError("other buckets need a compiled model compiled again: use syncline.tune, or a plan")
        with BackwardWatch(Subject.of(self.model), None, _PROFILED, 0, last_pass_only=True) as watch:
            yield from self._wait_for_steps(_PROFILED)
            with self._paused():
                given = agreed_network(self._group, self._device, "follow", lambda: settings)
                if settings.change:
                    self._check_changeable()
                profile = watch.profile(self._group)
        with self._paused():
            if given is None and self._group.size() != dist.get_world_size():
                raise _CannotChangeError("its process group is part of the world, which cannot be probed: pass network")
            self.network = given or self._probe()
            self.profile, self.plan = plan_for_live(self.model, profile, self.network, settings.allow, self._device)
        if not settings.change or self.plan.nothing:
            self._outcome = self.plan.reason if settings.change else f"Only observed. {self.plan.reason}"
            return
        yield from self._try(self.plan, self.network)

    def _probe(self) -> Network:
        """Probe the links, once for all models of a script that use the same ones. Collective."""
        allowed, probe_s = self._settings.allow, self._settings.probe_s
        key = (tuple(dist.get_process_group_ranks(self._group)), backend_of(self._group), allowed)
        if key not in _probed:
            self._print(f"probing the links for about {probe_s:g} s, while the script waits")
            _probed[key] = probe_for(self._group, allowed, probe_s)
        return _probed[key]

    def _try(self, plan: Plan, network: Network) -> Steps:
        """Let plain DDP and the plan take turns over the script's own steps, and keep the faster."""
        schedule = Schedule.on_live_steps(plan)
        step_s: dict[Turn, list[float]] = {"plain": [], "plan": []}

        def switch(turn: Turn) -> None:
            with self._paused():
                if turn == "plan" and self.handle is None:
                    self._switch_to_plan(plan, network)
                elif turn == "plain" and self.handle is not None:
                    self._switch_to_plain()

        for turn in schedule.turns:
            switch(turn)
            yield from self._wait_for_steps(schedule.settling)
            first = self._watcher.step_count
            yield from self._wait_for_steps(schedule.counted)
            step_s[turn] += self._log.step_times_s(first, first + schedule.counted)
        self.trial = Trial.of(self._group, step_s)
        switch("plan" if self.trial.won else "plain")
        self._outcome = f"{plan.reason} {self.trial.describe('step')}"
        if has_residual(plan) and not self.trial.won:
            self._outcome += " The residual of its steps is dropped."

    def _wait_for_steps(self, count: int) -> Steps:
        end = self._watcher.step_count + count
        while self._watcher.step_count < end:
            yield
            self._check_untouched()

    # --- changing the model -------------------------------------------------------------------------------------

    def _switch_to_plan(self, plan: Plan, network: Network | None) -> None:
        self._copy_gradients()
        timeout_s = self._settings.timeout_s
        make_planned(self.model, plan, network=network, timeout_s=timeout_s, scaler=self._find_scaler())
        self._note_change()

    def _switch_to_plain(self) -> None:
        self._copy_gradients()
        buckets.make_plain(self.model)
        self._note_change()

    def _copy_gradients(self) -> None:
        """Keep gradients that the script still has: they may be views of buckets that are about to go."""
        for parameter in self.model.module.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.detach().clone()

    def _note_change(self) -> None:
        switch = attached_to(self.model)
        self._attached = None if switch is None else weakref.ref(switch)
        self._log.switch_to(self._method)

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        """Count the time while the script waits, and restore its random numbers."""
        began_s = time.monotonic()
        try:
            with same_random_numbers(self._device):
                yield
        finally:
            self.seconds += time.monotonic() - began_s

    # --- checks -------------------------------------------------------------------------------------------------

    def _check_untouched(self) -> None:
        """Raise an error if the script itself does something that excludes a change; every rank sees it by itself."""
        if attached_to(self.model) is not None and not self._is_ours:
            raise _CannotChangeError("the script attaches to this model itself")
        if (other := other_hook(self.model)) is not None:
            raise _CannotChangeError(f"the script registered a communication hook ({other})")
        if getattr(getattr(self.model, "_join_config", None), "enable", False):
            raise _CannotChangeError("under join() ranks make different numbers of steps, and cannot meet between them")

    def _check_changeable(self) -> None:
        if (why_not := buckets.why_not_change(self.model)) is not None:
            raise _CannotChangeError(f"{why_not}; see `syncline plan` and syncline.wrap(net, plan)")
