"""Lightning: a strategy in place of `"ddp"`.

    trainer = Trainer(strategy=SynclineStrategy(exchange=syncline.OkTopk(density=0.01)), devices=8, num_nodes=4)

It is a subclass of Lightning's own DDP strategy: launching, precision, accumulation and all of DDP's arguments work as
before. With neither an exchange nor a plan, the model is tuned during its first sixty steps.

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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncline.ddp.handle import Handle
from syncline.errors import UsageError
from syncline.exchange import Exchange
from syncline.integrations.synced import Messages, Synced, follow_wrapped, may_have_residual, missing, remove
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.tuning.settings import TuneSettings


def _older_package() -> bool:
    """Whether this script uses Lightning's older package, whose classes differ from the newer one's."""
    if "lightning.pytorch" in sys.modules:
        return False
    return "pytorch_lightning" in sys.modules or importlib.util.find_spec("lightning") is None


try:
    if TYPE_CHECKING or not _older_package():
        from lightning.pytorch import Callback, LightningModule, Trainer
        from lightning.pytorch.strategies import DDPStrategy
    else:
        from pytorch_lightning import Callback, LightningModule, Trainer
        from pytorch_lightning.strategies import DDPStrategy
except ImportError as error:
    raise missing("lightning", error) from error

_KEY = "syncline"
"""Key in a checkpoint for the folder beside it."""
_SUFFIX = ".syncline"


class SynclineStrategy(DDPStrategy):
    """A DDP strategy whose model exchanges its gradients through Syncline.

    Args:
        exchange: The exchange to attach.
        plan: The plan to apply, or its file. With neither an exchange nor a plan, the model is tuned.
        allow: Lossy exchanges that tuning may use, as in `syncline.follow`.
        network: The links, or their file, as in `syncline.follow`.
        on_world_size: What a run that is resumed on another number of ranks does with residuals, as in `Handle.load`.
        timeout_s: Timeout of a collective in seconds, as in `syncline.follow`.
        quiet: Print nothing.
        **ddp_arguments: Arguments of DDPStrategy.

    Raises:
        UsageError: An argument is invalid, or a communication hook is passed as well.
        FileError: The plan or the network cannot be read.

    Example:
        >>> trainer = Trainer(strategy=SynclineStrategy(), devices=8)  # doctest: +SKIP
        >>> trainer.fit(model, batches)  # doctest: +SKIP
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
        self._settings = TuneSettings(
            exchange=exchange,
            plan=plan,
            allow=allow,
            network=network,
            on_world_size=on_world_size,
            timeout_s=timeout_s,
            quiet=quiet,
        ).load_files()
        self._messages = Messages(quiet)
        if ddp_arguments.get("ddp_comm_hook") is not None:
            raise UsageError("ddp_comm_hook: DDP takes one hook, and Syncline needs it: leave yours out")
        super().__init__(**ddp_arguments)
        self.synced: Synced | None = None
        self._resumed: tuple[Path, Mapping[str, Any] | None] | None = None
        """The checkpoint from which the run is resumed, and its entry for the folder beside it."""

    @property
    def handle(self) -> Handle | None:
        """The handle of what is attached. None before the first training step, and if plain DDP stays."""
        return None if self.synced is None else self.synced.handle

    def configure_ddp(self) -> None:
        if self.synced is not None:
            self.synced.drop()
        super().configure_ddp()
        assert self.model is not None  # noqa: S101 - it was wrapped
        scaler = getattr(self.precision_plugin, "scaler", None)
        self.synced = follow_wrapped(self.model, self._settings, self._messages, scaler)
        if self._resumed is not None and self.synced is not None:
            self._load_beside(self.synced, *self._resumed)
        self._resumed = None

    def _load_beside(self, synced: Synced, path: Path, beside: Mapping[str, Any] | None) -> None:
        name = _folder_of(path.resolve()).name if beside is None else beside["folder"]  # `last.ckpt` may be a link
        folders = [parent / name for parent in (path.parent, path.resolve().parent)]
        folder = next((folder for folder in folders if folder.is_dir()), folders[0])
        error = (
            f"{path} was saved with residuals in {folder}, which does not exist: copy that folder too, or pass "
            "on_world_size='reset' to continue without residuals"
        )
        is_required = beside is not None and self._settings.on_world_size != "reset"
        synced.load(folder, None if beside is None else beside["step"], error if is_required else None)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.synced is not None:
            self.synced.model.training = True  # after validation, Lightning resets the module inside DDP, but not DDP
        return super().training_step(*args, **kwargs)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write the checkpoint on rank 0, and the residual of each rank. All ranks call it."""
        if self.synced is not None and "optimizer_states" in checkpoint:  # else only weights are saved
            folder = _folder_of(filepath)
            if "://" in os.fspath(filepath):
                if may_have_residual(self._settings):
                    self._messages.print(f"{filepath} is not a local file: residuals are not saved with it")
            elif self.synced.save(folder):
                checkpoint[_KEY] = {"folder": folder.name, "step": self.synced.step}
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
        if self.synced is not None:
            self.synced.close()
        super().teardown()


class SynclineCallback(Callback):
    """Logs the bytes sent and the time taken by each step, whenever the trainer logs, and prints what is attached.

    Raises:
        UsageError: The trainer's strategy is not a SynclineStrategy. Raised when the trainer is set up.

    Example:
        >>> Trainer(strategy=SynclineStrategy(), callbacks=[SynclineCallback()])  # doctest: +SKIP
    """

    def __init__(self) -> None:
        self._printed = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(trainer.strategy, SynclineStrategy):
            name = type(trainer.strategy).__name__
            raise UsageError(f"SynclineCallback needs Trainer(strategy=SynclineStrategy(…)), but it has {name}")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._printed = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        synced = _synced_of(trainer)
        if synced is None:
            return
        pl_module.log_dict(synced.figures(), rank_zero_only=True)
        if synced.handle is not None and synced.following.done and not self._printed:
            self._printed = True
            if trainer.is_global_zero:
                print(f"syncline: {synced.handle.describe()}", file=sys.stderr)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        synced = _synced_of(trainer)
        if synced is not None and not synced.following.done and trainer.is_global_zero:
            print(f"syncline: {synced.following.describe()}", file=sys.stderr)


def _folder_of(path: str | Path) -> Path:
    return Path(f"{os.fspath(path)}{_SUFFIX}")


def _synced_of(trainer: Trainer) -> Synced | None:
    strategy = trainer.strategy
    return strategy.synced if isinstance(strategy, SynclineStrategy) else None
