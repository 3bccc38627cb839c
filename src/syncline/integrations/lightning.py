"""Lightning: a strategy in place of `"ddp"`.

    trainer = Trainer(strategy=SynclineStrategy(exchange=syncline.OkTopk(density=0.01)), devices=8, num_nodes=4)

It is Lightning's own DDP strategy: launching, precision, accumulation and all of DDP's arguments are as they were. With
neither an exchange nor a plan, the model is tuned from its first sixty steps.

Lightning's checkpoint is one file, which rank 0 writes, and every rank keeps something else. So what ranks keep is
saved beside it, in a folder with the checkpoint's name and `.syncline`: a file for each rank. The checkpoint knows of
that folder: where it was left behind when the checkpoint was copied, resuming is refused and not silently different.
A checkpoint that is removed takes its folder along. What keeps nothing (all that is lossless) leaves no folder, or one
with the plan that tuning has found.
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
from syncline.integrations.synced import Asked, Synced, joined, missing, remove
from syncline.records.network import Network
from syncline.records.plan import Plan


def _older_package() -> bool:
    """Whether this script uses Lightning under its other name: the two do not know each other's classes."""
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
"""In a checkpoint: what was saved beside it."""
_SUFFIX = ".syncline"


class SynclineStrategy(DDPStrategy):
    """DDP that exchanges gradients through `exchange`, or as `plan` says, or as tuning finds best.

    `allow`, `network` and `timeout_s` are as for `syncline.follow`; `on_world_size` says what a run does that is
    resumed on another number of ranks, as for `Handle.load`; everything else is DDPStrategy's.
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
        if ddp_arguments.get("ddp_comm_hook") is not None:
            raise UsageError("ddp_comm_hook: DDP takes one hook, and that is Syncline's: leave yours out")
        super().__init__(**ddp_arguments)
        self.synced: Synced | None = None
        self._resumed: tuple[Path, Mapping[str, Any] | None] | None = None
        """The checkpoint, and what it knows of what was saved beside it."""

    @property
    def handle(self) -> Handle | None:
        """Of what is attached to the model; None before its first training step, and where plain DDP is best."""
        return None if self.synced is None else self.synced.handle

    def configure_ddp(self) -> None:
        if self.synced is not None:
            self.synced.drop()
        super().configure_ddp()
        assert self.model is not None  # noqa: S101 - it was wrapped
        self.synced = joined(self.model, self._asked, getattr(self.precision_plugin, "scaler", None))
        if self._resumed is not None and self.synced is not None:
            self._go_on(self.synced, *self._resumed)
        self._resumed = None

    def _go_on(self, synced: Synced, path: Path, beside: Mapping[str, Any] | None) -> None:
        name = _folder_of(path.resolve()).name if beside is None else beside["folder"]  # `last.ckpt` may be a link
        folders = [place / name for place in (path.parent, path.resolve().parent)]
        folder = next((folder for folder in folders if folder.is_dir()), folders[0])
        refusal = (
            f"{path} was saved with what its ranks kept, in {folder}, which is not there: copy it, too, or pass "
            "on_world_size='reset' to go on without"
        )
        must_be_there = beside is not None and self._asked.on_world_size != "reset"
        synced.load(folder, None if beside is None else beside["step"], refusal if must_be_there else None)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.synced is not None:
            self.synced.model.training = True  # after a validation, Lightning puts back what is inside DDP, not DDP
        return super().training_step(*args, **kwargs)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """All ranks call it: rank 0 writes the checkpoint, every rank what it keeps."""
        if self.synced is not None and "optimizer_states" in checkpoint:  # or only weights are wanted
            folder = _folder_of(filepath)
            if "://" in os.fspath(filepath):
                if self._asked.may_keep:
                    self._asked.say(f"{filepath} is no local file: what ranks keep is not saved with it")
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
        self._resumed = None  # a checkpoint that was only tested
        if self.synced is not None:
            self.synced.close()
        super().teardown()


class SynclineCallback(Callback):
    """Logs what each step sent and how long that took, whenever the trainer logs; and says what was attached."""

    def __init__(self) -> None:
        self._told = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(trainer.strategy, SynclineStrategy):
            name = type(trainer.strategy).__name__
            raise UsageError(f"SynclineCallback needs Trainer(strategy=SynclineStrategy(…)), and this one is {name}")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._told = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        synced = _synced_of(trainer)
        if synced is None:
            return
        pl_module.log_dict(synced.figures(), rank_zero_only=True)
        if synced.handle is not None and synced.following.done and not self._told:
            self._told = True
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
