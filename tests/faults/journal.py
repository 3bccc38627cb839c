"""The journal of a rank: one line of JSON per event, complete even if SIGKILL follows.

Times are those of CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from syncline.errors import SynclineError

Entry = dict[str, Any]

_CARRIED = ("ExchangeError: ", "MismatchError: ", "UsageError: ", "FileError: ")
"""Names by which a `SynclineError` is found in the text of DDP's error."""


class Journal:
    """The journal of one rank in one cell."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(_path(folder, rank), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def note(self, event: str, **fields: Any) -> None:
        line = json.dumps({"event": event, "at_s": time.monotonic(), **fields})
        os.write(self._file, f"{line}\n".encode())  # one write to the kernel: complete, or missing

    def raised(self, error: BaseException) -> None:
        text = str(error)
        told = isinstance(error, SynclineError) or (
            isinstance(error, RuntimeError) and any(name in text for name in _CARRIED)
        )
        self.note("raised", type=type(error).__name__, text=text, told=told)


def read(folder: Path, ranks: int) -> list[list[Entry]]:
    """Return the journals by rank, without a last line that was cut short."""
    found = []
    for rank in range(ranks):
        path = _path(folder, rank)
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        found.append([json.loads(line) for line in lines if line.endswith("\n")])
    return found


def _path(folder: Path, rank: int) -> Path:
    return folder / f"journal-{rank}.jsonl"


def hashed(tensors: Iterable[Tensor]) -> str:
    """Return a hash of the bits of all tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest()[:16]
