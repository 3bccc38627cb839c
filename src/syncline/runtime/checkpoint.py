"""Save and load the exchange states of all ranks: collectively, verified, and redistributed to another world size."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from syncline.dist.agreement import digest, first_difference, flatten, shortened
from syncline.errors import MismatchError, UsageError
from syncline.health.meeting import same_on_all_ranks
from syncline.runtime.state_files import (
    SCHEMA,
    Tensors,
    check_of_one_save,
    files_saved,
    folder_of,
    load_state,
    problem_of,
    put_in_place,
    redistributed,
    remove_others,
    shares,
    write_draft,
)

ON_WORLD_SIZE = ("refuse", "reset", "redistribute")
_RESET = "'reset', which drops the residuals"


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one model: saves them, loads them, and refuses those that do not fit."""

    group: dist.ProcessGroup
    device: torch.device
    exchange: Mapping[str, Any]
    """Settings that must be the same when a state is loaded."""
    levels: str | None
    """The topology, if residuals depend on it."""
    misfit: Callable[[Tensors, Sequence[Sequence[str]]], str | None]
    """Returns why tensors or buckets do not fit the model, or None if they do."""

    @property
    def identity(self) -> dict[str, Any]:
        """The fields of a state that do not change during a run."""
        return {
            "schema": SCHEMA,
            "exchange": self.exchange,
            "rank": dist.get_rank(self.group),
            "world_size": dist.get_world_size(self.group),
            "levels": self.levels,
        }

    def save(self, folder: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
        """Collective: write the state of each rank to `folder`."""
        draft: Path | None = None
        meeting = self.group, self.device, "the state to save", "save"
        try:
            with same_on_all_ranks(*meeting) as fields:
                fields |= {field: state[field] for field in ("steps", "weights") if field in state}
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

    def load(
        self,
        folder: str | os.PathLike[str],
        on_world_size: str,
        examine: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda _: {},
    ) -> Mapping[str, Any]:
        """Collective: return this rank's part of a checkpoint, fully checked, so that applying it cannot fail.

        `examine` raises if it refuses the state, and returns further fields that must be equal on all ranks.
        """
        with same_on_all_ranks(self.group, self.device, "the checkpoint", "load") as fields:
            state = self._saved(folder_of(folder), on_world_size)
            fields |= examine(state)
            common = {field: state[field] for field in ("exchange", "world_size", "levels", "steps", "buckets")}
            fields |= flatten({"on_world_size": on_world_size, **common})
        return state

    def _saved(self, folder: Path, on_world_size: str) -> Mapping[str, Any]:
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
        return {**common, "tensors": redistributed({old: state["tensors"] for old, state in states.items()}, parts)}

    def _check_move(self, folder: Path, state: Mapping[str, Any], on_world_size: str) -> None:
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
            raise UsageError(
                f"{folder}: residuals that belong to one host cannot be redistributed: pass on_world_size={_RESET}"
            )

    def check(self, state: Mapping[str, Any], prefix: str = "") -> None:
        """Raise unless the state is valid and fits this model, exchange, rank and topology."""
        problem = problem_of(state, "pass what state_dict() returned") or self._mismatch(state)
        if problem is not None:
            raise UsageError(prefix + problem)

    def _mismatch(self, state: Mapping[str, Any]) -> str | None:
        here = self.identity
        other = first_difference(flatten(state["exchange"]), flatten(here["exchange"]))
        if other is not None:
            setting, then, now = other
            saved = f"{setting}={then}, but this model uses {now}: use the same setting"
            saved = "another plan: use the same plan" if setting == "digest" else saved
            return f"the checkpoint was saved with {saved}, or start without the checkpoint"
        if (then := state["rank"]) != (now := here["rank"]):
            return f"the state was saved by rank {then}, but this is rank {now}: load the state of this rank"
        if (then := state["world_size"]) != (now := here["world_size"]):
            return (
                f"the state was saved by {then} ranks, but there are {now} now: load it on {then} ranks; "
                "load(folder, on_world_size=…) accepts other numbers"
            )
        if (then := state["levels"]) != (now := here["levels"]):
            return (
                f"the state was saved with the ranks on hosts {then}, but they are on {now} now: load it on the same "
                "hosts; load(folder, on_world_size='reset') accepts others and drops the residuals"
            )
        misfit = self.misfit(state["tensors"], state["buckets"])
        remedy = "load it into the model that it was saved with, or start without the checkpoint"
        return None if misfit is None else f"{misfit}: {remedy}"


def misfit_of(shapes: Mapping[str, torch.Size], tensors: Tensors, names: Iterable[str] = ()) -> str | None:
    """Return why tensors or parameter names do not fit a model with these parameter shapes, or None if they do."""
    for name in [*tensors, *names]:
        if name not in shapes:
            return f"the checkpoint contains {name!r}, which is not a parameter of this model"
    for name, kinds in tensors.items():
        for kind, tensor in kinds.items():
            if tensor.shape != shapes[name]:
                there, here = tuple(tensor.shape), tuple(shapes[name])
                return f"the {kind} of {name!r} has shape {there} in the checkpoint, but the parameter has shape {here}"
    return None


def digest_of_bits(tensors: Mapping[str, Tensor]) -> str:
    """Return a digest that is equal for equal bits on any device: a sum of integers does not depend on their order."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = {}
    for name, tensor in tensors.items():
        flat = tensor.detach().reshape(-1)
        flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
        sums[name] = int(flat.view(integers[flat.element_size()]).sum(dtype=torch.int64))
    return digest(sums).hex()[:16]
