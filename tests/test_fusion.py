"""Fusion for one lane: the optimum is optimal, and the published planners behave as in their papers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.plan.fusion import Gradients, arrival_s, asc, constant, cycles, line, mgwfbp, optimal, wfbp


@st.composite
def instances(draw: st.DrawFn, largest: int = 9) -> Gradients:
    count = draw(st.integers(1, largest))
    times = st.floats(0, 5, allow_nan=False)
    ready = np.cumsum(draw(st.lists(times, min_size=count, max_size=count)))
    sizes = np.array(draw(st.lists(st.floats(0.01, 10), min_size=count, max_size=count)))
    return Gradients(ready, sizes, line(draw(st.floats(0, 5)), draw(st.floats(0, 3))))


def every_way(count: int) -> list[tuple[int, ...]]:
    ways = []
    for cuts in itertools.product([False, True], repeat=count - 1):
        places = [0, *(place + 1 for place, cut in enumerate(cuts) if cut), count]
        ways.append(tuple(b - a for a, b in itertools.pairwise(places)))
    return ways


@given(instances())
def test_no_other_buckets_arrive_earlier_than_the_optimum(gradients: Gradients) -> None:
    best_s = arrival_s(gradients, optimal(gradients))
    assert best_s == pytest.approx(min(arrival_s(gradients, way) for way in every_way(gradients.count)))


@given(instances(largest=60), st.floats(0.1, 50))
def test_the_optimum_is_never_later_than_a_published_planner(gradients: Gradients, size: float) -> None:
    best_s = arrival_s(gradients, optimal(gradients))
    for sizes in (wfbp(gradients), mgwfbp(gradients), asc(gradients), constant(gradients, size)):
        assert sum(sizes) == gradients.count
        assert best_s <= arrival_s(gradients, sizes) * (1 + 1e-12)


def test_costs_may_have_any_shape() -> None:
    """Buckets of up to two units take no time; larger ones take 10 s per unit."""
    ready, sizes = np.arange(6.0), np.ones(6)
    gradients = Gradients(ready, sizes, lambda nbytes: np.where(nbytes <= 2, 0.0, 10 * nbytes))
    assert arrival_s(gradients, optimal(gradients)) == 5.0
    assert max(optimal(gradients)) <= 2


def test_start_ups_alone_fuse_everything_and_bytes_alone_gain_nothing_from_fusion() -> None:
    ready, sizes = np.arange(8.0), np.ones(8)
    assert optimal(Gradients(ready, sizes, line(100.0, 0.0))) == (8,)
    free = Gradients(ready, sizes, line(0.0, 0.5))
    assert arrival_s(free, optimal(free)) == arrival_s(free, wfbp(free)) == 7.5


def test_mgwfbp_waits_less_than_a_start_up_and_asc_does_not_wait() -> None:
    """The second gradient is ready while the first is sent: waiting is worth it if a start-up takes longer."""
    ready, sizes = np.array([0.0, 1.0]), np.array([1.0, 1.0])
    assert mgwfbp(Gradients(ready, sizes, line(2.0, 1.0))) == (2,)
    assert asc(Gradients(ready, sizes, line(2.0, 1.0))) == (1, 1)
    assert mgwfbp(Gradients(ready, sizes, line(0.5, 1.0))) == (1, 1)


def test_both_greedies_fuse_what_is_queued_anyway() -> None:
    ready, sizes = np.array([0.0, 10.0, 11.0, 12.0]), np.array([50.0, 1.0, 1.0, 1.0])
    gradients = Gradients(ready, sizes, line(0.5, 1.0))  # the first is sent until 50.5
    assert asc(gradients) == mgwfbp(gradients) == (1, 3)


def test_a_constant_size_closes_buckets_that_reach_it() -> None:
    gradients = Gradients(np.zeros(5), np.array([3.0, 3.0, 10.0, 1.0, 1.0]), line(1, 1))
    assert constant(gradients, 6.0) == (2, 1, 2)
    assert constant(gradients, 1.0) == (1, 1, 1, 1, 1)


def test_buckets_that_do_not_hold_all_gradients_are_an_error() -> None:
    gradients = Gradients(np.zeros(3), np.ones(3), line(1, 1))
    for sizes in ((1, 1), (2, 2), (3, 0), ()):
        with pytest.raises(ValueError, match="do not hold 3"):
            arrival_s(gradients, sizes)


@given(instances(largest=40), st.floats(0.05, 5), st.floats(0.1, 50))
def test_cycles_are_never_better_than_the_optimum(gradients: Gradients, cycle_s: float, buffer: float) -> None:
    sizes = cycles(gradients, cycle_s, buffer)
    assert sum(sizes) == gradients.count and min(sizes) > 0
    assert arrival_s(gradients, optimal(gradients)) <= arrival_s(gradients, sizes) * (1 + 1e-9)


def test_what_is_ready_at_a_tick_travels_together_up_to_the_buffer() -> None:
    ready = np.array([0.5, 0.9, 1.5, 5.2, 5.3, 5.4])
    gradients = Gradients(ready, np.array([1.0, 1, 1, 1, 1, 1]), line(0.1, 0.0))
    assert cycles(gradients, 1.0, 100.0) == (2, 1, 3)
    assert cycles(gradients, 1.0, 2.0) == (2, 1, 2, 1)
    # Sending the first takes three ticks, in which all others become ready.
    slow = Gradients(ready, np.array([1.0, 1, 1, 1, 1, 1]), line(5.0, 0.0))
    assert cycles(slow, 1.0, 100.0) == (2, 4)
