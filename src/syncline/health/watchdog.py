"""What is watched of one model: where each bucket of its exchanges is, and what happened last; of plain DDP, only that
its ranks send heartbeats and how far they are.

The last events are kept in a ring, whatever becomes of them: noting one costs less than a microsecond, and they are all
that is left to look at when an exchange fails. See `heartbeat` for who looks, and `failure` for what is left behind.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from syncline.dist.comm import LaneGroups, backend_of, group_timeout
from syncline.dist.lane import Job, Lane
from syncline.dist.span import Span
from syncline.errors import first_line, tell
from syncline.health import failure
from syncline.health.heartbeat import log, vigil
from syncline.health.stragglers import Stragglers
from syncline.health.suspects import At, Suspect, is_collective, suspected

_EVENTS = 400
_GRACE = 0.5
"""What a collective may take beyond its timeout, as a part of it: the backend itself should have ended it by then."""
_GRACE_S = 5.0
_DEVICE = 0.7
"""Of a collective's timeout on a device, after which NCCL ends the process: what is known is told before."""

_LETS_GO_S = 2.0

_EXPLAINED_S = 120.0
"""Longer than finding out takes."""


@dataclass(frozen=True)
class _Open:
    job: Job
    step: int
    since_s: float


class Guard:
    """Of one engine, from `start` to `stop`."""

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        self.name, self.timeout_s, self._backend = "", timeout.total_seconds(), backend_of(group)
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self._rank = dist.get_rank()
        self._stragglers = Stragglers(self.ranks)
        self._events: deque[tuple[float, str, int, int, int, str, int]] = deque(maxlen=_EVENTS)
        self._places: dict[int, tuple[int, int]] = {}
        """By lane, the step and the bucket that it issues now."""
        self._open: dict[int, list[_Open]] = {}
        self._moved_s: dict[int, float] = {}
        self._last: dict[int, str] = {}
        """By lane, what happened last."""
        self._submitted = self._step = 0
        self._lanes: Sequence[Lane] = ()
        self._groups: Sequence[LaneGroups] = ()
        self._told: set[int] = set()
        """Lanes on a device whose last exchange was told to be stuck."""
        self._lock = threading.Lock()
        self._explains = False
        self._explained = threading.Event()
        self._explanation = ""

    @property
    def straggler(self) -> str | None:
        """Who keeps the others waiting, if somebody does; the first rank knows."""
        return self._stragglers.found

    def start(self, groups: Sequence[LaneGroups], lanes: Sequence[Lane]) -> None:
        """From now on these are looked after, and tell what they issue."""
        self._lanes, self._groups = tuple(lanes), tuple(groups)
        for index, one in enumerate(groups):
            one.notes.issued = functools.partial(_issued, weakref.ref(self), index)
        self.watch(groups[0].comm.group.group_name)

    def watch(self, name: str) -> None:
        """From now on this rank sends heartbeats, and logs which other one sends none, until `stop`."""
        self.name = name
        with vigil() as found:
            if found is not None:
                found.watch(self)

    def stop(self) -> None:
        if not self.name:
            return
        self._lanes = self._groups = ()
        with self._lock:
            self._open.clear()
        with vigil() as found:
            if found is not None:
                found.forget(self)

    # --- what happens -------------------------------------------------------------------------------------------

    def begin(self, job: Job, step: int) -> None:
        """A bucket is ready, and goes to its lane."""
        now_s = time.monotonic()
        with self._lock:
            self._submitted, self._step = self._submitted + 1, step
            waiting = self._open.setdefault(job.lane, [])
            if not job.marks.on_host:
                waiting.clear()  # a device ends them unseen: the last one stands for all
            if not waiting:
                self._moved_s[job.lane] = now_s
            waiting.append(_Open(job, step, now_s))
        self._events.append((now_s, "ready", job.lane, step, job.bucket, "", 0))

    def runs(self, lane: int, step: int, bucket: int) -> None:
        """A lane has come to a bucket."""
        self._places[lane] = step, bucket
        self._note("start", lane, step, bucket)

    def issued(self, lane: int, kind: str, level: str, sent_bytes: int) -> None:
        """A collective, of the bucket that the lane has come to."""
        step, bucket = self._places.get(lane, (-1, -1))
        self._note(kind, lane, step, bucket, level, sent_bytes)

    def over(self, job: Job) -> None:
        """On a device: it is on its way there."""
        with self._lock:
            if job.marks.on_host:
                waiting = self._open.get(job.lane, [])
                waiting[:] = [one for one in waiting if one.job is not job]
        self._note("end" if job.error is None else "failed", job.lane, self._step, job.bucket)

    def _note(self, what: str, lane: int, step: int, bucket: int, level: str = "", sent_bytes: int = 0) -> None:
        now_s = time.monotonic()
        self._moved_s[lane], self._last[lane] = now_s, what
        self._events.append((now_s, what, lane, step, bucket, level, sent_bytes))

    def reached(self, step: int) -> None:
        """Plain DDP has come to a step."""
        self._step = step

    def stepped(self, span: Span | None, period_s: float) -> None:
        """A step is over, and took so long."""
        self._stragglers.stepped(span, period_s)

    # --- for the vigil ------------------------------------------------------------------------------------------

    def at(self) -> At:
        return At(self._submitted, self._step, self._stragglers.own_s(), self._inside_s())

    def _inside_s(self) -> float:
        """For how long a lane has been inside of an exchange without coming to a collective."""
        with self._lock:
            inside = [lane for lane, waiting in self._open.items() if waiting and self._last.get(lane) == "start"]
            return max((time.monotonic() - self._moved_s[lane] for lane in inside), default=0.0)

    def end_overdue(self, now_s: float) -> None:
        lanes = self._lanes
        with self._lock:
            late = [(self._moved_s[lane], waiting[0]) for lane, waiting in self._open.items() if waiting]
        for moved_s, one in late:
            mute_s = now_s - moved_s
            if not one.job.marks.on_host:
                if not _under_way(one.job):
                    self._told.discard(one.job.lane)
                elif mute_s > _DEVICE * self.timeout_s:
                    self._tell_stuck(one, mute_s)
            elif mute_s > self.timeout_s + max(_GRACE_S, _GRACE * self.timeout_s) and lanes:
                # Not in this thread, which has the signs to read by which the others are named.
                told = f"nothing has moved on lane {one.job.lane} for {mute_s:.0f} s"
                own = self._last.get(one.job.lane) == "start"
                error = RuntimeError(f"{told}, inside of the exchange") if own else TimeoutError(told)
                end = functools.partial(lanes[one.job.lane].abandon, one.job, error)
                threading.Thread(target=end, name="syncline-end", daemon=True).start()
                self._moved_s[one.job.lane] = now_s  # once, until it is due again

    def _tell_stuck(self, one: _Open, mute_s: float) -> None:
        if one.job.lane in self._told:
            return
        self._told.add(one.job.lane)
        text = (
            f"exchanging bucket {one.job.bucket} of step {one.step} has taken {mute_s:.0f} s, and NCCL ends this "
            f"process after {self.timeout_s:.0f} s"
        )
        threading.Thread(target=self._alarm, args=(text,), name="syncline-stuck", daemon=True).start()

    def _alarm(self, text: str) -> None:
        """Nothing has failed yet, and it may still go on."""
        with vigil() as found:
            job, suspects = ("", []) if found is None else (found.job, found.suspects(self.ranks, self))
        tell(text + suspected(suspects) + failure.leave(lambda: self._note_of(text, suspects, job)))

    def compare(self, at: dict[int, At]) -> None:
        self._stragglers.compare(at)

    def fell_with(self, error: str) -> str:
        text = f"the program ended in a collective of its own or of DDP's: {error}"
        told = self.explain(text, own=False, outside=True)
        log(f"{text}{told}")
        return told

    def let_go(self) -> None:
        """The program ends. A thread that came back from a collective while Python takes itself apart would abort the
        process, and its launcher take that for the cause of it all: what is under way ends now."""
        with self._lock:
            if not any(waiting and waiting[0].job.marks.on_host for waiting in self._open.values()):
                return
            self._explains = True
        self._explained.set()  # there is nothing to explain, or it has been
        for one in self._groups:
            one.cut()
        until_s = time.monotonic() + _LETS_GO_S
        for lane in self._lanes:
            lane.end(max(0.0, until_s - time.monotonic()))

    # --- when something fails -----------------------------------------------------------------------------------

    def explain(
        self, error: str, *, own: bool | None = None, cause: BaseException | None = None, outside: bool = False
    ) -> str:
        """Once: who is suspected, and where the note is, to be appended to the error. `outside` of exchanges:
        in a collective that is not watched. Takes seconds."""
        with self._lock:
            first, self._explains = not self._explains, True
        if not first:
            self._explained.wait(_EXPLAINED_S)
            return self._explanation
        try:
            self._explanation = self._explain(error, not is_collective(cause) if own is None else own, outside)
        except Exception as problem:  # noqa: BLE001 - the error itself must be told, whatever else is broken by now
            self._explanation = f"; nothing more could be found out: {first_line(problem)}"
        finally:
            self._explained.set()
        return self._explanation

    def explained(self, error: BaseException | None) -> str:
        """What has failed already, with the explanation that may still be looked for."""
        if self._explains:
            self._explained.wait(_EXPLAINED_S)
        return f"{error}" + ("" if self._explanation in str(error) else self._explanation)

    def _explain(self, error: str, own: bool, outside: bool) -> str:
        suspects, left = failure.told(
            error,
            lambda suspects, job: self._note_of(error, suspects, job, outside=outside),
            lambda found: found.suspects(self.ranks, self, outside=outside),
            own=own,
        )
        return suspected(suspects) + left

    def _note_of(self, error: str, suspects: Sequence[Suspect], job: str, *, outside: bool = False) -> failure.Failure:
        now_s = time.monotonic()
        with self._lock:
            pending = [
                failure.Pending(
                    lane=one.job.lane,
                    step=one.step,
                    bucket=one.job.bucket,
                    bytes=one.job.bytes,
                    exchange=type(one.job.exchange).__name__ if one.job.exchange is not None else "",
                    age_s=now_s - one.since_s,
                )
                for waiting in self._open.values()
                for one in waiting
                if _under_way(one.job)
            ]
        events = [
            failure.Event(
                before_s=now_s - at_s, what=what, lane=lane, step=step, bucket=bucket, level=level, sent_bytes=sent
            )
            for at_s, what, lane, step, bucket, level, sent in tuple(self._events)
        ]
        return failure.Failure(
            rank=self._rank,
            world_size=dist.get_world_size() if dist.is_initialized() else len(self.ranks),
            backend=self._backend,
            timeout_s=self.timeout_s,
            job=job,
            where="a collective of its own" if outside else f"step {self._step}",
            step=self._step,
            error=error,
            suspects=tuple(suspects),
            pending=tuple(pending),
            events=tuple(events),
        )


_plain: weakref.WeakKeyDictionary[DDP, Guard] = weakref.WeakKeyDictionary()


def watch_plain(ddp: DDP) -> weakref.ref[Guard]:
    """Send heartbeats, and log which other rank sends none, for as long as the model is there, or until `stop`: for a
    model that is plain DDP, or may become it."""
    group: dist.ProcessGroup = ddp.process_group
    guard = _plain.setdefault(ddp, Guard(group, group_timeout(group)))
    guard.watch(f"plain {group.group_name}")
    return weakref.ref(guard)


def _under_way(job: Job) -> bool:
    try:
        return job.marks.seconds() is None
    except RuntimeError:  # of a device that answers nothing any more
        return True


def _issued(guard: weakref.ref[Guard], lane: int, kind: str, level: str, sent_bytes: int) -> None:
    """Comms are in a circle of their own, which must not keep a model's guard and lanes when the model is forgotten."""
    if (found := guard()) is not None:
        found.issued(lane, kind, level, sent_bytes)
