"""A file is read completely and correctly, or one line says what is wrong with it."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from syncline.files import FileError, read_json, write_json, write_text


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    size_bytes: int

    def __post_init__(self) -> None:
        if self.size_bytes < 0:
            raise ValueError("size_bytes: must not be negative")


class Whole(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    schema: int = 2
    rate: float
    parts: tuple[Part, ...]


WHOLE = Whole(rate=1.5, parts=(Part("α", 1), Part("b", 2)))
GOOD = {"schema": 2, "rate": 1.5, "parts": [{"name": "α", "size_bytes": 1}, {"name": "b", "size_bytes": 2}]}

loose = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


def problem(path: Path, content: str | bytes) -> str:
    """Return the error of reading such a file, checked to be one line that begins with the file's name."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(FileError) as caught:
        read_json(path, Whole)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert len(message.splitlines()) == 1
    return message.removeprefix(f"{path}: ")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "whole.json"


def test_what_was_written_is_read_back(path: Path) -> None:
    write_json(path, WHOLE)
    assert read_json(path, Whole) == WHOLE


def test_files_are_indented_text_that_ends_with_a_newline(path: Path) -> None:
    write_json(path, WHOLE)
    text = path.read_text(encoding="utf-8")
    assert text.endswith("}\n")
    assert '\n  "rate": 1.5,' in text
    assert "α" in text


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        ({"rate": "fast"}, "rate: expected float, got str"),
        ({"parts": [{"name": "a", "size_bytes": 1.0}]}, "parts[0].size_bytes: expected int, got float"),
        ({"parts": [{"name": "a", "size_bytes": -1}]}, "parts[0].size_bytes: must not be negative"),
        ({"parts": [{"name": "a"}]}, "parts[0].size_bytes: is missing"),
        ({"parts": [{"name": "a", "size": 1, "size_bytes": 1}]}, "parts[0].size: is not a known key"),
        ({"extra\nkey": 1}, "extra key: is not a known key"),
        ({"schema": 3}, "schema: is 3, and this release reads up to 2; upgrade syncline"),
        ({"schema": 1}, "schema: is 1, and this release reads 2"),
        ({"schema": True}, "schema: must be the whole number 2"),
        ({"rate": float("nan")}, "rate: must be a finite number, not nan"),
        ({"rate": float("-inf")}, "rate: must be a finite number, not -inf"),
        ({"rate": 10**400}, "rate: number out of range"),
    ],
)
def test_errors_name_the_field(path: Path, edit: dict[str, object], expected: str) -> None:
    assert problem(path, json.dumps(GOOD | edit)).startswith(expected)


@pytest.mark.parametrize("key", GOOD)
def test_a_missing_key_is_named(path: Path, key: str) -> None:
    content = {k: v for k, v in GOOD.items() if k != key}
    assert problem(path, json.dumps(content)).startswith(f"{key}: is missing")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "is not JSON (the file is empty)"),
        (" \n", "is not JSON (the file is empty)"),
        ("# a comment", "is not JSON (Expecting value at line 1, column 1)"),
        ("10 ranks", "is not JSON (Extra data at line 1, column 4)"),
        ('{"rate": "fa', "is not complete JSON (Unterminated string starting at line 1, column 10)"),
        ("[]", "expected object, got array"),
        (b"\x80\x81", "is not a text file"),
        ('{"schema": 2, "rate": 1, "rate": 2, "parts": []}', "rate: appears more than once"),
        ('{"schema": 2, "rate": 1e999, "parts": []}', "rate: must be a finite number"),
        ("[" * 100_000, "is nested too deeply"),
        (json.dumps(GOOD) + "}", "is not complete JSON"),
        ('{"rate": ' + "9" * 5000 + "}", ""),
    ],
)
def test_malformed_files_are_refused(path: Path, content: str | bytes, expected: str) -> None:
    assert problem(path, content).startswith(expected)


def test_a_missing_file_is_named(path: Path) -> None:
    with pytest.raises(FileError, match=r"whole\.json: cannot be read: No such file"):
        read_json(path, Whole)


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot be read"):
        read_json(tmp_path, Whole)
    with pytest.raises(FileError, match="cannot be written"):
        write_json(tmp_path, WHOLE)


@given(data=st.data())
@loose
def test_every_truncation_is_an_error(path: Path, data: st.DataObject) -> None:
    write_json(path, WHOLE)
    content = path.read_bytes().rstrip()
    problem(path, content[: data.draw(st.integers(0, len(content) - 1))])


@given(place=st.sampled_from(["schema", "rate", "parts"]), value=json_values)
@loose
def test_any_other_value_is_read_or_refused_cleanly(path: Path, place: str, value: object) -> None:
    path.write_text(json.dumps(GOOD | {place: value}), encoding="utf-8")
    try:
        assert isinstance(read_json(path, Whole), Whole)
    except FileError as error:
        assert len(str(error).splitlines()) == 1


@given(old=st.sampled_from(list(GOOD)), new=st.text())
@loose
def test_a_renamed_key_is_an_error(path: Path, old: str, new: str) -> None:
    if new not in GOOD:
        problem(path, json.dumps({new if key == old else key: value for key, value in GOOD.items()}))


@given(data=st.data())
@loose
def test_flipped_bytes_never_give_another_exception(path: Path, data: st.DataObject) -> None:
    content = bytearray(json.dumps(GOOD).encode())
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        assert isinstance(read_json(path, Whole), Whole)
    except FileError as error:
        assert len(str(error).splitlines()) == 1


@pytest.mark.parametrize("rate", [float("nan"), float("inf")])
def test_nan_is_not_written_and_the_old_file_stays(path: Path, rate: float) -> None:
    write_json(path, WHOLE)
    with pytest.raises(FileError, match="not written: rate: must be a finite number"):
        write_json(path, Whole(rate=rate, parts=()))
    assert read_json(path, Whole) == WHOLE


def test_a_failed_write_leaves_no_draft_behind(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    write_text(path, "old")
    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(FileError, match="cannot be written: No space left on device"):
        write_text(path, "new")
    assert path.read_text(encoding="utf-8") == "old"
    assert list(path.parent.iterdir()) == [path]


def test_a_missing_folder_is_an_error_and_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot be written: No such file or directory"):
        write_text(tmp_path / "missing" / "file", "text")
    assert list(tmp_path.iterdir()) == []


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    write_text(link, "text")
    assert link.is_symlink()
    assert target.read_text(encoding="utf-8") == "text"


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_text(pipe, "text")
        assert os.read(reader, 100) == b"text"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_others_may_read_what_was_written(path: Path) -> None:
    plain = path.with_name("plain")
    plain.write_text("", encoding="utf-8")
    write_text(path, "text")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode) & ~0o022  # others cannot write it
