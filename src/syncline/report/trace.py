"""Run records as a trace of what every rank did when, for Perfetto (ui.perfetto.dev) or chrome://tracing.

The file is Chrome's trace event format, as JSON. Each model of each rank is a process. Its rows are its computation and
its lanes with their buckets; inside a bucket are the collectives of its exchange, if they were recorded. Ranks are
aligned by their wall clocks, so those of different hosts are only as well aligned as their clocks.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from syncline.files import FileError, write_text
from syncline.records.run_record import BucketSpan, RunRecord, StepSpan

Event = dict[str, Any]
_Row = tuple[int, bool, int]
"""The lane (-1 for computation), whether the row holds collectives that overlap with others of their bucket, and the
row's number in the lane. Slices that overlap need several rows, because viewers drop a slice that lies partly inside
another."""


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
    # Wall clocks count from 1970, too coarse to subtract two of them: only their difference is added.
    models = [(record, record.clock_s - records[0].clock_s, model) for record in records for model in record.models]
    starts_s = [
        offset_s + start_s
        for _, offset_s, model in models
        for span in model.spans
        for start_s in (span.start_s, *(bucket.start_s for bucket in span.buckets))
    ]
    zero_s = min(starts_s, default=0.0)
    names: list[Event] = []
    slices: list[Event] = []
    first_id = 1
    for record, offset_s, model in models:
        process = _Process(offset_s - zero_s)
        for step in sorted(model.spans, key=lambda step: step.start_s):
            process.add_step(step)
        # Viewers identify threads by number alone, so no two threads of a trace may share one.
        threads = {row: first_id + index for index, row in enumerate(sorted(process.free_from))}
        # A model on some of the ranks has its own numbering, and its record does not say how it maps to the run's.
        host = f" on host {model.host_of_rank[record.rank]}" if len(model.host_of_rank) == record.ranks else ""
        names += _names(first_id, f"rank {record.rank}{host}: {model.name}", threads)
        slices += ({**event, "pid": first_id, "tid": threads[row]} for row, event in process.slices)
        first_id += 1 + len(threads)
    slices.sort(key=lambda event: event["ts"])
    about = {name: getattr(records[0], name) for name in ("command", "date", "syncline", "torch")} if records else {}
    return {"traceEvents": [*names, *slices], "displayTimeUnit": "ms", "otherData": about}


@dataclass
class _Process:
    """One model of one rank. Times are whole microseconds, so that what lies inside a slice stays inside it."""

    offset_s: float  # added to the rank's times, it gives the time since the first step of the run
    free_from: dict[_Row, int] = field(default_factory=lambda: {(-1, False, 0): 0})
    slices: list[tuple[_Row, Event]] = field(default_factory=list)

    def add_step(self, step: StepSpan) -> None:
        times = map(self._us, (step.start_s, step.backward_s, step.backward_end_s, step.end_s))
        start, backward, backward_end, end = times
        row = self._free_row(-1, False, start, end)
        args = {"step": step.step, "way": step.way}
        parts = [(f"step {step.step}", start, end), ("forward", start, backward), ("backward", backward, backward_end)]
        parts += [("waiting for gradients", backward_end, end)] if end > backward_end else []
        for name, began, ended in parts:
            self._add(row, name, "computation", began, ended, args)
        for bucket in sorted(step.buckets, key=lambda bucket: (bucket.start_s, bucket.end_s)):
            self._add_bucket(bucket, args)

    def _add_bucket(self, bucket: BucketSpan, args: Event) -> None:
        start, end = self._us(bucket.start_s), self._us(bucket.end_s)
        row = self._free_row(bucket.lane, False, start, end)
        waited_us = max(0, start - self._us(bucket.ready_s))
        args = {"bytes": bucket.bytes, "exchange": bucket.exchange, **args, "waited_us": waited_us}
        self._add(row, f"bucket {bucket.bucket}", "bucket", start, end, args)
        free = start
        for phase in sorted(bucket.phases, key=lambda phase: (phase.start_s, phase.end_s)):
            began, ended = (min(max(self._us(seconds), start), end) for seconds in (phase.start_s, phase.end_s))
            if began >= free:
                phase_row, free = row, ended
            else:
                phase_row = self._free_row(bucket.lane, True, began, ended)
            name = f"{phase.name} ({phase.level})" if phase.level else phase.name
            details = {"level": phase.level, "sent_bytes": phase.sent_bytes, "bucket": bucket.bucket}
            self._add(phase_row, name, "collective", began, ended, details)

    def _us(self, seconds: float) -> int:
        return max(0, round((seconds + self.offset_s) * 1e6))

    def _free_row(self, lane: int, inner: bool, start: int, end: int) -> _Row:
        """Return the first row of a lane that is free at `start`, and occupy it until `end`."""
        rows = ((lane, inner, copy) for copy in itertools.count())
        row = next(row for row in rows if self.free_from.get(row, 0) <= start)
        self.free_from[row] = max(end, start)
        return row

    def _add(self, row: _Row, name: str, kind: str, start: int, end: int, args: Event) -> None:
        event = {"ph": "X", "name": name, "cat": kind, "ts": start, "dur": max(0, end - start), "args": args}
        self.slices.append((row, event))


def _names(process_id: int, title: str, threads: dict[_Row, int]) -> Iterator[Event]:
    """Yield the names of a process and of its threads, and the order in which they are shown."""
    entries = [("process", process_id, title)]
    for (lane, inner, copy), thread in threads.items():
        suffix = f", collectives ({copy + 2})" if inner else f" ({copy + 1})" if copy else ""
        entries.append(("thread", thread, ("computation" if lane < 0 else f"lane {lane}") + suffix))
    for kind, number, name in entries:
        event = {"ph": "M", "pid": process_id, "tid": number, "ts": 0}
        yield {**event, "name": f"{kind}_name", "args": {"name": name}}
        yield {**event, "name": f"{kind}_sort_index", "args": {"sort_index": number}}
