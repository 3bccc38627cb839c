"""Divide a model's gradients into buckets without DDP: small gradients share a bucket, large ones are split.

All buckets of a lane share one set of buffers, which is as large as the largest bucket needs. So a large gradient is
split: exchanging an embedding of 200 MB in one bucket could take three times its size in buffers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from syncline.errors import UsageError
from syncline.exchange import Layout, Slot
from syncline.exchange.workspace import Workspace
from syncline.runtime.bucket_runner import Residuals


@dataclass(frozen=True)
class Piece:
    """A contiguous range of a parameter's elements, in memory order."""

    name: str
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def of(self, tensor: Tensor) -> Tensor:
        """Return a view of this range of a tensor that has the parameter's layout and no gaps in memory."""
        return tensor.as_strided((tensor.numel(),), (1,))[self.start : self.stop]

    def __str__(self) -> str:
        return f"{self.name}[{self.start}:{self.stop}]"


BucketPieces = tuple[tuple[Piece, ...], ...]
"""The pieces of each bucket, in the order in which buckets are exchanged."""


def divide(order: Sequence[str], parameters: Mapping[str, nn.Parameter], cap_bytes: int) -> BucketPieces:
    """Divide gradients, in the order in which they become ready, into buckets of one type and at most `cap_bytes`."""
    buckets: list[tuple[Piece, ...]] = []
    for dtype in dict.fromkeys(parameters[name].dtype for name in order):
        room = max(1, cap_bytes // dtype.itemsize)
        open_bucket: list[Piece] = []
        for name in (name for name in order if parameters[name].dtype == dtype):
            numel = parameters[name].numel()
            if open_bucket and sum(piece.numel for piece in open_bucket) + numel > room:
                buckets.append(tuple(open_bucket))
                open_bucket = []
            if numel <= room:
                open_bucket.append(Piece(name, 0, numel))
                continue
            parts = -(-numel // room)
            bounds = [numel * part // parts for part in range(parts + 1)]
            buckets += [(Piece(name, *bounds[part : part + 2]),) for part in range(parts)]
        if open_bucket:
            buckets.append(tuple(open_bucket))
    position = {name: index for index, name in enumerate(order)}
    return tuple(sorted(buckets, key=lambda bucket: max(position[piece.name] for piece in bucket)))


def layout_of(pieces: Sequence[Piece], parameters: Mapping[str, nn.Parameter], workspace: Workspace) -> Layout:
    """Return the layout of a bucket. A whole parameter keeps its name and shape; a piece has its own name."""
    slots, offset = [], 0
    for piece in pieces:
        parameter = parameters[piece.name]
        if piece.numel == parameter.numel():
            slots.append(Slot(piece.name, tuple(parameter.shape), parameter.stride(), offset, piece.numel))
        else:
            slots.append(Slot(str(piece), (piece.numel,), (1,), offset, piece.numel))
        offset += piece.numel
    first = parameters[pieces[0].name]
    return Layout(tuple(slots), first.dtype, first.device, workspace)


def join_residuals(
    buckets: Sequence[tuple[Sequence[Piece], Residuals]], parameters: Mapping[str, nn.Parameter]
) -> dict[str, dict[str, Tensor]]:
    """Return a copy of the residuals of all buckets in host memory, by parameter and in its shape."""
    whole: dict[str, dict[str, Tensor]] = {}
    for pieces, residuals in buckets:
        for piece in pieces:
            parameter = parameters[piece.name]
            is_whole = piece.numel == parameter.numel()
            for kind, tensor in residuals.get(piece.name if is_whole else str(piece), {}).items():
                kinds = whole.setdefault(piece.name, {})
                if kind not in kinds:
                    kinds[kind] = torch.zeros_like(parameter, dtype=tensor.dtype, device="cpu")
                (kinds[kind] if is_whole else piece.of(kinds[kind])).copy_(tensor)
    return whole


def split_residuals(
    pieces: Sequence[Piece], residuals: Residuals, parameters: Mapping[str, nn.Parameter]
) -> dict[str, dict[str, Tensor]]:
    """Return the part of `join_residuals`' result that belongs to the bucket with these pieces."""
    parts: dict[str, dict[str, Tensor]] = {}
    for piece in pieces:
        kinds, parameter = residuals.get(piece.name, {}), parameters[piece.name]
        if piece.numel == parameter.numel():
            parts[piece.name] = dict(kinds)
        else:
            parts[str(piece)] = {
                kind: piece.of(torch.empty_like(parameter, dtype=tensor.dtype, device=tensor.device).copy_(tensor))
                for kind, tensor in kinds.items()
            }
    return {name: kinds for name, kinds in parts.items() if kinds}


def parse_buckets(named: Sequence[Sequence[str]], parameters: Mapping[str, nn.Parameter]) -> BucketPieces:
    """Return the buckets of a checkpoint from the names of their pieces. Raise unless they are of this model."""
    buckets = []
    covered: Counter[str] = Counter()
    for texts in named:
        pieces = []
        for text in texts:
            match = re.fullmatch(r"(.+)\[(\d+):(\d+)\]", text)
            if match is None or match[1] not in parameters:
                raise UsageError(f"the checkpoint contains {text!r}, which is not part of this model")
            pieces.append(Piece(match[1], int(match[2]), int(match[3])))
            covered[match[1]] += pieces[-1].numel
        buckets.append(tuple(pieces))
    for name, parameter in parameters.items():
        if covered[name] != parameter.numel():
            raise UsageError(f"the checkpoint's buckets do not contain {name!r} exactly once: it is from another model")
    return tuple(buckets)
