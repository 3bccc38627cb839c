"""Network files: loading, saving and validation, and the costs that a network computes."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from made_up import RICH_NETWORK, collective, network, profile
from made_up import link as made_link
from syncline.errors import UsageError
from syncline.exchange import wire
from syncline.files import FileError
from syncline.measure.assumed_network import assumed_network
from syncline.records.network import Network

loose = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
Place = tuple[str | int, ...]
TREE = json.loads(json.dumps(msgspec.to_builtins(RICH_NETWORK)))


def places(tree: Any, so_far: Place = ()) -> list[Place]:
    """Yield the path to every value of a JSON tree, including inner nodes."""
    branches = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    found = [so_far] if so_far else []
    return found + [place for key, branch in branches for place in places(branch, (*so_far, key))]


PLACES = places(TREE)
REQUIRED = [
    place
    for place in PLACES
    if place[-1] in ("schema", "backend", "device", "host_of_rank", "rack_of_host", "links", "collectives", "in_flight")
    or (len(place) == 3 and place[-1] in ("name", "bytes_per_s", "kind", "ranks", "startup_s", "serial_s", "slowdown"))
    or (len(place) == 5 and place[-1] in ("median_s", "repeats"))
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "network.json"


def parent_of(tree: Any, place: Place) -> Any:
    for key in place[:-1]:
        tree = tree[key]
    return tree


def edited(path: Path, place: Place, value: Any) -> Path:
    """Write the valid file with one value changed at any depth."""
    tree = json.loads(json.dumps(TREE))
    parent_of(tree, place)[place[-1]] = value
    path.write_text(json.dumps(tree), encoding="utf-8")
    return path


def named(place: Place) -> str:
    """Format a path as errors do: `("links", 0, "name")` → `links[0].name`."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in place).lstrip(".")


def assert_loads_or_is_refused_in_one_line(path: Path) -> None:
    try:
        Network.load(path)
    except FileError as error:
        assert str(error).startswith(f"{path}: ")
        assert "\n" not in str(error)


def test_a_saved_network_loads_as_itself(path: Path) -> None:
    for one in (RICH_NETWORK, network(), assumed_network(3, 2, 10**10)):
        one.save(path)
        assert Network.load(path) == one


def test_using_a_network_does_not_change_its_file(path: Path) -> None:
    RICH_NETWORK.loads("all_reduce", 1000, 4)
    RICH_NETWORK.save(path)
    assert json.loads(path.read_text()) == TREE


@pytest.mark.parametrize(
    ("place", "value", "expected"),
    [
        (("schema",), 2, r"schema: is 2, and this release reads up to 1; upgrade syncline"),
        (("schema",), 0, r"schema: is 0, and this release reads 1"),
        (("backend",), "mpi", r"backend: must be one of gloo, nccl"),
        (("device",), "abacus", r"device: must be one of cpu, cuda"),
        (("host_of_rank",), [0, 0, 1, 3], r"host_of_rank: must name every host of rack_of_host"),
        (("host_of_rank",), [0, 0, 1, 1], r"host_of_rank: must name every host"),
        (("host_of_rank",), [], r"host_of_rank: must name every host"),
        (("rack_of_host",), [0, 0, 2], r"rack_of_host: racks must be numbered from 0, without gaps"),
        (("rack_of_host",), [1, 1, 2], r"rack_of_host: racks must be numbered"),
        (("rack_of_host",), [], r"host_of_rank: must name every host"),
        (("in_flight",), 0, r"in_flight: must be at least 1"),
        (("links", 0, "name"), "moon", r"links\[0\]\.name: must be one of local, host, rack"),
        (("links", 0, "name"), "host", r"links: host appears twice"),
        (("links", 1, "bytes_per_s"), 0, r"links\[1\]\.bytes_per_s: must be greater than 0"),
        (("links", 1, "bytes_per_s"), 1e3, r"links\[1\]\.low_bytes_per_s: is 112500000\.0, above bytes_per_s"),
        (("links", 1, "bytes_per_s"), 1e12, r"links\[1\]\.high_bytes_per_s: is 137500000\.\d+, below bytes_per_s"),
        (("links", 1, "burst_bytes"), -1, r"links\[1\]\.burst_bytes: must be at least 0"),
        (("links", 1, "nominal_bps"), 0, r"links\[1\]\.nominal_bps: must be at least 1"),
        (("collectives", 0, "kind"), "gossip", r"collectives\[0\]\.kind: must be one of all_reduce, "),
        (("collectives", 1, "kind"), "all_reduce", r"collectives: all_reduce at level world appears twice"),
        (("collectives", 0, "ranks"), 8, r"collectives\[0\]\.ranks: is 8, but the network has 4"),
        (("collectives", 0, "ranks"), 1, r"collectives\[0\]\.ranks: must be at least 2"),
        (("collectives", 2, "ranks"), 3, r"collectives\[2\]\.ranks: is 3, but the network has 2 at level local"),
        (("collectives", 3, "ranks"), 4, r"collectives\[3\]\.ranks: is 4, but the network has 3 at level hosts"),
        (("collectives", 0, "level"), "galaxy", r"collectives\[0\]\.level: must be one of world, hosts, local"),
        (("collectives", 0, "startup_s"), -1.0, r"collectives\[0\]\.startup_s: must be at least 0"),
        (("collectives", 0, "startup_low_s"), 1.0, r"collectives\[0\]\.startup_low_s: is 1\.0, above startup_s"),
        (("collectives", 0, "startup_high_s"), 0.0, r"collectives\[0\]\.startup_high_s: is 0\.0, below startup_s"),
        (("collectives", 0, "load"), 0.0, r"collectives\[0\]\.load: must be greater than 0"),
        (("collectives", 0, "breakpoint_bytes"), -1, r"collectives\[0\]\.breakpoint_bytes: must be at least 0"),
        (
            ("collectives", 0, "points", 0, "median_s"),
            -1,
            r"collectives\[0\]\.points\[0\]\.median_s: must be at least 0",
        ),
        (("overlap", 0, "slowdown"), 0.9, r"overlap\[0\]\.slowdown: must be between 1 and streams \(2\), not 0\.9"),
        (("overlap", 0, "slowdown"), 2.1, r"overlap\[0\]\.slowdown: must be between 1 and streams"),
        (("overlap", 0, "crowding"), 0.9, r"overlap\[0\]\.crowding: must be at least 1"),
        (("collectives", 1, "switches", 0, "from_bytes"), -1, r"collectives\[1\]\.switches\[0\]\.from_bytes: must be"),
        (
            ("collectives", 1, "switches", 0, "from_bytes"),
            500_000,
            r"collectives\[1\]\.switches: must be sorted by from_bytes",
        ),
        (("overlap", 0, "streams"), 4, r"overlap: 4 streams appears twice"),
        (("overlap", 0, "streams"), 0, r"overlap\[0\]\.streams: must be at least 1"),
        (("startups", 0, "ranks"), 3, r"startups: 3 ranks appears twice"),
        (("startups", 0, "seconds"), -1, r"startups\[0\]\.seconds: must be at least 0"),
        (("matrix_bytes_per_s",), [[0.0]], r"matrix_bytes_per_s: must have a row and a column for each of the 3 hosts"),
        (("matrix_bytes_per_s", 1), [0.0, 1.0], r"matrix_bytes_per_s: must have a row and a column"),
        (("matrix_bytes_per_s", 1, 0), -1.0, r"matrix_bytes_per_s\[1\]\[0\]: must be at least 0"),
    ],
)
def test_contradictions_name_the_field(path: Path, place: Place, value: Any, expected: str) -> None:
    with pytest.raises(FileError, match=f"network.json: {expected}"):
        Network.load(edited(path, place, value))


@pytest.mark.parametrize("place", [place for place in PLACES if isinstance(parent_of(TREE, place)[place[-1]], float)])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_refused_in_every_field(path: Path, place: Place, value: float) -> None:
    with pytest.raises(FileError) as refused:
        Network.load(edited(path, place, value))
    assert f"{named(place)}: must be a finite number" in str(refused.value)


@pytest.mark.parametrize("place", [place for place in PLACES if isinstance(parent_of(TREE, place)[place[-1]], dict)])
def test_an_unknown_key_is_named_at_any_depth(path: Path, place: Place) -> None:
    with pytest.raises(FileError) as refused:
        Network.load(edited(path, (*place, "colour"), "red"))
    assert f"{named(place)}.colour: is not a known key" in str(refused.value)


@pytest.mark.parametrize("place", REQUIRED, ids=named)
def test_a_missing_key_is_named(path: Path, place: Place) -> None:
    tree = json.loads(json.dumps(TREE))
    del parent_of(tree, place)[place[-1]]
    path.write_text(json.dumps(tree), encoding="utf-8")
    with pytest.raises(FileError) as refused:
        Network.load(path)
    assert f"{named(place)}: is missing" in str(refused.value)


@pytest.mark.parametrize("key", ["links", "name", "startup_s", "median_s", "slowdown"])
def test_a_repeated_key_is_named(path: Path, key: str) -> None:
    text = json.dumps(TREE).replace(f'"{key}":', f'"{key}": 1, "{key}":', 1)
    path.write_text(text, encoding="utf-8")
    with pytest.raises(FileError, match=f"{key}: appears more than once; keep one"):
        Network.load(path)


odd_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.just(10**400),
    st.floats(),
    st.text(max_size=4),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@given(place=st.sampled_from(PLACES), value=odd_values)
@loose
def test_any_edit_loads_or_is_refused_in_one_line(path: Path, place: Place, value: Any) -> None:
    assert_loads_or_is_refused_in_one_line(edited(path, place, value))


@pytest.mark.parametrize(
    "place", [place for place in PLACES if type(parent_of(TREE, place)[place[-1]]) in (int, float)]
)
def test_a_huge_number_is_refused_in_one_line(path: Path, place: Place) -> None:
    with pytest.raises(FileError) as refused:
        Network.load(edited(path, place, 10**400))
    assert "\n" not in str(refused.value)


@given(data=st.data())
@loose
def test_a_truncated_network_is_refused(path: Path, data: st.DataObject) -> None:
    RICH_NETWORK.save(path)
    text = path.read_text(encoding="utf-8").rstrip()
    path.write_text(text[: data.draw(st.integers(0, len(text) - 1))], encoding="utf-8")
    with pytest.raises(FileError):
        Network.load(path)


@given(start=st.integers(0, 10**6), length=st.integers(0, 8), put=st.binary(max_size=8))
@loose
def test_any_damage_to_the_bytes_loads_or_is_refused_in_one_line(
    path: Path, start: int, length: int, put: bytes
) -> None:
    data = json.dumps(TREE).encode()
    start %= len(data)
    path.write_bytes(data[:start] + put + data[start + length :])
    assert_loads_or_is_refused_in_one_line(path)


def test_an_unmeasured_collective_costs_an_all_reduce_scaled_by_messages() -> None:
    found = RICH_NETWORK.collective("all_to_all")
    base = RICH_NETWORK.collective("all_reduce")
    assert found.startup_s == pytest.approx(base.startup_s * 3 / 6)
    assert found.serial_s == pytest.approx(base.serial_s * 3 / 6)
    assert (found.kind, found.ranks, found.points) == ("all_to_all", 4, ())


def test_a_level_that_was_not_measured_is_refused() -> None:
    with pytest.raises(UsageError, match="no figures for all_reduce at level hosts: probe it again"):
        network().collective("all_reduce", "hosts")
    with pytest.raises(UsageError, match="level galaxy is not known"):
        RICH_NETWORK.loads("all_reduce", 1000, 4, "galaxy")


def test_loads_are_the_bytes_through_each_kind_of_link() -> None:
    whole = RICH_NETWORK.loads("all_reduce", 1000, 4)
    assert whole == {
        "host": wire.uplink_bytes("all_reduce", 1000, 4, (0, 0, 1, 2)),
        "rack": wire.uplink_bytes("all_reduce", 1000, 4, (0, 0, 0, 1)),
    }
    assert RICH_NETWORK.loads("all_reduce", 1000, 4, "hosts") == {
        "host": wire.uplink_bytes("all_reduce", 1000, 4, (0, 1, 2)),
        "rack": wire.uplink_bytes("all_reduce", 1000, 4, (0, 0, 1)),
    }
    assert RICH_NETWORK.loads("all_reduce", 1000, 4, "local") == {"local": wire.sent_bytes("all_reduce", 1000, 4, 2)}
    assert RICH_NETWORK.without(link="rack").loads("all_reduce", 1000, 4) == {"host": whole["host"]}


def test_ranks_of_one_host_use_local_links_only() -> None:
    one = msgspec.structs.replace(network((0, 0, 0)), links=(made_link("local", 9000.0),))
    assert one.loads("all_reduce", 900, 4) == {"local": wire.sent_bytes("all_reduce", 900, 4, 3)}


def test_the_same_number_of_hosts_changes_nothing() -> None:
    assert RICH_NETWORK.with_hosts(3) == RICH_NETWORK
    assert network().with_hosts(4) == network()


@pytest.mark.parametrize("same_machine", [False, True])
@pytest.mark.parametrize("make", [network, lambda: RICH_NETWORK, lambda: assumed_network(4, 2, 10**9)])
def test_start_ups_never_shrink_with_more_hosts_and_stay_in_their_intervals(make: Any, same_machine: bool) -> None:
    counts = (2, 3, 4, 5, 8, 16, 64, 1024)
    moved = [make().with_hosts(count, same_machine=same_machine) for count in counts]
    for kind in wire.KINDS:
        found = [one.collective(kind) for one in moved]
        for few, many in itertools.pairwise(found):
            assert few.startup_s <= many.startup_s
            assert few.ranks <= many.ranks
        assert all(entry.startup_low_s <= entry.startup_s <= entry.startup_high_s for entry in found)
    assert [one.hosts for one in moved] == list(counts)


def test_start_ups_of_a_ring_grow_with_its_messages() -> None:
    grown = network((0, 1), startup_s=0.001).with_hosts(9)
    assert grown.collective("all_reduce").startup_s == pytest.approx(0.008)
    assert grown.collective("broadcast").startup_s == pytest.approx(0.004)


def test_on_one_machine_the_time_per_message_grows_as_measured() -> None:
    """Messages take 0.25 ms among two ranks (two messages) and 0.3 ms among three (four messages)."""
    grown = RICH_NETWORK.with_hosts(6, same_machine=True).collective("all_reduce").startup_s
    alone = RICH_NETWORK.with_hosts(6).collective("all_reduce").startup_s
    exponent = math.log(0.3 / 0.25) / math.log(3 / 2)
    assert grown == pytest.approx(alone * (6 / 4) ** exponent)


def test_new_hosts_have_the_most_common_number_of_ranks_and_fill_racks_as_before() -> None:
    grown = RICH_NETWORK.with_hosts(6)
    assert grown.host_of_rank == (0, 1, 2, 3, 4, 5)
    assert grown.rack_of_host == (0, 0, 1, 1, 2, 2)
    assert network((0, 0, 1, 1)).with_hosts(3).host_of_rank == (0, 0, 1, 1, 2, 2)
    assert network((0, 1, 0, 1)).with_hosts(3).host_of_rank == (0, 1, 2, 0, 1, 2)


def test_every_level_keeps_its_own_number_of_ranks() -> None:
    pairs = msgspec.structs.replace(
        network((0, 0, 1, 1)),
        collectives=(
            collective("all_reduce", 4, 0.002),
            collective("all_reduce", 2, 0.0002, level="local"),
            collective("all_reduce", 2, 0.001, level="hosts"),
        ),
    )
    grown = pairs.with_hosts(5)
    assert grown.collective("all_reduce").ranks == 10
    assert grown.collective("all_reduce", "local") == pairs.collective("all_reduce", "local")
    assert grown.collective("all_reduce", "hosts").ranks == 5
    assert grown.collective("all_reduce", "hosts").startup_s == pytest.approx(0.001 * 4)
    single = pairs.with_hosts(1)
    assert [(entry.level, entry.ranks) for entry in single.collectives] == [("world", 2), ("local", 2)]


def test_a_single_host_of_one_rank_has_no_collectives() -> None:
    alone = network().with_hosts(1)
    assert (alone.ranks, alone.collectives) == (1, ())


def test_one_host_cannot_be_scaled_to_several() -> None:
    inside = msgspec.structs.replace(network((0, 0)), links=(made_link("local", 9000.0),))
    with pytest.raises(UsageError, match="nothing is known of links between hosts: probe at least two"):
        inside.with_hosts(2)


def test_there_is_at_least_one_host() -> None:
    with pytest.raises(UsageError, match="hosts must be at least 1, not 0"):
        network().with_hosts(0)


def test_another_rate_scales_one_kind_of_link_and_keeps_the_share_it_loses() -> None:
    sold = RICH_NETWORK.with_nominal_rates(1_100_000_000, 600_000_000)
    faster = sold.with_rate(11_000_000_000)
    before, after = sold.link("host"), faster.link("host")
    assert before is not None and after is not None
    assert after.bytes_per_s == pytest.approx(10 * before.bytes_per_s)
    assert after.low_bytes_per_s == pytest.approx(10 * before.low_bytes_per_s)
    assert after.nominal_bps == 11_000_000_000
    assert faster.link("rack") == sold.link("rack")
    assert faster.collectives == sold.collectives


def test_the_nominal_rate_of_a_link_gives_its_measured_rate() -> None:
    sold = network().with_nominal_rates(1_050_000_000)
    again = sold.with_rate(1_050_000_000).link("host")
    assert again is not None
    assert again.bytes_per_s == pytest.approx(network().links[0].bytes_per_s)


def test_a_link_without_a_nominal_rate_uses_the_efficiency_of_ethernet() -> None:
    changed = network(mbit=123.0).with_rate(10_000_000_000).link("host")
    assert changed is not None
    assert changed.bytes_per_s == pytest.approx(10e9 / 8 * 1448 / 1538)


def test_a_missing_link_cannot_get_another_rate() -> None:
    with pytest.raises(UsageError, match="the network has no rack links: it has host"):
        network().with_rate(10**9, "rack")


def test_slowdowns_are_interpolated_and_grow_in_proportion_beyond_measurements() -> None:
    assert [RICH_NETWORK.slowdown(streams) for streams in (1, 2, 4)] == pytest.approx([1.0, 1.25, 2.5])
    assert 1.25 < RICH_NETWORK.slowdown(3) < 2.5
    assert RICH_NETWORK.slowdown(8) == pytest.approx(5.0)
    assert network().slowdown(3) == 3.0


def test_crowding_is_interpolated_and_constant_beyond_measurements() -> None:
    assert [RICH_NETWORK.crowding(streams) for streams in (1, 2, 4, 64)] == pytest.approx([1.0, 1.0, 1.5, 1.5])
    assert 1.0 < RICH_NETWORK.crowding(3) < 1.5
    assert network().crowding(3) == 1.0


def test_protocols_change_what_a_collective_takes_from_their_sizes_on() -> None:
    found = RICH_NETWORK.collective("broadcast")
    assert found.least_s(49_999) == pytest.approx(0.001 + 1e-10 * 49_999)
    assert found.least_s(50_000) == pytest.approx(0.002 + 1e-11 * 50_000)
    assert found.least_s(10**9) == pytest.approx(0.004)


@pytest.mark.parametrize("startup_s", [0.002, 0.0])
def test_bounds_are_the_ends_of_the_intervals(startup_s: float) -> None:
    first, *others = RICH_NETWORK.collectives
    first = msgspec.structs.replace(first, startup_s=startup_s, startup_low_s=startup_s / 2, startup_high_s=0.003)
    one = msgspec.structs.replace(RICH_NETWORK, collectives=(first, *others))
    worst, best = one.bound(high=True), one.bound(high=False)
    for entry, low, high in zip(one.collectives, best.collectives, worst.collectives, strict=True):
        assert (low.startup_s, high.startup_s) == pytest.approx((entry.startup_low_s, entry.startup_high_s))
    for link, fast, slow in zip(one.links, best.links, worst.links, strict=True):
        assert (fast.bytes_per_s, slow.bytes_per_s) == (link.high_bytes_per_s, link.low_bytes_per_s)


def test_assumed_links_are_marked_as_such() -> None:
    assumed = assumed_network(2, 4, 10**10)
    assert not assumed.measured
    assert assumed.how.startswith("assumed: ")
    assert assumed.host_of_rank == (0, 0, 0, 0, 1, 1, 1, 1)
    assert assumed_network(1, 1, 10**10).collectives == ()


def test_a_profile_instead_of_a_network_is_recognised(tmp_path: Path) -> None:
    path = tmp_path / "mixed-up.json"
    profile([1000]).save(path)
    with pytest.raises(
        FileError, match="is a profile, but another kind of file is needed here; were two files swapped"
    ):
        Network.load(path)


def test_a_factor_multiplies_the_measured_rate_whatever_the_nominal_one() -> None:
    for sold in (network(), network().with_nominal_rates(1_000_000_000)):
        before, after = sold.link("host"), sold.with_faster("host", 2.5).link("host")
        assert before is not None and after is not None
        assert after.bytes_per_s == pytest.approx(2.5 * before.bytes_per_s)
