"""Fits of what a collective costs: robust, never negative, in two pieces where one line does not fit.

Every size counts with its *relative* error, or the largest would decide alone, and the more the better its repetitions
agree: tiny messages scatter on busy processors, large ones hardly do. Sizes that stick out count less with each pass
(Huber's weights), because on a shared machine some always do. Slopes and intercepts below zero have no meaning, so they
cannot come out.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Samples = Mapping[int, Sequence[float]]
"""By bytes: the seconds that each repetition took."""

CONFIDENCE = 0.9
_PASSES = 6
_HUBER = 1.345
_BETTER = 0.6
"""A second piece must leave less than this share of the squared error, or it describes noise."""
_RESAMPLES = 200
_PRECISION = 0.02
"""The relative error that every median has at least, however well its repetitions agree."""
_UNKNOWN_PRECISION = 0.05
"""Of a size that was measured once."""
_LAST_SWITCH_BYTES = 4e6
"""Protocols switch for small messages. Where bytes get cheaper later, sizes before were disturbed."""


@dataclass(frozen=True)
class Line:
    """Seconds from so many bytes on."""

    from_bytes: float
    intercept_s: float
    s_per_byte: float


@dataclass(frozen=True)
class Lines:
    """Seconds over bytes: one line, or up to three that meet where the next begins."""

    pieces: tuple[Line, ...]
    residual: float
    """Root mean square of relative errors."""

    @property
    def intercept_s(self) -> float:
        return self.pieces[0].intercept_s

    @property
    def s_per_byte(self) -> float:
        return self.pieces[0].s_per_byte

    @property
    def late_intercept_s(self) -> float:
        return self.pieces[-1].intercept_s

    @property
    def late_s_per_byte(self) -> float:
        return self.pieces[-1].s_per_byte

    @property
    def breakpoint(self) -> float | None:
        """Where the last piece begins, if there are several."""
        return self.pieces[-1].from_bytes if len(self.pieces) > 1 else None

    def seconds(self, nbytes: float) -> float:
        piece = next(piece for piece in reversed(self.pieces) if nbytes >= piece.from_bytes)
        return piece.intercept_s + piece.s_per_byte * nbytes


@dataclass(frozen=True)
class Interval:
    low: float
    value: float
    high: float


@dataclass(frozen=True)
class Fit:
    lines: Lines
    startup_s: Interval
    late_s_per_byte: Interval


def fit(samples: Samples, *, bursts: bool = False, switches: bool = True) -> Fit:
    """Of medians, with intervals from repetitions drawn again and again.

    `bursts`: the links are known to let some bytes pass at once, so that two lines are more likely than one.
    `switches`: protocols may change with the size, so that bytes may get cheaper and three lines are possible.
    """
    sizes = np.array(sorted(samples), dtype=float)
    medians = np.array([statistics.median(samples[int(size)]) for size in sizes])
    precision = np.array([_precision(samples[int(size)]) for size in sizes])
    lines = fit_lines(sizes, medians, precision, better=1.0 if bursts else _BETTER, switches=switches)
    breaks = tuple(piece.from_bytes for piece in lines.pieces[1:])
    draw = np.random.default_rng(0)
    starts, slopes = [], []
    repeats = [np.asarray(samples[int(size)], dtype=float) for size in sizes]
    for _ in range(_RESAMPLES):
        again = np.array([np.median(draw.choice(times, len(times))) for times in repeats])
        one, _ = _fitted(sizes, again, precision, breaks)
        starts.append(one.intercept_s)
        slopes.append(one.late_s_per_byte)
    return Fit(
        lines,
        _interval(lines.intercept_s, starts, lines.residual),
        _interval(lines.late_s_per_byte, slopes, lines.residual / len(sizes) ** 0.5),
    )


def fit_lines(
    sizes: Floats,
    seconds: Floats,
    precision: Floats | None = None,
    better: float = _BETTER,
    switches: bool = True,
) -> Lines:
    """As few lines as will do: a second must leave less than `better` of the squared error, a third less than `_BETTER`
    of what two leave, and each needs sizes enough.

    `precision` is relative, of each size.
    """
    precision = np.full_like(sizes, _PRECISION) if precision is None else precision
    places = _between(sizes)
    best, misfit = _fitted(sizes, seconds, precision, ())
    good_enough = len(sizes) if better < 1 else 1e-6  # it fits as well as the sizes repeat
    for pieces, enough, share in ((2, good_enough, better), (3, len(sizes), _BETTER)):
        if len(sizes) < 2 * pieces + 1 or misfit <= enough or (pieces == 3 and not switches):
            break
        coarse = [breaks for breaks in itertools.combinations(places, pieces - 1) if _populated(sizes, breaks)]
        tried = [(*_fitted(sizes, seconds, precision, breaks), breaks) for breaks in coarse]
        tried = [found for found in tried if _plausible(found[0], switches)]
        if not tried:
            continue
        candidate, least = _refined(sizes, seconds, precision, min(tried, key=lambda found: found[1])[2])
        if least < share * misfit and _plausible(candidate, switches):  # if not, three may still do what two cannot
            best, misfit = candidate, least
    return best


def _refined(sizes: Floats, seconds: Floats, precision: Floats, breaks: tuple[float, ...]) -> tuple[Lines, float]:
    """The same pieces, which now may meet anywhere near."""
    best = _fitted(sizes, seconds, precision, breaks)
    for reach in (1.3, 1.08):
        for place in range(len(breaks)):
            for factor in (reach**-1, reach**-0.5, reach**0.5, reach):
                moved = (*breaks[:place], breaks[place] * factor, *breaks[place + 1 :])
                if sorted(moved) == list(moved) and _populated(sizes, moved):
                    found = _fitted(sizes, seconds, precision, moved)
                    if found[1] < best[1]:
                        best = found
            breaks = tuple(piece.from_bytes for piece in best[0].pieces[1:])
    return best


def _plausible(lines: Lines, switches: bool) -> bool:
    """Whether bytes get cheaper only where a protocol may switch."""
    return all(
        after.s_per_byte >= before.s_per_byte or (switches and after.from_bytes <= _LAST_SWITCH_BYTES)
        for before, after in itertools.pairwise(lines.pieces)
    )


def _between(sizes: Floats) -> list[float]:
    """Where lines may meet: at sizes and halfway, as they are spaced in powers."""
    inner = sizes[1:-1]
    halves = [float((left * right) ** 0.5) for left, right in itertools.pairwise(inner)]
    return sorted([*map(float, inner[:-1]), *halves])


def _populated(sizes: Floats, breaks: tuple[float, ...]) -> bool:
    """Whether every piece has two sizes to lie on."""
    counts = np.bincount(np.searchsorted(np.array(breaks), sizes, side="right"), minlength=len(breaks) + 1)
    return bool(counts.min() >= 2)


def _fitted(sizes: Floats, seconds: Floats, precision: Floats, breaks: tuple[float, ...]) -> tuple[Lines, float]:
    """The lines, and the sum of squared errors, each in units of its size's precision."""
    from scipy.optimize import nnls  # here, because commands that do not fit need not wait for its import

    edges = (0.0, *breaks, np.inf)
    columns = [np.ones_like(sizes)]
    columns += [np.clip(sizes - start, 0.0, end - start) for start, end in itertools.pairwise(edges)]
    basis = np.stack(columns, axis=1) / seconds[:, None]
    scale = np.maximum(np.abs(basis).max(axis=0), 1e-300)  # bytes and seconds are many orders of magnitude apart
    trust = np.ones_like(sizes)
    parts, errors = np.zeros(len(columns)), np.ones_like(sizes)
    for _ in range(_PASSES):
        root = np.sqrt(trust) / precision
        solution, _residual = nnls(basis / scale * root[:, None], root)
        parts = solution / scale
        errors = basis @ parts - 1.0
        surprise = np.abs(errors) / precision
        typical = max(1.4826 * float(np.median(surprise)), 1.0)
        trust = np.minimum(1.0, _HUBER * typical / np.maximum(surprise, 1e-12))
    misfit = float(np.sum(np.minimum((errors / precision) ** 2, 100.0)))
    pieces = [Line(0.0, float(parts[0]), float(parts[1]))]
    for start, slope in zip(breaks, parts[2:], strict=True):
        before = pieces[-1]
        pieces.append(Line(start, before.intercept_s + (before.s_per_byte - float(slope)) * start, float(slope)))
    return Lines(tuple(pieces), float(np.sqrt(np.mean(np.minimum(errors**2, 1.0))))), misfit


def _precision(times: Sequence[float]) -> float:
    """About the relative error of these repetitions' median."""
    if len(times) < 2:
        return _UNKNOWN_PRECISION
    low, median, high = np.quantile(times, [0.25, 0.5, 0.75])
    return float(max(_PRECISION, 1.25 * (high - low) / 1.35 / median / len(times) ** 0.5))


def _interval(value: float, resampled: Sequence[float], floor: float) -> Interval:
    tail = (1 - CONFIDENCE) / 2
    low, high = (float(end) for end in np.quantile(resampled, [tail, 1 - tail]))
    return Interval(max(0.0, min(low, value * (1 - floor))), value, max(high, value * (1 + floor)))
