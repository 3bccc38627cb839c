"""Run an unmodified script, follow its models, and write a record of them.

Three functions of torch are wrapped while the script runs and restored at the end: the constructors of
DistributedDataParallel and of GradScaler, and `Tensor.backward`, from which the loss is recorded.
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
from syncline.tuning.follow import Following
from syncline.tuning.settings import TuneSettings

PAGE = "report.html"
SAVED_EVERY_S = 60.0
"""Interval at which records are written while the script runs, so that a job that is killed leaves one."""
SAVED_FIRST_S = 5.0
"""Time from the first record of a model to the second."""


@dataclass(frozen=True)
class Job:
    """A script, and the settings for its models."""

    script: str
    arguments: tuple[str, ...]
    module: bool
    settings: TuneSettings
    folder: Path
    command: str
    """The command line that starts it again."""


@dataclass
class Runner:
    """Runs a job on one rank."""

    job: Job
    rank: int = field(default_factory=lambda: int(os.environ.get("RANK", "0")))
    ranks: int = field(default_factory=lambda: int(os.environ.get("WORLD_SIZE", "1")))

    def __post_init__(self) -> None:
        self.ended = RUNNING
        self._began_s, self._began = time.monotonic(), _now()
        self._save_at_s = self._began_s
        self._followings: list[Following] = []
        self._scalers: list[weakref.ref[GradScaler]] = []
        """In the order of construction, which is the same on all ranks."""
        self._warned = False

    def run(self) -> None:
        """Run the script. Its exceptions are raised again; records are written in any case."""
        try:
            with self._hooked():
                self._globals = run_script(self.job.script, self.job.arguments, module=self.job.module)
            self.ended = FINISHED
        except SystemExit as exit_:
            self.ended = FINISHED if exit_.code in (None, 0) else f"ended with exit status {exit_.code}"
            raise
        except BaseException as error:
            line = first_line(error) if str(error) else ""
            self.ended = f"ended by {type(error).__name__}: {line}".rstrip(": ")
            self.save()  # before explain_end, which takes seconds in which a launcher may end this process
            self.ended += explain_end(error)
            raise
        finally:
            self.save()
            if self.ended == FINISHED:  # after a failure, other ranks may still need this rank's heartbeats
                for following in self._followings:
                    following.close()

    @property
    def refused(self) -> SynclineError | None:
        """The reason why the requested exchange or plan could not be applied, if it could not."""
        return next((following.error for following in self._followings if following.error is not None), None)

    @property
    def model_count(self) -> int:
        """The number of models that the script built."""
        return len(self._followings)

    def record(self) -> RunRecord:
        """Return the record of this rank so far."""
        now_s = time.monotonic()
        return RunRecord(
            rank=self.rank,
            ranks=self.ranks,
            command=self.job.command,
            ended=self.ended,
            seconds=now_s - self._began_s,
            tuning_s=sum(following.seconds for following in self._followings),
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
        """Write the record. A failure to do so is printed once and does not end the training."""
        self._save_at_s = time.monotonic() + SAVED_EVERY_S
        if not self._followings:
            return
        try:
            self.job.folder.mkdir(parents=True, exist_ok=True)
            self.record().save(self.path(self.rank))
        except Exception as error:  # noqa: BLE001 - the training continues without a record
            if not self._warned:
                self._warned = True
                line = first_line(error)
                print(f"syncline run: the record of rank {self.rank} cannot be written: {line}", file=sys.stderr)

    def _record(self, following: Following) -> ModelRecord:
        """Return a model's record. Only rank 0 writes what is the same on all ranks."""
        record = following.record()
        return record if self.rank == 0 else msgspec.structs.replace(record, profile=None, network=None, plan=None)

    def _remove_old(self) -> None:
        """Remove the files of an earlier run, which would be taken for files of this one."""
        for path in (*self.job.folder.glob("rank-*.json"), self.job.folder / PAGE):
            rank = path.stem.removeprefix("rank-")
            is_shared = self.rank == 0 and (path.name == PAGE or (rank.isdigit() and int(rank) >= self.ranks))
            if is_shared or path == self.path(self.rank):
                with contextlib.suppress(OSError):
                    path.unlink()

    def path(self, rank: int) -> Path:
        """Return the path of a rank's record."""
        return self.job.folder / f"rank-{rank:04d}.json"

    # --- wrapped functions --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _hooked(self) -> Iterator[None]:
        with (
            _wrapped(DDP, "__init__", self._after_ddp),
            _wrapped(GradScaler, "__init__", lambda scaler, *_: self._scalers.append(weakref.ref(scaler))),
            _wrapped(Tensor, "backward", None, self._before_backward),
        ):
            yield

    def _after_ddp(self, ddp: DDP, *_: Any) -> None:
        if any(following.working for following in self._followings):
            return
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()  # not every launcher sets RANK and WORLD_SIZE
        if not self._followings:
            self._remove_old()
        try:
            following = Following(ddp, self.job.settings, self._scaler)
        except SynclineError as error:
            if self.rank == 0:
                print(f"syncline run: {type(ddp.module).__name__} is left alone: {error}", file=sys.stderr)
            return
        self._followings.append(following)
        self.save()
        self._save_at_s = time.monotonic() + SAVED_FIRST_S

    def _scaler(self) -> GradScaler | None:
        """Return the first scaler of the script that is in use."""
        scalers = (reference() for reference in self._scalers)
        return next((scaler for scaler in scalers if scaler is not None and scaler.is_enabled()), None)

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
    """Make `owner.name` also call `before` and `after` with its arguments, inside the context."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args)
        result = original(*args, **kwargs)
        if after is not None:
            after(*args)
        return result

    setattr(owner, name, wrapper)
    try:
        yield
    finally:
        setattr(owner, name, original)
