"""Probing real collectives: the network is the same on every rank, close to the real links, and nothing leaks."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch.distributed as dist

from ddp_helpers import on_ranks, refusal
from syncline.cluster import ClusterSpec, Rank, launch, launch_outcomes, why_not_shaped
from syncline.cluster.links import burst_bytes
from syncline.errors import SynclineError
from syncline.exchange import wire
from syncline.measure.probe import probe
from syncline.records.network import WORLD, Network

RATE_BPS = 200_000_000
"""Low enough for the processors of a busy machine."""
needs_namespaces = pytest.mark.skipif(why_not_shaped() is not None, reason=f"no namespaces: {why_not_shaped()}")


@pytest.fixture(scope="module")
def probed() -> list[Network]:
    """Return the network that each rank of three hosts has measured."""

    def main(rank: Rank) -> Any:
        rank.init_process_group()
        seen: list[tuple[float, float]] = []
        found = probe(budget_s=3.0, on_progress=lambda done, of: seen.append((done, of)))
        assert all(0 <= done <= of == 3.0 for done, of in seen)
        assert bool(seen) == (rank.rank == 0)
        return msgspec.to_builtins(found)

    answers = launch(ClusterSpec(hosts=3, rate_bps=RATE_BPS), main, deadline_s=90.0)
    return [msgspec.convert(answer, Network) for answer in answers]


def test_every_rank_has_the_same_network(probed: list[Network]) -> None:
    assert probed[0] == probed[1] == probed[2]


def test_a_probed_network_survives_its_file(probed: list[Network], tmp_path: Path) -> None:
    probed[0].save(tmp_path / "network.json")
    assert Network.load(tmp_path / "network.json") == probed[0]


def test_every_collective_was_measured_at_several_sizes(probed: list[Network]) -> None:
    network = probed[0]
    assert [(entry.level, entry.kind) for entry in network.collectives] == [
        (WORLD, kind) for kind in (*wire.KINDS, wire.PACED)
    ]
    assert network.paced_bytes is not None
    for entry in network.collectives:
        sizes = [point.bytes for point in entry.points]
        assert len(sizes) >= 5 and sizes == sorted(set(sizes))
        assert sizes[-1] >= 100 * sizes[0]
        assert all(point.repeats >= 1 and point.median_s > 0 for point in entry.points)
        assert all(point.sent_bytes == wire.sent_bytes(entry.kind, point.bytes // 4, 4, 3) for point in entry.points)
        assert 0 < entry.startup_s < 0.1


def test_the_network_describes_its_measurement(probed: list[Network]) -> None:
    network = probed[0]
    assert (network.backend, network.device, network.measured, network.ranks) == ("gloo", "cpu", True, 3)
    assert [entry.streams for entry in network.overlap] == [2, 4]
    assert "torch" in network.how and network.where and network.date


@needs_namespaces
def test_emulated_hosts_are_distinguished_and_their_rates_are_measured(probed: list[Network]) -> None:
    network = probed[0]
    assert (network.host_of_rank, network.rack_of_host, network.one_machine) == ((0, 1, 2), (0, 0, 0), True)
    link = network.link("host")
    assert link is not None
    assert RATE_BPS / 2 < link.bytes_per_s * 8 < RATE_BPS * 2
    assert link.burst_bytes < 5 * burst_bytes(RATE_BPS)
    assert {entry.ranks for entry in network.startups} == {2, 3}
    for a, row in enumerate(network.matrix_bytes_per_s):
        for b, rate in enumerate(row):
            assert (rate > 0) == (a != b)


@needs_namespaces
def test_unequal_hosts_are_measured_at_every_level() -> None:
    def main(rank: Rank) -> Any:
        rank.init_process_group()
        return msgspec.to_builtins(probe(budget_s=0.5, kinds=("all_reduce", "all_gather")))

    spec = ClusterSpec(hosts=2, per_host=(3, 2), rate_bps=2_000_000_000)
    network = msgspec.convert(launch(spec, main, deadline_s=90.0)[0], Network)
    assert network.host_of_rank == (0, 0, 0, 1, 1)
    levels = {(entry.level, entry.ranks) for entry in network.collectives}
    assert levels == {(WORLD, 5), ("local", 3), ("hosts", 2)}
    assert {link.name for link in network.links} == {"local", "host"}
    for entry in network.collectives:
        assert network.loads(entry.kind, 10_000, 4, entry.level)


def test_repeated_probing_leaks_nothing() -> None:
    def main(rank: Rank) -> list[tuple[int, int]]:
        left = []
        for _ in range(2):
            probe(budget_s=0.3, kinds=("all_reduce",))
            gc.collect()
            groups: Any = dist.distributed_c10d._world.pg_map
            left.append((len(groups), len(list(Path("/proc/self/task").iterdir()))))
        return left

    for first, second in on_ranks(2, main):
        assert first[0] == second[0] == 1
        assert second[1] <= first[1]


def test_what_cannot_be_probed_is_refused_in_one_line() -> None:
    assert "probe needs a process group" in refusal(probe)

    def main(rank: Rank) -> list[str]:
        return [
            refusal(lambda: probe(budget_s=0.0)),
            refusal(lambda: probe(budget_s=float("nan"))),
            refusal(lambda: probe(kinds=("all_reduce", "gossip"))),
            refusal(lambda: probe(kinds=("broadcast",))),
        ]

    zero, nan, unknown, without = on_ranks(2, main)[0]
    assert zero == "budget_s must be greater than 0, not 0"
    assert nan == "budget_s must be greater than 0, not nan"
    assert unknown.startswith("no collective is called gossip; known: all_reduce")
    assert without.startswith("probe needs all_reduce")
    assert on_ranks(1, lambda rank: refusal(probe))[0].startswith("probe needs at least two ranks")


def test_a_rank_that_exits_stops_the_others_with_one_line() -> None:
    def main(rank: Rank) -> str:
        rank.init_process_group()
        if rank.rank == 1:
            threading.Timer(0.5, os._exit, [7]).start()
        return refusal(lambda: probe(budget_s=30.0), SynclineError)

    first, second = launch_outcomes(ClusterSpec(hosts=2), main, deadline_s=60.0, grace_s=30.0, shaped=False)
    assert second.error == "exited with 7 before it returned"
    assert first.error is None
    assert first.value.startswith("a collective failed while probing; has another rank ended?")


def test_different_budgets_on_ranks_are_refused() -> None:
    def main(rank: Rank) -> str:
        rank.init_process_group()
        return refusal(lambda: probe(budget_s=2.0 + rank.rank), SynclineError)

    answers = launch(ClusterSpec(hosts=2), main, deadline_s=60.0, shaped=False)
    assert all("budget_s" in answer for answer in answers), answers
