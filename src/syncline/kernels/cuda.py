"""Selection on CUDA, in Triton. The results equal those of `cpu.py`, bit for bit, and nothing waits for the device.

1. One pass adds the bucket to the residual, clears it, and stores for each cell the places of its candidates: elements
   whose keys are not below a threshold. The threshold is slightly below the boundary key of the last step, at which the
   region's slot was full. Candidates are counted by key.
2. One program per region finds the boundary key of this step.
3. Each cell counts its selected entries, and then writes them to the slot.

As on the CPU, the threshold affects the time, but not the result: a cell with more candidates than it can store is
searched completely, and so is a region with too few candidates.

Received slots are checked before use. An invalid place becomes a NaN in its cell, so that all ranks drop the step, and
nothing is written outside of the bucket.

This module has more than 400 lines because the kernels and the class that launches them must change together: they
share long argument lists, which no type checker compares.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from syncline.kernels.replay import Replay
from syncline.kernels.slots import KEY_SHIFT, KEYS, SLACK, Buffers, Slots, own_buffers

_SHIFT = tl.constexpr(KEY_SHIFT)
_KEYS = tl.constexpr(KEYS)
_TYPES = {torch.float32: 0, torch.float64: 0, torch.bfloat16: 1, torch.float16: 2}
"""Numbers by which kernels distinguish the types that values are rounded to; 0 for no rounding."""
_BLOCK = 4096
_COPIES = 16
"""Copies of each histogram. Most candidates share a few keys, and atomic additions to the same address are slow."""
_FEW = 64
"""Entries that a program reads at a time: slightly more than a cell usually has."""


@triton.jit
def _key(values):
    return (values.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >> _SHIFT


@triton.jit
def _power_of_two(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _to_bits(values, TYPE: tl.constexpr):
    """Round to 16 bits, to nearest even, and return the bits as an integer. NaN stays NaN."""
    if TYPE == 1:
        bits = values.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
        return tl.where(values != values, 0x7FC0, rounded)
    return values.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _from_bits(bits, TYPE: tl.constexpr):
    if TYPE == 1:
        return ((bits & 0xFFFF) << 16).to(tl.float32, bitcast=True)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _rounded(values, TYPE: tl.constexpr):
    if TYPE == 0:
        return values
    return _from_bits(_to_bits(values, TYPE), TYPE)


@triton.jit
def _accumulate(
    flat, share, kept, turn, ratio, threshold, histogram, candidates, places, numel, regions, cells,
    SCALED: tl.constexpr, TYPE: tl.constexpr,
    CELL: tl.constexpr, BLOCK: tl.constexpr, ROOM: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """Add one cell of the bucket to the residual, clear it, and store the places of its candidates."""
    cell, region = tl.program_id(0), tl.program_id(1)
    now = tl.load(turn).to(tl.int64)
    before, after = kept + now * numel, kept + (1 - now) * numel
    level = tl.load(threshold + region)
    start = (cell.to(tl.int64) * regions + region) * CELL
    number = region * cells + cell
    places += number.to(tl.int64) * ROOM
    histogram += (region * COPIES + cell % COPIES) * _KEYS
    passed = 0
    for offset in range(0, CELL, BLOCK):
        place = offset + tl.arange(0, BLOCK)
        where = start + place
        inside = where < numel
        gradient = _rounded(tl.load(flat + where, mask=inside, other=0.0).to(tl.float32) * share, TYPE)
        held = tl.load(before + where, mask=inside, other=0.0)
        if SCALED:
            held = held * tl.load(ratio)
        total = held + gradient
        tl.store(after + where, total, mask=inside)
        tl.store(flat + where, tl.zeros([BLOCK], flat.dtype.element_ty), mask=inside)
        key = _key(total)
        passes = inside & (key >= level)
        flag = passes.to(tl.int32)
        note = passed + tl.cumsum(flag, 0) - flag
        tl.store(places + note, place.to(tl.int16), mask=passes & (note < ROOM))
        tl.atomic_add(histogram + key, flag, mask=passes, sem="relaxed")
        passed += tl.sum(flag, 0)
    tl.store(candidates + number, passed)


@triton.jit
def _recount(
    kept, turn, short, histogram, numel, regions, cells,
    CELL: tl.constexpr, BLOCK: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """Count all keys of a region that had too few candidates. Its programs share the blocks."""
    region = tl.program_id(1).to(tl.int64)
    if tl.load(short + region) > 0:
        after = kept + (1 - tl.load(turn).to(tl.int64)) * numel
        counts = tl.zeros([_KEYS], tl.int32)
        per_cell: tl.constexpr = CELL // BLOCK
        for block in range(tl.program_id(0), cells * per_cell, tl.num_programs(0)):
            start = ((block // per_cell) * regions + region) * CELL + (block % per_cell) * BLOCK
            where = start + tl.arange(0, BLOCK)
            counts += tl.histogram(_key(tl.load(after + where, mask=where < numel, other=0.0)), _KEYS)
        keys = tl.arange(0, _KEYS)
        histogram += region * COPIES * _KEYS
        tl.atomic_add(histogram + keys, counts, mask=(counts > 0) & (keys > 0), sem="relaxed")


@triton.jit
def _boundary(
    histogram, threshold, short, boundary, room, top, entries,
    AGAIN: tl.constexpr, TRACKED: tl.constexpr, SLACK: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """Find the boundary key of one region, which is the largest key with at least `entries` elements at or above it,
    and the number of elements with exactly this key to select. If too few were counted, set `short`: the region is then
    counted again, and this kernel runs again with AGAIN."""
    region = tl.program_id(0)
    active = True
    if AGAIN:
        active = tl.load(short + region) > 0
    if active:
        keys = tl.arange(0, _KEYS)
        counts = tl.zeros([_KEYS], tl.int32)
        mine = histogram + region * COPIES * _KEYS + keys
        for copy in range(COPIES):
            counts += tl.load(mine + copy * _KEYS)
            tl.store(mine + copy * _KEYS, tl.zeros([_KEYS], tl.int32))
        at_least = tl.cumsum(counts, 0, reverse=True)
        limit = tl.maximum(tl.sum((at_least >= entries).to(tl.int32), 0) - 1, 0)
        tl.store(boundary + region, limit)
        tl.store(room + region, entries - tl.sum(tl.where(keys > limit, counts, 0), 0))
        tl.store(top + region, tl.max(tl.where(counts > 0, keys, 0), 0))
        if TRACKED:
            if not AGAIN:
                too_few = (tl.sum(counts, 0) < entries) & (tl.load(threshold + region) > 1)
                tl.store(short + region, too_few.to(tl.int32))
            tl.store(threshold + region, tl.maximum(limit - SLACK, 1))


@triton.jit
def _count(
    source, turn, short, candidates, places, boundary, above, ties, numel, regions, cells,
    KEPT: tl.constexpr, CELL: tl.constexpr, BLOCK: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Count the elements of one cell above the boundary key, and those at it."""
    cell, region = tl.program_id(0), tl.program_id(1)
    number = region * cells + cell
    limit = tl.load(boundary + region)
    start = (cell.to(tl.int64) * regions + region) * CELL
    if KEPT:
        source += (1 - tl.load(turn).to(tl.int64)) * numel
    if (tl.load(candidates + number) <= ROOM) & (tl.load(short + region) == 0):
        index = tl.arange(0, ROOM)
        present = index < tl.load(candidates + number)
        place = tl.load(places + number.to(tl.int64) * ROOM + index, mask=present, other=0).to(tl.int32)
        key = _key(tl.load(source + start + place, mask=present, other=0.0))
        tl.store(above + number, tl.sum((key > limit).to(tl.int32), 0))
        tl.store(ties + number, tl.sum(((key == limit) & (key > 0)).to(tl.int32), 0))
    else:
        more = tl.zeros([BLOCK], tl.int32)
        same = tl.zeros([BLOCK], tl.int32)
        for offset in range(0, CELL, BLOCK):
            where = start + offset + tl.arange(0, BLOCK)
            key = _key(tl.load(source + where, mask=where < numel, other=0.0))
            more += (key > limit).to(tl.int32)
            same += ((key == limit) & (key > 0)).to(tl.int32)
        tl.store(above + number, tl.sum(more, 0))
        tl.store(ties + number, tl.sum(same, 0))


@triton.jit
def _deal(above, ties, room, top, starts, words, row, cells, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """Compute how many entries each cell of a region selects and where they start, and write the slot's header."""
    region = tl.program_id(0)
    left = tl.load(room + region)
    first = 0
    words += region.to(tl.int64) * row
    for begin in range(0, cells, BLOCK):
        cell = begin + tl.arange(0, BLOCK)
        inside = cell < cells
        same = tl.load(ties + region * cells + cell, mask=inside, other=0)
        same_before = tl.cumsum(same, 0) - same
        taken = tl.maximum(tl.minimum(left - same_before, same), 0)
        count = taken + tl.load(above + region * cells + cell, mask=inside, other=0)
        tl.store(ties + region * cells + cell, taken, mask=inside)
        tl.store(starts + region * cells + cell, first + tl.cumsum(count, 0) - count, mask=inside)
        tl.store(words + 1 + cell, count.to(tl.int16), mask=inside)
        first += tl.sum(count, 0)
        left = tl.maximum(left - tl.sum(same, 0), 0)
    if HALF:
        tl.store(words, tl.minimum(141 - (tl.load(top + region) >> (23 - _SHIFT)), 120).to(tl.int16))
    else:
        tl.store(words, 0)


@triton.jit
def _write(
    place, value, next, left, words, after, counts, limit, exponent, places_at, values_at, home, numel, sources,
    OWNED: tl.constexpr, COUNTED: tl.constexpr, VALUES: tl.constexpr, RESULT: tl.constexpr,
):  # fmt: skip
    """Write the selected ones of some elements to the slot, from entry `next` on. If OWNED, add rounding errors to the
    residual. Return the number of entries written and the number of elements at the boundary key."""
    key = _key(value)
    same = ((key == limit) & (key > 0)).to(tl.int32)
    chosen = (key > limit) | ((same > 0) & (tl.cumsum(same, 0) <= left))
    flag = chosen.to(tl.int32)
    slot = next + tl.cumsum(flag, 0) - flag
    tl.store(words + places_at + slot, place.to(tl.int16), mask=chosen)
    if VALUES == 0:
        tl.store((words + values_at).to(tl.pointer_type(tl.float32)) + slot, value, mask=chosen)
        sent = value
    else:
        scaled = value
        if VALUES == 2:
            scaled = value * _power_of_two(exponent)
        bits = _to_bits(scaled, VALUES)
        tl.store(words + values_at + slot, bits.to(tl.int16), mask=chosen)
        sent = _from_bits(bits, VALUES)
        if VALUES == 2:
            sent = sent * _power_of_two(-exponent)
    if OWNED:
        applied = _rounded(sent, RESULT)
        lost = tl.where(applied != 0, value - applied, 0.0)
        if COUNTED:
            count = tl.load(counts + place, mask=chosen, other=0).to(tl.float32)
            lost *= tl.div_rn(count, tl.zeros_like(count) + sources)
        inside = chosen & (home + place < numel)  # `_spread` detects the others on every rank
        held = tl.load(after + home + place, mask=inside, other=0.0)
        tl.store(after + home + place, held + lost, mask=inside)
    return tl.sum(flag, 0), tl.sum(same, 0)


@triton.jit
def _compact(
    source, turn, kept, counts, words, short, candidates, places, boundary, ties, starts,
    numel, source_numel, regions, cells, row, places_at, values_at, owner, owners, sources,
    KEPT: tl.constexpr, COUNTED: tl.constexpr, VALUES: tl.constexpr, RESULT: tl.constexpr,
    CELL: tl.constexpr, BLOCK: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Write one cell's entries to the slot."""
    cell, region = tl.program_id(0), tl.program_id(1)
    number = region * cells + cell
    after = kept + (1 - tl.load(turn).to(tl.int64)) * numel
    limit = tl.load(boundary + region)
    left = tl.load(ties + number)
    next = tl.load(starts + number)
    words += region.to(tl.int64) * row
    exponent = tl.load(words).to(tl.int32)
    start = (cell.to(tl.int64) * regions + region) * CELL
    home = (cell.to(tl.int64) * owners + owner) * CELL
    counts += start
    if KEPT:
        source = after
    if (tl.load(candidates + number) <= ROOM) & (tl.load(short + region) == 0):
        index = tl.arange(0, ROOM)
        present = index < tl.load(candidates + number)
        place = tl.load(places + number.to(tl.int64) * ROOM + index, mask=present, other=0).to(tl.int32)
        value = tl.load(source + start + place, mask=present, other=0.0)
        _write(
            place, value, next, left, words, after, counts, limit, exponent, places_at, values_at, home, numel, sources,
            not KEPT, COUNTED, VALUES, RESULT,
        )  # fmt: skip
    else:
        for offset in range(0, CELL, BLOCK):
            place = offset + tl.arange(0, BLOCK)
            value = tl.load(source + start + place, mask=start + place < source_numel, other=0.0)
            written, same = _write(
                place, value, next, left, words, after, counts, limit, exponent, places_at, values_at, home, numel,
                sources, not KEPT, COUNTED, VALUES, RESULT,
            )  # fmt: skip
            next += written
            left -= same


@triton.jit
def _offsets(words, starts, broken, row, cells, BLOCK: tl.constexpr):
    """Compute where each cell's entries start in a received slot. Also reset `broken`."""
    slot = tl.program_id(0)
    tl.store(broken, 0)
    words += slot.to(tl.int64) * row
    first = 0
    for begin in range(0, cells, BLOCK):
        cell = begin + tl.arange(0, BLOCK)
        count = tl.load(words + 1 + cell, mask=cell < cells, other=0).to(tl.int32) & 0xFFFF
        tl.store(starts + slot * cells + cell, first + tl.cumsum(count, 0) - count, mask=cell < cells)
        first += tl.sum(count, 0)


@triton.jit
def _read(words, first, index, count, entries, places_at, values_at, VALUES: tl.constexpr, CELL: tl.constexpr):
    """Read some entries of one cell. Return their places, their values, which of them exist, and which of those are
    invalid. An invalid entry gets place 0 and value NaN."""
    entry = first + index
    present = index < count
    safe = present & (entry < entries) & (entry >= 0)
    place = tl.load(words + places_at + entry, mask=safe, other=0).to(tl.int32) & 0xFFFF
    if VALUES == 0:
        value = tl.load((words + values_at).to(tl.pointer_type(tl.float32)) + entry, mask=safe, other=0.0)
    else:
        value = _from_bits(tl.load(words + values_at + entry, mask=safe, other=0).to(tl.int32), VALUES)
        if VALUES == 2:
            exponent = tl.minimum(tl.maximum(tl.load(words).to(tl.int32), -120), 120)
            value = value * _power_of_two(-exponent)
    good = safe & (place < CELL)
    return tl.where(good, place, 0), tl.where(good, value, float("nan")), present, present & ~good


@triton.jit
def _total(
    words, starts, total, counts, histogram, candidates, places, sources, cells, row, entries, places_at, values_at,
    COUNTED: tl.constexpr, VALUES: tl.constexpr, CELL: tl.constexpr, BLOCK: tl.constexpr, FEW: tl.constexpr,
    ROOM: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """Sum one cell of a region over the ranks, in rank order, count the sums by key, and store their places. If
    COUNTED, also count the ranks that sent each entry, and multiply its sum by the number of ranks per count."""
    cell = tl.program_id(0)
    mine = total + cell.to(tl.int64) * CELL
    counts += cell.to(tl.int64) * CELL
    for offset in range(0, CELL, BLOCK):
        tl.store(mine + offset + tl.arange(0, BLOCK), tl.zeros([BLOCK], tl.float32))
        if COUNTED:
            tl.store(counts + offset + tl.arange(0, BLOCK), tl.zeros([BLOCK], tl.int16))
    tl.debug_barrier()
    slot = words
    for source in range(sources):
        first = tl.load(starts + source * cells + cell)
        count = tl.minimum(tl.load(slot + 1 + cell).to(tl.int32) & 0xFFFF, CELL)
        for begin in range(0, count, FEW):
            index = begin + tl.arange(0, FEW)
            place, value, present, invalid = _read(
                slot, first, index, count, entries, places_at, values_at, VALUES, CELL
            )
            held = tl.load(mine + place, mask=present, other=0.0)
            tl.store(mine + place, held + value, mask=present)
            if COUNTED:
                tl.store(counts + place, tl.load(counts + place, mask=present, other=0) + 1, mask=present)
            if tl.sum(invalid.to(tl.int32), 0) > 0:  # another entry may have overwritten the NaN at place 0
                tl.debug_barrier()
                tl.store(mine, float("nan"))
        slot += row
        tl.debug_barrier()
    places += cell.to(tl.int64) * ROOM
    histogram += cell % COPIES * _KEYS
    passed = 0
    for offset in range(0, CELL, BLOCK):
        place = offset + tl.arange(0, BLOCK)
        value = tl.load(mine + place)
        if COUNTED:
            count = tl.load(counts + place).to(tl.float32)
            value *= tl.div_rn(tl.zeros_like(value) + sources, tl.maximum(count, 1.0))
            tl.store(mine + place, value)
        key = _key(value)
        flag = (key > 0).to(tl.int32)
        note = passed + tl.cumsum(flag, 0) - flag
        tl.store(places + note, place.to(tl.int16), mask=(key > 0) & (note < ROOM))
        tl.atomic_add(histogram + key, flag, mask=key > 0, sem="relaxed")
        passed += tl.sum(flag, 0)
    tl.store(candidates + cell, passed)


@triton.jit
def _spread(
    words, starts, flat, broken, numel, regions, cells, row, entries, places_at, values_at,
    VALUES: tl.constexpr, RESULT: tl.constexpr, CELL: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """Write one cell's entries to the bucket, and set `broken` to 1 if any is not finite, or 2 if any is invalid."""
    cell, region = tl.program_id(0), tl.program_id(1)
    slot = words + region.to(tl.int64) * row
    first = tl.load(starts + region * cells + cell)
    count = tl.minimum(tl.load(slot + 1 + cell).to(tl.int32) & 0xFFFF, CELL)
    start = (cell.to(tl.int64) * regions + region) * CELL
    for begin in range(0, count, FEW):
        index = begin + tl.arange(0, FEW)
        place, value, present, invalid = _read(slot, first, index, count, entries, places_at, values_at, VALUES, CELL)
        outside = start + place >= numel
        where = tl.where(outside, 0, start + place)
        value = tl.where(outside, float("nan"), value)
        value = _rounded(value, RESULT)
        tl.store(flat + where, value.to(flat.dtype.element_ty), mask=present)
        infinite = present & ((value.to(tl.int32, bitcast=True) & 0x7F800000) == 0x7F800000)
        if tl.sum(infinite.to(tl.int32), 0) > 0:
            tl.atomic_max(broken, tl.where(tl.sum((invalid | (present & outside)).to(tl.int32), 0) > 0, 2, 1))


@triton.jit
def _spoil(flat, broken):
    """Write a NaN if an entry was invalid: another entry may have overwritten the NaN that `_spread` wrote."""
    if tl.load(broken) > 1:
        tl.store(flat, float("nan"))


@triton.jit
def _release(
    words, starts, flat, kept, velocity, flags, turn, numel, regions, cells, row, entries, places_at, values_at,
    VALUES: tl.constexpr, VELOCITY: tl.constexpr, FLAGS: tl.constexpr, CELL: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """Subtract the entries of one cell that this rank sent and that were applied from the residual."""
    cell, region = tl.program_id(0), tl.program_id(1)
    new = (1 - tl.load(turn).to(tl.int64)) * numel
    slot = words + region.to(tl.int64) * row
    first = tl.load(starts + region * cells + cell)
    count = tl.load(slot + 1 + cell).to(tl.int32) & 0xFFFF
    start = (cell.to(tl.int64) * regions + region) * CELL
    for begin in range(0, count, FEW):
        index = begin + tl.arange(0, FEW)
        place, value, present, _ = _read(slot, first, index, count, entries, places_at, values_at, VALUES, CELL)
        where = start + place
        accepted = present & (tl.load(flat + where, mask=present, other=0.0) != 0)
        held = tl.load(kept + new + where, mask=accepted, other=0.0)
        tl.store(kept + new + where, held - value, mask=accepted)
        if VELOCITY:
            tl.store(velocity + new + where, tl.zeros_like(held), mask=accepted)
        if FLAGS:
            tl.store(flags + where, tl.full([FEW], 1, tl.int8), mask=accepted)


class _Selection:
    """Buffers and kernel launches to select entries from some regions, with `expected` candidates per cell."""

    def __init__(self, slots: Slots, regions: int, expected: int, device: torch.device, buffers: Buffers) -> None:
        make = functools.partial(torch.zeros, device=device, dtype=torch.int32)
        self._slots, self._regions = slots, regions
        self.room = min(slots.cell, max(16, 1 << (2 * expected - 1).bit_length()))
        self.histogram = buffers("histogram", regions, _COPIES, KEYS, dtype=torch.int32)  # `_boundary` clears it
        kind = f"places of {regions}"
        self.places = buffers(kind, regions, slots.cells, self.room, dtype=torch.int16)
        self.threshold = torch.full((regions,), KEYS, device=device, dtype=torch.int32)
        self.short, self._boundary, self._room, self._top = (make(regions) for _ in range(4))
        self._above, self._ties, self.starts, self.candidates = (make(regions, slots.cells) for _ in range(4))

    def bound(self, *, again: bool = False, tracked: bool = False) -> None:
        """Find the boundary key of each region. `tracked`: also set the threshold of the next step."""
        _boundary[(self._regions,)](
            self.histogram, self.threshold, self.short, self._boundary, self._room, self._top, self._slots.entries,
            AGAIN=again, TRACKED=tracked, SLACK=SLACK, COPIES=_COPIES, num_warps=8,
        )  # fmt: skip

    def fill(
        self, source: Tensor, kept: Tensor, turn: Tensor, owner: int, result: int, words: Tensor,
        counts: Tensor | None = None, sources: int = 0,
    ) -> None:  # fmt: skip
        """Write the largest entries of each region to its slot: from the residual, or from a sum over the ranks, of
        which `counts` sent each entry."""
        layout, from_kept = self._slots, source is kept
        numel = layout.numel if from_kept else source.numel()
        grid = (layout.cells, self._regions)
        sizes: dict[str, Any] = {
            "KEPT": from_kept, "CELL": layout.cell, "BLOCK": _block(layout), "ROOM": self.room, "num_warps": 2,
        }  # fmt: skip
        _count[grid](
            source, turn, self.short, self.candidates, self.places, self._boundary, self._above, self._ties,
            numel, self._regions, layout.cells, **sizes,
        )  # fmt: skip
        _deal[(self._regions,)](
            self._above, self._ties, self._room, self._top, self.starts, words, layout.words, layout.cells,
            HALF=layout.values == torch.float16, BLOCK=1024,
        )  # fmt: skip
        _compact[grid](
            source, turn, kept, source if counts is None else counts, words, self.short, self.candidates, self.places,
            self._boundary, self._ties, self.starts, layout.numel, numel, self._regions, layout.cells,
            layout.words, layout.places_at, layout.values_at, owner, layout.regions, sources,
            COUNTED=counts is not None, VALUES=_TYPES[layout.values], RESULT=result, **sizes,
            enable_fp_fusion=counts is None,
        )  # fmt: skip


class CudaKernels:
    """`Kernels` for CUDA."""

    def __init__(
        self, slots: Slots, device: torch.device, buffers: Buffers | None = None, contributors: bool = False
    ) -> None:
        make = buffers or own_buffers(device)
        self._slots = slots
        per_cell = -(-slots.entries // slots.cells)
        self._mine = _Selection(slots, slots.regions, 2 * per_cell, device, make)
        self._summed = _Selection(slots, 1, min(slots.regions, 64) * per_cell, device, make)
        self._sum = make("sum", slots.cells * slots.cell, dtype=torch.float32)
        self._counts = make("counts", self._sum.numel(), dtype=torch.int16) if contributors else None
        self._sources = 0
        self._starts = torch.zeros(0, device=device, dtype=torch.int32)
        self._broken = torch.zeros((), device=device, dtype=torch.int32)
        self._packed = torch.zeros(0, device=device, dtype=torch.int16)
        self._programs = max(1, _programs(device) // slots.regions)
        self._replays = device.type == "cuda"  # Triton's interpreter runs on the CPU, without CUDA graphs
        self._to_pack, self._to_select, self._to_release = (Replay(self._replays) for _ in range(3))
        self._to_total, self._to_spread = (Replay(self._replays) for _ in range(2))

    def pack(self, flat: Tensor, share: float, kept: Tensor, turn: Tensor, ratio: Tensor | None, slots: Tensor) -> None:
        layout, block, mine = self._slots, _block(self._slots), self._mine
        self._packed = slots.view(torch.int16)

        def launch() -> None:
            _accumulate[(layout.cells, layout.regions)](
                flat, share, kept, turn, turn if ratio is None else ratio, mine.threshold, mine.histogram,
                mine.candidates, mine.places, layout.numel, layout.regions, layout.cells,
                SCALED=ratio is not None, TYPE=_TYPES[flat.dtype],
                CELL=layout.cell, BLOCK=block, ROOM=mine.room, COPIES=_COPIES, num_warps=8, enable_fp_fusion=False,
            )  # fmt: skip
            mine.bound(tracked=True)
            _recount[(self._programs, layout.regions)](
                kept, turn, mine.short, mine.histogram, layout.numel, layout.regions, layout.cells,
                CELL=layout.cell, BLOCK=block, COPIES=_COPIES, num_warps=8,
            )  # fmt: skip
            mine.bound(again=True, tracked=True)
            mine.fill(kept, kept, turn, 0, 0, self._packed)

        self._to_pack(launch, flat, share, kept, turn, ratio, slots)

    def total(self, received: Tensor) -> Tensor:
        layout, summed, sources, counts = self._slots, self._summed, received.numel() // self._slots.bytes, self._counts
        self._sources = sources
        self._make_room(sources)

        def launch() -> None:
            words = received.view(torch.int16)
            self._find_starts(words, sources)
            _total[(layout.cells,)](
                words, self._starts, self._sum, self._sum if counts is None else counts, summed.histogram,
                summed.candidates, summed.places,
                sources, layout.cells, layout.words, layout.entries, layout.places_at, layout.values_at,
                COUNTED=counts is not None, VALUES=_TYPES[layout.values], CELL=layout.cell, BLOCK=_block(layout),
                FEW=_FEW, ROOM=summed.room, COPIES=_COPIES,
            )  # fmt: skip

        self._to_total(launch, received, sources)
        return self._sum

    def select(self, rank: int, kept: Tensor, turn: Tensor, dtype: torch.dtype, slot: Tensor) -> None:
        def launch() -> None:
            self._summed.bound()
            words = slot.view(torch.int16)
            self._summed.fill(self._sum, kept, turn, rank, _TYPES[dtype], words, self._counts, self._sources)

        self._to_select(launch, rank, kept, turn, _TYPES[dtype], slot, self._sources)

    def spread(self, gathered: Tensor, flat: Tensor) -> Tensor:
        layout = self._slots
        self._make_room(layout.regions)

        def launch() -> None:
            words = gathered.view(torch.int16)
            self._find_starts(words, layout.regions)
            _spread[(layout.cells, layout.regions)](
                words, self._starts, flat, self._broken, layout.numel, layout.regions, layout.cells,
                layout.words, layout.entries, layout.places_at, layout.values_at,
                VALUES=_TYPES[layout.values], RESULT=_TYPES[flat.dtype], CELL=layout.cell, FEW=_FEW, num_warps=2,
            )  # fmt: skip
            _spoil[(1,)](flat, self._broken, num_warps=1)

        self._to_spread(launch, gathered, flat)
        return self._broken == 0

    def release(
        self, flat: Tensor, kept: Tensor, turn: Tensor, velocity: Tensor | None = None, flags: Tensor | None = None
    ) -> None:
        layout = self._slots
        if flags is not None:
            flags.zero_()

        def launch() -> None:
            _release[(layout.cells, layout.regions)](
                self._packed, self._mine.starts, flat, kept, kept if velocity is None else velocity,
                kept if flags is None else flags, turn, layout.numel, layout.regions, layout.cells,
                layout.words, layout.entries, layout.places_at, layout.values_at,
                VALUES=_TYPES[layout.values], VELOCITY=velocity is not None, FLAGS=flags is not None,
                CELL=layout.cell, FEW=_FEW, num_warps=2,
            )  # fmt: skip

        self._to_release(launch, self._packed, flat, kept, turn, velocity, flags)

    def _make_room(self, rows: int) -> None:
        """Allocate memory for the starts of each cell's entries in `rows` received slots."""
        if self._starts.numel() < rows * self._slots.cells:
            self._starts = self._starts.new_zeros(rows * self._slots.cells)
            self._to_total, self._to_spread = (Replay(self._replays) for _ in range(2))

    def _find_starts(self, words: Tensor, rows: int) -> None:
        _offsets[(rows,)](words, self._starts, self._broken, self._slots.words, self._slots.cells, BLOCK=1024)


def _block(slots: Slots) -> int:
    return min(_BLOCK, slots.cell)


def _programs(device: torch.device) -> int:
    """Return the number of programs that keep the device busy."""
    if device.type != "cuda":
        return 8  # in Triton's interpreter
    properties: Any = torch.cuda.get_device_properties(device)
    return 4 * int(properties.multi_processor_count)
