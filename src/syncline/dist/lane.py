"""A lane exchanges buckets in the order in which they are submitted, which is the same on all ranks.

On gloo a lane has a worker thread for exchanges that wait for results. The thread continues with the next bucket if the
exchange returned its last collective instead of waiting for it. Handing a bucket to this thread takes milliseconds on
busy cores. So the thread that runs backward issues an exchange that never waits, unless an earlier bucket is still
queued. On CUDA a lane is a stream: the thread that runs backward enqueues everything, and nothing waits on the host.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from syncline.exchange import Exchange, Work
from syncline.memory_meter import followed


class Marks:
    """The times at which a bucket was ready, started and ended, on the host's clock."""

    on_host = True
    """True if any thread may call `mark`; False if marks belong to the current CUDA stream."""

    def __init__(self) -> None:
        self._times: dict[str, float] = {"ready": time.monotonic()}

    def mark(self, what: str) -> None:
        """Record the current time as `what`. Only the first call for each `what` counts."""
        self._times.setdefault(what, time.monotonic())

    def seconds(self, clock: Marks | None = None) -> dict[str, float] | None:
        """Return the times in seconds on the host's monotonic clock, or None if the bucket has not ended. On CUDA,
        times of different steps can be compared only if both are read with the same marks as their `clock`."""
        return dict(self._times) if "end" in self._times else None


class CudaMarks(Marks):
    """Marks as CUDA events. They are read after they have completed, and nothing waits for them. Times are relative to
    the first bucket of the step, whose time on the host's clock is when it was enqueued. Times relative to the start of
    the job would become less precise by the hour, because events return milliseconds in fp32."""

    on_host = False

    def __init__(self, first: CudaMarks | None) -> None:
        self._events: dict[str, torch.cuda.Event] = {}
        self._enqueued_s = time.monotonic()
        self.mark("ready")
        self._first = first or self

    def mark(self, what: str) -> None:
        if what not in self._events:
            self._events[what] = torch.cuda.Event(enable_timing=True)
            self._events[what].record()

    def seconds(self, clock: Marks | None = None) -> dict[str, float] | None:
        if "end" not in self._events or not self._events["end"].query():
            return None
        first = clock._first if isinstance(clock, CudaMarks) else self._first
        base, base_s = first._events["ready"], first._enqueued_s
        return {what: base_s + base.elapsed_time(event) / 1000 for what, event in self._events.items()}


class Phases:
    """The collectives of a traced bucket, in the order in which they were issued. Several may run at the same time.
    Their times are stored in the bucket's marks. On the host's clock a collective starts when it is issued and ends
    when its future completes, or, without a future, when `wait` returns. On a CUDA stream it starts when the stream
    reaches it, and ends when the stream has waited for it, which may be later than its real end. Tracing never blocks
    the host, and a collective without a future for which the exchange never waits has no end."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._issued: list[tuple[str, str, int]] = []

    def begin(self, name: str, level: str, sent_bytes: int) -> Callable[[Any], Work]:
        """Record that a collective is issued now, and return a function that wraps its work to record the end."""
        number = len(self._issued)
        self._issued.append((name, level, sent_bytes))
        self._marks.mark(f"start {number}")
        return lambda work: _TracedWork(work, self._marks, f"end {number}")

    def ended(self, seconds: Mapping[str, float]) -> Iterator[tuple[str, str, int, float, float]]:
        """Yield name, level, sent bytes, start and end of each collective that has an end in the bucket's `seconds`."""
        for number, (name, level, sent_bytes) in enumerate(self._issued):
            if (end_s := seconds.get(f"end {number}")) is not None:
                yield name, level, sent_bytes, seconds[f"start {number}"], end_s


class _TracedWork:
    """A collective that records its end."""

    def __init__(self, work: Any, marks: Marks, what: str) -> None:
        self._work, self._marks, self._what = work, marks, what
        if marks.on_host:
            # Some backends have no futures: then `wait` records the end. The callback must not refer to this object,
            # because the work holds the callback: that would be a reference cycle.
            with contextlib.suppress(AttributeError, RuntimeError, NotImplementedError):
                work.get_future().add_done_callback(lambda _: marks.mark(what))

    def wait(self) -> None:
        self._work.wait()
        self._marks.mark(self._what)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)  # `get_future`, if the work has one


@dataclass
class Job:
    """The exchange of one bucket on a lane."""

    bucket: int
    lane: int
    flat: Tensor | None
    """The bucket. None once the future holds it, so that a stored job does not keep DDP's memory alive."""
    run: Callable[[], Work | None]
    waits: bool = True
    """Whether `run` waits for collectives."""
    on_done: Callable[[Job], None] = lambda job: None
    """Called once, before the future completes, with or without an error."""
    error: BaseException | None = None
    marks: Marks = field(default_factory=Marks)
    exchange: Exchange | None = None
    """The exchange of the bucket, for statistics."""
    phases: Phases | None = None
    """The collectives of the bucket, if it is traced."""
    future: Any = None
    """Completed when the job ends."""
    elements: int = field(init=False)
    itemsize: int = field(init=False)
    ending: threading.Lock = field(default_factory=threading.Lock, repr=False)
    """Acquired once, by the thread that ends the job."""

    def __post_init__(self) -> None:
        assert self.flat is not None  # noqa: S101 - it is about to be exchanged
        self.elements, self.itemsize = self.flat.numel(), self.flat.element_size()

    @property
    def bytes(self) -> int:
        return self.elements * self.itemsize


@dataclass(frozen=True)
class Span:
    """The duration of one step's exchange."""

    exchange_s: float
    """Seconds from when the first bucket was ready until the last one ended."""
    exposed_s: float
    """Seconds of it after the last bucket was ready, when there is no backward computation left to hide it."""


def span_of(jobs: Sequence[Job]) -> Span | None:
    """Return the span of these buckets, or None if there are none or one has not ended yet."""
    ended = [seconds for job in jobs if (seconds := job.marks.seconds()) is not None]
    if not ended or len(ended) < len(jobs):
        return None
    ready_s, end_s = [seconds["ready"] for seconds in ended], max(seconds["end"] for seconds in ended)
    return Span(end_s - min(ready_s), end_s - max(ready_s))


class Lane:
    """Exchanges buckets one after the other."""

    stuck = False
    """Whether an abandoned job is still running. Its process groups must then not be destroyed."""

    def submit(self, job: Job) -> Any:
        """Queue the job, and return a future of its flat tensor."""
        raise NotImplementedError

    def marks(self, first: Marks | None) -> Marks:
        """Return marks for a bucket that is ready now. `first` has those of the step's first bucket, if any."""
        return Marks()

    def after(self, others: list[Lane]) -> contextlib.AbstractContextManager[Any]:
        """Return a context whose work runs after everything submitted so far to this lane, `others` and the caller, and
        before everything that is submitted to these lanes later."""
        return contextlib.nullcontext()  # the engine calls this after all jobs on threads have ended

    def abandon(self, job: Job, error: BaseException) -> None:
        """Fail a job that does not end by itself. The lane cannot be used afterwards."""

    def end(self, within_s: float) -> None:
        """Accept no more jobs, and wait at most `within_s` seconds for those that run."""

    def close(self) -> None:
        """Accept no more jobs, and wait for those that run."""


class ThreadLane(Lane):
    """A lane for gloo: exchanges that never wait are issued by the calling thread, all others by a worker thread."""

    def __init__(self, name: str) -> None:
        self._queue = _Queue()
        self._thread = threading.Thread(target=_run_jobs, args=(self._queue,), name=name, daemon=True)
        self._thread.start()
        # The thread refers to the queue and not to this object, so it ends when the lane is garbage-collected.
        self._end = weakref.finalize(self, self._queue.put, None)

    def submit(self, job: Job) -> Any:
        job.future = torch.futures.Future()
        # DDP reports an exception that is set on a future as a failed cast. One that `then` raises arrives unchanged.
        result = job.future.then(lambda _: _result(job))
        if not job.waits and self._queue.submitted == self._queue.issued:
            _issue(job)
        else:
            self._queue.submitted += 1
            self._queue.put(job)
        return result

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


class _Queue(queue.SimpleQueue["Job | None"]):
    """Jobs for a lane's thread. None ends the thread."""

    submitted = 0
    """Jobs so far. Only the thread that submits jobs changes it."""
    issued = 0
    """Jobs that have been issued. Only the lane's thread changes it."""


def _run_jobs(jobs: _Queue) -> None:
    while (job := jobs.get()) is not None:
        _issue(job)
        jobs.issued += 1
        del job  # or it would stay alive until the next one arrives


def _issue(job: Job) -> None:
    """Run the job. It ends now, or when its last collective completes."""
    job.marks.mark("start")
    with _end_on_error(job):
        with followed():
            last = job.run()
        if last is not None and hasattr(last, "get_future"):
            last.get_future().add_done_callback(lambda finished: _completed(job, finished))
            return
        if last is not None:
            last.wait()
        _end(job)


def _completed(job: Job, finished: Any) -> None:
    """End a job whose last collective has completed. Runs on the backend's thread, so it must not issue collectives."""
    with _end_on_error(job):
        finished.value()
        _end(job)


@contextlib.contextmanager
def _end_on_error(job: Job) -> Iterator[None]:
    """End the job if an error is raised. The user gets the error through the future."""
    try:
        yield
    except BaseException as error:  # noqa: BLE001
        _end(job, error)


def _end(job: Job, error: BaseException | None = None) -> None:
    """End a job, unless it has ended already."""
    if not job.ending.acquire(blocking=False):
        return
    job.error = error
    job.marks.mark("end")
    try:
        job.on_done(job)
    except BaseException as failure:  # noqa: BLE001
        job.error = job.error or failure
    # These and the future refer to the step, which refers to this job: a reference cycle.
    job.run, job.on_done = lambda: None, lambda _: None
    future, job.future = job.future, None
    if future is not None:
        future.set_result(None)  # its `then` callback takes the tensor out of this job


def _result(job: Job) -> Tensor:
    """Take the exchanged bucket out of the job, or raise the job's error."""
    flat, job.flat = job.flat, None
    if job.error is not None:
        raise job.error
    assert flat is not None  # noqa: S101 - it is taken only once
    return flat


class StreamLane(Lane):
    """A lane for CUDA: a stream on which collectives and kernels run in order. The host only enqueues. A stream has no
    thread to wait for, and NCCL's own watchdog ends the process if a collective hangs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device=device)

    def submit(self, job: Job) -> Any:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            job.marks.mark("start")
            if job.flat is not None:
                job.flat.record_stream(self._stream)
            with _end_on_error(job):
                last = job.run()
                if last is not None:
                    last.wait()  # with NCCL the stream waits, not the host
                _end(job)
            flat = _result(job)
            future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[self._device])
            future.set_result(flat)
        return future

    def marks(self, first: Marks | None) -> Marks:
        return CudaMarks(first if isinstance(first, CudaMarks) else None)

    @contextlib.contextmanager
    def after(self, others: list[Lane]) -> Iterator[None]:
        streams = [other._stream for other in others if isinstance(other, StreamLane) and other is not self]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for stream in streams:
            self._stream.wait_stream(stream)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            # Later buckets read what was changed here, and may get memory of other lanes that was read here.
            for stream in streams:
                stream.wait_stream(self._stream)

    def close(self) -> None:
        self._stream.synchronize()


def make_lane(device: torch.device, name: str) -> Lane:
    """Return a new lane for tensors on this device. `name` is the name of its thread, if it has one."""
    return StreamLane(device) if device.type == "cuda" else ThreadLane(name)
