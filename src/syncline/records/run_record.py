"""What one rank saw of a training, as a file: the page and the trace are made from these.

Every rank writes its own, when the first model is built, every minute, and when the script ends, without asking the
others: a job that crashes is the one that somebody wants to look at. A process that was killed leaves a record that
says `RUNNING`; `RunRecord.state` tells it from one that does.

Seconds are on the rank's monotonic clock, `clock_s` of which is zero in the wall clock's seconds, so files of one host
share a time.
"""

from __future__ import annotations

import datetime
import math
import os
import socket

import msgspec
import psutil

from syncline.files import one_line, read_json, write_json
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.records.profile import Profile

FINISHED, RUNNING, LOST = "finished", "still running", "ended without saying so"
"""How a run has ended, or not yet; otherwise its record says what ended it."""
_CLOCK_S = 2.0
"""By which a process may seem to have started after its record says."""
MOST_STEPS = 2000
"""Of those that a record keeps, evenly spread: a record is looked at, not computed with."""


class PhaseSpan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One collective, or one piece of an exchange's own work, of a bucket."""

    name: str
    """As `all_reduce`."""
    level: str
    """Over which ranks; empty for work of the rank's own."""
    sent_bytes: int
    start_s: float
    end_s: float


class BucketSpan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One bucket of one step."""

    bucket: int
    lane: int
    bytes: int
    exchange: str
    ready_s: float
    start_s: float
    end_s: float
    phases: tuple[PhaseSpan, ...] = ()


class StepSpan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One step of a model, which ends when its gradients are those of all ranks."""

    step: int
    """Counted from 0: steps that were exchanged."""
    way: str
    """How gradients went: `plain DDP`, `the plan`, or an exchange's name."""
    start_s: float
    """Of forward."""
    backward_s: float
    """Of backward's start."""
    backward_end_s: float
    """When the last gradient was there."""
    end_s: float
    """When all of them had been exchanged: what lies between is communication that nothing hid."""
    buckets: tuple[BucketSpan, ...] = ()
    """Where they were noted: for the first few steps of each way that count."""


class Pace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Medians and quartiles over the steps that went one way; the first ones of each way are left out."""

    way: str
    steps: int
    step_s: float
    """Forward, backward and what was left of the exchange; not what the script does between steps."""
    low_s: float
    high_s: float
    forward_s: float
    backward_s: float
    exposed_s: float
    """Communication after backward's end."""
    between_s: float
    """From the end of one step to the start of the next: the optimizer, data, logging."""
    sent_bytes: int | None = None
    """Per step, by the busiest rank; None for plain DDP, which does not tell."""


class Loss(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    step: int
    value: float


class ModelRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One DistributedDataParallel model of a script."""

    name: str
    parameters: int
    gradient_bytes: int
    host_of_rank: tuple[int, ...]
    """One entry per rank of the model's process group."""
    backend: str
    device: str
    steps: int
    """All that were exchanged."""
    outcome: str
    """What was done with it and why, in a sentence or two."""
    way: str
    """How gradients went in the end."""
    caps: tuple[int, ...] = ()
    """Bytes at which DDP closes its own buckets, the last for all further ones; empty where it does not tell."""
    paces: tuple[Pace, ...] = ()
    """In the order in which ways were first gone."""
    spans: tuple[StepSpan, ...] = ()
    losses: tuple[Loss, ...] = ()
    """What backward was called on, where that was one number: a sample of all steps."""
    profile: Profile | None = None
    network: Network | None = None
    plan: Plan | None = None

    def __post_init__(self) -> None:
        _check_counts(self, "", "parameters", "gradient_bytes", "steps")
        for index, pace in enumerate(self.paces):
            _check_counts(
                pace, f"paces[{index}].", *(f for f in pace.__struct_fields__ if f not in ("way", "between_s"))
            )
        for index, span in enumerate(self.spans):
            times = (span.start_s, span.backward_s, span.backward_end_s, span.end_s)
            if list(times) != sorted(times):
                raise ValueError(f"spans[{index}]: start, backward, its end and the step's end must follow each other")
            for place, bucket in enumerate(span.buckets):
                _check_counts(bucket, f"spans[{index}].buckets[{place}].", "bucket", "lane", "bytes")
        for index, loss in enumerate(self.losses):
            if not math.isfinite(loss.value):
                raise ValueError(f"losses[{index}].value: must be a finite number")


class RunRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one rank saw of a script."""

    schema: int = 1
    rank: int
    ranks: int
    command: str
    """That starts it again, for people."""
    ended: str
    """`FINISHED`, `RUNNING`, or what ended it."""
    seconds: float
    """From the script's start to its end."""
    tuning_s: float
    """Of those, what measuring and planning took."""
    date: str
    torch: str
    syncline: str
    clock_s: float
    models: tuple[ModelRecord, ...]
    host: str = ""
    process: int | None = None
    """Where it runs or ran; records of earlier versions do not say."""
    began: str = ""
    """When, as a date."""

    def __post_init__(self) -> None:
        _check_counts(self, "", "rank", "ranks", "seconds", "tuning_s", "process")

    @property
    def state(self) -> str:
        """How it ended, or whether it still runs, as far as can be seen on this host."""
        if self.ended != RUNNING or self.process is None:
            return self.ended
        if self.host != socket.gethostname():
            return f"still running on {one_line(self.host)} at {one_line(self.date)}"
        return RUNNING if self._is_alive(self.process) else f"{LOST}, after {one_line(self.date)}"

    def _is_alive(self, process: int) -> bool:
        """Whether the process is there, and is not another one with the same number."""
        try:
            found = psutil.Process(process)
            began = datetime.datetime.fromisoformat(self.began).timestamp()
            return bool(found.status() != psutil.STATUS_ZOMBIE and found.create_time() <= began + _CLOCK_S)
        except (psutil.Error, ValueError, OverflowError):
            return False

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RunRecord:
        return read_json(path, cls)

    def save(self, path: str | os.PathLike[str]) -> None:
        write_json(path, self)


def _check_counts(part: msgspec.Struct, place: str, *fields: str) -> None:
    for field in fields:
        value = getattr(part, field)
        if value is not None and not value >= 0:
            raise ValueError(f"{place}{field}: must be 0 or more, not {value}")
