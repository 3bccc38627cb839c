"""The results of processes on emulated hosts. They reach the caller through one pipe each, as lines of JSON."""

from __future__ import annotations

import os
import selectors
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

OnEvent = Callable[[int, Any], None]
"""Called with the rank and the event."""
_sending = threading.Lock()


@dataclass
class Outcome:
    """The result of one rank, or of one command."""

    rank: int
    value: Any = None
    error: str | None = None
    """Type and message of the exception, or how the process ended."""
    traceback: str = ""
    foreseen: bool = False
    """True for a `SynclineError`, whose message needs no traceback."""
    finished: bool = False
    finished_at_s: float = 0.0
    """`time.monotonic()` when it ended."""
    _buffer: bytes = field(default=b"", repr=False)

    def take(self, data: bytes, on_event: OnEvent | None) -> None:
        """Read what the process or its host has sent."""
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            try:
                message = msgspec.json.decode(line)
            except msgspec.DecodeError:
                continue  # incomplete: the process was killed while it wrote, which its host reports next
            if "event" not in message:
                self.finish(**message)
            elif on_event is not None:
                on_event(self.rank, message["event"])

    def finish(self, **result: Any) -> None:
        """Record the first result. Later ones, such as the exit of the process, are consequences of it."""
        if not self.finished:
            for name, value in result.items():
                setattr(self, name, value)
            self.finished, self.finished_at_s = True, time.monotonic()


def first_failure(outcomes: Sequence[Outcome]) -> Outcome | None:
    return min((outcome for outcome in outcomes if outcome.error), key=lambda o: o.finished_at_s, default=None)


def send(pipe: int, message: dict[str, Any]) -> None:
    data = msgspec.json.encode(message) + b"\n"
    with _sending:  # threads share the pipe, and long messages take several writes
        while data:
            data = data[os.write(pipe, data) :]


def collect(
    pipes: Sequence[int],
    *,
    deadline_s: float,
    grace_s: float,
    on_event: OnEvent | None = None,
    on_failure: Callable[[], object] = lambda: None,
    outputs: Mapping[int, Callable[[bytes], None]] | None = None,
) -> list[Outcome]:
    """Collect the outcomes until all processes have ended, or until the grace period after a failure is over.

    Args:
        on_failure: Called after the first failure.
        outputs: Functions for the data of other pipes.
    """
    outcomes = [Outcome(rank) for rank in range(len(pipes))]
    end = time.monotonic() + deadline_s
    failed = ending = False
    reading = set(pipes)
    with selectors.DefaultSelector() as selector:
        for pipe, reader in [*zip(pipes, outcomes, strict=True), *(outputs or {}).items()]:
            selector.register(pipe, selectors.EVENT_READ, reader)
        while reading and (left := end - time.monotonic()) > 0:
            for key, _ in selector.select(min(left, 3600.0)):
                data = os.read(key.fd, 1 << 20)
                if not data:
                    selector.unregister(key.fd)
                    reading.discard(key.fd)
                if not isinstance(key.data, Outcome):
                    key.data(data)
                elif data:
                    key.data.take(data, on_event)
                else:
                    key.data.finish(error="its host died")
            if not failed and any(outcome.error for outcome in outcomes):
                failed = True
                on_failure()
            if not ending and (failed or all(outcome.finished for outcome in outcomes)):
                ending = True
                end = min(end, time.monotonic() + grace_s)
    for outcome in outcomes:
        outcome.finish(error=f"still running {'when another rank failed' if failed else 'at the deadline'}")
    return outcomes
