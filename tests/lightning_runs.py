"""Small trainings with Lightning on real digits, for its tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from frameworks import fingerprint, images, small_net
from syncline.integrations.lightning import SynclineCallback, SynclineStrategy

__all__ = ["LearningRateFinder", "MixedPrecision", "SynclineCallback"]  # for the tests
images(1)  # read once here, not in every rank


class Digits(pl.LightningModule):
    def __init__(self, infinite_at: int | None = None) -> None:
        super().__init__()
        self.net, self.lr = small_net(), 0.05
        self.losses: list[float] = []
        self.validated: list[str] = []  # digests of weights
        self.sent_bytes: dict[int, float] = {}  # by number of steps
        self.infinite_at = infinite_at  # the batch whose loss is infinite on rank 1

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        if self.global_rank == 1 and len(self.losses) == self.infinite_at:
            loss = loss * float("inf")
        self.losses.append(float(loss.detach()))
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        if isinstance(self.trainer.strategy, SynclineStrategy) and (handle := self.trainer.strategy.handle) is not None:
            self.sent_bytes[handle.stats().steps] = handle.scalars().get("syncline/sent_bytes", 0.0)

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.validated.append(fingerprint(self))
        self.log("right", (self.net(batch[0]).argmax(-1) == batch[1]).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class Manual(Digits):
    """The same training, with Lightning's manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], index: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, index))
        optimizer.step()


def loaders(ranks: int = 2) -> tuple[DataLoader[Any], DataLoader[Any]]:
    return DataLoader(images(48 * ranks), 16), DataLoader(images(16 * ranks), 16)


def fit(
    strategy: DDPStrategy,
    *,
    model: Digits | None = None,
    epochs: int = 2,
    resume: Path | None = None,
    ranks: int = 2,
    batches: DataLoader[Any] | None = None,
    **options: Any,
) -> Digits:
    """Train on three batches per rank and epoch, with a validation before the first epoch and after each."""
    options = {"enable_checkpointing": False, "logger": False, **options}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        max_epochs=epochs,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    model = model or Digits()
    usual, validation = loaders(ranks)
    trainer.fit(model, batches or usual, validation, ckpt_path=resume)
    return model


def after_each_epoch(folder: Path, **options: Any) -> dict[str, Any]:
    callback = ModelCheckpoint(folder, filename="{step}", **{"save_top_k": -1, **options})
    return {"enable_checkpointing": True, "callbacks": [callback]}
