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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from syncline.dist.comm import LaneGroups, backend_of, group_timeout
from syncline.dist.lane import Job, Lane
from syncline.errors import first_line, warn
from syncline.health.failure import explain_failure
from syncline.health.heartbeat import shared_heartbeat
from syncline.health.stragglers import Stragglers
from syncline.health.suspects import Awaited, Progress, is_collective
from syncline.records.failure_report import Event, FailureReport, Pending

_EVENTS = 400
_GRACE, _GRACE_S = 0.5, 5.0
"""Time that a collective may take beyond its timeout, as a fraction of it and in seconds; the longer one counts. Its
backend should have ended it by then."""
_WARN = 0.7
"""Fraction of a collective's timeout on a device after which a warning names suspects, before NCCL ends the process."""
_END_S = 2.0  # time that lanes have to end with the program
_COUNT_BITS = 20  # a step has fewer buckets and collectives than 2 to this power


@dataclass
class _LaneState:
    unfinished: list[tuple[Job, int, float]] = field(default_factory=list)
    """Jobs with their step and start. On a device, only the last one: the host does not see when the others end."""
    moved_s: float = 0.0
    last: str = ""
    """The last event, at `moved_s`."""
    started: tuple[int, int] = (-1, -1)  # the step and index of the bucket that it exchanges
    warned: bool = False


class Watchdog:
    """The watchdog of one engine or of one plain DDP model, from `watch` to `stop`."""

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        self.name, self.timeout_s, self._backend = "", timeout.total_seconds(), backend_of(group)
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self._rank = dist.get_rank()
        self.stragglers = Stragglers(len(self.ranks))
        self._events: deque[tuple[float, str, int, int, int, str, int]] = deque(maxlen=_EVENTS)
        """Time, and the fields of an `Event`."""
        self._states: dict[int, _LaneState] = {}
        """By lane. Any thread may add one, so iterate over a copy."""
        self._submitted, self.step = 0, 0
        self._lanes: Sequence[Lane] = ()
        self._groups: Sequence[LaneGroups] = ()
        self._lock = threading.Lock()
        self._explaining = threading.Lock()
        self._explanation: str | None = None

    def watch(self, name: str, groups: Sequence[LaneGroups] = (), lanes: Sequence[Lane] = ()) -> None:
        """Watch these lanes, and send this model's progress with the heartbeats. The name is the same on all ranks."""
        self.name, self._lanes, self._groups = name, tuple(lanes), tuple(groups)
        for lane, lane_groups in enumerate(groups):
            lane_groups.comm.counter.issued = functools.partial(_issued, weakref.ref(self), lane)
        if (heartbeat := shared_heartbeat()) is not None:
            heartbeat.watchdogs[id(self)] = self

    def stop(self) -> None:
        self._lanes = self._groups = ()
        with self._lock:
            self._states.clear()
        if (heartbeat := shared_heartbeat()) is not None:
            heartbeat.watchdogs.pop(id(self), None)

    def bucket_submitted(self, job: Job, step: int) -> None:
        """Record that a bucket is ready and goes to its lane."""
        now_s = time.monotonic()
        with self._lock:
            self._submitted, self.step = self._submitted + 1, step
            state = self._state(job.lane)
            if not job.marks.on_host:
                state.unfinished.clear()
            if not state.unfinished:
                state.moved_s = now_s
            state.unfinished.append((job, step, now_s))
        self._events.append((now_s, "ready", job.lane, step, job.bucket, "", 0))

    def count_collective(self) -> None:
        """Count a collective of the model that is not an exchange, such as FSDP's. A rank that has not reached it has
        counted fewer."""
        with self._lock:
            self._submitted += 1

    def step_ended(self, steps: int) -> None:
        """Make the counts of all ranks equal, because some may have run collectives that others have not."""
        with self._lock:
            self._submitted = max(self._submitted, steps << _COUNT_BITS)

    def record(
        self, what: str, lane: int, level: str = "", sent_bytes: int = 0, *, bucket: tuple[int, int] | None = None
    ) -> None:
        """Record an event of a lane. Its `bucket`, a step and an index, is by default the one of the last `start`."""
        state = self._state(lane)
        if what == "start" and bucket is not None:
            state.started = bucket
        state.moved_s, state.last = time.monotonic(), what
        self._events.append((state.moved_s, what, lane, *(bucket or state.started), level, sent_bytes))

    def bucket_ended(self, job: Job) -> None:
        """Record the end of an exchange; on a device, that all of it has been enqueued."""
        if job.marks.on_host:
            with self._lock:
                unfinished = self._state(job.lane).unfinished
                unfinished[:] = [other for other in unfinished if other[0] is not job]
        self.record("end" if job.error is None else "failed", job.lane, bucket=(self.step, job.bucket))

    def _state(self, lane: int) -> _LaneState:
        return self._states.get(lane) or self._states.setdefault(lane, _LaneState())

    def _busy(self) -> list[_LaneState]:
        return [state for state in tuple(self._states.values()) if state.unfinished]

    def progress(self) -> Progress:
        entered_s = [state.moved_s for state in self._busy() if state.last == "start"]
        inside_s = time.monotonic() - min(entered_s) if entered_s else 0.0
        return Progress(self._submitted, self.step, self.stragglers.own_s(), inside_s)

    def end_overdue(self, now_s: float) -> None:
        """Abandon exchanges that have made no progress for too long; on a device, warn about them in time."""
        lanes, limit_s = self._lanes, self.timeout_s + max(_GRACE_S, _GRACE * self.timeout_s)
        with self._lock:
            busy = [(now_s - state.moved_s, state, *state.unfinished[0]) for state in self._busy()]
        for still_s, state, job, step, _ in busy:
            if not job.marks.on_host:
                late = still_s > _WARN * self.timeout_s and _under_way(job)
                if late and not state.warned:
                    text = f"exchanging bucket {job.bucket} of step {step} has taken {still_s:.0f} s, and NCCL ends"
                    _run("syncline-stuck", self._warn, f"{text} this process after {self.timeout_s:.0f} s")
                state.warned = late
        # If one has hung for too long, all that should have timed out end: closing would wait for the others.
        stuck = [
            (still_s, state, job) for still_s, state, job, *_ in busy if job.marks.on_host and still_s > self.timeout_s
        ]
        if not lanes or all(still_s <= limit_s for still_s, _, _ in stuck):
            return
        for _, _, job in stuck:  # before one of them raises, and the model is detached
            lanes[job.lane].stuck = True
        for still_s, state, job in stuck:
            text = f"no progress on lane {job.lane} for {still_s:.0f} s"
            inside = state.last == "start"
            error = RuntimeError(f"{text}, inside the exchange") if inside else TimeoutError(text)
            _run("syncline-end", lanes[job.lane].abandon, job, error)
            state.moved_s = now_s  # so that it is abandoned once

    def _warn(self, text: str) -> None:
        """Warn about an exchange that may still finish, and write a failure report."""
        warn(text + explain_failure(self._report(text), self.ranks, self._awaited, announce=False))

    def end_lanes(self) -> None:
        """End all exchanges with the program.

        A thread that returns from a collective while Python shuts down would abort the process, and its launcher would
        take that for the cause of the failure.
        """
        with self._lock:
            if not any(state.unfinished[0][0].marks.on_host for state in self._busy()):
                return
        self._explanation = self._explanation or ""  # from now on, no thread looks for one
        for lane_groups in self._groups:
            lane_groups.cut()
        until_s = time.monotonic() + _END_S
        for lane in self._lanes:
            lane.end(max(0.0, until_s - time.monotonic()))

    @property
    def _awaited(self) -> Awaited:
        return Awaited("exchange", self.name, self._submitted)

    def explain(self, error: str, cause: BaseException | None = None, *, outside: bool = False) -> str:
        """Return the suspects and where the failure report is, to be appended to an error. Takes seconds, once.

        The exception `cause` decides whether this rank itself is the cause; without one, it is. `outside` is for a
        collective outside Syncline.
        """
        with self._explaining:
            if self._explanation is None:
                awaited = Awaited("collective", self.name) if outside else self._awaited
                try:
                    report = self._report(error, "a collective outside Syncline" if outside else "")
                    self._explanation = explain_failure(report, self.ranks, awaited, own=not is_collective(cause))
                except Exception as problem:  # noqa: BLE001 - the error must be raised, whatever else is broken by now
                    self._explanation = f"; its suspects could not be found: {first_line(problem)}"
            return self._explanation

    def explained(self, error: BaseException | None) -> str:
        """Return an earlier error with its explanation. Another thread may not have found it yet, or not have begun."""
        explanation = self.explain(f"{error}", None if error is None else error.__cause__)
        return f"{error}" + ("" if explanation in str(error) else explanation)

    def _report(self, error: str, where: str = "") -> FailureReport:
        events, now_s = tuple(self._events), time.monotonic()
        with self._lock:
            unfinished = [entry for state in self._busy() for entry in state.unfinished if _under_way(entry[0])]
        pending = []
        for job, step, since_s in unfinished:
            exchange = "" if job.exchange is None else type(job.exchange).__name__
            pending.append(Pending(job.lane, step, job.bucket, job.bytes, exchange, now_s - since_s))
        return FailureReport(
            rank=self._rank,
            world_size=dist.get_world_size() if dist.is_initialized() else len(self.ranks),
            backend=self._backend,
            timeout_s=self.timeout_s,
            where=where or f"step {self.step}",
            step=self.step,
            error=error,
            pending=tuple(pending),
            events=tuple(Event(now_s - event[0], *event[1:]) for event in events),
        )


def _under_way(job: Job) -> bool:
    try:
        return job.marks.seconds() is None
    except RuntimeError:  # a broken device does not answer
        return True


def _run(name: str, function: Callable[..., None], *arguments: object) -> None:
    """Call a function in a thread of its own, because the thread of the watchdogs must not wait for suspects."""
    threading.Thread(target=function, args=arguments, name=name, daemon=True).start()


def _issued(watchdog: weakref.ref[Watchdog], lane: int, what: str, level: str, sent_bytes: int) -> None:
    """Record a collective. A comm is in a reference cycle, so it must not keep the watchdog of a model alive."""
    if (alive := watchdog()) is not None:
        alive.record(what, lane, level, sent_bytes)


_plain: weakref.WeakKeyDictionary[DDP, Watchdog] = weakref.WeakKeyDictionary()


def watch_plain(ddp: DDP) -> Watchdog:
    """Send heartbeats and log silent ranks for a model that is plain DDP, until it is released or `stop` is called."""
    group: dist.ProcessGroup = ddp.process_group
    watchdog = _plain.setdefault(ddp, Watchdog(group, group_timeout(group)))
    watchdog.watch(f"plain {group.group_name}")
    return watchdog
