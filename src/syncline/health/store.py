"""The job's key-value store, as heartbeats use it: a separate connection, and a state that says whether it answers."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from syncline.dist import torchrun
from syncline.health.silence import ALARM_S
from syncline.health.suspects import StoreState

ANSWER_S = 2.0
"""Time in which the store must answer."""
_OUTAGE_S = ALARM_S - ANSWER_S
"""Time beyond `ANSWER_S` after which a missing answer is logged."""
_RETRY_S = 3.0
"""Time until the store is asked again after its first failure to answer."""
_LATER_RETRY_S = 10.0
_LOOK_S = ALARM_S / 2
"""Time between two searches for ranks that have not sent a heartbeat yet."""


class Store:
    """One rank's access to the job's store.

    A store whose host is stopped or unreachable blocks its caller for any length of time, whatever its timeout. All
    methods that reach it are therefore called by one thread. Other threads read `state` and call `outage`.
    """

    def __init__(self, shared: Any, rank: int) -> None:
        self._shared, self._rank = shared, rank
        self._client: Any = None
        self._server: tuple[str, int] | None = None
        """The address of rank 0, if it serves the store and is another process."""
        self.job = ""
        """A name that all ranks of this job share, once they have agreed on it."""
        self._state = StoreState.ANSWERS
        self._asking_since_s: float | None = None
        self._retry_s = self._looked_s = 0.0
        self._answered_s = self._outage_checked_s = time.monotonic()
        self._outage_s = 0.0

    @property
    def state(self) -> StoreState:
        since_s = self._asking_since_s
        overdue = since_s is not None and time.monotonic() - since_s > ANSWER_S
        return StoreState.MUTE if overdue and self._state is StoreState.ANSWERS else self._state

    def open(self) -> None:
        """Open a connection: the shared one may be waiting for another thread's key for minutes."""
        self._asking_since_s = time.monotonic()
        try:
            kind = self._shared
            while hasattr(kind, "underlying_store"):
                kind = kind.underlying_store
            if type(kind).__name__ == "FileStore":  # it never deletes what was written to it
                raise NotImplementedError
            if self._rank != 0 and not torchrun.keeps_store() and hasattr(kind, "host"):
                self._server = kind.host, kind.port
            client = self._shared.clone()
            client.set_timeout(timedelta(seconds=ANSWER_S))
            self.job = client.compare_set(_key("job"), "", secrets.token_hex(8)).decode()
            self._client = client
        except (AttributeError, NotImplementedError):
            self._state = StoreState.UNUSABLE
        except (RuntimeError, OSError):  # not tried again: it would block for as long
            self._state = StoreState.MUTE
        self._asking_since_s = None

    def close(self) -> None:
        """Drop the connections."""
        self._state = StoreState.UNUSABLE
        self._client = self._shared = None

    def is_due(self, *, urgent: bool) -> bool:
        """Return whether to ask the store now. While it is mute, torch prints a warning for every attempt."""
        if self._client is None or self._state in (StoreState.GONE, StoreState.UNUSABLE):
            return False
        return urgent or self._state is StoreState.ANSWERS or time.monotonic() >= self._retry_s

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Record whether the store answers what is asked inside; errors of the store do not propagate."""
        self._asking_since_s = time.monotonic()
        try:
            yield
            self._state, self._answered_s = StoreState.ANSWERS, time.monotonic()
        except (RuntimeError, OSError) as error:
            again_s = _RETRY_S if self._state is StoreState.ANSWERS else _LATER_RETRY_S
            self._retry_s = time.monotonic() + again_s
            gone = isinstance(error, dist.DistNetworkError | ConnectionRefusedError)
            self._state = StoreState.GONE if gone else StoreState.MUTE
        finally:
            self._asking_since_s = None

    def write(self, beat: bytes) -> None:
        if self._server is not None:  # torch prints a stack trace if its server has ended, as ranks do in any order
            socket.create_connection(self._server, ANSWER_S).close()
        self._client.set(_key(self._rank), beat.decode())

    def read(self, ranks: Sequence[int]) -> dict[int, bytes]:
        """Return the heartbeats of ranks that have sent one."""
        return dict(zip(ranks, self._client.multi_get([_key(rank) for rank in ranks]), strict=True)) if ranks else {}

    def missing(self, ranks: Sequence[int], *, urgent: bool) -> set[int]:
        """Return those ranks that have sent no heartbeat yet, and may never: not all ranks need to use this library."""
        if not ranks or self._client.check([_key(rank) for rank in ranks]):
            return set()
        if not urgent and time.monotonic() - self._looked_s < _LOOK_S:
            return set(ranks)
        self._looked_s = time.monotonic()
        return {rank for rank in ranks if not self._client.check([_key(rank)])}

    def outage(self, beat_s: float) -> str:
        """Return the line to log if the store has stopped answering or answers again; called once per beat."""
        now_s = time.monotonic()
        elapsed_s = min(now_s - self._outage_checked_s, 2 * beat_s)  # without time in which this process was stopped
        self._outage_checked_s = now_s
        state, before_s = self.state, self._outage_s
        if state in (StoreState.ANSWERS, StoreState.UNUSABLE):
            self._outage_s = 0.0
            again = state is StoreState.ANSWERS and before_s >= _OUTAGE_S
            return f"rank {self._rank}: the job's store answers again" if again else ""
        self._outage_s = before_s + elapsed_s
        if not before_s < _OUTAGE_S <= self._outage_s:
            return ""
        server = "the launcher on the first host" if torchrun.keeps_store() else "rank 0"
        why = "has ended" if state is StoreState.GONE else "is stopped or cannot be reached"
        return (
            f"rank {self._rank}: no answer from the job's store for {now_s - self._answered_s:.0f} s: "
            f"{server}, which serves it, {why}"
        )


def _key(what: int | str) -> str:
    """Return the key of a rank's heartbeat, or of a value that all ranks share."""
    return f"syncline/heartbeat/{torchrun.attempt()}/{what}"
