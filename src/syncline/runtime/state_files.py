"""What an exchange keeps, in files: one per rank, safetensors, with what they belong to in their headers.

A state is saved in three moves, after each of which all ranks meet: each writes a draft; then puts it in the place of
its file; then the files of other numbers of ranks are removed. Each file is written or moved in one step, so it is
there or not, and never a half. If a rank cannot write, what was saved before is still there. And if all crash,
whenever that is, there is a complete set of files and drafts: the old one until the last draft is written, and from
then on the new one. Loading takes the complete set with the most steps.

What is kept sums up to what is still to be applied; so when the number of ranks changes it can be dealt anew: a rank
takes over what some of the old ones kept, or an equal share of what one of them kept. Nothing is lost and nothing is
applied twice.

Disks and copies lose bits, and safetensors does not notice: a residual with a flipped bit would be applied like any
other. So a file has a checksum of its tensors, with their names, types and shapes, and a seal over that and over what
they belong to. They tell damage, not forgery: whoever can write the file can write them, too.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
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
"""1 had no checksums."""
MOST_RANKS = 99_999
"""For which files have names."""
_ABOUT, _CHECKSUM, _SEAL = HEADER = ("syncline", "checksum", "seal")
"""What a file's metadata says: what its tensors belong to, as JSON; the tensors' checksum; that of these two texts."""
_DRAFT = ".new"
_NAME = re.compile(rf"rank-(\d{{5}})-of-(\d{{5}})\.safetensors(?:{re.escape(_DRAFT)})?")
_COMMON = ("exchange", "levels", "steps", "buckets")
"""What the files of one save have in common."""
_WRITTEN_BY = "pass the folder that save(folder) wrote"
_EARLIER = "take an earlier checkpoint"
_OF_TORCH = (RuntimeError, TypeError, ValueError)
"""What it raises for types and shapes that safetensors knows and it does not."""

Tensors = Mapping[str, Mapping[str, Tensor]]


class About(msgspec.Struct, frozen=True):
    """What the tensors of a state belong to."""

    schema: int
    exchange: dict[str, Any]
    rank: Annotated[int, msgspec.Meta(ge=0, lt=MOST_RANKS)]
    world_size: Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)]
    levels: str | None
    steps: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    buckets: list[list[str]]

    def __post_init__(self) -> None:
        if self.rank >= self.world_size:
            raise ValueError(f"there is no rank {self.rank} among {self.world_size}")


def file_of(folder: Path, rank: int, ranks: int) -> Path:
    return folder / f"rank-{rank:05d}-of-{ranks:05d}.safetensors"


def folder_of(path: str | os.PathLike[str]) -> Path:
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(text, str) or not text or not text.isprintable():
        raise UsageError(f"the state's folder is {text!r}: pass the path of a folder")
    return Path(text)


def problem_of(state: object, remedy: str) -> str | None:
    """Why this is not the state of an exchange, if it is not."""
    if isinstance(state, Mapping) and state.get("schema", SCHEMA) != SCHEMA:  # other fields may be others then
        return (
            f"the state's schema is {state['schema']!r}, here it is {SCHEMA}: load it with the syncline that saved it"
        )
    wrong = _wrong_in(state)
    return None if wrong is None else f"this is not the state of an exchange: {wrong}: {remedy}"


def _wrong_in(state: object) -> str | None:
    if not isinstance(state, Mapping):
        return f"it is a {type(state).__name__}"
    missing = [field for field in (*About.__struct_fields__, "tensors") if field not in state]
    if missing:
        return f"{missing[0]!r} is missing"
    about = {field: state[field] for field in About.__struct_fields__}
    try:
        msgspec.convert(about, About)
        msgspec.json.encode(about)
    except msgspec.ValidationError as error:
        text, _, where = str(error).partition(" - at `$.")
        field = f"{where.rstrip('`')}: " if where else ""
        return one_line(f"{field}{text[:1].lower()}{text[1:].replace('`', '')}")
    except RecursionError:
        return "it is nested too deeply"
    except (TypeError, ValueError) as error:
        return one_line(str(error))
    tensors = state["tensors"]
    if not isinstance(tensors, Mapping) or not all(isinstance(kinds, Mapping) for kinds in tensors.values()):
        return "tensors: expected them by parameter name, then by kind"
    for name, kinds in tensors.items():
        for kind, tensor in kinds.items():
            if not isinstance(tensor, Tensor):
                return f"tensors: {kind} of {name!r} is a {type(tensor).__name__}"
    return None


def sealed(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """A file's content. `tensors`: by kind and name, like `residual/layer.weight`."""
    text, checksum = msgspec.json.encode(about).decode(), checksum_of(tensors)
    return safetensors.torch.save(dict(tensors), {_ABOUT: text, _CHECKSUM: checksum, _SEAL: seal_of(text, checksum)})


def checksum_of(tensors: Mapping[str, Tensor]) -> str:
    """Of their names, types, shapes and bits, in the order of names: a file may hold them in any."""
    found = hashlib.sha256()
    for key, tensor in sorted(tensors.items()):
        label = f"{key}\n{tensor.dtype}\n{list(tensor.shape)}".encode()
        found.update(len(label).to_bytes(8, "little") + label)
        found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def seal_of(about: str, checksum: str) -> str:
    return hashlib.sha256(f"{checksum}\n{about}".encode()).hexdigest()


def write_draft(folder: Path, state: Mapping[str, Any]) -> Path:
    """A handle's state to one file, beside the place that `put_in_place` gives it."""
    path = file_of(folder, state["rank"], state["world_size"])
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
        missing = [above for above in folder.parents if not above.exists()]
        for made in (*reversed(missing), folder):
            made.mkdir(mode=0o755, exist_ok=True)
    except OSError as error:
        raise FileError(
            f"{folder}: cannot be made a folder: {error.strerror or error}: save to another path"
        ) from error
    if path.is_dir():
        raise FileError(f"{path}: is a folder, in the place of a state: remove it, or save to another path")
    draft = path.with_name(path.name + _DRAFT)
    try:
        write_bytes(draft, data, through_links=False)
    except FileError as error:
        raise FileError(f"{error}: save to another path; what was saved before is still there") from error
    return draft


def put_in_place(draft: Path) -> None:
    path = draft.with_name(draft.name.removesuffix(_DRAFT))
    try:
        draft.replace(path)
    except OSError as error:
        raise FileError(f"{path}: cannot be replaced: {error.strerror or error}: save to another path") from error


def remove_others(folder: Path, ranks: int) -> None:
    """What other numbers of ranks saved before."""
    for _, saved, path in _files(folder):
        if saved != ranks:
            with contextlib.suppress(OSError):  # the state with the most steps is found all the same
                path.unlink()


def load_state(path: Path, *, tensors: bool = True) -> dict[str, Any]:
    """What was written there, checked for being that, bit for bit; what it belongs to is the handle's to check. Without
    `tensors`, only what they belong to is read, and only that is checked."""
    header, flat = _read(path, tensors)
    about = _about_in(path, header)
    if tensors and checksum_of(flat) != header[_CHECKSUM]:
        raise FileError(f"{path}: is damaged: its tensors are not those that were written: {_EARLIER}")
    kept: dict[str, dict[str, Tensor]] = {}
    for key, tensor in flat.items():
        kind, slash, name = key.partition("/")
        if not slash or not _finite(tensor):
            wrong = "is not finite" if slash else "is no parameter's"
            raise FileError(f"{path}: {one_line(key)} {wrong}: {_EARLIER}")
        kept.setdefault(name, {})[kind] = tensor
    state = {**about, "tensors": kept}
    problem = problem_of(state, _EARLIER)
    if problem is not None:
        raise FileError(f"{path}: {problem}")
    return state


def _read(path: Path, tensors: bool) -> tuple[dict[str, str], dict[str, Tensor]]:
    """A file's metadata and, where asked for, its tensors: what they are is still to be checked."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):  # to open a pipe would wait for whoever writes to it
            what = "folder" if stat.S_ISDIR(mode) else "pipe or a device"
            raise FileError(f"{path}: is a {what}, in the place of a state: {_EARLIER}")
        with safetensors.safe_open(str(path), framework="pt") as file:
            keys = list(file.keys()) if tensors else []
            return file.metadata() or {}, {key: file.get_tensor(key) for key in keys}
    except FileError:
        raise
    except FileNotFoundError as error:
        raise FileError(f"{path}: there is no such file: {_EARLIER}") from error
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}: {_EARLIER}") from error
    except (safetensors.SafetensorError, *_OF_TORCH) as error:
        raise FileError(f"{path}: is not a complete safetensors file: {one_line(str(error))}: {_EARLIER}") from error


def _about_in(path: Path, header: Mapping[str, str]) -> dict[str, Any]:
    """What a file's metadata says that its tensors belong to, sealed."""
    try:
        about = msgspec.json.decode(header[_ABOUT], type=dict[str, Any])
    except (KeyError, msgspec.DecodeError, RecursionError) as error:
        raise FileError(f"{path}: holds tensors, but not what an exchange keeps: was another file meant?") from error
    if about.get("schema") != SCHEMA:  # before the seal, which may be another then
        raise FileError(f"{path}: {one_line(str(problem_of(about, _EARLIER)))}")
    if header.keys() != set(HEADER) or seal_of(header[_ABOUT], header[_CHECKSUM]) != header[_SEAL]:
        raise FileError(f"{path}: is damaged: its header is not what was written: {_EARLIER}")
    return about


def _finite(tensor: Tensor) -> bool:
    wide = tensor if tensor.element_size() > 1 or not tensor.is_floating_point() else tensor.to(torch.float32)
    return bool(torch.isfinite(wide).all())


def check_of_one_save(path: Path, state: Mapping[str, Any], first: Path, other: Mapping[str, Any]) -> None:
    """That the state in one file was saved together with that in another, the first rank's."""
    named = _NAME.fullmatch(path.name)
    assert named is not None  # noqa: S101 - so it was found
    for field, value in (("rank", int(named[1])), ("world_size", int(named[2]))):
        if state[field] != value:
            raise FileError(
                f"{path}: its {field} is {state[field]}, and its name says {value}: was it renamed? {_EARLIER}"
            )
    found = first_difference(*(flatten({field: of[field] for field in _COMMON}) for of in (state, other)))
    if found is not None:
        field, mine, theirs = found
        raise FileError(f"{path}: was not saved with {first.name}: {field} is {mine}, and there {theirs}: {_EARLIER}")


def files_saved(folder: Path, here: int) -> list[Path]:
    """The files in which the state of a folder is, by rank.

    A save that was cut short may leave several sets of them: of other numbers of ranks, or with drafts that were not
    put in place. Of those whose files are all there and of one step, the one with the most steps is meant; of equal
    ones that of as many ranks as are `here`.
    """
    placed: dict[int, dict[int, Path]] = {}
    newest: dict[int, dict[int, Path]] = {}
    for rank, ranks, path in _files(folder):
        if path.suffix != _DRAFT:
            placed.setdefault(ranks, {})[rank] = path
        newest.setdefault(ranks, {})[rank] = path  # a draft comes after the file in whose place it goes
    if not newest:
        raise FileError(f"{folder}: holds no state of an exchange: {_WRITTEN_BY}")
    sets = [*placed.items(), *(item for item in newest.items() if item[1] != placed.get(item[0]))]
    complete = [[by_rank[rank] for rank in range(ranks)] for ranks, by_rank in sets if len(by_rank) == ranks]
    if not complete:
        missing = {ranks: [rank for rank in range(ranks) if rank not in newest[ranks]] for ranks in newest}
        ranks = min(missing, key=lambda ranks: len(missing[ranks]))
        raise FileError(
            f"{folder}: the states of ranks {missing[ranks]} of {ranks} are missing: copy them there, or {_EARLIER}"
        )
    if len(complete) == 1:
        return complete[0]
    steps = [{load_state(path, tensors=False)["steps"] for path in paths} for paths in complete]
    order = [(len(found) == 1, max(found), len(paths) == here) for found, paths in zip(steps, complete, strict=True)]
    return complete[order.index(max(order))]


def _files(folder: Path) -> list[tuple[int, int, Path]]:
    """Rank, number of ranks, and path of each, in the order of their names."""
    try:
        found = [(_NAME.fullmatch(path.name), path) for path in sorted(folder.iterdir())]
    except FileNotFoundError as error:
        raise FileError(f"{folder}: there is no such folder: {_WRITTEN_BY}") from error
    except NotADirectoryError as error:
        raise FileError(f"{folder}: is not a folder: {_WRITTEN_BY}") from error
    except OSError as error:
        raise FileError(f"{folder}: cannot be read: {error.strerror or error}: {_WRITTEN_BY}") from error
    named = [(int(name[1]), int(name[2]), path) for name, path in found if name is not None]
    return [entry for entry in named if entry[0] < entry[1]]


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
