"""Fits of what a collective costs: robust, never negative, in two pieces where one line does not fit.

Every size counts with its *relative* error, or the largest would decide alone; sizes that stick out count less with
each pass (Huber's weights), because on a shared machine some always do. Slopes and intercepts below zero have no
meaning, so they cannot come out.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

Floats = NDArray[np.float64]
Samples = Mapping[int, Sequence[float]]
"""By bytes: the seconds that each repetition took."""

CONFIDENCE = 0.9
_PASSES = 8
_HUBER = 1.345
_BETTER = 0.6
"""A second piece must leave less than this share of the squared error, or it describes noise."""
_RESAMPLES = 200


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


def fit(samples: Samples) -> Fit:
    """Of medians, with intervals from repetitions drawn again and again."""
    sizes = np.array(sorted(samples), dtype=float)
    medians = np.array([statistics.median(samples[int(size)]) for size in sizes])
    lines = fit_lines(sizes, medians)
    draw = np.random.default_rng(0)
    starts, slopes = [], []
    repeats = [np.asarray(samples[int(size)], dtype=float) for size in sizes]
    for _ in range(_RESAMPLES):
        again = np.array([np.median(draw.choice(times, len(times))) for times in repeats])
        one = _fitted(sizes, again, lines.breakpoint)
        starts.append(one.intercept_s)
        slopes.append(one.late_s_per_byte)
    return Fit(
        lines,
        _interval(lines.intercept_s, starts, lines.residual),
        _interval(lines.late_s_per_byte, slopes, lines.residual / len(sizes) ** 0.5),
    )


def fit_lines(sizes: Floats, seconds: Floats) -> Lines:
    """One line, or two where that is much better and both have sizes enough."""
    best = one = _fitted(sizes, seconds, None)
    if len(sizes) < 5:
        return one
    for left, right in itertools.pairwise(sizes[1:-1]):
        for share in (0.0, 1 / 3, 2 / 3):
            two = _fitted(sizes, seconds, float(left ** (1 - share) * right**share))
            if two.residual < best.residual:
                best = two
    return best if best.residual**2 < _BETTER * one.residual**2 else one


def _fitted(sizes: Floats, seconds: Floats, breakpoint: float | None) -> Lines:
    columns = [np.ones_like(sizes), sizes]
    if breakpoint is not None:
        columns = [np.ones_like(sizes), np.minimum(sizes, breakpoint), np.maximum(sizes - breakpoint, 0.0)]
    basis = np.stack(columns, axis=1) / seconds[:, None]
    scale = np.maximum(np.abs(basis).max(axis=0), 1e-300)  # bytes and seconds are many orders of magnitude apart
    trust = np.ones_like(sizes)
    parts, errors = np.zeros(len(columns)), np.ones_like(sizes)
    for _ in range(_PASSES):
        root = np.sqrt(trust)
        solution, _residual = nnls(basis / scale * root[:, None], root)
        parts = solution / scale
        errors = basis @ parts - 1.0
        typical = max(1.4826 * float(np.median(np.abs(errors))), 1e-9)
        trust = np.minimum(1.0, _HUBER * typical / np.maximum(np.abs(errors), 1e-12))
    residual = float(np.sqrt(np.mean(np.minimum(errors**2, 1.0))))
    if breakpoint is None:
        return Lines(float(parts[0]), float(parts[1]), float(parts[0]), float(parts[1]), None, residual)
    intercept, slope, late = (float(part) for part in parts)
    return Lines(intercept, slope, intercept + (slope - late) * breakpoint, late, breakpoint, residual)


def _interval(value: float, resampled: Sequence[float], floor: float) -> Interval:
    tail = (1 - CONFIDENCE) / 2
    low, high = (float(end) for end in np.quantile(resampled, [tail, 1 - tail]))
    return Interval(max(0.0, min(low, value * (1 - floor))), value, max(high, value * (1 + floor)))
