"""Lanes run exchanges, each in the order it was given them, which is the same on all ranks.

On gloo a lane has process groups of its own, and a worker thread for exchanges that wait for results: it issues a
bucket's collectives, waits where the exchange needs one, and goes on with the next bucket where the exchange left its
last collective to be waited for. An exchange that only issues is spared the way to that thread, which takes
milliseconds on busy cores: the thread that runs backward issues it, unless something before it is still queued.
On CUDA a lane is a stream: everything is enqueued by the thread that runs backward, and nothing waits on the host.

A lane notes when each bucket was ready, started and ended, and, for those that are traced, its collectives.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from syncline.exchange import Exchange, Work
from syncline.memory_meter import followed


@dataclass
class Job:
    """One bucket's way through a lane."""

    bucket: int
    lane: int
    flat: Tensor | None
    """The bucket, until the future has it: whoever keeps the job must not keep DDP's memory alive."""
    run: Callable[[], Work | None]
    waits: bool = True
    """Whether `run` waits for collectives."""
    on_done: Callable[[Job], None] = lambda job: None
    """Called once, before the future completes, with or without an error."""
    error: BaseException | None = None
    marks: Marks = field(default_factory=lambda: HostMarks())
    exchange: Exchange | None = None
    """Through which it goes, for those who ask later."""
    phases: Phases | None = None
    """Its collectives, where they are traced."""
    future: Any = None
    """To be completed when it has ended, by whoever is first to say so."""
    elements: int = field(init=False)
    itemsize: int = field(init=False)
    _ending: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        assert self.flat is not None  # noqa: S101 - it is about to be exchanged
        self.elements, self.itemsize = self.flat.numel(), self.flat.element_size()

    @property
    def bytes(self) -> int:
        return self.elements * self.itemsize

    def ends(self) -> bool:
        """Whether whoever asks is the first to end it, and therefore does."""
        return self._ending.acquire(blocking=False)

    def answer(self) -> None:
        if self.future is not None:
            future, self.future = self.future, None  # which knows this job
            future.set_result(None)  # `then` takes the tensor out of this job


class Marks(Protocol):
    """When a bucket was ready, started and ended."""

    @property
    def on_host(self) -> bool:
        """Whether any thread may mark, whatever stream it is on."""

    def mark(self, what: str) -> None:
        """Now. Of several times the first counts."""

    def seconds(self) -> dict[str, float] | None:
        """Seconds on the host's monotonic clock; None while unfinished."""


class HostMarks:
    on_host = True

    def __init__(self) -> None:
        self._times: dict[str, float] = {"ready": time.monotonic()}

    def mark(self, what: str) -> None:
        self._times.setdefault(what, time.monotonic())

    def seconds(self) -> dict[str, float] | None:
        return dict(self._times) if "end" in self._times else None


class CudaMarks:
    """Events on the streams themselves; read when they have passed, never waited for.

    Times count from the step's first bucket, whose place on the host's clock is when it was enqueued. (Events tell
    milliseconds in fp32: counted from the start of a job, they would get coarser by the hour.)
    """

    on_host = False

    def __init__(self, first: CudaMarks | None) -> None:
        self._events: dict[str, torch.cuda.Event] = {}
        self._enqueued_s = time.monotonic()
        self.mark("ready")
        self._first = first or self

    def mark(self, what: str) -> None:
        if what not in self._events:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events[what] = event

    def seconds(self) -> dict[str, float] | None:
        if "end" not in self._events or not self._events["end"].query():
            return None
        base, base_s = self._first._events["ready"], self._first._enqueued_s
        return {what: base_s + base.elapsed_time(event) / 1000 for what, event in self._events.items()}


class Phases:
    """The collectives of a bucket that is traced, in the order in which they were issued. When is in the bucket's
    marks, so they have its clock. Several may be under way at once.

    On the host's clock a collective begins when it is issued and ends when its future says so, on the backend's thread;
    where it has no future, when somebody has waited for it. On a CUDA stream it begins when the stream gets to it and
    ends when the stream goes on after waiting for it: later than it really ended, where the exchange had the stream do
    something else first. Nothing waits on the host for being noted, and one that nobody waits for has no end.
    """

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._issued: list[tuple[str, str, int]] = []

    def begin(self, name: str, level: str, sent_bytes: int) -> Callable[[Any], Work]:
        """One is about to be issued → what to make of its work, for its end to be noted."""
        number = len(self._issued)
        self._issued.append((name, level, sent_bytes))
        self._marks.mark(f"start {number}")
        return lambda work: _Noted(work, self._marks, f"end {number}")

    def ended(self, seconds: Mapping[str, float]) -> Iterator[tuple[str, str, int, float, float]]:
        """Name, level, sent bytes, start and end of those whose end is in the `seconds` of the bucket's marks."""
        for number, (name, level, sent_bytes) in enumerate(self._issued):
            end_s = seconds.get(f"end {number}")
            if end_s is not None:
                yield name, level, sent_bytes, seconds[f"start {number}"], end_s


class _Noted:
    """A collective whose end is marked."""

    def __init__(self, work: Any, marks: Marks, what: str) -> None:
        self._work, self._marks, self._what = work, marks, what
        if marks.on_host:
            # Without a future, in some backends, waiting has to do. The callback knows the marks, and not this work,
            # which knows the callback.
            with contextlib.suppress(RuntimeError, NotImplementedError):
                work.get_future().add_done_callback(lambda _: marks.mark(what))

    def wait(self) -> None:
        self._work.wait()
        self._marks.mark(self._what)

    def get_future(self) -> Any:
        return self._work.get_future()


class Lane(Protocol):
    def submit(self, job: Job) -> Any:
        """Queues the job and returns a future of its flat tensor."""

    def marks(self, first: Marks | None) -> Marks:
        """For a bucket that is ready now; `first` are those of the step's first bucket, if this is not it."""

    def after(self, others: list[Lane]) -> contextlib.AbstractContextManager[Any]:
        """Where work goes that must follow everything submitted to this lane, to `others`, and by the caller so far."""

    @property
    def stuck(self) -> bool:
        """Whether it runs something that was given up: nothing that it uses can be taken away from it."""

    def abandon(self, job: Job, error: BaseException) -> None:
        """Ends a job that does not end by itself, for those who wait for it. The lane is of no use any more."""

    def end(self, within_s: float) -> None:
        """Takes no more, and waits so long for what it still does."""

    def close(self) -> None: ...


class ThreadLane:
    """Issues in order: from the caller's thread where nothing waits, from a worker of its own otherwise."""

    def __init__(self, name: str) -> None:
        self.stuck = False
        self._queue = _Queue()
        self._thread = threading.Thread(target=_work_off, args=(self._queue,), name=name, daemon=True)
        self._thread.start()
        # The thread knows its queue and not this object, so a forgotten lane ends its thread.
        self._end = weakref.finalize(self, self._queue.put, None)

    def submit(self, job: Job) -> Any:
        job.future = torch.futures.Future()
        # An exception set on the future would reach the user as a failed cast; one raised in `then` reaches them whole.
        answer = job.future.then(lambda _: _result(job))
        if not job.waits and self._queue.idle:
            _issue(job)
        else:
            self._queue.put(job)
        return answer

    def marks(self, first: Marks | None) -> Marks:
        return HostMarks()

    def after(self, others: list[Lane]) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()  # the engine calls it when all jobs have ended

    def abandon(self, job: Job, error: BaseException) -> None:
        self.stuck = True
        _end(job, error)

    def end(self, within_s: float) -> None:
        self._end()
        self._thread.join(within_s)

    def close(self) -> None:
        self._end()
        if threading.current_thread() is not self._thread and not self.stuck:
            self._thread.join()


class _Queue:
    """Jobs for a lane's thread. Only one thread puts, so `idle` stays true until that thread puts again."""

    def __init__(self) -> None:
        self._entries: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._unissued = 0

    @property
    def idle(self) -> bool:
        with self._lock:
            return self._unissued == 0

    def put(self, job: Job | None) -> None:
        with self._lock:
            self._unissued += 1
        self._entries.put(job)

    def get(self) -> Job | None:
        return self._entries.get()

    def issued(self) -> None:
        with self._lock:
            self._unissued -= 1


def _work_off(jobs: _Queue) -> None:
    while (job := jobs.get()) is not None:
        _issue(job)
        jobs.issued()
        del job  # while it waits for the next, it keeps nothing of this one alive


def _issue(job: Job) -> None:
    """Runs the job, which is answered when its last collective has landed, or now."""
    job.marks.mark("start")
    try:
        with followed():
            last = job.run()
        if last is not None and hasattr(last, "get_future"):
            last.get_future().add_done_callback(lambda finished: _land(job, finished))
            return
        if last is not None:
            last.wait()
    except BaseException as error:  # noqa: BLE001 - it is the user's to see, through the future
        _end(job, error)
    else:
        _end(job)


def _land(job: Job, finished: Any) -> None:
    """Runs on the backend's thread. It may not issue collectives, and does not."""
    try:
        finished.value()
    except BaseException as error:  # noqa: BLE001
        _end(job, error)
    else:
        _end(job)


def _end(job: Job, error: BaseException | None = None) -> None:
    if not job.ends():
        return
    job.error = error
    job.marks.mark("end")
    try:
        job.on_done(job)
    except BaseException as failure:  # noqa: BLE001
        job.error = job.error or failure
    # These know the step that knows this job: a circle that would be there until Python looks for circles.
    job.run, job.on_done = _nothing, _nothing
    job.answer()


def _nothing(*_: object) -> None:
    """Done already."""


def _result(job: Job) -> Tensor:
    """The exchanged bucket, which the job lets go of."""
    flat, job.flat = job.flat, None
    if job.error is not None:
        raise job.error
    assert flat is not None  # noqa: S101 - it is taken once
    return flat


class StreamLane:
    """A CUDA stream. Collectives and kernels follow each other on it; the host only enqueues."""

    stuck = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device=device)

    def submit(self, job: Job) -> Any:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            job.marks.mark("start")
            if job.flat is not None:
                job.flat.record_stream(self._stream)
            try:
                last = job.run()
                if last is not None:
                    last.wait()  # on NCCL: this stream waits, the host does not
            except BaseException as error:  # noqa: BLE001 - raised below, once the engine knows
                _end(job, error)
            else:
                _end(job)
            flat = _result(job)
            future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[self._device])
            future.set_result(flat)
        return future

    def marks(self, first: Marks | None) -> Marks:
        return CudaMarks(first if isinstance(first, CudaMarks) else None)

    def after(self, others: list[Lane]) -> contextlib.AbstractContextManager[Any]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for other in others:
            if isinstance(other, StreamLane) and other is not self:
                self._stream.wait_stream(other._stream)
        return torch.cuda.stream(self._stream)

    def abandon(self, job: Job, error: BaseException) -> None:
        """NCCL's own watchdog ends the process."""

    def end(self, within_s: float) -> None:
        """It has no thread that could come back."""

    def close(self) -> None:
        self._stream.synchronize()


def make_lane(device: torch.device, name: str) -> Lane:
    return StreamLane(device) if device.type == "cuda" else ThreadLane(name)
