"""What exchanges keep, as files: damaged, and forged."""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from hostile.mutations import Trees, mutated_bytes
from hostile.oracle import Files, Format, Mutate
from syncline.exchange import OkTopk, settings
from syncline.runtime.checkpoint import HEADER, SCHEMA, load_state, seal_of, sealed, write_draft

ABOUT: dict[str, Any] = {
    "schema": SCHEMA,
    "exchange": settings(OkTopk(density=0.1)),
    "rank": 1,
    "world_size": 4,
    "levels": None,
    "steps": 7,
    "buckets": [["a", "b/c"], ["d"]],
}
TENSORS = {
    "residual/a": torch.linspace(-1, 1, 12).view(3, 4),
    "velocity/a": torch.linspace(0, 3, 12).view(3, 4),
    "residual/b/c": torch.tensor(0.5, dtype=torch.bfloat16),
    "residual/d": torch.zeros(0, 5),
}
STATES = (
    sealed(ABOUT, TENSORS),
    sealed({**ABOUT, "levels": "((0, 1), (2, 3))", "weights": "00ff"}, {}),
    sealed({**ABOUT, "rank": 0, "world_size": 1, "steps": 0, "buckets": []}, {"residual/a": torch.ones(2)}),
)
_TYPES = (torch.float64, torch.float16, torch.int64, torch.bool, torch.uint8, torch.complex64, torch.float8_e4m3fn)


def parted(file: bytes) -> tuple[dict[str, Any], bytes]:
    """A safetensors file's header, and what follows it."""
    (length,) = struct.unpack_from("<Q", file)
    return json.loads(file[8 : 8 + length]), file[8 + length :]


def joined(header: Any, data: bytes, length: int | None = None) -> bytes:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text) if length is None else length) + text + data


_HEADERS = Trees([json.dumps(parted(state)[0]).encode() for state in STATES])
_ABOUTS = Trees([parted(state)[0]["__metadata__"][HEADER[0]].encode() for state in STATES])


def damaged_state(draw: random.Random, examples: Sequence[bytes]) -> bytes:
    """Nobody seals it again."""
    if draw.random() < 0.5:
        return mutated_bytes(draw, examples)
    header, data = parted(draw.choice(examples))
    tensors = [name for name in header if name != "__metadata__"]
    match draw.randrange(6):
        case 0:
            return joined(header, data, draw.choice((0, 1, 7, 2**31, 2**32, 2**63, 2**64 - 1, len(data))))
        case 1 if tensors:
            ends = draw.choice(
                ((0, 0), (0, 2**63 - 1), (4, 0), (-1, 4), (0, len(data) + 8), (2**64, 2**64 + 4), (0, 4))
            )
            header[draw.choice(tensors)]["data_offsets"] = ends
        case 2 if tensors:
            shape = draw.choice(
                ([2**62, 4], [0, 2**63], [-1], [2**64], [1] * 100, [12], [4, 3], [], ["3", "4"], [3.0, 4.0])
            )
            header[draw.choice(tensors)]["shape"] = shape
        case 3 if tensors:
            kinds = ("F64", "F16", "BF16", "I32", "BOOL", "F8_E4M3", "F8_E8M0", "F4", "F6_E2M3", "C64", "U64", "X", "")
            header[draw.choice(tensors)]["dtype"] = draw.choice(kinds)
        case 4:
            return safetensors.torch.save(
                {"weight": torch.ones(3)}, draw.choice((None, {"format": "pt"}, {HEADER[0]: "{}"}))
            )
        case _:
            try:
                header = json.loads(_HEADERS.mutated(draw, examples))
            except (ValueError, RecursionError):
                return mutated_bytes(draw, examples)
    return joined(header, data)


def forged_state(draw: random.Random, examples: Sequence[bytes]) -> bytes:
    """Sealed by somebody who knows how."""
    header, data = parted(draw.choice(examples))
    about = header["__metadata__"]
    if draw.random() < 0.7:
        text = _ABOUTS.mutated(draw, [about[HEADER[0]].encode()]).decode("utf-8", "ignore")
        header["__metadata__"] = {
            HEADER[0]: text,
            HEADER[1]: about[HEADER[1]],
            HEADER[2]: seal_of(text, about[HEADER[1]]),
        }
        return joined(header, data)
    tensors = dict(TENSORS)
    name = draw.choice(("residual/a", "residual/", "/", "a", "\n/\n", "x" * 700, "residual/" + "y" * 700, "é/é"))
    shape = draw.choice(((), (0,), (1,), (3, 4), (2, 0, 7)))
    kind = draw.choice(_TYPES)
    value = draw.choice((0.0, 1.0, math.nan, math.inf)) if kind.is_floating_point else 1
    tensors[name] = torch.full(shape, value, dtype=torch.float32 if kind.is_floating_point else kind).to(kind)
    return sealed({**ABOUT, "steps": draw.choice((0, 1, 2**62 - 1, 2**62, 2**63))}, tensors)


def same_state(one: dict[str, Any], other: dict[str, Any]) -> bool:
    def flat(state: dict[str, Any]) -> dict[tuple[str, str], Tensor]:
        return {(name, kind): tensor for name, kinds in state["tensors"].items() for kind, tensor in kinds.items()}

    mine, theirs = flat(one), flat(other)
    about = [{field: value for field, value in state.items() if field != "tensors"} for state in (one, other)]
    return (
        about[0] == about[1]
        and mine.keys() == theirs.keys()
        and all(
            tensor.dtype == theirs[key].dtype
            and tensor.shape == theirs[key].shape
            and tensor.reshape(-1).view(torch.uint8).equal(theirs[key].reshape(-1).view(torch.uint8))
            for key, tensor in mine.items()
        )
    )


def check_state(state: dict[str, Any]) -> None:
    assert state["schema"] == SCHEMA and isinstance(state["exchange"], dict)
    assert 0 <= state["rank"] < state["world_size"] < 100_000
    assert 0 <= state["steps"] < 2**63
    assert state["levels"] is None or isinstance(state["levels"], str)
    assert all(isinstance(name, str) for names in state["buckets"] for name in names)
    for kinds in state["tensors"].values():
        for tensor in kinds.values():
            assert bool(torch.isfinite(tensor.to(torch.float64 if not tensor.is_complex() else tensor.dtype)).all())


def _read_of(example: bytes) -> dict[str, Any]:
    """A state file read without the code that is tested."""
    header, _ = parted(example)
    state = json.loads(header["__metadata__"][HEADER[0]])
    state["tensors"] = {}
    for key, tensor in safetensors.torch.load(example).items():
        kind, _, name = key.partition("/")
        state["tensors"].setdefault(name, {})[kind] = tensor
    return state


_WRITTEN = [_read_of(state) for state in STATES]


def check_undamaged(state: dict[str, Any]) -> None:
    """Whatever was done to the file, what was read is what was once written."""
    check_state(state)
    assert any(same_state(state, written) for written in _WRITTEN), f"a damaged state was read: {state}"


def _write_state(folder: Path, state: dict[str, Any]) -> Path:
    return write_draft(folder, state)


def _states(name: str, mutate: Mutate, check: Callable[[dict[str, Any]], None]) -> Files[dict[str, Any]]:
    return Files(name, STATES, mutate, load_state, _write_state, check, same_state)


STATE_FORMATS: tuple[Format, ...] = (
    _states("state", damaged_state, check_undamaged),
    _states("forged state", forged_state, check_state),
)
