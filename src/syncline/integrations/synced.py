"""What the frameworks' modules share: what a user asks for, and one model of theirs that is given it.

A framework wraps the model and writes the checkpoints. The model is followed from the moment it is wrapped, so what was
asked for is attached in its first training forward. What each rank keeps goes into a file of its own, in a folder that
belongs to the framework's checkpoint: a checkpoint that one rank writes would have to gather what all of them keep. A
plan that was found by tuning is written there, too, and a run that is resumed goes on with it.

A resumed run has nothing attached yet when its framework loads a checkpoint. So the folder is remembered, and loaded in
the forward in which something is attached, before its backward.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.hooks import RemovableHandle

from syncline.ddp.handle import Handle
from syncline.ddp.hook import forget
from syncline.ddp.wrap import handle_of
from syncline.errors import UsageError
from syncline.exchange import Exchange
from syncline.files import write_bytes
from syncline.health.meeting import together
from syncline.measure.hooks import Unseen
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.runtime.bucket_policy import difference_of
from syncline.runtime.checkpoint import ON_WORLD_SIZE
from syncline.runtime.parameters import ddp_of, only_device, parameters_of, shapes_of
from syncline.tuning.follow import Following, Wishes, follow
from syncline.tuning.replan import make_plain

FOLDER = "syncline"
"""Inside a checkpoint that is a folder."""
_PLAN = "plan.json"
_SPARSE = "sparse"

PathLike = str | os.PathLike[str]


def missing(framework: str, error: ImportError) -> ImportError:
    """What to raise where a module's framework cannot be imported."""
    return ImportError(
        f"syncline.integrations.{framework} cannot be imported: {error}: pip install 'syncline[{framework}]'"
    )


@dataclass(frozen=True)
class Asked:
    """What a user wants for the models of a framework, checked before any of them is there."""

    exchange: Exchange | None
    plan: Plan | None
    allow: tuple[str, ...]
    network: Network | None
    on_world_size: str
    quiet: bool
    timeout_s: float | None
    said: set[str] = field(default_factory=set, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        exchange: Exchange | None = None,
        plan: Plan | PathLike | None = None,
        allow: Sequence[str] = (),
        network: Network | PathLike | None = None,
        on_world_size: str = "refuse",
        quiet: bool = False,
        timeout_s: float | None = None,
    ) -> Asked:
        wishes = Wishes.of(exchange, plan, allow, network, timeout_s=timeout_s)
        if on_world_size not in ON_WORLD_SIZE:
            raise UsageError(f"on_world_size is {on_world_size!r}: it is one of {', '.join(ON_WORLD_SIZE)}")
        return cls(
            exchange=wishes.exchange,
            plan=plan if plan is None or isinstance(plan, Plan) else Plan.load(plan),
            allow=wishes.allow,
            network=network if network is None or isinstance(network, Network) else Network.load(network),
            on_world_size=on_world_size,
            quiet=quiet,
            timeout_s=wishes.timeout_s,
        )

    @property
    def tunes(self) -> bool:
        return self.exchange is None and self.plan is None

    @property
    def may_keep(self) -> bool:
        """Whether something may be attached that keeps gradients for later."""
        if self.exchange is not None:
            return self.exchange.keeps
        return _keeps(self.plan) if self.plan is not None else _SPARSE in self.allow

    def say(self, text: str) -> None:
        """To the person who started the run, by one rank, once."""
        if text not in self.said and not self.quiet and not (dist.is_initialized() and dist.get_rank()):
            print(f"syncline: {text}", file=sys.stderr)
        self.said.add(text)

    def say_alone(self) -> None:
        self.say("one process, which has nobody to exchange gradients with: there is nothing to do")


def joined(model: nn.Module, asked: Asked, scaler: GradScaler | None = None) -> Synced | None:
    """The model, followed; None where its process is the only one, and that is told."""
    ddp = ddp_of(model)
    if ddp.process_group.size() == 1:
        asked.say_alone()
        return None
    return Synced(ddp, asked, scaler)


class Synced:
    """A framework's model that gets what was asked for, and is saved and resumed with its framework's checkpoints."""

    def __init__(self, ddp: DDP, asked: Asked, scaler: GradScaler | None = None) -> None:
        self.model = ddp
        self._asked, self._scaler = asked, scaler
        self._group: dist.ProcessGroup = ddp.process_group
        self._device = only_device(parameters_of(ddp))
        self._waiting: Path | None = None
        """What is to be loaded when something is attached."""
        self._of_step: int | None = None
        """The step that it must be of, if that is known."""
        self._hook: RemovableHandle | None = None
        self.following = self._follow(asked.plan)

    @property
    def handle(self) -> Handle | None:
        """Of what is attached to the model now, whoever attached it."""
        try:
            return handle_of(self.model)
        except UsageError:
            return None

    def figures(self) -> dict[str, float]:
        """Of the last step, for a logger; empty where nothing is attached."""
        handle = self.handle
        return {} if handle is None else handle.scalars()

    @property
    def step(self) -> int | None:
        """How many were exchanged by what is attached, or by what is going to be loaded, if that is known."""
        handle = self.handle
        return self._of_step if handle is None else handle.stats().steps

    def close(self) -> None:
        """Ends the following; what is attached stays, and can still be saved."""
        self.following.close()
        self._unhook()

    def drop(self) -> None:
        """The model is not trained any more: lets go of its connections."""
        self.close()
        forget(self.model)

    # --- checkpoints --------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> bool:
        """Collective, between steps: what a resumed run needs to go on. Returns whether ranks keep some of that."""
        handle = self.handle
        if handle is not None and handle.error is not None:
            self._asked.say(f"{folder}: nothing is saved of an exchange that has failed")
            return False
        if handle is None and self._waiting is not None:  # loaded, and saved again before the first step
            self._copy(self._waiting, folder)
            return True
        keeps = handle is not None and (_keeps(handle.plan) if handle.plan is not None else handle.exchange.keeps)
        plan = self._found_plan(handle, keeps)
        with together(self._group, self._device, "what is saved", "save") as fields:
            fields |= {"keeps": keeps, "plan": plan is not None}
            if self._group.rank() == 0:
                if not keeps:
                    remove(folder)
                if plan is not None:
                    folder.mkdir(parents=True, exist_ok=True)
                    plan.save(folder / _PLAN)
                else:
                    (folder / _PLAN).unlink(missing_ok=True)
        if handle is not None and keeps:
            handle.save(folder)
        return keeps

    def _found_plan(self, handle: Handle | None, keeps: bool) -> Plan | None:
        """By tuning, if it is what the model follows now; while it is still tried, only if it keeps something."""
        if not self._asked.tunes or not (self.following.done or keeps):
            return None
        if handle is not None:
            return handle.plan
        found = self.following.plan
        return found if found is not None and found.nothing else None

    def load(self, folder: Path, of_step: int | None = None, or_refuse: str | None = None) -> None:
        """Collective: goes on where `save` was called, at once or as soon as something is attached.

        `of_step`: which `step` that was, where the checkpoint knows. `or_refuse`: what to say if the folder is missing,
        where that is an error.
        """
        plan: Plan | None = None
        with together(self._group, self._device, "what is loaded", "load") as fields:
            if or_refuse is not None and not folder.is_dir():
                raise UsageError(or_refuse)
            if self._asked.tunes and (folder / _PLAN).exists():
                plan = Plan.load(folder / _PLAN)
            kept = folder.is_dir() and any(folder.glob("rank-*"))
            fields |= {"kept": kept, "plan": plan is not None}
        if plan is not None:
            kept = self._goes_on_with(plan, folder, kept) and kept
        elif kept and (self._asked.tunes or not self._asked.may_keep):
            self._asked.say(f"{folder}: what an exchange kept there is of no use to what is attached now")
            kept = False
        elif not kept and self._asked.may_keep:
            self._asked.say(f"{folder}: nothing was kept there: it starts without")
            self._forget()
        self._waiting, self._of_step = folder if kept else None, of_step
        self._go_on()
        if self._waiting is not None and self._hook is None:
            self._hook = self.model.register_forward_pre_hook(Unseen(lambda *_: self._go_on()))

    def _goes_on_with(self, plan: Plan, folder: Path, kept: bool) -> bool:
        """Collective: has the model follow the plan that was found before, if it is for this cluster."""
        different = difference_of(plan, shapes_of(self.model), self._group, self._device.type, "load")
        if different is not None and kept and self._asked.on_world_size != "reset":
            raise UsageError(
                f"{folder}: the plan that was found is for something else: {different}. on_world_size='reset' forgets "
                "what it kept, and tunes anew"
            )
        if different is not None:
            self._asked.say(f"{folder / _PLAN} is for something else, and the model is tuned anew: {different}")
            return False
        handle = self.handle
        if handle is None or handle.plan != plan:
            self.close()
            if handle is not None:
                make_plain(self.model)
            self.following = self._follow(plan)
        return True

    def _go_on(self) -> None:
        """Loads what waits for something to be attached. In the same forward on all ranks."""
        handle = self.handle
        if self._waiting is None or handle is None:
            return
        folder, self._waiting = self._waiting, None
        self._unhook()
        handle.load(folder, on_world_size=self._asked.on_world_size)
        step = handle.stats().steps
        if self._of_step not in (None, step):
            raise UsageError(
                f"{folder} is of step {step}, and its checkpoint of {self._of_step}: they were not saved together: "
                "take an earlier checkpoint"
            )

    def _unhook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._hook = None

    def _forget(self) -> None:
        """What is kept now is of steps that a checkpoint without it does not have."""
        handle = self.handle
        if handle is not None:
            handle.load_state_dict({**handle.state_dict(), "steps": 0, "buckets": [], "tensors": {}})

    def _follow(self, plan: Plan | None) -> Following:
        asked = self._asked
        return follow(
            self.model,
            exchange=asked.exchange,
            plan=plan,
            allow=asked.allow if plan is None else (),
            network=asked.network,
            scaler=self._scaler,
            timeout_s=asked.timeout_s,
            quiet=asked.quiet,
        )

    def _copy(self, source: Path, folder: Path) -> None:
        with together(self._group, self._device, "what is saved", "save"):
            if self._group.rank() == 0 and source.resolve() != folder.resolve():
                remove(folder)
                folder.mkdir(parents=True, exist_ok=True)
                for path in source.iterdir():
                    write_bytes(folder / path.name, path.read_bytes())


def remove(folder: Path) -> None:
    """What `save` has written, if anything."""
    if folder.is_dir():
        for path in (folder / _PLAN, *folder.glob("rank-*.safetensors*")):
            path.unlink(missing_ok=True)
        if not any(folder.iterdir()):
            folder.rmdir()


def _keeps(plan: Plan | None) -> bool:
    return plan is not None and any(exchange.keeps for exchange in plan.exchanges)
