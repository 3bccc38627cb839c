"""`follow`: tune a DDP model while a script trains it, from the steps that the script makes anyway.

    following = syncline.follow(model)

The call itself changes nothing. During the model's forwards, between two steps and on all ranks alike, some steps are
profiled, the links are probed, a plan is made, the plan and plain DDP take turns over the script's own steps, and the
faster one stays. The script's steps, data and random numbers are what they would have been. Gradients are what the
chosen exchange makes of them, which by default is the same up to summation order.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP

from syncline.ddp import buckets
from syncline.ddp.handle import Handle
from syncline.dist.agreement import current_device
from syncline.dist.comm import bound_group
from syncline.errors import SynclineError
from syncline.exchange import Exchange
from syncline.health.watchdog import watch_plain
from syncline.measure.hooks import Unseen
from syncline.measure.step_watcher import Pass, StepWatcher, in_backward
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.records.profile import Profile
from syncline.records.run_record import ModelRecord
from syncline.runtime.parameters import ddp_of, only_device, parameters_of
from syncline.runtime.step_log import StepLog
from syncline.tuning.live import LiveTuner
from syncline.tuning.settings import PROBE_S, TuneSettings
from syncline.tuning.trial import Steps, Trial


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
    """Make a DDP model exchange its gradients faster, during the training that a script does anyway.

    With an `exchange` or a `plan`, that is applied in the model's first training forward. Without, the model is tuned:
    about 60 of its steps are measured and tried, and the script waits once while the links are probed. If tuning is not
    possible, plain DDP stays and rank 0 prints the reason.

    All ranks must call `follow` with the same arguments and train the model in the same forwards. From then on each
    rank sends heartbeats, and logs one line when another rank stops sending them.

    Args:
        model: A DistributedDataParallel model.
        exchange: The exchange to attach.
        plan: The plan to apply, or its file.
        allow: Lossy exchanges that tuning may use: "bf16", "fp16", "sparse". By default tuning is lossless.
        network: The links, or the file that `syncline probe` wrote. Without it, the links are probed.
        change: If False, change nothing and only report what would be faster.
        scaler: The GradScaler of the loss, as in `attach`.
        probe_s: Time for probing the links, in seconds.
        timeout_s: Timeout of a collective in seconds. It becomes the timeout of the model's process group, so it also
            bounds plain DDP's all-reduces and the script's own collectives in that group. Probes have longer timeouts
            of their own. By default the group's timeout stays as it is.
        quiet: Print nothing. By default rank 0 prints what was done.

    Returns:
        The state of the model, which says what was measured and done.

    Raises:
        UsageError: An argument is invalid, or the model is not a DistributedDataParallel. An exchange or a plan that
            does not fit the model raises later, in its first training forward, on all ranks.

    Example:
        >>> following = syncline.follow(DDP(net))  # doctest: +SKIP
        >>> train()  # doctest: +SKIP
        >>> print(following.describe())  # doctest: +SKIP
    """
    ddp = ddp_of(model)
    settings = TuneSettings(
        exchange=exchange,
        plan=plan,
        allow=allow,
        network=network,
        change=change,
        scaler=scaler,
        probe_s=probe_s,
        timeout_s=timeout_s,
        quiet=quiet,
    )
    return Following(ddp, settings)


class Following:
    """A model that `follow` watches: what was measured and done, and how long its steps took.

    Attributes:
        working: Whether it is measuring or changing something now. Models built meanwhile are not the script's.
        error: The reason why the requested exchange or plan could not be applied, if it could not.
    """

    def __init__(
        self, ddp: DDP, settings: TuneSettings, find_scaler: Callable[[], GradScaler | None] | None = None
    ) -> None:
        """Follow a model.

        Args:
            ddp: The model.
            settings: What to do.
            find_scaler: Returns the scaler of the loss when something is attached. By default that of the settings.
        """
        self.working = False
        self.error: SynclineError | None = None
        self._device = only_device(parameters_of(ddp))
        bound_group(ddp.process_group, settings.timeout_s)
        self._in_eval = False
        self._is_first_forward = True
        """Whether no training forward has begun since the last step."""
        self._closed = self._decided = False
        # Registered before the watcher's hook, so that a step's clock starts when this one has returned. The hook holds
        # the generator, which holds the model while it is profiled: a reference cycle that goes with the model.
        self._hook = ddp.register_forward_pre_hook(Unseen(lambda *_: self._before_forward(work)))
        self._watcher = StepWatcher(self._device, self._after_step)
        self._watcher.watch(ddp, ddp)
        self._log = StepLog(ddp, self._watcher, self._device)
        self._tuner = LiveTuner(ddp, settings, find_scaler or (lambda: settings.scaler), self._watcher, self._log)
        work = self._tuner.run()
        self._work = weakref.ref(work)
        self._caps = buckets.own_caps(ddp) if buckets.can_change() else ()
        self._trained = frozenset(id(p) for p in parameters_of(ddp).values() if p.requires_grad)
        self._watchdog = watch_plain(ddp)

    @property
    def model(self) -> DDP:
        """The model.

        Raises:
            UsageError: It no longer exists.
        """
        return self._tuner.model

    @property
    def handle(self) -> Handle | None:
        """The handle of what is attached now, or None."""
        return self._tuner.handle

    @property
    def done(self) -> bool:
        """Whether the decision has been made."""
        return self._decided

    @property
    def profile(self) -> Profile | None:
        """The profile of the model, once it was measured."""
        return self._tuner.profile

    @property
    def network(self) -> Network | None:
        """The links, once they are known."""
        return self._tuner.network

    @property
    def plan(self) -> Plan | None:
        """The plan that was given or found, applied or not."""
        return self._tuner.plan

    @property
    def trial(self) -> Trial | None:
        """The times of plain DDP and of the plan, once both were tried."""
        return self._tuner.trial

    @property
    def seconds(self) -> float:
        """Time that the script has waited for measurements and changes."""
        return self._tuner.seconds

    def describe(self) -> str:
        """Return what was done and why."""
        if not self._decided and not self._watcher.step_count and self._watcher.forward_count:
            return (
                "Nothing was decided: no backward from the model's output was seen. The output must contain tensors "
                "that backward starts from, and the script must call the model, not its forward method."
            )
        return self._tuner.outcome

    def record(self) -> ModelRecord:
        """Return what is known so far as a record for a file. The model may be gone."""
        return self._log.record(
            outcome=self.describe(),
            caps=self._caps,
            host_of_rank=self._tuner.hosts,
            profile=self.profile,
            network=self.network,
            plan=self.plan,
        )

    def note_loss(self, loss: Tensor) -> None:
        """Record the loss of the next step: a tensor with one number that nothing changes any more."""
        if self._tuner.exists:
            self._log.note_loss(loss)

    def close(self) -> None:
        """Stop following. What is attached stays attached."""
        self._closed = True
        if (work := self._work()) is not None:
            work.close()
        self._hook.remove()
        self._watcher.close()
        if (watchdog := self._watchdog()) is not None:
            watchdog.stop()

    # --- hooks --------------------------------------------------------------------------------------------------

    def _after_step(self, step: Pass) -> None:
        self._is_first_forward = True
        self._in_eval = not self.model.training
        self._log.step_ended(step)
        if (watchdog := self._watchdog()) is not None:
            watchdog.reached(self._watcher.step_count)

    def _before_forward(self, work: Steps) -> None:
        """Continue in the first training forward after a step, which is the same forward on all ranks."""
        ddp = self.model
        if self._closed or not self._is_first_forward or not torch.is_grad_enabled() or in_backward():
            return
        in_training = ddp.training or ddp.module.training or self._in_eval  # Lightning leaves the wrapper in eval mode
        if not ddp.require_backward_grad_sync or not in_training:
            return
        self._is_first_forward = False
        with current_device(self._device):
            self._log.step_begins(self.handle, decided=self._decided and self._tuner.is_ours)
            if not self._decided and not self._is_partly_frozen:
                self._continue(work)

    def _continue(self, work: Steps) -> None:
        self.working = True
        try:
            next(work)
        except SynclineError as error:
            self.error, self._decided = error, True
            raise
        except StopIteration:
            self._decided = True
            self._log.switch_to(self._tuner.method)  # the steps from now on are those that count
            self._tuner.print(self.describe())
        finally:
            self.working = False

    @property
    def _is_partly_frozen(self) -> bool:
        """Whether this forward trains other parameters than DDP was built for, as when two models train in turns."""
        parameters = parameters_of(self.model).values()
        return frozenset(id(p) for p in parameters if p.requires_grad) != self._trained
