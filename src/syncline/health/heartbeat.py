"""Heartbeats: each rank writes a small value to the job's store once per second, and reads those of the others.

A collective that fails reports a closed connection or a timeout, but not which rank caused it. A rank that fails
therefore reads the heartbeats of the others and names its suspects (`suspects`). While nothing fails, it logs when a
rank falls silent and when it is back. A rank that only computes for a long time still sends heartbeats. They begin with
the first call that needs them, and end with the process group or the program.

One thread writes and reads heartbeats. Another one, which never waits for the store, abandons exchanges that make no
progress (`watchdog`) and logs that the store does not answer. An unusable store only means that fewer suspects are
named.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.util
import os
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch.distributed as dist

from syncline.dist import torchrun
from syncline.errors import first_line
from syncline.files import one_line
from syncline.health.store import ANSWER_S, Store
from syncline.health.suspects import Awaited, Beat, Heartbeats, is_backends
from syncline.records.failure_report import Kind, Suspect

if TYPE_CHECKING:
    from syncline.health.watchdog import Watchdog

BEAT_S = 1.0
_RANKS_PER_S = 64
"""Heartbeats per second that a store handles easily. With more ranks, each rank sends fewer."""
_WAIT_BEATS = 3.3
"""How long a rank that has failed waits for the heartbeats of others; twice as long if it has read too few by then."""
_STRAGGLERS_S = 10.0
_LINGER_S = 10.0  # how long the rank that serves the store waits at most for others before it ends
_NEIGHBOURS = 64  # number of ranks that each rank watches for silence, so that the load of the store grows linearly
_CULPRITS = {Kind.FAILED, Kind.ENDED, Kind.SILENT}
_SAME_ERROR = 60  # number of characters by which an error is recognised


class Heartbeat:
    """The heartbeat of this process, as long as its process group exists."""

    def __init__(self, store: Any) -> None:
        self._rank, ranks = dist.get_rank(), dist.get_world_size()
        self._others = [(self._rank + 1 + i) % ranks for i in range(ranks - 1)]
        self._pid, self._world = os.getpid(), weakref.ref(dist.group.WORLD)
        self.beat_s = BEAT_S * max(1.0, ranks / _RANKS_PER_S)
        self.store = Store(store, self._rank)
        self.watchdogs: weakref.WeakValueDictionary[int, Watchdog] = weakref.WeakValueDictionary()
        self._beat = Beat(secrets.randbelow(1 << 40))  # so that no two heartbeats of a rank have the same counter
        self._received = Heartbeats(self.beat_s)
        self._compared_s = time.monotonic()
        self._urgent_until_s = 0.0  # until then heartbeats are read more often, because this rank looks for suspects
        self._explained = getattr(sys, "last_value", None)
        """An exception that needs no explanation: of an interactive session, or because it has one."""
        self._lock = threading.Condition()
        self._over = False
        self._threads = []
        for name, run in (("syncline-watchdog", self._run_watchdogs), ("syncline-heartbeat", self._run_heartbeat)):
            self._threads.append(threading.Thread(target=run, name=name, daemon=True))
            self._threads[-1].start()

    @property
    def usable(self) -> bool:
        world = self._world()
        return not self._over and self._pid == os.getpid() and world is not None and world is dist.group.WORLD

    def _watched(self) -> list[Watchdog]:
        return [watchdog for watched in self.watchdogs.valuerefs() if (watchdog := watched()) is not None]

    def _set(self, **fields: Any) -> None:
        """Change the next heartbeat, and send it at once."""
        with self._lock:
            self._beat = msgspec.structs.replace(self._beat, **fields)
            self._lock.notify_all()

    def count_call(self, group: str) -> int:
        """Count a call that all ranks of a process group make, and forget earlier failures."""
        with self._lock:
            count = self._beat.calls.get(group, 0) + 1
            self._set(calls={**self._beat.calls, group: count}, kind=None, why="")
            return count

    def announce_failure(self, error: str, *, own: bool) -> None:
        """Tell the other ranks about a failure. Only the first one counts.

        Unless the cause is its `own`, this rank looks for suspects next. The same heartbeat says so: a rank that serves
        the store would otherwise end as soon as it has read of the failure.
        """
        with self._lock:
            if self._beat.kind is None:
                self._set(kind=Kind.FAILED if own else Kind.VICTIM, why=one_line(error), asking=not own)

    def find_suspects(self, ranks: Sequence[int], awaited: Awaited) -> list[Suspect]:
        """Return the suspects among these ranks. Takes seconds.

        For a collective outside Syncline, the others may reach their timeouts a little later, and a rank that does not
        is the one that all have waited for.
        """
        others = [rank for rank in ranks if rank != self._rank]
        asked_s, received = time.monotonic(), self._received

        def is_enough() -> bool:
            kinds = {received.judge(rank, asked_s) for rank in others}
            if time.monotonic() > asked_s + _WAIT_BEATS * self.beat_s:
                return None not in kinds or self.store.state != "answers"
            if awaited.what == "collective" and Kind.ELSEWHERE in kinds and not kinds & _CULPRITS:
                return False
            return not kinds & {None, Kind.UNSEEN}

        with self._lock:
            self._set(asking=True)
            self._listen(is_enough, 2 * _WAIT_BEATS * self.beat_s)
            self._set(asking=False)
            return received.find_suspects(self._rank, others, awaited, asked_s, self.store.state)

    def _listen(self, is_enough: Callable[[], bool], most_s: float) -> None:
        """Read heartbeats more often for some time, or until enough have arrived. Call this with the lock held."""
        until_s = self._urgent_until_s = time.monotonic() + most_s
        self._lock.notify_all()
        while time.monotonic() < until_s and self.usable and not is_enough():
            if self.store.state in ("gone", "unusable"):
                break
            self._lock.wait(self.beat_s / 4)

    def _run_watchdogs(self) -> None:
        while self.usable:
            self._check_lanes()
            with self._lock:
                self._lock.wait_for(lambda: self._over, self.beat_s)

    def _check_lanes(self) -> None:
        """Check all lanes once. A function, because its thread must not refer to a released model while it waits."""
        watchdogs = self._watched()
        for watchdog in watchdogs:
            with contextlib.suppress(Exception):  # an error of one must not leave the others unwatched
                watchdog.end_overdue(time.monotonic())
        if (line := self.store.outage(self.beat_s)) and (watchdogs or self.store.state == "mute"):
            log(f"rank {self._rank}: {line}")

    def _run_heartbeat(self) -> None:
        try:
            while self.usable:
                sent = self._send_and_read()
                with self._lock:
                    self._lock.notify_all()
                    urgent = time.monotonic() < self._urgent_until_s
                    wait_s = self.beat_s / 4 if urgent else self.beat_s
                    self._lock.wait_for(lambda: self._over or self._beat is not sent, wait_s)  # noqa: B023
            if self._beat.kind is None:
                self._set(kind=Kind.ENDED, why="its process group was destroyed")
            if self.store.state == "answers":
                self.store.exchange(msgspec.json.encode(self._next_beat([])), [])
        finally:
            self.store.close()

    def _next_beat(self, watchdogs: Sequence[Watchdog]) -> Beat:
        progress = {watchdog.name: watchdog.progress() for watchdog in watchdogs}
        with self._lock:
            self._set(count=self._beat.count + 1, progress=progress)
            return self._beat

    def _send_and_read(self) -> Beat:
        """Exchange heartbeats, and return the one that was sent."""
        now_s, watchdogs = time.monotonic(), self._watched()
        urgent = now_s < self._urgent_until_s
        led: list[Watchdog] = []
        if now_s - self._compared_s > _STRAGGLERS_S:
            led = [watchdog for watchdog in watchdogs if watchdog.ranks[0] == self._rank and len(watchdog.ranks) > 1]
        ranks = self._others if urgent or led else self._others[:_NEIGHBOURS]
        sent = self._next_beat(watchdogs)
        values = self.store.exchange(msgspec.json.encode(sent), ranks, urgent=urgent)
        if values is None:
            return sent
        beats: dict[int, Beat] = {}
        for rank, value in values.items():
            with contextlib.suppress(msgspec.MsgspecError):  # it has sent no heartbeat yet
                beats[rank] = msgspec.json.decode(value, type=Beat)
        with self._lock:
            lines = self._received.update(beats, all_ranks=len(ranks) == len(self._others))
        for line in lines:
            log(f"rank {self._rank}: {line}")
        for watchdog in led:
            self._compared_s = now_s
            watchdog.stragglers.compare({**self._received.progress(watchdog.name), self._rank: watchdog.progress()})
        return sent

    def end(self) -> None:
        """Send a last heartbeat and end the threads, unless the store blocks one."""
        if self._pid != os.getpid():
            return
        with self._lock:
            self._over = True
            self._lock.notify_all()
        until_s = time.monotonic() + ANSWER_S
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))

    def end_program(self) -> None:
        """Send how the program ended and end all threads: one that still runs while Python shuts down may abort it."""
        if self._pid != os.getpid():
            return
        with contextlib.suppress(Exception):  # nothing may keep a program from ending
            self.explain_end(getattr(sys, "last_value", None))
            if self._beat.kind is None:
                self._set(kind=Kind.ENDED, why="its program ended")
            elif self._rank == 0 and not torchrun.keeps_store():  # others that look for suspects need the store
                with self._lock:
                    self._listen(lambda: all(map(self._received.is_done, self._others)), _LINGER_S)
        watchdogs = self._watched()
        self.end()
        for watchdog in watchdogs:
            with contextlib.suppress(Exception):
                watchdog.end_lanes()

    def explain_end(self, error: BaseException | None) -> str:
        """Send the exception that ends the program. If a collective raised it, log and return the suspects."""
        if error is None or error is self._explained:
            return ""
        self._explained = error
        text = one_line(f"{type(error).__name__}: {first_line(error)}")
        if self._beat.why and self._beat.why[:_SAME_ERROR] in one_line(str(error)):
            return ""
        if not is_backends(error):
            self._set(kind=Kind.ENDED, why=f"its program ended: {text}")
            return ""
        watchdog = max(self._watched(), key=lambda dog: (len(dog.ranks), dog.progress().submitted), default=None)
        if watchdog is None:
            return ""
        text = f"the program ended in a collective outside Syncline: {text}"
        explanation = watchdog.explain(text, error, outside=True)
        log(f"{text}{explanation}")
        return explanation


def log(line: str) -> None:
    """Print one line to stderr. Unlike a warning, it cannot be filtered or turned into an error."""
    with contextlib.suppress(Exception):  # there may be no stderr
        print(f"syncline: {line}", file=sys.stderr, flush=True)


_heartbeat: Heartbeat | None = None
_making = threading.Lock()


def shared_heartbeat() -> Heartbeat | None:
    """Return this process's heartbeat, started if necessary; None with a single rank, or without a store."""
    global _heartbeat
    if not dist.is_initialized() or dist.get_world_size() < 2:
        return None
    with _making:
        if _heartbeat is None or not _heartbeat.usable:
            if _heartbeat is not None:
                _heartbeat.end()
            try:
                _heartbeat = Heartbeat(dist.distributed_c10d._get_default_store())
            except (AttributeError, RuntimeError):
                return None
            if multiprocessing.parent_process() is not None:  # its children do not run functions registered with atexit
                multiprocessing.util.Finalize(None, _at_exit, exitpriority=0)
        return _heartbeat


@atexit.register
def _at_exit() -> None:
    if _heartbeat is not None:
        _heartbeat.end_program()
