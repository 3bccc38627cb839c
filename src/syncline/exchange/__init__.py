"""Algorithms that sum gradients over ranks. A new one is a new file, a line in `EXCHANGES` and an entry in `_TYPES`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from syncline.exchange.allgather_topk import AllgatherTopk
from syncline.exchange.base import Climbing, Comm, Counter, Exchange, Rounding, State, Work, default_lanes
from syncline.exchange.dense import Dense
from syncline.exchange.hierarchical import Hierarchical, Way
from syncline.exchange.layout import Layout, Slot, is_dense, stride_in_bucket
from syncline.exchange.oktopk import OkTopk
from syncline.exchange.topology import WORLD, Cost, Level, Phase, Topology, Tree

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
"""Exchanges by the names that predictions, plans, the bench and the tests of the laws use."""

BASELINES = frozenset({"topk-allgather"})
"""Exchanges to compare with, which Syncline never recommends."""

_TYPES: dict[str, type] = {kind.__name__: kind for kind in (Dense, Hierarchical, OkTopk, AllgatherTopk)}
"""Types of exchanges that a plan's file may name."""


def settings(exchange: object) -> dict[str, Any]:
    """Return an exchange's type and fields, nested exchanges included, as JSON. They must match on every rank."""
    described: dict[str, Any] = {"type": type(exchange).__name__}
    if dataclasses.is_dataclass(exchange):
        for entry in dataclasses.fields(exchange):
            value = getattr(exchange, entry.name)
            described[entry.name] = settings(value) if isinstance(value, Exchange) else _as_lists(value)
    return described


def _as_lists(value: Any) -> Any:
    """Convert tuples to lists, as JSON does, so that settings read from a file compare equal."""
    return [_as_lists(item) for item in value] if isinstance(value, tuple) else value


def made_of(described: Mapping[str, Any]) -> Exchange:
    """Return the built-in exchange that `settings` described.

    Raises:
        ValueError: The type or a field is unknown, or a value does not fit.
    """
    name = described.get("type")
    if not isinstance(name, str) or name not in _TYPES:
        raise ValueError(f"no exchange is of type {name!r}; known: {', '.join(_TYPES)}")
    fields = {field.name for field in dataclasses.fields(_TYPES[name])}
    unknown = sorted(described.keys() - fields - {"type"})
    if unknown:
        raise ValueError(f"{name} has no setting {unknown[0]!r}; it has: {', '.join(sorted(fields)) or 'none'}")
    values = {
        key: made_of(value) if isinstance(value, Mapping) else value
        for key, value in described.items()
        if key != "type"
    }
    try:
        exchange: Exchange = _TYPES[name](**values)
    except (TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{name}: {error}") from error
    return exchange


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
