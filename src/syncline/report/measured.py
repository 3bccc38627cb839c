"""What was measured: methods side by side, steps one after the other, and what models learned meanwhile."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from syncline.records.bench_result import BenchResult, Cluster, DemoResult
from syncline.records.run_record import ModelRecord
from syncline.report import commands, figures, scales, verdict
from syncline.report.blocks import Dot, Lines, Marker, Section, Segment, Series, Track, Tracks, Value, present
from syncline.report.story import Story, Subject

_MOST_VERTICES, _MOST_DOTS, _MOST_GRADIENTS = 400, 40, 40
_METHODS = {
    "nosync": "no communication",
    "ddp": "plain DDP",
    "tune": "tuned, lossless",
    "tune-bf16": "tuned, 16 bits allowed",
}


@dataclass(frozen=True)
class _Method:
    """One row of a bench or of the demo."""

    name: str
    method: str
    step_ms: float
    low_ms: float
    high_ms: float
    predicted_ms: float | None
    vs_ddp: float | None
    figures: tuple[str, ...]
    note: str = ""


def bench_section(result: BenchResult, number: int, story: Story) -> Section:
    rows = [
        _Method(
            row.method,
            row.method,
            row.step_ms,
            row.step_ms_low,
            row.step_ms_high,
            row.predicted_ms,
            row.vs_ddp,
            (
                f"{figures.ms(row.step_ms_low, unit='')}–{figures.ms(row.step_ms_high, unit='')}",
                "–" if row.predicted_ms is None else figures.ms(row.predicted_ms),
                figures.size(row.sent_bytes if row.sent_bytes is not None else row.wire_bytes),
            ),
            row.setting,
        )
        for row in result.rows
    ]
    peaks = any(row.peak_bytes for row in result.rows)
    return Section(
        "bench" if number == 0 else f"bench-{number + 1}",
        f"Methods side by side, {cluster(result.cluster)}",
        " ".join(filter(None, [verdict.of_bench(result), verdict.of_forecasts(result)])),
        (
            _methods(
                f"{result.model.name}, {figures.size(result.model.gradient_bytes)} of gradients, "
                f"{figures.count(result.rounds, 'round')}",
                rows,
                ("per step", "×\u00a0DDP", "quartiles", "predicted", "sent"),
            ),
            *([_peaks(result)] if peaks else []),
        ),
        how=commands.of_bench(result, story),
    )


def demo_section(result: DemoResult, story: Story) -> Section:
    rows = [
        _Method(
            _METHODS.get(row.method, row.method),
            row.method,
            row.step_ms,
            row.step_ms_low,
            row.step_ms_high,
            None,
            row.vs_ddp,
            (
                f"{figures.ms(row.step_ms_low, unit='')}–{figures.ms(row.step_ms_high, unit='')}",
                figures.size(row.wire_bytes),
                "–" if row.held_out_accuracy is None else f"{row.held_out_accuracy:.1%}",
            ),
        )
        for row in result.rows
    ]
    return Section(
        "demo",
        f"Training side by side, {cluster(result.cluster)}",
        "Every method trains a model of its own from the same weights on the same batches, and they take turns.",
        (
            _methods(
                f"A CNN on real digits, {figures.count(result.steps, 'step')}",
                rows,
                ("per step", "×\u00a0DDP", "quartiles", "wire", "accuracy"),
            ),
        ),
        how=commands.of_demo(result, story),
    )


def _methods(caption: str, rows: Sequence[_Method], columns: tuple[str, ...]) -> Tracks:
    floor = next((row.step_ms for row in rows if row.method == "nosync"), None)
    tracks = tuple(_method(row, floor) for row in rows)
    ends = [value for row in rows for value in (row.high_ms, row.predicted_ms or 0.0)]
    return Tracks(
        caption=caption,
        rows=tracks,
        end=max(ends, default=1.0) / 1e3,
        columns=columns,
        source="measured",
        line=None if floor is None else (floor / 1e3, "computation alone"),
        legend=present(tracks, ("compute", "exposed", "other")),
        marked="predicted before the first step" if any(row.predicted_ms for row in rows) else "",
        note="Medians of rounds in which all methods take turns, with quartiles as whiskers; × DDP: the median of the "
        "rounds’ ratios.",
    )


def _method(row: _Method, floor_ms: float | None) -> Track:
    quartiles = f"{figures.ms(row.low_ms)} to {figures.ms(row.high_ms)}"
    says = f"{row.name}: {figures.ms(row.step_ms)} per step, quartiles {quartiles}"
    if row.predicted_ms is not None:
        says += f", {figures.ms(row.predicted_ms)} predicted"
    data: dict[str, Value] = {"method": row.method, "step_ms": row.step_ms}
    step_s = row.step_ms / 1e3
    if floor_ms is None:
        marks = [Segment("other", 0.0, step_s, says, data=data)]
    else:
        floor_s = min(floor_ms, row.step_ms) / 1e3
        beyond = f"{row.name}: {figures.step(step_s - floor_s)} more than computation alone"
        marks = [Segment("compute", 0.0, floor_s, says, data=data)]
        if step_s > floor_s:
            marks.append(Segment("exposed", floor_s, step_s, f"{says}; {beyond}", data=data))
    markers: tuple[Marker, ...] = ()
    if row.predicted_ms is not None:
        foreseen = f"{row.name}: {figures.ms(row.predicted_ms)} predicted, {figures.ms(row.step_ms)} measured"
        markers = (Marker(row.predicted_ms / 1e3, foreseen, {"predicted_ms": row.predicted_ms}),)
    ratio = "–" if row.vs_ddp is None else f"{row.vs_ddp:.2f}"
    return Track(
        row.name,
        tuple(marks),
        markers,
        (row.low_ms / 1e3, row.high_ms / 1e3),
        (figures.ms(row.step_ms), ratio, *row.figures),
        row.note,
        strong=row.method in ("tune", "plan"),
    )


def _peaks(result: BenchResult) -> Tracks:
    rows = [row for row in result.rows if row.peak_bytes]
    return Tracks(
        caption="Memory at its peak, of the busiest rank",
        rows=tuple(
            Track(
                row.method,
                (
                    Segment(
                        "other",
                        0.0,
                        float(row.peak_bytes or 0),
                        f"{row.method}: {figures.size(row.peak_bytes)} at the peak",
                        data={"peak_bytes": row.peak_bytes or 0},
                    ),
                ),
                figures=(figures.size(row.peak_bytes), figures.size(row.states_bytes)),
            )
            for row in rows
        ),
        end=max(float(row.peak_bytes or 0) for row in rows),
        columns=("peak", "between steps"),
        source="measured",
        unit="bytes",
    )


def cluster(one: Cluster) -> str:
    each = one.per_host if isinstance(one.per_host, int) else None
    ranks = f"{figures.count(sum(one.per_host), 'rank')} in all" if isinstance(one.per_host, list) else ""
    ranks = f"{figures.count(each, 'rank')} each" if each is not None and each > 1 else ranks
    links = f"{figures.rate(one.rate_bps)} links" if one.emulated else "loopback, links not shaped"
    return ", ".join(filter(None, [figures.count(one.hosts, "host"), ranks, links]))


def training_section(story: Story, subject: Subject, name: str = "training") -> Section | None:
    """Losses, step by step."""
    blocks = []
    if story.demo is not None and not subject.records:
        found = [
            (_METHODS.get(row.method, row.method), list(enumerate(row.losses)))
            for row in story.demo.rows
            if row.method != "nosync"
        ]
        blocks.append(_losses("Loss by step, averaged over the ranks", found))
    models = [(rank, model) for rank, model in subject.records if model.losses]
    if models:
        found = [
            (f"rank {rank}", [(loss.step, loss.value) for loss in model.losses]) for rank, model in models[:_MOST_RANKS]
        ]
        blocks.append(_losses("Loss by step, as backward was called on it", found))
    if subject.records and (drawn := _steps_in_time(subject.records[0][0], subject.records[0][1])) is not None:
        blocks.append(drawn)
    if not blocks:
        return None
    how = commands.of_demo(story.demo, story) if story.demo is not None else commands.of_run(story)
    return Section(name, "Training meanwhile", "", tuple(blocks), how=how)


_MOST_RANKS = 4
"""Whose losses are drawn."""


def _losses(caption: str, found: Sequence[tuple[str, Sequence[tuple[int, float]]]]) -> Lines:
    values = [value for _, points in found for _, value in points]
    steps = [step for _, points in found for step, _ in points]
    return Lines(
        caption,
        scales.linear("step", [float(step) for step in steps], lambda value: f"{value:,.0f}", ceiling=1.0),
        scales.between("loss", values, lambda value: f"{value:g}"),
        tuple(
            Series(
                name,
                line=tuple((float(step), value) for step, value in _thinned(points, _MOST_VERTICES)),
                dots=tuple(
                    Dot(float(step), value, f"{name}, step {step:,}: loss {value:.4g}")
                    for step, value in _thinned(points, _MOST_DOTS)
                ),
                hue=hue,
            )
            for hue, (name, points) in enumerate(found)
        ),
        "measured",
        quiet=True,
    )


def _thinned(points: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """Evenly spread, the last one among them."""
    every = max(1, math.ceil(len(points) / most))
    kept = list(points[::every])
    return kept if not points or kept[-1] == points[-1] else [*kept, points[-1]]


def _steps_in_time(rank: int, model: ModelRecord) -> Lines | None:
    """How long each step took, by the way that gradients went."""
    ways: dict[str, list[tuple[int, float]]] = {}
    for span in model.spans:
        ways.setdefault(span.way, []).append((span.step, span.end_s - span.start_s))
    if sum(len(points) for points in ways.values()) < 2:
        return None
    numbers = [float(step) for points in ways.values() for step, _ in points]
    seconds = sorted(value for points in ways.values() for _, value in points)
    # One step of minutes, for a checkpoint or a download, would flatten all others: it stands at the edge.
    usual_s = seconds[min(len(seconds) - 1, int(0.98 * len(seconds)))] * 1.25
    return Lines(
        f"How long steps took, rank {rank}",
        scales.linear("step", numbers, lambda value: f"{value:,.0f}", ceiling=1.0),
        scales.duration("per step", [min(usual_s, seconds[-1])]),
        tuple(
            Series(
                way,
                dots=tuple(
                    Dot(float(step), min(value, usual_s), f"step {step:,}, {way}: {figures.step(value)}")
                    for step, value in _thinned(points, 3 * _MOST_DOTS)
                ),
                hue=hue,
            )
            for hue, (way, points) in enumerate(ways.items())
        ),
        "measured",
    )


def model_section(subject: Subject, story: Story) -> Section | None:
    """When its gradients are ready."""
    profile = subject.profile
    if profile is None:
        return None
    total, line, ready = 0, [(0.0, 0.0)], []
    for gradient in profile.gradients:
        line.append((gradient.ready_s, float(total)))
        total += gradient.bytes
        line.append((gradient.ready_s, float(total)))
        ready.append((gradient, total))
    largest = sorted(ready, key=lambda one: -one[0].bytes)[:_MOST_GRADIENTS]
    every = max(1, len(line) // 600)
    dots = tuple(
        Dot(
            gradient.ready_s,
            float(so_far),
            f"{gradient.name}: {figures.size(gradient.bytes)}, ready {figures.fine(gradient.ready_s)} after backward "
            f"began; {figures.size(so_far)} by then",
        )
        for gradient, so_far in sorted(largest, key=lambda one: one[0].ready_s)
    )
    x = scales.duration("since backward began", [profile.backward_s], ceiling=1.0)
    left = len(ready) - len(largest)
    return Section(
        "model",
        "When gradients are ready",
        verdict.of_profile(profile),
        (
            Lines(
                f"{figures.count(len(ready), 'gradient')}, {figures.size(total)}, as backward makes them",
                x,
                scales.linear("ready so far", [float(total)], figures.short_size),
                (Series("gradients", line=(*line[::every], line[-1]), dots=dots),),
                "measured",
                note=f"Points are the {len(largest)} largest; {left:,} smaller ones are in the line only."
                if left
                else "",
            ),
        ),
        how=commands.of_profile(story),
    )


def sections(story: Story) -> Iterator[Section]:
    if story.demo is not None:
        yield demo_section(story.demo, story)
    for number, result in enumerate(story.benches):
        yield bench_section(result, number, story)
