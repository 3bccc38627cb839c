"""Suspects and failure reports when an exchange fails, exchanges that hang, and stragglers."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import syncline
from ddp_helpers import SMALL_BUCKETS, TIMEOUT_S, Mlp, on_ranks, seeded, square_loss_step, train
from interpreters import Interpreter, interpreter
from survivors import wait_for
from syncline.cluster import ClusterSpec, Outcome, Rank, launch_outcomes
from syncline.cluster.environment import reserved_port
from syncline.dist import agreement
from syncline.dist.lane import Job, Marks
from syncline.exchange import Comm, Layout, State, Work
from syncline.health import failure, heartbeat, meeting, watchdog
from syncline.health.stragglers import Stragglers
from syncline.health.suspects import (
    Awaited,
    Beat,
    Heartbeats,
    Progress,
    StoreState,
    is_backends,
    is_collective,
)
from syncline.health.watchdog import Watchdog
from syncline.records.failure_report import FOLDER_VARIABLE, FailureReport, Kind
from syncline.records.postmortem import examine_reports

LOST = 1


def outcomes_of(main: Callable[[Rank], Any], ranks: int = 3) -> list[Outcome]:
    return launch_outcomes(ClusterSpec(hosts=ranks), main, deadline_s=60.0, grace_s=30.0, shaped=False)


def watchdog_of_one(timeout_s: float) -> Watchdog:
    group = dist.group.WORLD
    assert group is not None
    return Watchdog(group, timedelta(seconds=timeout_s))


def failing_step(rank: Rank, model: DDP) -> str:
    with pytest.raises(RuntimeError) as caught:
        train(model, square_loss_step(rank), 1)
    return str(caught.value)


@pytest.mark.parametrize("exchange", [syncline.Dense(), syncline.OkTopk(density=0.5)], ids=["dense", "sparse"])
def test_every_survivor_names_a_dead_rank_and_reports_its_last_events(
    exchange: syncline.Exchange, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "reports"))

    def main(rank: Rank) -> dict[str, Any]:
        rank.init_process_group(TIMEOUT_S)
        model = DDP(seeded(Mlp), **SMALL_BUCKETS)
        handle = syncline.attach(model, exchange, timeout_s=10.0)
        train(model, square_loss_step(rank), 3)
        if rank.rank == LOST:
            model.module.first.weight.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))
        text = failing_step(rank, model)
        wait_for(rank, 0, 2)
        return {"text": text, "error": str(handle.error)}

    outcomes = outcomes_of(main)
    assert "SIGKILL" in str(outcomes[LOST].error)
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error is None, outcome
        for text in (outcome.value["text"], outcome.value["error"]):
            assert f"suspect: rank {LOST} (no heartbeat" in text
            assert "rank 0 (" not in text and "rank 2 (" not in text
        report = FailureReport.load(tmp_path / "reports" / f"rank-{outcome.rank}.json")
        assert [suspect.rank for suspect in report.suspects] == [LOST]
        assert (report.rank, report.world_size, report.step, report.timeout_s) == (outcome.rank, 3, 3, 10.0)
        assert "exchanging bucket" in report.error
        seconds = [event.before_s for event in report.events]
        assert seconds == sorted(seconds, reverse=True) and seconds[-1] >= 0
        kinds = [event.what for event in report.events]
        assert {"ready", "start", "end"} <= set(kinds)
        assert "all_reduce" in kinds or "all_to_all" in kinds
        assert {event.step for event in report.events} >= {0, 1, 2, 3}
    assert not (tmp_path / "reports" / f"rank-{LOST}.json").exists()
    postmortem = examine_reports()
    assert postmortem.missing == (LOST,) and [report.rank for report in postmortem.reports] == [0, 2]
    assert [(accused.rank, accused.by, accused.left_report) for accused in postmortem.accused] == [
        (LOST, (0, 2), False)
    ]


def test_a_live_rank_that_is_absent_is_named_as_such() -> None:
    def main(rank: Rank) -> str:
        rank.init_process_group(TIMEOUT_S)
        model = DDP(seeded(Mlp), **SMALL_BUCKETS)
        syncline.attach(model, syncline.Dense(), timeout_s=3.0)
        train(model, square_loss_step(rank), 2)
        if rank.rank == LOST:  # it is alive, but does something else
            wait_for(rank, 0, 2)
            return ""
        text = failing_step(rank, model)
        wait_for(rank, 0, 2)
        return text

    outcomes = outcomes_of(main)
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error is None, outcome
        assert f"suspect: rank {LOST} (alive, in step 1, but has not reached this exchange)" in outcome.value


def test_a_rank_that_waits_in_the_first_step_is_not_suspected() -> None:
    """Ranks compare a bucket before its first exchange, in a collective that does not belong to the exchange."""

    def main(rank: Rank) -> str:
        rank.init_process_group(TIMEOUT_S)
        model = DDP(seeded(Mlp), **SMALL_BUCKETS)
        syncline.attach(model, syncline.Dense(), timeout_s=5.0)
        if rank.rank == LOST:
            wait_for(rank, 0, 2)
            return ""
        if rank.rank == 2:
            time.sleep(2.0)  # so that rank 0 reaches its timeout while this one waits
        text = failing_step(rank, model)
        wait_for(rank, 0, 2)
        return text

    outcomes = outcomes_of(main)
    assert all(outcome.error is None for outcome in outcomes), outcomes
    assert f"suspect: rank {LOST} (alive, in step 0, but has not reached this exchange)" in outcomes[0].value
    assert "rank 2 (" not in outcomes[0].value and "rank 0 (" not in outcomes[2].value


@pytest.mark.parametrize(
    ("how", "why"),
    [("detached", "alive, but has nothing attached"), ("ended", "its program ended")],
)
def test_a_rank_that_detached_or_ended_is_not_called_silent(how: str, why: str) -> None:
    """As under torchrun, whose store outlives its ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def main(rank: Rank) -> str:
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        mine = dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
        dist.init_process_group("gloo", store=mine, rank=rank.rank, world_size=3, timeout=timedelta(seconds=TIMEOUT_S))
        model = DDP(seeded(Mlp), **SMALL_BUCKETS)
        handle = syncline.attach(model, syncline.Dense(), timeout_s=4.0)
        train(model, square_loss_step(rank), 2)
        if rank.rank == LOST:
            end = handle.detach if how == "detached" else heartbeat._at_exit
            end()
            wait_for(rank, 0, 2)
            return ""
        text = failing_step(rank, model)
        wait_for(rank, 0, 2)
        return text

    outcomes = outcomes_of(main)
    assert all(outcome.error is None for outcome in outcomes), outcomes
    for outcome in (outcomes[0], outcomes[2]):
        assert f"suspect: rank {LOST} ({why})" in outcome.value


def test_an_error_of_this_rank_in_a_common_call_is_raised_as_it_is(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(agreement, "gather_bytes", no_room)
    group = dist.group.WORLD
    assert group is not None
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory$"):
        meeting.meet(group, {})


def test_a_rank_that_does_not_call_attach_is_named_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))

    def main(rank: Rank) -> str:
        rank.init_process_group(3.0)
        model = DDP(seeded(Mlp), **SMALL_BUCKETS)
        if rank.rank == LOST:
            wait_for(rank, 0, 2)
            return ""
        with pytest.raises(syncline.MismatchError) as caught:
            syncline.attach(model, syncline.Dense())
        wait_for(rank, 0, 2)
        return str(caught.value)

    outcomes = outcomes_of(main)
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error is None, outcome
        assert f"suspect: rank {LOST} (it has sent no heartbeat)" in outcome.value
        assert "All ranks of the model's process group must call attach" in outcome.value
        assert outcome.value.endswith(f"; this rank's failure report is {tmp_path / f'rank-{outcome.rank}.json'}")
    postmortem = examine_reports(tmp_path)
    reports = postmortem.reports
    assert [(report.rank, report.step, report.timeout_s) for report in reports] == [(0, None, 3.0), (2, None, 3.0)]
    assert [(one.rank, one.kind, one.by) for one in postmortem.accused] == [(LOST, Kind.UNSEEN, (0, 2))]
    (job,) = {report.job for report in reports}
    assert len(job) == 16


@pytest.fixture(scope="module")
def python() -> Iterator[Interpreter]:
    with interpreter() as forked:
        yield forked


def run_falls(python: Interpreter, server: str, end: str, folder: Path) -> list[tuple[int, str]]:
    """Run three ranks of `scripts/falls.py`, and return their exit codes and what they printed."""
    script = Path(__file__).parent / "scripts" / "falls.py"
    with contextlib.ExitStack() as ends:
        if server == "test":
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            port = store.port
        else:
            port = ends.enter_context(reserved_port())
        environment = {**os.environ, FOLDER_VARIABLE: str(folder)}
        arguments = [[str(script), "127.0.0.1", str(port), str(rank), server, end] for rank in range(3)]
        ranks = [ends.enter_context(python.start(one, environment, Path.cwd())) for one in arguments]
        printed = [rank.stderr.read() for rank in ranks]
        return [(rank.wait(60), text) for rank, text in zip(ranks, printed, strict=True)]


@pytest.mark.parametrize(("server", "end"), [("test", "falls"), ("rank 0", "falls"), ("rank 0", "catches")])
def test_a_program_that_ends_in_a_collective_names_the_missing_rank(
    server: str, end: str, tmp_path: Path, python: Interpreter
) -> None:
    ranks = run_falls(python, server, end, tmp_path)
    assert [code for code, _ in ranks] == [1, -signal.SIGKILL, 1]
    for _, printed in (ranks[0], ranks[2]):
        outside = "the program ended in a collective outside Syncline: RuntimeError: "
        assert (outside if end == "falls" else "ExchangeError: exchanging bucket 0 failed in step 3: ") in printed
        assert f"suspect: rank {LOST} (no heartbeat" in printed
        assert "rank 0 (" not in printed and "rank 2 (" not in printed
    assert [(one.rank, one.by) for one in examine_reports(tmp_path).accused] == [(LOST, (0, 2))]


def test_a_survivor_with_unfinished_buckets_ends_with_its_exception_and_does_not_abort(
    tmp_path: Path, python: Interpreter
) -> None:
    """A lane that returns from a collective while Python shuts down would abort the process."""
    ranks = run_falls(python, "test", "raises", tmp_path)
    assert [code for code, _ in ranks] == [1, 1, 1]
    for _, printed in (ranks[0], ranks[2]):
        assert f"suspect: rank {LOST} (its program ended: ValueError: no such file)" in printed
        assert "terminate called" not in printed


@dataclass(frozen=True)
class Failing:
    """An exchange that fails on one rank, in its fourth run."""

    how: str
    lossless: bool = True
    keeps: bool = False
    waits: bool = True

    def prepare(self, layout: Layout, comm: Comm) -> State:
        return State()

    def run(self, flat: Tensor, state: State, comm: Comm) -> Work | None:
        runs.append(comm.rank)
        if comm.rank == LOST and len(runs) > 3:
            if self.how == "hangs":
                threading.Event().wait(60)
            raise MemoryError("no room for this bucket")
        comm.all_reduce(flat).wait()
        return None

    def cost(self, *of: Any) -> Any:
        return syncline.Dense().cost(*of)

    def rounding(self, *of: Any) -> Any:
        return syncline.Dense().rounding(*of)


runs: list[int] = []


def test_a_rank_with_an_error_of_its_own_is_named_with_that_error() -> None:
    def main(rank: Rank) -> str:
        rank.init_process_group(TIMEOUT_S)
        model = DDP(seeded(Mlp), **SMALL_BUCKETS)
        syncline.attach(model, Failing("raises"), timeout_s=4.0)
        with pytest.raises(RuntimeError) as caught:
            train(model, square_loss_step(rank), 3)
        wait_for(rank, 0, 1, 2)
        return str(caught.value)

    outcomes = outcomes_of(main)
    assert all(outcome.error is None for outcome in outcomes), outcomes
    assert "no room for this bucket" in outcomes[LOST].value and "suspect" not in outcomes[LOST].value
    for outcome in (outcomes[0], outcomes[2]):
        assert f"suspect: rank {LOST} (exchanging bucket" in outcome.value
        assert "no room for this bucket" in outcome.value


def test_an_exchange_that_hangs_outside_collectives_is_abandoned_and_can_be_detached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timeout_s = 3.0
    monkeypatch.setattr(watchdog, "_GRACE_S", 1.0)

    def main(rank: Rank) -> dict[str, Any]:
        rank.init_process_group(TIMEOUT_S)
        model = DDP(seeded(Mlp), **SMALL_BUCKETS)
        handle = syncline.attach(model, Failing("hangs"), timeout_s=timeout_s)
        began_s = time.monotonic()
        with pytest.raises(RuntimeError):
            train(model, square_loss_step(rank), 3)
        took_s = time.monotonic() - began_s
        text = str(handle.error)
        handle.detach()
        detached_s = time.monotonic() - began_s - took_s
        wait_for(rank, 0, 1, 2)
        return {"text": text, "took_s": took_s, "detached_s": detached_s}

    outcomes = outcomes_of(main)
    assert all(outcome.error is None for outcome in outcomes), outcomes
    assert "no progress on lane" in outcomes[LOST].value["text"]
    assert "suspect" not in outcomes[LOST].value["text"]  # it knows that the cause is its own
    for outcome in (outcomes[0], outcomes[2]):
        assert f"suspect: rank {LOST} (" in outcome.value["text"]
        # Another rank sees that it is inside the exchange, or that it was abandoned there.
        assert "inside an exchange for" in outcome.value["text"] or "inside the exchange" in outcome.value["text"]
    for outcome in outcomes:
        assert outcome.value["took_s"] < timeout_s + 1 + 10
        assert outcome.value["detached_s"] < 10


def test_a_slow_rank_is_named_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "_STRAGGLERS_S", 0.2)
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.2)

    def main(rank: Rank) -> dict[str, Any]:
        model = DDP(seeded(Mlp), **SMALL_BUCKETS)
        handle = syncline.attach(model, syncline.Dense())
        step = square_loss_step(rank)

        def slowly(*of: Any) -> None:
            if rank.rank == 2:
                time.sleep(0.05)  # what makes it a straggler
            step(*of)

        until_s = time.monotonic() + 20
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            done = torch.zeros(1)
            while not done and time.monotonic() < until_s:
                train(model, slowly, 10)
                done = torch.tensor([1.0 if handle.straggler else 0.0])
                dist.all_reduce(done)
        seen = [str(warning.message) for warning in warned if "longer than the others" in str(warning.message)]
        return {"straggler": handle.straggler, "warnings": seen}

    first, *others = on_ranks(3, main)
    assert first["straggler"] is not None and first["straggler"].startswith("rank 2 takes 0.0")
    assert len(first["warnings"]) == 1 and "wait for it" in first["warnings"][0]
    assert all(other["straggler"] is None and other["warnings"] == [] for other in others)


def own(*seconds: float | None) -> dict[int, Progress]:
    return {rank: Progress(1, 1, seconds_of_rank) for rank, seconds_of_rank in enumerate(seconds)}


def test_a_straggler_is_a_rank_that_stays_the_slowest() -> None:
    stragglers = Stragglers(3)
    for progress in (
        own(0.1, 0.1, 0.3),  # once may be chance
        own(0.1, 0.1, 0.11),
        own(0.1, 0.1, 0.3),
        own(0.3, 0.1, 0.1),  # and so may another rank each time
        own(0.5, None, 0.3),  # a rank that has not been measured may be slower still
    ):
        stragglers.compare(progress)
        assert stragglers.straggler is None
    with pytest.warns(UserWarning, match="rank 0 takes 0.200 s per step longer"):
        stragglers.compare(own(0.3, 0.1, 0.1))
    assert str(stragglers.straggler).startswith("rank 0 takes 0.200 s per step longer")
    assert str(stragglers.straggler).endswith("(syncline.shares) would save about 0.171 s per step (predicted)")
    stragglers.compare(own(0.4, 0.1, 0.1))  # there is no second warning about the same rank
    assert str(stragglers.straggler).startswith("rank 0 takes 0.300 s per step longer")
    stragglers.compare(own(0.1, 0.1, 0.5))
    assert stragglers.straggler is None
    with pytest.warns(UserWarning, match="rank 2 takes 0.400 s per step longer"):  # there is one about another rank
        stragglers.compare(own(0.1, 0.1, 0.5))
    stragglers.compare(own(0.1, 0.1, 0.1))
    assert stragglers.straggler is None


@pytest.mark.parametrize("where", ["nowhere", "a file", "asked not to"])
def test_a_report_that_cannot_be_written_does_not_hide_the_error(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_rank: None
) -> None:
    (tmp_path / "file").write_text("")
    folder = {"nowhere": "/proc/nowhere", "a file": str(tmp_path / "file"), "asked not to": ""}[where]
    monkeypatch.setenv(FOLDER_VARIABLE, folder)
    explanation = watchdog_of_one(5).explain("it failed", RuntimeError("Connection closed by peer"))
    expected = "" if where == "asked not to" else "; this rank's failure report could not be written: "
    assert explanation.startswith(expected) and bool(explanation) == bool(expected)
    assert "\n" not in explanation


def test_an_error_is_explained_even_if_the_device_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_rank: None
) -> None:
    class Broken(Marks):
        def seconds(self) -> dict[str, float] | None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def nothing(*_: object) -> None:
        return None

    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    dog = watchdog_of_one(5)
    job = Job(bucket=3, lane=0, flat=torch.zeros(2), run=nothing, waits=False, on_done=nothing, marks=Broken())
    dog.bucket_submitted(job, 7)
    assert dog.explain("it failed") == f"; this rank's failure report is {tmp_path / 'rank-0.json'}"
    assert [(one.step, one.bucket) for one in FailureReport.load(tmp_path / "rank-0.json").pending] == [(7, 3)]
    monkeypatch.setattr(failure, "write_json", lambda *_: 1 // 0)
    explanation = watchdog_of_one(5).explain("it failed")
    assert explanation == "; this rank's failure report could not be written: integer division or modulo by zero"


NOTHING = Awaited("call", "attach")


def named(
    heartbeats: Heartbeats,
    others: list[int],
    asked_s: float,
    awaited: Awaited = NOTHING,
    store: StoreState = "answers",
    rank: int = 0,
) -> list[str]:
    return [str(suspect) for suspect in heartbeats.find_suspects(rank, others, awaited, asked_s, store)]


def test_only_heartbeats_after_the_failure_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("syncline.health.suspects.time.monotonic", lambda: now_s)
    heartbeats, others = Heartbeats(1.0), [1]

    def receive(at_s: float, beat: Beat) -> None:
        nonlocal now_s
        now_s = at_s
        heartbeats.update({1: beat})

    receive(100.0, Beat(1))
    receive(101.0, Beat(2))
    asked_s = now_s = 110.0  # the store was not read in between
    assert heartbeats.judge(1, asked_s) is None
    receive(110.0, Beat(11))  # it may have been sent long ago
    assert heartbeats.judge(1, asked_s) is None
    receive(110.5, Beat(12))
    assert heartbeats.judge(1, asked_s) is Kind.ELSEWHERE and not named(heartbeats, others, asked_s)

    asked_s = now_s = 111.0
    receive(111.1, Beat(12))  # it ended just before
    assert heartbeats.judge(1, asked_s) is None
    receive(113.0, Beat(12))
    assert heartbeats.judge(1, asked_s) is heartbeats.judge(1) is Kind.SILENT
    assert named(heartbeats, others, asked_s) == ["rank 1 (no heartbeat for 2 s)"]

    receive(113.5, Beat(13))
    assert not named(heartbeats, others, 113.0)
    outside = named(heartbeats, others, 113.0, Awaited("collective", "model"))
    assert outside == ["rank 1 (alive, but has not reached this collective)"]
    receive(114.0, Beat(14, kind=Kind.VICTIM, why="it met with a failure"))
    assert heartbeats.judge(1, 115.0) is None and heartbeats.judge(1, 114.0) is Kind.VICTIM and heartbeats.is_done(1)
    assert named(heartbeats, others, 114.0) == ["rank 1 (it failed too: it met with a failure)"]
    receive(114.5, Beat(15, kind=Kind.VICTIM, why="it met with a failure", asking=True))
    assert not heartbeats.is_done(1)
    receive(115.0, Beat(16, kind=Kind.ENDED, why="its program ended: ValueError: no"))
    assert named(heartbeats, others, 115.0) == ["rank 1 (its program ended: ValueError: no)"]


def test_a_rank_that_has_not_read_the_store_calls_no_other_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("syncline.health.suspects.time.monotonic", lambda: now_s)
    heartbeats, others = Heartbeats(1.0), [1, 2]
    heartbeats.update({1: Beat(1)})
    now_s = 120.0  # this rank was stopped, and rank 2 may have sent its first heartbeat meanwhile
    assert not named(heartbeats, others, 109.0)
    assert heartbeats.judge(1, 109.0) is heartbeats.judge(2, 109.0) is None
    heartbeats.update({1: Beat(1)})
    assert named(heartbeats, others, 109.0) == ["rank 2 (it has sent no heartbeat)"]
    now_s = 120.5
    heartbeats.update({1: Beat(1)})
    assert named(heartbeats, others, 109.0) == ["rank 1 (no heartbeat for 2 s)", "rank 2 (it has sent no heartbeat)"]
    assert heartbeats.is_done(1)


def test_without_a_store_the_last_heartbeats_or_its_server_are_suspected() -> None:
    heartbeats, others = Heartbeats(1.0), [0, 1]

    def suspects(store: StoreState, rank: int = 2) -> list[str]:
        return named(heartbeats, others, 0.0, store=store, rank=rank)

    heartbeats.update({0: Beat(1), 1: Beat(1)})
    assert suspects("mute") == ["rank 0 (the job's store does not answer, or this rank's own link is down)"]
    assert suspects("gone") == ["rank 0 (it or its launcher served the job's store, which has ended)"]
    heartbeats.update({0: Beat(2, kind=Kind.VICTIM, why="Connection closed")})
    assert suspects("gone") == ["rank 0 (it failed too: Connection closed)"]
    heartbeats.update({1: Beat(2, kind=Kind.FAILED, why="out of memory")})
    assert suspects("gone") == ["rank 1 (out of memory)"]
    assert suspects("unusable") == suspects("mute", rank=0) == suspects("gone", rank=0) == []


@pytest.mark.parametrize(
    ("error", "backends"),
    [
        (RuntimeError("[/__w/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"), True),
        (RuntimeError("Application timeout caused pair closure"), True),
        (dist.DistBackendError("remote process exited or there was a network error"), True),
        (RuntimeError("DataLoader timed out after 60 seconds"), False),
        (TimeoutError("timed out: GET http://data/"), False),
        (ConnectionResetError("reset by peer"), False),
        (syncline.MismatchError("plan.backend is gloo on rank 0"), False),
    ],
)
def test_an_error_that_ends_a_program_is_its_own_unless_a_backend_raised_it(
    error: BaseException, backends: bool
) -> None:
    assert is_backends(error) == backends


def test_a_stuck_exchange_on_a_device_is_warned_about_once_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_rank: None
) -> None:
    class OnDevice(Marks):
        on_host = False

    warned: list[str] = []
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(watchdog, "warn", warned.append)
    dog = watchdog_of_one(10)

    def overdue(job: Job, after_s: float) -> None:
        before = set(threading.enumerate())
        dog.end_overdue(time.monotonic() + after_s)
        for thread in set(threading.enumerate()) - before:
            thread.join(10)

    finished = Job(bucket=4, lane=1, flat=torch.zeros(2), run=lambda: None, marks=OnDevice())
    dog.bucket_submitted(finished, 1)  # on another lane, where it has finished
    finished.marks.mark("end")
    for number in (1, 2):
        job = Job(bucket=3, lane=0, flat=torch.zeros(2), run=lambda: None, marks=OnDevice())
        dog.bucket_submitted(job, number)
        overdue(job, 6.0)
        assert len(warned) == number - 1
        overdue(job, 8.0)
        overdue(job, 9.0)
        assert len(warned) == number
        assert warned[-1].startswith(f"exchanging bucket 3 of step {number} has taken 8 s, and NCCL ends this process")
        assert FailureReport.load(tmp_path / "rank-0.json").error in warned[-1]
        job.marks.mark("end")
        overdue(job, 9.5)
    explanation = dog.explain("it failed")  # later, about another failure
    assert FailureReport.load(tmp_path / "rank-0.json").error == "it failed" and "NCCL" not in explanation


def test_only_its_owner_can_read_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_rank: None) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "reports"))
    dog = watchdog_of_one(5)
    explanation = dog.explain("it failed")
    path = tmp_path / "reports" / "rank-0.json"
    assert explanation == f"; this rank's failure report is {path}"
    assert dog.explain("it failed again") == explanation  # once
    assert FailureReport.load(path).error == "it failed"
    assert stat.S_IMODE(path.parent.stat().st_mode) & 0o077 == 0


@pytest.mark.parametrize(
    ("error", "others"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"), True),
        (RuntimeError("Timed out waiting 3000ms for recv operation to complete"), True),
        (TimeoutError("nothing has moved"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), False),
        (MemoryError(), False),
        (ArithmeticError("out of something"), False),
        (None, False),
    ],
)
def test_an_error_comes_from_a_collective_or_from_this_rank(error: BaseException | None, others: bool) -> None:
    assert is_collective(error) == others


def test_the_heartbeat_ends_with_the_process_group() -> None:
    def main(rank: Rank) -> None:
        def threads() -> list[str]:
            return [thread.name for thread in threading.enumerate() if thread.name.startswith("syncline")]

        model, other = DDP(seeded(Mlp), **SMALL_BUCKETS), DDP(seeded(Mlp), **SMALL_BUCKETS)
        first, second = syncline.attach(model), syncline.attach(other)
        assert threads().count("syncline-watchdog") == threads().count("syncline-heartbeat") == 1
        first.detach()
        second.detach()
        assert sorted(threads()) == ["syncline-heartbeat", "syncline-watchdog"]
        dist.barrier()
        dist.destroy_process_group()
        until_s = time.monotonic() + 20
        while threads() and time.monotonic() < until_s:
            time.sleep(0.05)
        assert threads() == []

    on_ranks(2, main)
