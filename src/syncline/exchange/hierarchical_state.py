"""The states of `Hierarchical`: the path of a bucket, and the buffers and residual on each rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from syncline.exchange.base import Layout, Slot, State
from syncline.exchange.dense import Halves


@dataclass(frozen=True)
class Way:
    """The path of a bucket."""

    shapes: tuple[str, ...] = ()
    """Shape of each level below the outermost, `leader` or `sharded`; empty for a flat exchange."""
    chunks: int = 1

    def __str__(self) -> str:
        if not self.shapes:
            return "flat"
        return f"{', then '.join(self.shapes)}, in {self.chunks} chunk{'s' if self.chunks > 1 else ''}"


@dataclass(frozen=True)
class Chunk:
    """The buffers and state of one rank for one chunk."""

    start: int
    stop: int
    """First element of the chunk in the bucket, and the one after its last."""
    halves: tuple[Halves | None, ...]
    """Reduce-scatter and all-gather of each level; None where the level has leaders."""
    layout: Layout
    """Layout of this rank's part at the outermost level."""
    across: State | None
    """State of the outermost exchange; None on ranks that take no part in it."""


class FlatState(State):
    """The state of a bucket for which all ranks run one flat exchange."""

    def __init__(self, inner: State) -> None:
        self.inner = inner

    def describe(self) -> str:
        return str(Way())

    def begin(self, step: int, scale: Tensor | None = None) -> None:
        self.inner.begin(step, scale)

    def finite(self, flat: Tensor) -> Tensor:
        return self.inner.finite(flat)

    @property
    def rests_bytes(self) -> int:
        return self.inner.rests_bytes

    def kept(self) -> Tensor | None:
        return self.inner.kept()

    def tensors(self, layout: Layout) -> dict[str, dict[str, Tensor]]:
        return self.inner.tensors(layout)

    def load(self, layout: Layout, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.inner.load(layout, tensors)

    @property
    def settles(self) -> bool:
        return self.inner.settles

    def settle(self, applied: Tensor) -> None:
        self.inner.settle(applied)


class ClimbedState(State):
    """The buffers of a bucket, and for each chunk the state of `across` on the ranks that run it.

    An `across` with a residual has leaders at every level. They hold whole chunks, and which ranks lead does not depend
    on the buckets, so a residual stays on its rank when DDP changes its buckets.
    """

    def __init__(self, path: Way, chunks: tuple[Chunk, ...]) -> None:
        self.path, self.chunks = path, chunks

    def describe(self) -> str:
        return str(self.path)

    def begin(self, step: int, scale: Tensor | None = None) -> None:
        for _, state in self._crossing:
            state.begin(step, scale)

    def finite(self, flat: Tensor) -> Tensor:
        if not self._crossing:
            return super().finite(flat)
        return torch.stack([state.finite(flat[chunk.start : chunk.stop]) for chunk, state in self._crossing]).all()

    @property
    def settles(self) -> bool:
        return any(state.settles for _, state in self._crossing)

    @property
    def _crossing(self) -> list[tuple[Chunk, State]]:
        """Chunks for which this rank runs `across`, with its states."""
        return [(chunk, chunk.across) for chunk in self.chunks if chunk.across is not None]

    @property
    def rests_bytes(self) -> int:
        return sum(state.rests_bytes for _, state in self._crossing)

    def kept(self) -> Tensor | None:
        pieces = [kept for _, state in self._crossing if (kept := state.kept()) is not None]
        return torch.cat(pieces) if pieces else None

    def tensors(self, layout: Layout) -> dict[str, dict[str, Tensor]]:
        flats: dict[str, Tensor] = {}
        for chunk, state in self._crossing:
            by_name = state.tensors(chunk.layout)
            for slot in chunk.layout.slots:
                for kind, tensor in by_name.get(slot.name, {}).items():
                    flat = flats.setdefault(kind, tensor.new_zeros(layout.numel))
                    flat[chunk.start + slot.offset :][: slot.numel] = tensor
        return {slot.name: {kind: slot.view(flat) for kind, flat in flats.items()} for slot in layout.slots if flats}

    def load(self, layout: Layout, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        slots = {slot.name: slot for slot in layout.slots}
        for chunk, state in self._crossing:
            pieces: dict[str, dict[str, Tensor]] = {}
            for piece in chunk.layout.slots:
                if not piece.name:  # padding
                    continue
                start = chunk.start + piece.offset - slots[piece.name].offset
                pieces[piece.name] = {
                    kind: _in_memory_order(slots[piece.name], tensor)[start : start + piece.numel]
                    for kind, tensor in tensors.get(piece.name, {}).items()
                }
            state.load(chunk.layout, {name: kinds for name, kinds in pieces.items() if kinds})

    def settle(self, applied: Tensor) -> None:
        for chunk, state in self._crossing:
            state.settle(applied if applied.dim() == 0 else applied[chunk.start : chunk.stop])


def _in_memory_order(slot: Slot, tensor: Tensor) -> Tensor:
    """Return a flat copy of a parameter's tensor, with its elements in the order of the bucket."""
    flat = tensor.new_empty(slot.numel)
    flat.as_strided(slot.shape, slot.stride).copy_(tensor)
    return flat
