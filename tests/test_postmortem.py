"""`syncline failure`: what ranks left behind, read together."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from syncline.cli import app
from syncline.doctor import examine_notes
from syncline.health.failure import FOLDER_VARIABLE, Event, Failure, Pending
from syncline.health.suspects import Kind, Suspect

runner = CliRunner()
GONE = Suspect(2, Kind.SILENT, "no sign of life for 2 s")
STORE = Suspect(0, Kind.STORE_GONE, "the job's store, which it or its launcher served, is gone")


def leave(folder: Path, rank: int, *suspects: Suspect, **other: Any) -> Path:
    note = Failure(
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
    path.write_bytes(msgspec.json.encode(note))
    return path


def said(*arguments: object) -> str:
    answer = runner.invoke(app, ["failure", *map(str, arguments)])
    assert answer.exit_code == 0, answer.output
    return " ".join(answer.output.split())


def test_whom_most_suspect_comes_first_with_what_to_look_at(tmp_path: Path) -> None:
    leave(tmp_path, 0, GONE)
    leave(tmp_path, 1, GONE)
    leave(tmp_path, 3, STORE)
    found = examine_notes(tmp_path)
    assert [(one.rank, one.by, one.left_note) for one in found.accused] == [(2, (0, 1), False), (0, (3,), True)]
    assert found.missing == (2,) and not found.earlier
    text = said(tmp_path, "--events", 1, "--json", tmp_path / "all.json")
    assert "No failure report from rank 2." in text
    suspect = "Suspect: rank 2 (no sign of life for 2 s), according to ranks 0, 1; it left no failure report."
    assert f"{suspect} Next: its process ended" in text
    assert "according to rank 3. Next: the process that serves the store has ended" in text
    assert text.count("all_to_all step 6, bucket 0, lane 0 world") == 3 and "ready" not in text
    assert json.loads((tmp_path / "all.json").read_text())["missing"] == [2]


def test_a_note_of_another_failure_does_not_count(tmp_path: Path) -> None:
    leave(tmp_path, 0, GONE)
    leave(tmp_path, 1, Suspect(3, Kind.SILENT, "no sign of life for 9 s"), date="2026-11-15T09:32:58.884+00:00")
    leave(tmp_path, 2, date="2026-11-16T09:33:08", world_size=3)  # by a clock without a zone, of a smaller job, later
    found = examine_notes(tmp_path)
    assert [note.rank for note in found.notes] == [2]
    assert found.earlier == (0, 1) and found.missing == (0, 1) and not found.accused
    text = said(tmp_path)
    assert "No failure report from ranks 0, 1 (only one of an earlier failure from ranks 0, 1)." in text
    assert "No failure report names a suspect: see the error of each rank. Look first at ranks 0, 1." in text


def test_who_served_the_store_and_left_a_note_is_suspected_last(tmp_path: Path) -> None:
    leave(tmp_path, 0, GONE)
    leave(tmp_path, 1, STORE)
    leave(tmp_path, 3, STORE)
    assert [one.rank for one in examine_notes(tmp_path).accused] == [2, 0]
    (tmp_path / "rank-0.json").unlink()  # then it may well have been the first to go
    assert [one.rank for one in examine_notes(tmp_path).accused] == [0]


def test_each_attempt_is_a_failure_of_its_own(tmp_path: Path) -> None:
    leave(tmp_path, 2, Suspect(1, Kind.SILENT, "no sign of life for 2 s"), attempt="0")
    leave(tmp_path, 0, GONE, attempt="1", date="2026-11-16T09:34:58.884+00:00")
    found = examine_notes(tmp_path)
    assert [note.rank for note in found.notes] == [0] and found.earlier == (2,)
    assert [(one.rank, one.left_note) for one in found.accused] == [(2, False)]


@pytest.mark.parametrize("kind", Kind)
def test_for_every_reason_there_is_something_to_look_at_whatever_its_words_are(kind: Kind, tmp_path: Path) -> None:
    leave(tmp_path, 0, Suspect(1, kind, "no sign of life, alive, the job's store"))
    (one,) = examine_notes(tmp_path).accused
    assert one.kind is kind
    next_ = {
        Kind.SILENT: "its process ended or hangs",
        Kind.ELSEWHERE: "it did something else",
        Kind.DETACHED: "it runs another program",
        Kind.INSIDE: "its exchange hangs",
        Kind.UNSEEN: "it had not got that far",
        Kind.STORE_GONE: "the process that serves the store",
        Kind.STORE_MUTE: "see whether its host, and the link",
    }
    assert one.what_to_do.startswith(next_.get(kind, "see its output"))
    assert f"Next: {one.what_to_do}" in said(tmp_path)


def test_notes_of_another_job_in_the_same_folder_are_no_part_of_it_however_new(tmp_path: Path) -> None:
    leave(tmp_path, 0, GONE, job="a1")
    leave(tmp_path, 1, Suspect(3, Kind.SILENT, "no sign of life"), job="b2", date="2026-11-16T09:32:57.000+00:00")
    leave(tmp_path, 3, GONE)  # it could not ask what the job is called
    found = examine_notes(tmp_path)
    assert [note.rank for note in found.notes] == [0, 3] and found.earlier == (1,)
    assert [(one.rank, one.by) for one in found.accused] == [(2, (0, 3))]


def test_a_note_from_a_meeting_has_no_step(tmp_path: Path) -> None:
    leave(tmp_path, 0, GONE, step=None, error="the ranks did not meet to attach")
    text = said(tmp_path)
    assert "the ranks did" in text and "None" not in text


def test_the_folder_is_where_ranks_leave_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    leave(tmp_path, 0, GONE)
    assert "Suspect: rank 2" in said()
    monkeypatch.delenv(FOLDER_VARIABLE)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "syncline-failure").mkdir()
    leave(
        tmp_path / "syncline-failure",
        1,
        Suspect(3, Kind.ELSEWHERE, "alive, in step 5, and has not come to this exchange"),
    )
    assert "Suspect: rank 3" in said()
    monkeypatch.setenv(FOLDER_VARIABLE, "")
    answer = runner.invoke(app, ["failure"])
    assert answer.exit_code == 2 and "SYNCLINE_FAILURES is empty, so ranks write no failure reports" in answer.output


def test_a_damaged_note_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    leave(tmp_path, 1, GONE).rename(tmp_path / "rank-9.json")
    leave(tmp_path, 1, GONE)
    path = leave(tmp_path, 0, GONE)
    path.write_text(path.read_text()[:-9])
    text = said(tmp_path)
    assert "Suspect: rank 2 (no sign of life for 2 s), according to rank 1" in text
    assert "rank-0.json: is not complete JSON" in text
    assert "rank-9.json: is a second report of rank 1: give each job its own folder" in text


def test_victims_are_no_suspects_where_others_are(tmp_path: Path) -> None:
    victim = "it failed too: exchanging bucket 0 failed in step 6"
    leave(tmp_path, 0, Suspect(1, Kind.VICTIM, victim))
    assert [one.rank for one in examine_notes(tmp_path).accused] == [1]
    leave(tmp_path, 1, Suspect(2, Kind.ELSEWHERE, "alive, in step 5, and has not come to this collective"))
    leave(tmp_path, 3, Suspect(1, Kind.VICTIM, victim), Suspect(0, Kind.VICTIM, victim))
    assert [one.rank for one in examine_notes(tmp_path).accused] == [2]


def test_of_what_is_said_of_a_rank_the_worst_counts(tmp_path: Path) -> None:
    own = Suspect(0, Kind.FAILED, "no room for this bucket")
    leave(tmp_path, 1, STORE)
    leave(tmp_path, 2, own)
    leave(tmp_path, 3, Suspect(0, Kind.VICTIM, "it failed too"), Suspect(1, Kind.SILENT, "no sign of life for 3 s"))
    leave(tmp_path, 0)
    first, second = examine_notes(tmp_path).accused
    assert (first.rank, first.kind, first.why, first.by) == (0, Kind.FAILED, own.why, (1, 2, 3))
    assert second.rank == 1


def test_ranks_that_waited_for_each_other_are_told_where(tmp_path: Path) -> None:
    def too(rank: int) -> Suspect:
        return Suspect(rank, Kind.VICTIM, "it failed too")

    leave(tmp_path, 0, too(1), too(2), where="save", step=None, world_size=3)
    leave(tmp_path, 1, too(0), too(2), where="step 10", world_size=3)
    leave(tmp_path, 2, too(0), too(1), where="save", step=None, world_size=3)
    found = examine_notes(tmp_path)
    assert not found.accused and found.apart == (("save", (0, 2)), ("step 10", (1,)))
    text = said(tmp_path)
    assert "They waited for each other: ranks 0, 2 in save; rank 1 in step 10." in text
    assert "Look first at rank 1" in text and "names a suspect" not in text


def test_how_old_notes_are_is_said_and_where_others_are(tmp_path: Path) -> None:
    (tmp_path / "syncline-failure").mkdir()
    leave(tmp_path / "syncline-failure", 0, GONE, date="2020-01-01T00:00:00+00:00")
    assert " days ago · syncline" in said(tmp_path / "syncline-failure")
    answer = runner.invoke(app, ["failure", str(tmp_path)])
    assert answer.exit_code == 2 and f"{tmp_path / 'syncline-failure'} has some" in " ".join(answer.output.split())
    answer = runner.invoke(app, ["failure", str(tmp_path / "syncline-failure"), "--json", "-"])
    assert answer.exit_code == 2 and "- is not a file name: write to a file, or to /dev/stdout" in answer.output


def test_odd_things_among_the_notes_hurt_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank-3.json")
    (tmp_path / "rank-4.json").mkdir()
    leave(tmp_path, 0, GONE)
    path = leave(tmp_path, 1, GONE)
    path.write_text(path.read_text().replace('"timeout_s":10.0', '"timeout_s":-1000.0'))
    text = said(tmp_path)
    assert "Suspect: rank 2" in text and "timeout_s: is -1000.0; it must not be negative" in text


def test_nothing_that_a_note_says_reaches_the_terminal_as_more_than_text(tmp_path: Path) -> None:
    leave(tmp_path, 0, Suspect(1, Kind.FAILED, "[bold]\x1b[2Jgone\n"), error="\x1b]0;title\x07[red]no", host="[link=x]")
    answer = runner.invoke(app, ["failure", str(tmp_path), "--events", "5"])
    assert answer.exit_code == 0
    assert "\x1b" not in answer.output and "\x07" not in answer.output
    assert "[bold]" in answer.output and "[red]no" in answer.output and "[link=x]" in answer.output


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("no folder", "nothing has failed, or the failure reports are in another one"),
        ("nothing", "has no failure reports (rank-N.json): each rank writes its own, on its own host"),
        ("half", "is not complete JSON"),
        ("another", "rank: is missing"),
        ("too many", "rank: is 0 of 1000000000000: no rank has left it"),
        ("outside", "rank: is 4 of 4: no rank has left it"),
        ("date", "date: is not a date in ISO 8601"),
        ("long", "cannot be read: File name too long"),
    ],
)
def test_what_is_no_note_is_refused_in_one_line(wrong: str, told: str, tmp_path: Path) -> None:
    folder = tmp_path / "notes"
    if wrong != "no folder":
        folder.mkdir()
    if wrong == "half":
        path = leave(folder, 0)
        path.write_text(path.read_text()[:-9])
    elif wrong == "another":
        (folder / "rank-0.json").write_text('{"schema": 2}')
    elif wrong == "too many":
        path = leave(folder, 0)
        path.write_text(path.read_text().replace('"world_size":4', '"world_size":1000000000000'))
    elif wrong == "outside":
        path = leave(folder, 0)
        path.write_text(path.read_text().replace('"rank":0', '"rank":4'))
    elif wrong == "date":
        path = leave(folder, 0)
        path.write_text(path.read_text().replace("2026-", "once "))
    answer = runner.invoke(app, ["failure", str(folder) + ("x" * 300 if wrong == "long" else "")])
    assert answer.exit_code == 2
    assert len(answer.output.splitlines()) == 1 and answer.output.startswith("syncline failure: ")
    assert told in answer.output
