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
_PASSES = 8
_HUBER = 1.345
_BETTER = 0.6
"""A second piece must leave less than this share of the squared error, or it describes noise."""
_RESAMPLES = 200
_PRECISION = 0.02
"""The relative error that every median has at least, however well its repetitions agree."""
_UNKNOWN_PRECISION = 0.05
"""Of a size that was measured once."""


@dataclass(frozen=True)
class Lines:
    """Seconds over bytes: one line, or two that meet at `breakpoint`."""

    intercept_s: float
    s_per_byte: float
    late_intercept_s: float
    late_s_per_byte: float
    breakpoint: float | None
    residual: float
    """Root mean square of relative errors."""

    def seconds(self, nbytes: float) -> float:
        if self.breakpoint is None or nbytes < self.breakpoint:
            return self.intercept_s + self.s_per_byte * nbytes
        return self.late_intercept_s + self.late_s_per_byte * nbytes


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


def fit(samples: Samples, *, bursts: bool = False) -> Fit:
    """Of medians, with intervals from repetitions drawn again and again.

    `bursts`: the links are known to let some bytes pass at once, so that two lines are more likely than one.
    """
    sizes = np.array(sorted(samples), dtype=float)
    medians = np.array([statistics.median(samples[int(size)]) for size in sizes])
    precision = np.array([_precision(samples[int(size)]) for size in sizes])
    lines = fit_lines(sizes, medians, precision, better=1.0 if bursts else _BETTER)
    draw = np.random.default_rng(0)
    starts, slopes = [], []
    repeats = [np.asarray(samples[int(size)], dtype=float) for size in sizes]
    for _ in range(_RESAMPLES):
        again = np.array([np.median(draw.choice(times, len(times))) for times in repeats])
        one, _ = _fitted(sizes, again, precision, lines.breakpoint)
        starts.append(one.intercept_s)
        slopes.append(one.late_s_per_byte)
    return Fit(
        lines,
        _interval(lines.intercept_s, starts, lines.residual),
        _interval(lines.late_s_per_byte, slopes, lines.residual / len(sizes) ** 0.5),
    )


def fit_lines(sizes: Floats, seconds: Floats, precision: Floats | None = None, better: float = _BETTER) -> Lines:
    """One line, or two where that leaves less than `better` of the squared error and both have sizes enough.

    `precision` is relative, of each size.
    """
    precision = np.full_like(sizes, _PRECISION) if precision is None else precision
    one, one_misfit = best, misfit = _fitted(sizes, seconds, precision, None)
    if len(sizes) < 5 or one_misfit <= (len(sizes) if better < 1 else 1e-6):  # it fits as well as the sizes repeat
        return one
    for left, right in itertools.pairwise(sizes[1:-1]):
        for share in (0.0, 1 / 3, 2 / 3):
            two, two_misfit = _fitted(sizes, seconds, precision, float(left ** (1 - share) * right**share))
            if two_misfit < misfit:
                best, misfit = two, two_misfit
    return best if misfit < better * one_misfit else one


def _fitted(sizes: Floats, seconds: Floats, precision: Floats, breakpoint: float | None) -> tuple[Lines, float]:
    """The lines, and the sum of squared errors, each in units of its size's precision."""
    from scipy.optimize import nnls  # here, because commands that do not fit need not wait for its import

    columns = [np.ones_like(sizes), sizes]
    if breakpoint is not None:
        columns = [np.ones_like(sizes), np.minimum(sizes, breakpoint), np.maximum(sizes - breakpoint, 0.0)]
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
    residual = float(np.sqrt(np.mean(np.minimum(errors**2, 1.0))))
    misfit = float(np.sum(np.minimum((errors / precision) ** 2, 100.0)))
    if breakpoint is None:
        return Lines(float(parts[0]), float(parts[1]), float(parts[0]), float(parts[1]), None, residual), misfit
    intercept, slope, late = (float(part) for part in parts)
    return Lines(intercept, slope, intercept + (slope - late) * breakpoint, late, breakpoint, residual), misfit


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
