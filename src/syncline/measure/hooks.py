"""Hooks on a module that is somebody else's: gone when it is copied, pickled or compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Unseen:
    """Calls a function, from one module only: what is made from that module does without."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = torch.compiler.disable(call)

    def __call__(self, *arguments: Any) -> None:
        self._call(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return _instead, ()


def nothing(*_: object) -> None:
    """What copies of a hooked module call."""


def _instead() -> Callable[..., None]:
    return nothing
