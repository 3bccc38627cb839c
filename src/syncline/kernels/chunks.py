"""The wire format of the largest entries of each chunk of a bucket, and the kernels that read and write it.

A bucket is divided into chunks, whose number of elements is a power of two; the last chunk may be shorter. All chunks
have the same number of entries. A rank sends one row of bytes:

    values of all entries … | scales of all chunks … | codes of all entries …

- An entry's code is its place in the chunk and, if there are scales, its value in the 2 or 4 bits above it. The entries
  of a chunk are ordered by place. If too few were selected, the last one's place is repeated: an entry with the place
  of the entry before it does not exist.
- `fp32` and `bf16` values have no scales, and `int4` and `int2` values consist of scales and codes. Scales are bf16.
  int4: three bits count multiples of the chunk's scale, which is a seventh of the largest magnitude; then the sign.
  int2: one bit chooses one of the chunk's two scales, which are the means of the magnitudes up to their mean and of
  those above it; then the sign.
- Codes are divided into planes of 8, 4, 2 or 1 bits. In a plane of 4 bits, byte i of a chunk holds entry i and, in its
  upper half, entry i + m, where m is the number of bytes that the chunk has in this plane; and likewise for 2 and 1.

Magnitudes below 2^-118 are never sent, so that no scale is subnormal. Means are computed in integers, so that the order
of summation does not matter. A value that is not finite makes the chunk's scales NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from syncline.kernels.slots import Buffers

CHUNK_VALUES = ("int2", "int4", "bf16", "fp32")
SMALLEST_CHUNK, LARGEST_CHUNK = 64, 4096
LEAST_BITS = 9 << 23
"""The bits of 2^-118 in fp32."""
FIXED_POINT = 16
"""Number of bits by which magnitudes are shifted to the left before means are computed. With a mantissa of 24 bits and
4096 entries, a sum takes 52 bits, and its product with a number of entries 64."""

_VALUE_BITS = {"int2": 2, "int4": 4}
_SCALES = {"int2": 2, "int4": 1}
_VALUE_BYTES = {"bf16": 2, "fp32": 4}


@dataclass(frozen=True)
class Plane:
    """Some bits of all codes."""

    shift: int
    bits: int
    bytes: int
    """Bytes per chunk."""
    start: int
    """Offset of the plane in a row, in bytes."""


@dataclass(frozen=True)
class Chunks:
    """The chunks of a bucket of `numel` elements, with `entries` entries each."""

    numel: int
    chunk: int
    entries: int
    values: str

    @classmethod
    def of(cls, numel: int, chunk: int, density: float, values: str) -> Chunks:
        """Return the chunks for a bucket. A bucket that is smaller than a chunk has one smaller chunk."""
        chunk = min(chunk, max(SMALLEST_CHUNK, 1 << (numel - 1).bit_length()))
        return cls(numel, chunk, max(1, round(density * chunk)), values)

    @property
    def count(self) -> int:
        """Number of chunks."""
        return -(-self.numel // self.chunk)

    @property
    def place_bits(self) -> int:
        return self.chunk.bit_length() - 1

    @property
    def scales(self) -> int:
        """Scales per chunk."""
        return _SCALES.get(self.values, 0)

    @property
    def scales_at(self) -> int:
        """Offset of the scales in a row, in bytes; values are at its start."""
        return self.count * self.entries * _VALUE_BYTES.get(self.values, 0)

    @cached_property
    def planes(self) -> tuple[Plane, ...]:
        """The planes of the codes, each with the bits above those of the planes before it."""
        total = self.place_bits + _VALUE_BITS.get(self.values, 0)
        planes, shift, start = [], 0, self.scales_at + 2 * self.scales * self.count
        for bits in (8, 8, 4, 2, 1):
            if total - shift >= bits:
                planes.append(Plane(shift, bits, -(-self.entries * bits // 8), start))
                shift, start = shift + bits, start + self.count * planes[-1].bytes
        return tuple(planes)

    @cached_property
    def bytes(self) -> int:
        """Bytes per row, a multiple of 4."""
        last = self.planes[-1]
        return -(-(last.start + self.count * last.bytes) // 4) * 4


class ChunkKernels(Protocol):
    """The kernels for one bucket, with their buffers. No method waits for the device. `kept` and `turn` are as in
    `Kernels`."""

    def pack(
        self, flat: Tensor, share: float, kept: Tensor, turn: Tensor, ratio: Tensor | None, row: Tensor,
        flags: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Compute `ratio * kept[turn] + share * flat`, write the largest entries of each chunk to `row`, and write the
        rest and the rounding errors to `kept[1 - turn]`. Set `flags` (int8) to 1 where a value that is not zero was
        sent, and to 0 elsewhere. `share * flat` is rounded to its type first."""

    def total(self, received: Tensor, flat: Tensor, rank: int, kept: Tensor, turn: Tensor) -> Tensor:
        """Replace `flat` by the sum of one row from each rank, added in rank order in fp32, and return whether all of
        it is finite, as a 0-dim tensor. With `contributors`, each sum is multiplied by the number of rows P and divided
        by the number of rows in which its value is not zero. Add the error of rounding a sum to the type of `flat` to
        `kept[1 - turn]` of one rank: that of chunk c on rank c mod P. With `contributors`, the error is multiplied by
        the share of these rows first."""


def chunk_kernels_for(
    chunks: Chunks, device: torch.device, buffers: Buffers | None = None, contributors: bool = False
) -> ChunkKernels:
    """Return the kernels for a device, with memory from `buffers` or their own."""
    if device.type == "cuda":
        from syncline.kernels.chunks_cuda import CudaChunkKernels

        return CudaChunkKernels(chunks, device, buffers, contributors)
    from syncline.kernels.chunks_cpu import CpuChunkKernels

    return CpuChunkKernels(chunks, buffers, contributors)
