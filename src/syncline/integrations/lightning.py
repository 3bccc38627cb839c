"""Lightning: a strategy in place of `"ddp"`.

    trainer = Trainer(strategy=SynclineStrategy(exchange=syncline.OkTopk(density=0.01)), devices=8, num_nodes=4)

Rank 0 writes Lightning's checkpoint as one file, but each rank has its own residual. So residuals are saved beside the
checkpoint, in a folder with its name and the suffix `.syncline`, one file per rank. The checkpoint names that folder.
If it was not copied with the checkpoint, resuming raises an error instead of training differently. Removing a
checkpoint removes its folder. An exchange without a residual has no folder, unless tuning found a plan, which is saved
there.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncline.ddp.handle import Handle
from syncline.errors import UsageError
from syncline.exchange import Exchange
from syncline.integrations.followed_model import FollowedModel, Follower, missing, remove, take_arguments

# Lightning has two packages with different classes. Use the one that the script uses.
_OLDER = "lightning.pytorch" not in sys.modules and (
    "pytorch_lightning" in sys.modules or importlib.util.find_spec("lightning") is None
)
try:
    if TYPE_CHECKING or not _OLDER:
        from lightning.pytorch import Callback, LightningModule, Trainer
        from lightning.pytorch.strategies import DDPStrategy
    else:
        from pytorch_lightning import Callback, LightningModule, Trainer
        from pytorch_lightning.strategies import DDPStrategy
except ImportError as error:
    raise missing("lightning", error) from error

_KEY = "syncline"
"""Key in a checkpoint for the folder beside it."""


class SynclineStrategy(DDPStrategy):
    """A DDP strategy whose model exchanges its gradients through Syncline.

    Args:
        exchange: The exchange to attach.
        plan: The plan to apply, or its file. With neither an exchange nor a plan, the model is tuned during its first
            sixty steps.
        on_world_size: What a run that is resumed on another number of ranks does with residuals, as in `Handle.load`.
        allow, network, timeout_s, quiet: As in `syncline.follow`.
        **options: Arguments of DDPStrategy.

    Raises:
        UsageError: An argument is invalid, or a communication hook is passed as well.
        FileError: The plan or the network cannot be read.

    Example:
        >>> trainer = Trainer(strategy=SynclineStrategy(), devices=8)  # doctest: +SKIP
        >>> trainer.fit(model, batches)  # doctest: +SKIP
    """

    def __init__(self, exchange: Exchange | None = None, **options: Any) -> None:
        self._follower = Follower({"exchange": exchange, **take_arguments(options)})
        if options.get("ddp_comm_hook") is not None:
            raise UsageError("ddp_comm_hook: DDP takes one hook, and Syncline needs it: leave yours out")
        super().__init__(**options)
        self.followed: FollowedModel | None = None
        self._resumed: tuple[Path, Mapping[str, Any] | None] | None = None
        """The checkpoint from which the run is resumed, and its entry for the folder beside it."""

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
        self.followed = self._follower.follow(self.model, scaler)
        if self._resumed is not None and self.followed is not None:
            self._load_beside(self.followed, *self._resumed)
        self._resumed = None

    def _load_beside(self, followed: FollowedModel, path: Path, beside: Mapping[str, Any] | None) -> None:
        name = _folder_of(path.resolve()).name if beside is None else beside["folder"]  # `last.ckpt` may be a link
        folders = [parent / name for parent in (path.parent, path.resolve().parent)]
        folder = next((folder for folder in folders if folder.is_dir()), folders[0])
        error = (
            f"{path} was saved with residuals in {folder}, which does not exist: copy that folder too, or pass "
            "on_world_size='reset' to continue without residuals"
        )
        is_required = beside is not None and self._follower.settings.on_world_size != "reset"
        followed.load(folder, None if beside is None else beside["step"], error if is_required else None)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.followed is not None:
            self.followed.model.training = True  # after validation, Lightning resets the module inside DDP, but not DDP
        return super().training_step(*args, **kwargs)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write the checkpoint on rank 0, and the residual of each rank. All ranks call it."""
        if self.followed is not None and "optimizer_states" in checkpoint:  # else only weights are saved
            folder = _folder_of(filepath)
            if "://" in os.fspath(filepath):
                if self._follower.may_have_residual:
                    self._follower.print(f"{filepath} is not a local file: residuals are not saved with it")
            elif self.followed.save(folder):
                checkpoint[_KEY] = {"folder": folder.name, "step": self.followed.step}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, *args: Any, **options: Any) -> dict[str, Any]:
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **options)
        self._resumed = Path(checkpoint_path), checkpoint.get(_KEY)
        return checkpoint

    def remove_checkpoint(self, filepath: str | Path) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero and "://" not in os.fspath(filepath):
            remove(_folder_of(filepath))

    def teardown(self) -> None:
        self._resumed = None  # the checkpoint may have been loaded only for a test
        if self.followed is not None:
            self.followed.close()
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

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        followed = _followed_by(trainer)
        if followed is not None:
            pl_module.log_dict(followed.figures(), rank_zero_only=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        followed = _followed_by(trainer)
        if followed is not None and trainer.is_global_zero:
            handle = followed.handle if followed.following.done else None
            print(f"syncline: {(handle or followed.following).describe()}", file=sys.stderr)


def _folder_of(path: str | Path) -> Path:
    return Path(f"{os.fspath(path)}.syncline")


def _followed_by(trainer: Trainer) -> FollowedModel | None:
    return trainer.strategy.followed if isinstance(trainer.strategy, SynclineStrategy) else None
