"""Where a step's time goes: as predicted, cause by cause, and as it was seen, by the way that gradients went."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Iterator

from syncline.predict import Prediction
from syncline.predict.diagnosis import CAUSES, lost_to
from syncline.records.run_record import ModelRecord, Pace
from syncline.report import figures, verdict
from syncline.report.blocks import STEP, Marker, Section, Segment, Track, Tracks, present
from syncline.report.outlook import Outlook
from syncline.report.story import Subject
from syncline.report.timelines import covered_s, measured_timelines, pace_of, predicted_timelines

_CAUSES = {"straggler": "waiting", "overhead": "own"}
"""The others are communication."""
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
        end_s = min(first.compute_s, pace_of(outlook.profile, first)[0] + first.backward_s)
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
        source=outlook.source,
        legend=present(rows, STEP),
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
    return covered_s([(span.start_s, span.end_s) for span in one.timeline.spans], 0.0, one.backward_s)


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
        legend=present(rows, STEP),
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
        covered_s([(one.start_s, one.end_s) for one in span.buckets], span.start_s, span.backward_end_s)
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
        f"Between two steps of {model.name} pass {figures.step(pace.between_s)}: passes that only accumulate, "
        "the optimizer, data and whatever else the script does."
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
        kinds = present([row for one in timelines for row in one.rows], STEP)
        end_s = max(one.end for one in timelines)  # one scale for all
        timelines = [dataclasses.replace(one, end=end_s) for one in timelines]
        timelines[-1] = dataclasses.replace(timelines[-1], legend=kinds)
        yield Section(
            "timeline",
            "When gradients travel",
            "Above, what the rank computes; below, its buckets on their lanes. What is sent before backward ends is "
            "hidden behind it; what comes after makes the step longer.",
            tuple(timelines),
            how=how,
        )
