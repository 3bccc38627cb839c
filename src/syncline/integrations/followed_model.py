"""Code shared by the framework integrations: follow a framework's model, and save it with the checkpoints.

A framework wraps the model in DDP, and the exchange is attached in its first training forward. Each rank writes its
residual to its own file, in a folder of the framework's checkpoint, beside the plan that tuning found. When a framework
loads a checkpoint, nothing is attached yet: the folder is loaded in the forward in which something is attached.

If updates are exchanged, each rank has its own weights and optimizer state, which are saved too. They are always loaded
in a forward, after the framework has loaded those of rank 0.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from syncline.ddp.handle import Handle, handle_if_attached
from syncline.ddp.hook import forget
from syncline.ddp.reducer import make_plain
from syncline.errors import UsageError
from syncline.exchange import Exchange
from syncline.health.meeting import same_on_all_ranks
from syncline.measure.hooks import Unseen
from syncline.records.plan import Plan
from syncline.runtime.bucket_policy import difference_of
from syncline.runtime.validation import ddp_of, only_device, parameters_of
from syncline.tuning.following import Following
from syncline.tuning.settings import TuneSettings, allows_residual, has_residual

_ARGUMENTS = (
    *("exchange", "plan", "allow", "quality", "cache", "retune", "network", "on_world_size", "timeout_s", "quiet"),
    *("updates", "every", "warmup", "delay", "outer", "shares"),
)
_PLAN = "plan.json"
SINGLE_PROCESS = "a single process exchanges no gradients: there is nothing to do"


@contextlib.contextmanager
def needs(framework: str) -> Iterator[None]:
    """Say how to install a framework if the imports in this context fail."""
    try:
        yield
    except ImportError as error:
        problem = f"syncline.integrations.{framework} cannot be imported: {error}"
        raise ImportError(f"{problem}: pip install 'syncline[{framework}]'") from error


def take_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Remove Syncline's arguments from those of a framework's class, and return them."""
    return {name: options.pop(name) for name in _ARGUMENTS if name in options}


def only_optimizer(optimizers: Sequence[Optimizer], ddp: DDP, advice: str) -> Optimizer:
    """Return the optimizer that has parameters of a model.

    Args:
        optimizers: The optimizers, without the framework's wrappers.
        ddp: The model.
        advice: What to do if there is none.

    Raises:
        UsageError: There is none, or more than one.
    """
    parameters = {id(parameter) for parameter in ddp.module.parameters()}
    own = [o for o in optimizers if any(id(p) in parameters for group in o.param_groups for p in group["params"])]
    if len(own) != 1:
        found = " and ".join(type(optimizer).__name__ for optimizer in own) or "none"
        advice = "use one with several parameter groups" if own else advice
        raise UsageError(f"updates=True needs one optimizer of the model, and found {found}: {advice}")
    return own[0]


def refuse_hooks(arguments: Mapping[str, Any], *names: str) -> None:
    for name in names:
        if str(arguments.get(name) or "no") != "no":  # Accelerate's name for none
            raise UsageError(f"{name}: DDP takes one hook, and Syncline needs it: leave yours out")


class Follower:
    """Follows the models of one framework object. Prints each message once, on rank 0."""

    def __init__(self, exchange: Exchange | None, options: dict[str, Any]) -> None:
        """Take Syncline's arguments out of those of the framework's class."""
        self.settings = TuneSettings(exchange=exchange, **take_arguments(options)).load_files()
        self._printed: set[str] = set()

    def follow(
        self, model: nn.Module, scaler: GradScaler | None, find_optimizer: Callable[[DDP], Optimizer]
    ) -> FollowedModel | None:
        """Follow a wrapped model. Return None, with a message, if its process is the only one.

        To exchange updates, `find_optimizer` is called in the model's first training forward.
        """
        ddp = ddp_of(model)
        if ddp.process_group.size() == 1:
            self.print(SINGLE_PROCESS)
            return None
        return FollowedModel(ddp, self, scaler, find_optimizer)

    @property
    def may_have_residual(self) -> bool:
        """Whether an exchange with a residual, or with other state of a rank, may be attached."""
        if self.settings.updates:
            return True
        exchange, plan = self.settings.exchange, self.settings.plan
        planned = has_residual(plan) if isinstance(plan, Plan) else allows_residual(self.settings)
        return planned if exchange is None else exchange.keeps

    def print(self, text: str) -> None:
        if text not in self._printed and not self.settings.quiet and not (dist.is_initialized() and dist.get_rank()):
            print(f"syncline: {text}", file=sys.stderr)
        self._printed.add(text)


class FollowedModel:
    """A framework's model that is followed, and is saved and resumed with its framework's checkpoints."""

    def __init__(
        self,
        ddp: DDP,
        follower: Follower,
        scaler: GradScaler | None,
        find_optimizer: Callable[[DDP], Optimizer],
    ) -> None:
        self.model, self._follower = ddp, follower
        self._settings = dataclasses.replace(follower.settings, scaler=scaler)
        self._group: dist.ProcessGroup = ddp.process_group
        self._device = only_device(parameters_of(ddp))
        self._folder: Path | None = None
        """The folder to load when something is attached."""
        self._folder_step: int | None = None
        """The step at which that folder was saved, if known."""
        self._starts_anew = False
        """Whether the attached exchange of updates must start from the weights that were loaded without a folder."""
        self.has_ended = False
        """Whether the training has ended, so that the model has the weights that all ranks agreed on last."""
        self._hook: RemovableHandle | None = None
        reference = weakref.ref(ddp)  # the model's hooks refer to `following`

        def optimizer() -> Optimizer | None:
            return None if (model := reference()) is None else find_optimizer(model)

        self.following = Following(ddp, self._settings, find_optimizer=optimizer)

    @property
    def handle(self) -> Handle | None:
        """The handle of what is attached to the model, by Syncline or by the script."""
        return handle_if_attached(self.model)

    def figures(self) -> dict[str, float]:
        """Return the last step's numbers for a logger; nothing if nothing is attached."""
        return {} if self.handle is None else self.handle.scalars()

    @property
    def step(self) -> int | None:
        """The number of steps that were exchanged so far, including those of earlier runs; None if it is not known."""
        return self._folder_step if self.handle is None else self.handle.stats().steps

    def synced(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model has the weights that all ranks agreed on last, as `Handle.synced` does.

        It does nothing if nothing is attached, if the weights were loaded and not trained yet, or after `end`.
        """
        handle = self.handle
        was_loaded = self._folder is not None or self._starts_anew
        if handle is None or was_loaded or self.has_ended or handle.error is not None:
            return contextlib.nullcontext()
        return handle.synced()

    def end(self) -> None:
        """Leave the model with the weights that all ranks agreed on last. Each rank's own can still be saved."""
        if not self.has_ended:
            contextlib.ExitStack().enter_context(self.synced())  # it is not left
            self.has_ended = True

    def begin_again(self) -> None:
        """Continue from the weights that the model has now, if the training has ended. All ranks call it."""
        if self.has_ended:
            self.has_ended = False
            self._starts_anew = self._settings.updates and self.handle is not None
            self._load_in_next_forward()

    def close(self) -> None:
        """Stop following. What is attached stays attached and can still be saved."""
        self.following.close()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def drop(self) -> None:
        """Close the connections of a model that is no longer trained."""
        self.close()
        forget(self.model)

    def save(self, folder: Path) -> bool:
        """Collective, between steps: save what a resumed run needs. Return whether that includes residuals."""
        handle, plan, loaded = self.handle, self.following.plan, None
        if self._folder is not None:  # what is attached has not loaded it yet
            handle = None
        if handle is None:
            loaded = self._folder  # loaded, and saved again before the first step
            has_state, plan = loaded is not None, plan if plan is not None and plan.nothing else None
        elif handle.error is not None:
            self._follower.print(f"{folder}: the exchange has failed, so its state is not saved")
            return False
        else:
            has_state = handle.exchange.keeps if handle.plan is None else has_residual(handle.plan)
            has_state, plan = has_state or self._settings.updates, handle.plan
        # Only a plan that tuning found is saved, and during the trial, only one with a residual.
        plan = plan if self._settings.tunes and (self.following.done or has_state) else None
        with same_on_all_ranks(self._group, self._device, "what is saved", "save") as fields:
            fields |= {"keeps": has_state, "plan": plan is not None}
            if self._group.rank() == 0 and (loaded is None or loaded.resolve() != folder.resolve()):
                if loaded is not None or not has_state:
                    remove(folder)
                if plan is None:
                    (folder / _PLAN).unlink(missing_ok=True)
                else:
                    folder.mkdir(parents=True, exist_ok=True)
                    plan.save(folder / _PLAN)
                if loaded is not None:
                    shutil.copytree(loaded, folder, dirs_exist_ok=True)
        if handle is not None and has_state:
            handle.save(folder)
        return has_state

    def load(self, folder: Path, step: int | None = None, error_if_missing: str | None = None) -> None:
        """Collective: continue from the folder that `save` wrote, now or as soon as something is attached.

        Args:
            step: The step at which it was saved, if the checkpoint says so.
            error_if_missing: The message to raise if the folder is missing. None if it may be missing.
        """
        plan: Plan | None = None
        if self._settings.updates and (attached := self.handle) is not None and attached.error is None:
            attached.wait()  # before the framework loads weights, which results under way would change
        with same_on_all_ranks(self._group, self._device, "what is loaded", "load") as fields:
            if error_if_missing is not None and not folder.is_dir():
                raise UsageError(error_if_missing)
            if self._settings.tunes and (folder / _PLAN).exists():
                plan = Plan.load(folder / _PLAN)
            has_state = folder.is_dir() and any(folder.glob("rank-*"))
            fields |= {"kept": has_state, "plan": plan is not None}
        may_have_state = self._follower.may_have_residual
        if plan is not None:
            has_state = self._resume_plan(plan, folder, has_state) and has_state
        elif has_state and (self._settings.tunes or not may_have_state):
            reason = "the exchange now has none"
            if self._settings.tunes:  # a compiled model keeps its buckets, so tuning found no plan for it
                reason = "the model is tuned again: no plan was saved there, as for compiled models. "
                reason += "To continue, pass the exchange= that it was saved with"
            self._follower.print(f"{folder}: its residual is not used, because {reason}")
            has_state = False
        elif not has_state and may_have_state:
            self._follower.print(f"{folder}: no residual was saved there: it starts empty")
            self._starts_anew = self._settings.updates
            if (handle := self.handle) is not None and not self._settings.updates:
                # drop the residual of steps that the checkpoint does not contain
                handle.load_state_dict({**handle.state_dict(), "steps": 0, "buckets": [], "tensors": {}})
        self._folder, self._folder_step = folder if has_state else None, step
        if self._settings.updates:
            self._starts_anew = self._starts_anew and self.handle is not None and self._folder is None
        else:
            self._load_if_attached()
        self._load_in_next_forward()

    def _load_in_next_forward(self) -> None:
        """Load what is not loaded yet in the next training forward, after the hook of `following`, which attaches."""
        if self._hook is None and (self._folder is not None or self._starts_anew):
            self._hook = self.model.register_forward_pre_hook(Unseen(lambda *_: self._load_if_attached()))

    def _resume_plan(self, plan: Plan, folder: Path, has_state: bool) -> bool:
        """Collective: make the model use a plan that was found before. Return False if it does not fit."""
        difference = difference_of(plan, parameters_of(self.model), self._group, "load")
        if difference is not None:
            if has_state and self._settings.on_world_size != "reset":
                advice = "on_world_size='reset' drops its residual and tunes again"
                raise UsageError(f"{folder}: the saved plan does not fit: {difference}. {advice}")
            self._follower.print(f"{folder / _PLAN} does not fit, so the model is tuned again: {difference}")
            return False
        handle = self.handle
        if handle is None or handle.plan != plan:
            self.close()
            if handle is not None:
                make_plain(self.model)
            settings = dataclasses.replace(self._settings, plan=plan, allow=(), quality=None, retune=None)
            self.following = Following(self.model, settings)
        return True

    def _load_if_attached(self) -> None:
        """Load the remembered folder if something is attached, which happens in the same forward on all ranks."""
        handle = self.handle
        if handle is None or (self._settings.updates and not torch.is_grad_enabled()):  # ranks may evaluate alone
            return
        if self._starts_anew:
            self._starts_anew = False
            handle.load_state_dict({**handle.state_dict(), "buckets": [], "tensors": {}})
        if self._folder is None:
            return
        folder, self._folder = self._folder, None
        handle.load(folder, on_world_size=self._settings.on_world_size)
        step = handle.stats().steps
        if self._folder_step not in (None, step):
            saved = f"{folder} was saved at step {step}, but its checkpoint at step {self._folder_step}"
            raise UsageError(f"{saved}: use an earlier checkpoint")


def remove(folder: Path) -> None:
    """Remove what `save` wrote, if anything."""
    for path in (folder / _PLAN, *folder.glob("rank-*.safetensors*")):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # it does not exist, or has other files
        folder.rmdir()
