"""Selection of the largest entries of each chunk on the CPU, in NumPy.

As in `cpu.py`, elements above a threshold become candidates, and the selection among them is exact. Each chunk has its
own threshold, slightly below the smallest magnitude that the last step selected. If it lets too few or too many pass,
the whole chunk is partitioned. So the threshold affects the time, but not the result. On 5 million elements of which
3 % are selected, `torch.topk` took 49 ms, `np.argpartition` 44 ms, `np.partition` 29 ms, and comparing with a threshold
7 ms.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from syncline.errors import ExchangeError
from syncline.kernels.chunks import FIXED_POINT, LEAST_BITS, Chunks
from syncline.kernels.slots import Buffers, own_buffers

Ints = npt.NDArray[np.int64]
Bits = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_PIECE = 1 << 17
_SLACK = 1 << 21
"""Distance of a threshold from the smallest selected magnitude of the last step, in units of the last place: 12 to
25 %."""
_MOST_CANDIDATES = 4
"""Number of candidates per entry from which a threshold is too low to be useful."""
_NOT_FINITE = 0x7F800000
_UNKNOWN = np.int32(0x7FFFFFFF)


class CpuChunkKernels:
    """`ChunkKernels` for the CPU."""

    def __init__(self, chunks: Chunks, buffers: Buffers | None = None, contributors: bool = False) -> None:
        make = buffers or own_buffers(torch.device("cpu"))
        self._chunks, self._contributors = chunks, contributors
        self._rows = min(chunks.count, max(1, _PIECE // chunks.chunk))
        self._magnitudes = np.zeros((self._rows, chunks.chunk), np.int32)
        self._thresholds = np.full(chunks.count, _UNKNOWN)
        # `total` leaves zeros in both, because other buckets may use the same buffers.
        self._sum = make("sum", chunks.numel, dtype=torch.float32).numpy()
        self._counts = make("counts", chunks.numel, dtype=torch.int16).numpy()

    def pack(
        self, flat: Tensor, share: float, kept: Tensor, turn: Tensor, ratio: Tensor | None, row: Tensor,
        flags: Tensor | None = None,
    ) -> None:  # fmt: skip
        before, after = kept[int(turn)], kept[1 - int(turn)]
        size, found = self._rows * self._chunks.chunk, []
        for start in range(0, self._chunks.numel, size):
            stop = min(start + size, self._chunks.numel)
            gradient, sums = flat[start:stop], after[start:stop]
            shared = (gradient if share == 1.0 else gradient.mul_(share)).to(torch.float32)
            if ratio is None:
                torch.add(before[start:stop], shared, out=sums)
            else:
                torch.mul(before[start:stop], ratio, out=sums).add_(shared)
            found.append(start + self._largest(sums.numpy().view(np.int32), start // self._chunks.chunk))
        where = np.concatenate(found)
        sums_ = after.numpy()
        sent = self._write(where, sums_[where], row.numpy())
        with np.errstate(invalid="ignore"):  # a step with infinities is not applied
            sums_[where] -= sent
        if flags is not None:
            flags.zero_()
            flags.numpy()[where] = sent != 0

    def _largest(self, bits: Bits, first: int) -> Ints:
        """Return the positions of the largest entries of the chunks from `first` on, relative to it, in order."""
        chunk, entries = self._chunks.chunk, self._chunks.entries
        rows = -(-len(bits) // chunk)
        magnitudes, thresholds = self._magnitudes[:rows], self._thresholds[first : first + rows]
        np.bitwise_and(bits, 0x7FFFFFFF, out=magnitudes.ravel()[: len(bits)])
        magnitudes.ravel()[len(bits) :] = 0
        passed = magnitudes >= thresholds[:, None]
        numbers = np.count_nonzero(passed, axis=1)
        unfit = np.flatnonzero((numbers < entries) & (thresholds > LEAST_BITS) | (numbers > _MOST_CANDIDATES * entries))
        if len(unfit):
            if entries < chunk:
                smallest = np.partition(magnitudes[unfit], chunk - entries, axis=1)[:, chunk - entries]
            else:
                smallest = np.zeros(len(unfit), np.int32)
            thresholds[unfit] = np.maximum(smallest, LEAST_BITS)
            passed[unfit] = magnitudes[unfit] >= thresholds[unfit, None]
            numbers[unfit] = np.count_nonzero(passed[unfit], axis=1)
        where = np.flatnonzero(passed)
        row = np.repeat(np.arange(rows), numbers)
        found = magnitudes.ravel()[where]
        table = np.zeros((rows, max(entries, int(numbers.max()))), np.int32)
        starts = numbers.cumsum() - numbers
        table[row, np.arange(len(row)) - starts[row]] = found
        boundary = np.partition(table, table.shape[1] - entries, axis=1)[:, table.shape[1] - entries]
        limit = np.maximum(boundary, LEAST_BITS)[row]
        chosen = found > limit
        tied = np.flatnonzero(found == limit)
        left = entries - np.bincount(row[chosen], minlength=rows)
        numbers = np.bincount(row[tied], minlength=rows)
        order = np.arange(len(tied)) - (numbers.cumsum() - numbers)[row[tied]]
        chosen[tied[order < left[row[tied]]]] = True  # of equal magnitudes, the first
        thresholds[:] = np.maximum(boundary - _SLACK, LEAST_BITS)
        return where[chosen]

    def _write(self, where: Ints, values: Floats, row: Bytes) -> Floats:
        """Write entries to a row, and return their values as a receiver will read them."""
        layout = self._chunks
        chunk, place = where >> layout.place_bits, (where & (layout.chunk - 1)).astype(np.int32)
        filled = np.bincount(chunk, minlength=layout.count)
        starts = filled.cumsum() - filled
        column = np.arange(len(where)) - starts[chunk]
        codes = np.zeros((layout.count, layout.entries), np.int32)
        if len(where) < codes.size:  # repeat the last place
            some = filled > 0
            codes[some] = place[(starts + filled - 1)[some]][:, None]
        if layout.scales:
            scales, value, sent = _quantised(values, chunk, filled, layout)
            place |= value << layout.place_bits
            row[layout.scales_at :][: 2 * scales.size].view(np.int16)[:] = scales.ravel()
        else:
            kind = torch.float32 if layout.values == "fp32" else torch.bfloat16
            table = torch.zeros(layout.count, layout.entries, dtype=kind)
            rounded = torch.from_numpy(values).to(kind)
            sent = rounded.to(torch.float32).numpy()
            table[torch.from_numpy(chunk), torch.from_numpy(column)] = rounded
            row[: layout.scales_at] = table.view(torch.uint8).numpy().ravel()
        codes[chunk, column] = place
        for plane in layout.planes:
            parts, mask = 8 // plane.bits, (1 << plane.bits) - 1
            piece = np.zeros((layout.count, parts * plane.bytes), np.uint8)
            piece[:, : layout.entries] = (codes >> plane.shift) & mask
            packed = piece[:, : plane.bytes].copy()
            for part in range(1, parts):
                packed |= piece[:, part * plane.bytes : (part + 1) * plane.bytes] << (part * plane.bits)
            row[plane.start : plane.start + packed.size] = packed.ravel()
        return sent

    def total(self, received: Tensor, flat: Tensor, rank: int, kept: Tensor, turn: Tensor) -> Tensor:
        rows = received.view(-1, self._chunks.bytes).numpy()
        read = [self._read(row, f"rank {source}") for source, row in enumerate(rows)]  # may raise an error
        with np.errstate(over="ignore", invalid="ignore"):  # a step with infinities is not applied
            for where, values in read:
                self._sum[where] += values
                if self._contributors:
                    self._counts[where] += values != 0
            everywhere = np.concatenate([where for where, _ in read])
            sums, counts = self._sum[everywhere], np.float32(len(rows))
            if self._contributors:
                counts = np.maximum(self._counts[everywhere], 1).astype(np.float32)
                sums *= np.float32(len(rows)) / counts
                self._counts[everywhere] = 0
        self._sum[everywhere] = 0
        applied = torch.from_numpy(sums).to(flat.dtype)
        flat.zero_()
        flat[torch.from_numpy(everywhere)] = applied
        if flat.dtype.itemsize < 4:
            mine = (everywhere >> self._chunks.place_bits) % len(rows) == rank
            with np.errstate(invalid="ignore"):
                lost = (sums - applied.to(torch.float32).numpy()) * (counts / np.float32(len(rows)))
                mine &= lost != 0
                kept[1 - int(turn)].numpy()[everywhere[mine]] += lost[mine]
        return torch.isfinite(applied).all()

    def _read(self, row: Bytes, sender: str) -> tuple[Ints, Floats]:
        """Return the position and value of each entry. Raise `ExchangeError` if entries are not in order, or beyond the
        end of the bucket."""
        layout = self._chunks
        codes = np.zeros((layout.count, layout.entries), np.int32)
        for plane in layout.planes:
            mask = (1 << plane.bits) - 1
            packed = row[plane.start : plane.start + layout.count * plane.bytes].reshape(layout.count, plane.bytes)
            piece = np.concatenate([(packed >> shift) & mask for shift in range(0, 8, plane.bits)], 1)
            codes |= piece[:, : layout.entries].astype(np.int32) << plane.shift
        place = codes & (layout.chunk - 1)
        exists = np.ones_like(place, np.bool_)
        distance = place[:, 1:] - place[:, :-1]
        if distance.min(initial=0) < 0:
            raise ExchangeError(f"{sender} sent entries that are not in order")
        np.greater(distance, 0, out=exists[:, 1:])
        where: Ints = (np.arange(layout.count)[:, None] * layout.chunk + place)[exists]
        if where[-1] >= layout.numel:
            raise ExchangeError(f"{sender} sent entry {int(where[-1])} of a bucket of {layout.numel}")
        if layout.scales:
            number = codes[exists] >> layout.place_bits
            words = row[layout.scales_at :][: 2 * layout.scales * layout.count].view(np.uint16).astype(np.uint32) << 16
            scales = words.view(np.float32).reshape(layout.count, layout.scales)[np.nonzero(exists)[0]]
            return where, _dequantised(number, scales)
        kind = torch.float32 if layout.values == "fp32" else torch.bfloat16
        table = torch.from_numpy(row[: layout.scales_at]).view(kind).to(torch.float32).numpy()
        return where, table[exists.ravel()]


def _quantised(values: Floats, chunk: Ints, filled: Ints, layout: Chunks) -> tuple[npt.NDArray[np.int16], Bits, Floats]:
    """Return the scales of each chunk as bits, and the code of each entry and its value as a receiver will read it.
    `filled` has the number of entries of each chunk, and `chunk` the chunk of each entry."""
    bits = values.view(np.int32)
    magnitudes, sign = bits & 0x7FFFFFFF, (bits >> 31) & 1
    largest = np.zeros(layout.count, np.int32)
    np.maximum.at(largest, chunk, magnitudes)
    finite = largest < _NOT_FINITE
    magnitudes = np.where(finite[chunk], magnitudes, 0)
    largest = np.where(finite, largest, 0)
    if layout.values == "int4":
        scales = _to_bf16(largest.view(np.float32) * np.float32(1 / 7), finite)[:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            inverse = np.float32(1) / _from_bf16(scales[:, 0])
            number = np.floor(magnitudes.view(np.float32) * inverse[chunk] + np.float32(0.5))
        number = np.where(finite[chunk], np.minimum(number, 7), 0).astype(np.int32) | sign << 3
    else:
        exponent = largest >> 23
        lower = np.minimum(exponent[chunk] - (magnitudes >> 23), 63)
        fixed = ((magnitudes & 0x7FFFFF | 0x800000).astype(np.int64) << FIXED_POINT) >> lower
        total = _sums(fixed, chunk, layout.count)
        above = fixed * filled[chunk] > total[chunk]
        large = _sums(fixed * above, chunk, layout.count)
        many = np.bincount(chunk[above], minlength=layout.count)
        means = [_mean(total - large, filled - many, exponent), _mean(large, many, exponent)]
        scales = np.stack([_to_bf16(mean, finite) for mean in means], 1)
        number = above.astype(np.int32) | sign << 1
    return scales, number, _dequantised(number, _from_bf16(scales)[chunk])


def _dequantised(number: Bits, scales: Floats) -> Floats:
    """Return values by their codes and the scales of their chunks, one row per value."""
    if scales.shape[1] == 1:
        with np.errstate(over="ignore", invalid="ignore"):
            magnitudes, sign = (number & 7).astype(np.float32) * scales[:, 0], number >> 3
    else:
        magnitudes, sign = np.where(number & 1, scales[:, 1], scales[:, 0]), number >> 1
    values: Floats = np.where(sign & 1, -magnitudes, magnitudes)
    return values


def _sums(fixed: Ints, chunk: Ints, count: int) -> Ints:
    """Return the exact sum of each chunk's numbers. `chunk`, the chunk of each number, must be sorted."""
    upto = np.concatenate([[0], fixed.cumsum()])
    ends = np.searchsorted(chunk, np.arange(count + 1))
    sums: Ints = upto[ends[1:]] - upto[ends[:-1]]  # differences are right even if the total wraps around
    return sums


def _mean(total: Ints, number: Ints, exponent: Bits) -> Floats:
    """Return the mean of magnitudes in fixed point, of which the largest has this exponent."""
    mean = (total.astype(np.float32) / np.maximum(number, 1).astype(np.float32)).view(np.int32)
    raised = exponent - (127 + 23 + FIXED_POINT)
    exists = (mean >> 23) + raised > 0
    bits: Floats = np.where(exists, mean + (raised << 23), 0).view(np.float32)
    return bits


def _to_bf16(values: Floats, finite: npt.NDArray[np.bool_]) -> npt.NDArray[np.int16]:
    rounded = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy()
    return np.where(finite, rounded, np.int16(0x7FC0))


def _from_bf16(bits: npt.NDArray[np.int16]) -> Floats:
    values: Floats = (bits.astype(np.int32) << 16).view(np.float32)
    return values
