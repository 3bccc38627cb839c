"""Robust fits of a collective's time over its bytes: one line, or up to three lines that meet. Errors are relative, and
sizes whose repetitions agree weigh more; otherwise the largest sizes alone would decide. Outliers lose weight with each
pass (Huber's weights). Slopes and the first intercept are never negative."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Samples = Mapping[int, Sequence[float]]  # bytes → the seconds of each repetition
CONFIDENCE = 0.9
_PASSES = 6
_HUBER = 1.345
_BETTER = 0.6  # another line is accepted only if the squared error falls below this share, or it would describe noise
_RESAMPLES = 200
_PRECISION = 0.02  # lower limit for the relative error of a median, however well its repetitions agree
_UNKNOWN_PRECISION = 0.05  # relative error of a size that was measured once
_LAST_SWITCH_BYTES = 4e6  # protocols switch at small sizes; if the slope falls later, smaller sizes were disturbed


@dataclass(frozen=True)
class Line:
    """The time of sizes from `from_bytes` on."""

    from_bytes: float
    intercept_s: float
    s_per_byte: float


@dataclass(frozen=True)
class Lines:
    """Time over bytes: one to three lines, each of which ends where the next begins."""

    pieces: tuple[Line, ...]
    residual: float  # root mean square of the relative errors

    @property
    def first(self) -> Line:
        return self.pieces[0]

    @property
    def last(self) -> Line:
        return self.pieces[-1]

    @property
    def breakpoint(self) -> float | None:
        """Bytes at which the last line begins; None if there is only one."""
        return self.last.from_bytes if len(self.pieces) > 1 else None

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
    """Fit lines to the medians, with confidence intervals from bootstrap resampling of the repetitions. `bursts` says
    that the links are known to have a burst, which makes two lines more likely than one. With `switches`, the protocol
    may change with the size: a later line may have a smaller slope, and there may be three lines."""
    sizes = np.array(sorted(samples), dtype=float)
    repeats = [np.asarray(samples[size], dtype=float) for size in sorted(samples)]
    medians = np.array([np.median(times) for times in repeats])
    precision = np.array([_precision(times) for times in repeats])
    lines = fit_lines(sizes, medians, precision, better=1.0 if bursts else _BETTER, switches=switches)
    breaks = tuple(piece.from_bytes for piece in lines.pieces[1:])
    rng = np.random.default_rng(0)
    intercepts, slopes = [], []
    for _ in range(_RESAMPLES):
        resampled = np.array([np.median(rng.choice(times, len(times))) for times in repeats])
        refitted, _ = _fit_at(sizes, resampled, precision, breaks)
        intercepts.append(refitted.first.intercept_s)
        slopes.append(refitted.last.s_per_byte)
    startup_s = _interval(lines.first.intercept_s, intercepts, lines.residual)
    return Fit(lines, startup_s, _interval(lines.last.s_per_byte, slopes, lines.residual / len(sizes) ** 0.5))


def fit_lines(
    sizes: Floats, seconds: Floats, precision: Floats | None = None, better: float = _BETTER, switches: bool = True
) -> Lines:
    """Fit as few lines as possible. A second line is accepted if it reduces the squared error below the share `better`,
    a third line below the share `_BETTER` of that of two lines. Each line needs two sizes. `precision` is the relative
    error of each size."""
    precision = np.full_like(sizes, _PRECISION) if precision is None else precision
    # Lines may meet at the measured sizes, and at the geometric means of neighbours.
    inner = [float(size) for size in sizes[1:-1]]
    positions = sorted([*inner[:-1], *((left * right) ** 0.5 for left, right in itertools.pairwise(inner))])
    best, misfit = _fit_at(sizes, seconds, precision, ())
    good_enough = len(sizes) if better < 1 else 1e-6  # the fit is as precise as the measurements
    for pieces, enough, share in ((2, good_enough, better), (3, len(sizes), _BETTER)):
        if len(sizes) < 2 * pieces + 1 or misfit <= enough or (pieces == 3 and not switches):
            break
        coarse = [breaks for breaks in itertools.combinations(positions, pieces - 1) if _populated(sizes, breaks)]
        tried = [(*_fit_at(sizes, seconds, precision, breaks), breaks) for breaks in coarse]
        tried = [fitted for fitted in tried if _plausible(fitted[0], switches)]
        if tried:
            candidate, least = _refine(sizes, seconds, precision, min(tried, key=lambda fitted: fitted[1])[2])
            if least < share * misfit and _plausible(candidate, switches):  # if not, three lines may still be better
                best, misfit = candidate, least
    return best


def _refine(sizes: Floats, seconds: Floats, precision: Floats, breaks: tuple[float, ...]) -> tuple[Lines, float]:
    """Move the breaks a little in either direction, and return the best fit."""
    best = _fit_at(sizes, seconds, precision, breaks)
    for reach in (1.3, 1.08):
        for index in range(len(breaks)):
            for factor in (reach**-1, reach**-0.5, reach**0.5, reach):
                moved = (*breaks[:index], breaks[index] * factor, *breaks[index + 1 :])
                if sorted(moved) == list(moved) and _populated(sizes, moved):
                    fitted = _fit_at(sizes, seconds, precision, moved)
                    if fitted[1] < best[1]:
                        best = fitted
            breaks = tuple(piece.from_bytes for piece in best[0].pieces[1:])
    return best


def _plausible(lines: Lines, switches: bool) -> bool:
    """Return whether the slope falls only where a protocol may switch."""
    return all(
        after.s_per_byte >= before.s_per_byte or (switches and after.from_bytes <= _LAST_SWITCH_BYTES)
        for before, after in itertools.pairwise(lines.pieces)
    )


def _populated(sizes: Floats, breaks: tuple[float, ...]) -> bool:
    """Return whether every line has at least two sizes."""
    counts = np.bincount(np.searchsorted(np.array(breaks), sizes, side="right"), minlength=len(breaks) + 1)
    return bool(counts.min() >= 2)


def _fit_at(sizes: Floats, seconds: Floats, precision: Floats, breaks: tuple[float, ...]) -> tuple[Lines, float]:
    """Return the lines for these breaks, and the sum of squared errors in units of each size's precision."""
    from scipy.optimize import nnls  # imported here, because the import slows down commands that do not fit

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


def _precision(times: Floats) -> float:
    """Estimate the relative error of the median of these repetitions."""
    if len(times) < 2:
        return _UNKNOWN_PRECISION
    low, median, high = np.quantile(times, [0.25, 0.5, 0.75])
    return float(max(_PRECISION, 1.25 * (high - low) / 1.35 / median / len(times) ** 0.5))


def _interval(value: float, resampled: Sequence[float], floor: float) -> Interval:
    tail = (1 - CONFIDENCE) / 2
    low, high = (float(end) for end in np.quantile(resampled, [tail, 1 - tail]))
    return Interval(max(0.0, min(low, value * (1 - floor))), value, max(high, value * (1 + floor)))
