"""ResNet-50 v1.5 for ImageNet's 1,000 classes: the 3×3 convolution of a block has the stride.

He, Zhang, Ren, Sun: Deep Residual Learning for Image Recognition, CVPR 2016. It has 25,557,032 parameters in 161
tensors, many of them tiny (BatchNorm) and few large, so that fusing gradients matters. The sides of images must be
multiples of 32.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

# For each stage: the width inside a block, the number of blocks, and the stride of the first.
STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
EXPANSION = 4


class Bottleneck(nn.Module):
    """Convolutions: 1×1 down to `width`, 3×3, and 1×1 up to four times the width, added to the input."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = width * EXPANSION
        self.body = nn.Sequential(
            *_normed(channels, width, kernel=1),
            nn.ReLU(inplace=True),
            *_normed(width, width, kernel=3, stride=stride),
            nn.ReLU(inplace=True),
            *_normed(width, out, kernel=1),
        )
        same = stride == 1 and channels == out
        self.shortcut = nn.Identity() if same else nn.Sequential(*_normed(channels, out, kernel=1, stride=stride))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet50(classes: int = 1000) -> nn.Module:
    parts: dict[str, nn.Module] = {"stem": nn.Sequential(*_normed(3, 64, kernel=7, stride=2), nn.ReLU(inplace=True))}
    parts["pool"] = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
    channels = 64
    for number, (width, count, stride) in enumerate(STAGES, start=1):
        first, channels = Bottleneck(channels, width, stride), width * EXPANSION
        parts[f"stage{number}"] = nn.Sequential(first, *(Bottleneck(channels, width, 1) for _ in range(count - 1)))
    parts |= {"average": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "classify": nn.Linear(channels, classes)}
    model = nn.Sequential(OrderedDict(parts))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


def _normed(channels_in: int, channels_out: int, kernel: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    convolution = nn.Conv2d(channels_in, channels_out, kernel, stride, padding=kernel // 2, bias=False)
    return convolution, nn.BatchNorm2d(channels_out)
