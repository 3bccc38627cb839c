"""Read and write JSON files, strictly: reading a file only in part could give a wrong plan.

Unknown, repeated and missing keys, wrong types, NaN and unknown versions are errors of one line that names the file and
the field. The structure of a file is a frozen `msgspec.Struct` that forbids unknown fields. Its `schema: int = N` is
the version that this release reads and writes. `__post_init__` raises `ValueError("field: what is wrong")`.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from syncline.errors import UsageError

T = TypeVar("T", bound=msgspec.Struct)

_MOST_BYTES = 256 << 20  # reading a device such as /dev/zero would never end; records have a few MiB
_TOO_LARGE = 1 << 63
_LONGEST = 300  # largest number of characters that an error quotes from a file
_OPEN_FILES = Path("/proc/self/fd")
_MODE = 0o644  # permissions of a new file, before the umask


class FileError(UsageError):
    """A file cannot be read, written or used. The message is one line: the file, the field, and what to do."""


class _FieldError(ValueError):
    """A field is not valid. An empty field stands for the whole file; `FileError` adds the file's name."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}" if field else problem)


def read_json(path: str | os.PathLike[str], struct: type[T] | Callable[[Any], type[T]]) -> T:
    """Read `path` as a `struct`, or as what that function chooses by the content.

    Raises:
        FileError: The file is not valid; the message names the file and the field.
    """
    try:
        tree = json.loads(_text_of(path), object_pairs_hook=_without_repeats)
        _check_values(tree)
        chosen = struct if isinstance(struct, type) else struct(tree)
        _check_kind(tree, chosen)
        _check_schema(tree, chosen)
        return msgspec.convert(tree, chosen)
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise FileError(f"{path}: is not a text file; was another file meant?") from error
    except json.JSONDecodeError as error:
        raise FileError(f"{path}: {_syntax_problem(error)}") from error
    except msgspec.ValidationError as error:
        raise FileError(f"{path}: {one_line(str(_explained(error)))}") from error
    except RecursionError as error:
        raise FileError(f"{path}: is nested too deeply to be one of Syncline's files") from error
    except ValueError as error:
        raise FileError(f"{path}: {one_line(str(error))}") from error


class JsonFile(msgspec.Struct, frozen=True):
    """Base class of records that are files."""

    @classmethod
    def load(cls: type[T], path: str | os.PathLike[str]) -> T:
        """Read a JSON file. Raises `FileError` if it is not valid."""
        return read_json(path, cls)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file."""
        write_json(path, self)


def _text_of(path: str | os.PathLike[str]) -> str:
    with Path(path).open("rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise _FieldError("", f"has more than {_MOST_BYTES >> 20} MiB: was another file meant?")
    return data.decode("utf-8")


def _syntax_problem(error: json.JSONDecodeError) -> str:
    """Return what is wrong with a text that is not JSON, or that begins like JSON and was perhaps cut off."""
    text = error.doc.lstrip()
    where = f"{error.msg.removesuffix(' at')} at line {error.lineno}, column {error.colno}"
    if text.startswith(("{", "[")):
        return f"is not complete JSON ({where}); write it again"
    return f"is not JSON ({where if text else 'the file is empty'}); was another file meant?"


def write_json(path: str | os.PathLike[str], obj: msgspec.Struct | dict[str, Any]) -> None:
    """Write `obj` so that `read_json` returns it. Raises `FileError` for NaN and infinity, which JSON does not have."""
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
    """Replace the file at `path` atomically: readers see the old file or the new one, never a part.

    Only the owner can write to the new file. Others can read it if the umask allows it and they could read the old one.
    If `path` is a symbolic link, its target is replaced. With `through_links=False`, the link itself is replaced: use
    that for guessable names in folders where other users could create a link.
    """
    try:
        if through_links and Path(path).exists() and not Path(path).is_file():
            # A pipe or /dev/stdout must be written to, not replaced.
            Path(path).write_bytes(data)
            return
        target = Path(path).resolve() if through_links else Path(path)
        mode = _MODE & target.stat().st_mode if target.is_file() and not target.is_symlink() else _MODE
        _replace(target, data, mode)
    except OSError as error:
        raise FileError(f"{path}: cannot be written: {error.strerror or error}") from error


def _replace(target: Path, data: bytes, mode: int) -> None:
    """Write a new file and give it the name `target`, in one step if no file has that name yet.

    Where the file system permits it, the new file has no name before it is complete. So a process that is killed while
    it writes leaves nothing behind.
    """
    draft = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    unnamed = hasattr(os, "O_TMPFILE") and _OPEN_FILES.exists()
    try:
        file = os.open(target.parent, os.O_WRONLY | (os.O_TMPFILE if unnamed else os.O_CREAT), mode)
    except OSError:  # a folder cannot be opened as a file; and not every file system has files without a name
        file, unnamed = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), False
    try:
        with os.fdopen(file, "wb") as written:
            written.write(data)
            written.flush()
            os.fsync(file)
            if unnamed and not _named(file, target):
                _named(file, draft)
        if draft.exists():
            draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def _named(file: int, path: Path) -> bool:
    """Give an open file without a name this one, and return whether the name was free."""
    try:
        os.link(_OPEN_FILES / str(file), path, src_dir_fd=file, follow_symlinks=True)  # `src_dir_fd` selects linkat
    except FileExistsError:
        return False
    return True


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a dict, and raise for repeated keys, of which JSON parsers silently keep the last."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise _FieldError(key, "appears more than once; keep one")
        result[key] = value
    return result


def _check_values(tree: object, field: str = "") -> None:
    """Raise for values that JSON can hold but no field may have."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            inner = f"{field}.{key}" if field else key
            _check_values(key, inner)
            _check_values(value, inner)
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            _check_values(value, f"{field}[{index}]")
    elif isinstance(tree, str):
        if not tree.isascii() and any("\ud800" <= char <= "\udfff" for char in tree):
            raise _FieldError(field, "has an unpaired surrogate, which is not valid text; write it again")
    elif isinstance(tree, float):
        if not math.isfinite(tree):
            raise _FieldError(field, f"must be a finite number, not {tree}")
    elif isinstance(tree, int) and not -_TOO_LARGE <= tree < _TOO_LARGE:
        raise _FieldError(field, "number out of range: it needs more than 64 bits")


_MARKS = {
    "alternatives": "a plan",
    "forward_s": "a profile",
    "collectives": "a network",
    "rows": "a result",
    "models": "a run's record",
}
"""A key that identifies each kind of file."""


def _check_kind(tree: object, struct: type[T]) -> None:
    """Raise if this is another kind of file, which explains more than a list of wrong keys."""
    if isinstance(tree, dict):
        for mark, kind in _MARKS.items():
            if mark in tree and mark not in struct.__struct_fields__:
                raise _FieldError("", f"is {kind}, but another kind of file is needed here; were two files swapped?")


def _check_schema(tree: object, struct: type[T]) -> None:
    """Check the version before other fields, because a newer file may differ in all of them."""
    known = next((field.default for field in msgspec.structs.fields(struct) if field.name == "schema"), None)
    if known is None or not isinstance(tree, dict):
        return
    if "schema" not in tree:
        raise _FieldError("schema", f"is missing; this release writes {known}")
    schema = tree["schema"]
    if not isinstance(schema, int) or isinstance(schema, bool):
        raise _FieldError("schema", f"must be the whole number {known}")
    if schema != known:
        reads, advice = (f"up to {known}", "upgrade syncline") if schema > known else (known, "write the file again")
        raise _FieldError("schema", f"is {schema}, and this release reads {reads}; {advice}")


def _explained(error: msgspec.ValidationError) -> _FieldError:
    """Convert msgspec's "problem - at `$.field`" to an error that begins with the field and says what to do."""
    text, _, where = str(error).partition(" - at `$")
    field = where.rstrip("`").lstrip(".")
    inner = f"{field}." if field else ""
    if isinstance(error.__cause__, ValueError):  # from a __post_init__, whose message begins with the field
        return _FieldError("", inner + str(error.__cause__))
    if match := re.fullmatch(r"Object contains unknown field `(.*)`", text, re.DOTALL):
        return _FieldError(inner + match[1], "is not a known key; remove it or correct its spelling")
    if match := re.fullmatch(r"Object missing required field `(.*)`", text):
        return _FieldError(inner + match[1], "is missing")
    for pattern, problem in _LIMITS.items():
        if match := re.fullmatch(pattern, text):
            return _FieldError(field, problem.format(match[1].removesuffix(".0").replace("|", ", ")))
    return _FieldError(field, text[:1].lower() + text[1:].replace("`", ""))


_LIMITS = {
    r"Expected `(?:int|float)` >= (.*)": "must be at least {}",
    r"Expected `(?:int|float)` > (.*)": "must be greater than {}",
    r"Expected `(?:int|float)` <= (.*)": "must be at most {}",
    r"Expected `\w+` of length >= (.*)": "must have a length of at least {}",
    r"Expected `str` matching regex '\^\((.*)\)\\\\Z'": "must be one of {}",
}
"""msgspec's messages for values outside of limits, and ours."""


def one_line(text: str) -> str:
    """Return a text from a file as one line of limited length, for an error message."""
    line = "".join(char if char.isprintable() else " " for char in text[:_LONGEST])
    return line if len(text) <= _LONGEST else line[: _LONGEST - 3] + "..."
