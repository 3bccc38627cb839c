"""Turn the gradients of a bucket into their average: submit, prepare, exchange, settle. Only this code runs exchanges.

Its users are `ddp.engine` and `layerwise.gradient_pipeline`, which know when a bucket is ready and when a step is over.
After an error, the runner refuses to run anything else, and `error` gives the reason and the suspected ranks.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from syncline.dist.agreement import agree
from syncline.dist.comm import close_lanes, open_lanes
from syncline.dist.lane import Job, Phases, span_of
from syncline.errors import ExchangeError, SynclineError, first_line
from syncline.exchange import WORLD, Exchange, Layout, State, UsesLevels, Work
from syncline.health.watchdog import Watchdog
from syncline.runtime.stats import Stats, timings_of
from syncline.runtime.topology import RankTopology

Residuals = Mapping[str, Mapping[str, Tensor]]  # by parameter name, then by kind, in logical shape
Run = Callable[[], Work | None]
Done = Callable[[Tensor], None]


@dataclass
class Bucket:
    """Gradients that are exchanged together."""

    index: int
    lane: int
    exchange: Exchange
    layout: Layout
    state: State | None = None  # None until all ranks have agreed on the layout
    averages: bool = False  # true if the state applies the factor 1/world_size itself

    @property
    def ready(self) -> State:
        """The state, once the bucket is prepared."""
        assert self.state is not None  # noqa: S101
        return self.state

    @property
    def label(self) -> str:
        """Name of the bucket in messages."""
        return f"bucket {self.index}"

    def applied(self, finite: Tensor, used: Mapping[str, Tensor] | None) -> Tensor:
        """Return whether the result was applied: a 0-dim tensor, or one flag per element if not all got their result.

        `used` then maps the name of each parameter to whether it did.
        """
        if used is None:
            return finite
        flags = torch.stack([used[slot.name].to(finite.device) for slot in self.layout.slots])
        sizes = torch.tensor([slot.numel for slot in self.layout.slots], device=flags.device)
        return flags.repeat_interleave(sizes, output_size=self.layout.numel) & finite


ResidualsOf = Callable[[Bucket], Residuals]


@dataclass
class Step:
    """The buckets of one backward pass, or the fragments of one step of the optimizer."""

    jobs: list[Job] = field(default_factory=list)
    sent_bytes: dict[str, int] = field(default_factory=dict)  # bytes that the busiest rank sent, per level
    began_s: float | None = None  # when its first bucket was submitted, on the host's monotonic clock
    period_s: float | None = None  # time from the previous step's first bucket to that of this step


class Watched(NamedTuple):
    """The ranks among which suspects are found, if they are more than those that exchange buckets with each other."""

    group: ProcessGroup
    name: str  # of the model, the same on all of these ranks


class BucketRunner:
    """Runs the buckets of one model. All ranks create it together, in the same order as their other groups.

    `lanes` is how many buckets may be exchanged at the same time, `topology` is for exchanges that use it, and
    `watched` is for a model of which each rank of the group has the same shard.
    """

    after_failure = ""  # appended to the message of a failed exchange

    def __init__(
        self,
        group: ProcessGroup,
        device: torch.device,
        lanes: int,
        timeout: timedelta,
        topology: RankTopology | None,
        watched: Watched | None = None,
    ) -> None:
        self.error: BaseException | None = None
        self.steps = 0
        self.tracing = False  # whether the collectives of each bucket are recorded
        self.last_step = Step()
        self.ranks = group.size()
        self._counted: dict[str, int] = {}
        self._counts_collectives = watched is not None
        self._lock = threading.Lock()
        self._watchdog = Watchdog(watched.group if watched else group, timeout)  # it must not refer to the runner
        self.groups, self.lanes = open_lanes(group, timeout, lanes, device, topology.topology if topology else None)
        try:
            name = watched.name if watched else self.groups[0].comm.group.group_name
            self._watchdog.watch(name, self.groups, self.lanes)
        except BaseException:
            self.close()
            raise

    # --- a bucket, in the order of calls ------------------------------------------------------------------------

    def submit(
        self, step: Step, bucket: Bucket, flat: Tensor, run: Run, *, waits: bool = True, done: Done = lambda flat: None
    ) -> Any:
        """Send a bucket to its lane, and return a future of `flat`. All ranks submit their buckets in the same order.

        On the lane, `run` calls `exchange` and may wait for collectives if `waits`. Then `done` gets the result, before
        the future completes.
        """
        if not step.jobs:
            step.began_s = time.monotonic()
            if self.last_step.began_s is not None:
                step.period_s = step.began_s - self.last_step.began_s
                self._watchdog.stragglers.stepped(span_of(self.last_step.jobs), step.period_s)
        marks = self.lanes[bucket.lane].marks(step.jobs[0].marks if step.jobs else None)
        phases = Phases(marks) if self.tracing else None
        job = Job(bucket.index, bucket.lane, flat, lambda: self._traced(bucket, phases, run), waits)
        job.on_done = lambda job: self._done(job, bucket, done)
        job.marks, job.phases, job.exchange = marks, phases, bucket.exchange
        self._watchdog.bucket_submitted(job, self.steps)
        step.jobs.append(job)
        return self.lanes[bucket.lane].submit(job)

    def _traced(self, bucket: Bucket, phases: Phases | None, run: Run) -> Work | None:
        recorder = self.groups[bucket.lane].comm.counter
        recorder.phases = phases
        try:
            return run()
        finally:
            recorder.phases = None

    def exchange(
        self, bucket: Bucket, flat: Tensor, scale: Tensor | None = None, residuals: ResidualsOf = lambda bucket: {}
    ) -> Work | None:
        """Replace `flat` by its average over the ranks. Return the last collective if the result needs it.

        A new bucket is prepared first, with its `residuals` from other buckets. `scale` is that of a GradScaler.
        """
        if self.error is not None:
            raise ExchangeError(f"an earlier bucket of this step failed: {self.explained}")
        self._watchdog.record("start", bucket.lane, bucket=(self.steps, bucket.index))
        if bucket.state is None:
            self.prepare(bucket, residuals(bucket))
        bucket.ready.begin(self.steps, scale)
        if not bucket.averages:
            flat.mul_(1 / self.ranks)  # not div_: plain DDP averages with this very operation
        return bucket.exchange.run(flat, bucket.ready, self.groups[bucket.lane].comm)

    def exchange_and_wait(self, bucket: Bucket, flat: Tensor, *arguments: Any) -> Tensor:
        """Exchange a bucket to the end, and return whether its result is finite, as a 0-dim tensor."""
        work = self.exchange(bucket, flat, *arguments)
        if work is not None:
            work.wait()
        return bucket.ready.finite(flat)

    def prepare(self, bucket: Bucket, residuals: Residuals) -> None:
        """Collective: compare a bucket between ranks, have its exchange allocate a state, and load residuals."""
        layout, comm = bucket.layout, self.groups[bucket.lane].comm
        slots = {slot.name: f"{tuple(slot.shape)} at {slot.offset}" for slot in layout.slots}
        self._watchdog.record("agree", bucket.lane, WORLD)
        agree(comm.group, {"index": bucket.index, "dtype": str(layout.dtype), **slots}, "a gradient bucket")
        state = bucket.exchange.prepare(layout, comm)
        if isinstance(bucket.exchange, UsesLevels):  # it chose by arithmetic, which other machines may do differently
            self._watchdog.record("agree", bucket.lane, WORLD)
            agree(comm.group, {"path": state.describe()}, "the path of a gradient bucket")
        if residuals:
            state.load(layout, residuals)
        bucket.state, bucket.averages = state, state.average(1 / self.ranks)

    def _done(self, job: Job, bucket: Bucket, done: Done) -> None:
        if job.error is None:
            try:
                assert job.flat is not None  # noqa: S101 - the future does not have it yet
                done(job.flat)
            except BaseException as error:  # noqa: BLE001 - as fatal for the step as an exchange that failed
                job.error = error
        self._watchdog.bucket_ended(job)
        if job.error is not None:
            job.error = self.fail(bucket.label, job.error)

    def settle(self, buckets: Iterable[Bucket], finite: Tensor, used: Mapping[str, Tensor] | None = None) -> None:
        """Commit the states of these buckets where the result was applied, and restore them elsewhere."""
        for bucket in buckets:
            if bucket.state is not None and bucket.state.settles:
                bucket.state.settle(bucket.applied(finite, used))

    def end(self, step: Step) -> None:
        """Count a step that is over."""
        sent = self.sent_bytes
        step.sent_bytes = {level: sent[level] - self._counted.get(level, 0) for level in sent}
        self._counted, self.last_step = sent, step
        self.steps += 1
        if self._counts_collectives:
            self._watchdog.step_ended(self.steps)

    def count_collective(self) -> None:
        """Count a collective that all watched ranks run outside of exchanges, to find the rank that does not."""
        self._watchdog.count_collective()

    # --- errors -------------------------------------------------------------------------------------------------

    def fail(self, label: str, error: BaseException) -> BaseException:
        """Return the error for users, with suspects. From now on the runner refuses to run, and settles no step."""
        if isinstance(error, SynclineError):
            if self.error is None:  # this rank needs no explanation, but the other ranks do
                self._watchdog.explain(first_line(error))
            with self._lock:
                self.error = self.error or error
            return error
        text = f"exchanging {label} failed in step {self.steps}: {first_line(error)}"
        preliminary = ExchangeError(text)
        preliminary.__cause__ = error
        with self._lock:  # finding the suspects takes seconds, in which nothing else may begin
            self.error = self.error or preliminary
        failed = ExchangeError(text + self._watchdog.explain(text, error) + self.after_failure)
        failed.__cause__ = error
        with self._lock:
            self.error = failed if self.error is preliminary else self.error
        return failed

    def wait(self, future: Any) -> None:
        """Wait for a future that `submit` returned, and raise the error of this runner if it has failed."""
        try:
            future.wait()
        except BaseException as error:
            raise (self.error or error) from error  # the future has only a copy of the runner's error

    def raise_if_failed(self) -> None:
        """Raise if an earlier exchange of this model failed."""
        if self.error is not None:
            raise ExchangeError(f"an earlier exchange of this model failed: {self.explained}") from self.error

    @property
    def explained(self) -> str:
        """The error, with the suspects if they are known by now."""
        return self._watchdog.explained(self.error) if self.error is not None else ""

    @property
    def straggler(self) -> str | None:
        """The rank that the others wait for, and how long; known to the first rank."""
        return self._watchdog.stragglers.straggler

    @property
    def sent_bytes(self) -> dict[str, int]:
        """Bytes that the busiest rank has sent since the runner was created, per level."""
        total: Counter[str] = Counter()
        for groups in self.groups:
            total.update(groups.comm.counter.sent_bytes)
        return dict(total)

    def predicted_sent_bytes(self, buckets: Iterable[Bucket]) -> dict[str, int]:
        """Return the bytes that a step with these buckets should send, per level, by the cost of their exchanges."""
        total: Counter[str] = Counter()
        for bucket in buckets:
            topology = self.groups[bucket.lane].comm.topology
            total.update(bucket.exchange.cost(bucket.layout.numel, bucket.layout.dtype, topology).sent_bytes)
        return dict(total)

    def stats(self) -> Stats:
        return Stats(self.steps, dict(self.last_step.sent_bytes), self.sent_bytes, timings_of(self.last_step.jobs))

    def close(self) -> None:
        """Stop the lanes and destroy their process groups."""
        self._watchdog.stop()
        close_lanes(self.lanes, self.groups)
        # Jobs refer to their runner: without this, threads and connections would last until a garbage collection.
        self.groups, self.lanes = [], []
        self.last_step = Step()
