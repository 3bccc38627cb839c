"""Who is named when an exchange fails, what is left behind, what ends that nobody else ends, and who is slow."""

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
from syncline.cluster.ports import reserved_port
from syncline.dist import agreement
from syncline.dist.lane import HostMarks, Job
from syncline.doctor import examine_notes
from syncline.exchange import Comm, Layout, State, Work
from syncline.health import failure, heartbeat, meeting, watchdog
from syncline.health.failure import Failure
from syncline.health.stragglers import Stragglers
from syncline.health.suspects import At, Heard, Kind, Sign, is_backends, is_collective
from syncline.health.watchdog import Guard

LOST = 1


def outcomes_of(main: Callable[[Rank], Any], ranks: int = 3) -> list[Outcome]:
    return launch_outcomes(ClusterSpec(hosts=ranks), main, deadline_s=60.0, grace_s=30.0, shaped=False)


def guard_of_one(timeout_s: float) -> Guard:
    group = dist.group.WORLD
    assert group is not None
    return Guard(group, timedelta(seconds=timeout_s))


def failing_step(rank: Rank, model: DDP) -> str:
    with pytest.raises(RuntimeError) as caught:
        train(model, square_loss_step(rank), 1)
    return str(caught.value)


@pytest.mark.parametrize("exchange", [syncline.Dense(), syncline.OkTopk(density=0.5)], ids=["dense", "sparse"])
def test_a_dead_rank_is_named_by_every_survivor_and_the_last_events_are_left(
    exchange: syncline.Exchange, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(failure.FOLDER_VARIABLE, str(tmp_path / "notes"))

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
            assert f"suspect: rank {LOST} (no sign of life" in text
            assert "rank 0 (" not in text and "rank 2 (" not in text
        note = Failure.load(tmp_path / "notes" / f"rank-{outcome.rank}.json")
        assert [one.rank for one in note.suspects] == [LOST]
        assert (note.rank, note.world_size, note.step, note.timeout_s) == (outcome.rank, 3, 3, 10.0)
        assert "exchanging bucket" in note.error
        seconds = [event.before_s for event in note.events]
        assert seconds == sorted(seconds, reverse=True) and seconds[-1] >= 0
        kinds = [event.what for event in note.events]
        assert {"ready", "start", "end"} <= set(kinds)
        assert "all_reduce" in kinds or "all_to_all" in kinds
        assert {event.step for event in note.events} >= {0, 1, 2, 3}
    assert not (tmp_path / "notes" / f"rank-{LOST}.json").exists()
    together = examine_notes()
    assert together.missing == (LOST,) and [note.rank for note in together.notes] == [0, 2]
    assert [(one.rank, one.by, one.left_note) for one in together.accused] == [(LOST, (0, 2), False)]


def test_a_rank_that_does_not_come_is_named_and_told_from_a_dead_one() -> None:
    def main(rank: Rank) -> str:
        rank.init_process_group(TIMEOUT_S)
        model = DDP(seeded(Mlp), **SMALL_BUCKETS)
        syncline.attach(model, syncline.Dense(), timeout_s=3.0)
        train(model, square_loss_step(rank), 2)
        if rank.rank == LOST:  # it is somewhere else, and well
            wait_for(rank, 0, 2)
            return ""
        text = failing_step(rank, model)
        wait_for(rank, 0, 2)
        return text

    outcomes = outcomes_of(main)
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error is None, outcome
        assert f"suspect: rank {LOST} (alive, in step 1, and has not come to this exchange)" in outcome.value


def test_who_waits_in_the_first_step_is_not_said_to_hang() -> None:
    """Ranks compare a bucket before its first exchange, which is no collective of the exchange's."""

    def main(rank: Rank) -> str:
        rank.init_process_group(TIMEOUT_S)
        model = DDP(seeded(Mlp), **SMALL_BUCKETS)
        syncline.attach(model, syncline.Dense(), timeout_s=5.0)
        if rank.rank == LOST:
            wait_for(rank, 0, 2)
            return ""
        if rank.rank == 2:
            time.sleep(2.0)  # so that rank 0's time is up while this one waits
        text = failing_step(rank, model)
        wait_for(rank, 0, 2)
        return text

    outcomes = outcomes_of(main)
    assert all(outcome.error is None for outcome in outcomes), outcomes
    assert f"suspect: rank {LOST} (alive, in step 0, and has not come to this exchange)" in outcomes[0].value
    assert "rank 2 (" not in outcomes[0].value and "rank 0 (" not in outcomes[2].value


@pytest.mark.parametrize(
    ("how", "why"),
    [("detached", "it had nothing attached when it was heard of last"), ("ended", "its program ended")],
)
def test_who_has_detached_or_ended_well_is_not_said_to_be_dead(how: str, why: str) -> None:
    """Ended under torchrun, whose store outlives its ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def main(rank: Rank) -> str:
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        mine = dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
        dist.init_process_group("gloo", store=mine, rank=rank.rank, world_size=3, timeout=timedelta(seconds=TIMEOUT_S))
        model = DDP(seeded(Mlp), **SMALL_BUCKETS)
        handle = syncline.attach(model, syncline.Dense(), timeout_s=4.0)
        train(model, square_loss_step(rank), 2)
        if rank.rank == LOST:
            end = handle.detach if how == "detached" else heartbeat._leave
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


def test_an_error_of_ones_own_where_ranks_meet_is_told_as_it_is(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(agreement, "gather_bytes", no_room)
    group = dist.group.WORLD
    assert group is not None
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory$"):
        meeting.meet(group, {})


def test_who_does_not_come_to_attach_is_named_and_the_others_leave_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(failure.FOLDER_VARIABLE, str(tmp_path))

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
        assert f"suspect: rank {LOST} (it has left no sign here)" in outcome.value
        assert "All ranks of the model's process group must call attach" in outcome.value
        assert outcome.value.endswith(f"; this rank's note is in {tmp_path / f'rank-{outcome.rank}.json'}")
    found = examine_notes(tmp_path)
    assert [(note.rank, note.step, note.timeout_s) for note in found.notes] == [(0, None, 3.0), (2, None, 3.0)]
    assert [(one.rank, one.kind, one.by) for one in found.accused] == [(LOST, Kind.UNSEEN, (0, 2))]
    (job,) = {note.job for note in found.notes}
    assert len(job) == 16


@pytest.fixture(scope="module")
def python() -> Iterator[Interpreter]:
    with interpreter() as forked:
        yield forked


def ended(python: Interpreter, server: str, end: str, notes: Path) -> list[tuple[int, str]]:
    """Three ranks of `scripts/falls.py`: their exit codes, and what they said."""
    script = Path(__file__).parent / "scripts" / "falls.py"
    with contextlib.ExitStack() as ends:
        if server == "test":
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            port = store.port
        else:
            port = ends.enter_context(reserved_port())
        environment = {**os.environ, failure.FOLDER_VARIABLE: str(notes)}
        arguments = [[str(script), "127.0.0.1", str(port), str(rank), server, end] for rank in range(3)]
        ranks = [ends.enter_context(python.start(one, environment, Path.cwd())) for one in arguments]
        said = [rank.stderr.read() for rank in ranks]
        return [(rank.wait(60), text) for rank, text in zip(ranks, said, strict=True)]


@pytest.mark.parametrize(("server", "end"), [("test", "falls"), ("rank 0", "falls"), ("rank 0", "catches")])
def test_a_program_that_ends_with_a_collective_names_who_was_missing(
    server: str, end: str, tmp_path: Path, python: Interpreter
) -> None:
    ranks = ended(python, server, end, tmp_path)
    assert [code for code, _ in ranks] == [1, -signal.SIGKILL, 1]
    for _, said in (ranks[0], ranks[2]):
        told = "the program ended in a collective of its own or of DDP's: RuntimeError: "
        assert (told if end == "falls" else "ExchangeError: exchanging bucket 0 failed in step 3: ") in said
        assert f"suspect: rank {LOST} (no sign of life" in said
        assert "rank 0 (" not in said and "rank 2 (" not in said
    assert [(one.rank, one.by) for one in examine_notes(tmp_path).accused] == [(LOST, (0, 2))]


def test_a_survivor_with_buckets_under_way_ends_with_its_exception_and_not_with_an_abort(
    tmp_path: Path, python: Interpreter
) -> None:
    """Lanes that come back from a collective while Python takes itself apart would."""
    ranks = ended(python, "test", "raises", tmp_path)
    assert [code for code, _ in ranks] == [1, 1, 1]
    for _, said in (ranks[0], ranks[2]):
        assert f"suspect: rank {LOST} (its program ended: ValueError: no such file)" in said
        assert "terminate called" not in said


@dataclass(frozen=True)
class Failing:
    """Fails on one rank, by itself, in its fourth run."""

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


def test_a_rank_that_fails_by_itself_is_named_with_its_own_words() -> None:
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


def test_what_hangs_without_a_collective_is_ended_and_the_model_can_be_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert "nothing has moved on lane" in outcomes[LOST].value["text"]
    assert "suspect" not in outcomes[LOST].value["text"]  # it knows that it was itself
    for outcome in (outcomes[0], outcomes[2]):
        assert f"suspect: rank {LOST} (" in outcome.value["text"]
        # Who waits may see it inside, or be told when it was ended there.
        assert "inside of an exchange for" in outcome.value["text"] or "inside of the exchange" in outcome.value["text"]
    for outcome in outcomes:
        assert outcome.value["took_s"] < timeout_s + 1 + 10
        assert outcome.value["detached_s"] < 10


def test_a_slow_rank_is_named_with_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
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
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            done = torch.zeros(1)
            while not done and time.monotonic() < until_s:
                train(model, slowly, 10)
                done = torch.tensor([1.0 if handle.straggler else 0.0])
                dist.all_reduce(done)
        seen = [str(one.message) for one in told if "longer than the others" in str(one.message)]
        return {"straggler": handle.straggler, "told": seen}

    first, *others = on_ranks(3, main)
    assert first["straggler"] is not None and first["straggler"].startswith("rank 2 takes 0.0")
    assert len(first["told"]) == 1 and "wait for it" in first["told"][0]
    assert all(other["straggler"] is None and other["told"] == [] for other in others)


def own(*seconds: float | None) -> dict[int, At]:
    return {rank: At(1, 1, one) for rank, one in enumerate(seconds)}


def test_a_straggler_is_one_that_stays_behind() -> None:
    watched = Stragglers((0, 1, 2))
    for at in (
        own(0.1, 0.1, 0.3),  # once may be chance
        own(0.1, 0.1, 0.11),
        own(0.1, 0.1, 0.3),
        own(0.3, 0.1, 0.1),  # and so may another each time
        own(0.5, None, 0.3),  # and whoever has not been measured may be slower still
    ):
        watched.compare(at)
        assert watched.found is None
    with pytest.warns(UserWarning, match="rank 0 takes 0.200 s per step longer"):
        watched.compare(own(0.3, 0.1, 0.1))
    assert str(watched.found).startswith("rank 0 takes 0.200 s per step longer")
    watched.compare(own(0.4, 0.1, 0.1))  # nobody is told twice
    assert str(watched.found).startswith("rank 0 takes 0.300 s per step longer")
    watched.compare(own(0.1, 0.1, 0.5))
    assert watched.found is None
    with pytest.warns(UserWarning, match="rank 2 takes 0.400 s per step longer"):  # another one is
        watched.compare(own(0.1, 0.1, 0.5))
    watched.compare(own(0.1, 0.1, 0.1))
    assert watched.found is None


@pytest.mark.parametrize("where", ["nowhere", "a file", "asked not to"])
def test_where_nothing_can_be_left_the_error_says_so_and_is_the_same(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_rank: None
) -> None:
    (tmp_path / "file").write_text("")
    folder = {"nowhere": "/proc/nowhere", "a file": str(tmp_path / "file"), "asked not to": ""}[where]
    monkeypatch.setenv(failure.FOLDER_VARIABLE, folder)
    told = guard_of_one(5).explain("it failed", cause=RuntimeError("Connection closed by peer"))
    assert told == "" if where == "asked not to" else told.startswith("; this rank's note could not be written: ")
    assert "\n" not in told


def test_an_error_is_told_even_by_a_device_that_answers_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_rank: None
) -> None:
    class Broken(HostMarks):
        def seconds(self) -> dict[str, float] | None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def nothing(*_: object) -> None:
        return None

    monkeypatch.setenv(failure.FOLDER_VARIABLE, str(tmp_path))
    watched = guard_of_one(5)
    job = Job(bucket=3, lane=0, flat=torch.zeros(2), run=nothing, waits=False, on_done=nothing, marks=Broken())
    watched.begin(job, 7)
    assert watched.explain("it failed", own=True) == f"; this rank's note is in {tmp_path / 'rank-0.json'}"
    assert [(one.step, one.bucket) for one in Failure.load(tmp_path / "rank-0.json").pending] == [(7, 3)]
    monkeypatch.setattr(failure, "write_json", lambda *_: 1 // 0)
    told = guard_of_one(5).explain("it failed", own=True)
    assert told == "; this rank's note could not be written: integer division or modulo by zero"


def heard_of(suspects: list[Any]) -> list[str]:
    return [str(one) for one in suspects]


def test_only_what_was_heard_since_one_asked_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("syncline.health.suspects.time.monotonic", lambda: now_s)
    heard, others = Heard(1.0), [1]

    def note(at_s: float, sign: Sign) -> None:
        nonlocal now_s
        now_s = at_s
        heard.note({1: sign})

    note(100.0, Sign(1))
    note(101.0, Sign(2))
    asked_s = now_s = 110.0  # nobody has looked since
    assert not heard.knows(1, asked_s)
    note(110.0, Sign(11))  # which it may have left long ago
    assert not heard.knows(1, asked_s)
    note(110.5, Sign(12))
    assert heard.knows(1, asked_s) and not heard.suspects(others, Sign(1), "here", asked_s)

    asked_s = now_s = 111.0
    note(111.1, Sign(12))  # it has gone, just before
    assert not heard.knows(1, asked_s)
    note(113.0, Sign(12))
    assert heard.knows(1, asked_s)
    assert heard_of(heard.suspects(others, Sign(1), "here", asked_s)) == ["rank 1 (no sign of life for 2 s)"]
    assert heard_of(heard.known(others)) == ["rank 1 (no sign of life for 2 s)"]

    assert not heard.are_victims(others)
    note(113.5, Sign(13))
    assert not heard.suspects(others, Sign(1), "here", 113.0)
    outside = heard.suspects(others, Sign(1), "here", 113.0, outside=True)
    assert heard_of(outside) == ["rank 1 (alive, and has not come to this collective)"]
    note(114.0, Sign(14, failed="it met with a failure", own=False))
    assert not heard.knows(1, 115.0) and heard.knows(1, 114.0) and heard.is_through(1)
    assert not heard.known(others) and heard.failed_of(1) == "it met with a failure"
    assert heard.are_victims(others)
    note(114.5, Sign(15, failed="it met with a failure", asks=True))
    assert not heard.is_through(1)
    note(115.0, Sign(16, left="its program ended: ValueError: no"))
    assert heard_of(heard.known(others)) == ["rank 1 (its program ended: ValueError: no)"]


def test_who_has_not_listened_calls_nobody_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("syncline.health.suspects.time.monotonic", lambda: now_s)
    heard, others = Heard(1.0), [1, 2, 3]

    def suspects() -> list[str]:
        return heard_of(heard.suspects(others, Sign(1), "here", 109.0))

    heard.note({1: Sign(1), 3: Sign(1, idle=True)})
    now_s = 120.0  # it was stopped, and rank 2 may have left its first sign meanwhile
    assert suspects() == ["rank 3 (it had nothing attached when it was heard of last)"]
    assert heard.is_open(1, 109.0) and not heard.is_open(2, 109.0) and not heard.is_open(3, 109.0)
    heard.note({1: Sign(1), 3: Sign(1, idle=True)})
    assert suspects() == ["rank 2 (it has left no sign here)"]
    now_s = 120.5
    heard.note({1: Sign(1), 3: Sign(1, idle=True)})
    assert suspects() == ["rank 1 (no sign of life for 2 s)", "rank 2 (it has left no sign here)"]
    assert heard.is_through(3) and not heard.is_open(1, 109.0)


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
def test_what_ends_a_program_is_its_own_unless_a_backend_raised_it(error: BaseException, backends: bool) -> None:
    assert is_backends(error) == backends


def test_what_a_device_has_not_ended_is_told_in_time_and_again_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_rank: None
) -> None:
    class OnDevice(HostMarks):
        on_host = False

    said: list[str] = []
    monkeypatch.setenv(failure.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(watchdog, "tell", said.append)
    watched = guard_of_one(10)

    def overdue(job: Job, after_s: float) -> None:
        before = set(threading.enumerate())
        watched.end_overdue(time.monotonic() + after_s)
        for thread in set(threading.enumerate()) - before:
            thread.join(10)

    through = Job(bucket=4, lane=1, flat=torch.zeros(2), run=lambda: None, marks=OnDevice())
    watched.begin(through, 1)  # on another lane, which is through, and stays so
    through.marks.mark("end")
    for number in (1, 2):
        job = Job(bucket=3, lane=0, flat=torch.zeros(2), run=lambda: None, marks=OnDevice())
        watched.begin(job, number)
        overdue(job, 6.0)
        assert len(said) == number - 1
        overdue(job, 8.0)
        overdue(job, 9.0)
        assert len(said) == number
        assert said[-1].startswith(f"exchanging bucket 3 of step {number} has taken 8 s, and NCCL ends this process")
        assert Failure.load(tmp_path / "rank-0.json").error in said[-1]
        job.marks.mark("end")
        overdue(job, 9.5)
    told = watched.explain("it failed", own=True)  # later, of something else
    assert Failure.load(tmp_path / "rank-0.json").error == "it failed" and "NCCL" not in told


def test_what_is_left_is_for_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_rank: None) -> None:
    monkeypatch.setenv(failure.FOLDER_VARIABLE, str(tmp_path / "notes"))
    watched = guard_of_one(5)
    told = watched.explain("it failed", own=True)
    note = tmp_path / "notes" / "rank-0.json"
    assert told == f"; this rank's note is in {note}"
    assert watched.explain("it failed again", own=True) == told  # once
    assert Failure.load(note).error == "it failed"
    assert stat.S_IMODE(note.parent.stat().st_mode) & 0o077 == 0


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
def test_whose_doing_an_error_is(error: BaseException | None, others: bool) -> None:
    assert is_collective(error) == others


def test_after_the_last_detach_nobody_watches() -> None:
    def main(rank: Rank) -> list[list[str]]:
        def threads() -> list[str]:
            return [thread.name for thread in threading.enumerate() if thread.name.startswith("syncline")]

        seen = []
        model, other = DDP(seeded(Mlp), **SMALL_BUCKETS), DDP(seeded(Mlp), **SMALL_BUCKETS)
        first, second = syncline.attach(model), syncline.attach(other)
        seen.append(threads())
        first.detach()
        seen.append(threads())
        second.detach()
        seen.append(threads())
        return seen

    for both, one, none in on_ranks(2, main):
        assert both.count("syncline-vigil") == one.count("syncline-vigil") == 1
        assert none == []
