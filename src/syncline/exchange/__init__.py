"""The ways to sum gradients over ranks. A new one is a new file and one line in `EXCHANGES`."""

from __future__ import annotations

from collections.abc import Callable

from syncline.exchange.base import (
    WORLD,
    Climbing,
    Comm,
    Cost,
    Counter,
    Exchange,
    Layout,
    Level,
    Phase,
    Rounding,
    Slot,
    State,
    Topology,
    Work,
    default_lanes,
    settings,
)
from syncline.exchange.dense import Dense
from syncline.exchange.hierarchical import Hierarchical, Way
from syncline.exchange.oktopk import OkTopk
from syncline.exchange.tree import Tree

EXCHANGES: dict[str, Callable[[], Exchange]] = {
    "dense": Dense,
    "bf16": lambda: Dense(wire="bf16"),
    "fp16": lambda: Dense(wire="fp16"),
    "hierarchical": Hierarchical,
    "hierarchical+bf16": lambda: Hierarchical(across=Dense(wire="bf16")),
    "oktopk": OkTopk,
    "hierarchical+oktopk": lambda: Hierarchical(across=OkTopk()),
}
"""By the name that the bench and the laws use."""

__all__ = [
    "EXCHANGES",
    "WORLD",
    "Climbing",
    "Comm",
    "Cost",
    "Counter",
    "Dense",
    "Exchange",
    "Hierarchical",
    "Layout",
    "Level",
    "OkTopk",
    "Phase",
    "Rounding",
    "Slot",
    "State",
    "Topology",
    "Tree",
    "Way",
    "Work",
    "default_lanes",
    "settings",
]
