"""`syncline failure`: the failure reports of all ranks, read together."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from syncline.cli import app
from syncline.records.failure_report import FOLDER_VARIABLE, Event, FailureReport, Kind, Pending, Suspect
from syncline.records.postmortem import examine_reports

runner = CliRunner()
GONE = Suspect(2, Kind.SILENT, "no heartbeat for 2 s")
STORE = Suspect(0, Kind.STORE_GONE, "it or its launcher served the job's store, which has ended")


def write(folder: Path, rank: int, *suspects: Suspect, **other: Any) -> Path:
    report = FailureReport(
        rank=rank,
        host=other.pop("host", f"host{rank}"),
        world_size=other.pop("world_size", 4),
        date=other.pop("date", "2026-11-16T09:32:58.884+00:00"),
        backend="gloo",
        timeout_s=10.0,
        where=other.pop("where", "step 6"),
        step=other.pop("step", 6),
        error=other.pop("error", "exchanging bucket 0 failed in step 6: Connection closed by peer"),
        suspects=suspects,
        pending=(Pending(lane=0, step=6, bucket=0, bytes=526336, exchange="OkTopk", age_s=1.5),),
        events=(
            Event(before_s=2.0, what="ready", lane=0, step=6, bucket=0),
            Event(before_s=1.9, what="all_to_all", lane=0, step=6, bucket=0, level="world", sent_bytes=4096),
        ),
        **other,
    )
    path = folder / f"rank-{rank}.json"
    path.write_bytes(msgspec.json.encode(report))
    return path


def said(*arguments: object) -> str:
    answer = runner.invoke(app, ["failure", *map(str, arguments)])
    assert answer.exit_code == 0, answer.output
    return " ".join(answer.output.split())


def test_the_rank_that_most_others_suspect_comes_first(tmp_path: Path) -> None:
    write(tmp_path, 0, GONE)
    write(tmp_path, 1, GONE)
    write(tmp_path, 3, STORE)
    found = examine_reports(tmp_path)
    assert [(one.rank, one.by, one.left_report) for one in found.accused] == [(2, (0, 1), False), (0, (3,), True)]
    assert found.missing == (2,) and not found.earlier
    text = said(tmp_path, "--events", 1, "--json", tmp_path / "all.json")
    assert "No failure report of rank 2." in text
    assert (
        "Suspect: rank 2 (no heartbeat for 2 s), named by ranks 0, 1; it wrote no failure report. Next: its pro" in text
    )
    assert "named by rank 3. Next: the server of the store has ended" in text
    assert text.count("all_to_all step 6, bucket 0, lane 0 world") == 3 and "ready" not in text
    assert json.loads((tmp_path / "all.json").read_text())["missing"] == [2]


def test_a_report_of_another_failure_does_not_count(tmp_path: Path) -> None:
    write(tmp_path, 0, GONE)
    write(tmp_path, 1, Suspect(3, Kind.SILENT, "no heartbeat for 9 s"), date="2026-11-15T09:32:58.884+00:00")
    write(tmp_path, 2, date="2026-11-16T09:33:08", world_size=3)  # by a clock without a zone, of a smaller job, later
    found = examine_reports(tmp_path)
    assert [report.rank for report in found.reports] == [2]
    assert found.earlier == (0, 1) and found.missing == (0, 1) and not found.accused
    text = said(tmp_path)
    assert "No failure report of ranks 0, 1 (that of ranks 0, 1 is of another failure)." in text
    assert (
        "No failure report names a suspect: each rank's own error is all that is known. Look first at ranks 0, 1."
        in text
    )


def test_the_server_of_the_store_is_suspected_last_if_it_wrote_a_report(tmp_path: Path) -> None:
    write(tmp_path, 0, GONE)
    write(tmp_path, 1, STORE)
    write(tmp_path, 3, STORE)
    assert [one.rank for one in examine_reports(tmp_path).accused] == [2, 0]
    (tmp_path / "rank-0.json").unlink()  # then it may well have been the first to go
    assert [one.rank for one in examine_reports(tmp_path).accused] == [0]


def test_each_attempt_is_a_failure_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, 2, Suspect(1, Kind.SILENT, "no heartbeat for 2 s"), attempt="0")
    write(tmp_path, 0, GONE, attempt="1", date="2026-11-16T09:34:58.884+00:00")
    found = examine_reports(tmp_path)
    assert [report.rank for report in found.reports] == [0] and found.earlier == (2,)
    assert [(one.rank, one.left_report) for one in found.accused] == [(2, False)]


@pytest.mark.parametrize("kind", Kind)
def test_every_reason_comes_with_advice_whatever_its_text_is(kind: Kind, tmp_path: Path) -> None:
    write(tmp_path, 0, Suspect(1, kind, "no heartbeat, alive, the job's store"))
    (one,) = examine_reports(tmp_path).accused
    assert one.kind is kind
    next_ = {
        Kind.SILENT: "its process has ended or is stopped",
        Kind.ELSEWHERE: "it did something else",
        Kind.DETACHED: "it runs another program",
        Kind.INSIDE: "its exchange hangs",
        Kind.UNSEEN: "it had not started yet",
        Kind.STORE_GONE: "the server of the store",
        Kind.STORE_MUTE: "see whether its host is up, and the links",
    }
    assert one.what_to_do.startswith(next_.get(kind, "see its output"))
    assert f"Next: {one.what_to_do}" in said(tmp_path)


def test_reports_of_another_job_in_the_same_folder_are_left_out_however_new(tmp_path: Path) -> None:
    write(tmp_path, 0, GONE, job="a1")
    write(tmp_path, 1, Suspect(3, Kind.SILENT, "no heartbeat"), job="b2", date="2026-11-16T09:32:57.000+00:00")
    write(tmp_path, 3, GONE)  # it could not ask for the name of the job
    found = examine_reports(tmp_path)
    assert [report.rank for report in found.reports] == [0, 3] and found.earlier == (1,)
    assert [(one.rank, one.by) for one in found.accused] == [(2, (0, 3))]


def test_a_report_of_a_call_has_no_step(tmp_path: Path) -> None:
    write(tmp_path, 0, GONE, step=None, error="not all ranks called attach")
    text = said(tmp_path)
    assert "not all ranks" in text and "None" not in text


def test_the_default_folder_is_the_one_that_ranks_write_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    write(tmp_path, 0, GONE)
    assert "Suspect: rank 2" in said()
    monkeypatch.delenv(FOLDER_VARIABLE)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "syncline-failure").mkdir()
    write(
        tmp_path / "syncline-failure",
        1,
        Suspect(3, Kind.ELSEWHERE, "alive, in step 5, but has not reached this exchange"),
    )
    assert "Suspect: rank 3" in said()
    monkeypatch.setenv(FOLDER_VARIABLE, "")
    answer = runner.invoke(app, ["failure"])
    assert answer.exit_code == 2 and "SYNCLINE_FAILURES is empty, so ranks write no failure reports" in answer.output


def test_a_damaged_report_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    write(tmp_path, 1, GONE).rename(tmp_path / "rank-9.json")
    write(tmp_path, 1, GONE)
    path = write(tmp_path, 0, GONE)
    path.write_text(path.read_text()[:-9])
    text = said(tmp_path)
    assert "Suspect: rank 2 (no heartbeat for 2 s), named by rank 1" in text
    assert "rank-0.json: is not complete JSON" in text
    assert "rank-9.json: is a second report of rank 1: give each job its own folder" in text


def test_victims_are_suspects_only_if_there_are_no_others(tmp_path: Path) -> None:
    victim = "it failed too: exchanging bucket 0 failed in step 6"
    write(tmp_path, 0, Suspect(1, Kind.VICTIM, victim))
    assert [one.rank for one in examine_reports(tmp_path).accused] == [1]
    write(tmp_path, 1, Suspect(2, Kind.ELSEWHERE, "alive, in step 5, but has not reached this collective"))
    write(tmp_path, 3, Suspect(1, Kind.VICTIM, victim), Suspect(0, Kind.VICTIM, victim))
    assert [one.rank for one in examine_reports(tmp_path).accused] == [2]


def test_of_several_reasons_the_most_telling_counts(tmp_path: Path) -> None:
    own = Suspect(0, Kind.FAILED, "no room for this bucket")
    write(tmp_path, 1, STORE)
    write(tmp_path, 2, own)
    write(tmp_path, 3, Suspect(0, Kind.VICTIM, "it failed too"), Suspect(1, Kind.SILENT, "no heartbeat for 3 s"))
    write(tmp_path, 0)
    first, second = examine_reports(tmp_path).accused
    assert (first.rank, first.kind, first.why, first.by) == (0, Kind.FAILED, own.why, (1, 2, 3))
    assert second.rank == 1


def test_ranks_that_waited_for_each_other_are_shown_with_their_places(tmp_path: Path) -> None:
    def too(rank: int) -> Suspect:
        return Suspect(rank, Kind.VICTIM, "it failed too")

    write(tmp_path, 0, too(1), too(2), where="save", step=None, world_size=3)
    write(tmp_path, 1, too(0), too(2), where="step 10", world_size=3)
    write(tmp_path, 2, too(0), too(1), where="save", step=None, world_size=3)
    found = examine_reports(tmp_path)
    assert not found.accused and found.apart == (("save", (0, 2)), ("step 10", (1,)))
    text = said(tmp_path)
    assert "They waited for each other: ranks 0, 2 in save; rank 1 in step 10." in text
    assert "Look first at rank 1" in text and "names a suspect" not in text


def test_the_age_of_reports_is_shown_and_a_folder_that_has_some(tmp_path: Path) -> None:
    (tmp_path / "syncline-failure").mkdir()
    write(tmp_path / "syncline-failure", 0, GONE, date="2020-01-01T00:00:00+00:00")
    assert " days ago · syncline" in said(tmp_path / "syncline-failure")
    answer = runner.invoke(app, ["failure", str(tmp_path)])
    assert answer.exit_code == 2 and f"{tmp_path / 'syncline-failure'} has some" in " ".join(answer.output.split())
    answer = runner.invoke(app, ["failure", str(tmp_path / "syncline-failure"), "--json", "-"])
    assert answer.exit_code == 2 and "- is not a file name: write to a file, or to /dev/stdout" in answer.output


def test_other_files_among_the_reports_are_ignored(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank-3.json")
    (tmp_path / "rank-4.json").mkdir()
    write(tmp_path, 0, GONE)
    path = write(tmp_path, 1, GONE)
    path.write_text(path.read_text().replace('"timeout_s":10.0', '"timeout_s":-1000.0'))
    text = said(tmp_path)
    assert "Suspect: rank 2" in text and "timeout_s: is -1000.0; it must not be negative" in text


def test_the_text_of_a_report_cannot_control_the_terminal(tmp_path: Path) -> None:
    write(tmp_path, 0, Suspect(1, Kind.FAILED, "[bold]\x1b[2Jgone\n"), error="\x1b]0;title\x07[red]no", host="[link=x]")
    answer = runner.invoke(app, ["failure", str(tmp_path), "--events", "5"])
    assert answer.exit_code == 0
    assert "\x1b" not in answer.output and "\x07" not in answer.output
    assert "[bold]" in answer.output and "[red]no" in answer.output and "[link=x]" in answer.output


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("no folder", "nothing has failed here, or ranks wrote their rank-N.json elsewhere: name that folder"),
        ("nothing", "has no rank-N.json: each rank writes its own, on its own host"),
        ("half", "is not complete JSON"),
        ("another", "rank: is missing"),
        ("too many", "rank: is 0 of 1000000000000: there is no such rank"),
        ("outside", "rank: is 4 of 4: there is no such rank"),
        ("date", "date: is not a date in ISO 8601"),
        ("long", "cannot be read: File name too long"),
    ],
)
def test_a_file_that_is_no_report_is_refused_in_one_line(wrong: str, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "reports"
    if wrong != "no folder":
        folder.mkdir()
    if wrong == "half":
        path = write(folder, 0)
        path.write_text(path.read_text()[:-9])
    elif wrong == "another":
        (folder / "rank-0.json").write_text('{"schema": 2}')
    elif wrong == "too many":
        path = write(folder, 0)
        path.write_text(path.read_text().replace('"world_size":4', '"world_size":1000000000000'))
    elif wrong == "outside":
        path = write(folder, 0)
        path.write_text(path.read_text().replace('"rank":0', '"rank":4'))
    elif wrong == "date":
        path = write(folder, 0)
        path.write_text(path.read_text().replace("2026-", "once "))
    answer = runner.invoke(app, ["failure", str(folder) + ("x" * 300 if wrong == "long" else "")])
    assert answer.exit_code == 2
    assert len(answer.output.splitlines()) == 1 and answer.output.startswith("syncline failure: ")
    assert message in answer.output
