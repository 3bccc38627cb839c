"""When gradients travel in a step: what the rank computes above, its buckets on their lanes below."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from syncline.predict import Prediction
from syncline.records.profile import Profile, RankTimes
from syncline.records.run_record import BucketSpan, StepSpan
from syncline.report import figures
from syncline.report.blocks import Segment, Track, Tracks, Value
from syncline.report.outlook import Outlook
from syncline.report.story import Subject

_MOST_MARKS = 160
"""Of one lane: what is more stands together in one."""
_LEAST = 1e-9


def predicted_timelines(outlook: Outlook) -> tuple[Tracks, ...]:
    """One for each schedule."""
    return tuple(_timeline(outlook, name, one) for name, one in outlook.predictions.items())


def _timeline(outlook: Outlook, name: str, one: Prediction) -> Tracks:
    """Seconds count from the step's start; copies, which are made all along, stand where they make it longer."""
    profile = outlook.profile
    forward_s, update_s = pace_of(profile, one)
    backward_s, last_s = one.backward_s, max([one.backward_s, *one.timeline.end_s.values()])
    buffers_s = one.losses.buffers_s
    zero_s = buffers_s + forward_s
    late_s = _late_s(profile, one)
    copies_s = one.iteration_s - late_s - (zero_s + last_s + update_s)
    at_s = zero_s + last_s
    computing = [
        _span("exposed", 0.0, buffers_s, "broadcasting buffers before forward"),
        _span("compute", buffers_s, zero_s, "forward"),
        _span("compute", zero_s, zero_s + backward_s, "backward"),
        _span("own", at_s, at_s + copies_s, "copies into and out of buckets"),
        _span("waiting", at_s + copies_s, at_s + copies_s + late_s, "waiting for whoever is late"),
        _span("compute", one.iteration_s - update_s, one.iteration_s, "the optimizer’s step"),
    ]
    sizes = one.schedule.bucket_bytes(profile)
    lanes: dict[int, dict[str, list[tuple[str, float, float]]]] = {lane: {} for lane in range(one.schedule.lanes)}
    for span in one.timeline.spans:
        lanes[span.lane].setdefault(span.bucket, []).append((span.what, span.start_s + zero_s, span.end_s + zero_s))
    seen_s = 1e-3 * one.iteration_s
    rows = [Track("computing", tuple(mark for mark in computing if mark.end - mark.start > seen_s))]
    merged = 1
    for lane, buckets in lanes.items():
        pieces = [
            _Bucket(
                int(bucket),
                sizes[int(bucket)],
                one.schedule.exchange_of(int(bucket))[0],
                min(start for _, start, _ in stages),
                max(end for _, _, end in stages),
                tuple((start, end) for what, start, end in stages if what == "work"),
            )
            for bucket, stages in sorted(buckets.items(), key=lambda item: int(item[0]))
        ]
        each = _together(len(pieces))
        merged = max(merged, each)
        lane_name = f"lane {lane}" if one.schedule.lanes > 1 else "sending"
        rows.append(Track(lane_name, tuple(_bars(pieces, each, zero_s + backward_s))))
    return Tracks(
        caption=f"{figures.capital(name)}: {figures.step(one.iteration_s)} per step",
        rows=tuple(rows),
        end=one.iteration_s,
        source=outlook.source,
        line=(zero_s + backward_s, "backward ends"),
        note=_merged_note(merged),
        whole=True,
    )


def _span(kind: str, start_s: float, end_s: float, what: str) -> Segment:
    says = f"{what}: {figures.step(end_s - start_s)}, from {figures.step(start_s)} to {figures.step(end_s)}"
    return Segment(kind, start_s, end_s, says, label=what, data={"start_s": start_s, "end_s": end_s})


class _Bucket:
    """One bucket on its lane, and the parts of it that are the rank's own work."""

    def __init__(
        self,
        number: int,
        nbytes: int,
        exchange: str,
        start_s: float,
        end_s: float,
        own: tuple[tuple[float, float], ...] = (),
        ready_s: float | None = None,
    ) -> None:
        self.number, self.nbytes, self.exchange = number, nbytes, exchange
        self.start_s, self.end_s, self.own, self.ready_s = start_s, end_s, own, ready_s


def _together(number: int) -> int:
    """How many stand in one mark."""
    return math.ceil(number / _MOST_MARKS) if number else 1


def _merged_note(each: int) -> str:
    return "" if each == 1 else f"There are too many buckets to draw each: up to {each} stand together in one bar."


def _bars(pieces: Sequence[_Bucket], each: int, backward_end_s: float) -> Iterator[Segment]:
    """Those that run at the same time stand below each other; each bar changes colour where backward ends."""
    free: list[float] = []
    for first in range(0, len(pieces), each):
        group = pieces[first : first + each]
        start_s, end_s = min(one.start_s for one in group), max(one.end_s for one in group)
        row = next((place for place, until_s in enumerate(free) if until_s <= start_s + _LEAST), len(free))
        free[row : row + 1] = [end_s]
        several = len(group) > 1
        number = f"{group[0].number}–{group[-1].number}" if several else str(group[0].number)
        nbytes = sum(one.nbytes for one in group)
        exchanges = ", ".join(dict.fromkeys(one.exchange for one in group))
        ready_s = group[0].ready_s
        ready = "" if ready_s is None or several else f"ready at {figures.step(ready_s)}, "
        says = (
            f"bucket{'s' if several else ''} {number}: {figures.size(nbytes)} through {exchanges}, {ready}"
            f"from {figures.step(start_s)} to {figures.step(end_s)}: {figures.step(end_s - start_s)}"
        )
        data: dict[str, Value] = {"bucket": number, "bytes": nbytes, "start_s": start_s, "end_s": end_s}
        cut_s = min(max(start_s, backward_end_s), end_s)
        parts = [("hidden", start_s, cut_s), ("exposed", cut_s, end_s)]
        longest = max(parts, key=lambda part: part[2] - part[1])
        for part in parts:
            kind, begin_s, until_s = part
            if until_s - begin_s > _LEAST or part is longest:
                yield Segment(kind, begin_s, until_s, says, number if part is longest else "", data, row)
        if not several:
            for begin_s, until_s in group[0].own:
                if until_s - begin_s > _LEAST:
                    own = f"bucket {number}: {figures.step(until_s - begin_s)} of its exchange’s own work"
                    yield Segment("own", begin_s, until_s, own, "", {"bucket": number, "own_s": until_s - begin_s}, row)


def measured_timelines(subject: Subject) -> tuple[Tracks, ...]:
    """Of each way of which buckets were noted: the step in the middle of those, on the first rank that has one."""
    found: dict[str, tuple[int, StepSpan]] = {}
    for rank, model in subject.records:
        ways: dict[str, list[StepSpan]] = {}
        for span in model.spans:
            if span.buckets:
                ways.setdefault(span.way, []).append(span)
        for way, spans in ways.items():
            spans.sort(key=lambda span: span.end_s - span.start_s)
            found.setdefault(way, (rank, spans[len(spans) // 2]))
    return tuple(_seen(way, rank, span) for way, (rank, span) in found.items())


def _last_s(span: StepSpan) -> float:
    return max([span.end_s, *(bucket.end_s for bucket in span.buckets)]) - span.start_s


def _seen(way: str, rank: int, span: StepSpan) -> Tracks:
    zero_s = span.start_s
    backward_end_s = span.backward_end_s - zero_s
    computing = (
        _span("compute", 0.0, span.backward_s - zero_s, "forward"),
        _span("compute", span.backward_s - zero_s, backward_end_s, "backward"),
        _span("exposed", backward_end_s, span.end_s - zero_s, "waiting for gradients"),
    )
    rows = [Track(f"rank {rank}", tuple(mark for mark in computing if mark.end - mark.start > _LEAST))]
    lanes: dict[int, list[BucketSpan]] = {}
    for bucket in span.buckets:
        lanes.setdefault(bucket.lane, []).append(bucket)
    merged = 1
    for lane, buckets in sorted(lanes.items()):
        pieces = [
            _Bucket(
                one.bucket,
                one.bytes,
                one.exchange,
                max(0.0, one.start_s - zero_s),
                max(0.0, one.end_s - zero_s),
                tuple((part.start_s - zero_s, part.end_s - zero_s) for part in one.phases if not part.level),
                max(0.0, one.ready_s - zero_s),
            )
            for one in sorted(buckets, key=lambda one: one.start_s)
        ]
        each = _together(len(pieces))
        merged = max(merged, each)
        rows.append(Track(f"lane {lane}", tuple(_bars(pieces, each, backward_end_s))))
    return Tracks(
        caption=f"{figures.capital(way)}, step {span.step} of rank {rank}: {figures.step(span.end_s - zero_s)}",
        rows=tuple(rows),
        end=_last_s(span),
        source="measured",
        line=(backward_end_s, "backward ends"),
        note=_merged_note(merged),
        whole=True,
    )


def pace_of(profile: Profile, one: Prediction) -> tuple[float, float]:
    """Forward and update of the rank that all wait for."""
    slowest = profile.slowest if one.ranks > 1 else None
    times: RankTimes | Profile = profile
    if slowest is not None and slowest.step_s > profile.step_s:
        times = slowest
    return times.forward_s, times.update_s


def _late_s(profile: Profile, one: Prediction) -> float:
    """What each step waits for whoever is late in it, beyond the rank that always is."""
    if one.ranks < 2:
        return 0.0
    always_s = 0.0 if profile.slowest is None else profile.slowest.step_s - profile.step_s
    return max(0.0, profile.jitter_s - max(0.0, always_s))


def covered_s(spans: Sequence[tuple[float, float]], low_s: float, high_s: float) -> float:
    total_s, reached_s = 0.0, low_s
    for start_s, end_s in sorted(spans):
        start_s, end_s = max(start_s, reached_s), min(end_s, high_s)
        if end_s > start_s:
            total_s, reached_s = total_s + end_s - start_s, end_s
    return total_s
