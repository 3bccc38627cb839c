"""Accelerate: a handler for the DDP that `prepare` makes.

Accelerate passes models to a handler, but neither checkpoints nor the loss scaler of the accelerator, which is created
later, so `join` connects the two. Without a residual and a loss scaler, it may be left out. `save_state` writes each
rank's residual to its own file in the checkpoint's folder `syncline`, those of a second model in `syncline_1`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from syncline.ddp.handle import Handle
from syncline.errors import UsageError
from syncline.exchange import Exchange
from syncline.integrations.followed_model import (
    SINGLE_PROCESS,
    FollowedModel,
    Follower,
    needs,
    only_optimizer,
    refuse_hooks,
)
from syncline.runtime.validation import ddp_of

with needs("accelerate"):
    from accelerate import Accelerator  # type: ignore[import-untyped] # not typed
    from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped]
    from accelerate.utils import DistributedDataParallelKwargs, DistributedType  # type: ignore[import-untyped]

_WITHOUT_DDP = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA", "TP")
"""Distributed types that shard a model, or reduce its gradients without DDP."""
_HOOKS = ("comm_hook", "comm_wrapper", "comm_state_option")
"""Arguments of the handler that are not arguments of DDP."""


class SynclineKwargs(DistributedDataParallelKwargs):  # type: ignore[misc] # not typed
    """A handler whose models exchange their gradients through Syncline.

    Args:
        exchange, plan, quality, allow, network, cache, timeout_s, quiet: As in `syncline.follow`. With neither an
            exchange nor a plan, the model is tuned during its first steps.
        updates, every, warmup, delay, outer: With `updates=True`, the optimizer's updates are exchanged instead of
            gradients. The other settings are those of `syncline.attach`.
        shares: The batches of the ranks, by which gradients or updates are weighted, as in `syncline.attach`. Deal them
            with `DataLoader(batch_sampler=shares.sampler(…))`, and do not pass this loader to `prepare`.
        on_world_size: What `load_state` does with residuals on another number of ranks, as in `Handle.load`.
        **options: Arguments of DistributedDataParallelKwargs.

    Raises:
        UsageError, FileError: An argument is invalid, a file cannot be read, or a hook is passed as well.

    Example:
        >>> kwargs = SynclineKwargs()  # doctest: +SKIP
        >>> accelerator = Accelerator(kwargs_handlers=[kwargs])  # doctest: +SKIP
        >>> kwargs.join(accelerator)  # save_state and load_state now include residuals  # doctest: +SKIP
    """

    def __init__(self, exchange: Exchange | None = None, **options: Any) -> None:
        self._follower = Follower(exchange, options)
        refuse_hooks(options, *_HOOKS[:2])
        super().__init__(**options)
        self._accelerator: Accelerator | None = None
        self.followed: list[FollowedModel] = []

    @property  # type: ignore[misc] # read-only
    def __class__(self) -> Any:
        # Accelerate finds out what a handler is for by its exact class, and compares its values with that class's.
        return DistributedDataParallelKwargs

    @property
    def handles(self) -> list[Handle]:
        """The handles of what is attached, in the order in which the models were prepared."""
        return [handle for followed in self.followed if (handle := followed.handle) is not None]

    @property
    def handle(self) -> Handle | None:
        """The first of `handles`. None before the first training step, and if plain DDP stays."""
        return next(iter(self.handles), None)

    def figures(self) -> dict[str, float]:
        """Return the bytes sent and the time taken by the first model's last step, for `accelerator.log`."""
        return self.followed[0].figures() if self.followed else {}

    def weigh_by_loss(self) -> None:
        """Do not weight gradients by samples, because losses are weighted already."""
        self._follower.settings = dataclasses.replace(self._follower.settings, shares=None)

    def join(self, accelerator: Accelerator) -> SynclineKwargs:
        """Include residuals in this accelerator's checkpoints, use its loss scaler, and return this handler.

        Args:
            accelerator: The accelerator, before `prepare`. If it was created without this handler, this handler takes
                over its arguments for DDP.

        Raises:
            UsageError: The accelerator does not use plain DDP, has another hook, or has prepared a model already.
        """
        kind = accelerator.distributed_type
        if kind in [getattr(DistributedType, name, None) for name in _WITHOUT_DDP]:
            raise UsageError(f"this accelerator uses {kind}: Syncline exchanges the gradients of plain DDP")
        if accelerator._models:
            raise UsageError("this accelerator has prepared a model already: join before prepare")
        self.take_over(accelerator)
        accelerator.register_save_state_pre_hook(lambda models, weights, folder: self._save_state(weights, folder))
        accelerator.register_load_state_pre_hook(lambda models, folder: self.load(folder))
        self._accelerator = accelerator
        if accelerator.num_processes == 1:
            self._follower.print(SINGLE_PROCESS)
        return self

    def take_over(self, accelerator: Accelerator) -> None:
        """Replace the accelerator's DDP handler, and take over its arguments for DDP."""
        replaced = accelerator.ddp_handler
        if replaced is not None and replaced is not self:
            refuse_hooks(vars(replaced), *_HOOKS[:2])
            for name, value in replaced.to_kwargs().items():
                setattr(self, name, value)
        accelerator.ddp_handler = self

    @contextlib.contextmanager
    def synced(self) -> Iterator[None]:
        """Give all models the weights that all ranks agreed on last, inside this context, as `Handle.synced` does.

        Evaluate, and save models, in this context. It does nothing before the first training step, and if gradients
        are exchanged.

        Example:
            >>> with kwargs.synced():  # doctest: +SKIP
            ...     evaluate(model)
        """
        with contextlib.ExitStack() as stack:
            for followed in self.followed:
                stack.enter_context(followed.synced())
            yield

    def _save_state(self, weights: Sequence[dict[str, Any]], folder: str | os.PathLike[str]) -> None:
        """Save with `save_state`, and give it copies of the weights that all ranks agreed on last, for its own file."""
        self.save(folder)
        accelerator = self._accelerator
        if self._follower.settings.updates and accelerator is not None and accelerator.is_local_main_process:
            with self.synced():
                for state in weights:
                    state |= copy.deepcopy(dict(state))  # all at once, so that tied weights stay tied

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the residuals into a checkpoint's folder. All ranks call it, between steps."""
        for index, followed in enumerate(self.followed):
            followed.save(Path(folder, f"syncline_{index}" if index else "syncline"))

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Restore the residuals from a checkpoint's folder. All ranks call it."""
        for index, followed in enumerate(self.followed):
            followed.load(Path(folder, f"syncline_{index}" if index else "syncline"))

    def _optimizer_of(self, model: nn.Module) -> Optimizer:
        prepared = [] if self._accelerator is None else self._accelerator._optimizers
        bare = [o.optimizer if isinstance(o, AcceleratedOptimizer) else o for o in prepared]
        return only_optimizer(bare, ddp_of(model), "pass it to accelerator.prepare")

    def to_dict(self, ignore_keys: Sequence[str] = _HOOKS) -> dict[str, Any]:
        """Return the arguments of DDP only. Accelerate calls it."""
        names = [field.name for field in dataclasses.fields(DistributedDataParallelKwargs)]
        return {name: getattr(self, name) for name in names if name not in ignore_keys}

    def register_comm_hook(self, model: nn.Module) -> None:
        """Follow a model that Accelerate has wrapped. Drop it if it is wrapped again, and all that were released."""
        accelerator = self._accelerator
        if accelerator is None and self._follower.may_have_residual:
            needed = "an exchange with a residual needs the accelerator's checkpoints and loss scaler"
            if self._follower.settings.updates:
                needed = "updates=True needs the accelerator's optimizer, checkpoints and loss scaler"
            raise UsageError(f"{needed}: call SynclineKwargs.join(accelerator) before accelerator.prepare")
        held = None if accelerator is None else {id(prepared) for prepared in accelerator._models}
        for followed in list(self.followed):
            released = held is not None and not held & {id(followed.model), id(followed.model.module)}
            if released or followed.model.module is model.module:
                followed.drop()
                self.followed.remove(followed)
        new = self._follower.follow(model, None if accelerator is None else accelerator.scaler, self._optimizer_of)
        self.followed += [] if new is None else [new]
