"""The layouts and residuals of buckets that are made of pieces of parameters, without DDP."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from syncline.errors import UsageError
from syncline.exchange import Layout, Slot
from syncline.exchange.workspace import Workspace
from syncline.records.pieces import BucketPieces, Piece
from syncline.runtime.bucket_runner import Residuals

Parameters = Mapping[str, Tensor]


def layout_of(
    pieces: Sequence[Piece],
    parameters: Parameters,
    workspace: Workspace | None = None,
    dtype: torch.dtype | None = None,
) -> Layout:
    """Return the layout of a bucket, by default of the parameters' type."""
    ends = list(accumulate(piece.numel for piece in pieces))
    slots = [Slot(str(p), (p.numel,), (1,), end - p.numel, p.numel) for p, end in zip(pieces, ends, strict=True)]
    first = parameters[pieces[0].name]
    return Layout(tuple(slots), dtype or first.dtype, first.device, workspace)


def join_residuals(buckets: Sequence[tuple[Sequence[Piece], Residuals]], parameters: Parameters) -> Residuals:
    """Return a copy of the residuals of all buckets in host memory, by parameter and in its shape."""
    whole: dict[str, dict[str, Tensor]] = {}
    for pieces, residuals in buckets:
        for piece in pieces:
            for kind, tensor in residuals.get(str(piece), {}).items():
                kinds = whole.setdefault(piece.name, {})
                if kind not in kinds:
                    kinds[kind] = torch.zeros_like(parameters[piece.name], dtype=tensor.dtype, device="cpu")
                piece.of(kinds[kind]).copy_(tensor)
    return whole


def split_residuals(pieces: Sequence[Piece], residuals: Residuals, parameters: Parameters) -> Residuals:
    """Return the part of `join_residuals`' result that belongs to the bucket with these pieces."""
    parts: dict[str, dict[str, Tensor]] = {}
    for piece in pieces:
        for kind, tensor in residuals.get(piece.name, {}).items():
            whole = torch.empty_like(parameters[piece.name], dtype=tensor.dtype, device=tensor.device).copy_(tensor)
            parts.setdefault(str(piece), {})[kind] = piece.of(whole)
    return parts


def parse_buckets(named: Sequence[Sequence[str]], parameters: Parameters) -> BucketPieces:
    """Return the buckets of a checkpoint from the names of their pieces. Raise unless they are of this model."""

    def parse(text: str) -> Piece:
        match = re.fullmatch(r"(.+)\[(\d+):(\d+)\]", text)
        if match is None or match[1] not in parameters:
            raise UsageError(f"the checkpoint contains {text!r}, which is not part of this model")
        covered[match[1]] += int(match[3]) - int(match[2])
        return Piece(match[1], int(match[2]), int(match[3]))

    covered: Counter[str] = Counter()
    buckets = tuple(tuple(map(parse, texts)) for texts in named)
    for name, parameter in parameters.items():
        if covered[name] != parameter.numel():
            raise UsageError(f"the checkpoint's buckets do not contain {name!r} exactly once: it is from another model")
    return buckets
