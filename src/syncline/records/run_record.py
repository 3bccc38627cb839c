"""The record of a training run on one rank, from which reports and traces are made.

Every rank writes its own record when the first model is built, then every minute, and when the script ends. Ranks do
not communicate for that, so that a crashed job leaves records, too. Times are seconds on the rank's monotonic clock.
Adding `clock_s` converts them to wall-clock time, which the records of one host share.
"""

from __future__ import annotations

import datetime
import socket

import msgspec
import psutil

from syncline.files import JsonFile, one_line
from syncline.records.fields import Amount, Count, Schema
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.records.profile import Profile

FINISHED, RUNNING, LOST = "finished", "still running", "ended without saying so"  # a failed run has its error instead
_CLOCK_S = 2.0  # tolerance when the start time of a process is compared with its record
MOST_STEPS = 2000  # number of steps that a record keeps, evenly spread over the run


class PhaseSpan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One collective of a bucket. Several may run at the same time. `syncline.PhaseTiming` is the same class.

    Example:
        >>> handle.trace()
        >>> train_step(model)
        >>> for phase in handle.stats().buckets[0].phases:
        ...     print(phase.name, phase.level, phase.end_s - phase.start_s)
    """

    name: str  #: the kind of collective, such as `all_reduce`
    level: str  #: the level of the topology on which it ran
    sent_bytes: int  #: bytes that the busiest rank sent
    start_s: float  #: when it was issued; on CUDA, when the lane's stream reached it
    end_s: float  #: when it ended; on CUDA, when the lane's stream had waited for it, which may be later


class BucketSpan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The exchange of one bucket in one step. `syncline.BucketTiming` is the same class.

    Example:
        >>> for bucket in handle.stats().buckets:
        ...     print(bucket.bucket, bucket.bytes, bucket.end_s - bucket.start_s)
    """

    bucket: Count  #: the index of the bucket
    lane: Count
    bytes: Count  #: the size of its gradients
    exchange: str  #: the short name of its exchange, such as `oktopk(density=0.05)`
    ready_s: float  #: when its gradients were ready
    start_s: float
    end_s: float
    phases: tuple[PhaseSpan, ...] = ()  #: its collectives, in the order of their calls, if `handle.trace()` is on


class StepSpan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One step of a model. It ends when all gradients have been exchanged."""

    step: int  # Index of the step, from 0. Only steps with an exchange count.
    way: str  # the method of exchange: `plain DDP`, `the plan`, or an exchange's name
    start_s: float  # start of forward
    backward_s: float  # start of backward
    backward_end_s: float  # time of the last gradient
    end_s: float  # Time when all gradients had been exchanged. Communication after `backward_end_s` is exposed.
    buckets: tuple[BucketSpan, ...] = ()  # recorded for the first few steps of each method, after its warm-up

    def __post_init__(self) -> None:
        if not self.start_s <= self.backward_s <= self.backward_end_s <= self.end_s:
            raise ValueError("start_s: start_s, backward_s, backward_end_s and end_s must be in this order")


class Pace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Medians and quartiles over the steps of one method, without its first steps."""

    way: str  # the method of exchange, as in `StepSpan`
    steps: Count
    step_s: Amount  # forward, backward and exposed communication, without the time between steps
    low_s: Amount
    high_s: Amount
    forward_s: Amount
    backward_s: Amount
    exposed_s: Amount  # communication after the end of backward
    between_s: float  # from the end of one step to the start of the next: the optimizer, data, logging
    sent_bytes: Count | None = None  # per step, by the busiest rank; None for plain DDP, which does not report it


class Loss(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    step: int
    value: float


class ModelRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One DistributedDataParallel model of a script."""

    name: str
    parameters: Count
    gradient_bytes: Count
    host_of_rank: tuple[int, ...]  # the host of each rank of the model's process group
    backend: str
    device: str
    steps: Count  # number of steps with an exchange
    outcome: str  # what Syncline did with the model and why, in a sentence or two
    way: str  # the last method of exchange, as in `StepSpan`
    caps: tuple[int, ...] = ()  # bytes at which DDP closes its own buckets; the last one repeats; empty if unknown
    paces: tuple[Pace, ...] = ()  # one entry per method, in the order of first use
    spans: tuple[StepSpan, ...] = ()
    losses: tuple[Loss, ...] = ()  # a sample of the scalars on which backward was called
    profile: Profile | None = None
    network: Network | None = None
    plan: Plan | None = None


class RunRecord(JsonFile, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The record of a script on one rank.

    Example:
        >>> record = RunRecord.load("records/rank-0.json")
        >>> print(record.state, [model.outcome for model in record.models])
    """

    schema: Schema = 1
    rank: Count
    ranks: Count
    command: str  # the command line that starts the script, for readers
    ended: str  # `FINISHED`, `RUNNING`, or the error
    seconds: Amount  # seconds from the start of the script to its end
    tuning_s: Amount  # the part of `seconds` that measuring and planning took
    date: str
    torch: str
    syncline: str
    clock_s: float
    models: tuple[ModelRecord, ...]
    host: str = ""
    process: Count | None = None  # process ID on `host`; None in records of earlier versions
    began: str = ""  # start of the process, as an ISO date

    @property
    def state(self) -> str:
        """How the run ended, or whether it still runs, as far as this host can determine."""
        if self.ended != RUNNING or self.process is None:
            return self.ended
        if self.host != socket.gethostname():
            return f"still running on {one_line(self.host)} at {one_line(self.date)}"
        return RUNNING if self._is_alive(self.process) else f"{LOST}, after {one_line(self.date)}"

    def _is_alive(self, process: int) -> bool:
        """Return whether the process exists, and is not a later one with the same ID."""
        try:
            current = psutil.Process(process)
            began = datetime.datetime.fromisoformat(self.began).timestamp()
            return bool(current.status() != psutil.STATUS_ZOMBIE and current.create_time() <= began + _CLOCK_S)
        except (psutil.Error, ValueError, OverflowError):
            return False
