"""Fits find the lines that samples were made from, despite noise and outliers, and are never negative."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.measure.fit import Fit, Samples, fit, fit_lines

SIZES = (1_000, 4_000, 16_000, 64_000, 128_000, 256_000, 512_000, 1_000_000, 2_000_000, 4_000_000, 16_000_000)
ALPHA_S = 1e-3
BETA = 1e-8
BURST = 300_000
SEEDS = range(25)


def line(nbytes: float) -> float:
    return ALPHA_S + BETA * nbytes


def bursting(nbytes: float) -> float:
    """Return times of a link with a burst: a tenth of its time per byte until the burst is used up."""
    return max(ALPHA_S + BETA / 10 * nbytes, ALPHA_S + BETA / 10 * BURST + BETA * (nbytes - BURST))


def switching(nbytes: float) -> float:
    """Return times of a collective that switches at 200 kB to a longer start-up and less time per byte."""
    return min(1e-4 + 2e-8 * nbytes, 1e-4 + 2e-8 * 200_000 + 2e-9 * (nbytes - 200_000))


def samples(
    truth: Callable[[float], float], *, noise: float = 0.05, repeats: int = 9, seed: int = 0, outliers: float = 0.0
) -> Samples:
    """Return noisy repetitions of each size. Outliers take many times as long."""
    draw = np.random.default_rng(seed)
    made = {}
    for size in SIZES:
        times = truth(size) * np.exp(noise * draw.standard_normal(repeats))
        made[size] = [float(t) for t in np.where(draw.random(repeats) < outliers, 5 * times, times)]
    return made


def test_a_line_without_noise_is_found_exactly() -> None:
    lines = fit(samples(line, noise=0.0)).lines
    assert lines.breakpoint is None
    assert (lines.first.intercept_s, lines.first.s_per_byte) == pytest.approx((ALPHA_S, BETA), rel=1e-6)
    assert lines.residual < 1e-6


@pytest.mark.parametrize("outliers", [0.0, 0.2])
@pytest.mark.parametrize("seed", range(5))
def test_noise_and_outliers_move_a_line_only_a_little(seed: int, outliers: float) -> None:
    found = fit(samples(line, seed=seed, outliers=outliers))
    assert found.startup_s.value == pytest.approx(ALPHA_S, rel=0.15)
    assert found.late_s_per_byte.value == pytest.approx(BETA, rel=0.1)


@pytest.mark.parametrize("spoilt", [(4_000,), (64_000,), (4_000, 256_000)])
def test_sizes_that_stick_out_in_all_their_repetitions_hardly_count(spoilt: tuple[int, ...]) -> None:
    made = dict(samples(line, noise=0.01))
    for size in spoilt:
        made[size] = [4 * seconds for seconds in made[size]]
    found = fit(made)
    assert found.startup_s.value == pytest.approx(ALPHA_S, rel=0.03)
    assert found.late_s_per_byte.value == pytest.approx(BETA, rel=0.03)


@pytest.mark.parametrize("seed", range(5))
def test_a_burst_makes_two_pieces(seed: int) -> None:
    lines = fit(samples(bursting, noise=0.02, seed=seed), bursts=True).lines
    assert lines.breakpoint is not None
    assert lines.breakpoint == pytest.approx(BURST, rel=0.3)
    assert lines.first.intercept_s == pytest.approx(ALPHA_S, rel=0.1)
    assert lines.last.s_per_byte == pytest.approx(BETA, rel=0.1)
    assert lines.first.s_per_byte < BETA / 3
    credit = (lines.first.intercept_s - lines.last.intercept_s) / lines.last.s_per_byte
    assert credit == pytest.approx(0.9 * BURST, rel=0.3)


@pytest.mark.parametrize("seed", range(5))
def test_another_protocol_makes_two_pieces_the_other_way_round(seed: int) -> None:
    lines = fit(samples(switching, noise=0.02, seed=seed)).lines
    assert lines.breakpoint == pytest.approx(200_000, rel=0.4)
    assert lines.first.s_per_byte == pytest.approx(2e-8, rel=0.2)
    assert lines.last.s_per_byte == pytest.approx(2e-9, rel=0.2)
    assert lines.last.intercept_s > lines.first.intercept_s


@pytest.mark.parametrize("truth", [line, bursting, switching])
def test_the_pieces_meet(truth: Callable[[float], float]) -> None:
    lines = fit(samples(truth)).lines
    for before, after in itertools.pairwise(lines.pieces):
        early = before.intercept_s + before.s_per_byte * after.from_bytes
        assert lines.seconds(after.from_bytes) == pytest.approx(early)


@pytest.fixture(scope="module")
def many() -> list[Fit]:
    """Return many noisy measurements of the same line."""
    return [fit(samples(line, seed=seed)) for seed in SEEDS]


def test_one_line_is_enough_where_there_is_one(many: list[Fit]) -> None:
    assert sum(one.lines.breakpoint is None for one in many) >= 0.8 * len(many)


def test_a_few_sizes_are_always_one_line() -> None:
    few = {size: times for size, times in samples(bursting).items() if size >= 1_000_000}
    assert fit(few).lines.breakpoint is None


def test_intervals_hold_the_truth_most_of_the_time(many: list[Fit]) -> None:
    starts = sum(one.startup_s.low <= ALPHA_S <= one.startup_s.high for one in many)
    slopes = sum(one.late_s_per_byte.low <= BETA <= one.late_s_per_byte.high for one in many)
    assert starts >= 0.75 * len(many)
    assert slopes >= 0.75 * len(many)


def test_noisier_repetitions_have_wider_intervals() -> None:
    calm, wild = (fit(samples(line, noise=noise)).startup_s for noise in (0.01, 0.3))
    assert calm.high - calm.low < wild.high - wild.low


@given(
    times=st.lists(st.lists(st.floats(1e-7, 1e3), min_size=1, max_size=4), min_size=2, max_size=len(SIZES)),
    bursts=st.booleans(),
)
@settings(max_examples=12, deadline=None)
def test_nothing_is_ever_negative_and_intervals_hold_their_value(times: list[list[float]], bursts: bool) -> None:
    found = fit(dict(zip(SIZES, times, strict=False)), bursts=bursts)
    first, last = found.lines.first, found.lines.last
    for value in (first.intercept_s, first.s_per_byte, last.s_per_byte, found.lines.residual):
        assert 0 <= value < float("inf")
    for interval in (found.startup_s, found.late_s_per_byte):
        assert 0 <= interval.low <= interval.value <= interval.high < float("inf")


def test_times_that_fall_with_size_have_a_slope_of_zero() -> None:
    sizes = np.array(SIZES, dtype=float)
    lines = fit_lines(sizes, np.linspace(2e-3, 1e-3, len(sizes)))
    assert lines.first.s_per_byte >= 0
    assert lines.first.intercept_s == pytest.approx(1.5e-3, rel=0.4)
