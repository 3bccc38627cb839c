"""Small trainings with Lightning on real digits, for its tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from frameworks import images, small_net
from syncline.integrations.lightning import SynclineCallback, SynclineStrategy

__all__ = ["DDPStrategy", "Digits", "MixedPrecision", "SynclineCallback", "SynclineStrategy", "after_each_epoch", "fit"]
images(1)  # read once here, not in every rank


class Digits(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = small_net()
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("right", (self.net(batch[0]).argmax(-1) == batch[1]).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def fit(
    strategy: DDPStrategy, *, epochs: int = 2, resume: Path | None = None, ranks: int = 2, **options: Any
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
    model = Digits()
    trainer.fit(model, DataLoader(images(48 * ranks), 16), DataLoader(images(16 * ranks), 16), ckpt_path=resume)
    return model


def after_each_epoch(folder: Path, **options: Any) -> dict[str, Any]:
    callback = ModelCheckpoint(folder, filename="{step}", **{"save_top_k": -1, **options})
    return {"enable_checkpointing": True, "callbacks": [callback]}
