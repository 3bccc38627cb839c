"""Small trainings with Accelerate on real digits, for its tests."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import DataLoader

from frameworks import images, small_net
from syncline.integrations.accelerate import SynclineKwargs

__all__ = ["Accelerator", "DistributedDataParallelKwargs", "Run", "SynclineKwargs"]
images(1)  # read once here, not in every rank


class Run:
    """A model with its accelerator, optimizer and data."""

    def __init__(
        self, *handlers: Any, accumulated: int = 1, joins: bool = True, scaler: GradScaler | None = None
    ) -> None:
        self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=accumulated, kwargs_handlers=list(handlers)
        )
        self.accelerator.scaler = scaler  # on GPUs, Accelerate creates one for fp16
        for handler in handlers:
            if isinstance(handler, SynclineKwargs) and joins:
                handler.join(self.accelerator)
        net = small_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        self.model, self.optimizer, self.batches = self.accelerator.prepare(
            net, optimizer, DataLoader(images(6 * 32), 16)
        )
        self.losses: list[float] = []

    def train(self, first: int = 0, end: int = 6, *, clip: float = 0.0, infinite_at: int | None = None) -> nn.Module:
        """Train on some of the batches. The loss of `infinite_at` is infinite on rank 1."""
        for number, (pixels, labels) in enumerate(self.batches):
            if first <= number < end:
                with self.accelerator.accumulate(self.model):
                    loss = F.cross_entropy(self.model(pixels), labels)
                    infinite = number == infinite_at and self.accelerator.process_index == 1
                    self.accelerator.backward(loss * float("inf") if infinite else loss)
                    if clip and self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), clip)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    self.losses.append(float(loss))
        return self.model.module
