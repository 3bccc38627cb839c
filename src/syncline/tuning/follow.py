"""`follow`: a DDP model that a running script trains, made faster from the steps that it makes anyway.

    following = syncline.follow(model)

Nothing happens in the call. In the model's own forwards, between steps and on all ranks alike, the course is taken one
stage further: some steps are watched, the links are probed, a plan is made, the plan and plain DDP take turns over the
script's own steps, and the faster one stays. The script's steps, data and random numbers are what they would have been;
gradients are what the chosen exchange makes of them, which by default is the same to summation order.

The course is a generator: each `yield` lets the script make one more step.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP

from syncline.ddp import buckets
from syncline.ddp.attach import attach, check_scaler
from syncline.ddp.handle import Handle
from syncline.ddp.hook import Switch, attached_to, other_hooks
from syncline.dist.agreement import current_device
from syncline.dist.comm import backend_of, bound_group, group_device
from syncline.errors import SynclineError, UsageError
from syncline.exchange import Exchange
from syncline.health import meeting
from syncline.health.watchdog import watch_plain
from syncline.measure.backward_watch import BackwardWatch, in_backward
from syncline.measure.hooks import Unseen
from syncline.measure.preserve_state import same_random_numbers
from syncline.measure.step_timer import Pacer
from syncline.measure.steps import Subject
from syncline.plan.search import check_allowed
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.records.profile import Profile
from syncline.records.run_record import ModelRecord
from syncline.runtime.bucket_policy import difference_of, read_plan
from syncline.runtime.parameters import ddp_of, only_device, parameters_of, shapes_of
from syncline.runtime.stats import name_of
from syncline.runtime.step_log import PLAIN, Diary
from syncline.runtime.topology import check_network, hosts_of, mark_of, read_network
from syncline.runtime.validation import check_timeout, checked_exchange
from syncline.tuning.replan import make_plain, make_planned, plan_for_live, probe_for
from syncline.tuning.tune import Trial

PROBE_S = 15.0
_SETTLING = 3
"""Steps until DDP's buckets are what they will be, and caches warm."""
_WATCHED = 10
_TRIED = 8
"""Steps of each turn."""
_LONG_S = 1.0
"""Steps of which fewer are tried."""
_TURNS = ("plain", "plan", "plan", "plain")
_ONCE = ("plain", "plan")
"""For exchanges that keep something for later: going back and forth would lose it each time."""


Course = Generator[None, None, None]

_links: dict[tuple[object, ...], Network] = {}
"""What was probed in this process: the ranks, their backend and what was allowed → what links take."""


class _LeftAloneError(UsageError):
    """This model cannot be changed; the reason is the message. Raised on all ranks alike."""


@dataclass(frozen=True)
class Wishes:
    """What whoever follows a model wants for it."""

    exchange: Exchange | None
    plan: Plan | str | os.PathLike[str] | None
    allow: tuple[str, ...]
    network: Network | str | os.PathLike[str] | None
    change: bool
    probe_s: float
    quiet: bool
    timeout_s: float | None

    @classmethod
    def of(
        cls,
        exchange: Exchange | None = None,
        plan: Plan | str | os.PathLike[str] | None = None,
        allow: Sequence[str] = (),
        network: Network | str | os.PathLike[str] | None = None,
        change: bool = True,
        probe_s: float = PROBE_S,
        quiet: bool = False,
        timeout_s: float | None = None,
    ) -> Wishes:
        """What can be wrong with them before there is a model, is told."""
        if exchange is not None and plan is not None:
            raise UsageError("exchange and plan exclude each other: a plan names the exchanges of its buckets")
        for name, value, kind in (("plan", plan, Plan), ("network", network, Network)):
            if value is not None and not isinstance(value, kind | str | os.PathLike):
                raise UsageError(f"{name} is a {type(value).__name__}: pass a {kind.__name__}, or the file of one")
        allowed = check_allowed(allow)
        if (exchange is not None or plan is not None) and (allowed or not change):
            raise UsageError("allow and change=False are for tuning: an exchange or a plan leaves nothing to find")
        if isinstance(probe_s, bool) or not (isinstance(probe_s, int | float) and 1 <= probe_s < 1e6):
            raise UsageError(f"probe_s is {probe_s!r}: probing takes at least 1 s")
        check_timeout(timeout_s)
        exchange = None if exchange is None else checked_exchange(exchange)
        return cls(exchange, plan, allowed, network, change, float(probe_s), quiet, timeout_s)


def follow(
    model: nn.Module,
    *,
    exchange: Exchange | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    allow: Sequence[str] = (),
    network: Network | str | os.PathLike[str] | None = None,
    change: bool = True,
    scaler: GradScaler | None = None,
    probe_s: float = PROBE_S,
    timeout_s: float | None = None,
    quiet: bool = False,
) -> Following:
    """Has `model`, a DistributedDataParallel, exchange its gradients faster from the steps that are made anyway.

    With an `exchange` or a `plan` (or its file), that is applied when the model is first trained. With neither, the
    model is tuned: some 60 of its steps are watched and tried, and in between its links are probed for about `probe_s`,
    unless a `network` is passed. Only what changes no result is tried, unless `allow` names more: "bf16", "fp16",
    "sparse". With `change=False` nothing is changed: what would be better is only told.

    All ranks call it, with the same arguments, and train the model in the same forwards. An exchange or a plan that
    does not fit is an error in that forward, on all ranks; where tuning is not possible, plain DDP is left alone and
    the reason told. `scaler` is as for `attach`. Rank 0 says what was done, unless `quiet`.

    `timeout_s` is how long a collective may take, whatever the outcome is: it becomes the timeout of the model's
    process group, so it also bounds plain DDP's all-reduces and other collectives of that group, the script's own among
    them. Only the probes have longer ones of their own. Without it, the group's timeout stays as it is.

    While the model is followed, each rank sends heartbeats, and logs one line when another rank stops sending them.
    """
    ddp = ddp_of(model)
    check_scaler(scaler)
    wishes = Wishes.of(exchange, plan, allow, network, change, probe_s, quiet, timeout_s)
    return Following(ddp, wishes, lambda: scaler)


class Following:
    """A model that is followed: what was found and done, and what its steps took."""

    def __init__(self, ddp: DDP, wishes: Wishes, find_scaler: Callable[[], GradScaler | None]) -> None:
        # The model's hooks know this object: a strong reference would keep both until Python looks for circles.
        self._ddp = weakref.ref(ddp)
        self.profile: Profile | None = None
        self.network: Network | None = None
        self.plan: Plan | None = None
        """What was found best or was given, applied or not."""
        self.trial: Trial | None = None
        self.working = False
        """Whether it measures or changes something just now: models that are built meanwhile are not the script's."""
        self.seconds = 0.0
        """That measuring and planning took, while the script waited."""
        self.error: SynclineError | None = None
        """Why what was asked for could not be done, if it could not."""
        self._wishes, self._find_scaler = wishes, find_scaler
        self._group: dist.ProcessGroup = ddp.process_group
        self._device = only_device(parameters_of(ddp))
        bound_group(self._group, wishes.timeout_s)
        self._outcome = "Nothing was decided yet: the script ended too early."
        self._in_eval = False
        self._fresh = True
        self._closed = self._decided = False
        # Registered first, so that a step's clock starts when this is through.
        given = wishes.exchange is not None or wishes.plan is not None
        course = self._given() if given else self._unharmed(self._tuning())
        # The model's hook holds the course, which holds the model while it is watched: a circle that goes with it.
        self._hook = ddp.register_forward_pre_hook(Unseen(lambda *_: self._before_forward(course)))
        self._pacer = Pacer(ddp, self._device, self._after_step)
        self._diary = Diary(ddp, self._pacer, self._device)
        self._hosts: tuple[int, ...] = ()
        self._caps = buckets.own_caps(ddp) if buckets.can_change() else ()
        self._attached: weakref.ref[Switch] | None = None
        """By this object: what somebody else attaches is theirs."""
        self._course = weakref.ref(course)
        self._trained = frozenset(id(p) for p in parameters_of(ddp).values() if p.requires_grad)
        self._watchdog = watch_plain(ddp)

    @property
    def model(self) -> DDP:
        if (ddp := self._ddp()) is None:
            raise UsageError("the model that was followed is gone")
        return ddp

    @property
    def handle(self) -> Handle | None:
        """What is attached now, if anything."""
        found = attached_to(self.model)
        return None if found is None or found.engine is None else Handle(self.model, found, found.engine)

    @property
    def done(self) -> bool:
        """Whether it is decided how gradients go."""
        return self._decided

    def describe(self) -> str:
        """What was done and why."""
        if not self._decided and not self._pacer.steps and self._pacer.forwards:
            return (
                "Nothing was decided: no backward from the model's output was seen. Its output must hold tensors that "
                "backward starts from, and the model be called, not its forward."
            )
        return self._outcome

    def record(self) -> ModelRecord:
        """What is known by now, as it goes into a file; also when the model is gone."""
        return self._diary.record(
            outcome=self.describe(),
            caps=self._caps,
            host_of_rank=self._hosts,
            profile=self.profile,
            network=self.network,
            plan=self.plan,
        )

    def note_loss(self, loss: Tensor) -> None:
        """What the next step is of, for the record: one number that nobody changes any more."""
        if self._ddp() is not None:
            self._diary.note_loss(loss)

    def close(self) -> None:
        """Ends the following; what is attached stays."""
        self._closed = True
        if (course := self._course()) is not None:
            course.close()
        self._hook.remove()
        self._pacer.close()
        if (watchdog := self._watchdog()) is not None:
            watchdog.stop()

    # --- between steps ------------------------------------------------------------------------------------------

    def _after_step(self) -> None:
        self._fresh = True
        self._in_eval = not self.model.training
        self._diary.step_ended()
        if (watchdog := self._watchdog()) is not None:
            watchdog.reached(self._pacer.steps)

    def _before_forward(self, course: Course) -> None:
        """All ranks come here for the same forward: one that is trained, the first after a step."""
        ddp = self.model
        if self._closed or not self._fresh or not torch.is_grad_enabled() or in_backward():
            return
        in_training = ddp.training or ddp.module.training or self._in_eval  # Lightning leaves the wrapper in eval mode
        if not ddp.require_backward_grad_sync or not in_training:
            return
        self._fresh = False
        with current_device(self._device):
            self._diary.step_begins(self.handle, decided=self._decided and self._is_ours)
            if not self._decided and not self._is_frozen:
                self._go_on(course)

    def _go_on(self, course: Course) -> None:
        self.working = True
        try:
            next(course)
        except SynclineError as error:
            self.error, self._decided = error, True
            raise
        except StopIteration:
            self._decided = True
            self._diary.goes(self._way)  # from here on for good
            self._say(self.describe())
        finally:
            self.working = False

    @property
    def _is_frozen(self) -> bool:
        """Whether other parameters are trained in this forward than DDP was built for, as in turns of two models."""
        parameters = parameters_of(self.model).values()
        return frozenset(id(p) for p in parameters if p.requires_grad) != self._trained

    @property
    def _is_ours(self) -> bool:
        """Whether what is attached now was attached here."""
        found = attached_to(self.model)
        return found is not None and self._attached is not None and self._attached() is found

    def _say(self, text: str) -> None:
        if not self._wishes.quiet and self._group.rank() == 0:
            print(f"syncline: {type(self.model.module).__name__}: {text}", file=sys.stderr, flush=True)

    def _unharmed(self, course: Course) -> Course:
        """What is refused is refused on all ranks: they go on with plain DDP."""
        try:
            yield from course
        except _LeftAloneError as reason:
            self._outcome = f"{'The plan stays, half tried' if self._is_ours else 'Left alone'}: {reason}."
        except (SynclineError, ArithmeticError, AssertionError, LookupError, TypeError, ValueError) as error:
            # Whatever fails while something is measured or planned is told to the other ranks, which go on; a broken
            # connection (a RuntimeError) is everybody's.
            if self._is_ours:
                self._turn_plain()
            told = str(error).rstrip(".") or type(error).__name__
            self._outcome = f"Left as plain DDP, because it could not be changed: {told}."

    def _steps(self, count: int) -> Course:
        until = self._pacer.steps + count
        while self._pacer.steps < until:
            yield
            self._refuse_others()

    # --- the courses --------------------------------------------------------------------------------------------

    def _given(self) -> Course:
        self._look()
        wishes = self._wishes
        with current_device(self._device), same_random_numbers(self._device), self._timed():
            if wishes.exchange is not None:
                attach(
                    self.model,
                    wishes.exchange,
                    timeout_s=wishes.timeout_s,
                    network=wishes.network,
                    scaler=self._find_scaler(),
                )
                self._outcome = f"{wishes.exchange!r} is attached, as asked for."
            else:
                assert wishes.plan is not None  # noqa: S101 - one of them is given
                plan = read_plan(wishes.plan, self._group, self._device, "follow")
                different = difference_of(plan, shapes_of(self.model), self._group, self._device.type, "follow")
                if different is not None:
                    raise UsageError(f"the plan is for something else: {different}")
                self.plan = plan
                if not plan.nothing:
                    self._refuse_unchangeable()
                    self._turn_planned(plan, self._known_network())
                self._outcome = f"The plan is applied, as asked for: {plan.reason}"
        self._changed()
        yield from ()  # a course, if one without steps

    def _tuning(self) -> Course:
        self._look()
        if self._group.size() == 1:
            raise _LeftAloneError("there is one rank, which exchanges nothing")
        yield from self._steps(_SETTLING)
        if hasattr(self.model.module, "_orig_mod"):
            raise _LeftAloneError("a compiled model is compiled anew for other buckets: use syncline.tune, or a plan")
        with BackwardWatch(Subject.of(self.model), None, _WATCHED, 0, last_pass_only=True) as watch:
            yield from self._steps(_WATCHED)
            with self._timed(), same_random_numbers(self._device), current_device(self._device):
                known = self._known_network()
                if self._wishes.change:
                    self._refuse_unchangeable()
                profile = watch.profile(self._group)
        with self._timed(), same_random_numbers(self._device), current_device(self._device):
            if known is None and self._group.size() != dist.get_world_size():
                raise _LeftAloneError("its process group is part of the world, which cannot be probed: pass network")
            self.network = known or self._probed()
            self.profile, self.plan = plan_for_live(self.model, profile, self.network, self._wishes.allow, self._device)
        if not self._wishes.change or self.plan.nothing:
            self._outcome = self.plan.reason if self._wishes.change else f"Only observed. {self.plan.reason}"
            return
        yield from self._trying(self.plan)

    def _probed(self) -> Network:
        """Collective: once for all models of a script that exchange over the same links."""
        where = (tuple(dist.get_process_group_ranks(self._group)), backend_of(self._group), self._wishes.allow)
        if where not in _links:
            self._say(f"probing the links for about {self._wishes.probe_s:g} s, while the script waits")
            _links[where] = probe_for(self._group, self._wishes.allow, self._wishes.probe_s)
        return _links[where]

    def _trying(self, plan: Plan) -> Course:
        keeps = any(exchange.keeps for exchange in plan.exchanges)
        turns = _ONCE if keeps or plan.plain_s > _LONG_S else _TURNS
        settling, count = (_SETTLING, _TRIED) if plan.plain_s <= _LONG_S else (2, _TRIED // 2)
        times: dict[str, list[float]] = {"plain": [], "plan": []}
        for turn in turns:
            with self._timed(), same_random_numbers(self._device):
                if turn == "plan" and self.handle is None:
                    self._turn_planned(plan, self.network)
                elif turn == "plain" and self.handle is not None:
                    self._turn_plain()
            yield from self._steps(settling)
            before = self._pacer.steps
            yield from self._steps(count)
            times[turn] += self._diary.step_times_s(before, before + count)
        with self._timed(), same_random_numbers(self._device):
            self.trial = self._judged(times)
            if self.trial.won and self.handle is None:
                self._turn_planned(plan, self.network)
            elif not self.trial.won and self.handle is not None:
                self._turn_plain()
        self._outcome = f"{plan.reason} {self.trial.describe('step')}"
        if keeps and not self.trial.won:
            self._outcome += " What it kept of gradients for later is lost."

    def _judged(self, times: dict[str, list[float]]) -> Trial:
        """Collective: each step as long as on its slowest rank."""
        medians = []
        for turn in ("plain", "plan"):
            everyone = torch.tensor(times[turn], dtype=torch.float64, device=group_device(self._group))
            dist.all_reduce(everyone, op=dist.ReduceOp.MAX, group=self._group)
            medians.append(statistics.median(everyone.tolist()))
        return Trial(medians[0], medians[1], len(times["plan"]))

    # --- changing the model -------------------------------------------------------------------------------------

    @property
    def _way(self) -> str:
        if self.handle is None:
            return PLAIN
        return "the plan" if self.handle.plan is not None else name_of(self.handle.exchange)

    def _turn_planned(self, plan: Plan, network: Network | None) -> None:
        self._own_gradients()
        with current_device(self._device):
            make_planned(
                self.model, plan, network=network, timeout_s=self._wishes.timeout_s, scaler=self._find_scaler()
            )
        self._changed()

    def _turn_plain(self) -> None:
        self._own_gradients()
        with current_device(self._device):
            make_plain(self.model)
        self._changed()

    def _changed(self) -> None:
        found = attached_to(self.model)
        self._attached = None if found is None else weakref.ref(found)
        self._diary.goes(self._way)

    def _own_gradients(self) -> None:
        """Gradients that the script has not thrown away stay, out of the buckets that they may be views of."""
        for parameter in self.model.module.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.detach().clone()

    def _look(self) -> None:
        """Collective: where ranks are; and what the script makes impossible, which every rank sees by itself."""
        self._refuse_others()
        self._hosts = hosts_of(self._group)

    def _refuse_others(self) -> None:
        if attached_to(self.model) is not None and not self._is_ours:
            raise _LeftAloneError("the script attaches to this model itself")
        if other_hooks(self.model):
            raise _LeftAloneError(f"the script registered a communication hook ({other_hooks(self.model)[0]})")
        if getattr(getattr(self.model, "_join_config", None), "enable", False):
            raise _LeftAloneError("under join() ranks make different numbers of steps, and cannot meet between them")

    def _refuse_unchangeable(self) -> None:
        if (why_not := buckets.why_not_change(self.model)) is not None:
            raise _LeftAloneError(f"{why_not}; see `syncline plan` and syncline.wrap(net, plan)")

    def _known_network(self) -> Network | None:
        """Collective: what was passed, where it is of this cluster, and the same on all ranks."""
        known: Network | SynclineError | None = None
        with meeting.together(self._group, self._device, "what is followed", "follow") as fields:
            known = read_network(self._wishes.network)
            if isinstance(known, SynclineError):
                raise known
            fields |= {"allow": list(self._wishes.allow), "change": self._wishes.change, "network": mark_of(known)}
            fields["timeout_s"] = self._wishes.timeout_s
        if known is not None:
            check_network(known, self._hosts, backend_of(self._group))
        return known

    def _timed(self) -> _Timed:
        return _Timed(self)


class _Timed:
    """Time that the script waits for us."""

    def __init__(self, following: Following) -> None:
        self._following = following

    def __enter__(self) -> None:
        self._began_s = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._following.seconds += time.monotonic() - self._began_s
