"""Fusion for one lane: the optimum is optimal, and the published planners behave as in their papers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.plan.fusion import Gradients, asc, line, mgwfbp, optimal, wfbp


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


def arrival_s(gradients: Gradients, sizes: Sequence[int]) -> float:
    """Return when the last bucket has arrived, if buckets are exchanged one after the other."""
    assert sum(sizes) == gradients.count and min(sizes) > 0
    end_s, first = 0.0, 0
    for size in sizes:
        last = first + size
        bucket_s = gradients.cost_s(gradients.bytes[first:last].sum(keepdims=True))
        end_s = max(end_s, float(gradients.ready_s[:last].max())) + float(bucket_s[0])
        first = last
    return end_s


@given(instances())
def test_no_other_buckets_arrive_earlier_than_the_optimum(gradients: Gradients) -> None:
    best_s = arrival_s(gradients, optimal(gradients))
    assert best_s == pytest.approx(min(arrival_s(gradients, way) for way in every_way(gradients.count)))


@given(instances(largest=60))
def test_the_optimum_is_never_later_than_a_published_planner(gradients: Gradients) -> None:
    best_s = arrival_s(gradients, optimal(gradients))
    for sizes in (wfbp(gradients), mgwfbp(gradients), asc(gradients)):
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
