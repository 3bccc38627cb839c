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
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP

from syncline._version import __version__
from syncline.engine.follow import Following, Wishes
from syncline.errors import SynclineError
from syncline.report.record import ModelRecord, RunRecord
from syncline.run.script import run_script

SAVED_EVERY_S = 60.0
"""Also while the script runs: a job that is killed leaves what was known a minute before."""


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
        self.started = time.time()
        """On the clock that files have."""
        self._began_s = self._saved_s = time.monotonic()
        self._followings: list[Following] = []
        self._scalers: weakref.WeakSet[GradScaler] = weakref.WeakSet()
        self._warned = False

    def run(self) -> None:
        """The script. What it raises is raised; records are written in any case."""
        ended = "finished"
        try:
            with self._looking():
                self._left = run_script(self.job.script, self.job.arguments, module=self.job.module)
        except SystemExit as exit_:
            ended = "finished" if exit_.code in (None, 0) else f"ended with exit status {exit_.code}"
            raise
        except BaseException as error:
            ended = f"ended by {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".rstrip(": ")
            raise
        finally:
            self.save(ended)
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

    def record(self, ended: str) -> RunRecord:
        now_s = time.monotonic()
        return RunRecord(
            rank=self.rank,
            ranks=self.ranks,
            command=self.job.command,
            ended=ended,
            seconds=now_s - self._began_s,
            tuning_s=sum(one.seconds for one in self._followings),
            date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            torch=str(torch.__version__),
            syncline=__version__,
            clock_s=time.time() - now_s,
            models=tuple(map(self._record, self._followings)),
        )

    def save(self, ended: str) -> None:
        """Never the reason for which a training fails."""
        self._saved_s = time.monotonic()
        try:
            self.job.folder.mkdir(parents=True, exist_ok=True)
            self.record(ended).save(self.path(self.rank))
        except Exception as error:  # noqa: BLE001 - the training is worth more than its record
            if not self._warned:
                self._warned = True
                line = str(error).splitlines()[0] if str(error) else type(error).__name__
                print(f"syncline run: no record of rank {self.rank} is written: {line}", file=sys.stderr)

    def _record(self, following: Following) -> ModelRecord:
        """What all ranks know alike, one of them writes."""
        record = following.record()
        return record if self.rank == 0 else msgspec.structs.replace(record, profile=None, network=None, plan=None)

    def path(self, rank: int) -> Path:
        return self.job.folder / f"rank-{rank:04d}.json"

    # --- what the script does -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _looking(self) -> Iterator[None]:
        with (
            _wrapped(DDP, "__init__", self._after_ddp),
            _wrapped(GradScaler, "__init__", lambda scaler, *_: self._scalers.add(scaler)),
            _wrapped(Tensor, "backward", None, self._before_backward),
        ):
            yield

    def _after_ddp(self, ddp: DDP, *_: Any) -> None:
        if any(one.working for one in self._followings):
            return
        try:
            following = Following(ddp, self.job.wishes, self._scaler)
        except SynclineError as error:
            if self.rank == 0:
                print(f"syncline run: {type(ddp.module).__name__} is left alone: {error}", file=sys.stderr)
            return
        self._followings.append(following)

    def _scaler(self) -> GradScaler | None:
        return next((one for one in self._scalers if one.is_enabled()), None)

    def _before_backward(self, loss: Tensor, *_: Any) -> None:
        if loss.numel() == 1:
            for following in self._followings:
                following.note_loss(loss)
        if self._followings and time.monotonic() - self._saved_s > SAVED_EVERY_S:
            self.save("still running")


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
