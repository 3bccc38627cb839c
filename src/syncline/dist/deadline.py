"""Calls with a time limit, for functions that may never return. They run on daemon threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from syncline.errors import SynclineError

T = TypeVar("T")
_THREAD_NAME = "syncline-trial"


class TooLateError(SynclineError):
    """A call did not return within its time limit."""


def within(limit_s: float, action: Callable[[], T]) -> T:
    """Call `action` on a thread of its own, and return its result. Raise `TooLateError` after `limit_s` seconds; the
    thread then keeps running."""
    returned: list[T] = []
    raised: list[Exception] = []

    def call() -> None:
        try:
            returned.append(action())
        except Exception as error:  # noqa: BLE001 - raised again in the calling thread
            raised.append(error)

    thread = threading.Thread(target=call, name=_THREAD_NAME, daemon=True)
    thread.start()
    thread.join(limit_s)
    if raised:
        raise raised[0]
    if not returned:
        raise TooLateError(f"no result within {limit_s:g} s")
    return returned[0]


def left_behind() -> bool:
    """Return whether a call that exceeded its limit is still running. The process may then not exit by itself."""
    return any(thread.name == _THREAD_NAME for thread in threading.enumerate())
