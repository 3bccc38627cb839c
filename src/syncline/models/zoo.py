"""The built-in models, by name. None needs a download.

Batches are random: they have the right shapes and costs, but nothing can be learned from them. `data.py` has real data.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncline.errors import UsageError
from syncline.models import gpt, resnet

Batch = tuple[Tensor, Tensor]
DIGITS = 10  # classes, of `mlp` and `cnn`


def mlp() -> nn.Module:
    """Build an MLP with about one million parameters, most of them in the layers whose gradients are ready last."""
    widths = {"linear1": (28 * 28, 640), "linear2": (640, 640), "linear3": (640, 128)}
    hidden = {name: nn.Sequential(nn.Linear(*width), nn.ReLU()) for name, width in widths.items()}
    return _named(flatten=nn.Flatten(), **hidden, classify=nn.Linear(128, DIGITS))


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


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "mlp": (mlp, (1, 28, 28), DIGITS),
    "cnn": (cnn, (1, 28, 28), DIGITS),
    # 64×64 instead of ImageNet's 224×224: all 161 gradients, at a cost that suits a laptop's CPU.
    "resnet50": (resnet.resnet50, (3, 64, 64), 1000),
    "gpt-small": (gpt.GPT, (), gpt.VOCABULARY),
}
"""How to build each model, the shape of an image, which is empty for bytes of text, and the number of classes."""


def check_name(name: str, advice: str = "") -> None:
    """Raise `UsageError` if no model has this name."""
    if name not in MODELS:
        raise UsageError(f"no model is called {name}; known: {', '.join(MODELS)}{advice}")


def build_model(name: str) -> nn.Module:
    """Build a model with random weights from torch's global generator."""
    check_name(name)
    return MODELS[name][0]()


def make_batch(name: str, batch_size: int, generator: torch.Generator | None = None) -> Batch:
    """Make random inputs and targets for a model, on the CPU."""
    _, shape, classes = MODELS[name]
    if not shape:
        tokens = torch.randint(classes, (batch_size, gpt.CONTEXT + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    inputs = torch.randn(batch_size, *shape, generator=generator)
    return inputs, torch.randint(classes, (batch_size,), generator=generator)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy over the last dimension: the class of an image, or of each byte of a text."""
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())
