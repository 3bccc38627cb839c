"""Run records as a trace of what every rank did when, for Perfetto (ui.perfetto.dev) or chrome://tracing.

The file is Chrome's trace event format, as JSON. Each model of each rank is a process. Its rows are its computation and
its lanes with their buckets; inside a bucket are the collectives of its exchange, if they were recorded. Arrows lead
from the moment of backward in which a bucket was ready to where it was sent. Ranks are aligned by their wall clocks, so
those of different hosts are only as well aligned as their clocks.

A row may hold slices inside slices and slices one after the other, but viewers drop those that only overlap. So if two
buckets of a lane, or two collectives of a bucket, run at the same time, the later one goes to a row of its own. Times
are whole microseconds: rounded the same way, what lies inside a slice stays inside it.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from syncline.files import FileError, write_text
from syncline.records.run_record import BucketSpan, ModelRecord, RunRecord, StepSpan

Event = dict[str, Any]

_SLICE, _ARROW, _ARROWHEAD, _INNER, _COUNTER = range(5)
"""The order of events at the same time. An arrow binds to the slice that was opened last, so enclosing slices come
first; events of one kind keep the order in which they were added."""


def write_trace(path: str | os.PathLike[str], records: Sequence[RunRecord]) -> None:
    """Write the trace of a run, given one record per rank, to `path`.

    Raises:
        FileError: The file cannot be written, or a record has a time that is not a finite number.
    """
    try:
        text = json.dumps(trace_of(records), separators=(",", ":"), allow_nan=False)
    except (ValueError, OverflowError) as error:
        raise FileError(f"{path}: not written: {error}") from error
    write_text(path, text + "\n")


def trace_of(records: Sequence[RunRecord]) -> dict[str, Any]:
    """Return the trace of a run, given one record per rank in any order."""
    records = sorted(records, key=lambda record: record.rank)
    clock = _Clock(records)
    names: list[Event] = []
    timed: list[tuple[int, int, Event]] = []
    arrow_ids = itertools.count(1)
    first_id = 1
    for position, (record, model) in enumerate((rank, model) for rank in records for model in rank.models):
        process = _Process(clock, record, arrow_ids)
        for step in sorted(model.spans, key=lambda step: step.start_s):
            process.add_step(step)
        # Viewers identify threads by number alone, so no two threads of a trace may share one.
        threads = {row: first_id + index for index, row in enumerate(sorted(process.rows))}
        names += _names(first_id, position, _title(record, model), threads)
        timed += process.events(first_id, threads)
        first_id += 1 + len(threads)
    timed.sort(key=lambda entry: entry[:2])
    about = {name: getattr(records[0], name) for name in ("command", "date", "syncline", "torch")} if records else {}
    return {
        "traceEvents": [*names, *(event for *_, event in timed)],
        "displayTimeUnit": "ms",
        "otherData": about,
    }


def _title(record: RunRecord, model: ModelRecord) -> str:
    # A model on some of the ranks has its own numbering, and its record does not say how it maps to the run's.
    known = len(model.host_of_rank) == record.ranks
    host = f" on host {model.host_of_rank[record.rank]}" if known else ""
    return f"rank {record.rank}{host}: {model.name}"


class _Clock:
    """Converts every rank's seconds to microseconds since the first step of the run."""

    def __init__(self, records: Sequence[RunRecord]) -> None:
        # Wall clocks count from 1970, too coarse to subtract two of them: only their difference is added.
        self._base_s = records[0].clock_s if records else 0.0
        starts_s = [
            start_s + (record.clock_s - self._base_s)
            for record in records
            for model in record.models
            for span in model.spans
            for start_s in (span.start_s, *(bucket.start_s for bucket in span.buckets))
        ]
        self._zero_s = min(starts_s, default=0.0)

    def us(self, record: RunRecord, seconds: float) -> int:
        return max(0, round((seconds + (record.clock_s - self._base_s) - self._zero_s) * 1e6))


@dataclass(frozen=True, order=True)
class _Row:
    """A row of a process; rows are shown in their sort order."""

    lane: int
    """-1 for computation."""
    inner: bool
    """True for collectives that overlap with others of their bucket, which are in the bucket's own row."""
    copy: int
    """Counts the rows that overlapping slices need."""

    @property
    def name(self) -> str:
        name = "computation" if self.lane < 0 else f"lane {self.lane}"
        if self.inner:
            return f"{name}, collectives ({self.copy + 2})"
        return f"{name} ({self.copy + 1})" if self.copy else name


@dataclass
class _Process:
    """One model of one rank."""

    clock: _Clock
    record: RunRecord
    arrow_ids: Iterator[int]
    rows: dict[_Row, int] = field(default_factory=lambda: {_Row(-1, False, 0): 0})
    """When each row is free again."""
    _events: list[tuple[int, int, _Row, Event]] = field(default_factory=list)
    """Time, order, row and event."""
    _in_flight: list[tuple[int, int]] = field(default_factory=list)
    """Times at which the number of bytes in flight changes, and by how much."""

    def add_step(self, step: StepSpan) -> None:
        start, backward, backward_end, end = map(
            self._us, (step.start_s, step.backward_s, step.backward_end_s, step.end_s)
        )
        row = self._free_row(-1, False, start, end)
        args = {"step": step.step, "way": step.way}
        self._slice(row, f"step {step.step}", "computation", start, end, args)
        self._slice(row, "forward", "computation", start, backward, args)
        self._slice(row, "backward", "computation", backward, backward_end, args)
        if end > backward_end:
            self._slice(row, "waiting for gradients", "computation", backward_end, end, args)
        for bucket in sorted(step.buckets, key=lambda bucket: (bucket.start_s, bucket.end_s)):
            bucket_row, sent = self._add_bucket(bucket, args)
            # Clocks may put the moment slightly before or after backward, but the arrow must start inside it.
            ready = min(max(self._us(bucket.ready_s), backward), max(backward, backward_end - 1))
            if ready <= sent:
                arrow = {"name": "ready", "cat": "bucket", "id": next(self.arrow_ids)}
                self._events.append((ready, _ARROW, row, {"ph": "s", "ts": ready, **arrow}))
                self._events.append((sent, _ARROWHEAD, bucket_row, {"ph": "f", "bp": "e", "ts": sent, **arrow}))

    def _add_bucket(self, bucket: BucketSpan, args: Event) -> tuple[_Row, int]:
        start, end = self._us(bucket.start_s), self._us(bucket.end_s)
        row = self._free_row(bucket.lane, False, start, end)
        waited_us = max(0, start - self._us(bucket.ready_s))
        args = {"bytes": bucket.bytes, "exchange": bucket.exchange, **args, "waited_us": waited_us}
        self._slice(row, f"bucket {bucket.bucket}", "bucket", start, end, args)
        self._in_flight += [(start, bucket.bytes), (end, -bucket.bytes)]
        free = start
        for phase in sorted(bucket.phases, key=lambda phase: (phase.start_s, phase.end_s)):
            began, ended = (min(max(self._us(seconds), start), end) for seconds in (phase.start_s, phase.end_s))
            if began >= free:
                inner_row, free = row, ended
            else:
                inner_row = self._free_row(bucket.lane, True, began, ended)
            name = f"{phase.name} ({phase.level})" if phase.level else phase.name
            details = {"level": phase.level, "sent_bytes": phase.sent_bytes, "bucket": bucket.bucket}
            self._slice(inner_row, name, "collective", began, ended, details, order=_INNER)
        return row, start

    def _us(self, seconds: float) -> int:
        return self.clock.us(self.record, seconds)

    def _free_row(self, lane: int, inner: bool, start: int, end: int) -> _Row:
        """Return the first row of a lane that is free at `start`, and occupy it until `end`."""
        rows = (_Row(lane, inner, copy) for copy in itertools.count())
        row = next(row for row in rows if self.rows.get(row, 0) <= start)
        self.rows[row] = max(end, start)
        return row

    def _slice(self, row: _Row, name: str, kind: str, start: int, end: int, args: Event, order: int = _SLICE) -> None:
        event = {"ph": "X", "name": name, "cat": kind, "ts": start, "dur": max(0, end - start), "args": args}
        self._events.append((start, order, row, event))

    def events(self, process_id: int, threads: dict[_Row, int]) -> Iterator[tuple[int, int, Event]]:
        """Yield the time, the order and the event itself."""
        for at, order, row, event in self._events:
            yield at, order, {**event, "pid": process_id, "tid": threads[row]}
        in_flight = 0
        for at, changes in itertools.groupby(sorted(self._in_flight), key=lambda change: change[0]):
            in_flight += sum(change for _, change in changes)
            counter = {"ph": "C", "name": "in flight", "ts": at, "args": {"bytes": in_flight}}
            yield at, _COUNTER, {**counter, "pid": process_id, "tid": process_id}


def _names(process_id: int, position: int, title: str, threads: dict[_Row, int]) -> Iterator[Event]:
    """Yield the names of a process and of its threads, and the order in which they are shown."""
    entries = [("process", process_id, title, position)]
    entries += [("thread", thread, row.name, thread - process_id) for row, thread in threads.items()]
    for kind, thread, name, index in entries:
        event = {"ph": "M", "pid": process_id, "tid": thread, "ts": 0}
        yield {**event, "name": f"{kind}_name", "args": {"name": name}}
        yield {**event, "name": f"{kind}_sort_index", "args": {"sort_index": index}}
