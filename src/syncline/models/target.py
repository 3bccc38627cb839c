"""The model to train, as named on the command line: one of the zoo, or a function of the user.

    def build():                                     # in train.py; named train.py:build
        net = Net()
        return net, lambda model: loss(model(inputs), labels), torch.optim.AdamW(net.parameters())

`step` runs one forward and returns the loss. The optimizer is optional. If the function has a parameter `batch`, it is
called with the number of samples per step.
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

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.errors import SynclineError, UsageError
from syncline.models import zoo

AUTOCAST = {"bf16": torch.bfloat16}
_BATCH = 16


@dataclass(frozen=True)
class Task:
    """A model and its step."""

    name: str
    model: nn.Module
    step: Callable[[nn.Module], Tensor]
    optimizer: Optimizer | None
    batch: int | None = None


@dataclass(frozen=True)
class Target:
    """The name and settings of a task, checked as far as possible without building it."""

    name: str
    device: str | None = None
    """Device for a model of the zoo. A function chooses its own, which must match if this is set."""
    batch: int | None = None
    autocast: str | None = None

    def __post_init__(self) -> None:
        if self.autocast is not None and self.autocast not in AUTOCAST:
            raise UsageError(f"autocast {self.autocast!r} is unknown: use {', '.join(AUTOCAST)}")
        if not self.is_function:
            zoo.check_name(self.name, "; or name yours as FILE.py:FUNCTION")
            return
        path, function = self._path_and_function
        if not function.isidentifier():
            raise UsageError(f"{self.name}: name the function that builds the model, as FILE.py:FUNCTION")
        if not path.is_file():
            raise UsageError(f"{path}: there is no such file")
        if self.autocast is not None:
            raise UsageError(f"autocast is for the built-in models: {self.name} chooses its own")

    @property
    def is_function(self) -> bool:
        return ":" in self.name or self.name.endswith(".py")

    def build(self, device: torch.device) -> Task:
        """Build the task; call it on every rank. Errors in the user's code become one line with their location."""
        with self.blamed():
            return self._from_function(device) if self.is_function else self._from_zoo(device)

    @contextlib.contextmanager
    def blamed(self) -> Iterator[None]:
        """Turn errors in the user's code into a `SynclineError`."""
        try:
            yield
        except SynclineError:
            raise
        except (Exception, SystemExit) as error:
            what = f"{type(error).__name__}: {error}".splitlines()[0]
            path = self._path_and_function[0].resolve()
            frames = traceback.extract_tb(error.__traceback__) if self.is_function else []
            lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path]
            location = f" ({path}, line {lines[-1]})" if lines else ""
            raise SynclineError(f"{self.name} failed: {what}{location}") from error

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
        if self.batch is not None and "batch" not in inspect.signature(build).parameters:
            raise UsageError(f"{self.name} chooses its own batch: give {function} a parameter called batch")
        built = build(batch=self.batch) if self.batch is not None else build()
        parts = built if isinstance(built, tuple) else (built,)
        model, step, optimizer = (*parts, None)[:3] if len(parts) in (2, 3) else (None, None, None)
        if not (isinstance(model, nn.Module) and callable(step) and isinstance(optimizer, Optimizer | None)):
            kinds = ", ".join(type(part).__name__ for part in parts)
            returned = f"({kinds})" if isinstance(built, tuple) and kinds else type(built).__name__
            wanted = "it must return (model, step) or (model, step, optimizer)"
            raise UsageError(f"{self.name} returned {returned}: {wanted}")
        where = next((p.device.type for p in model.parameters()), "cpu")
        if self.device is not None and where != device.type:
            raise UsageError(f"{self.name} put its model on {where}, not on {device.type}: move it there in {function}")
        name = function if type(model) is nn.Sequential else type(model).__name__
        return Task(name, model, step, optimizer, self.batch)


def _imported(path: Path) -> ModuleType:
    """Import a file as `python FILE` would: its folder comes first, so that it can import its neighbours."""
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    # Under a special name, so that a file named like a module of the standard library does not replace it.
    name = f"_syncline_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path}: is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module
