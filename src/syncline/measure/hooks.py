"""Hooks on a user's module that disappear when the module is copied, pickled or compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Unseen:
    """A hook that calls a function; copies of the hooked module get a hook that does nothing."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = torch.compiler.disable(call)

    def __call__(self, *arguments: Any) -> None:
        self._call(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return _instead, ()


# Pickled modules refer to these two functions by name.
def nothing(*_: object) -> None:
    """Do nothing: the hook of copied modules."""


def _instead() -> Callable[..., None]:
    return nothing
