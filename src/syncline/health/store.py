"""The job's key-value store, as heartbeats use it: a separate connection, and a state that says whether it answers."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from syncline.dist import torchrun
from syncline.health.suspects import ALARM_S, StoreState

ANSWER_S = 2.0  # time in which the store must answer
_OUTAGE_S = ALARM_S - ANSWER_S
"""Time beyond `ANSWER_S` after which a missing answer is logged."""
_RETRY_S = 5.0  # time until a mute store is asked again: torch prints a warning for every attempt


class Store:
    """One rank's access to the job's store.

    A store whose host is stopped or unreachable blocks its caller for any length of time, whatever its timeout. One
    thread therefore calls `exchange`. Other threads read `state` and call `outage`.
    """

    def __init__(self, shared: Any, rank: int) -> None:
        self._shared, self._rank = shared, rank
        self._client: Any = None
        self._server: tuple[str, int] | None = None  # the address of the store, if rank 0 serves it
        self.job = ""  # a name that all ranks of this job share, once they have agreed on it
        self._state: StoreState = "answers"
        self._asking_since_s: float | None = None
        self._present: set[int] = set()  # ranks for which the store has a value
        self._retry_s = self._outage_s = 0.0
        self._answered_s = self._checked_s = time.monotonic()

    @property
    def state(self) -> StoreState:
        since_s = self._asking_since_s
        overdue = since_s is not None and time.monotonic() - since_s > ANSWER_S
        return "mute" if overdue and self._state == "answers" else self._state

    def exchange(self, beat: bytes, ranks: Sequence[int], *, urgent: bool = False) -> dict[int, bytes] | None:
        """Write this rank's heartbeat, and return the values of `ranks`, or None if the store does not answer."""
        mute = self._state == "mute" and not urgent and time.monotonic() < self._retry_s
        if mute or self._state in ("gone", "unusable"):
            return None
        self._asking_since_s = time.monotonic()
        try:
            client = self._client = self._client or self._open()
            if self._server is not None:  # torch prints a stack trace if its server has ended, as ranks do in any order
                socket.create_connection(self._server, ANSWER_S).close()
            client.set(_key(self._rank), beat.decode())
            absent = [rank for rank in ranks if rank not in self._present]
            if absent and not client.check([_key(rank) for rank in absent]):
                for rank in absent:  # multi_get would wait for its first heartbeat, which may never come
                    client.compare_set(_key(rank), "", "none yet")
            self._present.update(absent)
            values = client.multi_get([_key(rank) for rank in ranks]) if ranks else []
            self._state, self._answered_s = "answers", time.monotonic()
            return dict(zip(ranks, values, strict=True))
        except (AttributeError, NotImplementedError):
            self._state = "unusable"
        except (RuntimeError, OSError) as error:
            self._retry_s = time.monotonic() + _RETRY_S
            gone = isinstance(error, dist.DistNetworkError | ConnectionRefusedError)
            self._state = "gone" if gone else "mute"
        finally:
            self._asking_since_s = None
        return None

    def _open(self) -> Any:
        """Open a connection: the shared one may be waiting for another thread's key for minutes."""
        kind = self._shared
        while hasattr(kind, "underlying_store"):
            kind = kind.underlying_store
        if type(kind).__name__ == "FileStore":  # it never deletes what was written to it
            raise NotImplementedError
        if not torchrun.keeps_store() and hasattr(kind, "host"):
            self._server = kind.host, kind.port
        client = self._shared.clone()
        client.set_timeout(timedelta(seconds=ANSWER_S))
        self.job = client.compare_set(_key("job"), "", secrets.token_hex(8)).decode()
        self._shared = None  # the server of rank 0 must end with its process group
        return client

    def close(self) -> None:
        """Drop the connections."""
        self._state = "unusable"
        self._client = self._shared = None

    def outage(self, beat_s: float) -> str:
        """Return the line to log if the store has stopped answering or answers again; called once per beat."""
        now_s, state, before_s = time.monotonic(), self.state, self._outage_s
        elapsed_s = min(now_s - self._checked_s, 2 * beat_s)  # without time in which this process was stopped
        self._checked_s = now_s
        self._outage_s = before_s + elapsed_s if state in ("mute", "gone") else 0.0
        if state == "answers" and before_s >= _OUTAGE_S:
            return "the job's store answers again"
        if not before_s < _OUTAGE_S <= self._outage_s:
            return ""
        server = "the launcher on the first host" if torchrun.keeps_store() else "rank 0"
        why = "has ended" if state == "gone" else "is stopped or cannot be reached"
        return f"no answer from the job's store for {now_s - self._answered_s:.0f} s: {server}, which serves it, {why}"


def _key(what: int | str) -> str:
    """Return the key of a rank's heartbeat, or of a value that all ranks share."""
    return f"syncline/heartbeat/{torchrun.attempt()}/{what}"
