"""The search: no other layout is faster, lossy exchanges need permission, and plain DDP is kept if nothing helps."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import made_up
from syncline.errors import UsageError
from syncline.exchange import Dense, Exchange, Hierarchical, OkTopk
from syncline.plan import fusion
from syncline.plan import search as module
from syncline.plan.make import make_plan
from syncline.plan.search import _PER_BUCKET, LEAST_GAIN, SearchResult, check_allowed, named, options, search
from syncline.predict import Schedule, ddp_buckets, predict
from syncline.predict.schedule import MIB
from syncline.records.bucket_caps import caps_of, filled
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.records.profile import ITEM_BYTES, Gradient, Overheads, Profile, Work
from syncline.units import milliseconds_text

Layout = tuple[tuple[int, ...], ...]
EVERYTHING = ("bf16", "fp16", "sparse")
LANES = (1, 2, 4)

law = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
few = settings(parent=law, max_examples=10)
sets = st.lists(st.sampled_from(EVERYTHING), unique=True).map(tuple)
numbers_of_elements = st.integers(1, 100) | st.integers(1, 20_000) | st.integers(1, 1_000_000)


@st.composite
def models(draw: st.DrawFn, largest: int, *types: str) -> Profile:
    """Generate profiles with up to `largest` gradients, float32 by default."""
    made = made_up.profile(
        draw(st.lists(numbers_of_elements, min_size=1, max_size=largest)),
        forward_s=draw(st.floats(0.001, 0.1)),
        backward_s=draw(st.floats(0.001, 0.2)),
    )
    shares = sorted(draw(st.lists(st.floats(0, 1), min_size=len(made.gradients), max_size=len(made.gradients))))
    work = st.builds(Work, fixed_s=st.floats(0, 1e-3), s_per_byte=st.floats(0, 1e-8))
    overheads = Overheads(
        copy_in_s_per_byte=draw(st.floats(0, 1e-9)),
        copy_out_s_per_byte=draw(st.floats(0, 1e-9)),
        hook_s=draw(st.floats(0, 1e-3)),
        work={name: draw(work) for name in ("dense", "bf16", "oktopk", "hierarchical")},
    )
    return msgspec.structs.replace(
        made,
        gradients=tuple(
            of_type(
                msgspec.structs.replace(one, ready_s=share * made.backward_s),
                draw(st.sampled_from(types)) if types else "float32",
            )
            for one, share in zip(made.gradients, shares, strict=True)
        ),
        overheads=draw(st.none() | st.just(overheads)),
    )


def of_type(gradient: Gradient, dtype: str) -> Gradient:
    return msgspec.structs.replace(gradient, dtype=dtype, bytes=math.prod(gradient.shape) * ITEM_BYTES[dtype])


FLAT = ((0, 1), (0, 1, 2, 3))
LEVELED = ((0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 1, 2))


@st.composite
def clusters(draw: st.DrawFn, *host_of_rank: tuple[int, ...]) -> Network:
    made = made_up.network(
        draw(st.sampled_from(host_of_rank or (*FLAT, *LEVELED))),
        mbit=draw(st.sampled_from([20.0, 200.0, 1000.0, 10_000.0])),
        startup_s=draw(st.floats(1e-5, 5e-3)),
        in_flight=draw(st.integers(1, 4)),
    )
    return msgspec.structs.replace(made, backend=draw(st.sampled_from(["gloo", "nccl"])))


def layouts(count: int) -> list[Layout]:
    """Return all layouts of `count` gradients."""
    found = []
    for cuts in itertools.product([False, True], repeat=count - 1):
        places = [0, *(place + 1 for place, cut in enumerate(cuts) if cut), count]
        found.append(tuple(tuple(range(start, end)) for start, end in itertools.pairwise(places)))
    return found


def places_in(plan: Plan) -> Layout:
    """Return the plan's buckets as indices into the profile's gradients."""
    place_of = {gradient.name: place for place, gradient in enumerate(plan.gradients)}
    return tuple(tuple(place_of[name] for name in bucket.parameters) for bucket in plan.buckets)


def as_schedule(plan: Plan) -> Schedule:
    """Return the schedule of a plan, as if it had been read from a file."""
    each = tuple((str(index), exchange) for index, exchange in enumerate(plan.exchanges))
    return Schedule("read", places_in(plan), lanes=plan.lanes, each=each)


def is_not_beaten(found: SearchResult, other_s: float, buckets: int) -> bool:
    """Return whether the result is as fast as another schedule, apart from the penalty per bucket."""
    slack = 1 + 1e-9
    if found.nothing:  # plain DDP is kept, with any number of buckets
        return found.best.iteration_s <= other_s * (1 + _PER_BUCKET * buckets) * slack
    mine = found.best.iteration_s * (1 + _PER_BUCKET * len(found.best.schedule.buckets))
    return mine <= other_s * (1 + _PER_BUCKET * buckets) * slack


# --- optimality -----------------------------------------------------------------------------------------------------


@given(profile=models(6), network=clusters(*FLAT), paced=st.booleans())
@law
def test_no_layout_on_any_lanes_is_faster(profile: Profile, network: Network, paced: bool) -> None:
    found = search(profile, network, paced=paced)
    for buckets, lanes in itertools.product(layouts(len(profile.gradients)), LANES):
        other = predict(profile, network, Schedule("other", buckets, lanes=lanes), paced=paced)
        assert is_not_beaten(found, other.iteration_s, len(buckets)), (buckets, lanes)


@given(profile=models(3), network=clusters(*LEVELED), allow=sets)
@law
def test_no_layout_through_any_exchange_that_is_allowed_is_faster(
    profile: Profile, network: Network, allow: tuple[str, ...]
) -> None:
    found = search(profile, network, allow)
    exchanges = options(network, allow).items()
    for buckets, lanes, (name, exchange) in itertools.product(layouts(len(profile.gradients)), LANES, exchanges):
        other = predict(profile, network, Schedule("other", buckets, exchange, name, lanes))
        assert is_not_beaten(found, other.iteration_s, len(buckets)), (buckets, lanes, name)


@given(profile=models(40), network=clusters(), allow=st.just(()) | sets)
@few
def test_no_published_planner_and_no_usual_bucket_size_is_faster(
    profile: Profile, network: Network, allow: tuple[str, ...]
) -> None:
    found = search(profile, network, allow)
    others = [named(profile, network, name) for name in ("wfbp", "mgwfbp", "asc")]
    others += [Schedule.of(profile, "ddp", bucket_mb=size) for size in (None, 1.0, 5.0, 25.0, 100.0)]
    for other in others:
        assert is_not_beaten(found, predict(profile, network, other).iteration_s, len(other.buckets)), other.describe()


def test_constant_sizes_of_models_larger_than_them_are_not_faster() -> None:
    profile, network = made_up.profile([3_000_000] * 20, backward_s=0.3), made_up.network(mbit=10_000.0)
    found = search(profile, network)
    for size in (1.0, 5.0, 25.0, 100.0):
        other = Schedule.of(profile, "ddp", bucket_mb=size)
        assert is_not_beaten(found, predict(profile, network, other).iteration_s, len(other.buckets)), size
    assert found.best.iteration_s < found.plain.iteration_s


@given(profile=models(4), network=clusters(*FLAT), allow=sets)
@law
def test_allowing_more_is_never_slower(profile: Profile, network: Network, allow: tuple[str, ...]) -> None:
    less, more = search(profile, network), search(profile, network, allow)
    assert is_not_beaten(more, less.best.iteration_s, len(less.best.schedule.buckets))


def test_of_equally_fast_layouts_the_one_with_fewest_buckets_is_taken() -> None:
    """The second half of the gradients is ready at the same time, and takes as long in one bucket as in five."""
    even = made_up.profile([200_000] * 10)
    late = tuple(
        msgspec.structs.replace(one, ready_s=0.0 if place < 5 else 0.04) for place, one in enumerate(even.gradients)
    )
    network = made_up.network(startup_s=0.0)
    found = search(msgspec.structs.replace(even, gradients=late), network)
    assert found.best.schedule.buckets == ((0, 1, 2, 3, 4), (5, 6, 7, 8, 9))


def test_the_search_goes_on_from_where_the_usual_layouts_end() -> None:
    """Several lanes share the links, which planners for one lane do not consider."""
    profile = made_up.profile([1_000 * (place % 7 + 1) ** 2 for place in range(30)], backward_s=0.06)
    network = made_up.network(mbit=500.0, startup_s=2e-3)
    found = search(profile, network)
    usual = [named(profile, network, name) for name in ("wfbp", "mgwfbp", "asc")]
    usual += [Schedule.of(profile, "dense", lanes=lanes) for lanes in LANES]
    usual += [Schedule.of(profile, "ddp", bucket_mb=size) for size in (1.0, 5.0, 25.0, 100.0)]
    assert found.best.iteration_s < 0.95 * min(predict(profile, network, one).iteration_s for one in usual)


# --- contents of a plan ---------------------------------------------------------------------------------------------


@given(profile=models(12), network=clusters(), allow=sets)
@few
def test_a_plan_holds_every_gradient_once_in_order(profile: Profile, network: Network, allow: tuple[str, ...]) -> None:
    plan = make_plan(profile, network, allow)
    assert [(one.name, one.shape, one.dtype) for one in plan.gradients] == [
        (one.name, one.shape, one.dtype) for one in profile.gradients
    ]
    assert plan.where.host_of_rank == network.host_of_rank
    assert (plan.where.backend, plan.where.device) == (network.backend, profile.device)
    if not plan.nothing:
        assert [place for places in places_in(plan) for place in places] == list(range(len(profile.gradients)))
        assert filled(profile.gradients, plan.caps) == places_in(plan)
        assert plan.caps == caps_of(profile.gradients, places_in(plan))
        assert [bucket.lane for bucket in plan.buckets] == [n % plan.lanes for n in range(len(plan.buckets))]


@given(profile=models(10, "float32", "float64", "bfloat16"), network=clusters(), allow=sets)
@few
def test_of_several_types_a_bucket_holds_one_and_ddp_would_make_the_same_buckets(
    profile: Profile, network: Network, allow: tuple[str, ...]
) -> None:
    totals = Counter[str]()
    for gradient in profile.gradients:
        totals[gradient.dtype] += gradient.bytes
    if len(set(totals.values())) < len(totals):
        return  # it is not defined then which dtype has most bytes
    plan = make_plan(profile, network, allow)
    if plan.nothing:
        return
    buckets = places_in(plan)
    assert sorted(place for places in buckets for place in places) == list(range(len(profile.gradients)))
    for places in buckets:
        assert list(places) == sorted(places)
        assert len({profile.gradients[place].dtype for place in places}) == 1
    assert filled(profile.gradients, plan.caps) == buckets


def test_types_that_take_turns_are_still_fused_by_type() -> None:
    even = made_up.profile([20_000] * 60)
    mixed = msgspec.structs.replace(
        even,
        gradients=tuple(
            of_type(one, "float32" if place % 3 else "bfloat16") for place, one in enumerate(even.gradients)
        ),
    )
    network = made_up.network(startup_s=2e-3)
    plan, one_by_one = make_plan(mixed, network), named(mixed, network, "wfbp")
    assert len(plan.buckets) < len(one_by_one.buckets)
    assert plan.iteration_s < 0.8 * predict(mixed, network, one_by_one).iteration_s
    assert plan.iteration_s < 0.9 * plan.plain_s
    assert filled(mixed.gradients, plan.caps) == places_in(plan)


@given(profile=models(5), network=clusters(), allow=sets)
@law
def test_the_times_in_a_plan_are_those_of_its_prediction(
    profile: Profile, network: Network, allow: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    profile = msgspec.structs.replace(
        profile, overheads=None
    )  # overheads are found by name, but a plan stores exchanges
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    make_plan(profile, network, allow).save(path)
    plan, plain = Plan.load(path), predict(profile, network, Schedule.of(profile))
    again = plain if plan.nothing else predict(profile, network, as_schedule(plan))
    assert (plan.plain_s, plan.compute_s) == (plain.iteration_s, profile.step_s)
    assert plan.iteration_s == pytest.approx(again.iteration_s, rel=1e-9)
    assert plan.low_s <= plan.iteration_s <= plan.high_s
    first_s = max(profile.gradients[place].ready_s for place in again.schedule.buckets[0])
    assert plan.exchange_s == pytest.approx(max(again.timeline.end_s.values()) - first_s, rel=1e-9)


@given(profile=models(4), network=clusters(), allow=sets)
@law
def test_to_do_nothing_is_the_first_alternative_and_is_chosen_where_little_is_gained(
    profile: Profile, network: Network, allow: tuple[str, ...]
) -> None:
    plan, found = make_plan(profile, network, allow), search(profile, network, allow)
    nothing, *others = plan.alternatives
    assert nothing.name.startswith("do nothing")
    assert (nothing.iteration_s, nothing.lossless) == (plan.plain_s, True)
    assert [one.iteration_s for one in others] == sorted(one.iteration_s for one in others)
    assert len({one.name for one in plan.alternatives}) == len(plan.alternatives)
    assert found.best.iteration_s <= found.plain.iteration_s
    assert plan.nothing == found.nothing == (found.best.iteration_s > (1 - LEAST_GAIN) * plan.plain_s)
    assert plan.iteration_s == (plan.plain_s if plan.nothing else found.best.iteration_s)
    assert milliseconds_text(plan.plain_s) in plan.reason
    assert plan.nothing or milliseconds_text(plan.iteration_s) in plan.reason


# --- keeping plain DDP ----------------------------------------------------------------------------------------------


@given(profile=models(8, "float32", "bfloat16"), allow=sets)
@law
def test_with_one_rank_plain_ddp_is_kept(profile: Profile, allow: tuple[str, ...]) -> None:
    plan = make_plan(profile, made_up.network().with_hosts(1), allow)
    assert (plan.nothing, plan.lanes, plan.caps) == (True, 1, ())
    assert plan.iteration_s == plan.plain_s == pytest.approx(profile.step_s)


@pytest.mark.parametrize(
    ("profile", "network"),
    [
        (made_up.profile([100_000]), made_up.network()),
        (made_up.profile(), made_up.network(mbit=1e6, startup_s=1e-7)),
        (made_up.profile([1000] * 3, backward_s=10.0), made_up.network(mbit=100.0)),
    ],
    ids=["one gradient", "links that cost nothing", "computation that hides everything"],
)
def test_plain_ddp_is_kept_if_nothing_helps(profile: Profile, network: Network) -> None:
    plan = make_plan(profile, network)
    assert plan.nothing
    assert plan.iteration_s == plan.plain_s == plan.alternatives[0].iteration_s
    assert all(one.iteration_s > (1 - LEAST_GAIN) * plan.plain_s for one in plan.alternatives)


def test_plain_ddp_is_predicted_with_the_models_own_caps() -> None:
    """If DDP's own buckets are good already, a plan does not help."""
    profile, network = made_up.profile(), made_up.network()
    plan = make_plan(profile, network)
    assert not plan.nothing
    found = search(profile, network, caps=plan.caps)
    assert found.plain.schedule.buckets == filled(profile.gradients, plan.caps)
    assert search(profile, network).plain.schedule.buckets == ddp_buckets(profile.gradients)
    tuned = make_plan(profile, network, caps=plan.caps)
    assert tuned.nothing or plan.lanes > 1
    assert tuned.plain_s == predict(profile, network, Schedule("own", places_in(plan))).iteration_s


# --- lossy exchanges ------------------------------------------------------------------------------------------------


def lossy_in(exchange: Exchange) -> str:
    """Return the entry of `allow` that an exchange needs."""
    crossing = exchange.across if isinstance(exchange, Hierarchical) else exchange
    if isinstance(crossing, Dense):
        return {"fp32": "", "bf16": "bf16", "fp16": "fp16"}[crossing.wire]
    assert isinstance(crossing, OkTopk)
    return "sparse"


@given(profile=models(5), network=clusters(), allow=sets)
@law
def test_lossy_exchanges_are_used_only_if_allowed(profile: Profile, network: Network, allow: tuple[str, ...]) -> None:
    plan = make_plan(profile, network, allow)
    assert {lossy_in(exchange) for exchange in plan.exchanges} <= {"", *allow}
    lossless = make_plan(profile, network)
    assert lossless.lossless
    assert all(one.lossless for one in lossless.alternatives)
    assert all(isinstance(one, Dense | Hierarchical) for one in lossless.exchanges)


@pytest.mark.parametrize("hosts", [(0, 1, 2, 3), (0, 0, 1, 1)], ids=["flat", "leveled"])
@pytest.mark.parametrize("kind", EVERYTHING)
def test_what_is_allowed_is_used_where_links_are_slow(kind: str, hosts: tuple[int, ...]) -> None:
    profile, network = made_up.profile(), made_up.network(hosts, mbit=50.0)
    without, plan = make_plan(profile, network), make_plan(profile, network, (kind,))
    assert {lossy_in(exchange) for exchange in plan.exchanges} == {kind}
    assert not plan.lossless and without.lossless
    share = {"bf16": 0.8, "fp16": 0.9, "sparse": 0.2}[kind]  # there is no hierarchical exchange with fp16
    assert plan.iteration_s < share * without.iteration_s
    assert any(not one.lossless for one in plan.alternatives)


def test_what_is_allowed_is_not_used_where_links_are_fast() -> None:
    """Two collectives and a cast take longer than the bytes that they save."""
    work = {"bf16": Work(fixed_s=1e-3, s_per_byte=1e-8)}
    overheads = Overheads(copy_in_s_per_byte=0.0, copy_out_s_per_byte=0.0, hook_s=0.0, work=work)
    profile = msgspec.structs.replace(made_up.profile([1_000_000] * 10), overheads=overheads)
    plan = make_plan(profile, made_up.network(mbit=20_000.0), ("bf16",))
    assert not plan.nothing
    assert plan.lossless


@pytest.mark.parametrize(
    ("hosts", "leveled"),
    [((0,), False), ((0, 0), False), ((0, 1, 2, 3), False), ((0, 0, 1, 1), True), ((0, 1, 1), True)],
)
def test_hierarchies_are_offered_only_where_hosts_have_several_ranks(hosts: tuple[int, ...], leveled: bool) -> None:
    network = made_up.network(hosts) if len(hosts) > 1 else made_up.network().with_hosts(1)
    flat = {"dense", "bf16", "fp16", "int8", "int4", "int3", "oktopk"}
    hierarchical = {"hierarchical", "hierarchical+bf16", "hierarchical+int4", "hierarchical+oktopk"}
    assert set(options(network)) == ({"dense", "hierarchical"} if leveled else {"dense"})
    allow = (*EVERYTHING, "int8", "int4", "int3")
    assert set(options(network, allow)) == (flat | hierarchical if leveled else flat)
    assert all(exchange.lossless for exchange in options(network).values())


def test_hierarchies_are_offered_where_hosts_are_in_racks_and_their_collectives_were_measured() -> None:
    racks = made_up.network(rack_of_host=(0, 0, 1, 1), trunk_mbit=100.0)
    assert set(options(racks)) == {"dense", "hierarchical"}
    gentle = tuple(each for each in racks.collectives if each.kind in ("all_reduce", "broadcast"))
    assert set(options(msgspec.structs.replace(racks, collectives=gentle))) == {"dense"}
    assert set(options(made_up.network(rack_of_host=(0, 1, 2, 3), trunk_mbit=100.0))) == {"dense"}


def test_hosts_of_several_ranks_on_slow_links_are_summed_inside_first() -> None:
    """Ranks are numbered round-robin over hosts, so a flat ring would use every uplink twice."""
    hosts = (0, 1, 0, 1, 0, 1, 0, 1)
    profile, network = made_up.profile([2_000_000] * 4), made_up.network(hosts, mbit=200.0, startup_s=1e-4)
    plan = make_plan(profile, network)
    assert plan.lossless
    climbing = [exchange for exchange in plan.exchanges if isinstance(exchange, Hierarchical)]
    assert len(climbing) == len(plan.buckets) > 0
    assert all(
        exchange.shape != "auto" for exchange in climbing
    )  # the plan stores the shape that it chose for these links
    assert any(exchange.chunks is not None and exchange.chunks > 1 for exchange in climbing)
    assert predict(profile, network, as_schedule(plan)).iteration_s == pytest.approx(plan.iteration_s, rel=1e-9)


def test_what_may_be_allowed_is_checked_and_put_in_order() -> None:
    assert check_allowed(()) == ()
    assert check_allowed(["sparse", "bf16", "sparse"]) == ("bf16", "sparse")
    with pytest.raises(UsageError, match="allow='fp8': must be one of bf16, fp16, int8, int4, int3, sparse"):
        check_allowed(("bf16", "fp8"))
    with pytest.raises(UsageError, match=r"allow='bf16': pass a tuple of names, like \('bf16',\)"):
        check_allowed("bf16")
    with pytest.raises(UsageError, match="allow='oktopk'"):
        make_plan(made_up.profile(), made_up.network(), ("oktopk",))


# --- the published planners -----------------------------------------------------------------------------------------


def test_published_planners_have_their_lanes_and_fuse_as_they_do() -> None:
    profile = made_up.profile([1000] * 10, backward_s=0.04)  # a gradient is ready every 4 ms
    apart = tuple((place,) for place in range(10))
    for startup_s, mgwfbp, asc in (
        (1e-4, apart, apart),
        (5e-3, (tuple(range(10)),), None),  # waiting is worth it for mgwfbp; asc never waits
        (0.1, (tuple(range(10)),), ((0,), tuple(range(1, 10)))),
    ):
        network = made_up.network(mbit=10_000.0, startup_s=startup_s)
        assert named(profile, network, "wfbp").buckets == apart
        assert named(profile, network, "mgwfbp").buckets == mgwfbp
        assert asc is None or named(profile, network, "asc").buckets == asc
    lanes = {name: named(profile, network, name).lanes for name in ("wfbp", "mgwfbp", "asc")}
    assert lanes == {"wfbp": 1, "mgwfbp": 1, "asc": 2}


# --- DDP's caps -----------------------------------------------------------------------------------------------------


@given(
    profile=models(12, "float32", "float64", "bfloat16"), caps=st.lists(st.integers(1, 10**6), min_size=1, max_size=4)
)
def test_buckets_are_closed_when_they_reach_their_cap_and_not_before(profile: Profile, caps: list[int]) -> None:
    buckets = filled(profile.gradients, caps)
    assert sorted(place for places in buckets for place in places) == list(range(len(profile.gradients)))
    for dtype in {one.dtype for one in profile.gradients}:
        mine = [places for places in buckets if profile.gradients[places[0]].dtype == dtype]
        of_it = [place for place, one in enumerate(profile.gradients) if one.dtype == dtype]
        assert [place for places in mine for place in places] == of_it  # in order, and of one dtype
        for number, places in enumerate(mine):
            sizes = [profile.gradients[place].bytes for place in places]
            cap = caps[min(number, len(caps) - 1)]
            assert sum(sizes[:-1]) < cap
            assert sum(sizes) >= cap or number == len(mine) - 1


@given(profile=models(12), data=st.data())
def test_caps_of_any_layout_give_that_layout(profile: Profile, data: st.DataObject) -> None:
    count = len(profile.gradients)
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, count - 1)))) - {count})
    buckets = tuple(tuple(range(start, end)) for start, end in itertools.pairwise([0, *cuts, count]))
    caps = caps_of(profile.gradients, buckets)
    assert caps == tuple(sum(profile.gradients[place].bytes for place in places) for places in buckets)
    assert filled(profile.gradients, caps) == buckets


def test_of_several_types_caps_are_those_of_the_type_with_most_bytes() -> None:
    even = made_up.profile([100] * 6).gradients
    mixed = [of_type(one, dtype) for one, dtype in zip(even, ("float64", "float32") * 3, strict=True)]
    assert caps_of(mixed, [(0, 2), (1,), (4,), (3, 5)]) == (1600, 800)
    assert filled(mixed, (1600, 800)) == ((0, 2), (4,), (1, 3, 5))


def test_ddps_own_caps_begin_anew_with_each_type() -> None:
    half = MIB // 8  # elements in half a MiB
    even = made_up.profile([half] * 8).gradients
    mixed = [*even[:4], *(of_type(one, "float64") for one in even[4:])]
    assert ddp_buckets(mixed) == ((0, 1), (4,), (2, 3), (5, 6, 7))
    assert ddp_buckets(mixed, 1.0) == ((0, 1), (2, 3), (4,), (5,), (6,), (7,))


# --- determinism and effort -----------------------------------------------------------------------------------------


@given(profile=models(14, "float32", "bfloat16"), network=clusters(), allow=sets)
@few
def test_the_same_model_and_links_give_the_same_plan(
    profile: Profile, network: Network, allow: tuple[str, ...]
) -> None:
    again = msgspec.json.decode(msgspec.json.encode(network), type=Network)  # without cached values
    assert make_plan(profile, network, allow) == make_plan(profile, again, tuple(reversed(allow)))


def test_another_process_makes_the_same_plan(tmp_path: Path) -> None:
    """Another process has other string hashes."""
    profile, network = made_up.profile([7_000, 90_000] * 8), made_up.network((0, 0, 1, 1), mbit=100.0, in_flight=2)
    profile.save(tmp_path / "profile.json")
    network.save(tmp_path / "network.json")
    program = (
        "from syncline.records.network import Network; from syncline.records.profile import Profile\n"
        "from syncline.plan.make import make_plan\n"
        f"plan = make_plan(Profile.load('profile.json'), Network.load('network.json'), {EVERYTHING})\n"
        "plan.save('plan.json')\n"
    )
    seed = "1" if os.environ.get("PYTHONHASHSEED") == "2" else "2"
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, check=True, timeout=100)
    assert Plan.load(tmp_path / "plan.json") == make_plan(profile, network, EVERYTHING)


def test_the_optimum_of_a_thousand_gradients_asks_for_costs_once_per_gradient() -> None:
    asked: list[int] = []

    def cost_s(nbytes: fusion.Floats) -> fusion.Floats:
        asked.append(len(nbytes))
        return 1e-3 + 1e-9 * nbytes

    sizes = fusion.optimal(fusion.Gradients(np.linspace(0, 0.1, 1000), np.full(1000, 4e4), cost_s))
    assert sum(sizes) == 1000
    assert len(asked) <= 1000
    assert sum(asked) <= 1000 * 1001 / 2


@pytest.mark.parametrize(
    ("hosts", "allow", "most"),
    [((0, 1, 2, 3), (), 350), ((0, 0, 1, 1), EVERYTHING, 450)],
    ids=["lossless", "everything"],
)
def test_a_thousand_gradients_take_a_bounded_number_of_simulations(
    monkeypatch: pytest.MonkeyPatch, hosts: Sequence[int], allow: tuple[str, ...], most: int
) -> None:
    simulated: list[Schedule] = []

    def counted(profile: Profile, network: Network, schedule: Schedule, **rest: Any) -> Any:
        simulated.append(schedule)
        return predict(profile, network, schedule, **rest)

    monkeypatch.setattr(module, "predict", counted)
    profile, network = made_up.profile([1000, 2000] * 500), made_up.network(hosts)
    plan = make_plan(profile, network, allow)
    assert 20 < len(simulated) <= most
    assert sum(len(one.buckets) for one in simulated) <= 40_000
    assert sum(len(bucket.parameters) for bucket in plan.buckets) == 1000
    assert plan.iteration_s < 0.98 * plan.plain_s
    assert filled(profile.gradients, plan.caps) == places_in(plan)
