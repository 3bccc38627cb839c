"""Strict JSON files, and the one error that says what is wrong with them.

Every file Syncline reads may have been edited by hand, cut short by a full disk, or written by a newer
release. A file that is silently half understood gives a wrong plan, so reading is strict: unknown, repeated
or missing keys, wrong types, NaN and unknown versions are all errors, and each is one line that names the
file and the field.

A file's shape is a `msgspec.Struct` with `frozen=True, forbid_unknown_fields=True`. Two conventions make
its errors good:

- a field `schema: int = N` states the version this release reads and writes; in a file it is required;
- rules that types cannot say go into `__post_init__`, which raises `ValueError("field: what is wrong")`.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from syncline.errors import UsageError

T = TypeVar("T", bound=msgspec.Struct)

_MOST_BYTES = 256 << 20
"""Of a file: a record of a long run has a few. What never ends, like a device, need not fill the memory first."""
_TOO_LARGE = 1 << 63
_LONGEST = 300
"""Characters of what is quoted from a file."""
_MODE = 0o644
"""Of a new file, less what the umask takes away."""


class FileError(UsageError):
    """A file that cannot be used, in one line for the person at the keyboard: file, field, what to do."""


class _FieldError(ValueError):
    """What is wrong with a field; the file's name comes later. An empty field means the file as a whole."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}" if field else problem)


def read_json(path: str | os.PathLike[str], type: type[T]) -> T:
    """Read `path` as a `type`, or raise a `FileError` that names the file and the field."""
    try:
        tree = json.loads(_text_of(path), object_pairs_hook=_without_repeats)
        _check_values(tree)
        _check_kind(tree, type)
        _check_schema(tree, type)
        return _convert(tree, type)
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise FileError(f"{path}: is not a text file; was another file meant?") from error
    except json.JSONDecodeError as error:
        problem = f"{error.msg} at line {error.lineno}, column {error.colno}"
        raise FileError(f"{path}: is not complete JSON ({problem}); write it again") from error
    except RecursionError as error:
        raise FileError(f"{path}: is nested too deeply to be one of Syncline's files") from error
    except ValueError as error:
        raise FileError(f"{path}: {one_line(str(error))}") from error


def _text_of(path: str | os.PathLike[str]) -> str:
    data = bytearray()
    with Path(path).open("rb") as file:
        while part := file.read(1 << 16):
            data += part
            if len(data) > _MOST_BYTES:
                raise _FieldError("", f"has more than {_MOST_BYTES >> 20} MiB: was another file meant?")
    return data.decode("utf-8")


def write_json(path: str | os.PathLike[str], obj: msgspec.Struct | dict[str, Any]) -> None:
    """Write `obj` so that `read_json` gives it back. NaN and infinity, unknown to JSON, are refused."""
    try:
        tree = msgspec.to_builtins(obj)
        _check_values(tree)
        text = json.dumps(tree, indent=2, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise FileError(f"{path}: not written: {one_line(str(error))}") from error
    write_text(path, text + "\n")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: str | os.PathLike[str], data: bytes, *, through_links: bool = True) -> None:
    """Replace the file at `path` in one step: readers see the old file or the new one, never a half.

    Only its owner may write to it, whatever the umask; who may read it, the umask says, and what was private stays so.
    Where `path` is a link, what it points to is replaced; or the link itself, not `through_links`: for names that
    others could guess, in folders where they could put a link.
    """
    try:
        if through_links and Path(path).exists() and not Path(path).is_file():
            # A pipe or /dev/stdout: to put a file in its place would break it for everyone.
            Path(path).write_bytes(data)
            return
        target = Path(path).resolve() if through_links else Path(path)
        draft = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
        try:
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _mode_for(target)), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise FileError(f"{path}: cannot be written: {error.strerror or error}") from error


def _mode_for(target: Path) -> int:
    try:
        found = target.lstat().st_mode
    except FileNotFoundError:
        return _MODE
    return _MODE & found if stat.S_ISREG(found) else _MODE


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON parsers keep the last of two equal keys; in an edited file that hides a mistake."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _FieldError(key, "appears more than once; keep one")
        found[key] = value
    return found


def _check_values(tree: object) -> None:
    if (found := _wrong_in(tree)) is not None:
        raise _FieldError(*found)


def _wrong_in(tree: object) -> tuple[str, str] | None:
    """Where something is that JSON can say and no field may be, and what; the field's name is put together on the way
    back, because there is hardly ever one."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            if (found := _wrong_in(key) or _wrong_in(value)) is not None:
                where, what = found
                return f"{one_line(str(key))}{'.' if where and where[0] != '[' else ''}{where}", what
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            if (found := _wrong_in(value)) is not None:
                where, what = found
                return f"[{index}]{'.' if where and where[0] != '[' else ''}{where}", what
    elif isinstance(tree, str):
        if not tree.isascii() and any("\ud800" <= char <= "\udfff" for char in tree):
            return "", "holds half a character; write it again"
    elif isinstance(tree, float):
        if not math.isfinite(tree):
            return "", f"must be a finite number, not {tree}"
    elif isinstance(tree, int) and not -_TOO_LARGE <= tree < _TOO_LARGE:
        return "", "number out of range: nothing is counted in so many digits"
    return None


_MARKS = {
    "alternatives": "a plan",
    "forward_s": "a profile",
    "collectives": "a network",
    "rows": "a result",
    "models": "a run's record",
}
"""The key by which each kind of file is known."""


def _check_kind(tree: object, type: type[T]) -> None:
    """A file in another's place is more likely than one with so many wrong keys."""
    if isinstance(tree, dict):
        for mark, kind in _MARKS.items():
            if mark in tree and mark not in type.__struct_fields__:
                raise _FieldError("", f"is {kind}, and something else was asked for here: were two files swapped?")


def _check_schema(tree: object, type: type[T]) -> None:
    """The version comes first: a newer file may differ in every other field, and only this explains it."""
    known = _schema_of(type)
    if known is None or not isinstance(tree, dict):
        return
    if "schema" not in tree:
        raise _FieldError("schema", f"is missing; this release writes {known}")
    found = tree["schema"]
    if not isinstance(found, int) or isinstance(found, bool):
        raise _FieldError("schema", f"must be the whole number {known}")
    if found > known:
        raise _FieldError("schema", f"is {found}, and this release reads up to {known}; upgrade syncline")
    if found != known:
        raise _FieldError("schema", f"is {found}, and this release reads {known}; write the file again")


@functools.cache
def _schema_of(type: type[msgspec.Struct]) -> int | None:
    return next((field.default for field in msgspec.structs.fields(type) if field.name == "schema"), None)


def _convert(tree: object, type: type[T]) -> T:
    try:
        return msgspec.convert(tree, type)
    except msgspec.ValidationError as error:
        raise _explained(error) from error


def _explained(error: msgspec.ValidationError) -> _FieldError:
    """msgspec says "what - at `$.where`"; put the field first, and say what to do."""
    text, _, where = str(error).partition(" - at `$")
    field = where.rstrip("`").lstrip(".")
    inner = f"{field}." if field else ""
    if isinstance(error.__cause__, ValueError):  # raised by a __post_init__, whose message begins with its own field
        return _FieldError("", inner + str(error.__cause__))
    if found := re.fullmatch(r"Object contains unknown field `(.*)`", text, re.DOTALL):
        return _FieldError(inner + found[1], "is not a known key; remove it or correct its spelling")
    if found := re.fullmatch(r"Object missing required field `(.*)`", text):
        return _FieldError(inner + found[1], "is missing")
    return _FieldError(field, text[:1].lower() + text[1:].replace("`", ""))


def one_line(text: str) -> str:
    """Keys and values come from the file, line breaks included; the error stays one line, and not endless."""
    line = "".join(char if char.isprintable() else " " for char in text[:_LONGEST])
    return line if len(text) <= _LONGEST else line[: _LONGEST - 3] + "..."
