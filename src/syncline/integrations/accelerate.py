"""Accelerate: a handler for the DDP that `prepare` makes.

    kwargs = SynclineKwargs(exchange=syncline.OkTopk(density=0.01))
    accelerator = Accelerator(kwargs_handlers=[kwargs])
    kwargs.join(accelerator)                  # what ranks keep goes into save_state, and comes back with load_state

It is Accelerate's own `DistributedDataParallelKwargs`, and takes all of its arguments. With neither an exchange nor a
plan, models are tuned from their first sixty steps.

Accelerate gives a handler the models, but neither checkpoints nor the loss scaler: those are the accelerator's, and it
is made after the handler. Hence `join`. Where nothing is kept and nothing scaled, it may be left out.

`save_state` writes what each rank keeps to a folder `syncline` in the checkpoint, as safetensors, a file for each rank
(`register_for_checkpointing` would pickle, and only rank 0's). A second model's goes to `syncline_1`, and so on.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from syncline.ddp.handle import Handle
from syncline.errors import UsageError
from syncline.exchange import Exchange
from syncline.integrations.synced import FOLDER, Asked, Synced, joined, missing
from syncline.records.network import Network
from syncline.records.plan import Plan

try:
    from accelerate import Accelerator  # type: ignore[import-untyped] # it has no types
    from accelerate.utils import DistributedDataParallelKwargs, DistributedType  # type: ignore[import-untyped]
except ImportError as error:
    raise missing("accelerate", error) from error

_OTHERS = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA", "TP")
"""What shards a model, or reduces its gradients without DDP."""
_HOOKS = ("comm_hook", "comm_wrapper", "comm_state_option")
"""Accelerate's arguments that are not DDP's."""


class SynclineKwargs(DistributedDataParallelKwargs):  # type: ignore[misc] # of a package without types
    """DDP's arguments, and what its gradients are exchanged through: `exchange`, or as `plan` says, or as tuning finds
    best.

    `allow`, `network` and `timeout_s` are as for `syncline.follow`; `on_world_size` says what `load_state` does on
    another number of ranks, as for `Handle.load`; everything else is DistributedDataParallelKwargs'.
    """

    def __init__(
        self,
        exchange: Exchange | None = None,
        *,
        plan: Plan | str | os.PathLike[str] | None = None,
        allow: Sequence[str] = (),
        network: Network | str | os.PathLike[str] | None = None,
        on_world_size: str = "refuse",
        timeout_s: float | None = None,
        quiet: bool = False,
        **ddp_arguments: Any,
    ) -> None:
        self._asked = Asked.of(exchange, plan, allow, network, on_world_size, quiet, timeout_s)
        _refuse_hooks(ddp_arguments)
        super().__init__(**ddp_arguments)
        self._accelerator: Accelerator | None = None
        self._synced: list[Synced] = []

    @classmethod
    def of(cls, asked: Asked) -> SynclineKwargs:
        made = cls()
        made._asked = asked
        return made

    @property  # type: ignore[misc] # which nobody needs to set
    def __class__(self) -> Any:
        # Accelerate looks up what a handler is for by its exact class, and compares its values with that class's.
        return DistributedDataParallelKwargs

    @property
    def handles(self) -> list[Handle]:
        """Of what is attached to models, in the order in which they were prepared."""
        found = [synced.handle for synced in self._synced]
        return [handle for handle in found if handle is not None]

    @property
    def handle(self) -> Handle | None:
        """The first of them; None before the first training step, and where plain DDP is best."""
        return next(iter(self.handles), None)

    def figures(self) -> dict[str, float]:
        """What the last step of the first model sent and how long that took, for `accelerator.log`."""
        return self._synced[0].figures() if self._synced else {}

    def join(self, accelerator: Accelerator) -> SynclineKwargs:
        """Saves and loads what ranks keep with this accelerator's checkpoints, and asks its loss scaler.

        Before `prepare`. Of an accelerator that was made without this handler, DDP's arguments are taken over.
        """
        if accelerator.distributed_type in [getattr(DistributedType, name, None) for name in _OTHERS]:
            raise UsageError(
                f"this accelerator uses {accelerator.distributed_type}: Syncline exchanges the gradients of plain DDP"
            )
        if accelerator._models:
            raise UsageError("this accelerator has prepared a model already: join before prepare")
        self.take_over(accelerator)
        accelerator.register_save_state_pre_hook(lambda models, weights, folder: self.save(folder))
        accelerator.register_load_state_pre_hook(lambda models, folder: self.load(folder))
        self._accelerator = accelerator
        if accelerator.num_processes == 1:
            self._asked.say_alone()
        return self

    def take_over(self, accelerator: Accelerator) -> None:
        """Stands in the place of whatever handler is there, with its arguments for DDP."""
        other = accelerator.ddp_handler
        if other is not None and other is not self:
            _refuse_hooks(vars(other))
            for name, value in other.to_kwargs().items():
                setattr(self, name, value)
        accelerator.ddp_handler = self

    @property
    def followed(self) -> int:
        """How many models."""
        return len(self._synced)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes what ranks keep into a checkpoint's folder. All ranks call it, between steps."""
        for index, synced in enumerate(self._synced):
            synced.save(_folder_of(folder, index))

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Goes on where `save` was called. All ranks call it."""
        for index, synced in enumerate(self._synced):
            synced.load(_folder_of(folder, index))

    # --- what Accelerate calls ----------------------------------------------------------------------------------

    def to_dict(self, ignore_keys: Sequence[str] = _HOOKS) -> dict[str, Any]:
        """DDP's arguments, and nothing of ours."""
        names = [field.name for field in dataclasses.fields(DistributedDataParallelKwargs)]
        return {name: getattr(self, name) for name in names if name not in ignore_keys}

    def register_comm_hook(self, model: nn.Module) -> None:
        """With each model that was wrapped."""
        if self._accelerator is None and self._asked.may_keep:
            raise UsageError(
                "an exchange that keeps gradients must know checkpoints and the loss scaler: call "
                "SynclineKwargs.join(accelerator) before accelerator.prepare"
            )
        self._drop_released(model)
        synced = joined(model, self._asked, None if self._accelerator is None else self._accelerator.scaler)
        if synced is not None:
            self._synced.append(synced)

    def _drop_released(self, model: nn.Module) -> None:
        """What was wrapped again, and what the accelerator has let go of since."""
        held = None if self._accelerator is None else {id(one) for one in self._accelerator._models}  # as given to it
        for synced in list(self._synced):
            released = held is not None and not held & {id(synced.model), id(synced.model.module)}
            if released or synced.model.module is model.module:
                synced.drop()
                self._synced.remove(synced)

    def __repr__(self) -> str:
        return f"SynclineKwargs({self._asked!r}, {self.to_kwargs()})"


def _folder_of(checkpoint: str | os.PathLike[str], index: int) -> Path:
    return Path(checkpoint) / (FOLDER if index == 0 else f"{FOLDER}_{index}")


def _refuse_hooks(arguments: Mapping[str, Any]) -> None:
    for name in _HOOKS[:2]:
        if str(arguments.get(name, "no")) != "no":
            raise UsageError(f"{name}: DDP takes one hook, and that is Syncline's: leave yours out")
