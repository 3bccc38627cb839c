"""Run an unmodified script, follow its models, and write a record of them.

Three functions of torch are wrapped while the script runs and restored at the end: the constructors of
DistributedDataParallel and of GradScaler, and `Tensor.backward`, from which the loss is recorded. A hook sees all steps
of optimizers, to find sharded models. To exchange updates, which `--quality close` may choose too, the optimizer of the
model and its scaler must be known: then the constructor of Optimizer and `GradScaler.step` are also wrapped.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import runpy
import socket
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from syncline._version import __version__
from syncline.errors import SynclineError, UsageError, first_line
from syncline.health.heartbeat import shared_heartbeat
from syncline.records.run_record import FINISHED, RUNNING, RunRecord
from syncline.run.sharded import ShardedModels
from syncline.runtime.validation import scale_of
from syncline.tuning.following import Following
from syncline.tuning.settings import TuneSettings

PAGE = "report.html"
SAVED_EVERY_S = 60.0  # how often records are written while the script runs, so that a job that is killed leaves one
SAVED_FIRST_S = 5.0  # time from the first record of a model to the second


@dataclass
class Runner:
    """Runs a script on one rank, with these settings for its models."""

    script: str
    arguments: Sequence[str]
    module: bool
    settings: TuneSettings
    folder: Path
    command: str  # the command line that starts it again

    def __post_init__(self) -> None:
        self.rank, self.ranks = (int(os.environ.get(*name)) for name in (("RANK", "0"), ("WORLD_SIZE", "1")))
        self.ended = RUNNING
        self._began_s, self._began = time.monotonic(), _now()
        self._save_at_s = self._began_s
        self.followings: list[Following] = []
        self._scalers: list[weakref.ref[GradScaler]] = []  # in the order of construction, the same on all ranks
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._scaler_of: weakref.WeakKeyDictionary[Optimizer, weakref.ref[GradScaler]] = weakref.WeakKeyDictionary()
        self._warned = False
        self.sharded = ShardedModels(self.settings, self._scaler)

    def run(self) -> None:
        """Run the script. Its exceptions are raised again; records are written in any case."""
        try:
            with (
                _wrapped(DDP, "__init__", self._after_ddp),
                _wrapped(GradScaler, "__init__", lambda scaler, *_: self._scalers.append(weakref.ref(scaler))),
                _wrapped(Tensor, "backward", self._before_backward, first=True),
                self.sharded.watched(),
                self._optimizers_seen() if self.settings.may_exchange_updates else contextlib.nullcontext(),
            ):
                self._globals = run_script(self.script, self.arguments, module=self.module)
            self.ended = FINISHED
        except SystemExit as exit_:
            self.ended = FINISHED if exit_.code in (None, 0) else f"ended with exit status {exit_.code}"
            raise
        except BaseException as error:
            line = first_line(error) if str(error) else ""
            self.ended = f"ended by {type(error).__name__}: {line}".rstrip(": ")
            self.save()  # before explain_end, which takes seconds in which a launcher may end this process
            if (heartbeat := shared_heartbeat()) is not None:
                self.ended += heartbeat.explain_end(error)
            raise
        finally:
            self.save()
            if self.ended == FINISHED:  # after a failure, other ranks may still need this rank's heartbeats
                for following in self.followings:
                    following.close()

    @property
    def refused(self) -> SynclineError | None:
        """The reason why the requested exchange or plan could not be applied, if it could not."""
        return next((following.error for following in self.followings if following.error is not None), None)

    def record(self) -> RunRecord:
        """Return the record of this rank so far."""
        now_s = time.monotonic()
        models = [following.record() for following in self.followings]
        if self.rank:  # only rank 0 writes what is the same on all ranks
            models = [msgspec.structs.replace(model, profile=None, network=None, plan=None) for model in models]
        return RunRecord(
            rank=self.rank,
            ranks=self.ranks,
            command=self.command,
            ended=self.ended,
            seconds=now_s - self._began_s,
            tuning_s=sum(following.seconds for following in self.followings),
            date=_now(),
            torch=str(torch.__version__),
            syncline=__version__,
            clock_s=time.time() - now_s,
            models=tuple(models),
            host=socket.gethostname(),
            process=os.getpid(),
            began=self._began,
        )

    def save(self) -> None:
        """Write the record. A failure to do so is printed once and does not end the training."""
        self._save_at_s = time.monotonic() + SAVED_EVERY_S
        if not self.followings:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.record().save(self.path(self.rank))
        except Exception as error:  # noqa: BLE001 - the training continues without a record
            if not self._warned:
                self._warned = True
                line = first_line(error)
                print(f"syncline run: the record of rank {self.rank} cannot be written: {line}", file=sys.stderr)

    def _remove_old(self) -> None:
        """Remove the files of an earlier run, which would be taken for files of this one."""
        for path in (*self.folder.glob("rank-*.json"), self.folder / PAGE):
            rank = path.stem.removeprefix("rank-")
            is_shared = self.rank == 0 and (path.name == PAGE or (rank.isdigit() and int(rank) >= self.ranks))
            if is_shared or path == self.path(self.rank):
                with contextlib.suppress(OSError):
                    path.unlink()

    def path(self, rank: int) -> Path:
        """Return the path of a rank's record."""
        return self.folder / f"rank-{rank:04d}.json"

    def _after_ddp(self, ddp: DDP, *_: Any) -> None:
        if any(following.working for following in self.followings):
            return
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()  # not every launcher sets RANK and WORLD_SIZE
        if not self.followings:
            self._remove_old()
        try:
            if self.settings.may_exchange_updates:
                option = "--updates" if self.settings.updates else f"--quality {self.settings.quality}"
                finder = _OptimizerFinder(weakref.ref(ddp), self._optimizers, self._stepped, option)
                find_scaler = functools.partial(self._scaler_of_updates, finder)
                following = Following(ddp, self.settings, find_scaler, finder.find, tunes_updates=True)
            else:
                following = Following(ddp, self.settings, self._scaler)
        except SynclineError as error:
            if self.rank == 0:
                print(f"syncline run: {type(ddp.module).__name__} is left alone: {error}", file=sys.stderr)
            return
        self.followings.append(following)
        self.save()
        self._save_at_s = time.monotonic() + SAVED_FIRST_S

    def _scaler(self) -> GradScaler | None:
        """Return the first scaler of the script that is in use."""
        scalers = (reference() for reference in self._scalers)
        return next((scaler for scaler in scalers if scaler is not None and scaler.is_enabled()), None)

    @contextlib.contextmanager
    def _optimizers_seen(self) -> Iterator[None]:
        """Record optimizers that the script builds and steps, and the scalers that step them."""

        def stepped(optimizer: Optimizer, *_: Any) -> None:
            self._optimizers.add(optimizer)
            self._stepped.add(optimizer)

        def scaled(scaler: GradScaler, optimizer: Any = None, *_: Any) -> None:
            if isinstance(optimizer, Optimizer):
                stepped(optimizer)  # even if the scaler skips the step
                self._scaler_of[optimizer] = weakref.ref(scaler)

        hook = register_optimizer_step_post_hook(stepped)
        try:
            with (
                _wrapped(Optimizer, "__init__", lambda optimizer, *_: self._optimizers.add(optimizer)),
                _wrapped(GradScaler, "step", scaled, first=True),
            ):
                yield
        finally:
            hook.remove()

    def _scaler_for(self, optimizer: Optimizer | None) -> GradScaler | None:
        """Return the scaler that has stepped an optimizer."""
        reference = None if optimizer is None else self._scaler_of.get(optimizer)
        return None if reference is None else reference()

    def _scaler_of_updates(self, finder: _OptimizerFinder) -> GradScaler | None:
        """Return the scaler of a model whose optimizer is searched. Only tuning may attach without the optimizer."""
        return self._scaler_for(finder.found) or (self._scaler() if self.settings.tunes else None)

    def _before_backward(self, loss: Tensor, *_: Any) -> None:
        if loss.numel() == 1 and self.followings:
            scale = scale_of(self._scaler())
            unscaled = loss.detach().clone() if scale is None else loss.detach() / scale
            for following in self.followings:
                following.note_loss(unscaled)
        if self.followings and time.monotonic() > self._save_at_s:
            self.save()


@dataclass
class _OptimizerFinder:
    """Finds the optimizer of a model among those that the script has built so far."""

    ddp: weakref.ref[DDP]
    built: weakref.WeakSet[Optimizer]
    stepped: weakref.WeakSet[Optimizer]
    option: str  # the option of `syncline run` that needs the optimizer
    found: Optimizer | None = None
    calls: int = 0

    def find(self) -> Optimizer | None:
        """Return the model's optimizer once it has stepped, because then its scaler is known too.

        The first call is before the model's first step, and each further one after another step.

        Raises:
            UsageError: There is not one optimizer. All ranks see the same, because they run the same script.
        """
        self.calls += 1
        ddp = self.ddp()
        parameters = {} if ddp is None else {id(p): name for name, p in ddp.module.named_parameters()}
        own = [o for o in self.built if any(id(p) in parameters for group in o.param_groups for p in group["params"])]
        name = "the model" if ddp is None else type(ddp.module).__name__
        if len(own) > 1:
            kinds = " and ".join(sorted(type(optimizer).__name__ for optimizer in own))
            text = f"{self.option}: {len(own)} optimizers have parameters of {name} ({kinds})"
            raise UsageError(f"{text}: use one optimizer with several parameter groups, or leave out {self.option}")
        if not own and self.calls > 1:
            text = f"{self.option}: no optimizer of torch has the parameters of {name}, which has made a step"
            raise UsageError(f"{text}: use a torch.optim.Optimizer, or leave out {self.option}")
        self.found = own[0] if own and own[0] in self.stepped else None
        return self.found


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


@contextlib.contextmanager
def _wrapped(owner: type, name: str, call: Callable[..., object], *, first: bool = False) -> Iterator[None]:
    """Make `owner.name` also run `call` with its arguments, inside the context: after the original, or before it."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if first:
            call(*args)
        result = original(*args, **kwargs)
        if not first:
            call(*args)
        return result

    setattr(owner, name, wrapper)
    try:
        yield
    finally:
        setattr(owner, name, original)


def check_script(script: str, *, module: bool) -> None:
    """Raise a UsageError if there is no such script or module name."""
    if module:
        if not all(part.isidentifier() for part in script.split(".")):
            raise UsageError(f"{script} is not a module name: with -m, write it as in an import statement")
        return
    path = Path(script)
    if path.is_dir():
        if not (path / "__main__.py").is_file():
            raise UsageError(f"{script} is a folder without a __main__.py: name the training script")
    elif not path.exists():
        raise UsageError(f"{script}: no such script")


def run_script(script: str, arguments: Sequence[str], *, module: bool) -> dict[str, Any]:
    """Run the script in this process, as `__main__`.

    Returns:
        Its global variables, which an interpreter keeps alive until it exits.
    """
    sys.argv = [script, *arguments]
    if not getattr(sys.flags, "safe_path", False):  # the entry for `syncline run` itself
        sys.path[0] = str(Path.cwd() if module else Path(script).resolve().parent)
    if module:
        return runpy.run_module(script, run_name="__main__", alter_sys=True)
    return runpy.run_path(str(Path(script).absolute()), run_name="__main__")
