"""Algorithms that sum gradients over ranks. A new one is a new file and one line in `EXCHANGES`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from syncline.exchange.allgather_topk import AllgatherTopk
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
    from_settings,
    is_dense,
    settings,
    stride_in_bucket,
)
from syncline.exchange.dense import Dense
from syncline.exchange.hierarchical import Hierarchical
from syncline.exchange.hierarchical_state import Way
from syncline.exchange.oktopk import OkTopk
from syncline.exchange.tree import Tree

EXCHANGES: dict[str, Callable[[], Exchange]] = {
    "dense": Dense,
    "bf16": lambda: Dense(wire="bf16"),
    "fp16": lambda: Dense(wire="fp16"),
    "hierarchical": Hierarchical,
    "hierarchical+bf16": lambda: Hierarchical(across=Dense(wire="bf16")),
    "topk-allgather": AllgatherTopk,
    "oktopk": OkTopk,
    "hierarchical+oktopk": lambda: Hierarchical(across=OkTopk()),
}
"""Exchanges by the names that the bench and the laws use."""

_TYPES = {kind.__name__: kind for kind in (Dense, Hierarchical, OkTopk, AllgatherTopk)}


def made_of(described: Mapping[str, Any]) -> Exchange:
    """Return the built-in exchange that `settings` described.

    Raises:
        ValueError: The type or a field is unknown, or a value does not fit.
    """
    exchange: Exchange = from_settings(described, _TYPES)
    return exchange


BASELINES = frozenset({"topk-allgather"})
"""Exchanges to compare with, which Syncline never recommends."""

__all__ = [
    "BASELINES",
    "EXCHANGES",
    "WORLD",
    "AllgatherTopk",
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
    "is_dense",
    "made_of",
    "settings",
    "stride_in_bucket",
]
