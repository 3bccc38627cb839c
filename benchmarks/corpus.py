"""Real text for the GPT of the quality study, from the Python files of this machine."""

from __future__ import annotations

import functools
import hashlib
import sysconfig
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from syncline.errors import UsageError
from syncline.models.data import library_text

CORPORA = ("packages", "library")
"""Installed packages with the standard library, or the standard library alone, which is small."""
_TRAIN_BYTES, _HELD_OUT_BYTES = 64 << 20, 4 << 20
_LARGEST_FILE = 300_000
"""Larger files are mostly tables that a program has written."""


class Corpus(NamedTuple):
    """Bytes of text, as tensors, and a digest of all of them."""

    train: Tensor
    held_out: Tensor
    digest: str


@functools.cache
def corpus(name: str) -> Corpus:
    """Return the text of a corpus, or of a file that `write_corpus` wrote.

    A corpus depends on the packages of this machine, so results must contain its digest.
    """
    if name == "library":
        parts = [np.frombuffer(part, dtype=np.uint8) for part in library_text()]
    elif name == "packages":
        parts = [np.frombuffer(part, dtype=np.uint8) for part in _packages_text()]
    else:
        try:
            with np.load(name, allow_pickle=False) as arrays:
                parts = [arrays["train"], arrays["held_out"]]
        except (OSError, ValueError, KeyError) as error:
            known = f"pass {' or '.join(CORPORA)}, or a file that --write-text wrote"
            raise UsageError(f"--text {name}: cannot be read ({error}); {known}") from error
    digest = hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()[:16]
    train, held_out = (torch.from_numpy(part.copy()) for part in parts)
    return Corpus(train, held_out, digest)


def write_corpus(name: str, path: Path) -> None:
    """Write a corpus to a file, for machines with other packages, or for other processes, which read it faster."""
    text = corpus(name)
    np.savez_compressed(path, train=text.train.numpy(), held_out=text.held_out.numpy())


def _packages_text() -> tuple[bytes, bytes]:
    """Return the Python files of installed packages and of the standard library: text to train on, and held out.

    Files come in the order of a hash of their path, so that a part of them is a sample of all. One file in 16 is held
    out. A file whose content was there before is skipped, because packages contain copies of others.
    """
    paths = sysconfig.get_paths()
    files = set[tuple[int, str, Path]]()
    for folder in dict.fromkeys((paths["purelib"], paths["platlib"], paths["stdlib"])):
        root = Path(folder)
        for path in root.rglob("*.py"):
            name = path.relative_to(root).as_posix()
            if "-packages/" not in name:  # those of the standard library's folder are in the other roots
                files.add((zlib.crc32(name.encode()), name, path))
    parts, limits = (bytearray(), bytearray()), (_TRAIN_BYTES, _HELD_OUT_BYTES)
    seen = set[bytes]()
    for number, _, path in sorted(files):
        side = int(number % 16 == 0)
        if len(parts[side]) >= limits[side] or not 0 < path.stat().st_size <= _LARGEST_FILE:
            continue
        text = path.read_bytes()
        digest = hashlib.sha256(text).digest()
        if digest not in seen:
            seen.add(digest)
            parts[side].extend(text[: limits[side] - len(parts[side])])
    return bytes(parts[0]), bytes(parts[1])
