"""Selection of the largest entries of each chunk on CUDA, in Triton. The results equal those of `chunks_cpu.py`, bit
for bit, and nothing waits for the device.

One program selects and encodes one chunk: it adds the bucket to the residual, finds the magnitude of the smallest entry
by a binary search over its bits, in registers, and writes codes, scales and the new residual. Codes are then packed
into planes. Received codes are unpacked, and one program per chunk adds the entries of all ranks.

Received codes are checked before use: entries that are not in order, or beyond the end of the bucket, make the chunk's
first element NaN, so that all ranks drop the step, and nothing is written outside of the bucket.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from syncline.kernels.chunks import FIXED_POINT, LEAST_BITS, Chunks
from syncline.kernels.cuda import _TYPES, _from_bits, _rounded, _to_bits
from syncline.kernels.replay import Replay
from syncline.kernels.slots import Buffers, own_buffers

_LEAST = tl.constexpr(LEAST_BITS)
_FIXED = tl.constexpr(FIXED_POINT)
_NOT_FINITE = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FC0)
_FORMATS = {"fp32": 0, "bf16": 1, "int4": 2, "int2": 3}
"""Numbers that stand for the formats of values in kernels."""


@triton.jit
def _mean(total, number, exponent):
    """Return the mean of magnitudes in fixed point, of which the largest has this exponent."""
    mean = tl.div_rn(total.to(tl.float32), tl.maximum(number, 1).to(tl.float32)).to(tl.int32, bitcast=True)
    raised = exponent - (127 + 23 + _FIXED)
    return tl.where((mean >> 23) + raised > 0, mean + (raised << 23), 0).to(tl.float32, bitcast=True)


@triton.jit
def _pack(
    flat, share, kept, turn, ratio, flags, codes, values, scales, numel, entries, room,
    SCALED: tl.constexpr, TYPE: tl.constexpr, FLAGS: tl.constexpr, VALUES: tl.constexpr,
    CHUNK: tl.constexpr, BITS: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Add one chunk of the bucket to the residual, and write the codes and values of its largest entries."""
    chunk = tl.program_id(0).to(tl.int64)
    now = tl.load(turn).to(tl.int64)
    place = tl.arange(0, CHUNK)
    where = chunk * CHUNK + place
    inside = where < numel
    gradient = _rounded(tl.load(flat + where, mask=inside, other=0.0).to(tl.float32) * share, TYPE)
    held = tl.load(kept + now * numel + where, mask=inside, other=0.0)
    if SCALED:
        held = held * tl.load(ratio)
    total = held + gradient
    bits = total.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    sign = (bits >> 31) & 1

    limit = 0
    for bit in range(31):
        higher = limit | (1 << (30 - bit))
        limit = tl.where(tl.sum((magnitude >= higher).to(tl.int32), 0) >= entries, higher, limit)
    limit = tl.maximum(limit, _LEAST)
    above = magnitude > limit
    same = (magnitude == limit).to(tl.int32)
    left = entries - tl.sum(above.to(tl.int32), 0)
    chosen = above | ((same > 0) & (tl.cumsum(same, 0) <= left))
    flag = chosen.to(tl.int32)
    filled = tl.sum(flag, 0)
    slot = tl.cumsum(flag, 0) - flag
    index = tl.arange(0, ROOM)
    absent = (index >= filled) & (index < entries)

    code = place
    if VALUES == 0:
        sent = total
        tl.store(values + chunk * entries + slot, total, mask=chosen)
        tl.store(values + chunk * entries + index, tl.zeros([ROOM], tl.float32), mask=absent)
    elif VALUES == 1:
        rounded = _to_bits(total, 1)
        sent = _from_bits(rounded, 1)
        tl.store(values + chunk * entries + slot, rounded.to(tl.int16), mask=chosen)
        tl.store(values + chunk * entries + index, tl.zeros([ROOM], tl.int16), mask=absent)
    else:
        largest = tl.max(tl.where(chosen, magnitude, 0), 0)
        finite = largest < _NOT_FINITE
        largest = tl.where(finite, largest, 0)
        magnitude = tl.where(chosen & finite, magnitude, 0)
        if VALUES == 2:
            scale = tl.where(finite, _to_bits(largest.to(tl.float32, bitcast=True) * (1 / 7), 1), _NAN)
            tl.store(scales + chunk, scale.to(tl.int16))
            scale = tl.zeros([CHUNK], tl.float32) + _from_bits(scale, 1)
            inverse = tl.div_rn(tl.full([CHUNK], 1.0, tl.float32), tl.where(scale > 0, scale, 1.0))
            number = tl.floor(magnitude.to(tl.float32, bitcast=True) * inverse + 0.5)
            number = tl.minimum(number, 7.0)
            sent = number * scale
            code = code | ((number.to(tl.int32) | (sign << 3)) << BITS)
        else:
            exponent = largest >> 23
            lower = tl.minimum(exponent - (magnitude >> 23), 63).to(tl.int64)
            fixed = (((magnitude & 0x7FFFFF) | 0x800000).to(tl.int64) << _FIXED) >> lower
            fixed = tl.where(chosen, fixed, 0)
            whole = tl.sum(fixed, 0)
            large = fixed * filled > whole
            upper = tl.sum(tl.where(large, fixed, 0), 0)
            many = tl.sum(large.to(tl.int32), 0)
            low = tl.where(finite, _to_bits(_mean(whole - upper, filled - many, exponent), 1), _NAN)
            high = tl.where(finite, _to_bits(_mean(upper, many, exponent), 1), _NAN)
            tl.store(scales + 2 * chunk, low.to(tl.int16))
            tl.store(scales + 2 * chunk + 1, high.to(tl.int16))
            sent = tl.where(large, _from_bits(high, 1), _from_bits(low, 1))
            code = code | ((large.to(tl.int32) | (sign << 1)) << BITS)
        sent = tl.where(sign > 0, -sent, sent)
    codes += chunk * room
    tl.store(codes + slot, code, mask=chosen)
    tl.store(codes + index, tl.zeros([ROOM], tl.int32) + tl.max(tl.where(chosen, place, 0), 0), mask=absent)
    tl.store(kept + (1 - now) * numel + where, tl.where(chosen, total - sent, total), mask=inside)
    if FLAGS:
        tl.store(flags + where, (chosen & (sent != 0)).to(tl.int8), mask=inside)


@triton.jit
def _fold(codes, row, entries, room, nbytes, shift, BITS: tl.constexpr, BYTES: tl.constexpr):
    """Pack the bits of one chunk's codes that belong to one plane."""
    chunk = tl.program_id(0).to(tl.int64)
    byte = tl.arange(0, BYTES)
    packed = tl.zeros([BYTES], tl.int32)
    for part in tl.static_range(8 // BITS):
        index = part * nbytes + byte
        code = tl.load(codes + chunk * room + index, mask=(byte < nbytes) & (index < entries), other=0)
        packed |= ((code >> shift) & ((1 << BITS) - 1)) << (part * BITS)
    tl.store(row + chunk * nbytes + byte, packed.to(tl.int8), mask=byte < nbytes)


@triton.jit
def _unfold(
    rows, codes, entries, room, nbytes, shift, row_bytes, count,
    FIRST: tl.constexpr, BITS: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Add the bits of a plane to the codes of one chunk of one rank."""
    chunk, source = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    index = tl.arange(0, ROOM)
    present = index < entries
    part = index // nbytes
    byte = tl.load(rows + source * row_bytes + chunk * nbytes + index - part * nbytes, mask=present, other=0)
    code = ((byte.to(tl.int32) >> (part * BITS)) & ((1 << BITS) - 1)) << shift
    codes += (source * count + chunk) * room
    if not FIRST:
        code |= tl.load(codes + index, mask=present, other=0)
    tl.store(codes + index, code, mask=present)


@triton.jit
def _total(
    codes, values, scales, flat, sums, counts, kept, turn, broken,
    numel, entries, room, sources, rank, row_bytes, count,
    COUNTED: tl.constexpr, VALUES: tl.constexpr, RESULT: tl.constexpr,
    CHUNK: tl.constexpr, BITS: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Add the entries of all ranks in one chunk, in rank order, and write the result to the bucket."""
    chunk = tl.program_id(0).to(tl.int64)
    start = chunk * CHUNK
    element = tl.arange(0, CHUNK)
    index = tl.arange(0, ROOM)
    present = index < entries
    sums += start
    counts += start
    tl.store(sums + element, tl.zeros([CHUNK], tl.float32))
    if COUNTED:
        tl.store(counts + element, tl.zeros([CHUNK], tl.int16))
    tl.debug_barrier()
    damaged = tl.zeros([ROOM], tl.int32)
    for source in range(sources):
        mine = codes + (source * count + chunk) * room
        code = tl.load(mine + index, mask=present, other=0)
        place = code & (CHUNK - 1)
        previous = tl.load(mine + index - 1, mask=present & (index > 0), other=0) & (CHUNK - 1)
        exists = present & ((index == 0) | (place > previous))
        wrong = present & (((index > 0) & (place < previous)) | (start + place >= numel))
        damaged += wrong.to(tl.int32)
        number = code >> BITS
        if VALUES == 0:
            there = values + source * (row_bytes // 4) + chunk * entries
            value = tl.load(there + index, mask=exists, other=0.0)
        elif VALUES == 1:
            there = values + source * (row_bytes // 2) + chunk * entries
            value = _from_bits(tl.load(there + index, mask=exists, other=0).to(tl.int32), 1)
        elif VALUES == 2:
            scale = _from_bits(tl.load(scales + source * (row_bytes // 2) + chunk).to(tl.int32), 1)
            value = (number & 7).to(tl.float32) * scale
            value = tl.where((number & 8) > 0, -value, value)
        else:
            there = scales + source * (row_bytes // 2) + 2 * chunk
            low, high = _from_bits(tl.load(there).to(tl.int32), 1), _from_bits(tl.load(there + 1).to(tl.int32), 1)
            value = tl.where((number & 1) > 0, high, low)
            value = tl.where((number & 2) > 0, -value, value)
        held = tl.load(sums + place, mask=exists, other=0.0)
        tl.store(sums + place, held + value, mask=exists)
        if COUNTED:
            before = tl.load(counts + place, mask=exists, other=0)
            tl.store(counts + place, before + (value != 0).to(tl.int16), mask=exists)
        tl.debug_barrier()
    value = tl.load(sums + element)
    bad = tl.sum(damaged, 0) > 0
    ranks = tl.zeros([CHUNK], tl.float32) + sources
    number_of = ranks
    if COUNTED:
        number_of = tl.maximum(tl.load(counts + element).to(tl.float32), 1.0)
        value *= tl.div_rn(ranks, number_of)
    applied = _rounded(value, RESULT)
    where = start + element
    inside = where < numel
    if RESULT > 0:
        lost = (value - applied) * tl.div_rn(number_of, ranks)
        kept += (1 - tl.load(turn).to(tl.int64)) * numel
        owner = tl.zeros([CHUNK], tl.int32) + (chunk % sources).to(tl.int32)
        changed = inside & (lost != 0) & (owner == rank)
        tl.store(kept + where, tl.load(kept + where, mask=changed, other=0.0) + lost, mask=changed)
    applied = tl.where(bad & (element == 0), float("nan"), applied)
    tl.store(flat + where, applied.to(flat.dtype.element_ty), mask=inside)
    infinite = inside & ((applied.to(tl.int32, bitcast=True) & _NOT_FINITE) == _NOT_FINITE)
    if tl.sum(infinite.to(tl.int32), 0) > 0:
        tl.atomic_max(broken, 1)


class CudaChunkKernels:
    """`ChunkKernels` for CUDA."""

    def __init__(
        self, chunks: Chunks, device: torch.device, buffers: Buffers | None = None, contributors: bool = False
    ) -> None:
        make = buffers or own_buffers(device)
        self._chunks, self._device = chunks, device
        self._room = max(16, triton.next_power_of_2(chunks.entries))
        self._codes = make("codes", chunks.count, self._room, dtype=torch.int32)
        padded = chunks.count * chunks.chunk
        self._sums = make("sum", padded, dtype=torch.float32)
        self._counts = make("counts", padded, dtype=torch.int16) if contributors else None
        self._theirs = torch.zeros(0, device=device, dtype=torch.int32)
        self._broken = torch.zeros((), device=device, dtype=torch.int32)
        self._sizes: dict[str, Any] = {
            "VALUES": _FORMATS[chunks.values], "CHUNK": chunks.chunk, "BITS": chunks.place_bits, "ROOM": self._room,
            "num_warps": 8 if chunks.chunk > 1024 else 4, "enable_fp_fusion": False,
        }  # fmt: skip
        self._replays = device.type == "cuda"  # Triton's interpreter runs on the CPU, without CUDA graphs
        self._to_pack, self._to_total = (Replay(self._replays) for _ in range(2))

    def pack(
        self, flat: Tensor, share: float, kept: Tensor, turn: Tensor, ratio: Tensor | None, row: Tensor,
        flags: Tensor | None = None,
    ) -> None:  # fmt: skip
        layout, codes, row = self._chunks, self._codes, row.view(-1)

        def launch() -> None:
            _pack[(layout.count,)](
                flat, share, kept, turn, turn if ratio is None else ratio, kept if flags is None else flags,
                codes, *self._views(row), layout.numel, layout.entries, self._room,
                SCALED=ratio is not None, TYPE=_TYPES[flat.dtype], FLAGS=flags is not None, **self._sizes,
            )  # fmt: skip
            for plane in layout.planes:
                _fold[(layout.count,)](
                    codes, row[plane.start :].view(torch.int8), layout.entries, self._room, plane.bytes, plane.shift,
                    BITS=plane.bits, BYTES=max(16, triton.next_power_of_2(plane.bytes)), num_warps=1,
                )  # fmt: skip

        self._to_pack(launch, flat, share, kept, turn, ratio, row, flags)

    def total(self, received: Tensor, flat: Tensor, rank: int, kept: Tensor, turn: Tensor) -> Tensor:
        layout, sources, rows = self._chunks, received.numel() // self._chunks.bytes, received.view(-1)
        if self._theirs.numel() < sources * self._codes.numel():
            self._theirs = self._theirs.new_zeros(sources * self._codes.numel())
            self._to_total = Replay(self._replays)
        counts = self._sums if self._counts is None else self._counts
        self._broken.zero_()

        def launch() -> None:
            for number, plane in enumerate(layout.planes):
                _unfold[(layout.count, sources)](
                    rows[plane.start :].view(torch.int8), self._theirs, layout.entries, self._room,
                    plane.bytes, plane.shift, layout.bytes, layout.count,
                    FIRST=number == 0, BITS=plane.bits, ROOM=self._room, num_warps=1,
                )  # fmt: skip
            _total[(layout.count,)](
                self._theirs, *self._views(rows), flat, self._sums, counts, kept, turn, self._broken,
                layout.numel, layout.entries, self._room, sources, rank, layout.bytes, layout.count,
                COUNTED=self._counts is not None, RESULT=_TYPES[flat.dtype], **self._sizes,
            )  # fmt: skip

        self._to_total(launch, rows, flat, rank, kept, turn, sources)
        return self._broken == 0

    def _views(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return views that begin at the values and at the scales of the first row, and end with the last row."""
        values = torch.float32 if self._chunks.values == "fp32" else torch.int16
        return rows.view(values), rows[self._chunks.scales_at // 4 * 4 :].view(torch.int16)
