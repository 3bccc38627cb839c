"""All ranks compare what they must agree on, before anything depends on it.

First a digest each; only where those differ, the fields themselves, so that the error can name the one that differs.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from syncline._version import __version__
from syncline.dist.comm import gather_bytes
from syncline.errors import MismatchError
from syncline.units import ranks_text

Fields = Mapping[str, Any]
"""Flat, JSON-valued."""

_LONGEST = 120
"""Characters of a value that an error shows."""


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
    """Collective. Raises the same error on every rank if any of them has other fields.

    A rank on which something failed has nothing to compare, and comes with nothing but its `error`: that is then all
    that the others are told.
    """
    digests = gather_bytes(group, digest(fields))
    if len(set(digests)) == 1:
        return
    everyone = [msgspec.json.decode(data) for data in gather_bytes(group, msgspec.json.encode(fields))]
    by_rank = dict(zip(dist.get_process_group_ranks(group), everyone, strict=True))
    errors: dict[str, list[int]] = {}
    for rank, theirs in by_rank.items():
        if theirs.keys() == {"error"} and theirs["error"] is not None:
            errors.setdefault(str(theirs["error"]), []).append(rank)
    if errors:
        told = "; ".join(f"on {ranks_text(ranks)}: {error}" for error, ranks in errors.items())
        raise MismatchError(f"{what} is refused {told}")
    raise MismatchError(f"{what} differs between ranks: {difference(by_rank)}")


def versions_here() -> dict[str, str]:
    """Of what all ranks must have the same of."""
    return {"syncline": __version__, "torch": str(torch.__version__)}


def current_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The model's GPU, which the script need not have made the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def difference(everyone: Mapping[int, Fields]) -> str:
    """Which field differs, and which ranks have which value."""
    names = sorted({name for fields in everyone.values() for name in fields})
    parts = []
    for name in names:
        values: dict[str, list[int]] = {}
        for rank, fields in everyone.items():
            values.setdefault(_text(fields, name), []).append(rank)
        if len(values) > 1:
            shown = zip(shortened(list(values)), values.values(), strict=True)
            parts.append(f"{name} is {'; '.join(f'{text} on {ranks_text(ranks)}' for text, ranks in shown)}")
    told = parts[:3] + ([f"and {len(parts) - 3} more fields"] if len(parts) > 3 else [])
    return ". ".join(told) or "fields in another order"


def first_difference(one: Fields, other: Fields) -> tuple[str, str, str] | None:
    """The first field in which two differ, and how each has it. Values are the same if they are as JSON: `1` is `1.0`,
    and a tuple a list."""
    for name in dict.fromkeys([*one, *other]):
        texts = [_text(fields, name) for fields in (one, other)]
        if (name in one) != (name in other) or msgspec.json.decode(texts[0]) != msgspec.json.decode(texts[1]):
            first, second = shortened(texts)
            return name, first, second
    return None


def shortened(texts: Sequence[str]) -> list[str]:
    """Each, or of a long one a part: from shortly before where they begin to differ."""
    differ = (place for place, letters in enumerate(zip(*texts, strict=False)) if len(set(letters)) > 1)
    begin = max(0, next(differ, min(map(len, texts))) - _LONGEST // 4)
    return [_part(text, begin) for text in texts]


def _part(text: str, begin: int) -> str:
    if len(text) <= _LONGEST:
        return text
    begin = min(begin, len(text) - _LONGEST)
    end = begin + _LONGEST
    return f"{'…' if begin else ''}{text[begin:end]}{'…' if end < len(text) else ''}"


def _text(fields: Fields, name: str) -> str:
    return msgspec.json.encode(fields[name]).decode() if name in fields else "(not there)"
