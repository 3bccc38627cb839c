"""Silent ranks under plain DDP: a stopped or killed rank is named by the others, and a slow one is not."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from typer.testing import CliRunner

import syncline
from ddp_helpers import Mlp, on_ranks, seeded
from hostile.files import RECORD
from interpreters import Interpreter, Program, interpreter
from syncline.cli import app
from syncline.cluster import Rank
from syncline.cluster.environment import reserved_port
from syncline.dist.comm import group_timeout
from syncline.errors import UsageError
from syncline.health import heartbeat, suspects
from syncline.health.suspects import Beat, Heartbeats
from syncline.measure.assumed_network import assumed_links
from syncline.records.failure_report import Kind
from syncline.records.run_record import LOST, RUNNING, RunRecord
from syncline.report.inputs import Inputs
from syncline.report.page import build_page
from syncline.tuning.settings import TuneSettings

SCRIPT = Path(__file__).parent / "scripts" / "halts.py"
RANKS, HALTED = 3, 1
WARNS_S = 10.0
OVER = "over"
"""The file that ends a script when it appears."""
STARTS_S = 60.0
"""Time for three ranks to start on a busy machine."""


@pytest.fixture(scope="module")
def python() -> Iterator[Interpreter]:
    with interpreter() as forked:
        yield forked


@dataclass
class Process:
    """A rank, and the lines that it prints."""

    program: Program
    lines: queue.Queue[str | None]
    seen: list[str]

    def wait_for(self, text: str, limit_s: float) -> str:
        """Return the first line with this text, which may have been printed already."""
        until_s = time.monotonic() + limit_s
        matching = self.said(text)
        while not matching:
            try:
                line = self.lines.get(timeout=max(0.0, until_s - time.monotonic()))
            except queue.Empty:
                pytest.fail(f"no {text!r} within {limit_s:g} s in {self.seen}")
            if line is None:
                pytest.fail(f"ended without {text!r}: {self.seen}")
            self.seen.append(line)
            matching = [line] if text in line else []
        return matching[0]

    def wait(self, limit_s: float) -> int:
        code = self.program.wait(limit_s)
        while (line := self.lines.get(timeout=limit_s)) is not None:
            self.seen.append(line)
        return code

    def said(self, text: str) -> list[str]:
        return [line for line in self.seen if text in line]


@contextlib.contextmanager
def started(python: Interpreter, arguments: list[str], folder: Path) -> Iterator[list[Process]]:
    """Run three ranks without a launcher, so that rank 0 serves the store. All of them end with the block."""
    with reserved_port() as port, contextlib.ExitStack() as ends:
        processes = []
        for rank in range(RANKS):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(RANKS),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "SYNCLINE_FAILURES": str(folder / "reports"),
                "OMP_NUM_THREADS": "1",
            }
            program = ends.enter_context(python.start(arguments, environment, folder))
            lines: queue.Queue[Any] = queue.Queue()
            reader = threading.Thread(target=read, args=(program, lines))
            ends.callback(end, program, reader)
            reader.start()
            processes.append(Process(program, lines, []))
        yield processes


def read(program: Program, lines: queue.Queue[Any]) -> None:
    for line in program.stderr:
        lines.put(line)
    lines.put(None)


def end(program: Program, reader: threading.Thread) -> None:
    program.kill()
    reader.join(10)


def wait_until_stopped(process: Process, limit_s: float) -> None:
    """Poll, because waitpid would report the stop only once."""
    until_s, status = time.monotonic() + limit_s, ""
    while status != psutil.STATUS_STOPPED:
        assert time.monotonic() < until_s and process.program.poll() is None, process.seen
        time.sleep(0.05)
        status = psutil.Process(process.program.pid).status()


def links(folder: Path) -> Path:
    path = folder / "network.json"
    assumed_links((0,) * RANKS, backend="gloo").save(path)
    return path


def under_run(folder: Path, signal_name: str, where: int, *options: str, rank: int = HALTED) -> list[str]:
    run = ["-m", "syncline.run", "--network", str(links(folder)), "--out", str(folder / "out"), *options]
    return [*run, str(SCRIPT), signal_name, str(rank), str(where), "", str(folder / OVER)]


WATCHED, DECIDED = 5, 40
"""A step in which a followed model is still measured, and one in which it has been left as plain DDP."""


@pytest.mark.parametrize("where", [WATCHED, DECIDED, "tune", "tuned"])
def test_every_other_rank_logs_once_that_a_rank_is_stopped_and_once_that_it_is_back(
    where: int | str, tmp_path: Path, python: Interpreter
) -> None:
    if isinstance(where, int):
        command = under_run(tmp_path, "SIGSTOP", where)
    else:
        command = [str(SCRIPT), "SIGSTOP", str(HALTED), where, str(links(tmp_path)), str(tmp_path / OVER)]
    with started(python, command, tmp_path) as ranks:
        halted, others = ranks[HALTED], [ranks[0], ranks[2]]
        wait_until_stopped(halted, STARTS_S)
        until_s = time.monotonic() + WARNS_S
        for other in others:
            other.wait_for(f"no heartbeat from rank {HALTED} for ", until_s - time.monotonic())
        if isinstance(where, int):
            record = RunRecord.load(tmp_path / "out" / f"rank-{HALTED:04d}.json")
            assert (record.ended, record.state, record.process) == (RUNNING, RUNNING, halted.program.pid)
        os.kill(halted.program.pid, signal.SIGCONT)
        for other in others:
            other.wait_for(f"rank {HALTED} is back after ", WARNS_S)
        (tmp_path / OVER).touch()
        assert [process.wait(STARTS_S) for process in ranks] == [0] * RANKS, [process.seen for process in ranks]
    if where == DECIDED:
        assert ranks[0].said("Nothing that is allowed is faster than plain DDP")
    for other in others:
        assert len(other.said("no heartbeat")) == len(other.said("is back")) == 1
    # A rank that was stopped itself names no other.
    assert not halted.said("heartbeat") and not halted.said("the job's store")


def test_a_stopped_rank_that_serves_the_store_is_named(tmp_path: Path, python: Interpreter) -> None:
    with started(python, under_run(tmp_path, "SIGSTOP", DECIDED, rank=0), tmp_path) as ranks:
        wait_until_stopped(ranks[0], STARTS_S)
        until_s = time.monotonic() + WARNS_S
        for other in ranks[1:]:
            line = other.wait_for("no answer from the job's store for ", until_s - time.monotonic())
            assert "rank 0, which serves it, is stopped or cannot be reached" in line
        os.kill(ranks[0].program.pid, signal.SIGCONT)
        for other in ranks[1:]:
            other.wait_for("the job's store answers again", 2 * WARNS_S)
        (tmp_path / OVER).touch()
        assert [process.wait(STARTS_S) for process in ranks] == [0] * RANKS, [process.seen for process in ranks]
    assert not any(process.said("no heartbeat") for process in ranks)


@pytest.mark.parametrize("where", [WATCHED, DECIDED])
def test_every_survivor_names_a_killed_rank_in_its_log_and_record(
    where: int, tmp_path: Path, python: Interpreter
) -> None:
    with started(python, under_run(tmp_path, "SIGKILL", where), tmp_path) as ranks:
        assert [process.wait(STARTS_S) for process in ranks] == [1, -signal.SIGKILL, 1]
    records = [RunRecord.load(tmp_path / "out" / f"rank-{rank:04d}.json") for rank in range(RANKS)]
    for rank in (0, 2):
        assert len(ranks[rank].said(f"suspect: rank {HALTED} (no heartbeat")) == 1
        assert f"suspect: rank {HALTED} (no heartbeat" in records[rank].ended
    assert records[HALTED].ended == RUNNING and records[HALTED].state.startswith(LOST)


def test_the_timeout_bounds_plain_ddps_collectives(tmp_path: Path, python: Interpreter) -> None:
    with started(python, under_run(tmp_path, "SIGSTOP", DECIDED, "--timeout", "6"), tmp_path) as ranks:
        wait_until_stopped(ranks[HALTED], STARTS_S)
        for rank in (0, 2):
            assert ranks[rank].wait(6 + 2 * WARNS_S) == 1
            assert ranks[rank].said("Timed out waiting 6000ms")
            assert ranks[rank].said(f"suspect: rank {HALTED} (no heartbeat")


def test_a_rank_that_computes_for_long_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.2)
    monkeypatch.setattr(suspects, "ALARM_S", 1.0)

    def main(rank: Rank) -> list[str]:
        said: list[str] = []
        heartbeat.log = said.append  # type: ignore[assignment]
        following = syncline.follow(DDP(seeded(Mlp)), change=False, quiet=True)
        dist.barrier()
        until_s = time.monotonic() + 4.0
        while rank.rank == HALTED and time.monotonic() < until_s:
            sum(range(10_000))
        dist.barrier()
        following.close()
        dist.barrier()
        return said

    assert on_ranks(RANKS, main) == [[]] * RANKS


class Clock:
    """The heartbeats of rank 1, which rank 0 reads once per second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.count, self.heartbeats = 100.0, 0, Heartbeats(1.0)
        monkeypatch.setattr(suspects.time, "monotonic", lambda: self.now_s)

    def goes(self, seconds: int, *, beats: bool, **more: Any) -> list[str]:
        lines = []
        for _ in range(seconds):
            self.now_s += 1.0
            self.count += beats
            lines += self.heartbeats.update({1: Beat(self.count, **more)})
        return lines


def test_silence_and_its_end_are_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    assert clock.goes(3, beats=True) == clock.goes(4, beats=False) == clock.goes(3, beats=True) == []
    (line,) = clock.goes(60, beats=False)
    assert line.startswith("no heartbeat from rank 1 for 5 s: ")
    assert clock.goes(3, beats=True) == ["rank 1 is back after 61 s without a heartbeat"]
    assert len(clock.goes(8, beats=False)) == 1
    assert len(clock.goes(1, beats=True)) == 1
    assert clock.goes(8, beats=False) == [], "a rank that comes back every time is given more time"
    assert len(clock.goes(8, beats=False)) == 1


@pytest.mark.parametrize(
    "last", [{"kind": Kind.ENDED, "why": "its program ended"}, {"kind": Kind.VICTIM, "why": "it met with a failure"}]
)
def test_a_rank_that_announced_its_end_is_not_called_silent(
    last: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    assert clock.goes(3, beats=True) == clock.goes(1, beats=True, **last) == []
    assert clock.goes(60, beats=False, **last) == []


def test_a_program_that_ends_early_is_not_called_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a launcher whose store outlives the ranks."""
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.2)
    monkeypatch.setattr(suspects, "ALARM_S", 1.0)

    def main(rank: Rank) -> list[str]:
        said: list[str] = []
        heartbeat.log = said.append  # type: ignore[assignment]
        syncline.follow(model := DDP(seeded(Mlp)), change=False, quiet=True)
        dist.barrier()
        if rank.rank == HALTED:
            heartbeat._at_exit()
        store = dist.distributed_c10d._get_default_store()
        with pytest.raises(RuntimeError):  # any wait, while another rank has ended
            store.wait(["what never comes"], timedelta(seconds=3))
        assert model is not None
        return said

    assert on_ranks(RANKS, main) == [[]] * RANKS


def ends_early(rank: int, port: int, ended: Any, said: Any) -> None:
    heartbeat.BEAT_S, suspects.ALARM_S = 0.2, 1.0
    heartbeat.log = said.put
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    syncline.follow(DDP(seeded(Mlp)), change=False, quiet=True)
    dist.barrier()
    if rank == 0:
        assert ended.wait(STARTS_S)
        with pytest.raises(RuntimeError):
            dist.distributed_c10d._get_default_store().wait(["what never comes"], timedelta(seconds=3))


def test_a_child_of_multiprocessing_that_ends_early_is_not_called_silent() -> None:
    """Such a child does not run functions that are registered with atexit."""
    context = multiprocessing.get_context("fork")
    ended, said = context.Event(), context.Queue()
    with reserved_port() as port:
        children = [context.Process(target=ends_early, args=(rank, port, ended, said)) for rank in range(2)]
        try:
            for child in children:
                child.start()
            children[1].join(STARTS_S)
            ended.set()
            children[0].join(STARTS_S)
            assert [child.exitcode for child in children] == [0, 0]
            assert said.empty()
        finally:
            for child in children:
                child.kill()
                child.join()


def record(**changed: Any) -> RunRecord:
    began = "2026-01-02T03:04:05+00:00"
    running = {"ended": RUNNING, "host": socket.gethostname(), "process": os.getpid(), "began": began}
    return msgspec.structs.replace(RECORD, **{**running, **changed})


def test_a_record_distinguishes_a_running_process_from_one_that_has_ended() -> None:
    now = "2999-01-01T00:00:00+00:00"
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(STARTS_S)
    assert record(began=now).state == RUNNING
    assert record(began=now, process=child.pid).state.startswith(LOST)
    assert record().state.startswith(LOST), "a process that started later is another process"
    assert record(host="elsewhere").state.startswith("still running on elsewhere at ")
    assert record(ended="finished", process=child.pid).state == "finished"
    assert record(host="", process=None, began="").state == RUNNING, "as earlier versions wrote it"
    gone = build_page(Inputs(runs=(record(process=child.pid, ranks=1, rank=0),)))
    assert LOST in gone.warning


def test_failure_shows_ranks_that_were_killed_without_a_failure_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SYNCLINE_FAILURES", str(tmp_path / "reports"))
    refused = CliRunner().invoke(app, ["failure"])
    assert refused.exit_code == 2 and "nothing has failed here" in refused.output
    (tmp_path / "syncline-run").mkdir()
    for rank, ended in enumerate((RUNNING, RUNNING, "finished")):
        record(rank=rank, ranks=3, ended=ended).save(tmp_path / "syncline-run" / f"rank-{rank:04d}.json")
    for arguments in ([], ["syncline-run"]):
        answer = CliRunner().invoke(app, ["failure", *arguments])
        assert answer.exit_code == 0 and answer.output.startswith("3 ranks under syncline run · no failure report")
        assert answer.output.count(LOST) == 2 and "A signal ended them" in answer.output


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan"), float("inf"), True, "10"])
def test_a_timeout_is_a_number_of_seconds(timeout_s: Any, one_rank: None) -> None:
    model = DDP(Mlp())
    for call in (
        lambda: TuneSettings(timeout_s=timeout_s),
        lambda: syncline.follow(model, timeout_s=timeout_s),
        lambda: syncline.attach(model, timeout_s=timeout_s),
        lambda: syncline.tune(model, lambda net: None, timeout_s=timeout_s),
    ):
        with pytest.raises(UsageError, match=r"timeout_s must be greater than 0"):
            call()


def test_a_timeout_becomes_the_groups_own(one_rank: None) -> None:
    model = DDP(Mlp())
    following = syncline.follow(model, timeout_s=17.5, quiet=True)
    assert group_timeout(model.process_group) == timedelta(seconds=17.5)
    following.close()
