"""The simulated timeline: links keep their rates, lanes keep their order, and shares are fair."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.predict import timeline as timeline_module
from syncline.predict.timeline import Bucket, Capacity, Collective, Timeline, Work, simulate

law = settings(max_examples=60, deadline=None)
PEAK = timeline_module._PEAK
RATE = 1e6
HOST = {"host": Capacity(RATE)}


def flow(load: float = 0.0, serial_s: float = 0.0, spread_s: float = 0.0, **loads: float) -> Collective:
    """Return a collective over the host's link, or over the named links."""
    return Collective("all_reduce", "world", serial_s, spread_s, loads or {"host": load})


def bucket(name: object, *stages: Work | Collective, ready_s: float = 0.0, lane: int = 0) -> Bucket:
    return Bucket(str(name), ready_s, lane, stages)


def ends(timeline: Timeline) -> list[float]:
    """Return the end of each bucket, sorted by name."""
    return [timeline.end_s[name] for name in sorted(timeline.end_s, key=int)]


def loads_of(buckets: Sequence[Bucket]) -> float:
    stages = [stage for one in buckets for stage in one.stages]
    return sum(stage.load_bytes.get("host", 0.0) for stage in stages if isinstance(stage, Collective))


seconds = st.one_of(st.just(0.0), st.floats(1e-6, 1.0))
sizes = st.one_of(st.just(0.0), st.floats(1.0, 1e7))
flows = st.builds(flow, sizes, seconds, seconds)
works = st.builds(Work, seconds)
slowdowns: st.SearchStrategy[Callable[[int], float]] = st.sampled_from(
    [lambda streams: 1.0, lambda streams: float(streams), lambda streams: streams**0.5]
)
capacities = st.builds(Capacity, st.floats(1e4, 1e9), st.one_of(st.just(0.0), st.floats(1.0, 1e6)))


@st.composite
def queues(draw: st.DrawFn, lanes: int = 4, most: int = 8) -> list[Bucket]:
    """Generate buckets that become ready one after the other, as in a step."""
    made = draw(
        st.lists(st.tuples(seconds, st.integers(0, lanes - 1), st.lists(flows | works, max_size=3)), max_size=most)
    )
    ready = itertools.accumulate(gap for gap, _, _ in made)
    return [
        bucket(name, *stages, ready_s=ready_s, lane=lane)
        for name, (ready_s, (_, lane, stages)) in enumerate(zip(ready, made, strict=True))
    ]


@given(load=sizes, serial_s=seconds, spread_s=seconds, capacity=capacities)
@law
def test_one_collective_alone_takes_the_longer_of_its_two_lines(
    load: float, serial_s: float, spread_s: float, capacity: Capacity
) -> None:
    found = simulate([bucket(0, flow(load, serial_s, spread_s))], {"host": capacity}).end_s["0"]
    start_line = serial_s + spread_s
    link_line = serial_s + (load - capacity.burst_bytes) / capacity.bytes_per_s
    wire_line = serial_s + load / (PEAK * capacity.bytes_per_s)  # a burst has a finite speed
    assert found == pytest.approx(max(start_line, link_line, wire_line), rel=1e-6, abs=1e-9)


@given(load=sizes, trunk_load=sizes, spread_s=seconds, host=capacities, rack=capacities)
@law
def test_the_slowest_of_its_links_decides(
    load: float, trunk_load: float, spread_s: float, host: Capacity, rack: Capacity
) -> None:
    both = flow(spread_s=spread_s, host=load, rack=trunk_load)
    found = simulate([bucket(0, both)], {"host": host, "rack": rack}).end_s["0"]
    alone = [
        simulate([bucket(0, flow(spread_s=spread_s, **{name: nbytes}))], {"host": host, "rack": rack}).end_s["0"]
        for name, nbytes in (("host", load), ("rack", trunk_load))
    ]
    assert found == pytest.approx(max(alone), rel=1e-6, abs=1e-9)


@given(buckets=queues(), capacity=capacities, in_flight=st.integers(1, 4), slowdown=slowdowns)
@law
def test_no_link_carries_more_than_its_rate_and_its_burst(
    buckets: list[Bucket], capacity: Capacity, in_flight: int, slowdown: Callable[[int], float]
) -> None:
    found = simulate(buckets, {"host": capacity}, in_flight, slowdown)
    began = min((one.ready_s for one in buckets), default=0.0)
    for until in range(len(buckets) + 1):
        done = [one for one in buckets if found.end_s[one.name] <= sorted((0.0, *ends(found)))[until]]
        last = max((found.end_s[one.name] for one in done), default=began)
        least_s = (loads_of(done) - capacity.burst_bytes) / capacity.bytes_per_s
        assert last - began >= least_s * (1 - 1e-6) - 1e-9


@given(buckets=queues(), capacity=capacities, in_flight=st.integers(1, 4), slowdown=slowdowns)
@law
def test_every_bucket_waits_for_its_gradients_its_turn_and_its_own_stages(
    buckets: list[Bucket], capacity: Capacity, in_flight: int, slowdown: Callable[[int], float]
) -> None:
    found = simulate(buckets, {"host": capacity}, in_flight, slowdown)
    assert set(found.end_s) == {one.name for one in buckets}
    assert len(found.spans) == sum(len(one.stages) for one in buckets)
    starts: dict[int, list[float]] = {}
    for one in buckets:
        spans = [span for span in found.spans if span.bucket == one.name]
        assert [span.what for span in spans] == ["work" if isinstance(s, Work) else s.kind for s in one.stages]
        assert found.end_s[one.name] >= one.ready_s - 1e-9
        if spans:
            starts.setdefault(one.lane, []).append(spans[0].start_s)
            assert spans[0].start_s >= one.ready_s - 1e-9
            assert spans[-1].end_s == found.end_s[one.name]
        for before, after in itertools.pairwise(spans):
            assert before.end_s == after.start_s
        for span, stage in zip(spans, one.stages, strict=True):
            least_s = stage.seconds if isinstance(stage, Work) else stage.serial_s + stage.spread_s
            assert span.end_s - span.start_s >= least_s * (1 - 1e-6) - 1e-9
    for times in starts.values():
        assert times == sorted(times)


@given(buckets=queues(), capacity=capacities, in_flight=st.integers(1, 4), slowdown=slowdowns)
@law
def test_a_lane_never_has_more_in_flight_than_it_may(
    buckets: list[Bucket], capacity: Capacity, in_flight: int, slowdown: Callable[[int], float]
) -> None:
    found = simulate(buckets, {"host": capacity}, in_flight, slowdown)
    for lane in {one.lane for one in buckets}:
        names = [one.name for one in buckets if one.lane == lane and one.stages]
        lives = [(min(s.start_s for s in found.spans if s.bucket == name), found.end_s[name]) for name in names]
        for start, end in lives:
            middle = (start + end) / 2
            assert end - start < 1e-6 or sum(a < middle < b for a, b in lives) <= in_flight


@given(buckets=queues(lanes=1), capacity=capacities, times=st.floats(1.0, 100.0))
@law
def test_a_faster_link_never_makes_one_lane_slower(buckets: list[Bucket], capacity: Capacity, times: float) -> None:
    faster = Capacity(capacity.bytes_per_s * times, capacity.burst_bytes)
    slow, fast = (ends(simulate(buckets, {"host": one})) for one in (capacity, faster))
    for before, after in zip(slow, fast, strict=True):
        assert after <= before * (1 + 1e-6) + 1e-9


@given(streams=st.integers(2, 6), load=st.floats(1.0, 1e7))
@law
def test_equal_flows_share_a_link_equally(streams: int, load: float) -> None:
    found = simulate([bucket(name, flow(load), lane=name) for name in range(streams)], HOST)
    assert ends(found) == pytest.approx([streams * load / RATE] * streams, rel=1e-6)


def test_a_flow_that_comes_later_shares_what_is_left_of_the_first() -> None:
    """The first flow has sent half of its bytes when the second starts; they share the link until the first ends."""
    found = simulate([bucket(0, flow(RATE)), bucket(1, flow(RATE), ready_s=0.5, lane=1)], HOST)
    assert ends(found) == pytest.approx([1.5, 2.0])


def test_what_a_capped_flow_leaves_goes_to_the_other() -> None:
    """One flow can use a quarter of the link; the other gets three quarters, and all of it afterwards."""
    slow, quick = flow(RATE, spread_s=4.0), flow(3.3 * RATE)
    found = simulate([bucket(0, slow), bucket(1, quick, lane=1)], HOST)
    assert ends(found) == pytest.approx([4.0, 4.3])


def test_flows_that_meet_on_one_link_only_share_that_one() -> None:
    """Both flows cross the trunk. One is limited by its host's link, and the other gets the rest of the trunk."""
    links = {"host": Capacity(RATE), "rack": Capacity(4 * RATE)}
    both, trunk = flow(host=RATE, rack=RATE), flow(rack=3 * RATE)
    found = simulate([bucket(0, both), bucket(1, trunk, lane=1)], links)
    assert ends(found) == pytest.approx([1.0, 1.0])


def test_a_link_regains_its_credit_while_it_rests() -> None:
    links = {"host": Capacity(RATE, burst_bytes=RATE)}
    at_once, rested = (
        simulate([bucket(0, flow(2 * RATE)), bucket(1, flow(2 * RATE), ready_s=ready_s)], links)
        for ready_s in (0.0, 3.0)
    )
    assert ends(at_once) == pytest.approx([1.0, 3.0])
    assert ends(rested) == pytest.approx([1.0, 4.0])


@pytest.mark.parametrize("longer", [1.0, 1.5])
def test_crowded_flows_use_a_link_less_efficiently(longer: float) -> None:
    """Two concurrent flows are slower than one after the other; the rest of the larger one runs alone at full speed."""
    two = [bucket(0, flow(RATE)), bucket(1, flow(2 * RATE), lane=1)]
    found = simulate(two, HOST, crowding=lambda streams: longer if streams == 2 else 1.0)
    assert ends(found) == pytest.approx([2 * longer, 2 * longer + 1])


@pytest.mark.parametrize("slower", [1.0, 1.5, 2.0])
def test_lanes_overlap_start_ups_as_far_as_was_measured(slower: float) -> None:
    two = [bucket(name, flow(serial_s=0.1, spread_s=0.3), lane=name) for name in range(2)]
    found = simulate(two, HOST, slowdown=lambda streams: slower if streams == 2 else 1.0)
    assert ends(found) == pytest.approx([0.4 * slower] * 2)


def test_work_slows_no_start_up_down() -> None:
    two = [bucket(0, flow(serial_s=0.1)), bucket(1, Work(1.0), lane=1)]
    assert ends(simulate(two, HOST, slowdown=lambda streams: float(streams))) == pytest.approx([0.1, 1.0])


@pytest.mark.parametrize(("in_flight", "expected"), [(1, [1, 2, 3, 4]), (2, [1, 1, 2, 2]), (3, [1, 1, 1, 2])])
def test_a_lane_runs_as_many_buckets_as_allowed(in_flight: int, expected: list[float]) -> None:
    four = [bucket(name, flow(serial_s=1.0)) for name in range(4)]
    assert ends(simulate(four, HOST, in_flight)) == pytest.approx(expected)


def test_stages_run_one_after_the_other_on_their_lane() -> None:
    found = simulate([bucket(0, Work(0.5), flow(RATE), Work(0.25)), bucket(1, Work(1.0))], HOST)
    assert [span.what for span in found.spans] == ["work", "all_reduce", "work", "work"]
    assert ends(found) == pytest.approx([1.75, 2.75])


def test_a_bucket_that_is_not_ready_holds_up_those_behind_it() -> None:
    found = simulate([bucket(0, Work(1.0), ready_s=5.0), bucket(1, Work(1.0))], HOST)
    assert ends(found) == pytest.approx([6.0, 7.0])


def test_nothing_to_do_takes_no_time() -> None:
    assert simulate([], HOST).end_s == {}
    assert simulate([bucket(0, ready_s=2.0)], HOST).end_s == {"0": 2.0}
    assert simulate([bucket(0, flow(0.0))], HOST).end_s == {"0": 0.0}
    assert simulate([bucket(0, Work(0.0), ready_s=1.0)], {}).end_s == {"0": 1.0}


def test_an_unknown_link_delays_nothing() -> None:
    assert simulate([bucket(0, flow(1e9, serial_s=0.5))], {}).end_s["0"] == pytest.approx(0.5)


class CountedSlowdown:
    """A slowdown that counts its calls, one per event."""

    def __init__(self, most: int) -> None:
        self.left = most

    def __call__(self, streams: int) -> float:
        self.left -= 1
        assert self.left > 0, "the simulation goes on and on"
        return streams**0.5


extreme_rates = st.floats(-3, 12).map(lambda exponent: 10.0**exponent)
extreme_sizes = st.one_of(st.just(0.0), st.floats(-3, 12).map(lambda exponent: 10.0**exponent))
extreme_seconds = st.one_of(st.just(0.0), st.floats(-12, 6).map(lambda exponent: 10.0**exponent))
extreme_links = st.builds(Capacity, extreme_rates, extreme_sizes)


@given(
    host=extreme_links,
    rack=extreme_links,
    parts=st.lists(
        st.tuples(extreme_sizes, extreme_sizes, extreme_seconds, extreme_seconds, extreme_seconds, st.integers(0, 2)),
        max_size=10,
    ),
    in_flight=st.integers(1, 4),
)
@settings(max_examples=200, deadline=None)
def test_the_simulation_ends_for_extreme_sizes_rates_and_times(
    host: Capacity, rack: Capacity, parts: list[tuple[float, float, float, float, float, int]], in_flight: int
) -> None:
    """Each bucket has a few events: its start, the end of its start-up, its end, and the end of a link's credit."""
    buckets = [
        bucket(name, flow(serial_s=serial_s, spread_s=spread_s, host=load, rack=trunk), Work(work_s), lane=lane)
        for name, (load, trunk, serial_s, spread_s, work_s, lane) in enumerate(parts)
    ]
    counted = CountedSlowdown(50 * (1 + len(parts)))
    found = simulate(buckets, {"host": host, "rack": rack}, in_flight, counted, lambda streams: streams**0.25)
    assert len(found.end_s) == len(parts)
    assert all(0 <= end < float("inf") for end in found.end_s.values())
