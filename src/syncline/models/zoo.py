"""The built-in models, by name. None needs a download.

Batches are random: they have the right shapes and costs, but nothing can be learned from them. `data.py` has real data.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncline.errors import UsageError
from syncline.models import gpt, resnet

Batch = tuple[Tensor, Tensor]
DIGITS = 10
"""Number of classes of the digits that `mlp` and `cnn` classify."""


def mlp() -> nn.Module:
    """Build an MLP with about one million parameters, most of them in the layers whose gradients are ready last."""
    return _named(
        flatten=nn.Flatten(),
        linear1=nn.Sequential(nn.Linear(28 * 28, 640), nn.ReLU()),
        linear2=nn.Sequential(nn.Linear(640, 640), nn.ReLU()),
        linear3=nn.Sequential(nn.Linear(640, 128), nn.ReLU()),
        classify=nn.Linear(128, DIGITS),
    )


def cnn() -> nn.Module:
    """Build a CNN with about 420,000 parameters, and with BatchNorm buffers, which DDP broadcasts in every forward."""
    return _named(
        convolution1=_convolution(1, 32),
        convolution2=_convolution(32, 64),
        flatten=nn.Flatten(),
        linear=nn.Sequential(nn.Linear(64 * 7 * 7, 128), nn.ReLU()),
        classify=nn.Linear(128, DIGITS),
    )


def _named(**layers: nn.Module) -> nn.Sequential:
    """Build a Sequential with named layers: the names appear in profiles, plans and traces."""
    return nn.Sequential(OrderedDict(layers))


def _convolution(channels_in: int, channels_out: int) -> nn.Sequential:
    """Build a convolution that halves the image's side. It has no bias, because BatchNorm has one."""
    convolution = nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(channels_out), nn.ReLU(), nn.MaxPool2d(2))


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
    "mlp": ModelSpec(mlp, _images(1, 28, 28, classes=DIGITS)),
    "cnn": ModelSpec(cnn, _images(1, 28, 28, classes=DIGITS)),
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
