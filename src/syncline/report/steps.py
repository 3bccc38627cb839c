"""Where a step's time goes, and when gradients travel in it: as predicted, and as it was seen."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence

from syncline.measure.profile import Profile, RankTimes
from syncline.predict import Prediction
from syncline.predict.diagnosis import CAUSES, lost_to
from syncline.report import figures, verdict
from syncline.report.blocks import Marker, Section, Segment, Track, Tracks, Value
from syncline.report.outlook import Outlook
from syncline.report.record import BucketSpan, ModelRecord, Pace, StepSpan
from syncline.report.story import Subject

MOST_MARKS = 160
"""Of one lane: what is more stands together in one."""
_CAUSES = {"straggler": "waiting", "overhead": "own"}
"""The others are communication."""
_STEP = ("compute", "hidden", "exposed", "waiting", "own")
_LEAST = 1e-9


def predicted_losses(outlook: Outlook) -> Tracks:
    """A waterfall of the first schedule's step, with the others' figures beside it."""
    first = outlook.diagnosis.prediction
    shown = dict(itertools.islice(outlook.predictions.items(), 2))  # a page 360 pixels wide has room for two columns
    losses = [lost_to(one.losses) for one in shown.values()]
    seen_s = 5e-4 * first.iteration_s
    causes = [
        cause
        for cause in dict.fromkeys(cause for lost in losses for cause in lost)
        if max(lost.get(cause, 0.0) for lost in losses) >= seen_s
    ]
    hidden = [hidden_s(one) for one in shown.values()]

    def cells(values: Iterable[float]) -> tuple[str, ...]:
        return tuple(figures.step(value) for value in values)

    rows = [
        _row("computation", "compute", 0.0, first.compute_s, cells(one.compute_s for one in shown.values())),
    ]
    if max(hidden) > _LEAST:
        end_s = min(first.compute_s, _forward_s(outlook.profile, first) + first.backward_s)
        says = f"hidden behind computation: {figures.step(hidden[0])} of communication that costs nothing"
        mark = Segment("hidden", max(0.0, end_s - hidden[0]), end_s, says, data={"seconds": hidden[0]})
        rows.append(Track("hidden behind it", (mark,), figures=tuple(f"({text})" for text in cells(hidden))))
    at_s = first.compute_s
    for cause in causes:
        seconds = losses[0].get(cause, 0.0)
        each = cells(lost.get(cause, 0.0) for lost in losses)
        rows.append(_row(CAUSES[cause], _CAUSES.get(cause, "exposed"), at_s, at_s + seconds, each))
        at_s += seconds
    totals = cells(one.iteration_s for one in shown.values())
    rows.append(Track("a step", tuple(_stacked(first)), figures=totals, strong=True))
    return Tracks(
        caption=f"One step with {outlook.first[0]}, cause by cause",
        rows=tuple(rows),
        end=max(first.iteration_s, at_s),
        columns=tuple(shown),
        source=_source(outlook),
        legend=tuple(kind for kind in _STEP if any(kind == mark.kind for row in rows for mark in row.segments)),
        note="Causes are taken away one after the other, and the step simulated again: they add up to the whole.",
    )


def _row(name: str, kind: str, start_s: float, end_s: float, cells: tuple[str, ...]) -> Track:
    says = f"{name}: {figures.step(end_s - start_s)}"
    mark = Segment(kind, start_s, end_s, says, data={"seconds": end_s - start_s})
    return Track(name, (mark,) if end_s - start_s > _LEAST else (), figures=cells)


def _stacked(one: Prediction) -> Iterator[Segment]:
    """A whole step in one bar."""
    parts = {"compute": one.compute_s, "exposed": 0.0, "waiting": 0.0, "own": 0.0}
    for cause, seconds in lost_to(one.losses).items():
        parts[_CAUSES.get(cause, "exposed")] += seconds
    names = {"compute": "computation", "exposed": "communication that nothing hides"}
    names |= {"waiting": "waiting for slower ranks", "own": "copies, hooks and own work"}
    at_s = 0.0
    for kind, seconds in parts.items():
        if seconds > _LEAST:
            says = f"{names[kind]}: {figures.step(seconds)}, {figures.share(seconds, one.iteration_s)} of the step"
            yield Segment(kind, at_s, at_s + seconds, says, data={"seconds": seconds})
        at_s += seconds


def hidden_s(one: Prediction) -> float:
    """How long something travelled while backward ran."""
    return _covered_s([(span.start_s, span.end_s) for span in one.timeline.spans], 0.0, one.backward_s)


def _covered_s(spans: Sequence[tuple[float, float]], low_s: float, high_s: float) -> float:
    total_s, reached_s = 0.0, low_s
    for start_s, end_s in sorted(spans):
        start_s, end_s = max(start_s, reached_s), min(end_s, high_s)
        if end_s > start_s:
            total_s, reached_s = total_s + end_s - start_s, end_s
    return total_s


def _pace(profile: Profile, one: Prediction) -> tuple[float, float]:
    """Forward and update of the rank that all wait for."""
    slowest = profile.slowest if one.ranks > 1 else None
    times: RankTimes | Profile = profile
    if slowest is not None and slowest.step_s > profile.step_s:
        times = slowest
    return times.forward_s, times.update_s


def _forward_s(profile: Profile, one: Prediction) -> float:
    return _pace(profile, one)[0]


def _late_s(profile: Profile, one: Prediction) -> float:
    """What each step waits for whoever is late in it, beyond the rank that always is."""
    if one.ranks < 2:
        return 0.0
    always_s = 0.0 if profile.slowest is None else profile.slowest.step_s - profile.step_s
    return max(0.0, profile.jitter_s - max(0.0, always_s))


def _source(outlook: Outlook) -> str:
    return "predicted" if outlook.network.measured else "predicted, links assumed"


def predicted_timelines(outlook: Outlook) -> tuple[Tracks, ...]:
    """One for each schedule, all on one scale."""
    end_s = max(one.iteration_s for one in outlook.predictions.values())
    return tuple(_timeline(outlook, name, one, end_s) for name, one in outlook.predictions.items())


def _timeline(outlook: Outlook, name: str, one: Prediction, end_s: float) -> Tracks:
    """Seconds count from the step's start; copies, which are made all along, stand where they make it longer."""
    profile = outlook.profile
    forward_s, update_s = _pace(profile, one)
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
        end=end_s,
        source=_source(outlook),
        line=(zero_s + backward_s, "backward ends"),
        legend=_legend(rows),
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
    return math.ceil(number / MOST_MARKS) if number else 1


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


def _legend(rows: Sequence[Track]) -> tuple[str, ...]:
    return tuple(kind for kind in _STEP if any(kind == mark.kind for row in rows for mark in row.segments))


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
    end_s = max((_last_s(span) for _, span in found.values()), default=0.0)
    return tuple(_seen(way, rank, span, end_s) for way, (rank, span) in found.items())


def _last_s(span: StepSpan) -> float:
    return max([span.end_s, *(bucket.end_s for bucket in span.buckets)]) - span.start_s


def _seen(way: str, rank: int, span: StepSpan, end_s: float) -> Tracks:
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
        end=end_s,
        source="measured",
        line=(backward_end_s, "backward ends"),
        legend=_legend(rows),
        note=_merged_note(merged),
        whole=True,
    )


def measured_steps(subject: Subject) -> Tracks | None:
    """How long steps took, by the way that gradients went, on the median rank."""
    models = [model for _, model in subject.records]
    ways = dict.fromkeys(pace.way for model in models for pace in model.paces)
    rows = [_way(way, subject, foreseen) for way, foreseen in ((way, _foreseen_s(subject, way)) for way in ways)]
    if not rows:
        return None
    ends = [mark.end for row in rows for mark in row.segments] + [row.spread[1] for row in rows if row.spread]
    return Tracks(
        caption="Forward, backward and what was left of the exchange, per step",
        rows=tuple(rows),
        end=max([*ends, *(marker.at for row in rows for marker in row.markers)], default=1.0),
        columns=("per step", "exposed", "quartiles", "hidden", "sent", "steps"),
        source="measured",
        legend=_legend(rows),
        marked="predicted" if any(row.markers for row in rows) else "",
        note="Without what the script does between steps. Bars: the median rank’s; whiskers: its quartiles over steps.",
    )


def _way(way: str, subject: Subject, foreseen_s: float | None) -> Track:
    paces = [(rank, pace) for rank, model in subject.records for pace in model.paces if pace.way == way]
    rank, middle = sorted(paces, key=lambda one: one[1].step_s)[(len(paces) - 1) // 2]
    computing = {rank: pace.forward_s + pace.backward_s for rank, pace in paces}
    slowest = max(computing, key=lambda rank: computing[rank])
    late_s = computing[slowest] - statistics.median(computing.values())
    compute_s = middle.forward_s + middle.backward_s
    waiting_s = min(middle.exposed_s, late_s) if len(paces) > 1 else 0.0
    parts = [
        ("compute", compute_s, f"{way}: {figures.step(compute_s)} of forward and backward"),
        (
            "exposed",
            middle.exposed_s - waiting_s,
            f"{way}: {figures.step(middle.exposed_s - waiting_s)} of communication that nothing hid",
        ),
        ("waiting", waiting_s, f"{way}: {figures.step(waiting_s)} of waiting for rank {slowest}, the slowest"),
    ]
    marks, at_s = [], 0.0
    for kind, seconds, says in parts:
        if seconds > _LEAST:
            marks.append(Segment(kind, at_s, at_s + seconds, says, data={"seconds": seconds, "rank": rank}))
        at_s += seconds
    hidden = _hidden_seen_s(subject, way)
    markers: tuple[Marker, ...] = ()
    if foreseen_s is not None:
        says = f"{way}: {figures.step(foreseen_s)} predicted, {figures.step(middle.step_s)} measured"
        markers = (Marker(foreseen_s, says, {"predicted_s": foreseen_s}),)
    return Track(
        way,
        tuple(marks),
        markers,
        spread=(middle.low_s, middle.high_s),
        figures=(
            figures.step(middle.step_s),
            figures.step(middle.exposed_s),
            f"{figures.ms(middle.low_s * 1e3, unit='')}–{figures.step(middle.high_s)}",
            "–" if hidden is None else figures.step(hidden),
            figures.size(middle.sent_bytes),
            f"{middle.steps:,}",
        ),
    )


def _foreseen_s(subject: Subject, way: str) -> float | None:
    """What a plan promised for forward, backward and exchange; its own figure has the optimizer's step in it."""
    plan = subject.plans.get("the plan")
    update_s = 0.0 if subject.profile is None else subject.profile.update_s
    if plan is None:
        return None
    seconds = plan.iteration_s if way in verdict.PLANNED else plan.plain_s if way == "plain DDP" else None
    return None if seconds is None else max(0.0, seconds - update_s)


def _hidden_seen_s(subject: Subject, way: str) -> float | None:
    """The median over steps whose buckets were noted."""
    found = [
        _covered_s([(one.start_s, one.end_s) for one in span.buckets], span.start_s, span.backward_end_s)
        for _, model in subject.records
        for span in model.spans
        if span.way == way and span.buckets
    ]
    return statistics.median(found) if found else None


def between_s(model: ModelRecord, pace: Pace) -> str:
    """What the script does between steps, in a sentence; nothing where that is next to nothing."""
    if pace.between_s < 0.05 * pace.step_s:
        return ""
    return (
        f"Between two steps of {model.name} pass {figures.step(pace.between_s)}: the optimizer, data and whatever else "
        "the script does."
    )


def sections(subject: Subject, outlook: Outlook | None, how: tuple[tuple[str, str], ...]) -> Iterator[Section]:
    seen = measured_steps(subject)
    blocks = [*([seen] if seen is not None else []), *([predicted_losses(outlook)] if outlook is not None else [])]
    if blocks:
        yield Section(
            "step",
            "Where a step goes",
            "Time that computation does not use is lost to something; this is to what, and how much.",
            tuple(blocks),
            how=how,
        )
    timelines = [*measured_timelines(subject), *(predicted_timelines(outlook) if outlook is not None else ())]
    if timelines:
        kinds = tuple(kind for kind in _STEP if any(kind in one.legend for one in timelines))
        timelines = [dataclasses.replace(one, legend=()) for one in timelines]
        timelines[-1] = dataclasses.replace(timelines[-1], legend=kinds)
        yield Section(
            "timeline",
            "When gradients travel",
            "Above, what the rank computes; below, its buckets on their lanes. What is sent before backward ends is "
            "hidden behind it; what comes after makes the step longer.",
            tuple(timelines),
            how=how,
        )
