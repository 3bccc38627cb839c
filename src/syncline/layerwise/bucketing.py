"""How a model's gradients are cut into buckets where no DDP does it: small ones together, large ones in pieces.

A bucket's buffers are there once for all buckets of a lane, as large as the largest needs them. So a large gradient is
cut: an embedding of 200 MB would otherwise take three times that only to be exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from syncline.errors import UsageError
from syncline.exchange import Layout, Slot
from syncline.exchange.workspace import Workspace


@dataclass(frozen=True)
class Piece:
    """A part of a parameter, as its elements lie in memory."""

    name: str
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def of(self, tensor: Tensor) -> Tensor:
        """This part of a tensor that lies in memory as the parameter does."""
        return in_memory_order(tensor)[self.start : self.stop]

    def __str__(self) -> str:
        return f"{self.name}[{self.start}:{self.stop}]"


def in_memory_order(tensor: Tensor) -> Tensor:
    """A view, flat: of a dense tensor without gaps, whatever the order of its dimensions."""
    return tensor.as_strided((tensor.numel(),), (1,))


Cut = tuple[tuple[Piece, ...], ...]
"""The pieces of each bucket, in the order in which buckets are exchanged."""


def cut(order: Sequence[str], parameters: Mapping[str, nn.Parameter], cap_bytes: int) -> Cut:
    """Gradients in the order in which they become ready, into buckets of at most so many bytes and of one type."""
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
    last = {name: place for place, name in enumerate(order)}
    return tuple(sorted(buckets, key=lambda bucket: max(last[piece.name] for piece in bucket)))


def layout_of(
    pieces: Sequence[Piece], parameters: Mapping[str, nn.Parameter], workspace: Workspace | None = None
) -> Layout:
    """Of a bucket. A whole parameter stands under its name, in its shape; a part of one under a name of its own."""
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


Kept = Mapping[str, Mapping[str, Tensor]]
"""By name, then by kind."""


def joined(
    buckets: Sequence[tuple[Sequence[Piece], Kept]], parameters: Mapping[str, nn.Parameter]
) -> dict[str, dict[str, Tensor]]:
    """What buckets keep, by parameter, in its shape: a copy in the host's memory."""
    whole: dict[str, dict[str, Tensor]] = {}
    for pieces, kept in buckets:
        for piece in pieces:
            parameter = parameters[piece.name]
            if piece.numel == parameter.numel():
                if piece.name in kept:
                    whole[piece.name] = {kind: _copied(tensor) for kind, tensor in kept[piece.name].items()}
                continue
            for kind, tensor in kept.get(str(piece), {}).items():
                kinds = whole.setdefault(piece.name, {})
                if kind not in kinds:
                    kinds[kind] = torch.zeros_like(parameter, dtype=tensor.dtype, device="cpu")
                piece.of(kinds[kind]).copy_(tensor)
    return whole


def _copied(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu").copy_(tensor.detach())


def dealt_to(
    pieces: Sequence[Piece], kept: Kept, parameters: Mapping[str, nn.Parameter]
) -> dict[str, dict[str, Tensor]]:
    """The part of that which one bucket keeps."""
    mine: dict[str, dict[str, Tensor]] = {}
    for piece in pieces:
        kinds = kept.get(piece.name)
        if kinds is None:
            continue
        if piece.numel == parameters[piece.name].numel():
            mine[piece.name] = dict(kinds)
        else:
            like = parameters[piece.name]
            mine[str(piece)] = {
                kind: piece.of(torch.empty_like(like, dtype=tensor.dtype, device=tensor.device).copy_(tensor))
                for kind, tensor in kinds.items()
            }
    return mine


def cut_of(named: Sequence[Sequence[str]], parameters: Mapping[str, nn.Parameter]) -> Cut:
    """The buckets of a checkpoint, from their names."""
    made = []
    for names in named:
        pieces = []
        for text in names:
            name, _, bounds = text.rpartition("[")
            start, _, stop = bounds.rstrip("]").partition(":")
            if name not in parameters or not (start.isdigit() and stop.isdigit()):
                raise UsageError(f"the state holds {text!r}, which is not a part of this model")
            pieces.append(Piece(name, int(start), int(stop)))
        made.append(tuple(pieces))
    covered: dict[str, int] = {}
    for piece in (piece for pieces in made for piece in pieces):
        covered[piece.name] = covered.get(piece.name, 0) + piece.numel
    for name, parameter in parameters.items():
        if covered.get(name) != parameter.numel():
            raise UsageError(f"the state's buckets do not hold {name!r} once: it is of another model")
    return tuple(made)
