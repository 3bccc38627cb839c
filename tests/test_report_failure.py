"""The page of a failed run: which rank caused it, what the others saw, and how long ranks waited for each other."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import syncline
from ddp_helpers import SMALL_BUCKETS
from survivors import wait_for
from syncline.cluster import ClusterSpec, Rank, launch_outcomes
from syncline.errors import UsageError
from syncline.files import write_json
from syncline.records.failure_report import FOLDER, FOLDER_VARIABLE, Event, FailureReport, Kind, Suspect
from syncline.records.postmortem import examine_reports, postmortem_of
from syncline.records.run_record import RUNNING, RunRecord
from syncline.report.inputs import Inputs
from syncline.report.page import build_page
from syncline.report.read_inputs import read_inputs
from syncline.report.sections.ranks import rank_times
from test_report import EVIL, a_run, page_of

LOST, DIES_AT = 1, 3


def _train(rank: Rank) -> None:
    rank.init_process_group(20.0)
    model = DDP(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), **SMALL_BUCKETS)
    syncline.attach(model, syncline.Dense(wire="bf16"))
    for step in range(2 * DIES_AT):
        if (step, rank.rank) == (DIES_AT, LOST):
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            model(torch.ones(2, 64)).sum().backward()
        except RuntimeError:
            wait_for(rank, 0, 2)
            raise


@pytest.fixture(scope="session")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The failure reports of three ranks, of which one was killed."""
    folder = tmp_path_factory.mktemp("job") / FOLDER
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(folder))
        launch_outcomes(ClusterSpec(hosts=3), _train, deadline_s=60.0, grace_s=30.0, shaped=False)
    yield folder


def records_of(reports: Path) -> list[RunRecord]:
    """Records that `syncline run` would have written in the processes of these reports; the killed rank's is old."""
    process_of = {report.rank: (report.host, report.process) for report in examine_reports(reports).reports}
    records = []
    for rank in range(3):
        host, process = process_of.get(rank, ("vm", 1))
        ended = RUNNING if rank == LOST else "RuntimeError: Connection closed by peer"
        records.append(msgspec.structs.replace(a_run(rank, 3, ended=ended), host=host, process=process))
    return records


def test_the_page_of_a_killed_rank_names_it_and_shows_what_the_others_saw(reports: Path) -> None:
    inputs = read_inputs([reports])
    page, seen = build_page(inputs), page_of(inputs)
    assert page.verdict.startswith(f"Rank {LOST} probably made the job fail in step {DIES_AT}: no heartbeat for ")
    assert page.verdict.endswith("as ranks 0, 2 saw it.")
    assert "3 ranks · gloo" in seen.text and not page.recommendation
    assert [name for name in seen.sections if name not in ("assumptions", "sources")] == ["failure"]
    assert f"{LOST} – no failure report" in seen.text
    marks = seen.of("failure", "data-bucket")
    failed = [mark for mark in marks if mark.attributes["data-kind"] == "failed"]
    assert {mark.attributes["data-rank"] for mark in failed} == {"0", "2"}, "the survivors waited"
    assert all(mark.attributes["data-step"] == f"{DIES_AT}" for mark in failed)
    assert all(mark.says.startswith(f"rank {mark.attributes['data-rank']}, step ") for mark in marks)
    assert f"syncline failure {reports} --events 20" in seen.text


def test_reports_beside_the_folder_of_a_run_are_found_if_they_are_of_this_run(reports: Path, tmp_path: Path) -> None:
    shutil.copytree(reports, tmp_path / FOLDER)
    run = tmp_path / "run"
    run.mkdir()
    for record in records_of(reports):
        write_json(run / f"rank-{record.rank}.json", record)
    inputs = read_inputs([run])
    assert inputs.failure is not None and inputs.failure.missing == (LOST,)
    page, seen = build_page(inputs), page_of(inputs)
    assert page.verdict.startswith("Rank 1 probably made the job fail") and "did not finish" not in page.warning
    assert seen.sections[:2] == ["failure", "ranks"]
    assert "no failure report; its record says: " in seen.text

    for record in records_of(reports):  # a later run in the same place
        write_json(run / f"rank-{record.rank}.json", msgspec.structs.replace(record, process=7, ended="finished"))
    assert read_inputs([run]).failure is None and "failure" not in page_of(read_inputs([run])).sections
    with pytest.raises(UsageError, match="the failure reports are not of this run"):
        read_inputs([run, reports])


def test_a_run_without_failure_reports_shows_how_each_rank_ended() -> None:
    ended = ("ValueError: no such file", "finished", "RuntimeError: Connection closed by peer", RUNNING)
    seen = page_of(Inputs(runs=tuple(a_run(rank, ended=text) for rank, text in enumerate(ended))))
    assert seen.sections[0] == "failure"
    assert "The run did not finish: rank 0, before 2 other ranks: ValueError: no such file." in seen.text
    assert "No rank wrote a failure report" in seen.text


def report(rank: int, **fields: Any) -> FailureReport:
    known = {"world_size": 4, "backend": "gloo", "timeout_s": 10.0, "where": f"step {6 - rank}", "step": 6 - rank}
    date = f"2026-11-16T09:32:58.88{rank}+00:00"
    return FailureReport(rank=rank, **{"host": "a", "error": "timed out", "date": date, **known, **fields})


def test_ranks_that_waited_for_each_other_are_told_apart() -> None:
    seen = page_of(Inputs(failure=postmortem_of([report(0), report(1), report(2, where="step 6", step=6)])))
    assert "The ranks waited for each other: ranks 0, 2 in step 6; rank 1 in step 5." in seen.text
    assert "Look first at rank 1" in seen.text and not seen.of("failure")
    seen = page_of(Inputs(failure=postmortem_of([report(1)])))
    assert "The job failed in step 5, and no failure report names a suspect." in seen.text
    assert "Look first at ranks 0, 2, 3, without a failure report." in seen.text


def test_whatever_a_failure_report_says_stays_text() -> None:
    suspect = Suspect(1, Kind.ENDED, EVIL)
    evil = report(0, host=EVIL, where=EVIL, error=EVIL, backend=EVIL, suspects=(suspect,))
    seen = page_of(Inputs(failure=postmortem_of([evil]), files={"failure": (EVIL,)}))
    assert seen.tags.count("script") == 1 and EVIL in seen.text


def test_a_report_with_impossible_times_is_refused() -> None:
    with pytest.raises(ValueError, match="date: is not a date"):
        report(0, date="0001-01-01T00:00:00+14:00")
    event = Event(before_s=-1e308, what="start", lane=0, step=1, bucket=0)
    with pytest.raises(msgspec.ValidationError, match="before_s"):
        msgspec.json.decode(msgspec.json.encode(report(0, events=(event,))), type=FailureReport)


def test_what_a_rank_spends_its_time_on_adds_up_to_the_whole() -> None:
    known = {rank: a_run(rank).models[0] for rank in range(4)}
    times, steps = rank_times(known, "plan")
    assert steps == 19
    for rank, of_rank in times.items():
        assert of_rank.whole_s == pytest.approx(0.096)
        assert of_rank.compute_s == pytest.approx(0.034 if rank == 2 else 0.03)
        assert of_rank.waiting_s == pytest.approx(0.0 if rank == 2 else 0.004, abs=1e-9)
        assert of_rank.between_s == pytest.approx(0.006)
    seen = page_of(Inputs(runs=tuple(a_run(rank) for rank in range(4))))
    assert "The ranks lose 3% of their time to waiting for slower ranks: rank 0 4%, and rank 2, for which" in seen.text
    waiting = [mark.value("seconds") for mark in seen.of("ranks", "data-rank") if "waiting" in mark.says]
    assert waiting == [pytest.approx(0.004)] * 3
    assert "ranks" not in page_of(Inputs(runs=(a_run(),))).sections, "one rank cannot be compared"


def test_ranks_that_take_turns_at_being_slow_wait_for_each_other_all_the_same() -> None:
    """Their medians are equal, so only the steps themselves show it."""
    known = {}
    for rank in range(2):
        model = a_run(rank, 2).models[0]
        spans = []
        for span in model.spans:
            late_s = 0.01 if span.step % 2 == rank else 0.0
            spans.append(msgspec.structs.replace(span, backward_end_s=span.backward_end_s + late_s))
        known[rank] = msgspec.structs.replace(model, spans=tuple(spans))
    times, steps = rank_times(known, "plain DDP")
    waited_s = [times[rank].waiting_s for rank in range(2)]
    assert sum(waited_s) == pytest.approx(0.01, rel=1e-6) and steps == 9
