"""Two small classifiers of 28×28 digits: an MLP, and a CNN with BatchNorm."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

CLASSES = 10


def mlp() -> nn.Module:
    """Build an MLP with about one million parameters, most of them in the layers whose gradients are ready last."""
    return _named(
        flatten=nn.Flatten(),
        linear1=nn.Sequential(nn.Linear(28 * 28, 640), nn.ReLU()),
        linear2=nn.Sequential(nn.Linear(640, 640), nn.ReLU()),
        linear3=nn.Sequential(nn.Linear(640, 128), nn.ReLU()),
        classify=nn.Linear(128, CLASSES),
    )


def cnn() -> nn.Module:
    """Build a CNN with about 420,000 parameters, and with BatchNorm buffers, which DDP broadcasts in every forward."""
    return _named(
        convolution1=_convolution(1, 32),
        convolution2=_convolution(32, 64),
        flatten=nn.Flatten(),
        linear=nn.Sequential(nn.Linear(64 * 7 * 7, 128), nn.ReLU()),
        classify=nn.Linear(128, CLASSES),
    )


def _named(**layers: nn.Module) -> nn.Sequential:
    """Build a Sequential with named layers: the names appear in profiles, plans and traces."""
    return nn.Sequential(OrderedDict(layers))


def _convolution(channels_in: int, channels_out: int) -> nn.Sequential:
    """Build a convolution that halves the image's side. It has no bias, because BatchNorm has one."""
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )
