"""Divide a model's tensors into buckets without DDP: small tensors share a bucket, large ones are split.

Buffers are as large as a bucket: exchanging an embedding of 200 MB in one bucket could take three times its size.
Fragments are the buckets of an exchange of updates, which take turns. Predictions divide a profile in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

_LARGEST_FRAGMENT_BYTES = 64 << 20  # so that buffers are small compared with a large model
_SMALLEST_FRAGMENT_BYTES = 1 << 20  # below, start-ups take longer than the bytes
_FEWEST_STEPS_BETWEEN_BUFFERS = 10
"""Running statistics of BatchNorm forget a batch in about ten steps, so they are averaged at most that often."""


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


def divide(order: Sequence[str], parameters: Mapping[str, Tensor], cap_bytes: int) -> BucketPieces:
    """Divide gradients, in the order in which they become ready, into buckets of one type and at most `cap_bytes`."""
    buckets: list[tuple[Piece, ...]] = []
    for dtype in dict.fromkeys(parameters[name].dtype for name in order):
        room = max(1, cap_bytes // dtype.itemsize)
        left = -1  # room that is left in the last bucket
        for name in (name for name in order if parameters[name].dtype == dtype):
            numel = parameters[name].numel()
            parts = max(1, -(-numel // room))
            bounds = [numel * part // parts for part in range(parts + 1)]
            pieces = [Piece(name, *bounds[part : part + 2]) for part in range(parts)]
            if numel <= left:
                buckets[-1] += tuple(pieces)
                left -= numel
            else:
                buckets += [(piece,) for piece in pieces]
                left = room - numel
    position = {name: index for index, name in enumerate(order)}
    return tuple(sorted(buckets, key=lambda bucket: max(position[piece.name] for piece in bucket)))


def fragments_of(tensors: Mapping[str, Tensor], every: int) -> list[tuple[int, tuple[Piece, ...]]]:
    """Divide tensors into fragments of similar size, about two for each of `every` turns. Return turns and pieces."""
    total = sum(tensor.nbytes for tensor in tensors.values())
    cap_bytes = min(_LARGEST_FRAGMENT_BYTES, max(_SMALLEST_FRAGMENT_BYTES, -(-total // (2 * every))))
    before, fragments = 0, []
    for pieces in divide(list(tensors), tensors, cap_bytes):
        fragments.append((every * before // max(1, total), pieces))
        before += sum(piece.numel for piece in pieces) * tensors[pieces[0].name].element_size()
    return fragments


def buffer_period(every: int) -> int:
    """Return the number of steps between two exchanges of buffers, a multiple of `every`."""
    return every * -(-_FEWEST_STEPS_BETWEEN_BUFFERS // every)
