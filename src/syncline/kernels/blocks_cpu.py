"""Quantisation on the CPU with torch's vectorised operations, in passes over pieces of the bucket that fit in a cache.

Starting an operation takes about as long as computing some thousand elements, so pieces are larger than a core's own
cache, but smaller than the cache that cores share. They are also large enough for torch to use the threads that
`torch.set_num_threads` allows. Products and sums that must be rounded one by one, as on CUDA, are separate operations:
`torch.add` with a factor and `addcmul` may round once, and are used only where the product is exact.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from syncline.kernels.blocks import FOLDS, PLANES, SMALLEST_SCALE, Blocks
from syncline.kernels.slots import Buffers, own_buffers

_PIECE = 1 << 18
"""Elements that are processed at a time."""


class CpuBlockKernels:
    """`BlockKernels` for the CPU."""

    def __init__(self, blocks: Blocks, buffers: Buffers | None = None) -> None:
        make = buffers or own_buffers(torch.device("cpu"))
        self._layout = blocks
        self._step = max(1, min(_PIECE // blocks.block, blocks.blocks))
        self._values, self._codes, self._folded = (
            make(kind, self._step, blocks.block, dtype=torch.float32) for kind in ("values", "codes", "folded")
        )
        self._scale, self._inverse = (make(kind, self._step, 1, dtype=torch.float32) for kind in ("scale", "inverse"))
        self._half = torch.tensor(0.5)

    def encode(
        self, flat: Tensor, share: float, kept: Tensor | None, turn: Tensor, ratio: Tensor | None,
        rank: int, rows: Tensor,
    ) -> None:  # fmt: skip
        before, after = (None, None) if kept is None else (kept[int(turn)], kept[1 - int(turn)])
        for part in range(self._layout.parts):
            for first, count, where in self._pieces(part):
                size, held = where.stop - where.start, None if before is None else before[where]
                if part == rank:
                    if after is not None:
                        self._accumulate(flat[where], share, held, ratio, after[where])
                    continue
                values = self._values[:count]
                self._accumulate(flat[where], share, held, ratio, values.view(-1)[:size])
                values.view(-1)[size:].zero_()
                codes, scale = self._quantise(values, rows[part], first)
                if after is not None:
                    _store(values, codes, scale, after[where])

    def total(
        self, received: Tensor, flat: Tensor, share: float, kept: Tensor | None, turn: Tensor, rank: int, row: Tensor
    ) -> None:
        after = None if kept is None else kept[1 - int(turn)]
        scales = self._scales(received)
        for first, count, where in self._pieces(rank):
            sums, own = self._values[:count].zero_(), self._values.view(-1)[: where.stop - where.start]
            for source in range(self._layout.parts):
                if source != rank:
                    sums.addcmul_(self._unpack(received[source], first, count), scales[source, first : first + count])
                elif after is not None:
                    own.add_(after[where])
                else:
                    gradient = self._codes.view(-1)[: len(own)]
                    self._accumulate(flat[where], share, None, None, gradient)
                    own.add_(gradient)
            codes, scale = self._quantise(sums, row, first)
            if after is None:
                continue
            if flat.dtype.itemsize == 2:  # the result is rounded once more
                codes.mul_(scale).copy_(codes.to(flat.dtype))
                scale.fill_(1.0)
            _store(sums, codes, scale, after[where])

    def decode(self, gathered: Tensor, flat: Tensor) -> Tensor:
        layout, scales = self._layout, self._scales(gathered)
        for part in range(layout.parts):
            for first, count, where in self._pieces(part):
                if where.start == where.stop:
                    break
                codes, scale = self._unpack(gathered[part], first, count), scales[part, first : first + count]
                if flat.dtype == torch.float32 and where.stop - where.start == codes.numel():
                    torch.mul(codes, scale, out=flat[where].view_as(codes))
                else:
                    flat[where] = codes.mul_(scale).view(-1)[: where.stop - where.start]
        if flat.dtype == torch.float16:  # a value that is finite in fp32 can overflow in fp16
            return torch.isfinite(flat).all()
        return torch.isfinite(scales.view(-1)[: layout.used]).all()

    def _pieces(self, part: int) -> Iterator[tuple[int, int, slice]]:
        """Yield the first block, the number of blocks, and the elements of the bucket, for each piece of a part."""
        layout = self._layout
        for first in range(0, layout.blocks, self._step):
            count = min(self._step, layout.blocks - first)
            start = min(part * layout.part + first * layout.block, layout.numel)
            yield first, count, slice(start, min(start + count * layout.block, layout.numel))

    def _accumulate(
        self, gradient: Tensor, share: float, before: Tensor | None, ratio: Tensor | None, out: Tensor
    ) -> None:
        if gradient.dtype == torch.float32:
            torch.mul(gradient, share, out=out)
        else:
            out.copy_(gradient if share == 1.0 else gradient * share)
        if before is not None:
            scaled = self._folded.view(-1)[: len(out)]
            out.add_(before if ratio is None else torch.mul(before, ratio, out=scaled))

    def _quantise(self, values: Tensor, row: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Write the codes and scales of the blocks from `first` on to a row, and return them."""
        count, layout = len(values), self._layout
        codes, scale, inverse = self._codes[:count], self._scale[:count], self._inverse[:count]
        torch.amax(torch.abs(values, out=codes), 1, keepdim=True, out=scale)
        scale.mul_(1 / layout.largest).clamp_(min=SMALLEST_SCALE)
        sent = row[: 2 * layout.blocks].view(torch.bfloat16)[first : first + count].view(-1, 1)
        scale.copy_(sent.copy_(scale))
        torch.mul(values, torch.reciprocal(scale, out=inverse), out=codes).round_()
        folded, free = codes, self._folded.view(-1)
        for factor in FOLDS[layout.bits]:
            half = folded.shape[1] // 2
            out, free = free[: count * half].view(count, half), free[count * half :]
            folded = torch.add(folded[:, :half], folded[:, half:], alpha=factor, out=out)
        planes = self._planes(row, first, count)
        if len(planes) == 1:
            planes[0].copy_(folded)
        else:
            numbers = folded.to(torch.int32)
            for index, plane in enumerate(planes):
                plane.copy_(numbers >> 8 * index)
        return codes, scale

    def _unpack(self, row: Tensor, first: int, count: int) -> Tensor:
        """Return the codes of `count` blocks of a row, from `first` on."""
        layout = self._layout
        *lower, top = self._planes(row, first, count)
        buffers = (self._codes.view(-1), self._folded.view(-1))
        turn, width = len(FOLDS[layout.bits]) % 2, layout.width
        numbers = buffers[turn][: count * width].view(count, width).copy_(top)
        for plane in reversed(lower):
            numbers.mul_(256).add_(plane.view(torch.uint8))
        for factor in reversed(FOLDS[layout.bits]):
            turn, width = 1 - turn, 2 * width
            out = buffers[turn][: count * width].view(count, width)
            high = torch.add(self._half, numbers, alpha=1 / factor, out=out[:, width // 2 :]).floor_()
            torch.sub(numbers, high, alpha=factor, out=out[:, : width // 2])
            numbers = out
        return numbers

    def _planes(self, row: Tensor, first: int, count: int) -> list[Tensor]:
        """Return the bytes of `count` blocks in each plane of a row, as signed integers."""
        layout = self._layout
        planes = row[2 * layout.blocks :].view(torch.int8).view(PLANES[layout.bits], layout.blocks, layout.width)
        return list(planes[:, first : first + count])

    def _scales(self, rows: Tensor) -> Tensor:
        """Return the scales of received rows in fp32; NaN for those that are not finite or too large."""
        layout = self._layout
        scales = rows.view(layout.parts, -1)[:, : 2 * layout.blocks].view(torch.bfloat16).to(torch.float32)
        return scales.masked_fill_(~(scales.abs() < layout.limit), torch.nan).unsqueeze(-1)


def _store(values: Tensor, codes: Tensor, scale: Tensor, out: Tensor) -> None:
    """Write `values - codes * scale` to `out`. It is shorter than `values` at the end of the bucket."""
    if len(out) == values.numel():
        torch.addcmul(values, codes, scale, value=-1, out=out.view_as(values))
    else:
        out.copy_(values.addcmul_(codes, scale, value=-1).view(-1)[: len(out)])
