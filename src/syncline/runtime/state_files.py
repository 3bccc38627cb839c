"""Write and read the files of a checkpoint: one safetensors file per rank, with metadata and checksums in its header.

A save has three phases, and all ranks meet after each: every rank writes a draft, renames it to the final name, and
rank 0 removes the files of other world sizes. Writing and renaming are atomic. So if a rank cannot write, the previous
checkpoint is unchanged, and if the whole job crashes at any moment, the folder contains a complete set of files and
drafts: the old one until the last draft is written, and then the new one. Loading takes the set with the most steps.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from syncline.dist.agreement import first_difference, flatten
from syncline.errors import UsageError
from syncline.files import FileError, one_line, write_bytes

SCHEMA = 2
"""Version of the file format. Version 1 had no checksums."""
_MOST_RANKS = 99_999
"""The largest world size that fits in a file name."""
_ABOUT, _CHECKSUM, _SEAL = HEADER = ("syncline", "checksum", "seal")
"""Keys of a file's metadata: the fields of a state as JSON, the checksum of its tensors (with their names, types and
shapes), and the checksum of these two texts. They detect damage, which safetensors does not, but not forgery."""
_DRAFT = ".new"
_NAME = re.compile(rf"rank-(\d{{5}})-of-(\d{{5}})\.safetensors(?:{re.escape(_DRAFT)})?")
_WRITTEN_BY = "pass the folder that save(folder) wrote"
_EARLIER = "load an earlier checkpoint"

Tensors = Mapping[str, Mapping[str, Tensor]]
"""Tensors by parameter name, then by kind."""


class State(msgspec.Struct, frozen=True):
    """The state of an exchange on one rank."""

    schema: int
    exchange: dict[str, Any]
    rank: Annotated[int, msgspec.Meta(ge=0, lt=_MOST_RANKS)]
    world_size: Annotated[int, msgspec.Meta(ge=1, le=_MOST_RANKS)]
    levels: str | None
    steps: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    buckets: list[list[str]]
    tensors: dict[str, dict[str, Tensor]]

    def __post_init__(self) -> None:
        if self.rank >= self.world_size:
            raise ValueError(f"rank is {self.rank}, but world_size is only {self.world_size}")


def folder_of(path: str | os.PathLike[str]) -> Path:
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(text, str) or not text or not text.isprintable():
        raise UsageError(f"the checkpoint folder is {text!r}: pass the path of a folder")
    return Path(text)


def problem_of(state: object, remedy: str) -> str | None:
    """Return why `state` is not a valid exchange state, with the remedy, or None if it is valid."""
    if isinstance(state, Mapping) and state.get("schema", SCHEMA) != SCHEMA:  # before the fields, which may differ
        return (
            f"the checkpoint has schema {state['schema']!r}, but this version of syncline reads schema {SCHEMA}: load "
            "it with the version that saved it"
        )
    try:
        valid = msgspec.convert(state, State)
        msgspec.json.encode(msgspec.structs.replace(valid, tensors={}))
    except (AttributeError, RecursionError, TypeError, ValueError) as error:
        text, _, where = str(error).partition(" - at `$.")
        field = f"{where.rstrip('`')}: " if where else ""
        text = one_line(f"{field}{text[:1].lower()}{text[1:].replace('`', '')}")
        return f"this is not a valid exchange state: {text}: {remedy}"
    return None


def sealed(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """Return the content of a file. Tensors are named KIND/PARAMETER, like `residual/layer.weight`."""
    text, checksum = msgspec.json.encode(about).decode(), _checksum_of(tensors)
    return safetensors.torch.save(dict(tensors), {_ABOUT: text, _CHECKSUM: checksum, _SEAL: seal_of(text, checksum)})


def _checksum_of(tensors: Mapping[str, Tensor]) -> str:
    checksum = hashlib.sha256()
    for key, tensor in sorted(tensors.items()):
        label = f"{key}\n{tensor.dtype}\n{list(tensor.shape)}".encode()
        checksum.update(len(label).to_bytes(8, "little") + label)
        checksum.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return checksum.hexdigest()


def seal_of(about: str, checksum: str) -> str:
    return hashlib.sha256(f"{checksum}\n{about}".encode()).hexdigest()


def write_draft(folder: Path, state: Mapping[str, Any]) -> Path:
    """Write a rank's state to a draft, which `put_in_place` renames, and return the path of the draft."""
    path = folder / f"rank-{state['rank']:05d}-of-{state['world_size']:05d}.safetensors"
    about = {field: value for field, value in state.items() if field != "tensors"}
    flat = {
        f"{kind}/{name}": tensor.detach().cpu().contiguous()
        for name, kinds in state["tensors"].items()
        for kind, tensor in kinds.items()
    }
    try:
        data = sealed(about, flat)
    except (ValueError, TypeError) as error:
        raise FileError(f"{path}: not written: {one_line(str(error))}") from error
    try:
        missing = [parent for parent in folder.parents if not parent.exists()]
        for directory in (*reversed(missing), folder):
            directory.mkdir(mode=0o755, exist_ok=True)
    except OSError as error:
        raise FileError(f"{folder}: cannot be created: {error.strerror or error}: save to another path") from error
    if path.is_dir():
        raise FileError(f"{path}: is a folder, not a state file: remove it, or save to another path")
    draft = path.with_name(path.name + _DRAFT)
    try:
        write_bytes(draft, data, through_links=False)
    except FileError as error:
        raise FileError(f"{error}: save to another path; the previous checkpoint is unchanged") from error
    return draft


def put_in_place(draft: Path) -> None:
    path = draft.with_name(draft.name.removesuffix(_DRAFT))
    try:
        draft.replace(path)
    except OSError as error:
        raise FileError(f"{path}: cannot be replaced: {error.strerror or error}: save to another path") from error


def remove_others(folder: Path, ranks: int) -> None:
    """Remove the files of earlier saves with another world size."""
    for _, saved, path in _files(folder):
        if saved != ranks:
            with contextlib.suppress(OSError):  # `files_saved` finds the newest state anyway
                path.unlink()


def load_state(path: Path, *, tensors: bool = True) -> dict[str, Any]:
    """Read and verify a state file, or only its metadata. Raise a FileError if it is damaged, or not a state file."""
    header, flat = _read(path, tensors)
    try:
        about = msgspec.json.decode(header[_ABOUT], type=dict[str, Any])
    except (KeyError, msgspec.DecodeError, RecursionError) as error:
        raise FileError(f"{path}: is a safetensors file, but not an exchange state: check the path") from error
    if about.get("schema") != SCHEMA:  # before the seal, which another schema may compute differently
        raise FileError(f"{path}: {one_line(str(problem_of(about, _EARLIER)))}")
    if header.keys() != set(HEADER) or seal_of(header[_ABOUT], header[_CHECKSUM]) != header[_SEAL]:
        raise FileError(f"{path}: is damaged: the checksum of its header does not match: {_EARLIER}")
    if tensors and _checksum_of(flat) != header[_CHECKSUM]:
        raise FileError(f"{path}: is damaged: the checksum of its tensors does not match: {_EARLIER}")
    nested: dict[str, dict[str, Tensor]] = {}
    for key, tensor in flat.items():
        kind, slash, name = key.partition("/")
        wide = tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor
        if not slash or not torch.isfinite(wide).all():
            defect = "contains NaN or infinity" if slash else "is not named KIND/PARAMETER"
            raise FileError(f"{path}: the tensor {one_line(key)} {defect}: {_EARLIER}")
        nested.setdefault(name, {})[kind] = tensor
    state = {**about, "tensors": nested}
    if (problem := problem_of(state, _EARLIER)) is not None:
        raise FileError(f"{path}: {problem}")
    return state


def _read(path: Path, tensors: bool) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return a file's metadata and, if requested, its tensors. Nothing is verified yet."""
    try:
        if path.exists() and not path.is_file():  # opening a pipe would block until another process writes to it
            what = "folder" if path.is_dir() else "pipe or a device"
            raise FileError(f"{path}: is a {what}, not a state file: {_EARLIER}")
        with safetensors.safe_open(str(path), framework="pt") as file:
            keys = list(file.keys()) if tensors else []
            return file.metadata() or {}, {key: file.get_tensor(key) for key in keys}
    except FileError:
        raise
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}: {_EARLIER}") from error
    except (safetensors.SafetensorError, RuntimeError, TypeError, ValueError) as error:  # the last three are torch's
        raise FileError(f"{path}: is not a complete safetensors file: {one_line(str(error))}: {_EARLIER}") from error


def check_of_one_save(path: Path, state: Mapping[str, Any], first: Path, other: Mapping[str, Any]) -> None:
    """Raise unless the state in `path` was saved together with the state `other` in `first`."""
    match = _NAME.fullmatch(path.name)
    assert match is not None  # noqa: S101 - `_files` returns only such names
    for field, value in (("rank", int(match[1])), ("world_size", int(match[2]))):
        if state[field] != value:
            raise FileError(
                f"{path}: contains the state of {field} {state[field]}, but its name says {value}: rename it back, or "
                f"{_EARLIER}"
            )
    common = ("exchange", "levels", "steps", "buckets")
    differing = first_difference(*(flatten({field: of[field] for field in common}) for of in (state, other)))
    if differing is not None:
        field, mine, theirs = differing
        raise FileError(
            f"{path}: was not saved together with {first.name}: {field} is {mine} instead of {theirs}: {_EARLIER}"
        )


def files_saved(folder: Path, world_size: int) -> list[Path]:
    """Return the files of the newest complete checkpoint in a folder, by rank.

    An interrupted save may leave several sets of files: of several world sizes, or with drafts that were not renamed.
    Complete sets of one step come first, then those with the most steps, then those of this `world_size`.
    """
    placed: dict[int, dict[int, Path]] = {}
    newest: dict[int, dict[int, Path]] = {}
    for rank, ranks, path in _files(folder):
        if path.suffix != _DRAFT:
            placed.setdefault(ranks, {})[rank] = path
        newest.setdefault(ranks, {})[rank] = path  # in sorted order, a draft follows the file that it replaces
    if not newest:
        raise FileError(f"{folder}: contains no exchange state: {_WRITTEN_BY}")
    sets = [*placed.items(), *(item for item in newest.items() if item[1] != placed.get(item[0]))]
    complete = [[by_rank[rank] for rank in range(ranks)] for ranks, by_rank in sets if len(by_rank) == ranks]
    if not complete:
        missing = {ranks: [rank for rank in range(ranks) if rank not in newest[ranks]] for ranks in newest}
        ranks = min(missing, key=lambda ranks: len(missing[ranks]))
        text = f"the files of ranks {missing[ranks]} of {ranks} are missing: copy them into the folder, or {_EARLIER}"
        raise FileError(f"{folder}: {text}")
    if len(complete) == 1:
        return complete[0]
    steps = [{load_state(path, tensors=False)["steps"] for path in paths} for paths in complete]
    order = [(len(of) == 1, max(of), len(paths) == world_size) for of, paths in zip(steps, complete, strict=True)]
    return complete[order.index(max(order))]


def _files(folder: Path) -> list[tuple[int, int, Path]]:
    """Return rank, world size and path of each state file and draft, sorted by name."""
    try:
        matches = [(_NAME.fullmatch(path.name), path) for path in sorted(folder.iterdir())]
    except OSError as error:
        raise FileError(f"{folder}: cannot be read: {error.strerror or error}: {_WRITTEN_BY}") from error
    named = [(int(match[1]), int(match[2]), path) for match, path in matches if match is not None]
    return [entry for entry in named if entry[0] < entry[1]]


def shares(rank: int, ranks: int, saved: int) -> dict[int, float]:
    """Return the share of each old rank's residual that this rank takes over, when `saved` ranks become `ranks`.

    The residuals of all ranks add up to what has not been applied yet. The shares of an old rank add up to 1 over all
    new ranks, so this sum does not change.
    """
    if ranks <= saved:
        return {old: 1.0 for old in range(saved) if old % ranks == rank}
    old = rank % saved
    return {old: 1 / len(range(old, ranks, saved))}


def redistributed(states: Mapping[int, Tensors], parts: Mapping[int, float]) -> dict[str, dict[str, Tensor]]:
    """Return the weighted sum of the states of some old ranks, with the weights that `shares` returned."""
    total: dict[str, dict[str, Tensor]] = {}
    for old, part in parts.items():
        for name, kinds in states[old].items():
            sums = total.setdefault(name, {})
            for kind, tensor in kinds.items():
                sums[kind] = tensor * part + sums[kind] if kind in sums else tensor * part
    return total
