"""The built-in models, by name. None needs a download.

Batches are random: they have the right shapes and costs, but nothing can be learned from them. `data.py` has real data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncline.errors import UsageError
from syncline.models import cnn, gpt, resnet

Batch = tuple[Tensor, Tensor]


class ModelSpec(NamedTuple):
    """How to build a model and its batches."""

    build: Callable[[], nn.Module]
    make_batch: Callable[[int, torch.Generator | None], Batch]


def _images(*shape: int, classes: int) -> Callable[[int, torch.Generator | None], Batch]:
    def make(batch_size: int, generator: torch.Generator | None) -> Batch:
        inputs = torch.randn(batch_size, *shape, generator=generator)
        return inputs, torch.randint(classes, (batch_size,), generator=generator)

    return make


def _bytes(batch_size: int, generator: torch.Generator | None) -> Batch:
    tokens = torch.randint(gpt.VOCABULARY, (batch_size, gpt.CONTEXT + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


MODELS: dict[str, ModelSpec] = {
    "mlp": ModelSpec(cnn.mlp, _images(1, 28, 28, classes=cnn.CLASSES)),
    "cnn": ModelSpec(cnn.cnn, _images(1, 28, 28, classes=cnn.CLASSES)),
    # 64×64 instead of ImageNet's 224×224: all 161 gradients, at a cost that suits a laptop's CPU.
    "resnet50": ModelSpec(resnet.resnet50, _images(3, 64, 64, classes=1000)),
    "gpt-small": ModelSpec(gpt.GPT, _bytes),
}


def check_name(name: str) -> None:
    """Raise `UsageError` if no model has this name."""
    if name not in MODELS:
        raise UsageError(f"no model is called {name}; known: {', '.join(MODELS)}")


def build_model(name: str) -> nn.Module:
    """Build a model with random weights from torch's global generator."""
    check_name(name)
    return MODELS[name].build()


def make_batch(name: str, batch_size: int, generator: torch.Generator | None = None) -> Batch:
    """Make random inputs and targets for a model, on the CPU."""
    return MODELS[name].make_batch(batch_size, generator)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy over the last dimension: the class of an image, or of each byte of a text."""
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())
