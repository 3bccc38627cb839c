"""The table of bytes per collective, compared with the interface counters of emulated hosts."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from syncline.cluster import ClusterSpec, Rank, launch
from syncline.cluster.isolation import why_not_shaped
from syncline.dist.comm import LaneGroups
from syncline.exchange import EXCHANGES, Layout, wire

NUMEL = 300_000
REPEATS = 3


@pytest.fixture(scope="module")
def on_the_wire() -> list[dict[str, Any]]:
    """Bytes that each host's interface sent, and bytes counted, for every collective and exchange."""
    if (reason := why_not_shaped()) is not None:
        pytest.skip(reason)
    return launch(ClusterSpec(hosts=4, rate_bps=2_000_000_000), _measure)


def _measure(rank: Rank) -> dict[str, Any]:
    from syncline.cluster import links

    rank.init_process_group()
    groups = LaneGroups.create(dist.group.WORLD, timedelta(seconds=60))
    comm = groups.comm
    whole = torch.zeros(NUMEL)
    part = torch.zeros(NUMEL // comm.size)
    calls = {
        "all_reduce": lambda: comm.all_reduce(whole),
        "all_to_all": lambda: comm.all_to_all(torch.zeros(NUMEL), whole),
        "all_gather": lambda: comm.all_gather(whole, part),
        "reduce": lambda: comm.reduce(whole, 1),
        "broadcast": lambda: comm.broadcast(whole, 1),
    }
    for name, make in EXCHANGES.items():
        exchange = make()
        state = exchange.prepare(Layout.flat(NUMEL), comm)

        def run(exchange: Any = exchange, state: Any = state) -> Any:
            return exchange.run(whole, state, comm)

        calls[f"exchange {name}"] = run
    seen = {}
    for name, call in calls.items():
        dist.barrier()
        sent, counted = links.sent_bytes(), sum(groups.comm.counter.sent_bytes.values())
        for _ in range(REPEATS):
            work = call()
            if work is not None:
                work.wait()
        dist.barrier()
        seen[name] = [links.sent_bytes() - sent, sum(groups.comm.counter.sent_bytes.values()) - counted]
    return seen


@pytest.mark.parametrize("name", [*wire.KINDS, *(f"exchange {name}" for name in EXCHANGES)])
def test_counted_bytes_are_what_the_busiest_interface_sent(on_the_wire: list[dict[str, Any]], name: str) -> None:
    interface = max(rank[name][0] for rank in on_the_wire)
    counted = max(rank[name][1] for rank in on_the_wire)
    # Headers grow with the bytes. Acknowledgements and barriers do not, and matter if little is sent.
    assert counted <= interface <= 1.05 * counted + 6_000 * REPEATS, f"{name}: interface {interface}, counted {counted}"


PLACEMENTS = {"host": (0, 0, 1, 1), "scrambled": (0, 1, 0, 1)}


@pytest.fixture(scope="module", params=PLACEMENTS)
def on_two_hosts(request: pytest.FixtureRequest) -> tuple[tuple[int, ...], list[dict[str, int]]]:
    """The hosts of four ranks, and the bytes that each interface sent for every collective."""
    if (reason := why_not_shaped()) is not None:
        pytest.skip(reason)
    spec = ClusterSpec(hosts=2, per_host=(2, 2), rate_bps=2_000_000_000, rank_order=request.param)
    return PLACEMENTS[request.param], launch(spec, _measure_uplinks)


def _measure_uplinks(rank: Rank) -> dict[str, int]:
    from syncline.cluster import links

    rank.init_process_group()
    comm = LaneGroups.create(dist.group.WORLD, timedelta(seconds=60)).comm
    whole, part = torch.zeros(NUMEL), torch.zeros(NUMEL // comm.size)
    calls = {
        "all_reduce": lambda: comm.all_reduce(whole),
        "all_to_all": lambda: comm.all_to_all(torch.zeros(NUMEL), whole),
        "all_gather": lambda: comm.all_gather(whole, part),
        "reduce": lambda: comm.reduce(whole, 0),
        "broadcast": lambda: comm.broadcast(whole, 0),
    }
    seen = {}
    for kind, call in calls.items():
        dist.barrier()
        before = links.sent_bytes()
        for _ in range(REPEATS):
            call().wait()
        dist.barrier()
        seen[kind] = links.sent_bytes() - before
    return seen


@pytest.mark.parametrize("kind", wire.KINDS)
def test_uplink_bytes_are_what_the_busiest_of_two_hosts_sent(
    on_two_hosts: tuple[tuple[int, ...], list[dict[str, int]]], kind: str
) -> None:
    """With two hosts, one receives what the other sends, so this checks both directions."""
    host_of_rank, seen = on_two_hosts
    interface = max(rank[kind] for rank in seen)
    expected = REPEATS * wire.uplink_bytes(kind, NUMEL, 4, host_of_rank)
    assert expected <= interface <= 1.05 * expected, f"{kind}: interface {interface}, expected {expected}"


@pytest.mark.parametrize(
    ("kind", "unit_of_rank", "chunks"),
    [
        # Each chunk leaves a host as often as the ring does.
        ("all_reduce", (0, 0, 1, 1), 2 * 3 * 1),
        ("all_reduce", (0, 1, 0, 1), 2 * 3 * 2),
        ("all_reduce", (0, 0, 0, 1), 2 * 3 * 1),
        ("all_reduce", (0, 1, 0, 2), 2 * 3 * 2),
        ("all_gather", (0, 0, 1, 1), 3 * 1),
        ("all_gather", (0, 1, 0, 1), 3 * 2),
        # One chunk from each rank of a host to each rank of other hosts.
        ("all_to_all", (0, 0, 1, 1), 2 * 2),
        ("all_to_all", (0, 1, 0, 1), 2 * 2),
        ("all_to_all", (0, 0, 0, 1), 3 * 1),
        ("all_to_all", (0, 1, 2, 3), 1 * 3),
        # The ring, and then one chunk from each rank of another host to the root's host.
        ("reduce", (0, 0, 1, 1), 3 * 1 + 2),
        ("reduce", (0, 1, 0, 1), 3 * 2 + 2),
        ("reduce", (0, 1, 2, 3), 3 * 1 + 3),
        ("reduce", (0, 0, 0, 1), 3 * 1 + 1),
        # 0 → 1, then 0 → 2 and 1 → 3. Each message has four chunks.
        ("broadcast", (0, 0, 1, 1), 2 * 4),
        ("broadcast", (0, 1, 0, 1), 1 * 4),
        ("broadcast", (0, 1, 2, 3), 2 * 4),
        ("broadcast", (0, 1, 1, 1), 2 * 4),
    ],
)
def test_uplink_bytes_by_hand(kind: str, unit_of_rank: tuple[int, ...], chunks: int) -> None:
    assert wire.uplink_bytes(kind, 1000, 4, unit_of_rank) == chunks * 250 * 4


def test_two_ranks_reduce_with_half_each_way_and_half_to_the_root() -> None:
    assert wire.uplink_bytes("reduce", 1000, 4, (0, 1)) == (1 + 1) * 500 * 4


@pytest.mark.parametrize(
    ("unit_of_rank", "crossings"), [((0, 0, 1, 1), 1), ((0, 1, 0, 1), 2), ((0, 1, 0, 2), 2), ((0, 1, 2, 3), 1)]
)
@pytest.mark.parametrize("kind", ["reduce", "broadcast"])
def test_nccl_sends_everything_once_along_a_chain(kind: str, unit_of_rank: tuple[int, ...], crossings: int) -> None:
    assert wire.uplink_bytes(kind, 1000, 4, unit_of_rank, "nccl") == crossings * 4000


@pytest.mark.parametrize("kind", wire.KINDS)
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_one_host_has_nothing_on_its_uplink(kind: str, backend: str) -> None:
    assert wire.uplink_bytes(kind, 1000, 4, (0, 0, 0, 0), backend) == 0


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("kind", ["all_reduce", "all_to_all", "all_gather"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 16])
def test_a_rank_alone_on_its_host_fills_the_uplink_with_what_it_sends(kind: str, ranks: int, backend: str) -> None:
    sent = wire.sent_bytes(kind, 1001, 2, ranks, backend)
    assert wire.uplink_bytes(kind, 1001, 2, range(ranks), backend) == sent


@pytest.mark.parametrize(
    ("kind", "backend", "expected"),
    [
        ("all_reduce", "gloo", (2, 4, 6, 14, 2046)),
        ("all_reduce", "nccl", (2, 4, 4, 6, 20)),
        ("all_to_all", "gloo", (1, 2, 3, 7, 1023)),
        ("all_gather", "nccl", (1, 2, 3, 7, 1023)),
        ("reduce", "gloo", (2, 3, 4, 8, 1024)),
        ("reduce", "nccl", (1, 2, 3, 7, 1023)),
        ("broadcast", "gloo", (1, 2, 2, 3, 10)),
        ("broadcast", "nccl", (1, 2, 3, 7, 1023)),
    ],
)
def test_messages_that_wait_for_each_other(kind: str, backend: str, expected: tuple[int, ...]) -> None:
    assert tuple(wire.hops(kind, ranks, backend) for ranks in (2, 3, 4, 8, 1024)) == expected
    assert wire.hops(kind, 1, backend) == 0


def test_one_rank_sends_nothing() -> None:
    assert {kind: wire.sent_bytes(kind, 1000, 4, 1) for kind in wire.KINDS} == dict.fromkeys(wire.KINDS, 0)
