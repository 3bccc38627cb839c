"""Algorithms that sum gradients over ranks. A new one is a new file, a line in `EXCHANGES` and an entry in `_TYPES`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from syncline.errors import UsageError
from syncline.exchange.allgather_topk import AllgatherTopk
from syncline.exchange.base import Comm, Counter, Exchange, Rounding, State, UsesLevels, Work, default_lanes
from syncline.exchange.chunked_topk import ChunkedTopk
from syncline.exchange.dense import Dense
from syncline.exchange.hierarchical import BucketPath, Hierarchical
from syncline.exchange.layout import Layout, Slot, is_dense, stride_in_bucket
from syncline.exchange.oktopk import OkTopk
from syncline.exchange.quantized import Quantized
from syncline.exchange.sparse import Sparse
from syncline.exchange.topology import WORLD, Cost, Level, Phase, Topology, Tree

EXCHANGES: dict[str, Callable[[], Exchange]] = {
    "dense": Dense,
    "bf16": lambda: Dense(wire="bf16"),
    "fp16": lambda: Dense(wire="fp16"),
    "hierarchical": Hierarchical,
    "hierarchical+bf16": lambda: Hierarchical(across=Dense(wire="bf16")),
    "int8": lambda: Quantized(bits=8),
    "int4": lambda: Quantized(bits=4),
    "int3": lambda: Quantized(bits=3),
    "hierarchical+int4": lambda: Hierarchical(across=Quantized(bits=4)),
    "topk-allgather": AllgatherTopk,
    "oktopk": OkTopk,
    "hierarchical+oktopk": lambda: Hierarchical(across=OkTopk()),
    "topk-chunks": ChunkedTopk,
}
"""Exchanges by the names that predictions, plans, the bench and the tests of the laws use."""

_KNOWN: dict[str, Exchange] = {name: make() for name, make in EXCHANGES.items()}

BASELINES = frozenset({"topk-allgather"})
"""Exchanges to compare with, which Syncline never recommends."""
FOR_UPDATES = frozenset({"topk-chunks"})
"""Exchanges that suit updates. Syncline does not recommend them for gradients."""

_TYPES: dict[str, type] = {
    kind.__name__: kind for kind in (Dense, Hierarchical, Quantized, OkTopk, AllgatherTopk, ChunkedTopk)
}
"""Types of exchanges that a plan's file may name."""


def settings(exchange: object) -> dict[str, Any]:
    """Return an exchange's type and fields, nested exchanges included, as JSON. They must match on every rank."""
    described: dict[str, Any] = {"type": type(exchange).__name__}
    if dataclasses.is_dataclass(exchange):
        for entry in dataclasses.fields(exchange):
            value = getattr(exchange, entry.name)
            if entry.metadata.get("optional") and value == entry.default:
                continue  # files of earlier releases do not have this field
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
    values = {key: made_of(v) if isinstance(v, Mapping) else v for key, v in described.items() if key != "type"}
    try:
        exchange: Exchange = _TYPES[name](**values)
    except (TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{name}: {error}") from error
    return exchange


UPDATES_WARMUP_STEPS = 300
"""Default warm-up of sparse updates and of local steps. In runs of 1,500 and 4,000 steps, 150 were too few."""


def for_updates(exchange: Exchange, every: int) -> Exchange:
    """Return the exchange with the settings that suit updates, unless the user has set them. Sparse exchanges take the
    mean over contributors, and their residuals decay if updates are not exchanged in every step.

    Args:
        exchange: The exchange.
        every: The number of steps between two exchanges.

    Raises:
        UsageError: A setting is meant for gradients.
    """
    if isinstance(exchange, Hierarchical):
        return dataclasses.replace(exchange, across=for_updates(exchange.across, every))
    if isinstance(exchange, OkTopk) and exchange.momentum:
        remedy = "the optimizer has its own momentum, so updates need none in the exchange: use momentum=0"
        raise UsageError(f"OkTopk(momentum={exchange.momentum!r}): {remedy}")
    if isinstance(exchange, OkTopk) and exchange.warmup:
        remedy = "pass warmup to attach instead, which then exchanges gradients in 4 bits first"
        raise UsageError(f"OkTopk(warmup={exchange.warmup!r}): {remedy}")
    if not isinstance(exchange, Sparse):
        return exchange
    mean = "contributors" if exchange.mean == "auto" else exchange.mean
    decay = (1.0 if every == 1 else 0.95) if exchange.decay is None else exchange.decay
    return dataclasses.replace(exchange, mean=mean, decay=decay)


def name_of(exchange: Exchange) -> str:
    """Return the short name of an exchange, like `oktopk(density=0.05)`: the name of the most similar exchange, or of
    its type, with the settings that differ."""
    if exchange in _KNOWN.values():
        return next(name for name, other in _KNOWN.items() if other == exchange)
    other: Exchange
    if isinstance(exchange, Hierarchical) and exchange.across != Dense():
        name, other = f"hierarchical+{name_of(exchange.across)}", Hierarchical(across=exchange.across)
    else:
        alike = [(name, other) for name, other in _KNOWN.items() if type(other) is type(exchange)]
        alike.sort(key=lambda item: len(_changed(exchange, item[1])))
        name, other = alike[0] if alike else (type(exchange).__name__, exchange)
    changed = {field: getattr(exchange, field) for field in _changed(exchange, other)}
    texts = [f"{field}={name_of(v) if isinstance(v, Exchange) else repr(v)}" for field, v in changed.items()]
    return f"{name}({', '.join(texts)})" if texts else name


def _changed(exchange: Exchange, other: Exchange) -> list[str]:
    """Return the settings in which an exchange differs from another of its type."""
    fields: list[str] = [f.name for f in dataclasses.fields(exchange)] if dataclasses.is_dataclass(exchange) else []
    return [field for field in fields if getattr(exchange, field) != getattr(other, field)]


__all__ = ["BASELINES", "EXCHANGES", "WORLD", "AllgatherTopk", "BucketPath", "ChunkedTopk", "Comm", "Cost", "Counter"]
__all__ += [
    "FOR_UPDATES",
    "Dense",
    "Exchange",
    "Hierarchical",
    "Layout",
    "Level",
    "OkTopk",
    "Phase",
    "Quantized",
    "Rounding",
    "Slot",
]
__all__ += [
    "UPDATES_WARMUP_STEPS",
    "Sparse",
    "State",
    "Topology",
    "Tree",
    "UsesLevels",
    "Work",
    "default_lanes",
    "for_updates",
    "is_dense",
    "made_of",
]
__all__ += ["name_of", "settings", "stride_in_bucket"]
