"""Code shared by the framework integrations: follow a framework's model, and save it with the checkpoints.

A framework wraps the model in DDP and writes the checkpoints. Syncline follows the model from the moment it is wrapped,
so the requested exchange is attached in its first training forward. Each rank writes its residual to its own file, in a
folder that belongs to the framework's checkpoint. A plan that tuning found is written there too, and a resumed run
continues with it. When a framework loads a checkpoint, nothing is attached yet: the folder is remembered, and loaded in
the forward in which something is attached.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.hooks import RemovableHandle

from syncline.ddp.buckets import make_plain
from syncline.ddp.handle import Handle, handle_if_attached
from syncline.ddp.hook import forget
from syncline.errors import UsageError
from syncline.files import write_bytes
from syncline.health.meeting import same_on_all_ranks
from syncline.measure.hooks import Unseen
from syncline.records.plan import Plan
from syncline.runtime.bucket_policy import difference_of
from syncline.runtime.parameters import ddp_of, only_device, parameters_of
from syncline.tuning.follow import Following
from syncline.tuning.settings import TuneSettings, has_residual

_ARGUMENTS = ("exchange", "plan", "allow", "network", "on_world_size", "timeout_s", "quiet")
_PLAN = "plan.json"


def missing(framework: str, error: ImportError) -> ImportError:
    """Return the error to raise if a framework cannot be imported."""
    return ImportError(
        f"syncline.integrations.{framework} cannot be imported: {error}: pip install 'syncline[{framework}]'"
    )


def take_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Remove Syncline's arguments from those of a framework's class, and return them."""
    return {name: options.pop(name) for name in _ARGUMENTS if name in options}


class Follower:
    """Follows the models of one framework object. Prints each message once, on rank 0.

    Args:
        arguments: Syncline's arguments, as `take_arguments` returns them.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.settings = TuneSettings(**arguments).load_files()
        self._printed: set[str] = set()

    def follow(self, model: nn.Module, scaler: GradScaler | None) -> FollowedModel | None:
        """Follow a wrapped model. Return None, with a message, if its process is the only one."""
        ddp = ddp_of(model)
        if ddp.process_group.size() == 1:
            self.print_single_process()
            return None
        return FollowedModel(ddp, self, scaler)

    @property
    def may_have_residual(self) -> bool:
        """Whether an exchange with a residual may be attached."""
        settings = self.settings
        if settings.exchange is not None:
            return settings.exchange.keeps
        return has_residual(settings.plan) if isinstance(settings.plan, Plan) else "sparse" in settings.allow

    def print(self, text: str) -> None:
        if text not in self._printed and not self.settings.quiet and not (dist.is_initialized() and dist.get_rank()):
            print(f"syncline: {text}", file=sys.stderr)
        self._printed.add(text)

    def print_single_process(self) -> None:
        self.print("a single process exchanges no gradients: there is nothing to do")


class FollowedModel:
    """A framework's model that is followed, and is saved and resumed with its framework's checkpoints."""

    def __init__(self, ddp: DDP, follower: Follower, scaler: GradScaler | None) -> None:
        self.model, self._follower = ddp, follower
        self._settings = dataclasses.replace(follower.settings, scaler=scaler)
        self._group: dist.ProcessGroup = ddp.process_group
        self._device = only_device(parameters_of(ddp))
        self._folder: Path | None = None
        """The folder to load when something is attached."""
        self._folder_step: int | None = None
        """The step at which that folder was saved, if known."""
        self._hook: RemovableHandle | None = None
        self.following = Following(ddp, self._settings)

    @property
    def handle(self) -> Handle | None:
        """The handle of what is attached to the model, by Syncline or by the script."""
        return handle_if_attached(self.model)

    def figures(self) -> dict[str, float]:
        """Return the last step's numbers for a logger; nothing if nothing is attached."""
        handle = self.handle
        return {} if handle is None else handle.scalars()

    @property
    def step(self) -> int | None:
        """The number of steps that were exchanged so far, including those of earlier runs; None if it is not known."""
        handle = self.handle
        return self._folder_step if handle is None else handle.stats().steps

    def close(self) -> None:
        """Stop following. What is attached stays attached and can still be saved."""
        self.following.close()
        self._remove_hook()

    def drop(self) -> None:
        """Close the connections of a model that is no longer trained."""
        self.close()
        forget(self.model)

    # --- checkpoints --------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> bool:
        """Collective, between steps: save what a resumed run needs. Return whether that includes residuals."""
        handle = self.handle
        if handle is not None and handle.error is not None:
            self._follower.print(f"{folder}: the exchange has failed, so its state is not saved")
            return False
        if handle is None and self._folder is not None:  # loaded, and saved again before the first step
            self._copy(self._folder, folder)
            return True
        has_state = handle is not None and (
            has_residual(handle.plan) if handle.plan is not None else handle.exchange.keeps
        )
        plan = self._plan_to_save(handle, has_state)
        with same_on_all_ranks(self._group, self._device, "what is saved", "save") as fields:
            fields |= {"keeps": has_state, "plan": plan is not None}
            if self._group.rank() == 0:
                if not has_state:
                    remove(folder)
                if plan is None:
                    (folder / _PLAN).unlink(missing_ok=True)
                else:
                    folder.mkdir(parents=True, exist_ok=True)
                    plan.save(folder / _PLAN)
        if handle is not None and has_state:
            handle.save(folder)
        return has_state

    def _plan_to_save(self, handle: Handle | None, has_state: bool) -> Plan | None:
        """Return the plan that tuning found, if the model uses it. During the trial, only a plan with a residual."""
        if not self._settings.tunes or not (self.following.done or has_state):
            return None
        if handle is not None:
            return handle.plan
        plan = self.following.plan
        return plan if plan is not None and plan.nothing else None

    def load(self, folder: Path, step: int | None = None, error_if_missing: str | None = None) -> None:
        """Collective: continue from a saved state, now or as soon as something is attached.

        Args:
            folder: The folder that `save` wrote.
            step: The step at which it was saved, if the checkpoint says so.
            error_if_missing: The message to raise if the folder is missing. None if it may be missing.

        Raises:
            UsageError: The folder is missing, or does not belong to this model or step.
        """
        plan: Plan | None = None
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
            self._follower.print(f"{folder}: its residual is not used, because the exchange now has none")
            has_state = False
        elif not has_state and may_have_state:
            self._follower.print(f"{folder}: no residual was saved there: it starts empty")
            handle = self.handle
            if handle is not None:  # drop the residual of steps that the checkpoint does not contain
                handle.load_state_dict({**handle.state_dict(), "steps": 0, "buckets": [], "tensors": {}})
        self._folder, self._folder_step = folder if has_state else None, step
        self._load_if_attached()
        if self._folder is not None and self._hook is None:
            self._hook = self.model.register_forward_pre_hook(Unseen(lambda *_: self._load_if_attached()))

    def _resume_plan(self, plan: Plan, folder: Path, has_state: bool) -> bool:
        """Collective: make the model use a plan that was found before. Return False if it does not fit."""
        difference = difference_of(plan, parameters_of(self.model), self._group, "load")
        if difference is not None and has_state and self._settings.on_world_size != "reset":
            raise UsageError(
                f"{folder}: the saved plan does not fit: {difference}. on_world_size='reset' drops its residual and "
                "tunes again"
            )
        if difference is not None:
            self._follower.print(f"{folder / _PLAN} does not fit, so the model is tuned again: {difference}")
            return False
        handle = self.handle
        if handle is None or handle.plan != plan:
            self.close()
            if handle is not None:
                make_plain(self.model)
            self.following = Following(self.model, dataclasses.replace(self._settings, plan=plan, allow=()))
        return True

    def _load_if_attached(self) -> None:
        """Load the remembered folder if something is attached, which happens in the same forward on all ranks."""
        handle = self.handle
        if self._folder is None or handle is None:
            return
        folder, self._folder = self._folder, None
        self._remove_hook()
        handle.load(folder, on_world_size=self._settings.on_world_size)
        step = handle.stats().steps
        if self._folder_step not in (None, step):
            raise UsageError(
                f"{folder} was saved at step {step}, but its checkpoint at step {self._folder_step}: use an earlier "
                "checkpoint"
            )

    def _remove_hook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._hook = None

    def _copy(self, source: Path, folder: Path) -> None:
        with same_on_all_ranks(self._group, self._device, "what is saved", "save"):
            if self._group.rank() == 0 and source.resolve() != folder.resolve():
                remove(folder)
                folder.mkdir(parents=True, exist_ok=True)
                for path in source.iterdir():
                    write_bytes(folder / path.name, path.read_bytes())


def remove(folder: Path) -> None:
    """Remove what `save` wrote, if anything."""
    if folder.is_dir():
        for path in (folder / _PLAN, *folder.glob("rank-*.safetensors*")):
            path.unlink(missing_ok=True)
        if not any(folder.iterdir()):
            folder.rmdir()
