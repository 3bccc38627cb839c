"""What must become of a case, and what is a finding."""

from __future__ import annotations

import contextlib
import json
import operator
import random
import re
import signal
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec

from syncline.errors import SynclineError

T = TypeVar("T")
Mutate = Callable[[random.Random, Sequence[bytes]], bytes]

SLOW_S = 1.0
LONGEST_LINE = 500


class Finding(AssertionError):  # noqa: N818 - not an error of this program, but one that it found
    """A case that was not met as it should be."""


class TooSlow(BaseException):
    """Not an `Exception`: nothing that reads a file may catch it."""


class Format(Protocol):
    """Of files, or of messages between ranks."""

    @property
    def name(self) -> str: ...

    def case(self, seed: int, number: int) -> bytes:
        """The same for the same numbers."""

    def judge(self, case: bytes, folder: Path) -> str:
        """What became of it: `accepted`, or the kind of its refusal. Raises a `Finding` for all else."""


@dataclass(frozen=True)
class Files(Generic[T]):
    """`read` raises a `SynclineError`, or returns what satisfies `check` and what `write` writes for `read`."""

    name: str
    examples: tuple[bytes, ...]
    mutate: Mutate
    read: Callable[[Path], T]
    write: Callable[[Path, T], Path]
    """Into a folder; returns where."""
    check: Callable[[T], None]
    same: Callable[[T, T], bool] = operator.eq

    def case(self, seed: int, number: int) -> bytes:
        return self.mutate(random.Random(f"{self.name} {seed} {number}"), self.examples)

    def judge(self, case: bytes, folder: Path) -> str:
        path = folder / f"{self.name.replace(' ', '-')}.file"
        with path.open("wb") as file:
            file.write(case)
        try:
            with watched():
                found = self.read(path)
        except SynclineError as error:
            return refusal_of(error, f"{path}: ")
        except BaseException as error:
            raise finding(error) from error
        try:
            self.check(found)
            with watched():
                again = self.read(self.write(folder, found))
        except BaseException as error:
            raise finding(error, "accepted, but ") from error
        if not self.same(found, again):
            raise Finding(f"accepted, and something else after it was written: {again!r}")
        return "accepted"


def refusal_of(error: SynclineError, begins: str) -> str:
    """The kind of a refusal in one line that can be printed."""
    line = str(error)
    if not line.startswith(begins) or len(line.splitlines()) != 1 or not line.isprintable():
        raise Finding(f"refused, but not in one line that begins with {begins!r}: {line!r}") from error
    if len(line) > LONGEST_LINE:
        raise Finding(f"refused in {len(line)} characters: {line!r}") from error
    return kind_of(error)


def finding(error: BaseException, what: str = "") -> BaseException:
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return error
    return Finding(f"{what}{type(error).__name__}: {error}")


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Raises after a second of this process's own time."""

    def stop(_: int, __: types.FrameType | None) -> None:
        raise TooSlow(f"took more than {SLOW_S:g} s")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, SLOW_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


def kind_of(error: BaseException) -> str:
    """Refusals are of one kind if the same line of the program, or msgspec for the same reason, refused."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, msgspec.ValidationError):
        return re.sub(r" - at .*|`[^`]*`(?=$| - )|\d+", "", str(error), flags=re.DOTALL)
    if isinstance(error, json.JSONDecodeError):
        return error.msg
    frames = [
        (Path(frame.f_code.co_filename).name, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if "syncline" in frame.f_code.co_filename
    ]
    return f"{type(error).__name__} at {frames[-1][0]}:{frames[-1][1]}" if frames else str(error)
