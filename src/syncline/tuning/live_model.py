"""A DDP model that trains, and whose exchange is changed between its steps, on all ranks alike."""

from __future__ import annotations

import contextlib
import sys
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from syncline.ddp import reducer
from syncline.ddp.handle import Handle, handle_if_attached
from syncline.ddp.hook import Switch, other_hook, switches
from syncline.errors import UsageError
from syncline.exchange import Exchange, made_of, name_of
from syncline.measure.preserve_state import same_random_numbers
from syncline.measure.step_watcher import Pass, StepWatcher
from syncline.plan.choice import Choice
from syncline.records.network import Network
from syncline.runtime.validation import only_device, parameters_of
from syncline.tuning.apply import apply_choice
from syncline.tuning.settings import TuneSettings
from syncline.tuning.stakes import Stakes
from syncline.tuning.step_log import PLAIN, StepLog

Steps = Generator[None, None, None]
"""Each `yield` stands for one training step."""


class CannotChangeError(UsageError):
    """The model cannot be changed. Raised on all ranks alike; the message is the reason."""


class LiveModel:
    """A model whose exchange can be changed between two steps."""

    def __init__(
        self,
        ddp: DDP,
        settings: TuneSettings,
        find_scaler: Callable[[], GradScaler | None],
        on_step: Callable[[Pass], None],
    ) -> None:
        self._ddp = weakref.ref(ddp)  # the model's hooks refer to this object
        self._settings, self._find_scaler = settings, find_scaler
        self._group: dist.ProcessGroup = ddp.process_group
        self._device = only_device(parameters_of(ddp))
        self._attached: weakref.ref[Switch] | None = None  # what this object attached, not the script
        self._step_hook: RemovableHandle | None = None
        self.choice: Choice | None = None
        """The choice of the last tuning, whether it was applied or not; None before that."""
        self._applied: Choice | None = None  # the one that is attached now, perhaps only to try it
        self.seconds = 0.0
        """Time that the script has waited for measurements and changes."""
        self._watcher = StepWatcher(self._device, on_step)
        self._log = StepLog(ddp, self._watcher, self._device)

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
    def _is_compiled(self) -> bool:
        """Whether the module inside DDP is compiled, with a graph that is split where DDP's buckets end."""
        return hasattr(self.model.module, "_orig_mod")

    def note_loss(self, loss: Tensor) -> None:
        """Record the loss of the next step: a tensor with one number that nothing changes any more."""
        if self._ddp() is not None:
            self._log.loss = loss

    def _wait_for_steps(self, count: int) -> Steps:
        end = self._watcher.step_count + count
        while self._watcher.step_count < end:
            yield
            self._check_untouched()

    def _stakes(self, steps: int) -> Stakes:
        """Return how long the last steps took, and waited for communication. Collective."""
        last = self._watcher.step_count
        moments = self._log.moments(last - steps, last)
        return Stakes.of(self._group, [step.step_s for step in moments], [step.exposed_s for step in moments])

    @property
    def _is_ours(self) -> bool:
        """Whether this object attached what is attached now."""
        switch = switches.get(self.model)
        return switch is not None and self._attached is not None and self._attached() is switch

    @property
    def _exchanges_updates(self) -> bool:
        """Whether updates are exchanged now, so that backward passes do not synchronise."""
        ddp = self._ddp()
        engine = None if ddp is None or (switch := switches.get(ddp)) is None else switch.engine
        return engine is not None and not engine.exchanges_gradients

    @property
    def _method(self) -> str:
        """The name of what exchanges the gradients or updates now, as in run records."""
        if self.handle is None:
            return PLAIN
        if self._is_ours and (exchange := self._exchange_of_updates) is not None:
            return f"updates by {name_of(exchange)}" if self._exchanges_updates else "the warm-up"
        return "the plan" if self.handle.plan is not None else name_of(self.handle.exchange)

    @property
    def _exchange_of_updates(self) -> Exchange | None:
        """The exchange of updates that this object has attached, if it has."""
        if self._settings.updates:
            return self._settings.exchange
        arguments = None if self._applied is None else self._applied.attachment
        return None if arguments is None or not arguments.updates else made_of(arguments.exchange)

    def _print(self, text: str) -> None:
        if not self._settings.quiet and self._group.rank() == 0:
            print(f"syncline: {type(self.model.module).__name__}: {text}", file=sys.stderr, flush=True)

    def _switch_to(
        self, choice: Choice | None, network: Network | None = None, optimizer: Optimizer | None = None
    ) -> None:
        """Give the model the buckets and exchanges of a choice, or make it plain DDP."""
        for parameter in self.model.module.parameters():  # gradients may be views of buckets that are about to go
            if parameter.grad is not None:
                parameter.grad = parameter.grad.detach().clone()
        if self._step_hook is not None:
            self._step_hook.remove()
            self._step_hook = None
        self._applied = choice
        if choice is not None:
            links: dict[str, Any] = {"network": network, "timeout_s": self._settings.timeout_s}
            apply_choice(self.model, choice, scaler=self._find_scaler(), optimizer=optimizer, **links)
            if choice.needs_optimizer and optimizer is not None:
                self._watch_steps_of(optimizer)
        elif not self._is_compiled:
            reducer.make_plain(self.model)
        elif (handle := self.handle) is not None:
            handle.detach()
        self._note_change()

    def _note_change(self) -> None:
        switch = switches.get(self.model)
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

    def _check_untouched(self) -> None:
        """Raise an error if the script itself does something that excludes a change; every rank sees it by itself."""
        if self.model in switches and not self._is_ours:
            raise CannotChangeError("the script attaches to this model itself")
        if (other := other_hook(self.model)) is not None:
            raise CannotChangeError(f"the script registered a communication hook ({other})")
        if self.model._join_config.enable:
            raise CannotChangeError("under join() ranks make different numbers of steps, and cannot meet between them")

    def _check_changeable(self) -> None:
        if (why_not := reducer.why_not_change(self.model)) is not None:
            raise CannotChangeError(f"{why_not}; see `syncline plan` and syncline.wrap(net, plan)")

    def _watch_steps_of(self, optimizer: Optimizer) -> None:
        """Let the optimizer's steps end those of the model, while updates are exchanged."""
        itself = weakref.ref(self)

        def stepped(*_: object) -> None:  # the optimizer holds its hooks
            if (following := itself()) is not None:
                following._watcher.optimizer_stepped()

        self._step_hook = optimizer.register_step_post_hook(stepped)  # after the hook of `attach`, which exchanges


def trained_ids(ddp: DDP) -> frozenset[int]:
    """Return the `id` of each trained parameter."""
    return frozenset(id(parameter) for parameter in parameters_of(ddp).values() if parameter.requires_grad)
