"""What a person names on the command line to be trained: a model of the zoo, or a function of theirs.

    def build():                                     # in train.py; named train.py:build
        net = Net()
        return net, lambda model: loss(model(inputs), labels), torch.optim.AdamW(net.parameters())

The step runs one forward and returns the loss. The optimizer may be left out. A function that takes a `batch` is asked
for steps of that many samples.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from syncline.errors import SynclineError, UsageError
from syncline.models import zoo

AUTOCAST = {"bf16": torch.bfloat16}
_BATCH = 16


@dataclass(frozen=True)
class Task:
    """A model, and how to take a step with it."""

    name: str
    model: nn.Module
    step: Callable[[nn.Module], Tensor]
    optimizer: torch.optim.Optimizer | None
    batch: int | None = None


@dataclass(frozen=True)
class Target:
    """A task by its name, checked as far as possible without building it."""

    name: str
    device: str | None = None
    """Where to put a model of the zoo; a function puts its model where it likes."""
    batch: int | None = None
    autocast: str | None = None

    def __post_init__(self) -> None:
        if self.autocast is not None and self.autocast not in AUTOCAST:
            raise UsageError(f"autocast {self.autocast!r} is unknown: use {', '.join(AUTOCAST)}")
        if not self.is_function:
            if self.name not in zoo.MODELS:
                known = ", ".join(zoo.MODELS)
                raise UsageError(f"no model is called {self.name}; known: {known}; or name yours as FILE.py:FUNCTION")
            return
        path, function = self._path_and_function
        if not function.isidentifier():
            raise UsageError(f"{self.name}: name the function that builds the model, as FILE.py:FUNCTION")
        if not path.is_file():
            raise UsageError(f"{path}: there is no such file")
        if self.autocast is not None:
            raise UsageError(f"autocast is for the models that ship: {self.name} chooses its own")

    @property
    def is_function(self) -> bool:
        return ":" in self.name or self.name.endswith(".py")

    def build(self, device: torch.device) -> Task:
        """On every rank; whatever a person's code raises becomes one line that says where."""
        with self.blamed():
            return self._from_function(device) if self.is_function else self._from_zoo(device)

    @contextlib.contextmanager
    def blamed(self) -> Iterator[None]:
        """Around what runs a person's code."""
        try:
            yield
        except SynclineError:
            raise
        except (Exception, SystemExit) as error:
            what = f"{type(error).__name__}: {error}".splitlines()[0]
            raise SynclineError(f"{self.name} failed: {what}{self._place(error)}") from error

    def _place(self, error: BaseException) -> str:
        """The deepest line of the person's own file."""
        frames = traceback.extract_tb(error.__traceback__)
        path = self._path_and_function[0].resolve()
        own = [frame for frame in frames if self.is_function and Path(frame.filename).resolve() == path]
        return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""

    @property
    def _path_and_function(self) -> tuple[Path, str]:
        path, colon, function = self.name.rpartition(":")
        return (Path(path), function) if colon else (Path(self.name), "")

    def _from_zoo(self, device: torch.device) -> Task:
        batch = self.batch or _BATCH
        inputs, targets = (part.to(device) for part in zoo.make_batch(self.name, batch))
        model = zoo.build_model(self.name).to(device).train()

        def step(model: nn.Module) -> Tensor:
            kind = AUTOCAST.get(self.autocast or "", torch.float32)
            with torch.autocast(device.type, kind, enabled=self.autocast is not None):
                return zoo.loss(model(inputs), targets)

        return Task(self.name, model, step, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), batch)

    def _from_function(self, device: torch.device) -> Task:
        path, function = self._path_and_function
        build = getattr(_imported(path), function, None)
        if not callable(build):
            raise UsageError(f"{path}: has no function called {function}")
        takes_batch = "batch" in inspect.signature(build).parameters
        if self.batch is not None and not takes_batch:
            raise UsageError(f"{self.name} chooses its own batch: give {function} a parameter called batch")
        made = build(batch=self.batch) if self.batch is not None else build()
        if not _is_task(made):
            raise UsageError(
                f"{self.name} returned {_kind(made)}: it must return (model, step) or (model, step, optimizer)"
            )
        model, step, *rest = made
        where = next((p.device.type for p in model.parameters()), "cpu")
        if self.device is not None and where != device.type:
            raise UsageError(f"{self.name} put its model on {where}, not on {device.type}: move it there in {function}")
        name = function if type(model) is nn.Sequential else type(model).__name__
        return Task(name, model, step, rest[0] if rest else None, self.batch)


def _imported(path: Path) -> ModuleType:
    """As `python FILE` would: the file's own folder comes first, so that its neighbours can be imported."""
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    # Under a name of its own: a file called like a module of the standard library would take that one's place.
    name = f"_syncline_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path}: is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def _is_task(made: Any) -> bool:
    return (
        isinstance(made, tuple)
        and len(made) in (2, 3)
        and isinstance(made[0], nn.Module)
        and callable(made[1])
        and (len(made) == 2 or isinstance(made[2], torch.optim.Optimizer))
    )


def _kind(made: Any) -> str:
    if isinstance(made, tuple):
        return f"({', '.join(type(part).__name__ for part in made)})"
    return type(made).__name__
