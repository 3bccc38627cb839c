"""Ranks on emulated hosts: their environment, their results and their failures."""

from __future__ import annotations

import gc
import os
import re
import signal
import socket
import sys
import threading
import time
import warnings
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist

from syncline.cluster import ClusterSpec, Rank, RankFailedError, launch, launch_outcomes, why_not_shaped
from syncline.errors import ClusterError, UsageError

needs_namespaces = pytest.mark.skipif(why_not_shaped() is not None, reason=f"no namespaces: {why_not_shaped()}")
both_ways = pytest.mark.parametrize("shaped", [pytest.param(True, marks=needs_namespaces), False])
TWO = ClusterSpec(hosts=2)


def wait_for_ever() -> None:
    threading.Event().wait()


def open_descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


@both_ways
def test_ranks_reduce_over_the_cluster_and_return_in_rank_order(shaped: bool) -> None:
    spec = ClusterSpec(hosts=3, per_host=(2, 1, 1), rank_order="scrambled")

    def main(rank: Rank) -> list[float]:
        rank.init_process_group()
        total = torch.tensor([float(2**rank.rank)])
        dist.all_reduce(total)
        return [rank.rank, rank.host, rank.local_rank, total.item()]

    assert launch(spec, main, shaped=shaped) == [[0, 0, 0, 15], [1, 1, 0, 15], [2, 2, 0, 15], [3, 0, 1, 15]]


@both_ways
def test_a_rank_0_that_never_joins_is_reported_by_the_others(shaped: bool) -> None:
    def main(rank: Rank) -> None:
        if rank.rank == 0:
            wait_for_ever()
        rank.init_process_group(timeout_s=0.3)

    _, outcome = launch_outcomes(TWO, main, deadline_s=60, grace_s=0.1, shaped=shaped)
    assert outcome.error is not None and not outcome.traceback
    expected = r"ClusterError: rank 0 cannot be reached at 1[0-9.]+, port \d+, within 0.3 s: Connection refused"
    assert re.fullmatch(expected, outcome.error)


@both_ways
def test_ranks_have_the_variables_that_torch_distributed_reads(shaped: bool) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SYNCLINE_HOST")

    def main(rank: Rank) -> list[str]:
        dist.init_process_group("gloo")  # as a script does, from the environment
        dist.barrier()  # a rank that ends earlier would break the others' connections
        return [os.environ[name] for name in names]

    found = launch(ClusterSpec(hosts=2, per_host=(2, 1)), main, shaped=shaped)
    assert found == [["0", "3", "0", "2", "0"], ["1", "3", "1", "2", "0"], ["2", "3", "0", "1", "1"]]


@needs_namespaces
def test_every_host_has_its_own_name_address_and_network() -> None:
    spec = ClusterSpec(hosts=2, per_host=(2, 1))

    def main(rank: Rank) -> list[object]:
        names = {socket.gethostbyname(f"host{host}") for host in range(2)}
        return [socket.gethostname(), socket.gethostbyname(socket.gethostname()), len(names), network()]

    def network() -> int:
        return Path("/proc/self/ns/net").stat().st_ino

    first, second, third = launch(spec, main)
    assert first == second
    assert first[:3] == ["host0", "10.77.0.1", 2]
    assert third[:3] == ["host1", "10.77.0.2", 2]
    assert len({network(), first[3], third[3]}) == 3


@both_ways
def test_progress_arrives_while_ranks_run(shaped: bool) -> None:
    seen = []

    def main(rank: Rank) -> int:
        for step in range(3):
            rank.say({"step": step})
        return rank.rank

    assert launch(TWO, main, on_event=lambda rank, event: seen.append((rank, event["step"])), shaped=shaped) == [0, 1]
    assert sorted(seen) == [(rank, step) for rank in range(2) for step in range(3)]


def test_messages_of_several_threads_stay_whole() -> None:
    seen: list[str] = []
    letters = "abcd"

    def main(rank: Rank) -> None:
        threads = [threading.Thread(target=rank.say, args=(letter * 200_000,)) for letter in letters]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    launch(ClusterSpec(hosts=1), main, on_event=lambda _, event: seen.append(event), shaped=False)
    assert sorted(seen) == [letter * 200_000 for letter in letters]


@both_ways
def test_a_rank_that_raises_is_named_with_its_traceback(shaped: bool) -> None:
    def main(rank: Rank) -> None:
        if rank.rank == 1:
            raise LookupError("no such layer")

    with pytest.raises(RankFailedError, match="rank 1: LookupError: no such layer") as failure:
        launch(TWO, main, shaped=shaped)
    assert 'raise LookupError("no such layer")' in str(failure.value)
    assert [outcome.error for outcome in failure.value.outcomes] == [None, "LookupError: no such layer"]


def test_an_error_raised_on_purpose_comes_without_a_traceback() -> None:
    def main(rank: Rank) -> None:
        raise UsageError("density is 2: it must be at most 1")

    with pytest.raises(RankFailedError) as failure:
        launch(ClusterSpec(hosts=1), main, shaped=False)
    assert str(failure.value) == "rank 0: UsageError: density is 2: it must be at most 1"


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch may find a GPU")
def test_a_missing_gpu_is_one_line() -> None:
    with pytest.raises(RankFailedError, match=r"rank 0: UsageError: .* torch finds no GPU here: use cpu$"):
        launch(ClusterSpec(hosts=1, device="cuda"), lambda rank: str(rank.device), shaped=False)


@both_ways
def test_the_first_failure_ends_the_others_after_the_grace(shaped: bool) -> None:
    def main(rank: Rank) -> None:
        if rank.rank == 0:
            raise LookupError("gone")
        wait_for_ever()

    outcomes = launch_outcomes(TWO, main, deadline_s=60, grace_s=0.1, shaped=shaped)
    assert [outcome.error for outcome in outcomes] == ["LookupError: gone", "still running when another rank failed"]


@both_ways
def test_a_rank_that_hangs_is_ended_at_the_deadline(shaped: bool) -> None:
    def main(rank: Rank) -> str:
        if rank.rank == 1:
            wait_for_ever()
        return "done"

    outcomes = launch_outcomes(TWO, main, deadline_s=0.5, grace_s=5, shaped=shaped)
    assert [(outcome.value, outcome.error) for outcome in outcomes] == [
        ("done", None),
        (None, "still running at the deadline"),
    ]


@both_ways
@pytest.mark.parametrize(
    ("end", "error"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL before it returned"),
        (lambda: os._exit(0), "exited with 0 before it returned"),
        (lambda: exit(7), "SystemExit: 7"),
    ],
    ids=["SIGKILL", "_exit", "exit"],
)
def test_a_rank_that_dies_is_noticed_at_once_and_named(shaped: bool, end: object, error: str) -> None:
    def main(rank: Rank) -> None:
        if rank.rank == 1:
            end()  # type: ignore[operator]
        wait_for_ever()

    outcomes = launch_outcomes(TWO, main, deadline_s=60, grace_s=0.1, shaped=shaped)
    assert [outcome.error for outcome in outcomes] == ["still running when another rank failed", error]


@both_ways
def test_a_host_that_dies_ends_the_run_at_once(shaped: bool) -> None:
    def main(rank: Rank) -> None:
        if rank.rank == 1:
            os.kill(os.getppid(), signal.SIGKILL)
        wait_for_ever()

    outcomes = launch_outcomes(TWO, main, deadline_s=600, grace_s=600, shaped=shaped)
    assert [outcome.error for outcome in outcomes] == ["a host died", "a host died"]


def test_a_rank_killed_in_the_middle_of_a_message_is_still_named() -> None:
    def main(rank: Rank) -> None:
        os.write(rank._pipe, b'{"event": "half')
        os.kill(os.getpid(), signal.SIGKILL)

    (outcome,) = launch_outcomes(ClusterSpec(hosts=1), main, deadline_s=60, grace_s=1, shaped=False)
    assert outcome.error == "was killed by SIGKILL before it returned"


def test_what_a_rank_returns_must_be_json() -> None:
    with pytest.raises(RankFailedError, match=r"rank 0: TypeError: .*object.* is unsupported"):
        launch(ClusterSpec(hosts=1), lambda _: object(), shaped=False)


@both_ways
def test_launching_leaves_no_process_and_no_descriptor(shaped: bool) -> None:
    def main(rank: Rank) -> None:
        if os.fork() == 0:  # a daemon
            os.setsid()
            wait_for_ever()

    launch(TWO, main, shaped=shaped)  # the first launch imports and caches
    descriptors = open_descriptors()
    children = psutil.Process().children(recursive=True)
    launch(TWO, main, shaped=shaped)
    assert open_descriptors() == descriptors
    assert psutil.Process().children(recursive=True) == children


@needs_namespaces
def test_a_cluster_leaves_the_machines_own_network_alone() -> None:
    def links() -> list[str]:
        return sorted(name for _, name in socket.if_nameindex())

    before, during = links(), []

    def main(rank: Rank) -> None:
        rank.say("up")

    launch(TWO, main, on_event=lambda *_: during.append(links()))
    assert during == [before, before]
    assert links() == before


@both_ways
def test_launching_from_a_thread_of_a_threaded_process_works_without_a_warning(shaped: bool) -> None:
    results: list[object] = []

    def work() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            results.append(launch(TWO, lambda rank: rank.rank, shaped=shaped))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert results == [[0, 1]]


@both_ways
def test_signal_handlers_and_masks_of_the_caller_do_not_matter(shaped: bool) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    handlers = [(number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGCHLD)]
    try:
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel then reaps children
        outcomes = launch_outcomes(TWO, lambda _: wait_for_ever(), deadline_s=0.2, grace_s=1, shaped=shaped)
        assert {outcome.error for outcome in outcomes} == {"still running at the deadline"}
    finally:
        for number, handler in handlers:
            signal.signal(number, handler)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_ranks_do_not_collect_what_the_caller_left_behind() -> None:
    """A process group in the garbage would wait for threads that a forked process does not have."""

    class Left:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            if os.getpid() != caller:
                wait_for_ever()

    def eager_fork() -> int:
        """Make Python collect at its next allocation, which libraries make in their fork handlers."""
        gc.set_threshold(1, 1, 1)
        return fork()

    def main(rank: Rank) -> int:
        gc.collect()
        return rank.rank

    caller, fork, thresholds = os.getpid(), os.fork, gc.get_threshold()
    gc.collect()
    gc.set_threshold(1_000_000)
    try:
        Left()
        with mock.patch("os.fork", eager_fork), mock.patch("syncline.cluster.isolation.START_S", 20.0):
            assert launch(TWO, main, shaped=False, deadline_s=30) == [0, 1]
        assert gc.isenabled()
    finally:
        gc.set_threshold(*thresholds)
        gc.collect()  # or the garbage would stay for a fork of another test


@needs_namespaces
def test_the_error_of_a_host_that_cannot_be_set_up_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from syncline.cluster import links

    def refuse(spec: ClusterSpec, host: int) -> None:
        if host == 1:
            raise ClusterError("this kernel refuses a token-bucket filter")

    monkeypatch.setattr(links, "configure_host", refuse)
    with pytest.raises(ClusterError, match="did not start: this kernel refuses a token-bucket filter"):
        launch(TWO, lambda _: wait_for_ever(), deadline_s=30)


def test_the_reason_for_links_that_are_not_shaped_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCLINE_NO_NAMESPACES", "1")
    assert why_not_shaped() == "SYNCLINE_NO_NAMESPACES is set"
    assert launch(TWO, lambda rank: rank.shaped) == [False, False]


def test_ranks_that_finish_but_do_not_exit_do_not_delay_the_caller() -> None:
    def main(rank: Rank) -> int:
        class Hanging:
            def flush(self) -> None:
                wait_for_ever()

        sys.stdout = Hanging()  # type: ignore[assignment]
        return 5

    start = time.monotonic()
    assert launch(ClusterSpec(hosts=1), main, deadline_s=100, grace_s=0.2, shaped=False) == [5]
    assert time.monotonic() - start < 50  # not the deadline
