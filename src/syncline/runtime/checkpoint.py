"""Saving what ranks keep, and going on from it: together, checked, and dealt anew where their number has changed."""

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
from syncline.health.meeting import together
from syncline.runtime.state_files import (
    SCHEMA,
    check_of_one_save,
    dealt,
    files_saved,
    folder_of,
    load_state,
    problem_of,
    put_in_place,
    remove_others,
    shares,
    write_draft,
)

Misfit = Callable[[Mapping[str, Mapping[str, Tensor]], Sequence[Sequence[str]]], str | None]

ON_WORLD_SIZE = ("refuse", "reset", "redistribute")
_REMEDIES = {
    "rank": "each rank loads its own",
    "world_size": "load it on as many ranks; what save(folder) wrote, load(folder, on_world_size=…) can deal anew",
    "levels": "load it on hosts like those; what save(folder) wrote, load(folder, on_world_size='reset') can forget",
}
"""Where a state was saved, and what to do if that is not here."""


@dataclass(frozen=True)
class Checkpoints:
    """What a state must have been saved by to be loaded here."""

    group: dist.ProcessGroup
    device: torch.device
    exchange: Mapping[str, Any]
    """The settings of what keeps it."""
    levels: str | None
    """Where ranks sit, where that matters to it."""
    misfit: Misfit
    """Why tensors, and buckets, are not of this model, if so."""
    deals: bool = True
    """Whether another number of ranks can share what is kept; if not, they can only forget it."""

    @property
    def identity(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "exchange": self.exchange,
            "rank": dist.get_rank(self.group),
            "world_size": dist.get_world_size(self.group),
            "levels": self.levels,
        }

    def save(self, folder: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
        """Collective."""
        draft: Path | None = None
        meeting = self.group, self.device, "what is saved", "save"
        try:
            with together(*meeting) as fields:
                fields |= {field: state[field] for field in ("steps", "weights") if field in state}
                draft = write_draft(folder_of(folder), state)
        except MismatchError as error:
            if draft is not None and error.__cause__ is None:  # they met, so none of them puts its draft in place
                draft.unlink(missing_ok=True)
            raise
        with together(*meeting):
            put_in_place(draft)
        with together(*meeting):
            if state["rank"] == 0:
                remove_others(draft.parent, state["world_size"])

    def load(
        self,
        folder: str | os.PathLike[str],
        on_world_size: str,
        examine: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda _: {},
    ) -> Mapping[str, Any]:
        """Collective: this rank's part of what was saved, checked, so that nothing is left to fail.

        `examine` may refuse it, too, and returns what else all ranks must agree on.
        """
        with together(self.group, self.device, "what is loaded", "load") as fields:
            state = self._saved(folder_of(folder), on_world_size)
            fields |= examine(state)
            common = {field: state[field] for field in ("exchange", "world_size", "levels", "steps", "buckets")}
            fields |= flatten({"on_world_size": on_world_size, **common})
        return state

    def _saved(self, folder: Path, on_world_size: str) -> Mapping[str, Any]:
        """This rank's part of what the ranks saved in a folder: checked, so that nothing is left to fail."""
        if on_world_size not in ON_WORLD_SIZE:
            raise UsageError(f"on_world_size is {on_world_size!r}: it is one of {', '.join(ON_WORLD_SIZE)}")
        here = self.identity
        sits = {field: here[field] for field in ("rank", "world_size", "levels")}
        files = files_saved(folder, here["world_size"])
        first, saved = files[0], len(files)
        common = load_state(first, tensors=False)
        moved = saved != here["world_size"] or common["levels"] != here["levels"]
        if moved and "levels" in here["exchange"]:  # which a user may name, and which are others for other ranks
            sits["exchange"] = {**common["exchange"], "levels": here["exchange"]["levels"]}
        self.check({**common, **sits}, first)
        if moved:
            self._check_move(folder, common, on_world_size)
        parts = shares(here["rank"], here["world_size"], saved)
        states = {}
        for old in parts:
            states[old] = load_state(files[old], tensors=not moved or on_world_size != "reset")
            check_of_one_save(files[old], states[old], first, common)
            self.check({**states[old], **sits}, files[old])
        if not moved:
            return states[here["rank"]]
        return {**common, "tensors": dealt({old: state["tensors"] for old, state in states.items()}, parts)}

    def _check_move(self, folder: Path, state: Mapping[str, Any], on_world_size: str) -> None:
        """Raises unless what was kept by other ranks, or on other hosts, may be treated as asked."""
        here, saved = self.identity, state["world_size"]
        hosts = state["levels"] is not None or here["levels"] is not None
        reset, only_reset = "'reset', which forgets what was kept", hosts or not self.deals
        if on_world_size == "refuse":
            what = f"{saved} ranks saved it, and {here['world_size']} are here"
            if saved == here["world_size"]:
                then, now = shortened([str(state["levels"]), str(here["levels"])])
                what = f"its {saved} ranks sat on other hosts, {then}, and here it is {now}"
            choice = reset if only_reset else f"'redistribute', or {reset}"
            raise UsageError(f"{folder}: {what}: pass on_world_size={choice}")
        if on_world_size == "redistribute" and only_reset:
            kept = f"hosts kept it, and {saved} ranks' hosts are not here"
            why = kept if hosts else "velocities are each rank's own"
            raise UsageError(f"{folder}: {why}: pass on_world_size={reset}")

    def check(self, state: Mapping[str, Any], path: Path | None = None) -> None:
        """Raises for whatever could make going on fail, or go wrong."""
        at = "" if path is None else f"{path}: "
        problem = problem_of(state, "pass what state_dict() returned")
        if problem is not None:
            raise UsageError(at + problem)
        here = self.identity
        other = first_difference(flatten(state["exchange"]), flatten(here["exchange"]))
        if other is not None:
            setting, there, now = other
            what = f"the state's exchange is another: {setting} is {there}, here it is {now}"
            raise UsageError(f"{at}{what}: attach the exchange that it was saved with, or start without it")
        for field, remedy in _REMEDIES.items():
            told = remedy if self.deals or field != "world_size" else remedy.partition(";")[0]
            if state[field] != here[field]:
                raise UsageError(f"{at}the state's {field} is {state[field]!r}, here it is {here[field]!r}: {told}")
        misfit = self.misfit(state["tensors"], state["buckets"])
        if misfit is not None:
            raise UsageError(f"{at}{misfit}: load it into the model that it was saved with, or start without it")


def misfit_of(
    shapes: Mapping[str, torch.Size], tensors: Mapping[str, Mapping[str, Tensor]], names: Iterable[str] = ()
) -> str | None:
    """Why tensors, or what else names parameters, are not of a model with these, if so."""
    for name in [*tensors, *names]:
        if name not in shapes:
            return f"the state holds {name!r}, which is not a parameter of this model"
    for name, kinds in tensors.items():
        for kind, tensor in kinds.items():
            if tensor.shape != shapes[name]:
                there, here = tuple(tensor.shape), tuple(shapes[name])
                return f"the state's {kind} of {name!r} has shape {there}, the parameter {here}"
    return None


def mark_of_bits(tensors: Mapping[str, Tensor]) -> str:
    """The same for the same bits, on any device: whole numbers add up to the same in any order."""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = {}
    for name, tensor in tensors.items():
        flat = tensor.detach().reshape(-1)
        flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
        sums[name] = int(flat.view(whole[flat.element_size()]).sum(dtype=torch.int64))
    return digest(sums).hex()[:16]
