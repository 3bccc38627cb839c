"""Heartbeats: each rank writes a small value to the job's store once per second, and reads those of the others.

A collective that fails reports a closed connection or a timeout, but not which rank caused it. A heartbeat says how
many buckets its rank has submitted, how long the rank's own part of a step takes, and what has failed there. A rank
that fails reads the heartbeats of the others and names its suspects (`suspects`). While nothing fails, it logs when
a rank falls silent and when it is back (`silence`). A rank that only computes for a long time still sends heartbeats.

One thread writes and reads heartbeats. Another one, which never waits for the store, abandons exchanges that make no
progress (`watchdog`) and logs that the store does not answer. An unusable store fails no job: it only means that fewer
suspects are named.
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
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch.distributed as dist

from syncline.dist import torchrun
from syncline.errors import first_line
from syncline.files import one_line
from syncline.health.silence import SilenceLog
from syncline.health.store import ANSWER_S, Store
from syncline.health.suspects import Absence, Beat, Heartbeats, Progress, StoreState, Suspect, is_backends

if TYPE_CHECKING:
    from syncline.health.watchdog import Watchdog

BEAT_S = 1.0
_RANKS_PER_S = 64
"""Heartbeats per second that a store handles easily. With more ranks, each rank sends fewer."""
_WAIT_BEATS = 3.3
"""How long a rank that has failed waits for the heartbeats of others."""
_STRAGGLERS_S = 10.0
_LINGER_S = 10.0
"""How long the rank that serves the store waits at most for others before it ends."""
_NEIGHBOURS = 64
"""Number of ranks that each rank watches for silence, so that the load of the store grows linearly."""
_SAME_ERROR = 60
"""Number of characters by which an error is recognised."""


class Heartbeat:
    """The heartbeat of this process, for as long as something is watched."""

    def __init__(self, store: Any) -> None:
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._pid, self._world = os.getpid(), dist.group.WORLD
        self.beat_s = BEAT_S * max(1.0, self._ranks / _RANKS_PER_S)
        self._store = Store(store, self._rank)
        self._watchdogs: weakref.WeakSet[Watchdog] = weakref.WeakSet()
        self._holders = 1
        """Number of callers that may be about to call `watch`, including the one that created this object."""
        self._beat = Beat(secrets.randbelow(1 << 40))  # so that no two heartbeats of a rank have the same counter
        self._others = Heartbeats(self.beat_s)
        self._silence = SilenceLog(self._rank, self.beat_s)
        self._neighbours = [(self._rank + 1 + i) % self._ranks for i in range(min(_NEIGHBOURS, self._ranks - 1))]
        self._compared_s = time.monotonic()
        self._urgent_until_s = 0.0
        """Until when heartbeats are read more often, because this rank looks for suspects."""
        self._ended_by: BaseException | None = None
        """The exception that ends the program, once it has been explained."""
        self._raised_before = getattr(sys, "last_value", None)
        """An earlier exception of an interactive session, which does not end the program."""
        self._lock = threading.Condition()
        self._wake = threading.Event()
        self._over = False
        self._threads = [
            threading.Thread(target=self._run_watchdogs, name="syncline-watchdog", daemon=True),
            threading.Thread(target=self._run_heartbeat, name="syncline-heartbeat", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def usable(self) -> bool:
        return not self._over and self._pid == os.getpid() and self._world is dist.group.WORLD

    @property
    def job(self) -> str:
        """A name that all ranks of this job share, or "" if they could not agree on one."""
        return self._store.job

    def watch(self, watchdog: Watchdog) -> None:
        with self._lock:
            self._watchdogs.add(watchdog)

    def unwatch(self, watchdog: Watchdog) -> None:
        with self._lock:
            self._watchdogs.discard(watchdog)
        self.hold(0)

    def hold(self, holders: int) -> None:
        """Add to the number of holders, and end if there are none and nothing is watched."""
        with self._lock:
            self._holders += holders
            self._over = self._over or not (self._watchdogs or self._holders)
        if self._over:
            self.end()

    def end(self) -> None:
        """Send a last heartbeat and end the threads, unless the store blocks one."""
        if self._pid != os.getpid():
            return
        with self._lock:
            self._over = True
            self._lock.notify_all()
        self._wake.set()
        until_s = time.monotonic() + ANSWER_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until_s - time.monotonic()))

    def _set(self, **fields: Any) -> None:
        """Change the next heartbeat."""
        with self._lock:
            self._beat = msgspec.structs.replace(self._beat, **fields)

    def count_call(self, group: str) -> int:
        """Count a call that all ranks of a process group make, and forget earlier failures."""
        with self._lock:
            count = self._beat.calls.get(group, 0) + 1
            self._set(calls={**self._beat.calls, group: count}, failed="", own=False)
            return count

    def announce_failure(self, error: str, *, own: bool) -> None:
        """Tell the other ranks about a failure. Only the first one counts.

        Unless the cause is its `own`, this rank looks for suspects next. The same heartbeat says so: a rank that serves
        the store would otherwise end as soon as it has read of the failure.
        """
        with self._lock:
            if not self._beat.failed:
                self._set(failed=one_line(error), own=own, asking=not own)
        self._wake.set()

    # --- looking for suspects -----------------------------------------------------------------------------------

    def find_suspects(self, ranks: Sequence[int], absence: Absence, *, outside: bool = False) -> list[Suspect]:
        """Return the suspects among these ranks. Takes seconds.

        `outside` is for a collective outside Syncline: the others may reach their timeouts a little later, and a rank
        that does not is the one that all have waited for.
        """
        others = [rank for rank in ranks if rank != self._rank]
        asked_s = time.monotonic()

        def is_clear() -> bool:
            return not any(self._others.is_unclear(rank, asked_s) for rank in others)

        def is_enough() -> bool:
            if not all(self._others.is_known(rank, asked_s) for rank in others):
                return False
            return not outside or bool(self._others.culprits(others)) or self._others.have_failed(others)

        with self._lock:
            self._set(asking=True)
            self._listen(is_enough)
            if not is_clear() and self._store.state is StoreState.ANSWERS:  # a busy machine: few heartbeats were read
                self._listen(is_clear)
            self._set(asking=False)
            self._wake.set()
            return self._others.find_suspects(self._rank, others, absence, asked_s, self._store.state)

    def _listen(self, is_enough: Callable[[], bool], most_s: float | None = None) -> None:
        """Read heartbeats more often for some beats, or until enough have arrived. Call this with the lock held."""
        most_s = _WAIT_BEATS * self.beat_s if most_s is None else most_s
        until_s = self._urgent_until_s = time.monotonic() + most_s
        self._wake.set()
        while (left_s := until_s - time.monotonic()) > 0 and self.usable and not is_enough():
            if self._store.state in (StoreState.GONE, StoreState.UNUSABLE):
                break
            self._lock.wait(min(left_s, self.beat_s / 4))

    # --- the thread of the watchdogs ----------------------------------------------------------------------------

    def _run_watchdogs(self) -> None:
        while (watchdogs := self._live_watchdogs()) is not None:
            while watchdogs:  # this thread must not refer to one while it waits, or a released model would stay
                with contextlib.suppress(Exception):  # an error of one must not leave the others unwatched
                    watchdogs.pop().end_overdue(time.monotonic())
            if line := self._store.outage(self.beat_s):
                log(line)
            with self._lock:
                if not self._over:
                    self._lock.wait(self.beat_s)

    def _live_watchdogs(self) -> list[Watchdog] | None:
        """Return the watchdogs, or None if this heartbeat has ended."""
        with self._lock:
            watchdogs = list(self._watchdogs)
            # A model that has failed may be released before its program ends, when others still need this rank's store.
            if self.usable and (watchdogs or self._holders or self._beat.failed):
                return watchdogs
            self._over = True
            self._lock.notify_all()
            return None

    # --- the thread of the store --------------------------------------------------------------------------------

    def _run_heartbeat(self) -> None:
        try:
            self._store.open()
            while self._send_and_read():
                with self._lock:
                    self._lock.notify_all()
                urgent = time.monotonic() < self._urgent_until_s
                self._wake.wait(self.beat_s / 4 if urgent else self.beat_s)
                self._wake.clear()
            if self._store.is_due(urgent=False) and self._store.state is StoreState.ANSWERS:
                self._set(detached=not self._beat.ended)
                with self._store.asking():
                    self._send({})
        finally:
            self._store.close()
            with self._lock:
                self._lock.notify_all()
            self._world = None

    def _send_and_read(self) -> bool:
        """Return whether to go on. A function, so that its thread refers to no watchdog between two calls."""
        watchdogs = self._live_watchdogs()
        if watchdogs is None:
            return False
        now_s = time.monotonic()
        urgent = now_s < self._urgent_until_s
        if not self._store.is_due(urgent=urgent):
            return True
        led = [watchdog for watchdog in watchdogs if watchdog.ranks[0] == self._rank and len(watchdog.ranks) > 1]
        compares = bool(led) and now_s - self._compared_s > _STRAGGLERS_S
        with self._store.asking():
            self._send({watchdog.name: watchdog.progress() for watchdog in watchdogs})
            everyone = [rank for rank in range(self._ranks) if rank != self._rank]
            self._read(everyone if compares or urgent else self._neighbours, urgent=urgent)
        if self._store.state is StoreState.ANSWERS:
            with self._lock:
                lines = self._silence.update(self._others, self._neighbours)
            for line in lines:
                log(line)
            if compares:
                self._compared_s = now_s
                for watchdog in led:
                    progress = self._others.progress(watchdog.name, watchdog.ranks)
                    watchdog.compare({**progress, self._rank: watchdog.progress()})
        return True

    def _send(self, progress: dict[str, Progress]) -> None:
        with self._lock:
            self._set(count=self._beat.count + 1, progress=progress)
            data = msgspec.json.encode(self._beat)
        self._store.write(data)

    def _read(self, ranks: Sequence[int], *, urgent: bool) -> None:
        unseen = [rank for rank in ranks if rank not in self._others]
        missing = self._store.missing(unseen, urgent=urgent)
        beats: dict[int, Beat] = {}
        for rank, beat in self._store.read([rank for rank in ranks if rank not in missing]).items():
            with contextlib.suppress(msgspec.MsgspecError):
                beats[rank] = msgspec.json.decode(beat, type=Beat)
        with self._lock:
            self._others.update(beats, all_ranks=len(ranks) == self._ranks - 1)

    # --- the end of the program ---------------------------------------------------------------------------------

    def end_program(self) -> None:
        """Send how the program ended and end all threads: one that still runs while Python shuts down may abort it."""
        if self._pid != os.getpid():
            return
        with contextlib.suppress(Exception):  # nothing may keep a program from ending
            error = getattr(sys, "last_value", None)
            if error is not None and error is not self._raised_before:
                self.explain_end(error)
            elif not self._beat.failed:
                self._set(ended="its program ended")
            self._linger()
        with self._lock:
            watchdogs = list(self._watchdogs)
        self.end()
        for watchdog in watchdogs:
            with contextlib.suppress(Exception):
                watchdog.end_lanes()

    def explain_end(self, error: BaseException) -> str:
        """Send the exception that ends the program. If a collective raised it, log and return the suspects."""
        if error is self._ended_by:
            return ""
        self._ended_by = error
        text = one_line(f"{type(error).__name__}: {first_line(error)}")
        if self._beat.failed and self._beat.failed[:_SAME_ERROR] in one_line(str(error)):
            return ""
        if not is_backends(error):
            self._set(ended=f"its program ended: {text}")
            return ""
        watchdogs = self._live_watchdogs()
        if not watchdogs:
            return ""
        return max(watchdogs, key=lambda dog: (len(dog.ranks), dog.progress().submitted)).explain_end(text)

    def _linger(self) -> None:
        """Wait for ranks that still look for suspects, if the store ends with this process."""
        if self._rank == 0 and not torchrun.keeps_store() and (self._beat.failed or self._ended_by is not None):
            with self._lock:
                self._listen(lambda: all(map(self._others.is_done, range(1, self._ranks))), _LINGER_S)


def log(line: str) -> None:
    """Print one line to stderr. Unlike a warning, it cannot be filtered or turned into an error."""
    with contextlib.suppress(Exception):  # there may be no stderr
        print(f"syncline: {line}", file=sys.stderr, flush=True)


_heartbeat: Heartbeat | None = None
_making = threading.Lock()


@contextlib.contextmanager
def shared_heartbeat() -> Iterator[Heartbeat | None]:
    """Provide this process's heartbeat, started if necessary; None with a single rank, or without a store."""
    heartbeat = _hold()
    try:
        yield heartbeat
    finally:
        if heartbeat is not None:
            heartbeat.hold(-1)


def _hold() -> Heartbeat | None:
    global _heartbeat
    if not dist.is_initialized() or dist.get_world_size() < 2:
        return None
    with _making:
        if _heartbeat is not None and _heartbeat.usable:
            _heartbeat.hold(+1)
            if _heartbeat.usable:
                return _heartbeat
        try:
            _heartbeat = Heartbeat(dist.distributed_c10d._get_default_store())
        except (AttributeError, RuntimeError):
            return None
        if multiprocessing.parent_process() is not None:  # its children do not run functions registered with atexit
            multiprocessing.util.Finalize(None, _heartbeat.end, exitpriority=0)
        return _heartbeat


def explain_end(error: BaseException) -> str:
    """Log the suspects if the exception that ends the program comes from a collective, and return their text."""
    return _heartbeat.explain_end(error) if _heartbeat is not None and _heartbeat.usable else ""


@atexit.register
def _at_exit() -> None:
    if _heartbeat is not None:
        _heartbeat.end_program()
