"""Lightning: a strategy in place of `"ddp"`.

Rank 0 writes Lightning's checkpoint as one file, but each rank has its own residual. So residuals are saved beside the
checkpoint, in a folder with its name and the suffix `.syncline`, one file per rank, with the plan that tuning found. If
the folder was not copied with the checkpoint, which names it, resuming raises an error instead of training differently.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from syncline.ddp.handle import Handle
from syncline.errors import UsageError
from syncline.exchange import Exchange
from syncline.integrations.followed_model import FollowedModel, Follower, needs, only_optimizer, refuse_hooks, remove

# Lightning has two packages with different classes. Use the one that the script uses.
_OLDER = "lightning.pytorch" not in sys.modules and (
    "pytorch_lightning" in sys.modules or importlib.util.find_spec("lightning") is None
)
with needs("lightning"):
    if TYPE_CHECKING or not _OLDER:
        from lightning.pytorch import Callback, LightningModule, Trainer
        from lightning.pytorch.strategies import DDPStrategy
    else:
        from pytorch_lightning import Callback, LightningModule, Trainer
        from pytorch_lightning.strategies import DDPStrategy


class SynclineStrategy(DDPStrategy):
    """A DDP strategy whose model exchanges its gradients through Syncline.

    Args:
        exchange, plan, quality, allow, network, cache, timeout_s, quiet: As in `syncline.follow`. With neither an
            exchange nor a plan, the model is tuned during its first steps.
        updates, every, warmup, delay, outer: With `updates=True`, the optimizer's updates are exchanged instead of
            gradients. The other settings are those of `syncline.attach`.
        shares: The batches of the ranks, by which gradients or updates are weighted, as in `syncline.attach`. Deal them
            with `DataLoader(batch_sampler=shares.sampler(…))`, and pass `use_distributed_sampler=False` to the Trainer.
        on_world_size: What a run that is resumed on another number of ranks does with residuals, as in `Handle.load`.
        **options: Arguments of DDPStrategy.

    Raises:
        UsageError, FileError: An argument is invalid, a file cannot be read, or a hook is passed as well.

    Example:
        >>> trainer = Trainer(strategy=SynclineStrategy(), devices=8)  # doctest: +SKIP
        >>> trainer.fit(model, batches)  # doctest: +SKIP
    """

    def __init__(self, exchange: Exchange | None = None, **options: Any) -> None:
        self._follower = Follower(exchange, options)
        refuse_hooks(options, "ddp_comm_hook")
        super().__init__(**options)
        self.followed: FollowedModel | None = None
        self._resumed: tuple[Path, Mapping[str, Any]] | None = None
        """The checkpoint from which the run is resumed, and its entry for the folder beside it, if any."""
        self._validation = contextlib.ExitStack()  # holds the weights that all ranks agreed on

    @property
    def handle(self) -> Handle | None:
        """The handle of what is attached. None before the first training step, and if plain DDP stays."""
        return None if self.followed is None else self.followed.handle

    def configure_ddp(self) -> None:
        if self.followed is not None:
            self.followed.drop()
        super().configure_ddp()
        assert self.model is not None  # noqa: S101 - it was wrapped
        scaler = getattr(self.precision_plugin, "scaler", None)
        self.followed = self._follower.follow(self.model, scaler, self._optimizer_of)
        if self._resumed is not None and self.followed is not None:
            self._load_beside(self.followed, *self._resumed)
        self._resumed = None

    def _optimizer_of(self, model: DistributedDataParallel) -> Optimizer:
        return only_optimizer(self.optimizers, model, "return one from configure_optimizers")

    def _load_beside(self, followed: FollowedModel, path: Path, beside: Mapping[str, Any]) -> None:
        name = beside.get("folder", _folder_of(path.resolve()).name)  # `last.ckpt` may be a link
        folders = [parent / name for parent in (path.parent, path.resolve().parent)]
        folder = next((folder for folder in folders if folder.is_dir()), folders[0])
        error = None
        if beside and self._follower.settings.on_world_size != "reset":
            advice = "copy that folder too, or pass on_world_size='reset' to continue without residuals"
            error = f"{path} was saved with residuals in {folder}, which does not exist: {advice}"
        followed.load(folder, beside.get("step"), error)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write the checkpoint on rank 0, and the residual of each rank. All ranks call it."""
        if self.followed is not None and "optimizer_states" in checkpoint:  # else only weights are saved
            folder = _folder_of(filepath)
            if "://" in os.fspath(filepath):
                if self._follower.may_have_residual:
                    self._follower.print(f"{filepath} is not a local file: residuals are not saved with it")
            elif self.followed.save(folder):
                checkpoint["syncline"] = {"folder": folder.name, "step": self.followed.step}
        # The checkpoint's tensors are the model's own, so the weights that the model has now are written.
        with contextlib.nullcontext() if self.followed is None else self.followed.synced():
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, *args: Any, **options: Any) -> dict[str, Any]:
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **options)
        resumed = Path(checkpoint_path), checkpoint.get("syncline", {})
        if self.followed is None or self.followed.has_ended:
            self._resumed = resumed
        else:  # in the middle of a run, as the learning rate finder does
            self._load_beside(self.followed, *resumed)
        return checkpoint

    def on_validation_start(self) -> None:
        """Validate the weights that all ranks agreed on last."""
        super().on_validation_start()
        if self.followed is not None:
            self._validation.enter_context(self.followed.synced())

    def on_validation_end(self) -> None:
        self._validation.close()
        super().on_validation_end()

    def remove_checkpoint(self, filepath: str | Path) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero and "://" not in os.fspath(filepath):
            remove(_folder_of(filepath))

    def teardown(self) -> None:
        self._resumed = None  # the checkpoint may have been loaded only for a test
        self._validation.close()
        if self.followed is not None:
            self.followed.close()
            self.followed.end()
        super().teardown()


class SynclineCallback(Callback):
    """Logs the bytes sent and the time taken by each step, whenever the trainer logs, and prints what was attached.

    Raises:
        UsageError: The trainer's strategy is not a SynclineStrategy. Raised when the trainer is set up.

    Example:
        >>> Trainer(strategy=SynclineStrategy(), callbacks=[SynclineCallback()])  # doctest: +SKIP
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(trainer.strategy, SynclineStrategy):
            name = type(trainer.strategy).__name__
            raise UsageError(f"SynclineCallback needs Trainer(strategy=SynclineStrategy(…)), but it has {name}")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any) -> None:
        if (followed := cast(SynclineStrategy, trainer.strategy).followed) is not None:
            pl_module.log_dict(followed.figures(), rank_zero_only=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        followed = cast(SynclineStrategy, trainer.strategy).followed
        if followed is not None and trainer.is_global_zero:
            handle = followed.handle if followed.following.done else None
            print(f"syncline: {(handle or followed.following).describe()}", file=sys.stderr)


def _folder_of(path: str | Path) -> Path:
    return Path(f"{os.fspath(path)}.syncline")
