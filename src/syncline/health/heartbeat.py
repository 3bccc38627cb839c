"""Who of the job is still there: ranks leave signs of life in the job's store, and read them when something is late.

A collective that fails says that a connection was closed, or that time is up; whose fault it was is known to nobody who
waits in it. So each rank has one thread that leaves a sign a second where all can see it, in the store that
torch.distributed has met at: how many collectives it has come to, how long its own work takes, and what has failed
here, if something has. Whoever fails reads the others' signs, and can name the rank that left none, that failed first,
or that has not come. The same thread reads the others' heartbeats once per beat and logs one line when a rank stops
sending them, and one when it is back. A rank that only computes for long still sends them.

A second thread looks after lanes: what has not moved for longer than the backend's own timeout, which should have ended
it, is ended here. It is another one because a store that cannot be reached may keep its reader for as long as it likes;
this thread logs that, too.

Nothing here may hurt a job: a store that cannot be asked means that less is known.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.util
import os
import secrets
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

import msgspec
import torch.distributed as dist

from syncline.dist import torchrun
from syncline.errors import first_line
from syncline.files import one_line
from syncline.health.suspects import ALARM_S, At, Exchanging, Heard, Kind, Sign, Silence, Suspect, is_backends

BEAT_S = 1.0
_RANKS_PER_S = 64
"""So many signs a second are nothing to a store; more ranks beat less often."""
_PATIENT_BEATS = 3.3
_ANSWER_S = 2.0
"""How long a store may take to answer."""
_STRAGGLERS_S = 10.0
_STAYS_S = 10.0
"""For how long whoever serves the store lets others ask, at most, when it ends."""
_STORE_S = ALARM_S - _ANSWER_S
"""So long after the time in which a store must answer it is worth a line in the log that it has not."""
_RETRY_S = 3.0
"""After a store's first failure to answer; then every `_STRAGGLERS_S`."""
_NEIGHBOURS = 64
"""At most so many ranks are watched for silence by each rank, so that what the store is asked grows with the ranks and
not with their square."""
_TOLD = 60
"""So many letters of what has failed tell it from something else."""


class Watched(Exchanging, Protocol):
    """An engine, as far as this looks after it."""

    ranks: tuple[int, ...]

    def end_overdue(self, now_s: float) -> None:
        """Ends what has not moved for too long."""

    def compare(self, at: dict[int, At]) -> None:
        """Looks for a straggler among its ranks, this one among them."""

    def let_go(self) -> None:
        """The program ends, and so does what is under way."""

    def fell_with(self, error: str) -> str:
        """Logs what is known of a collective that was none of its own, and has ended the program → the suspects."""


class Vigil:
    """One process's, for as long as something is watched."""

    def __init__(self, shared: Any) -> None:
        self._shared: Any = shared
        self._kind: Any = shared
        self._store: Any = None
        self._job = dist.group.WORLD
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self.beat_s = BEAT_S * max(1.0, self._ranks / _RANKS_PER_S)
        self._pid = os.getpid()
        self._watched: weakref.WeakSet[Any] = weakref.WeakSet()
        self._holders = 1
        """Who may be about to have something watched: whoever made it is one."""
        self.job = ""
        """What these ranks call their job, once all could agree on it."""
        self._sign = Sign(secrets.randbelow(1 << 40))  # no two vigils of a rank count alike
        self._heard = Heard(self.beat_s)
        self._silence = Silence(self._rank, self.beat_s)
        self._neighbours = [(self._rank + 1 + i) % self._ranks for i in range(min(_NEIGHBOURS, self._ranks - 1))]
        self._sought_s = 0.0
        """When ranks that have sent no heartbeat yet were last looked for one by one."""
        self._silent = False
        """Whether the store does not answer."""
        self._silent_until_s = 0.0
        """When it is asked again, if nobody has to know before."""
        self._gone = False
        """Nor will it: whoever served it has closed the connection."""
        self._blind = False
        """This kind of store cannot be asked."""
        self._asking_since_s: float | None = None
        self._answered_s = self._looked_s = time.monotonic()
        self._unanswered_s = 0.0
        """For how long the store has not answered, as far as this process has run meanwhile."""
        self._ended_by: BaseException | None = None
        """What was told of as the program's end."""
        self._asked_until_s = 0.0
        self._compared_s = time.monotonic()
        self._raised_before = getattr(sys, "last_value", None)
        """In an interactive session; what ends the program is another one."""
        self._lock = threading.Condition()
        self._wake = threading.Event()
        self._over = False
        self._threads = [
            threading.Thread(target=self._look_after_lanes, name="syncline-vigil", daemon=True),
            threading.Thread(target=self._exchange_signs, name="syncline-signs", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def usable(self) -> bool:
        return not self._over and self._pid == os.getpid() and self._job is dist.group.WORLD

    # --- for those who are watched ------------------------------------------------------------------------------

    def watch(self, watched: Watched) -> None:
        """While it is held."""
        with self._lock:
            self._watched.add(watched)

    def forget(self, watched: Watched) -> None:
        with self._lock:
            self._watched.discard(watched)
        self.end_if_idle()

    def hold(self, by: int) -> None:
        with self._lock:
            self._holders += by

    def end_if_idle(self) -> None:
        with self._lock:
            self._over = self._over or not (self._watched or self._holders)
        if self._over:
            self._end()

    def part(self) -> None:
        """Leaves a last sign: nothing more is to be expected of this rank, whatever the reason is."""
        if self._pid == os.getpid():
            with self._lock:
                self._over = True
            self._end()

    def _end(self) -> None:
        self._wake.set()
        with self._lock:
            self._lock.notify_all()
        until_s = time.monotonic() + _ANSWER_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until_s - time.monotonic()))

    def came(self, group: str) -> None:
        """This rank is where all ranks of a group meet: what failed before is behind it."""
        with self._lock:
            met = {**self._sign.met, group: self._sign.met.get(group, 0) + 1}
            self._sign = msgspec.structs.replace(self._sign, met=met, failed="", own=False)

    def say(self, failed: str, *, own: bool) -> None:
        """Something has failed here, which others may want to know; the first such thing counts."""
        with self._lock:
            if not self._sign.failed:
                self._sign = msgspec.structs.replace(self._sign, failed=one_line(failed), own=own)
        self._wake.set()

    def suspects(self, ranks: Sequence[int], place: Exchanging | str, *, outside: bool = False) -> list[Suspect]:
        """Of these ranks, those that this one fails because of, as far as can be known: in an exchange, or where a
        group meets, or `outside`, in a collective that is not watched. Takes seconds."""
        others = [rank for rank in ranks if rank != self._rank]
        asked_s = time.monotonic()
        until_s = asked_s + _PATIENT_BEATS * self.beat_s
        with self._lock:
            self._sign = msgspec.structs.replace(self._sign, asks=True)
            self._listen(until_s, lambda: self._heard_enough(others, asked_s, outside))
            unclear = any(self._heard.is_open(rank, asked_s) for rank in others)
            if unclear and not self._unanswered:  # a busy machine: little was read
                until_s = time.monotonic() + _PATIENT_BEATS * self.beat_s
                self._listen(until_s, lambda: not any(self._heard.is_open(rank, asked_s) for rank in others))
            self._sign = msgspec.structs.replace(self._sign, asks=False)
            self._wake.set()
            return self._judged(others, place, asked_s, outside)

    def _heard_enough(self, others: Sequence[int], asked_s: float, outside: bool) -> bool:
        if not all(self._heard.knows(rank, asked_s) for rank in others):
            return False
        # Others' time may be up a little later, and who is then left is whom all have waited for.
        return not outside or bool(self._heard.known(others)) or self._heard.are_victims(others)

    def _listen(self, until_s: float, enough: Callable[[], bool]) -> None:
        """With the lock held: signs are read more often, until what they say is enough."""
        self._asked_until_s = until_s
        self._wake.set()
        while (left_s := until_s - time.monotonic()) > 0 and self.usable and not (self._gone or self._blind):
            if enough():
                break
            began_s, wait_s = time.monotonic(), min(left_s, self.beat_s / 4)
            self._lock.wait(wait_s)
            overslept_s = time.monotonic() - began_s - wait_s
            if overslept_s > self.beat_s:  # this process was stopped, and has heard nothing
                until_s = self._asked_until_s = until_s + overslept_s

    @property
    def _unanswered(self) -> bool:
        since_s = self._asking_since_s
        return self._silent or (since_s is not None and time.monotonic() - since_s > _ANSWER_S)

    def _judged(self, others: Sequence[int], place: Exchanging | str, asked_s: float, outside: bool) -> list[Suspect]:
        if self._blind or (self._rank == 0 and (self._gone or self._unanswered)):
            return []
        if self._gone:
            server = Suspect(0, Kind.STORE_GONE, "the job's store, which it or its launcher served, is gone")
            if failed := self._heard.failed_of(0):  # it had the same trouble, and was the first to leave
                server = Suspect(0, Kind.VICTIM, f"it failed too, and took the job's store with it: {failed}")
            return self._heard.known(others) or [server]
        if self._unanswered:
            return [Suspect(0, Kind.STORE_MUTE, "the job's store does not answer; or this rank's own link is down")]
        return self._heard.suspects(others, self._sign, place, asked_s, outside=outside)

    # --- the thread that looks after lanes ----------------------------------------------------------------------

    def _look_after_lanes(self) -> None:
        while self._ends_what_is_overdue():
            self._watch_store()
            with self._lock:
                if not self._over:
                    self._lock.wait(self.beat_s)

    def _ends_what_is_overdue(self) -> bool:
        """Between two of these, nothing that is watched is held on to. → whether there is something to watch."""
        watched = self._looked_at()
        for one in watched or ():
            with contextlib.suppress(Exception):  # what went wrong with one must not keep the others unwatched
                one.end_overdue(time.monotonic())
        return watched is not None

    def _watch_store(self) -> None:
        """Logs when the store stops answering, and when it answers again. Time in which this process itself was stopped
        does not count."""
        now_s = time.monotonic()
        elapsed_s, self._looked_s = min(now_s - self._looked_s, 2 * self.beat_s), now_s
        if self._gone or self._unanswered:
            before_s, self._unanswered_s = self._unanswered_s, self._unanswered_s + elapsed_s
            if before_s < _STORE_S <= self._unanswered_s:
                server = "the launcher on the first host" if torchrun.keeps_store() else "rank 0"
                state = "has ended" if self._gone else "is stopped or cannot be reached"
                log(
                    f"rank {self._rank}: no answer from the job's store for {now_s - self._answered_s:.0f} s: "
                    f"{server}, which serves it, {state}"
                )
        else:
            if self._unanswered_s >= _STORE_S:
                log(f"rank {self._rank}: the job's store answers again")
            self._unanswered_s = 0.0

    def _looked_at(self) -> list[Any] | None:
        with self._lock:
            watched = list(self._watched)
            if not self.usable or not (watched or self._holders):
                self._over = True
                self._lock.notify_all()
                return None
            return watched

    # --- the thread that asks the store -------------------------------------------------------------------------

    def _exchange_signs(self) -> None:
        try:
            self._open()
            while self._exchange_once():
                with self._lock:
                    self._lock.notify_all()
                asked = time.monotonic() < self._asked_until_s
                self._wake.wait(self.beat_s / 4 if asked else self.beat_s)
                self._wake.clear()
            self._part()
        finally:
            with self._lock:
                self._blind = True
                self._lock.notify_all()
            self._store = self._shared = self._kind = self._job = None  # and connections

    def _part(self) -> None:
        """Leaves a last sign, so that nobody takes this rank for a silent one."""
        if self._store is not None and not (self._gone or self._silent):
            with self._lock:
                self._sign = msgspec.structs.replace(self._sign, idle=not self._sign.left)
            with contextlib.suppress(RuntimeError, OSError):
                self._check_server()
                self._leave_sign({})

    def _check_server(self) -> None:
        """Raise an OSError if the rank that serves the store has ended: for what is then written to the store, torch
        prints a stack trace, and ranks may well end at different times."""
        host, port = getattr(self._kind, "host", None), getattr(self._kind, "port", None)
        if not torchrun.keeps_store() and self._rank != 0 and host is not None and port is not None:
            socket.create_connection((host, port), _ANSWER_S).close()

    def _open(self) -> None:
        """A connection of its own: others may wait on theirs for minutes. Here, where nobody waits for it, because a
        link that is cut makes it take long."""
        self._asking_since_s = time.monotonic()
        try:
            while hasattr(self._kind, "underlying_store"):
                self._kind = self._kind.underlying_store
            if type(self._kind).__name__ == "FileStore":  # which keeps all that was ever left in it
                self._blind = True
            else:
                self._store = self._shared.clone()
                self._store.set_timeout(timedelta(seconds=_ANSWER_S))
                self.job = self._store.compare_set(_key("job"), "", secrets.token_hex(8)).decode()
        except (AttributeError, NotImplementedError):
            self._blind = True
        except (RuntimeError, OSError):  # it will be no better later
            self._silent = True
        self._asking_since_s = None

    def _exchange_once(self) -> bool:
        """Between two of these, nothing that is watched is held on to. → whether there is something to watch."""
        watched = self._looked_at()
        if watched is None:
            return False
        if self._blind or self._gone or self._store is None:
            return True
        now_s = time.monotonic()
        led = [one for one in watched if one.ranks[0] == self._rank and len(one.ranks) > 1]
        compares = bool(led) and now_s - self._compared_s > _STRAGGLERS_S
        asked = now_s < self._asked_until_s
        if self._silent and not asked and now_s < self._silent_until_s:
            return True  # each try is a complaint in the job's output
        self._asking_since_s = now_s
        try:
            self._check_server()
            self._leave_sign({one.name: one.at() for one in watched})
            everyone = compares or asked or len(self._neighbours) == self._ranks - 1
            self._read([rank for rank in range(self._ranks) if rank != self._rank] if everyone else self._neighbours)
            self._silent, self._answered_s = False, time.monotonic()
        except (RuntimeError, OSError) as error:  # the store's host is gone, or cannot be reached
            self._fall_silent(error)
        self._asking_since_s = None
        if not self._silent:
            with self._lock:
                lines = self._silence.changes(self._heard, self._neighbours)
            for line in lines:
                log(line)
        if compares and not self._silent:
            self._compared_s = now_s
            for one in led:
                one.compare({**self._heard.at(one.name, one.ranks), self._rank: one.at()})
        return True

    def _leave_sign(self, at: dict[str, At]) -> None:
        with self._lock:
            self._sign = msgspec.structs.replace(self._sign, beat=self._sign.beat + 1, at=at)
            data = msgspec.json.encode(self._sign)
        self._store.set(_key(self._rank), data.decode())

    def _read(self, ranks: Sequence[int]) -> None:
        arrived = self._arrived([rank for rank in ranks if rank not in self._heard])
        there = [rank for rank in ranks if rank in self._heard or rank in arrived]
        signs = self._store.multi_get([_key(rank) for rank in there]) if there else []
        with self._lock:
            found: dict[int, Sign] = {}
            for rank, data in zip(there, signs, strict=True):
                with contextlib.suppress(msgspec.MsgspecError):
                    found[rank] = msgspec.json.decode(data, type=Sign)
            self._heard.note(found, everyone=len(ranks) == self._ranks - 1)

    def _arrived(self, unseen: Sequence[int]) -> set[int]:
        """Those that have sent their first heartbeat. Ranks that do not use this library never do: they are not asked
        for one by one in every beat."""
        if not unseen or self._store.check([_key(rank) for rank in unseen]):
            return set(unseen)
        now_s = time.monotonic()
        if now_s >= self._asked_until_s and now_s - self._sought_s < ALARM_S / 2:
            return set()
        self._sought_s = now_s
        return {rank for rank in unseen if self._store.check([_key(rank)])}

    def _fall_silent(self, error: BaseException) -> None:
        with self._lock:
            self._silent_until_s = time.monotonic() + (_STRAGGLERS_S if self._silent else _RETRY_S)
            self._silent = True
            self._gone = isinstance(error, dist.DistNetworkError | ConnectionRefusedError)
            self._lock.notify_all()

    def leave(self) -> None:
        """The program ends, and how it does is the last sign. Threads that still run while Python takes itself apart
        could take the process with them, so they end first, unless the store keeps one."""
        if self._pid != os.getpid():
            return
        with contextlib.suppress(Exception):  # nothing may keep a program from ending
            ended_by = getattr(sys, "last_value", None)
            if ended_by is not None and ended_by is not self._raised_before:
                self.tell_end(ended_by)
            elif not self._sign.failed:
                self._say_left("its program ended")
            self._stay()
        with self._lock:
            watched = list(self._watched)
        self.part()
        for one in watched:
            with contextlib.suppress(Exception):
                one.let_go()

    def tell_end(self, ended_by: BaseException) -> str:
        """What ends the program, for the other ranks; and who is suspected, if that is a collective: logged, and
        returned. Takes seconds."""
        if ended_by is self._ended_by:
            return ""
        self._ended_by = ended_by
        text = one_line(f"{type(ended_by).__name__}: {first_line(ended_by)}")
        told = bool(self._sign.failed) and self._sign.failed[:_TOLD] in one_line(str(ended_by))
        if not told and is_backends(ended_by):  # somebody else's doing, in a collective that is not watched
            # The one that knows most: of most ranks, and with exchanges.
            for one in sorted(self._looked_at() or (), key=lambda one: (-len(one.ranks), -one.at().submitted)):
                explained: str = one.fell_with(text)
                return explained
        elif not told:
            self._say_left(f"its program ended: {text}")
        return ""

    def _say_left(self, how: str) -> None:
        with self._lock:
            self._sign = msgspec.structs.replace(self._sign, left=how)

    def _stay(self) -> None:
        """After a failure the store may go with this process, and others may still be asking."""
        if self._rank != 0 or torchrun.keeps_store() or not (self._sign.failed or self._ended_by is not None):
            return
        others = [rank for rank in range(self._ranks) if rank != self._rank]
        with self._lock:
            until_s = time.monotonic() + min(_PATIENT_BEATS * self.beat_s, _STAYS_S)
            self._listen(until_s, lambda: all(map(self._heard.is_through, others)))


def log(line: str) -> None:
    """One line, wherever warnings go: those are filtered, and may be turned into errors."""
    with contextlib.suppress(Exception):  # nothing to write to
        print(f"syncline: {line}", file=sys.stderr, flush=True)


def _key(what: int | str) -> str:
    """In the store, of a rank's sign or of something that all share."""
    return f"syncline/vigil/{torchrun.attempt()}/{what}"


_vigil: Vigil | None = None
_making = threading.Lock()


@contextlib.contextmanager
def vigil() -> Iterator[Vigil | None]:
    """This process's, made where there is none, and there until the end of this at least; None where there is nobody
    else, or no store to meet at."""
    found = _held()
    try:
        yield found
    finally:
        if found is not None:
            found.hold(-1)
            found.end_if_idle()


def _held() -> Vigil | None:
    global _vigil
    if not dist.is_initialized() or dist.get_world_size() < 2:
        return None
    with _making:
        if _vigil is not None and _vigil.usable:
            _vigil.hold(+1)
            if _vigil.usable:
                return _vigil
        try:
            _vigil = Vigil(dist.distributed_c10d._get_default_store())
        except (AttributeError, RuntimeError):
            return None
        if multiprocessing.parent_process() is not None:  # where nothing that is registered with atexit is run
            multiprocessing.util.Finalize(None, _vigil.part, exitpriority=0)
        return _vigil


def explain_end(error: BaseException) -> str:
    """Names who is suspected when a collective's `error` ends the program, in the log and to whoever asks."""
    return _vigil.tell_end(error) if _vigil is not None and _vigil.usable else ""


@atexit.register
def _leave() -> None:
    if _vigil is not None:
        _vigil.leave()
