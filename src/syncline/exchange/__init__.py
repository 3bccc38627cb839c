"""The ways to sum gradients over ranks. A new one is a new file and one line in `EXCHANGES`."""

from __future__ import annotations

from collections.abc import Callable

from syncline.exchange.base import (
    WORLD,
    Comm,
    Cost,
    Counter,
    Exchange,
    Layout,
    Phase,
    Rounding,
    Slot,
    State,
    Topology,
    Work,
    settings,
)
from syncline.exchange.dense import Dense

EXCHANGES: dict[str, Callable[[], Exchange]] = {
    "dense": Dense,
    "bf16": lambda: Dense(wire="bf16"),
    "fp16": lambda: Dense(wire="fp16"),
}
"""By the name that the bench and the laws use."""

__all__ = [
    "EXCHANGES",
    "WORLD",
    "Comm",
    "Cost",
    "Counter",
    "Dense",
    "Exchange",
    "Layout",
    "Phase",
    "Rounding",
    "Slot",
    "State",
    "Topology",
    "Work",
    "settings",
]
