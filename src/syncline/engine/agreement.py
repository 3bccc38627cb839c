"""All ranks compare what they must agree on, before anything depends on it.

First a digest each; only where those differ, the fields themselves, so that the error can name the one that differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec
import torch.distributed as dist

from syncline.engine.comm import gather_bytes
from syncline.errors import MismatchError

Fields = Mapping[str, Any]
"""Flat, JSON-valued."""


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"exchange": {"wire": "bf16"}}` → `{"exchange.wire": "bf16"}`."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def digest(fields: Fields) -> bytes:
    return hashlib.sha256(msgspec.json.encode(fields, order="deterministic")).digest()


def agree(group: dist.ProcessGroup, fields: Fields, what: str) -> None:
    """Collective. Raises the same error on every rank if any of them has other fields."""
    digests = gather_bytes(group, digest(fields))
    if len(set(digests)) == 1:
        return
    everyone = [msgspec.json.decode(data) for data in gather_bytes(group, msgspec.json.encode(fields))]
    ranks = dist.get_process_group_ranks(group)
    raise MismatchError(f"{what} differs between ranks: {difference(dict(zip(ranks, everyone, strict=True)))}")


def difference(everyone: Mapping[int, Fields]) -> str:
    """Which field differs, and which ranks have which value."""
    names = sorted({name for fields in everyone.values() for name in fields})
    parts = []
    for name in names:
        values: dict[str, list[int]] = {}
        for rank, fields in everyone.items():
            text = msgspec.json.encode(fields[name]).decode() if name in fields else "(not there)"
            values.setdefault(text, []).append(rank)
        if len(values) > 1:
            holders = "; ".join(f"{text} on {_ranks(ranks)}" for text, ranks in values.items())
            parts.append(f"{name} is {holders}")
    shown = parts[:3] + ([f"and {len(parts) - 3} more fields"] if len(parts) > 3 else [])
    return ". ".join(shown) or "fields in another order"


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
