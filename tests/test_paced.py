"""The all-to-all in paced rounds, over real gloo: equal to gloo's own, for any rank count, size and type."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from ddp_helpers import on_ranks
from made_up import network
from syncline.cluster import ClusterSpec, Rank, launch_outcomes
from syncline.dist import paced
from syncline.dist.comm import GroupComm, LaneGroups
from syncline.dist.paced import PacedWork
from syncline.exchange import WORLD, Topology
from syncline.exchange.wire import NEVER_BYTES, PACED, PACED_FROM_BYTES, PACED_NCCL_MESSAGE_BYTES, protocol
from syncline.measure.network_fit import Readings
from syncline.predict.exchange_time import solo_s, topology_of

DTYPES = (torch.uint8, torch.int32, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64)


def _always_paced(ranks: int) -> Topology:
    return dataclasses.replace(Topology.flat(ranks), paced_bytes=0)


def _groups(rank: Rank, timeout_s: float = 30.0) -> LaneGroups:
    return LaneGroups.create(dist.group.WORLD, timedelta(seconds=timeout_s), _always_paced(rank.world_size))


@pytest.mark.parametrize(("ranks", "message_bytes"), [(3, 1_000_000), (4, 20_000), (5, 100_000)])
def test_paced_rounds_give_what_the_backend_gives(ranks: int, message_bytes: int) -> None:
    def main(rank: Rank) -> int:
        paced._MESSAGE_BYTES = message_bytes  # in this rank's process
        comm, compared = _groups(rank).comm, 0
        for dtype in DTYPES:
            for part in (1, 2, 777, 70_001):
                input = (torch.arange(part * ranks) * (rank.rank + 3) % 101).to(dtype)
                output, expected = torch.zeros_like(input), torch.zeros_like(input)
                work = comm.all_to_all(output, input)
                assert isinstance(work, PacedWork)
                work.wait()
                work.wait()  # a second time has no effect
                dist.all_to_all_single(expected, input)
                assert torch.equal(output, expected), (dtype, part)
                compared += 1
        return compared

    assert on_ranks(ranks, main) == [len(DTYPES) * 4] * ranks


def test_several_may_be_pending_among_other_collectives_and_end_in_any_common_order() -> None:
    ranks, count = 4, 5

    def main(rank: Rank) -> None:
        comm = _groups(rank).comm
        inputs = [torch.full((ranks * 5_000,), float(10 * number + rank.rank)) for number in range(count)]
        outputs = [torch.zeros_like(input) for input in inputs]
        works, sums = [], []
        for output, input in zip(outputs, inputs, strict=True):
            works.append(comm.all_to_all(output, input))
            sums.append(torch.ones(1000))
            comm.all_reduce(sums[-1]).wait()
        for number in (3, 0, 4, 1, 2):
            works[number].wait()
        for number, output in enumerate(outputs):
            assert output.view(ranks, -1).unique(dim=1).flatten().tolist() == [10.0 * number + r for r in range(ranks)]
        assert all(torch.equal(total, torch.full((1000,), float(ranks))) for total in sums)

    on_ranks(ranks, main)


def test_lanes_do_not_wait_for_each_other() -> None:
    """Half of the ranks start their lanes in the other order."""

    def main(rank: Rank) -> None:
        lanes = [_groups(rank).comm for _ in range(3)]
        failures: list[BaseException] = []

        def run(lane: int, comm: GroupComm) -> None:
            try:
                for turn in range(10):
                    input = torch.full((4 * 3_000,), float(100 * lane + 10 * turn + rank.rank))
                    output = torch.zeros_like(input)
                    comm.all_to_all(output, input).wait()
                    assert output[::3_000].tolist() == [100.0 * lane + 10 * turn + r for r in range(4)]
            except BaseException as error:  # noqa: BLE001 - raised again below
                failures.append(error)

        threads = [threading.Thread(target=run, args=pair) for pair in enumerate(lanes)]
        for thread in threads if rank.rank % 2 else reversed(threads):
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        if failures:
            raise failures[0]

    on_ranks(4, main)


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_ranks_that_wait_for_a_missing_one_raise_within_the_timeout(how: str) -> None:
    timeout_s = 4.0

    def main(rank: Rank) -> Any:
        rank.init_process_group(30.0)
        comm = _groups(rank, timeout_s).comm
        tensor = torch.zeros(4 * 50_000)
        comm.all_to_all(torch.zeros_like(tensor), tensor).wait()
        if rank.rank == 2 and how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        store = dist.distributed_c10d._get_default_store()
        if rank.rank == 2:
            store.wait(["raised 0", "raised 1", "raised 3"], timedelta(seconds=30))
            return None
        with pytest.raises(RuntimeError):
            for _ in range(2):
                comm.all_to_all(torch.zeros_like(tensor), tensor).wait()
        seconds = time.monotonic() - start
        store.set(f"raised {rank.rank}", "")
        return seconds

    outcomes = launch_outcomes(ClusterSpec(hosts=4), main, shaped=False, deadline_s=60.0, grace_s=20.0)
    for outcome in outcomes:
        if outcome.rank != 2:
            assert outcome.error is None, outcome.error
            assert outcome.value < 2 * timeout_s


def test_two_ranks_gather_in_rounds() -> None:
    def main(rank: Rank) -> bool:
        comm = LaneGroups.create(dist.group.WORLD, timedelta(seconds=30)).comm
        part = PACED_FROM_BYTES  # elements, so that a message is sent in several pieces
        output = torch.full((2 * part,), -1.0)
        output.view(2, -1)[comm.rank] = torch.arange(part) + comm.rank
        work = comm.all_gather(output, output.view(2, -1)[comm.rank])  # in place
        work.wait()
        assert torch.equal(output.view(2, -1), torch.arange(part).float() + torch.tensor([[0.0], [1.0]]))
        return isinstance(work, PacedWork)

    assert on_ranks(2, main) == [True, True]


def test_small_buffers_and_local_groups_keep_the_backends_own() -> None:
    cases = {
        (PACED_FROM_BYTES, 4, "world", "gloo", None): PACED,
        (PACED_FROM_BYTES - 1, 4, "world", "gloo", None): "all_to_all",
        (7, 4, "world", "gloo", 7): PACED,
        (PACED_FROM_BYTES, 2, "world", "gloo", None): PACED,
        (PACED_FROM_BYTES - 1, 2, "world", "gloo", None): "all_to_all",
        (2 * PACED_NCCL_MESSAGE_BYTES, 2, "world", "nccl", None): "all_to_all",
        (PACED_FROM_BYTES, 4, "local", "gloo", 7): "all_to_all",
        (4 * PACED_NCCL_MESSAGE_BYTES, 4, "world", "nccl", None): PACED,
        (4 * PACED_NCCL_MESSAGE_BYTES, 5, "world", "nccl", None): "all_to_all",
        (PACED_FROM_BYTES, 4, "world", "mpi", 7): "all_to_all",
    }
    assert {case: protocol("all_to_all", *case) for case in cases} == cases
    assert protocol("all_gather", PACED_FROM_BYTES, 4, "world", "gloo", None) == "all_gather"

    def main(rank: Rank) -> list[bool]:
        comm = LaneGroups.create(dist.group.WORLD, timedelta(seconds=30)).comm
        small, large = torch.zeros(3 * 1000), torch.zeros(3 * PACED_FROM_BYTES // 4)
        works = [comm.all_to_all(torch.zeros_like(tensor), tensor) for tensor in (small, large)]
        for work in works:
            work.wait()
        return [isinstance(work, PacedWork) for work in works]

    assert on_ranks(3, main) == [[False, True]] * 3


def _readings(native_s: list[float], paced_s: list[float]) -> Readings:
    readings = Readings("gloo", (0, 1, 2, 3))
    for kind, seconds in (("all_to_all", native_s), (PACED, paced_s)):
        for numel, value in zip((1_000, 16_000, 256_000, 4_096_000), seconds, strict=False):
            readings.add((WORLD, kind, numel), value)
    return readings


def test_the_threshold_is_between_the_last_size_that_loses_and_the_first_that_wins() -> None:
    assert _readings([1, 2, 30, 500], [5, 5, 20, 300])._paced_bytes() == 4 * 64_000
    one_lucky_size = _readings([1, 2, 30, 500], [5, 1.9, 40, 300])
    assert one_lucky_size._paced_bytes() == 4 * 1_024_000
    assert _readings([1, 2, 3, 4], [0.9, 1, 2, 3])._paced_bytes() == 4 * 1_000
    assert _readings([1, 2, 3, 4], [2, 3, 4, 5])._paced_bytes() == NEVER_BYTES
    assert _readings([1, 2, 3, 4], [])._paced_bytes() is None


def test_predictions_use_the_cost_of_the_protocol_that_runs() -> None:
    base = network((0, 1, 2, 3), mbit=200, startup_s=0.001)
    slow, fast = (next(entry for entry in base.collectives if entry.kind == "all_to_all") for _ in range(2))
    known = [entry for entry in base.collectives if entry.kind != "all_to_all"]
    known += [msgspec.structs.replace(slow, load=1.6), msgspec.structs.replace(fast.scaled(4, 4, 4), kind=PACED)]
    both = msgspec.structs.replace(base, collectives=tuple(known), paced_bytes=400_000)
    small, large = (both.protocol("all_to_all", size, topology_of(both).whole) for size in (399_999, 400_000))
    assert (small, large) == ("all_to_all", PACED)
    line_s = 3 / 4 * 8e6 / both.links[0].bytes_per_s
    assert solo_s(both, "all_to_all", 2_000_000, 4) == pytest.approx(line_s, rel=0.02)
    native = msgspec.structs.replace(both, paced_bytes=NEVER_BYTES)
    assert solo_s(native, "all_to_all", 2_000_000, 4) == pytest.approx(1.6 * line_s, rel=0.02)
    assert topology_of(both).paced_bytes == 400_000
    assert base.collective(PACED) == base.collective("all_to_all")  # files of earlier releases have no rounds


def test_a_failed_all_to_all_raises_whenever_it_is_waited_for() -> None:
    def rounds() -> Iterator[None]:
        yield
        raise RuntimeError("the peer is gone")

    work = PacedWork(rounds())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the peer is gone"):
            work.wait()
