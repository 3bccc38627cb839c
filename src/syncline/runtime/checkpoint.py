"""Save and load the exchange states of all ranks: collectively, verified, and redistributed to another world size.

Each rank has one safetensors file, with metadata and checksums in its header. A save has three phases, and all ranks
meet after each: every rank writes a draft, renames it to the final name, and rank 0 removes the files of other world
sizes. Writing and renaming are atomic. So if a rank cannot write, the previous checkpoint is unchanged, and if the
whole job crashes at any moment, the folder contains a complete set of files and drafts: the old one until the last
draft is written, and then the new one. Loading takes the set with the most steps.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import safetensors
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor

from syncline.dist.agreement import digest, first_difference, flatten, shortened
from syncline.errors import MismatchError, UsageError
from syncline.exchange import Tree
from syncline.files import FileError, one_line, write_bytes
from syncline.health.meeting import same_on_all_ranks

SCHEMA = 2  # version of the file format; version 1 had no checksums
_MOST_RANKS = 99_999  # the largest world size that fits in a file name
_ABOUT, _CHECKSUM, _SEAL = HEADER = ("syncline", "checksum", "seal")
"""Keys of a file's metadata: the fields of a state as JSON, the checksum of its tensors (with their names, types and
shapes), and the checksum of these two texts. They detect damage, which safetensors does not, but not forgery."""
_DRAFT = ".new"
_NAME = re.compile(rf"rank-(\d{{5}})-of-(\d{{5}})\.safetensors(?:{re.escape(_DRAFT)})?")
_WRITTEN_BY = "pass the folder that save(folder) wrote"
_EARLIER = "load an earlier checkpoint"

Tensors = Mapping[str, Mapping[str, Tensor]]  # by parameter name, then by kind
PathLike = str | os.PathLike[str]
State = Mapping[str, Any]
ON_WORLD_SIZE = ("refuse", "reset", "redistribute")
_RESET = "'reset', which drops the residuals"
_MISMATCHES = {
    "rank": "by rank {then}, but this is rank {now}: load the state of this rank",
    "world_size": "by {then} ranks, but there are {now} now: load it on {then} ranks, or with load(on_world_size=…)",
    "levels": "with the ranks on hosts {then}, but they are on {now} now: load it there, or drop the residuals with "
    "load(on_world_size='reset')",
}
"""How a state was saved, for fields that must be the same when it is loaded, and what to do."""


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one model: saves them, loads them, and refuses those that do not fit."""

    group: dist.ProcessGroup
    device: torch.device
    exchange: State  # settings that must be the same when a state is loaded
    tree: Tree | None  # if residuals depend on it: with `Hierarchical` they belong to the leaders of hosts
    misfit: Callable[[Tensors, Sequence[Sequence[str]]], str | None]  # why these do not fit the model, or None

    @property
    def identity(self) -> dict[str, Any]:
        """The fields of a state that do not change during a run."""
        rank, ranks = self.group.rank(), self.group.size()
        levels = None if self.tree is None else repr(self.tree.root)
        return {"schema": SCHEMA, "exchange": self.exchange, "rank": rank, "world_size": ranks, "levels": levels}

    def save(self, folder: PathLike, state: State) -> None:
        """Collective: write the state of each rank to `folder`."""
        draft: Path | None = None
        meeting = self.group, self.device, "the state to save", "save"
        try:
            with same_on_all_ranks(*meeting) as fields:
                fields |= {"steps": state["steps"], "weights": state.get("weights")}
                draft = write_draft(folder_of(folder), state)
        except MismatchError as error:
            if draft is not None and error.__cause__ is None:  # all ranks met, so no rank renames its draft
                draft.unlink(missing_ok=True)
            raise
        with same_on_all_ranks(*meeting):
            put_in_place(draft)
        with same_on_all_ranks(*meeting):
            if state["rank"] == 0:
                remove_others(draft.parent, state["world_size"])

    def load(self, folder: PathLike, on_world_size: str, examine: Callable[[State], State] = lambda _: {}) -> State:
        """Collective: return this rank's part of a checkpoint, fully checked, so that applying it cannot fail."""
        with same_on_all_ranks(self.group, self.device, "the checkpoint", "load") as fields:
            state = self._saved(folder_of(folder), on_world_size)
            fields |= examine(state)  # raises, or returns further fields that must be equal on all ranks
            common = {field: state[field] for field in ("exchange", "world_size", "levels", "steps", "buckets")}
            fields |= flatten({"on_world_size": on_world_size, **common})
        return state

    def _saved(self, folder: Path, on_world_size: str) -> State:
        if on_world_size not in ON_WORLD_SIZE:
            raise UsageError(f"on_world_size is {on_world_size!r}: pass one of {', '.join(ON_WORLD_SIZE)}")
        here = self.identity
        expected = {field: here[field] for field in ("rank", "world_size", "levels")}
        files = files_saved(folder, here["world_size"])
        common = load_state(files[0], tensors=False)
        moved = len(files) != here["world_size"] or common["levels"] != here["levels"]
        if moved and "levels" in here["exchange"]:  # a user may name levels, which differ for another topology
            expected["exchange"] = {**common["exchange"], "levels": here["exchange"]["levels"]}
        self.check({**common, **expected}, f"{files[0]}: ")
        if moved:
            self._check_move(folder, common, on_world_size)
        parts = shares(here["rank"], here["world_size"], len(files))
        states = {}
        for old in parts:
            states[old] = load_state(files[old], tensors=not moved or on_world_size != "reset")
            check_of_one_save(files[old], states[old], files[0], common)
            self.check({**states[old], **expected}, f"{files[old]}: ")
        if not moved:
            return states[here["rank"]]
        return {**common, "tensors": redistributed(states, parts)}

    def _check_move(self, folder: Path, state: State, on_world_size: str) -> None:
        """Raise unless a state of another world size or topology may be treated as requested."""
        here, saved = self.identity, state["world_size"]
        hosts = state["levels"] is not None or here["levels"] is not None
        if on_world_size == "refuse":
            problem = f"saved by {saved} ranks, but there are {here['world_size']} now"
            if saved == here["world_size"]:
                then, now = shortened([str(state["levels"]), str(here["levels"])])
                problem = f"saved with the ranks on hosts {then}, but they are on {now} now"
            choice = _RESET if hosts else f"'redistribute', or {_RESET}"
            raise UsageError(f"{folder}: the checkpoint was {problem}: pass on_world_size={choice}")
        if on_world_size == "redistribute" and hosts:
            text = "residuals that belong to one host cannot be redistributed"
            raise UsageError(f"{folder}: {text}: pass on_world_size={_RESET}")

    def check(self, state: State, prefix: str = "") -> None:
        """Raise unless the state is valid and fits this model, exchange, rank and topology."""
        problem = problem_of(state, "pass what state_dict() returned") or self._mismatch(state, self.identity)
        if problem is not None:
            raise UsageError(prefix + problem)

    def _mismatch(self, state: State, here: State) -> str | None:
        other = first_difference(flatten(state["exchange"]), flatten(here["exchange"]))
        if other is not None:
            saved = "{}={}, but this model uses {}: use the same setting".format(*other)
            saved = "another plan: use the same plan" if other[0] == "digest" else saved
            return f"the checkpoint was saved with {saved}, or start without the checkpoint"
        for field, text in _MISMATCHES.items():
            if state[field] != here[field]:
                return f"the state was saved {text.format(then=state[field], now=here[field])}"
        misfit = self.misfit(state["tensors"], state["buckets"])
        remedy = "load it into the model that it was saved with, or start without the checkpoint"
        return None if misfit is None else f"{misfit}: {remedy}"


def misfit_of(shapes: Mapping[str, torch.Size], tensors: Tensors, names: Iterable[str] = ()) -> str | None:
    """Return why tensors or parameter names do not fit a model with these parameter shapes, or None if they do."""
    for name in [*tensors, *names]:
        if name not in shapes:
            return f"the checkpoint contains {name!r}, which is not a parameter of this model"
        for kind, tensor in tensors.get(name, {}).items():
            if tensor.shape != shapes[name] and not (kind.startswith("optimizer.") and tensor.dim() == 0):
                there, here = tuple(tensor.shape), tuple(shapes[name])
                return f"the {kind} of {name!r} has shape {there} in the checkpoint, but the parameter has shape {here}"
    return None


def digest_of_bits(tensors: Mapping[str, Tensor]) -> str:
    """Return a digest that is equal for equal bits on any device: a sum of integers does not depend on their order."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = {}
    for name, tensor in tensors.items():
        flat = tensor.detach().reshape(-1)
        sums[name] = int(flat.view(integers[flat.element_size()]).sum(dtype=torch.int64))
    return digest(sums).hex()[:16]


class _StateFields(msgspec.Struct, frozen=True):
    """The state of an exchange on one rank."""

    schema: int
    exchange: dict[str, Any]
    rank: Annotated[int, msgspec.Meta(ge=0, lt=_MOST_RANKS)]
    world_size: Annotated[int, msgspec.Meta(ge=1, le=_MOST_RANKS)]
    levels: str | None
    steps: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    buckets: list[list[str]]
    tensors: dict[str, dict[str, Tensor]]
    batches: list[int] | None = None  # of the ranks, if gradients or updates were weighted by samples

    def __post_init__(self) -> None:
        if self.rank >= self.world_size:
            raise ValueError(f"rank is {self.rank}, but world_size is only {self.world_size}")


def folder_of(path: PathLike) -> Path:
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(text, str) or not text or not text.isprintable():
        raise UsageError(f"the checkpoint folder is {text!r}: pass the path of a folder")
    return Path(text)


def problem_of(state: object, remedy: str) -> str | None:
    """Return why `state` is not a valid exchange state, with the remedy, or None if it is valid."""
    if isinstance(state, Mapping) and state.get("schema", SCHEMA) != SCHEMA:  # before the fields, which may differ
        reads = f"but this version of syncline reads schema {SCHEMA}: load it with the version that saved it"
        return f"the checkpoint has schema {state['schema']!r}, {reads}"
    try:
        msgspec.json.encode(msgspec.structs.replace(msgspec.convert(state, _StateFields), tensors={}))
    except (AttributeError, RecursionError, TypeError, ValueError) as error:
        text, _, where = str(error).partition(" - at `$.")
        field = f"{where.rstrip('`')}: " if where else ""
        text = one_line(f"{field}{text[:1].lower()}{text[1:].replace('`', '')}")
        return f"this is not a valid exchange state: {text}: {remedy}"
    return None


def sealed(about: State, tensors: Mapping[str, Tensor]) -> bytes:
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


def write_draft(folder: Path, state: State) -> Path:
    """Write a rank's state to a draft, which `put_in_place` renames, and return the path of the draft."""
    path = folder / f"rank-{state['rank']:05d}-of-{state['world_size']:05d}.safetensors"
    about, flat = dict(state), dict[str, Tensor]()
    for name, kinds in about.pop("tensors").items():
        flat |= {f"{kind}/{name}": tensor.detach().cpu().contiguous() for kind, tensor in kinds.items()}
    try:
        data = sealed(about, flat)
        missing = [parent for parent in folder.parents if not parent.exists()]
        for directory in (*reversed(missing), folder):
            directory.mkdir(mode=0o755, exist_ok=True)
    except (ValueError, TypeError) as error:
        raise FileError(f"{path}: not written: {one_line(str(error))}") from error
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
    path = draft.with_suffix("")
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


def check_of_one_save(path: Path, state: State, first: Path, other: State) -> None:
    """Raise unless the state in `path` was saved together with the state `other` in `first`."""
    for field, value in zip(("rank", "world_size"), map(int, re.findall(r"\d{5}", path.name)), strict=True):
        if state[field] != value:
            text = f"contains the state of {field} {state[field]}, but its name says {value}: rename it back"
            raise FileError(f"{path}: {text}, or {_EARLIER}")
    common = ("exchange", "levels", "steps", "buckets")
    differing = first_difference(*(flatten({field: of[field] for field in common}) for of in (state, other)))
    if differing is not None:
        text = "{} is {} instead of {}".format(*differing)
        raise FileError(f"{path}: was not saved together with {first.name}: {text}: {_EARLIER}")


def files_saved(folder: Path, world_size: int) -> list[Path]:
    """Return the files of the newest complete checkpoint in a folder, by rank.

    An interrupted save may leave several sets of files: of several world sizes, or with drafts that were not renamed.
    Complete sets of one step come first, then those with the most steps, then those of this `world_size`.
    """
    placed: dict[int, dict[int, Path]] = {}
    newest: dict[int, dict[int, Path]] = {}
    for rank, ranks, path in _files(folder):  # in sorted order, a draft follows the file that it replaces
        for files in (newest,) if path.suffix == _DRAFT else (newest, placed):
            files.setdefault(ranks, {})[rank] = path
    if not newest:
        raise FileError(f"{folder}: contains no exchange state: {_WRITTEN_BY}")
    sets = [*placed.items(), *(item for item in newest.items() if item[1] != placed.get(item[0]))]
    complete = [[by_rank[rank] for rank in range(ranks)] for ranks, by_rank in sets if len(by_rank) == ranks]
    if not complete:
        missing = {ranks: [rank for rank in range(ranks) if rank not in newest[ranks]] for ranks in newest}
        ranks = min(missing, key=lambda ranks: len(missing[ranks]))
        text = f"the files of ranks {missing[ranks]} of {ranks} are missing"
        raise FileError(f"{folder}: {text}: copy them into the folder, or {_EARLIER}")
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

    The shares of an old rank add up to 1 over all new ranks, so the sum of all residuals does not change.
    """
    if ranks <= saved:
        return {old: 1.0 for old in range(saved) if old % ranks == rank}
    old = rank % saved
    return {old: 1 / len(range(old, ranks, saved))}


def redistributed(states: Mapping[int, State], parts: Mapping[int, float]) -> dict[str, dict[str, Tensor]]:
    """Return the weighted sum of the residuals of some old ranks, with the weights that `shares` returned. Of other
    tensors, it has those of the first of these ranks."""
    total: dict[str, dict[str, Tensor]] = {}
    for old, part in parts.items():
        for name, kinds in states[old]["tensors"].items():
            sums = total.setdefault(name, {})
            for kind, tensor in kinds.items():
                if kind in ("residual", "velocity"):
                    sums[kind] = tensor * part + sums.get(kind, 0)
                else:  # weights and optimizer state, which are complete on every rank
                    sums.setdefault(kind, tensor)
    return total
