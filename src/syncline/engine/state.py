"""What an exchange keeps, in files: one per rank, safetensors, with what they belong to in their headers.

A file is replaced in one step, so there is the old one or the new one and never a half. What is kept sums up to what is
still to be applied; so when the number of ranks changes it can be dealt anew: a rank takes over what some of the old
ones kept, or an equal share of what one of them kept. Nothing is lost and nothing is applied twice.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from syncline.errors import UsageError
from syncline.files import FileError, write_bytes

SCHEMA = 1
_ABOUT = "syncline"
_NAME = re.compile(r"rank-(\d{5})-of-(\d{5})\.safetensors")

Tensors = Mapping[str, Mapping[str, Tensor]]


def file_of(folder: Path, rank: int, ranks: int) -> Path:
    return folder / f"rank-{rank:05d}-of-{ranks:05d}.safetensors"


def save_state(path: Path, state: Mapping[str, Any]) -> None:
    """A handle's state to one file."""
    about = {field: value for field, value in state.items() if field != "tensors"}
    flat = {
        f"{kind}/{name}": tensor.detach().cpu().contiguous()
        for name, kinds in state["tensors"].items()
        for kind, tensor in kinds.items()
    }
    try:
        data = safetensors.torch.save(flat, {_ABOUT: msgspec.json.encode(about).decode()})
    except (ValueError, TypeError) as error:
        raise FileError(f"{path}: not written: {error}") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, data)


def load_state(path: Path) -> dict[str, Any]:
    """What `save_state` wrote, checked for being that; what it belongs to is the handle's to check."""
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:
            header = file.metadata() or {}
            flat: dict[str, Tensor] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
    except FileNotFoundError as error:
        raise FileError(f"{path}: there is no such file") from error
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}") from error
    except safetensors.SafetensorError as error:
        raise FileError(f"{path}: is not a complete safetensors file: {error}") from error
    try:
        about = msgspec.json.decode(header[_ABOUT], type=dict[str, Any])
    except (KeyError, msgspec.DecodeError) as error:
        raise FileError(f"{path}: holds tensors, but not what an exchange keeps: was another file meant?") from error
    tensors: dict[str, dict[str, Tensor]] = {}
    for key, tensor in flat.items():
        kind, slash, name = key.partition("/")
        if not slash or not torch.isfinite(tensor).all():
            problem = "is not finite" if slash else "is no parameter's"
            raise FileError(f"{path}: {key} {problem}: take an earlier checkpoint")
        tensors.setdefault(name, {})[kind] = tensor
    return {**about, "tensors": tensors}


def ranks_saved(folder: Path) -> int:
    """How many ranks saved the state in this folder; all of their files must be there."""
    found: dict[int, set[int]] = {}
    try:
        names = [entry.name for entry in folder.iterdir()]
    except OSError as error:
        raise FileError(f"{folder}: cannot be read: {error.strerror or error}") from error
    for match in filter(None, map(_NAME.fullmatch, names)):
        found.setdefault(int(match[2]), set()).add(int(match[1]))
    if not found:
        raise FileError(f"{folder}: holds no state of an exchange; it is written by handle.save(folder)")
    if len(found) > 1:
        sizes = " and ".join(map(str, sorted(found)))
        raise FileError(f"{folder}: holds states of {sizes} ranks: leave only those of one run")
    ((ranks, present),) = found.items()
    missing = sorted(set(range(ranks)) - present)
    if missing:
        raise FileError(f"{folder}: the states of ranks {missing} of {ranks} are missing")
    return ranks


def shares(rank: int, ranks: int, saved: int) -> dict[int, float]:
    """Whose state this rank takes over, and how much of it, when `saved` ranks become `ranks`.

    Over all ranks every old one is taken over once in all, so the sum of what is kept stays what it was.
    """
    if ranks <= saved:
        return {old: 1.0 for old in range(saved) if old % ranks == rank}
    old = rank % saved
    return {old: 1 / len([new for new in range(ranks) if new % saved == old])}


def dealt(states: Mapping[int, Tensors], parts: Mapping[int, float]) -> dict[str, dict[str, Tensor]]:
    """The parts of some ranks' states, added up."""
    total: dict[str, dict[str, Tensor]] = {}
    for old, part in parts.items():
        for name, kinds in states[old].items():
            mine = total.setdefault(name, {})
            for kind, tensor in kinds.items():
                mine[kind] = tensor * part + mine[kind] if kind in mine else tensor * part
    return total


def folder_of(path: str | os.PathLike[str]) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise UsageError(f"the state's folder is {path!r}: pass a path")
    return Path(path)
