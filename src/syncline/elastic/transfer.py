"""Send named tensors to replicas that join: a header in JSON, and then the bytes of each tensor. Nothing is pickled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from syncline.dist.comm import gather_bytes
from syncline.errors import ExchangeError
from syncline.runtime.checkpoint import digest_of_bits

_CHUNK_BYTES = 4 << 20  # of one broadcast, which must end within the timeout of the group
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
_Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]


class Described(msgspec.Struct, frozen=True):
    """The type and the shape of a tensor that is sent."""

    dtype: str
    shape: tuple[_Size, ...]


class Header(msgspec.Struct, frozen=True):
    """The header of a transfer, sent before the tensors."""

    about: dict[str, Any]
    tensors: dict[str, Described]
    digest: str


Check = Callable[[Mapping[str, tuple[int, ...]]], str | None]


def send(group: Any, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Collective: send tensors, which are on the host and contiguous, to all members of a group. Rank 0 calls this."""
    named = {key: Described(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for key, t in tensors.items()}
    gather_bytes(group, msgspec.json.encode(Header(dict(about), named, digest_of_bits(tensors))))
    for tensor in tensors.values():
        _broadcast(group, tensor)
    gather_bytes(group, b"")  # closing the connections earlier might lose what is still on its way


def receive(group: Any, check: Check) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Collective: receive what rank 0 sends. The other ranks call this.

    Args:
        group: The process group.
        check: Returns why shapes, by name, do not fit this replica, or None if they do. Memory is allocated only then.

    Raises:
        ExchangeError: What was received is invalid or does not fit.
    """
    try:
        header = msgspec.json.decode(gather_bytes(group, b"")[0], type=Header)
    except msgspec.DecodeError as error:
        raise ExchangeError(f"the state from a live replica is not valid: {error}") from error
    problem = check({key: described.shape for key, described in header.tensors.items()})
    unknown = [f"{key} has the type {d.dtype}" for key, d in header.tensors.items() if d.dtype not in _DTYPES]
    if problem is not None or unknown:
        raise ExchangeError(f"the state from a live replica does not fit: {problem or unknown[0]}")
    tensors = {}
    for key, described in header.tensors.items():
        tensors[key] = torch.empty(described.shape, dtype=_DTYPES[described.dtype])
        _broadcast(group, tensors[key])
    if digest_of_bits(tensors) != header.digest:
        raise ExchangeError("the state from a live replica was damaged on its way")
    with contextlib.suppress(RuntimeError):  # this rank has everything, whatever happens to the others
        gather_bytes(group, b"")
    return header.about, tensors


def _broadcast(group: Any, tensor: Tensor) -> None:
    for chunk in tensor.view(-1).view(torch.uint8).split(_CHUNK_BYTES) if tensor.numel() else ():
        dist.broadcast(chunk, 0, group=group)
