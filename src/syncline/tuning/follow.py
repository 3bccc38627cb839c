"""`follow`: tune a DDP model while a script trains it, from the steps that the script makes anyway.

The call itself changes nothing. During the model's forwards, between two steps and on all ranks alike, some steps are
profiled, the links are probed, a plan is made, the plan and plain DDP take turns over the script's own steps, and the
faster one stays. The script's data and random numbers stay the same.
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
from syncline.dist.agreement import current_device
from syncline.dist.comm import bound_group
from syncline.errors import SynclineError
from syncline.exchange import Exchange
from syncline.health.watchdog import watch_plain
from syncline.measure.hooks import Unseen
from syncline.measure.step_watcher import Pass, StepWatcher, in_backward
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.records.run_record import ModelRecord
from syncline.runtime.parameters import ddp_of, parameters_of
from syncline.tuning.live import LiveTuner, Steps
from syncline.tuning.settings import PROBE_S, TuneSettings
from syncline.tuning.step_log import StepLog


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
    possible, plain DDP stays and rank 0 prints the reason. From then on each rank logs one line when another rank stops
    sending heartbeats. All ranks must call `follow` with the same arguments and train the model in the same forwards.

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
            bounds plain DDP's all-reduces and the script's own collectives in that group, but not probes.
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
    return Following(ddp_of(model), settings)


class Following(LiveTuner):
    """A model that `follow` watches: what was measured and done, and how long its steps took."""

    def __init__(
        self, ddp: DDP, settings: TuneSettings, find_scaler: Callable[[], GradScaler | None] | None = None
    ) -> None:
        """Follow a model. `find_scaler` returns the scaler of the loss; by default it is that of the settings."""
        super().__init__(ddp, settings, find_scaler or (lambda: settings.scaler))
        self._watcher = StepWatcher(self._device, self._after_step)
        self._log = StepLog(ddp, self._watcher, self._device)
        bound_group(ddp.process_group, settings.timeout_s)
        self.done = False
        """Whether the decision has been made."""
        self.working = False
        """Whether it is measuring or changing something now. Models built meanwhile are not the script's."""
        self.error: SynclineError | None = None
        """Why the requested exchange or plan could not be applied, if it could not."""
        self._closed = self._in_eval = False
        self._is_first_forward = True
        """Whether no training forward has begun since the last step."""
        # Registered before the watcher's hook, so that a step's clock starts when this one has returned. The hook holds
        # the generator, which holds the model while it is profiled: a reference cycle that goes with the model.
        work = self._tune_or_keep_plain() if settings.tunes else self._apply_given()
        self._hook = ddp.register_forward_pre_hook(Unseen(lambda *_: self._before_forward(work)))
        self._work = weakref.ref(work)
        self._watcher.watch(ddp, ddp)
        self._caps = buckets.own_caps(ddp) if buckets.can_change() else ()
        self._trained = _trained(ddp)
        self._watchdog = watch_plain(ddp)

    def describe(self) -> str:
        """Return what was done and why."""
        if not self.done and not self._watcher.step_count and self._watcher.forward_count:
            return (
                "Nothing was decided: no backward from the model's output was seen. The output must contain tensors "
                "that backward starts from, and the script must call the model, not its forward method."
            )
        return self._outcome

    def record(self) -> ModelRecord:
        """Return what is known so far as a record for a file. The model may be gone."""
        known = {"profile": self.profile, "network": self.network, "plan": self.plan}
        return self._log.record(outcome=self.describe(), caps=self._caps, host_of_rank=self._hosts, **known)

    def note_loss(self, loss: Tensor) -> None:
        """Record the loss of the next step: a tensor with one number that nothing changes any more."""
        if self._ddp() is not None:
            self._log.loss = loss

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
            self._log.step_begins(self.handle, decided=self.done and self._is_ours)
            # Another set of trained parameters, as when two models train in turns, is not the step that is tuned.
            if not self.done and _trained(ddp) == self._trained:
                self._continue(work)

    def _continue(self, work: Steps) -> None:
        self.working = True
        try:
            next(work)
        except SynclineError as error:
            self.error, self.done = error, True
            raise
        except StopIteration:
            self.done = True
            self._log.switch_to(self._method)  # the steps from now on are those that count
            self._print(self.describe())
        finally:
            self.working = False


def _trained(ddp: DDP) -> frozenset[int]:
    return frozenset(id(parameter) for parameter in parameters_of(ddp).values() if parameter.requires_grad)
