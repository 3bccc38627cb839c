"""Quantisation on CUDA, in Triton. The results equal those of `blocks_cpu.py`, bit for bit.

Each kernel is one pass, and each program handles a few blocks. A block is loaded as groups whose codes fold into the
same numbers. Kernels that quantise are compiled without fused multiply-add, which would round once where the CPU
rounds twice; a product of code and scale is exact.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from syncline.kernels.blocks import FOLDS, SMALLEST_SCALE, Blocks
from syncline.kernels.cuda import _TYPES, _from_bits, _rounded, _to_bits
from syncline.kernels.replay import Replay

_ELEMENTS = 2048
"""Elements per program."""
_MAGIC = tl.constexpr(1.5 * 2**23)
"""Adding and then subtracting it rounds a number below 2^22 to an integer, ties to even."""
_SMALLEST = tl.constexpr(SMALLEST_SCALE)


@triton.jit
def _places(part, blocks, GROUPS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Return this program's blocks in a part, and its elements in the bucket, as (blocks, groups, numbers)."""
    block = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    group, number = tl.arange(0, GROUPS)[None, :, None], tl.arange(0, WIDTH)[None, None, :]
    where = ((part * blocks + block.to(tl.int64))[:, None, None] * GROUPS + group) * WIDTH + number
    return block, where


@triton.jit
def _quantise(
    values, block, blocks, scales, codes,
    BITS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the scales and codes of some blocks, and return the values that they stand for."""
    largest = tl.max(tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 2), 1)
    scale = largest.to(tl.float32, bitcast=True) * (1 / (2 ** (BITS - 1) - 1))
    bits = _to_bits(tl.where(scale < _SMALLEST, _SMALLEST, scale), 1)
    scale = _from_bits(bits, 1)
    tl.store(scales + block, bits.to(tl.int16), mask=block < blocks)
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    rounded = (values * inverse[:, None, None] + _MAGIC) - _MAGIC
    group = tl.arange(0, GROUPS)
    if GROUPS == 8:
        group = (group >> 2) + (group & 2) + ((group & 1) << 2)
    folded = tl.sum(rounded.to(tl.int32) << (BITS * group)[None, :, None], 1)
    number = block.to(tl.int64)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    for plane in tl.static_range(BITS * GROUPS // 8):
        place = codes + plane * WIDTH * blocks + number
        tl.store(place, (folded >> (8 * plane)).to(tl.int8), mask=(block < blocks)[:, None])
    return rounded * scale[:, None, None]


@triton.jit
def _dequantise(
    block, blocks, scales, codes, limit,
    BITS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return the values of some received blocks."""
    inside = block < blocks
    scale = _from_bits(tl.load(scales + block, mask=inside, other=0).to(tl.int32), 1)
    scale = tl.where(tl.abs(scale) < limit, scale, float("nan"))
    number = block.to(tl.int64)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    plane = WIDTH * blocks
    folded = tl.load(codes + number, mask=inside[:, None], other=0).to(tl.int32)
    if BITS == 3:
        middle = tl.load(codes + plane + number, mask=inside[:, None], other=0).to(tl.int32)
        top = tl.load(codes + 2 * plane + number, mask=inside[:, None], other=0).to(tl.int32)
        folded = (top << 16) + ((middle & 255) << 8) + (folded & 255)
    code = folded[:, None, :]
    group = tl.arange(0, GROUPS)[None, :, None]
    if BITS == 4:
        high = (code + 8) >> 4
        code = tl.where(group == 1, high, code - (high << 4))
    if BITS == 3:
        high = (code + 2048) >> 12
        code = tl.where((group & 1) == 1, high, code - (high << 12))
        high = (code + 32) >> 6
        code = tl.where((group & 2) == 2, high, code - (high << 6))
        high = (code + 4) >> 3
        code = tl.where((group & 4) == 4, high, code - (high << 3))
    return code.to(tl.float32) * scale[:, None, None]


@triton.jit
def _encode(
    flat, share, kept, turn, ratio, scales, codes, numel, stride, rank, blocks, row,
    FEEDBACK: tl.constexpr, SCALED: tl.constexpr, TYPE: tl.constexpr,
    BITS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add some blocks of the bucket to the residual, and quantise the sums, except those in this rank's part."""
    part = tl.program_id(1)
    block, where = _places(part, blocks, GROUPS, WIDTH, ROWS)
    inside = (block < blocks)[:, None, None] & (where < numel)
    total = _rounded(tl.load(flat + where, mask=inside, other=0.0).to(tl.float32) * share, TYPE)
    now = tl.load(turn).to(tl.int64)
    after = kept + (1 - now) * stride + where
    if FEEDBACK:
        held = tl.load(kept + now * stride + where, mask=inside, other=0.0)
        if SCALED:
            held = held * tl.load(ratio)
        total = held + total
    if part == rank:
        if FEEDBACK:
            tl.store(after, total, mask=inside)
    else:
        start = part.to(tl.int64) * row
        sent = _quantise(total, block, blocks, scales + start // 2, codes + start, BITS, GROUPS, WIDTH)
        if FEEDBACK:
            tl.store(after, total - sent, mask=inside)


@triton.jit
def _total(
    scales, codes, flat, share, kept, turn, sum_scales, sum_codes, broken, numel, stride, rank, parts, blocks, row,
    limit, FEEDBACK: tl.constexpr, TYPE: tl.constexpr,
    BITS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add some blocks of this rank's part over all ranks, in rank order, and quantise the sums."""
    tl.store(broken, 0)  # for `_decode`
    block, where = _places(rank, blocks, GROUPS, WIDTH, ROWS)
    inside = (block < blocks)[:, None, None] & (where < numel)
    after = kept + (1 - tl.load(turn).to(tl.int64)) * stride + where
    total = tl.zeros([ROWS, GROUPS, WIDTH], tl.float32)
    for source in range(parts):
        if source == rank:
            if FEEDBACK:
                total += tl.load(after, mask=inside, other=0.0)
            else:
                total += _rounded(tl.load(flat + where, mask=inside, other=0.0).to(tl.float32) * share, TYPE)
        else:
            total += _dequantise(block, blocks, scales, codes, limit, BITS, GROUPS, WIDTH)
        scales += row // 2
        codes += row
    sent = _quantise(total, block, blocks, sum_scales, sum_codes, BITS, GROUPS, WIDTH)
    if FEEDBACK:
        tl.store(after, total - _rounded(sent, TYPE), mask=inside)


@triton.jit
def _decode(
    scales, codes, flat, broken, numel, blocks, row, limit,
    TYPE: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write the gathered sums of some blocks to the bucket, and set `broken` if one is not finite."""
    part = tl.program_id(1)
    block, where = _places(part, blocks, GROUPS, WIDTH, ROWS)
    inside = (block < blocks)[:, None, None] & (where < numel)
    start = part.to(tl.int64) * row
    value = _dequantise(block, blocks, scales + start // 2, codes + start, limit, BITS, GROUPS, WIDTH)
    value = _rounded(value, TYPE)
    tl.store(flat + where, value, mask=inside)
    infinite = inside & ((value.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= 0x7F800000)
    if tl.max(tl.max(tl.max(infinite.to(tl.int32), 2), 1), 0) > 0:
        tl.store(broken, 1)


class CudaBlockKernels:
    """`BlockKernels` for CUDA."""

    def __init__(self, blocks: Blocks, device: torch.device) -> None:
        self._layout = blocks
        rows = max(1, _ELEMENTS // blocks.block)
        self._sizes: dict[str, Any] = {
            "BITS": blocks.bits, "GROUPS": 2 ** len(FOLDS[blocks.bits]), "WIDTH": blocks.width, "ROWS": rows,
            "num_warps": 4, "enable_fp_fusion": False,
        }  # fmt: skip
        self._programs = triton.cdiv(blocks.blocks, rows)
        self._broken = torch.zeros((), device=device, dtype=torch.int32)
        replays = device.type == "cuda"  # Triton's interpreter runs on the CPU, without CUDA graphs
        self._to_encode, self._to_total, self._to_decode = (Replay(replays) for _ in range(3))

    def encode(
        self, flat: Tensor, share: float, kept: Tensor | None, turn: Tensor, ratio: Tensor | None,
        rank: int, rows: Tensor,
    ) -> None:  # fmt: skip
        layout = self._layout

        def launch() -> None:
            _encode[(self._programs, layout.parts)](
                flat, share, flat if kept is None else kept, turn, turn if ratio is None else ratio, *self._views(rows),
                layout.numel, _stride(kept), rank, layout.blocks, layout.bytes,
                FEEDBACK=kept is not None, SCALED=ratio is not None, TYPE=_TYPES[flat.dtype], **self._sizes,
            )  # fmt: skip

        self._to_encode(launch, flat, share, kept, turn, ratio, rank, rows)

    def total(
        self, received: Tensor, flat: Tensor, share: float, kept: Tensor | None, turn: Tensor, rank: int, row: Tensor
    ) -> None:
        layout = self._layout

        def launch() -> None:
            _total[(self._programs,)](
                *self._views(received), flat, share, flat if kept is None else kept, turn, *self._views(row),
                self._broken, layout.numel, _stride(kept), rank, layout.parts, layout.blocks, layout.bytes,
                layout.limit, FEEDBACK=kept is not None, TYPE=_TYPES[flat.dtype], **self._sizes,
            )  # fmt: skip

        self._to_total(launch, received, flat, share, kept, turn, rank, row)

    def decode(self, gathered: Tensor, flat: Tensor) -> Tensor:
        layout = self._layout

        def launch() -> None:
            _decode[(self._programs, layout.parts)](
                *self._views(gathered), flat, self._broken, layout.numel, layout.blocks, layout.bytes, layout.limit,
                TYPE=_TYPES[flat.dtype], **self._sizes,
            )  # fmt: skip

        self._to_decode(launch, gathered, flat)
        return self._broken == 0

    def _views(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return views that begin at the scales and at the codes of the first row, and end with the last row."""
        flat = rows.view(-1)
        return flat.view(torch.int16), flat[2 * self._layout.blocks :].view(torch.int8)


def _stride(kept: Tensor | None) -> int:
    """Return the distance between the two copies of the residual, of which `kept` may be a piece."""
    return 0 if kept is None else kept.stride(0)
