"""Trying something that may never return: with a deadline, on a thread that does not keep the process alive."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from syncline.errors import SynclineError

T = TypeVar("T")
_NAME = "syncline-trial"


class TooLateError(SynclineError):
    """It had not returned when its time was over."""


def within(seconds: float, action: Callable[[], T]) -> T:
    """What `action` returns or raises, or `TooLateError`; it then goes on, and is left behind."""
    return together(seconds, [action])[0]


def together(seconds: float, actions: Sequence[Callable[[], T]]) -> list[T]:
    """The same of several that need each other."""
    returned: dict[int, T] = {}
    raised: list[Exception] = []

    def tried(index: int) -> None:
        try:
            returned[index] = actions[index]()
        except Exception as error:  # noqa: BLE001 - raised again where it was asked for
            raised.append(error)

    threads = [threading.Thread(target=tried, args=(i,), name=_NAME, daemon=True) for i in range(len(actions))]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if raised:
        raise raised[0]
    if len(returned) < len(actions):
        raise TooLateError(f"nothing happened for {seconds:g} s")
    return [returned[index] for index in range(len(actions))]


def left_behind() -> bool:
    """Whether some trial is still waiting: such a process cannot be trusted to end by itself."""
    return any(thread.name == _NAME for thread in threading.enumerate())
