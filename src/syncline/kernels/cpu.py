"""Selection on the CPU: one pass over the bucket, then a few passes over the candidates.

The first pass goes through the bucket in chunks that fit into a cache: it adds the gradient to the residual, clears the
gradient, and compares the sum with a threshold. The threshold is a guess from the entries that the last step selected,
and lets about twice as many candidates pass as are needed. The selection among the candidates is exact. If too few
passed, the threshold is lowered and everything is compared again. So the guess affects the time, but not the result.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from syncline.errors import ExchangeError
from syncline.kernels.slots import KEY_SHIFT, KEYS, SLACK, Buffers, Slots, own_buffers

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

_CHUNK = 1 << 17
_SAMPLE = 1 << 12
_SPARE = 2
"""Candidates that a threshold should let pass, per entry needed. It doubles whenever a threshold was too high."""
_MOST_CANDIDATES = 8
"""Candidates per entry needed, beyond which the threshold is too low to be useful."""
_TOP_EXPONENT = 141
"""Biased fp32 exponent of 2^14. Scaled by two to this minus the largest value's exponent, all values are below 2^15."""
_EXPONENT_LIMIT = 120


class CpuKernels:
    """`Kernels` for the CPU, in NumPy."""

    def __init__(self, slots: Slots, buffers: Buffers | None = None, contributors: bool = False) -> None:
        make = buffers or own_buffers(torch.device("cpu"))
        self._slots = slots
        self._shift = slots.cell.bit_length() - 1
        self._threshold = KEYS
        self._magnitude = np.empty(_CHUNK, np.float32)
        self._passed = np.empty(_CHUNK, np.bool_)
        self._sum = make("sum", slots.cells * slots.cell, dtype=torch.float32)
        self._touched = make("touched", self._sum.numel(), dtype=torch.bool).numpy()
        self._counts: npt.NDArray[np.int16] | None = None
        if contributors:
            self._counts = make("counts", self._sum.numel(), dtype=torch.int16).numpy()
        self._sources = 0
        self._sent: tuple[Ints, Floats] = (np.empty(0, np.int64), np.empty(0, np.float32))

    def pack(self, flat: Tensor, share: float, kept: Tensor, turn: Tensor, ratio: Tensor | None, slots: Tensor) -> None:
        before, after = kept[int(turn)], kept[1 - int(turn)]
        layout, sums = self._slots, after.numpy()
        candidates = self._accumulate(flat, share, before, after, ratio)
        spare = _SPARE
        if candidates is None:
            self._threshold = self._sampled(sums, spare)
            candidates = self._compare(sums)
        where, values = candidates
        while True:
            keys = _keys(values)
            region = (where >> self._shift) % layout.regions
            counts = np.bincount(region * KEYS + keys, minlength=layout.regions * KEYS).reshape(layout.regions, KEYS)
            if self._threshold <= 1 or counts.sum(1).min() >= layout.entries:
                break
            spare *= _SPARE
            self._threshold = min(self._threshold - 1, self._sampled(sums, spare))
            where, values = self._compare(sums)
        chosen, smallest = _largest(keys, region, counts, layout.entries)
        self._threshold = max(1, smallest - SLACK)
        places = where[chosen]
        self._sent = places, self._write(places, region[chosen], values[chosen], counts, _words(slots, layout))

    def _accumulate(
        self, flat: Tensor, share: float, before: Tensor, after: Tensor, ratio: Tensor | None
    ) -> tuple[Ints, Floats] | None:
        """Add the bucket to the residual, and return the positions and values of the candidates; None if there are too
        many for the threshold to be useful, as after a bucket of almost all zeros."""
        candidates, sums = [], after.numpy()
        least = _magnitude_of(self._threshold)
        remaining = _MOST_CANDIDATES * self._slots.entries * self._slots.regions
        for start in range(0, flat.numel(), _CHUNK):
            stop = min(start + _CHUNK, flat.numel())
            gradient, sum_ = flat[start:stop], after[start:stop]
            shared = (gradient if share == 1.0 else gradient.mul_(share)).to(torch.float32)
            if ratio is None:
                torch.add(before[start:stop], shared, out=sum_)
            else:
                torch.mul(before[start:stop], ratio, out=sum_).add_(shared)
            gradient.zero_()
            if remaining >= 0:
                candidates.append(self._above(sums[start:stop], least, start))
                remaining -= len(candidates[-1][0])
        return _joined(candidates) if remaining >= 0 else None

    def _compare(self, values: Floats) -> tuple[Ints, Floats]:
        least = _magnitude_of(self._threshold)
        starts = range(0, len(values), _CHUNK)
        return _joined([self._above(values[start : start + _CHUNK], least, start) for start in starts])

    def _above(self, values: Floats, least: float, start: int) -> tuple[Ints, Floats]:
        """Return positions and values of elements that are not below a threshold. NaN is above every threshold."""
        magnitude, passed = self._magnitude[: len(values)], self._passed[: len(values)]
        np.abs(values, out=magnitude)
        np.less(magnitude, least, out=passed)
        np.logical_not(passed, out=passed)
        where = np.flatnonzero(passed)
        return where + start, values[where]  # copies the values while they are in the cache

    def _sampled(self, values: Floats, spare: int) -> int:
        """Return a threshold that lets about `spare` candidates pass per entry needed, from a sample."""
        share = spare * self._slots.entries * self._slots.regions / self._slots.numel
        if share >= 1:
            return 1
        sample = _keys(np.ascontiguousarray(values[:: max(1, len(values) // _SAMPLE)]))
        sample.sort()
        return max(1, int(sample[int((1 - share) * (len(sample) - 1))]) - SLACK)

    def total(self, received: Tensor) -> Tensor:
        layout, words = self._slots, _words(received, self._slots)
        self._sum.zero_()
        self._touched.fill(False)
        if self._counts is not None:
            self._counts.fill(0)
        total, self._sources = self._sum.numpy(), len(words)
        for source in range(len(words)):
            where, _, values = _entries(words[source : source + 1], layout, f"rank {source}")
            if layout.regions == 1 and where.max(initial=0) >= layout.numel:
                raise ExchangeError(f"rank {source} sent entry {int(where.max())} of a bucket of {layout.numel}")
            with np.errstate(over="ignore", invalid="ignore"):  # a step with infinities is not applied
                total[where] += values
            self._touched[where] = True
            if self._counts is not None:
                self._counts[where] += 1
        if self._counts is not None:
            places = np.flatnonzero(self._touched)
            with np.errstate(over="ignore", invalid="ignore"):
                total[places] *= np.float32(self._sources) / self._counts[places].astype(np.float32)
        return self._sum

    def select(self, rank: int, kept: Tensor, turn: Tensor, dtype: torch.dtype, slot: Tensor) -> None:
        layout, after = self._slots, kept[1 - int(turn)].numpy()
        places = np.flatnonzero(self._touched)
        last = self._where(places[-1:], rank).max(initial=0)
        if last >= layout.numel:
            raise ExchangeError(f"a rank sent entry {int(last)} of a bucket of {layout.numel}")
        values = self._sum.numpy()[places]
        keys = _keys(values)
        if len(keys) > layout.entries or not keys.all():
            places, values, keys = places[keys > 0], values[keys > 0], keys[keys > 0]
        counts = np.bincount(keys, minlength=KEYS).reshape(1, KEYS)
        chosen, _ = _largest(keys, np.zeros(len(keys), np.int64), counts, layout.entries)
        places, values = places[chosen], values[chosen]
        where = self._where(places, rank)
        sent = self._write(places, np.zeros(len(places), np.int64), values, counts, _words(slot, layout))
        applied = sent if dtype == torch.float32 else torch.from_numpy(sent).to(dtype).to(torch.float32).numpy()
        with np.errstate(invalid="ignore"):  # a step with infinities is not applied
            lost = np.where(applied != 0, values - applied, np.float32(0))
            if self._counts is not None:
                lost *= self._counts[places].astype(np.float32) / np.float32(self._sources)
            after[where] += lost

    def _where(self, places: Ints, region: Ints | int) -> Ints:
        """Convert positions in a region to positions in the bucket."""
        cell = (places >> self._shift) * self._slots.regions + region
        where: Ints = (cell << self._shift) + (places & (self._slots.cell - 1))
        return where

    def spread(self, gathered: Tensor, flat: Tensor) -> Tensor:
        layout = self._slots
        places, region, values = _entries(_words(gathered, layout), layout, "a region's owner")
        where = self._where(places, region)
        if where.max(initial=0) >= layout.numel:
            raise ExchangeError(f"a region's owner sent entry {int(where.max())} of a bucket of {layout.numel}")
        applied = torch.from_numpy(values).to(flat.dtype)
        flat[torch.from_numpy(where)] = applied
        return torch.isfinite(applied).all()

    def release(
        self, flat: Tensor, kept: Tensor, turn: Tensor, velocity: Tensor | None = None, flags: Tensor | None = None
    ) -> None:
        where, values = self._sent
        accepted = (flat[torch.from_numpy(where)] != 0).numpy()
        where = where[accepted]
        with np.errstate(invalid="ignore"):
            kept[1 - int(turn)].numpy()[where] -= values[accepted]
        if velocity is not None:
            velocity[1 - int(turn)].numpy()[where] = 0
        if flags is not None:
            flags.zero_()
            flags.numpy()[where] = 1

    def _write(self, places: Ints, region: Ints, values: Floats, counts: Ints, words: npt.NDArray[np.int16]) -> Floats:
        """Write entries to slots, and return their values as a receiver will read them, after rounding. `places` are
        positions in the bucket or in the only region, and `counts` each region's candidates by key."""
        layout, regions = self._slots, len(words)
        cell = (places >> self._shift) // regions
        per_cell = np.bincount(region * layout.cells + cell, minlength=regions * layout.cells)
        words[:, 1 : 1 + layout.cells] = per_cell.reshape(regions, layout.cells)
        # NumPy sorts int16 with a radix sort.
        order = slice(None) if regions == 1 else np.argsort(region.astype(np.int16), kind="stable")
        row = region[order]
        column = np.arange(len(row)) - _starts(np.bincount(region, minlength=regions))[row]
        words[row, layout.places_at + column] = (places & (layout.cell - 1))[order]
        words[:, 0] = 0
        scaled, scale = values, None
        if layout.values == torch.float16:
            top = np.where((counts > 0).any(1), KEYS - 1 - (counts[:, ::-1] > 0).argmax(1), 0)
            exponents = np.minimum(_TOP_EXPONENT - (top >> (23 - KEY_SHIFT)), _EXPONENT_LIMIT)
            words[:, 0] = exponents
            scale = np.ldexp(np.float32(1), exponents).astype(np.float32)[region]
            scaled = values * scale
        if layout.values == torch.float32:
            words.view(np.float32)[row, layout.values_at // 2 + column] = scaled[order]
            return values
        cast = torch.from_numpy(scaled).to(layout.values)
        words[row, layout.values_at + column] = cast.view(torch.int16).numpy()[order]
        sent: Floats = cast.to(torch.float32).numpy()
        return sent if scale is None else sent / scale


def _largest(keys: Ints, region: Ints, counts: Ints, entries: int) -> tuple[Ints, int]:
    """Return the indices of the selected candidates, in order, and the smallest boundary key of all regions."""
    at_least = counts[:, ::-1].cumsum(1)[:, ::-1]  # by key: the number of candidates with this key or a larger one
    boundary = np.maximum((at_least >= entries).sum(1) - 1, 0)  # the largest key for which there are enough
    above = np.where(boundary + 1 < KEYS, at_least[np.arange(len(counts)), np.minimum(boundary + 1, KEYS - 1)], 0)
    limit = boundary[region]
    chosen = keys > limit
    ties = np.flatnonzero(keys == limit)
    order = ties[np.argsort(region[ties].astype(np.int16), kind="stable")]
    tied = region[order]
    rank = np.arange(len(order)) - _starts(np.bincount(tied, minlength=len(counts)))[tied]
    chosen[order[rank < (entries - above)[tied]]] = True
    return np.flatnonzero(chosen), int(boundary.min(initial=KEYS))


def _entries(words: npt.NDArray[np.int16], layout: Slots, sender: str) -> tuple[Ints, Ints, Floats]:
    """Read slots, and return the position in its region, the row and the value of each entry. Raise `ExchangeError` if
    a count or a place is too large, or entries are not in order: nothing may be written outside of the bucket."""
    counts = words[:, 1 : 1 + layout.cells].view(np.uint16).astype(np.int64)
    filled = counts.sum(1)
    if filled.max(initial=0) > layout.entries or counts.max(initial=0) > layout.cell:
        raise ExchangeError(f"{sender} sent {int(filled.max())} entries in a slot of {layout.entries}")
    row = np.repeat(np.arange(len(words)), filled)
    cell = np.repeat(np.tile(np.arange(layout.cells), len(words)), counts.ravel())
    column = np.arange(len(row)) - _starts(filled)[row]
    place = words[row, layout.places_at + column].view(np.uint16).astype(np.int64)
    if place.max(initial=0) >= layout.cell:
        raise ExchangeError(f"{sender} sent place {int(place.max())} of a cell of {layout.cell}")
    where: Ints = cell * layout.cell + place
    if ((where[1:] <= where[:-1]) & (row[1:] == row[:-1])).any():  # a repeated place would lose an entry
        raise ExchangeError(f"{sender} sent entries that are not in order")
    if layout.values == torch.float32:
        values = words.view(np.float32)[row, layout.values_at // 2 + column]
    else:
        bits = np.ascontiguousarray(words[row, layout.values_at + column])
        values = torch.from_numpy(bits).view(layout.values).to(torch.float32).numpy()
    if layout.values == torch.float16:
        exponents = np.clip(words[:, 0].astype(np.int64), -_EXPONENT_LIMIT, _EXPONENT_LIMIT)
        with np.errstate(over="ignore", invalid="ignore"):
            values = values * np.ldexp(np.float32(1), -exponents).astype(np.float32)[row]
    return where, row, values


def _joined(parts: list[tuple[Ints, Floats]]) -> tuple[Ints, Floats]:
    return np.concatenate([where for where, _ in parts]), np.concatenate([values for _, values in parts])


def _starts(counts: Ints) -> Ints:
    return np.concatenate([[0], counts.cumsum()[:-1]])


def _words(slots: Tensor, layout: Slots) -> npt.NDArray[np.int16]:
    rows: npt.NDArray[np.int16] = slots.view(-1, layout.bytes).view(torch.int16).numpy()
    return rows


def _keys(values: Floats) -> Ints:
    return ((values.view(np.int32) & 0x7FFFFFFF) >> KEY_SHIFT).astype(np.int64)


def _magnitude_of(key: int) -> float:
    """Return the smallest magnitude with this key."""
    return float(np.int32(min(key << KEY_SHIFT, 0x7F800000)).view(np.float32))
