"""Who sits where: hosts by what ranks say, racks by what links carry."""

from __future__ import annotations

import numpy as np
import pytest

from syncline.cluster import ClusterSpec, Rank, launch, why_not_shaped
from syncline.measure import topology

FAST, SLOW = 1e8, 4e7


def matrix(
    rack_of_host: tuple[int, ...], *, noise: float = 0.0, seed: int = 0, slow: float = SLOW
) -> list[list[float]]:
    """What every host sends to every other: fast inside a rack, slower between racks."""
    draw = np.random.default_rng(seed)
    hosts = len(rack_of_host)
    return [
        [
            0.0
            if a == b
            else (FAST if rack_of_host[a] == rack_of_host[b] else slow) * float(np.exp(noise * draw.standard_normal()))
            for b in range(hosts)
        ]
        for a in range(hosts)
    ]


@pytest.mark.parametrize(
    "racks",
    [(0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1, 1, 2, 2, 2), (0, 0, 0, 1), (0, 0, 1), (0,) * 16],
    ids=str,
)
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_racks_are_found_from_what_links_carry(racks: tuple[int, ...], noise: float) -> None:
    for seed in range(5):
        assert topology.racks(matrix(racks, noise=noise, seed=seed)) == racks


@pytest.mark.parametrize("hosts", [3, 4, 8])
def test_noise_alone_makes_no_racks(hosts: int) -> None:
    for seed in range(40):
        assert topology.racks(matrix((0,) * hosts, noise=0.05, seed=seed)) == (0,) * hosts


def test_trunks_that_hold_nobody_up_make_no_racks() -> None:
    assert topology.racks(matrix((0, 0, 1, 1), slow=0.9 * FAST)) == (0, 0, 0, 0)


def test_the_slower_direction_decides() -> None:
    one_way = matrix((0, 0, 1, 1))
    for a in (2, 3):
        for b in (0, 1):
            one_way[a][b] = FAST
    assert topology.racks(one_way) == (0, 0, 1, 1)


@pytest.mark.parametrize("hosts", [0, 1, 2])
def test_too_few_hosts_have_one_rack(hosts: int) -> None:
    assert topology.racks(matrix((0, 1)[:hosts])) == (0,) * hosts


def test_a_link_that_carried_nothing_says_nothing() -> None:
    broken = matrix((0, 0, 1, 1))
    broken[0][3] = 0.0
    assert topology.racks(broken) == (0, 0, 0, 0)


def test_identities_are_numbered_as_they_appear() -> None:
    assert topology.number(["b", "a", "b", "c", "a"]) == (0, 1, 0, 2, 1)
    assert topology.number([]) == ()


@pytest.mark.skipif(why_not_shaped() is not None, reason=f"no namespaces: {why_not_shaped()}")
@pytest.mark.parametrize(("order", "hosts"), [("host", (0, 0, 1, 1)), ("scrambled", (0, 1, 0, 1))])
def test_ranks_of_one_emulated_host_say_the_same_and_others_do_not(order: str, hosts: tuple[int, ...]) -> None:
    def main(rank: Rank) -> str:
        return topology.host_identity()

    said = launch(ClusterSpec(hosts=2, per_host=(2, 2), rank_order=order), main)
    assert topology.number(said) == hosts
    assert topology.host_identity() not in said


def test_processes_of_one_machine_are_on_one_host() -> None:
    def main(rank: Rank) -> str:
        return topology.host_identity()

    assert set(launch(ClusterSpec(hosts=2), main, shaped=False)) == {topology.host_identity()}
