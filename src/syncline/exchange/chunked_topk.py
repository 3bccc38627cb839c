"""ChunkedTopk: send the largest entries of each chunk to all ranks, in few bits, and keep the rest in a residual.

On the wire, for P ranks and a bucket of n elements, divided into chunks of 4096:

1. Each rank adds its gradients, or its updates, to its residual, and selects the k = density · 4096 entries of largest
   magnitude of each chunk.
2. It sends them to all ranks (one all-gather). An entry has 12 bits for its place, and 2 bits for its sign and one of
   two magnitudes. Each chunk has its own two: the mean of the selected magnitudes up to their mean, and of those above.
3. All ranks add the entries in rank order in fp32. The result is the same on all ranks, and zero elsewhere. With
   mean="contributors", a sum is divided by the number of ranks that sent the entry.
4. A rank's residual keeps what it did not send: the other entries, and the rounding errors of those that it sent. If
   the bucket's type has 16 bits, one rank per chunk also keeps the errors of rounding the sums to it. So what was
   applied (times the share of the ranks that sent it) plus the residuals equals what came in.

Cost: an entry takes 14 bits, and a chunk 4 bytes. With a density of 3 %, a rank sends (P−1) · n/18 bytes, which is 75
times fewer than the fp32 gradients that a ring sends for P = 2, and 37 times fewer for P = 4. The residual takes two
fp32 copies of the gradients.

When it loses: there are many ranks, because every rank receives all ranks' entries, where `OkTopk` receives 2k in all;
the link is fast enough for all gradients; or buckets are small. It is made for updates of several local steps, in which
entries of every layer matter: every chunk sends entries, even if all of its values are small. With gradients, models
trained worse. This exchange is lossy.

Paper: SparseLoCo, "Communication Efficient LLM Pre-training with SparseLoCo", arXiv 2508.15706, which sends 1.6 to
3.1 % of each chunk of 4096 every 15 to 30 steps, with 2 bits per value, and multiplies the residual by 0.95.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from syncline.errors import UsageError
from syncline.exchange.base import Comm, State, Work
from syncline.exchange.layout import Layout
from syncline.exchange.residual import Residual
from syncline.exchange.sparse import Sparse, SparseState
from syncline.kernels import CHUNK_VALUES, LARGEST_CHUNK, SMALLEST_CHUNK, Chunks, chunk_kernels_for

_FEWEST_PER_RANK = 8
"""A bucket with fewer elements per rank is sent dense."""


@dataclass(frozen=True)
class ChunkedTopk(Sparse):
    """Send the largest entries of each chunk of each rank's updates or gradients; the others are added to later ones.

    Args:
        density: The fraction of each chunk that each rank sends.
        values: The number format of the entries: `int2`, `int4`, `bf16` or `fp32`. Rounding errors are added to the
            residual.
        chunk: The number of elements per chunk, a power of two from 64 to 4096.
        mean: As in `OkTopk`.
        decay: As in `OkTopk`.

    Raises:
        UsageError: A setting is out of range.

    Example:
        >>> handle = syncline.attach(model, syncline.ChunkedTopk(density=0.03))
    """

    density: float = 0.03
    values: str = "int2"
    chunk: int = 4096
    collectives = ("all_gather",)
    formats = CHUNK_VALUES

    def __post_init__(self) -> None:
        super().__post_init__()
        chunk: Any = self.chunk
        whole = isinstance(chunk, Integral) and not isinstance(chunk, bool)
        if not (whole and SMALLEST_CHUNK <= chunk <= LARGEST_CHUNK and int(chunk).bit_count() == 1):
            sizes = f"{SMALLEST_CHUNK} to {LARGEST_CHUNK}"
            raise UsageError(f"ChunkedTopk(chunk={chunk!r}): chunk must be a power of two from {sizes}")
        object.__setattr__(self, "chunk", int(chunk))

    def prepare(self, layout: Layout, comm: Comm) -> State:
        chunks = self.chunks(layout.numel, layout.dtype, comm.size)
        if chunks is None:
            return Residual(layout, decay=self.residual_factor)
        return ChunkState(layout, self, chunks, comm.size)

    def run(self, flat: Tensor, state: State, comm: Comm) -> Work | None:
        if not isinstance(state, ChunkState):
            return self.run_dense(flat, state, comm)
        state.put("residual")
        kernels, share, kept, turn = state.kernels, state.share, state.residual, state.turn
        kernels.pack(flat, share, kept, turn, state.ratio, state.mine[0], state.flags)
        comm.all_gather(state.theirs, state.mine).wait()
        state.result_is_finite = kernels.total(state.theirs, flat, comm.rank, kept, turn)
        return None

    def chunks(self, numel: int, dtype: torch.dtype, ranks: int) -> Chunks | None:
        """Return the chunks of a bucket; None if it is sent dense: on one rank, if it is too small, or if its entries
        would take as many bytes."""
        if ranks == 1 or numel < _FEWEST_PER_RANK * ranks:
            return None
        chunks = Chunks.of(numel, self.chunk, self.density, self.values)
        return chunks if ranks * chunks.bytes < 2 * numel * dtype.itemsize else None

    def part_bytes(self, numel: int, dtype: torch.dtype, ranks: int) -> int | None:
        chunks = self.chunks(numel, dtype, ranks)
        return None if chunks is None else chunks.bytes


class ChunkState(SparseState):
    """A bucket that is sent in chunks."""

    def __init__(self, layout: Layout, exchange: ChunkedTopk, chunks: Chunks, ranks: int) -> None:
        super().__init__(layout, 0.0, 1, chunks.bytes, ranks, exchange.residual_factor)
        self._chunks = chunks
        self.kernels = chunk_kernels_for(chunks, layout.device, layout.buffer, exchange.mean == "contributors")
        self.reserve()

    def describe(self) -> str:
        chunks = self._chunks
        return f"sparse, {chunks.count} chunk{'' if chunks.count == 1 else 's'} of {chunks.entries} entries"
