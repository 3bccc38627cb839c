"""Check that all ranks agree on settings, before anything depends on them. Ranks compare digests first. Only if these
differ do they exchange the fields themselves, so that the error can name the field that differs."""

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
"""Field names and their JSON values, without nesting. See `flatten`."""

_MAX_SHOWN = 120  # characters of a value in an error message


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings: `{"exchange": {"wire": "bf16"}}` becomes `{"exchange.wire": "bf16"}`."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def digest(fields: Fields) -> bytes:
    """Return a hash of the fields. It does not depend on their order."""
    return hashlib.sha256(msgspec.json.encode(fields, order="deterministic")).digest()


def agree(group: dist.ProcessGroup, fields: Fields, what: str) -> None:
    """Collective: raise `MismatchError` on every rank if the fields differ between ranks, with each rank's value. A
    rank on which something failed passes only the field `error`, and the error that all ranks raise then names that
    failure and no other difference. `what` is the subject of the error message."""
    if len(set(gather_bytes(group, digest(fields)))) == 1:
        return
    gathered = [msgspec.json.decode(data) for data in gather_bytes(group, msgspec.json.encode(fields))]
    by_rank = dict(zip(dist.get_process_group_ranks(group), gathered, strict=True))
    errors: dict[str, list[int]] = {}
    for rank, rank_fields in by_rank.items():
        if rank_fields.keys() == {"error"} and rank_fields["error"] is not None:
            errors.setdefault(str(rank_fields["error"]), []).append(rank)
    if errors:
        reasons = "; ".join(f"on {ranks_text(ranks)}: {error}" for error, ranks in errors.items())
        raise MismatchError(f"{what} is refused {reasons}")
    raise MismatchError(f"{what} differs between ranks: {difference(by_rank)}")


def versions_here() -> dict[str, str]:
    """Return the versions that must match on every rank."""
    return {"syncline": __version__, "torch": str(torch.__version__)}


def current_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make a GPU the current one, because the script may not have done so. Does nothing for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def difference(by_rank: Mapping[int, Fields]) -> str:
    """Describe which fields differ, and which ranks have which value."""
    names = sorted({name for fields in by_rank.values() for name in fields})
    parts = []
    for name in names:
        values: dict[str, list[int]] = {}
        for rank, fields in by_rank.items():
            values.setdefault(_text(fields, name), []).append(rank)
        if len(values) > 1:
            shown = zip(shortened(list(values)), values.values(), strict=True)
            parts.append(f"{name} is {'; '.join(f'{text} on {ranks_text(ranks)}' for text, ranks in shown)}")
    more = [f"and {len(parts) - 3} more fields"] if len(parts) > 3 else []
    return ". ".join(parts[:3] + more) or "the fields are in a different order"


def first_difference(left: Fields, right: Fields) -> tuple[str, str, str] | None:
    """Return the name of the first field that differs, with both values as text, or None if all are equal as JSON:
    `1` equals `1.0`, and a tuple equals a list."""
    for name in dict.fromkeys([*left, *right]):
        texts = [_text(fields, name) for fields in (left, right)]
        if (name in left) != (name in right) or msgspec.json.decode(texts[0]) != msgspec.json.decode(texts[1]):
            left_text, right_text = shortened(texts)
            return name, left_text, right_text
    return None


def shortened(texts: Sequence[str]) -> list[str]:
    """Shorten long texts to the part that begins shortly before their first difference."""
    differing = (index for index, letters in enumerate(zip(*texts, strict=False)) if len(set(letters)) > 1)
    first = max(0, next(differing, min(map(len, texts))) - _MAX_SHOWN // 4)
    parts = []
    for text in texts:
        begin = max(0, min(first, len(text) - _MAX_SHOWN))
        end = begin + _MAX_SHOWN
        parts.append(f"{'…' if begin else ''}{text[begin:end]}{'…' if end < len(text) else ''}")
    return parts


def _text(fields: Fields, name: str) -> str:
    return msgspec.json.encode(fields[name]).decode() if name in fields else "(missing)"
