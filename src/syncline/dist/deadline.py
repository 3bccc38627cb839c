"""Calls with a time limit, for functions that may never return. They run on daemon threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from syncline.errors import SynclineError

T = TypeVar("T")
_THREAD_NAME = "syncline-trial"


class TooLateError(SynclineError):
    """A call did not return within its time limit."""


def within(limit_s: float, action: Callable[[], T]) -> T:
    """Call `action` on a thread of its own, and return its result. Raise `TooLateError` after `limit_s` seconds; the
    thread then keeps running."""
    return run_concurrently(limit_s, [action])[0]


def run_concurrently(limit_s: float, actions: Sequence[Callable[[], T]]) -> list[T]:
    """Call functions that wait for each other at the same time, each on its own thread, and return their results.
    Raise the first exception that one raises, or `TooLateError` after `limit_s` seconds."""
    returned: dict[int, T] = {}
    raised: list[Exception] = []

    def call(index: int) -> None:
        try:
            returned[index] = actions[index]()
        except Exception as error:  # noqa: BLE001 - raised again in the calling thread
            raised.append(error)

    threads = [threading.Thread(target=call, args=(i,), name=_THREAD_NAME, daemon=True) for i in range(len(actions))]
    for thread in threads:
        thread.start()
    end = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if raised:
        raise raised[0]
    if len(returned) < len(actions):
        raise TooLateError(f"no result within {limit_s:g} s")
    return [returned[index] for index in range(len(actions))]


def left_behind() -> bool:
    """Return whether a call that exceeded its limit is still running. The process may then not exit by itself."""
    return any(thread.name == _THREAD_NAME for thread in threading.enumerate())
