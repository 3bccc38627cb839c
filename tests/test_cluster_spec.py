"""The specification of an emulated cluster: parsing, placement of ranks, and errors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.cluster import ClusterSpec, format_rate, parse_per_host, parse_rate
from syncline.errors import UsageError


@pytest.mark.parametrize(
    ("text", "rate_bps"),
    [("200mbit", 200_000_000), ("1gbit", 10**9), ("2.5Gbit", 2_500_000_000), ("100 kbit", 100_000), ("1000000", 10**6)],
)
def test_rates_are_read_with_decimal_units(text: str, rate_bps: int) -> None:
    assert parse_rate(text) == rate_bps


@pytest.mark.parametrize("text", ["", "fast", "-1gbit", "1gib", "1e9", "nan", "1 g b", "99kbit", "0gbit"])
def test_a_wrong_rate_is_refused_and_quoted(text: str) -> None:
    with pytest.raises(UsageError, match=f"rate {text!r}"):
        parse_rate(text)


@pytest.mark.parametrize("rate_bps", [100_000, 200_000_000, 10**9, 2_500_000_000, 25 * 10**9])
def test_a_rate_is_written_as_it_is_read(rate_bps: int) -> None:
    assert parse_rate(format_rate(rate_bps)) == rate_bps


def test_one_count_is_for_every_host_and_a_list_names_each() -> None:
    assert parse_per_host("2", 3) == (2, 2, 2)
    assert parse_per_host("3,1,2", 3) == (3, 1, 2)
    with pytest.raises(UsageError, match="--per-host 'two'"):
        parse_per_host("two", 3)


def test_ranks_are_numbered_host_by_host_like_torchrun() -> None:
    spec = ClusterSpec(hosts=3, per_host=(3, 1, 2))
    assert [spec.ranks_of(host) for host in range(3)] == [(0, 1, 2), (3,), (4, 5)]
    assert spec.world_size == 6


def test_scrambled_ranks_are_dealt_round_robin() -> None:
    spec = ClusterSpec(hosts=3, per_host=(3, 1, 2), rank_order="scrambled")
    assert [spec.ranks_of(host) for host in range(3)] == [(0, 3, 5), (1,), (2, 4)]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=12), st.sampled_from(["host", "scrambled"]))
def test_every_rank_is_on_one_host_and_every_host_has_its_count(counts: list[int], order: str) -> None:
    spec = ClusterSpec(hosts=len(counts), per_host=tuple(counts), rank_order=order)
    placed = [spec.ranks_of(host) for host in range(spec.hosts)]
    assert [len(ranks) for ranks in placed] == counts
    assert sorted(rank for ranks in placed for rank in ranks) == list(range(spec.world_size))


def test_hosts_fill_racks_in_order_and_evenly() -> None:
    spec = ClusterSpec(hosts=5, racks=2, trunk_rate_bps=10**8)
    assert [spec.rack_of(host) for host in range(5)] == [0, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hosts": 0}, "hosts is 0"),
        ({"hosts": 251}, "1 to 250"),
        ({"hosts": 2, "per_host": (1, 2, 3)}, "lists 3 hosts, but there are 2"),
        ({"hosts": 2, "per_host": (1, 0)}, "at least one"),
        ({"hosts": 2, "racks": 3, "trunk_rate_bps": 10**8}, "racks is 3"),
        ({"hosts": 4, "racks": 2}, "add --trunk-rate"),
        ({"hosts": 4, "trunk_rate_bps": 10**8}, "add --racks"),
        ({"rank_order": "random"}, "host or scrambled"),
        ({"device": "tpu"}, "cpu or cuda"),
    ],
)
def test_an_impossible_cluster_is_refused_when_it_is_described(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ClusterSpec(**fields)  # type: ignore[arg-type]


def test_a_description_fits_one_line() -> None:
    assert ClusterSpec(hosts=1).describe() == "1 host × 1 rank, 200mbit links"
    spec = ClusterSpec(hosts=4, per_host=(2, 1, 1, 1), rate_bps=10**9, racks=2, trunk_rate_bps=10**8)
    assert spec.describe() == "4 hosts × 2,1,1,1 ranks, 1gbit links, 2 racks behind 100mbit trunks"
