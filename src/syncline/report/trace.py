"""Records as a trace: what every rank did when, to look at in Perfetto (ui.perfetto.dev) or chrome://tracing.

The file is Chrome's trace event format, as JSON. Each model of each rank is a process. Its rows are its computation,
and its lanes with their buckets, in which the collectives of an exchange show where they were noted; arrows lead from
the moment of backward in which a bucket was ready to where it went. Ranks are put side by side by their wall clocks,
which between hosts are as good as those are kept.

A row may hold slices in slices and slices in turn, and viewers drop what only overlaps. So where two buckets of a lane,
or two collectives of a bucket, are under way at once, the later one is in a row of its own. Times are whole
microseconds: rounded alike, what lies inside something stays inside it.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from syncline.files import FileError, write_text
from syncline.records.run_record import BucketSpan, ModelRecord, PhaseSpan, RunRecord, StepSpan

Event = dict[str, Any]

_COMPUTATION, _BUCKET, _COLLECTIVE = "computation", "bucket", "collective"
_SLICE, _ARROW, _ARROWHEAD, _INNER, _COUNTER = range(5)
"""The order of events of one moment; alike ones stay in the order in which they were added, what encloses others first.
An arrow binds to the slice that was opened last."""


def write_trace(path: str | os.PathLike[str], records: Sequence[RunRecord]) -> None:
    try:
        text = json.dumps(trace_of(records), separators=(",", ":"), allow_nan=False)
    except (ValueError, OverflowError) as error:
        raise FileError(f"{path}: not written: {error}") from error
    write_text(path, text + "\n")


def trace_of(records: Sequence[RunRecord]) -> dict[str, Any]:
    """Of one record per rank, in any order."""
    ordered = sorted(records, key=lambda record: record.rank)
    clock = _Clock(ordered)
    named: list[Event] = []
    timed: list[tuple[int, int, Event]] = []
    arrows = iter(range(1, 1 << 53))
    number = 1
    for place, (record, model) in enumerate((one, model) for one in ordered for model in one.models):
        process = _Process(clock, record, arrows)
        for step in sorted(model.spans, key=lambda step: step.start_s):
            process.add(step)
        named += process.metadata(number, place, _title(record, model))
        timed += process.events(number)
        number += 1 + len(process.rows)
    timed.sort(key=lambda entry: entry[:2])
    return {
        "traceEvents": [*named, *(event for *_, event in timed)],
        "displayTimeUnit": "ms",
        "otherData": _about(ordered),
    }


def _about(records: Sequence[RunRecord]) -> dict[str, str]:
    if not records:
        return {}
    first = records[0]
    return {"command": first.command, "date": first.date, "syncline": first.syncline, "torch": first.torch}


def _title(record: RunRecord, model: ModelRecord) -> str:
    # A model of some of the ranks numbers them in its own way: whose hosts those are is not in its record.
    known = len(model.host_of_rank) == record.ranks
    where = f"rank {record.rank} on host {model.host_of_rank[record.rank]}" if known else f"rank {record.rank}"
    return f"{where}: {model.name}"


class _Clock:
    """All ranks' seconds, as microseconds since the first of them began its first step."""

    def __init__(self, records: Sequence[RunRecord]) -> None:
        # Wall clocks count from 1970, too coarse for a difference of two: only what is between clocks is added.
        self._base_s = records[0].clock_s if records else 0.0
        starts_s = [
            self._common(record, start_s)
            for record in records
            for model in record.models
            for span in model.spans
            for start_s in (span.start_s, *(bucket.start_s for bucket in span.buckets))
        ]
        self._zero_s = min(starts_s, default=0.0)

    def _common(self, record: RunRecord, seconds: float) -> float:
        return seconds + (record.clock_s - self._base_s)

    def us(self, record: RunRecord, seconds: float) -> int:
        return max(0, round((self._common(record, seconds) - self._zero_s) * 1e6))


@dataclass(frozen=True, order=True)
class _Row:
    """A row of a process, in the order in which rows are shown."""

    lane: int
    """-1 is computation."""
    inner: bool
    """For collectives that overlap with others of their bucket, which are in the bucket's own row."""
    copy: int
    """As many as are needed for what overlaps."""

    @property
    def name(self) -> str:
        name = _COMPUTATION if self.lane < 0 else f"lane {self.lane}"
        if self.inner:
            return f"{name}, collectives ({self.copy + 2})"
        return f"{name} ({self.copy + 1})" if self.copy else name


@dataclass
class _Process:
    """One model of one rank."""

    clock: _Clock
    record: RunRecord
    arrows: Iterator[int]
    rows: dict[_Row, int] = field(default_factory=lambda: {_Row(-1, False, 0): 0})
    """And when each is free again."""
    _events: list[tuple[int, int, _Row, Event]] = field(default_factory=list)
    """With the time and order of each."""
    _in_flight: list[tuple[int, int]] = field(default_factory=list)
    """When so many bytes more were under way."""

    def add(self, step: StepSpan) -> None:
        start, backward, backward_end, end = (
            self._us(seconds) for seconds in (step.start_s, step.backward_s, step.backward_end_s, step.end_s)
        )
        row = self._free(-1, False, start, end)
        about = {"step": step.step, "way": step.way}
        self._slice(row, f"step {step.step}", _COMPUTATION, start, end, about)
        self._slice(row, "forward", _COMPUTATION, start, backward, about)
        self._slice(row, "backward", _COMPUTATION, backward, backward_end, about)
        if end > backward_end:
            self._slice(row, "waiting for gradients", _COMPUTATION, backward_end, end, about)
        for bucket in sorted(step.buckets, key=lambda bucket: (bucket.start_s, bucket.end_s)):
            went = self._add_bucket(bucket, about)
            # Inside backward, also where a clock puts a bucket's readiness a moment before or after it.
            ready = min(max(self._us(bucket.ready_s), backward), max(backward, backward_end - 1))
            if ready <= went[1]:
                self._arrow((row, ready), went)

    def _add_bucket(self, bucket: BucketSpan, about: dict[str, Any]) -> tuple[_Row, int]:
        start, end = self._us(bucket.start_s), self._us(bucket.end_s)
        row = self._free(bucket.lane, False, start, end)
        held = {"bytes": bucket.bytes, "exchange": bucket.exchange, **about}
        waited = {"waited_us": max(0, start - self._us(bucket.ready_s))}
        self._slice(row, f"bucket {bucket.bucket}", _BUCKET, start, end, {**held, **waited})
        self._in_flight += [(start, bucket.bytes), (end, -bucket.bytes)]
        free = start
        for phase in sorted(bucket.phases, key=lambda phase: (phase.start_s, phase.end_s)):
            began, ended = (min(max(self._us(seconds), start), end) for seconds in (phase.start_s, phase.end_s))
            if began >= free:
                inside, free = row, ended
            else:
                inside = self._free(bucket.lane, True, began, ended)
            self._slice(inside, _label(phase), _COLLECTIVE, began, ended, _details(phase, bucket), order=_INNER)
        return row, start

    def _us(self, seconds: float) -> int:
        return self.clock.us(self.record, seconds)

    def _free(self, lane: int, inner: bool, start: int, end: int) -> _Row:
        """The first row of a kind that is free from `start` on; it is not until `end` any more."""
        copy = 0
        while self.rows.get(row := _Row(lane, inner, copy), 0) > start:
            copy += 1
        self.rows[row] = max(end, start)
        return row

    def _slice(
        self, row: _Row, name: str, kind: str, start: int, end: int, args: dict[str, Any], order: int = _SLICE
    ) -> None:
        event = {"ph": "X", "name": name, "cat": kind, "ts": start, "dur": max(0, end - start), "args": args}
        self._events.append((start, order, row, event))

    def _arrow(self, source: tuple[_Row, int], target: tuple[_Row, int]) -> None:
        flow = {"name": "ready", "cat": _BUCKET, "id": next(self.arrows)}
        self._events.append((source[1], _ARROW, source[0], {"ph": "s", "ts": source[1], **flow}))
        self._events.append((target[1], _ARROWHEAD, target[0], {"ph": "f", "bp": "e", "ts": target[1], **flow}))

    def metadata(self, number: int, place: int, title: str) -> list[Event]:
        """Names and order. Viewers know threads by number alone, so no two of a trace share one."""
        threads = self._threads(number)
        process = {"ph": "M", "pid": number, "tid": number, "ts": 0}
        named = [
            {**process, "name": "process_name", "args": {"name": title}},
            {**process, "name": "process_sort_index", "args": {"sort_index": place}},
        ]
        for row, thread in threads.items():
            about = {**process, "tid": thread}
            named.append({**about, "name": "thread_name", "args": {"name": row.name}})
            named.append({**about, "name": "thread_sort_index", "args": {"sort_index": thread - number}})
        return named

    def events(self, number: int) -> Iterator[tuple[int, int, Event]]:
        """With the time and order of each."""
        threads = self._threads(number)
        for at, order, row, event in self._events:
            yield at, order, {**event, "pid": number, "tid": threads[row]}
        under_way = 0
        for at, changes in itertools.groupby(sorted(self._in_flight), key=lambda change: change[0]):
            under_way += sum(change for _, change in changes)
            counter = {"ph": "C", "name": "in flight", "ts": at, "args": {"bytes": under_way}}
            yield at, _COUNTER, {**counter, "pid": number, "tid": number}

    def _threads(self, number: int) -> dict[_Row, int]:
        return {row: number + place for place, row in enumerate(sorted(self.rows))}


def _label(phase: PhaseSpan) -> str:
    return f"{phase.name} ({phase.level})" if phase.level else phase.name


def _details(phase: PhaseSpan, bucket: BucketSpan) -> dict[str, Any]:
    return {"level": phase.level, "sent_bytes": phase.sent_bytes, "bucket": bucket.bucket}
