"""Watchdogs: each follows the exchanges of one model, abandons one that hangs, and explains a failure.

It keeps the last events for the failure report, at less than a microsecond per event. A thread of `heartbeat` calls it
once per beat. The watchdog of plain DDP knows the current step, and no buckets.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from syncline.dist.comm import LaneGroups, backend_of, group_timeout
from syncline.dist.lane import Job, Lane
from syncline.dist.span import Span
from syncline.errors import first_line, warn
from syncline.health.failure import Event, FailureReport, Pending, explain_failure
from syncline.health.heartbeat import log, shared_heartbeat
from syncline.health.stragglers import Stragglers
from syncline.health.suspects import Progress, absent_from_collective, absent_from_exchange, is_collective

_EVENTS = 400
_GRACE = 0.5
"""Fraction of the timeout that a collective may take beyond it; its backend should have ended it by then."""
_GRACE_S = 5.0
"""The same in seconds; the longer time counts."""
_WARN = 0.7
"""Fraction of a collective's timeout on a device after which a warning names suspects, before NCCL ends the process."""
_END_S = 2.0
"""Time that lanes have to end with the program."""
_EXPLAINED_S = 120.0
"""Time that another thread waits for an explanation. Finding one takes seconds."""


@dataclass(frozen=True)
class _Unfinished:
    job: Job
    step: int
    since_s: float

    def under_way(self) -> bool:
        try:
            return self.job.marks.seconds() is None
        except RuntimeError:  # a broken device does not answer
            return True

    def pending(self, now_s: float) -> Pending:
        job = self.job
        exchange = "" if job.exchange is None else type(job.exchange).__name__
        return Pending(job.lane, self.step, job.bucket, job.bytes, exchange, now_s - self.since_s)


@dataclass
class _LaneState:
    unfinished: list[_Unfinished] = field(default_factory=list)
    """On a device, only the last bucket: the host does not see when the others end."""
    moved_s: float = 0.0
    """When the last event happened."""
    last: str = ""
    """The last event."""
    step: int = -1
    bucket: int = -1
    warned: bool = False

    def inside_s(self, now_s: float) -> float:
        """Return how long the lane has been inside an exchange without starting a collective."""
        return now_s - self.moved_s if self.unfinished and self.last == "start" else 0.0


class Watchdog:
    """The watchdog of one engine, from `start` to `stop`."""

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        self.name, self.timeout_s, self._backend = "", timeout.total_seconds(), backend_of(group)
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self._rank = dist.get_rank()
        self._stragglers = Stragglers(self.ranks)
        self._events: deque[tuple[float, str, int, int, int, str, int]] = deque(maxlen=_EVENTS)
        """Time, and the fields of an `Event`."""
        self._states: dict[int, _LaneState] = {}
        """By lane. Any thread may add one, so iterate over a copy."""
        self._submitted = self._step = 0
        self._lanes: Sequence[Lane] = ()
        self._groups: Sequence[LaneGroups] = ()
        self._lock = threading.Lock()
        self._explains = False
        self._explained = threading.Event()
        self._explanation = ""

    @property
    def straggler(self) -> str | None:
        """A sentence about the rank that makes the others wait, on the first rank of the model."""
        return self._stragglers.straggler

    def start(self, groups: Sequence[LaneGroups], lanes: Sequence[Lane]) -> None:
        """Watch these lanes."""
        self._lanes, self._groups = tuple(lanes), tuple(groups)
        for lane, lane_groups in enumerate(groups):
            lane_groups.comm.counter.issued = functools.partial(_issued, weakref.ref(self), lane)
        self.watch(groups[0].comm.group.group_name)

    def watch(self, name: str) -> None:
        """Send heartbeats and log silent ranks until `stop`. The name is the same on all ranks."""
        self.name = name
        with shared_heartbeat() as heartbeat:
            if heartbeat is not None:
                heartbeat.watch(self)

    def stop(self) -> None:
        if not self.name:
            return
        self._lanes = self._groups = ()
        with self._lock:
            for state in tuple(self._states.values()):
                state.unfinished.clear()
        with shared_heartbeat() as heartbeat:
            if heartbeat is not None:
                heartbeat.unwatch(self)

    # --- events -------------------------------------------------------------------------------------------------

    def bucket_submitted(self, job: Job, step: int) -> None:
        """Record that a bucket is ready and goes to its lane."""
        now_s = time.monotonic()
        with self._lock:
            self._submitted, self._step = self._submitted + 1, step
            state = self._state(job.lane)
            if not job.marks.on_host:
                state.unfinished.clear()
            if not state.unfinished:
                state.moved_s = now_s
            state.unfinished.append(_Unfinished(job, step, now_s))
        self._events.append((now_s, "ready", job.lane, step, job.bucket, "", 0))

    def bucket_started(self, lane: int, step: int, bucket: int) -> None:
        """Record that a lane starts the exchange of a bucket."""
        state = self._state(lane)
        state.step, state.bucket = step, bucket
        self._record("start", lane, step, bucket)

    def collective_issued(self, lane: int, kind: str, level: str, sent_bytes: int) -> None:
        """Record a collective of the bucket that the lane has started."""
        state = self._state(lane)
        self._record(kind, lane, state.step, state.bucket, level, sent_bytes)

    def bucket_ended(self, job: Job) -> None:
        """Record the end of an exchange; on a device, that all of it has been enqueued."""
        if job.marks.on_host:
            with self._lock:
                unfinished = self._state(job.lane).unfinished
                unfinished[:] = [other for other in unfinished if other.job is not job]
        self._record("end" if job.error is None else "failed", job.lane, self._step, job.bucket)

    def _record(self, what: str, lane: int, step: int, bucket: int, level: str = "", sent_bytes: int = 0) -> None:
        state = self._state(lane)
        state.moved_s, state.last = time.monotonic(), what
        self._events.append((state.moved_s, what, lane, step, bucket, level, sent_bytes))

    def _state(self, lane: int) -> _LaneState:
        return self._states.get(lane) or self._states.setdefault(lane, _LaneState())

    def reached(self, step: int) -> None:
        """Record the current step of plain DDP."""
        self._step = step

    def step_timed(self, span: Span | None, period_s: float) -> None:
        """Record the duration of a step."""
        self._stragglers.stepped(span, period_s)

    # --- called by the heartbeat --------------------------------------------------------------------------------

    def progress(self) -> Progress:
        now_s = time.monotonic()
        inside_s = max((state.inside_s(now_s) for state in tuple(self._states.values())), default=0.0)
        return Progress(self._submitted, self._step, self._stragglers.own_s(), inside_s)

    def compare(self, progress: Mapping[int, Progress]) -> None:
        self._stragglers.compare(progress)

    def end_overdue(self, now_s: float) -> None:
        """Abandon exchanges that have made no progress for too long; on a device, warn about them in time."""
        lanes = self._lanes
        with self._lock:
            late = [(state, state.unfinished[0]) for state in tuple(self._states.values()) if state.unfinished]
        for state, unfinished in late:
            job, still_s = unfinished.job, now_s - state.moved_s
            # In a thread of its own, because the calling thread must not wait for suspects.
            if not job.marks.on_host:
                if not unfinished.under_way():
                    state.warned = False
                elif still_s > _WARN * self.timeout_s and not state.warned:
                    state.warned = True
                    text = (
                        f"exchanging bucket {job.bucket} of step {unfinished.step} has taken {still_s:.0f} s, and NCCL "
                        f"ends this process after {self.timeout_s:.0f} s"
                    )
                    threading.Thread(target=self._warn, args=(text,), name="syncline-stuck", daemon=True).start()
            elif still_s > self.timeout_s + max(_GRACE_S, _GRACE * self.timeout_s) and lanes:
                text = f"no progress on lane {job.lane} for {still_s:.0f} s"
                inside = state.last == "start"
                error = RuntimeError(f"{text}, inside the exchange") if inside else TimeoutError(text)
                abandon = functools.partial(lanes[job.lane].abandon, job, error)
                threading.Thread(target=abandon, name="syncline-end", daemon=True).start()
                state.moved_s = now_s  # so that it is abandoned once

    def _warn(self, text: str) -> None:
        """Warn about an exchange that may still finish, and write a failure report."""
        absence = absent_from_exchange(self.name, self.progress)
        warn(text + "".join(explain_failure(self._report(text), self.ranks, absence, announce=False)))

    def explain_end(self, error: str) -> str:
        """Log and return the suspects for a collective outside Syncline whose error ends the program."""
        text = f"the program ended in a collective outside Syncline: {error}"
        explanation = self.explain(text, own=False, outside=True)
        log(f"{text}{explanation}")
        return explanation

    def end_lanes(self) -> None:
        """End all exchanges with the program.

        A thread that returns from a collective while Python shuts down would abort the process, and its launcher would
        take that for the cause of the failure.
        """
        with self._lock:
            first = [state.unfinished[0] for state in tuple(self._states.values()) if state.unfinished]
            if not any(unfinished.job.marks.on_host for unfinished in first):
                return
            self._explains = True
        self._explained.set()  # no other thread shall wait for an explanation
        for lane_groups in self._groups:
            lane_groups.cut()
        until_s = time.monotonic() + _END_S
        for lane in self._lanes:
            lane.end(max(0.0, until_s - time.monotonic()))

    # --- failures -----------------------------------------------------------------------------------------------

    def explain(
        self, error: str, *, own: bool | None = None, cause: BaseException | None = None, outside: bool = False
    ) -> str:
        """Return the suspects and where the failure report is, to be appended to an error. Takes seconds, once.

        `own` says whether the cause is on this rank; by default, the exception `cause` decides. `outside` is for a
        collective outside Syncline.
        """
        with self._lock:
            first, self._explains = not self._explains, True
        if not first:
            self._explained.wait(_EXPLAINED_S)
            return self._explanation
        own = not is_collective(cause) if own is None else own
        absence = absent_from_collective(self.name) if outside else absent_from_exchange(self.name, self.progress)
        try:
            report = self._report(error, outside=outside)
            self._explanation = "".join(explain_failure(report, self.ranks, absence, own=own, outside=outside))
        except Exception as problem:  # noqa: BLE001 - the error itself must be raised, whatever else is broken by now
            self._explanation = f"; its suspects could not be found: {first_line(problem)}"
        finally:
            self._explained.set()
        return self._explanation

    def explained(self, error: BaseException | None) -> str:
        """Return an earlier error with its explanation, which another thread may still be looking for."""
        if self._explains:
            self._explained.wait(_EXPLAINED_S)
        return f"{error}" + ("" if self._explanation in str(error) else self._explanation)

    def _report(self, error: str, *, outside: bool = False) -> FailureReport:
        events, now_s = tuple(self._events), time.monotonic()
        with self._lock:
            unfinished = [other for state in tuple(self._states.values()) for other in state.unfinished]
        return FailureReport(
            rank=self._rank,
            world_size=dist.get_world_size() if dist.is_initialized() else len(self.ranks),
            backend=self._backend,
            timeout_s=self.timeout_s,
            where="a collective outside Syncline" if outside else f"step {self._step}",
            step=self._step,
            error=error,
            suspects=(),
            pending=tuple(bucket.pending(now_s) for bucket in unfinished if bucket.under_way()),
            events=tuple(Event(now_s - event[0], *event[1:]) for event in events),
        )


def _issued(watchdog: weakref.ref[Watchdog], lane: int, kind: str, level: str, sent_bytes: int) -> None:
    """Record a collective. A comm is in a reference cycle, so it must not keep the watchdog of a model alive."""
    if (alive := watchdog()) is not None:
        alive.collective_issued(lane, kind, level, sent_bytes)


_plain: weakref.WeakKeyDictionary[DDP, Watchdog] = weakref.WeakKeyDictionary()


def watch_plain(ddp: DDP) -> weakref.ref[Watchdog]:
    """Send heartbeats and log silent ranks for a model that is plain DDP, until it is released or `stop` is called."""
    group: dist.ProcessGroup = ddp.process_group
    watchdog = _plain.setdefault(ddp, Watchdog(group, group_timeout(group)))
    watchdog.watch(f"plain {group.group_name}")
    return weakref.ref(watchdog)
