"""Follows the models of a script that knows nothing of it, and writes down what became of them.

Three things of torch are looked at while the script runs, each through a wrapper that calls the original: the building
of a DistributedDataParallel, the building of a GradScaler, and `Tensor.backward`, for the loss. They are put back at
the end.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import socket
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP

from syncline._version import __version__
from syncline.ddp.attach import scale_of
from syncline.errors import SynclineError, first_line
from syncline.health.heartbeat import explain_end
from syncline.records.run_record import FINISHED, RUNNING, ModelRecord, RunRecord
from syncline.run.script import run_script
from syncline.tuning.follow import Following, Wishes

PAGE = "report.html"
SAVED_EVERY_S = 60.0
"""Also while the script runs: a job that is killed leaves what was known a minute before."""
SAVED_FIRST_S = 5.0
"""After a model was built, when its record was written for the first time."""


@dataclass(frozen=True)
class Job:
    """A script, and what is wanted for its models."""

    script: str
    arguments: tuple[str, ...]
    module: bool
    wishes: Wishes
    folder: Path
    command: str
    """That starts it again."""


@dataclass
class Runner:
    job: Job
    rank: int = field(default_factory=lambda: int(os.environ.get("RANK", "0")))
    ranks: int = field(default_factory=lambda: int(os.environ.get("WORLD_SIZE", "1")))

    def __post_init__(self) -> None:
        self.ended = RUNNING
        self._began_s, self._began = time.monotonic(), _now()
        self._save_at_s = self._began_s
        self._followings: list[Following] = []
        self._scalers: list[weakref.ref[GradScaler]] = []
        """In the order in which they were built, which is the same on all ranks."""
        self._warned = False

    def run(self) -> None:
        """The script. What it raises is raised; records are written in any case."""
        try:
            with self._looking():
                self._left = run_script(self.job.script, self.job.arguments, module=self.job.module)
            self.ended = FINISHED
        except SystemExit as exit_:
            self.ended = FINISHED if exit_.code in (None, 0) else f"ended with exit status {exit_.code}"
            raise
        except BaseException as error:
            line = first_line(error) if str(error) else ""
            self.ended = f"ended by {type(error).__name__}: {line}".rstrip(": ")
            self.save()  # now: what comes next takes seconds, and a launcher may end this process meanwhile
            self.ended += explain_end(error)
            raise
        finally:
            self.save()
            if self.ended == FINISHED:  # else others may ask what became of this rank until the process ends
                for following in self._followings:
                    following.close()

    @property
    def refused(self) -> SynclineError | None:
        """What was asked for and could not be done, if anything."""
        return next((one.error for one in self._followings if one.error is not None), None)

    @property
    def found(self) -> int:
        """How many models the script built."""
        return len(self._followings)

    def record(self) -> RunRecord:
        now_s = time.monotonic()
        return RunRecord(
            rank=self.rank,
            ranks=self.ranks,
            command=self.job.command,
            ended=self.ended,
            seconds=now_s - self._began_s,
            tuning_s=sum(one.seconds for one in self._followings),
            date=_now(),
            torch=str(torch.__version__),
            syncline=__version__,
            clock_s=time.time() - now_s,
            models=tuple(map(self._record, self._followings)),
            host=socket.gethostname(),
            process=os.getpid(),
            began=self._began,
        )

    def save(self) -> None:
        """Never the reason for which a training fails."""
        self._save_at_s = time.monotonic() + SAVED_EVERY_S
        if not self._followings:
            return
        try:
            self.job.folder.mkdir(parents=True, exist_ok=True)
            self.record().save(self.path(self.rank))
        except Exception as error:  # noqa: BLE001 - the training is worth more than its record
            if not self._warned:
                self._warned = True
                line = first_line(error)
                print(f"syncline run: no record of rank {self.rank} is written: {line}", file=sys.stderr)

    def _record(self, following: Following) -> ModelRecord:
        """What all ranks know alike, one of them writes."""
        record = following.record()
        return record if self.rank == 0 else msgspec.structs.replace(record, profile=None, network=None, plan=None)

    def _remove_old(self) -> None:
        """What an earlier run has left in the folder must not be taken for a part of this one."""
        for path in (*self.job.folder.glob("rank-*.json"), self.job.folder / PAGE):
            rank = path.stem.removeprefix("rank-")
            others = self.rank == 0 and (path.name == PAGE or (rank.isdigit() and int(rank) >= self.ranks))
            if others or path == self.path(self.rank):
                with contextlib.suppress(OSError):
                    path.unlink()

    def path(self, rank: int) -> Path:
        return self.job.folder / f"rank-{rank:04d}.json"

    # --- what the script does -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _looking(self) -> Iterator[None]:
        with (
            _wrapped(DDP, "__init__", self._after_ddp),
            _wrapped(GradScaler, "__init__", lambda scaler, *_: self._scalers.append(weakref.ref(scaler))),
            _wrapped(Tensor, "backward", None, self._before_backward),
        ):
            yield

    def _after_ddp(self, ddp: DDP, *_: Any) -> None:
        if any(one.working for one in self._followings):
            return
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()  # not every launcher says so beforehand
        if not self._followings:
            self._remove_old()
        try:
            following = Following(ddp, self.job.wishes, self._scaler)
        except SynclineError as error:
            if self.rank == 0:
                print(f"syncline run: {type(ddp.module).__name__} is left alone: {error}", file=sys.stderr)
            return
        self._followings.append(following)
        self.save()
        self._save_at_s = time.monotonic() + SAVED_FIRST_S

    def _scaler(self) -> GradScaler | None:
        built = (scaler() for scaler in self._scalers)
        return next((one for one in built if one is not None and one.is_enabled()), None)

    def _before_backward(self, loss: Tensor, *_: Any) -> None:
        if loss.numel() == 1 and self._followings:
            scale = scale_of(self._scaler())
            unscaled = loss.detach().clone() if scale is None else loss.detach() / scale
            for following in self._followings:
                following.note_loss(unscaled)
        if self._followings and time.monotonic() > self._save_at_s:
            self.save()


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


@contextlib.contextmanager
def _wrapped(
    owner: type,
    name: str,
    after: Callable[..., object] | None,
    before: Callable[..., object] | None = None,
) -> Iterator[None]:
    """While this lasts, `owner.name` also calls `before` and `after` with its own arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args)
        answer = original(*args, **kwargs)
        if after is not None:
            after(*args)
        return answer

    setattr(owner, name, wrapper)
    try:
        yield
    finally:
        setattr(owner, name, original)
