"""The byte table against the interface counters of emulated hosts: what keeps every counted figure honest."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from syncline.cluster import ClusterSpec, Rank, launch
from syncline.cluster.isolation import why_not_shaped
from syncline.engine.comm import LaneGroups
from syncline.exchange import EXCHANGES, Layout, wire

NUMEL = 300_000
REPEATS = 3


@pytest.fixture(scope="module")
def on_the_wire() -> list[dict[str, Any]]:
    """Per rank: what its host's interface sent, and what was counted, for every collective and exchange."""
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
        sent, counted = links.sent_bytes(), sum(groups.counter.sent_bytes.values())
        for _ in range(REPEATS):
            work = call()
            if work is not None:
                work.wait()
        dist.barrier()
        seen[name] = [links.sent_bytes() - sent, sum(groups.counter.sent_bytes.values()) - counted]
    return seen


@pytest.mark.parametrize("name", [*wire.KINDS, *(f"exchange {name}" for name in EXCHANGES)])
def test_counted_bytes_are_what_the_busiest_interface_sent(on_the_wire: list[dict[str, Any]], name: str) -> None:
    interface = max(rank[name][0] for rank in on_the_wire)
    counted = max(rank[name][1] for rank in on_the_wire)
    assert counted <= interface <= 1.05 * counted, f"{name}: interface {interface}, counted {counted}"


def test_one_rank_sends_nothing() -> None:
    assert {kind: wire.sent_bytes(kind, 1000, 4, 1) for kind in wire.KINDS} == dict.fromkeys(wire.KINDS, 0)
