"""Accelerate: a handler for the DDP that `prepare` makes.

    kwargs = SynclineKwargs(exchange=syncline.OkTopk(density=0.01))
    accelerator = Accelerator(kwargs_handlers=[kwargs])
    kwargs.join(accelerator)                  # save_state and load_state now include residuals

Accelerate passes models to a handler, but neither checkpoints nor the loss scaler. These belong to the accelerator,
which is created after the handler, so `join` connects the two. Without a residual and a loss scaler, it may be left
out. `save_state` writes the residual of each rank to its own file in the checkpoint's folder `syncline`
(`register_for_checkpointing` would pickle rank 0's only). Those of a second model go to `syncline_1`, and so on.
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
from syncline.integrations.followed_model import FollowedModel, Follower, missing, take_arguments

try:
    from accelerate import Accelerator  # type: ignore[import-untyped] # not typed
    from accelerate.utils import DistributedDataParallelKwargs, DistributedType  # type: ignore[import-untyped]
except ImportError as error:
    raise missing("accelerate", error) from error

_WITHOUT_DDP = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA", "TP")
"""Distributed types that shard a model, or reduce its gradients without DDP."""
_HOOKS = ("comm_hook", "comm_wrapper", "comm_state_option")
"""Arguments of the handler that are not arguments of DDP."""


class SynclineKwargs(DistributedDataParallelKwargs):  # type: ignore[misc] # not typed
    """A handler whose models exchange their gradients through Syncline.

    Args:
        exchange: The exchange to attach.
        plan: The plan to apply, or its file. With neither an exchange nor a plan, models are tuned during their first
            sixty steps.
        on_world_size: What `load_state` does with residuals on another number of ranks, as in `Handle.load`.
        allow, network, timeout_s, quiet: As in `syncline.follow`.
        **options: Arguments of DistributedDataParallelKwargs.

    Raises:
        UsageError: An argument is invalid, or a communication hook is passed as well.
        FileError: The plan or the network cannot be read.

    Example:
        >>> kwargs = SynclineKwargs()  # doctest: +SKIP
        >>> accelerator = Accelerator(kwargs_handlers=[kwargs])  # doctest: +SKIP
        >>> kwargs.join(accelerator)  # doctest: +SKIP
    """

    def __init__(self, exchange: Exchange | None = None, **options: Any) -> None:
        self._follower = Follower({"exchange": exchange, **take_arguments(options)})
        _refuse_hooks(options)
        super().__init__(**options)
        self._accelerator: Accelerator | None = None
        self._followed: list[FollowedModel] = []

    @property  # type: ignore[misc] # read-only
    def __class__(self) -> Any:
        # Accelerate finds out what a handler is for by its exact class, and compares its values with that class's.
        return DistributedDataParallelKwargs

    @property
    def handles(self) -> list[Handle]:
        """The handles of what is attached, in the order in which the models were prepared."""
        handles = [followed.handle for followed in self._followed]
        return [handle for handle in handles if handle is not None]

    @property
    def handle(self) -> Handle | None:
        """The first of `handles`. None before the first training step, and if plain DDP stays."""
        return next(iter(self.handles), None)

    @property
    def follows(self) -> bool:
        """Whether any model is followed."""
        return bool(self._followed)

    def figures(self) -> dict[str, float]:
        """Return the bytes sent and the time taken by the first model's last step, for `accelerator.log`."""
        return self._followed[0].figures() if self._followed else {}

    def join(self, accelerator: Accelerator) -> SynclineKwargs:
        """Include residuals in this accelerator's checkpoints, and use its loss scaler.

        Args:
            accelerator: The accelerator, before `prepare`. If it was created without this handler, this handler takes
                over its arguments for DDP.

        Returns:
            This handler.

        Raises:
            UsageError: The accelerator does not use plain DDP, has another communication hook, or has prepared a model
                already.
        """
        if accelerator.distributed_type in [getattr(DistributedType, name, None) for name in _WITHOUT_DDP]:
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
            self._follower.print_single_process()
        return self

    def take_over(self, accelerator: Accelerator) -> None:
        """Replace the accelerator's DDP handler, and take over its arguments for DDP."""
        replaced = accelerator.ddp_handler
        if replaced is not None and replaced is not self:
            _refuse_hooks(vars(replaced))
            for name, value in replaced.to_kwargs().items():
                setattr(self, name, value)
        accelerator.ddp_handler = self

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the residuals into a checkpoint's folder. All ranks call it, between steps."""
        for index, followed in enumerate(self._followed):
            followed.save(_folder_of(folder, index))

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Restore the residuals from a checkpoint's folder. All ranks call it."""
        for index, followed in enumerate(self._followed):
            followed.load(_folder_of(folder, index))

    # --- called by Accelerate -----------------------------------------------------------------------------------

    def to_dict(self, ignore_keys: Sequence[str] = _HOOKS) -> dict[str, Any]:
        """Return the arguments of DDP only."""
        names = [field.name for field in dataclasses.fields(DistributedDataParallelKwargs)]
        return {name: getattr(self, name) for name in names if name not in ignore_keys}

    def register_comm_hook(self, model: nn.Module) -> None:
        """Follow a model that Accelerate has wrapped."""
        if self._accelerator is None and self._follower.may_have_residual:
            raise UsageError(
                "an exchange with a residual needs the accelerator's checkpoints and loss scaler: call "
                "SynclineKwargs.join(accelerator) before accelerator.prepare"
            )
        self._drop_released(model)
        scaler = None if self._accelerator is None else self._accelerator.scaler
        followed = self._follower.follow(model, scaler)
        if followed is not None:
            self._followed.append(followed)

    def _drop_released(self, model: nn.Module) -> None:
        """Drop models that are wrapped again, and models that the accelerator has released."""
        held = None if self._accelerator is None else {id(prepared) for prepared in self._accelerator._models}
        for followed in list(self._followed):
            released = held is not None and not held & {id(followed.model), id(followed.model.module)}
            if released or followed.model.module is model.module:
                followed.drop()
                self._followed.remove(followed)


def _folder_of(checkpoint: str | os.PathLike[str], index: int) -> Path:
    return Path(checkpoint) / ("syncline" if index == 0 else f"syncline_{index}")


def _refuse_hooks(arguments: Mapping[str, Any]) -> None:
    for name in _HOOKS[:2]:
        if str(arguments.get(name, "no")) != "no":
            raise UsageError(f"{name}: DDP takes one hook, and Syncline needs it: leave yours out")
