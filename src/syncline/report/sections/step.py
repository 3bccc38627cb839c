"""The sections on one step: where its time goes, when gradients are sent, and what each remedy would save."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence

import msgspec

from syncline.predict import Prediction
from syncline.predict.diagnosis import CAUSES, lost_to
from syncline.predict.overlap import GATHERED
from syncline.records.run_record import BucketSpan, PhaseSpan
from syncline.report.charts import KINDS, Bar, Bars, Chart, Row, Section, stacked, time_bar
from syncline.report.inputs import PREDICT, Forecast, Inputs, ModelData, slowest_forward_and_update_s
from syncline.report.sentences import PLAIN_DDP, PLAN_NAMES, capitalized, share
from syncline.units import milliseconds_range, milliseconds_text, size_text

_KIND_OF_CAUSE = {"straggler": "waiting", "overhead": "own"}  # all other causes are communication
_DRAWN = 0.01  # part of a step from which a cause has a row of its own
_Activity = tuple[str, float, float, str]  # the kind of bar, start, end, and what the rank does


def step_section(inputs: Inputs, model: ModelData) -> Iterator[Section]:
    charts: list[Chart] = [*_measured(model), *([] if model.forecast is None else [step_by_cause(model.forecast)])]
    if charts:
        lead = "Time in which a rank does not compute is lost; the charts show to what, and how much."
        yield Section("step", "Where the time of a step goes", lead, charts, commands=inputs.again(*PREDICT))


def _measured(model: ModelData) -> Iterator[Bars]:
    if ways := dict.fromkeys(pace.way for _, record in model.records for pace in record.paces):
        rows = [_measured_row(way, model) for way in ways]
        columns = ("per step", "exposed", "quartiles", "hidden", "sent", "steps")
        note = "Without what the script does between steps. Bars show the median rank; whiskers are its quartiles."
        yield Bars("Forward, backward and exposed communication, per step", rows, columns, "measured", note=note)


def _measured_row(way: str, model: ModelData) -> Row:
    """Show the rank whose step time is the median, and for how long it waits for the slowest rank."""
    paces = [(rank, pace) for rank, record in model.records for pace in record.paces if pace.way == way]
    rank, median = sorted(paces, key=lambda entry: entry[1].step_s)[(len(paces) - 1) // 2]
    computing = {rank: pace.forward_s + pace.backward_s for rank, pace in paces}
    slowest = max(computing, key=lambda rank: computing[rank])
    waiting_s = min(median.exposed_s, computing[slowest] - statistics.median(computing.values()))
    parts = [
        ("compute", median.forward_s + median.backward_s, "forward and backward"),
        ("exposed", median.exposed_s - waiting_s, "exposed communication"),
        ("waiting", waiting_s, f"waiting for rank {slowest}, the slowest"),
    ]
    bars = stacked(((kind, s, f"{way}: {milliseconds_text(s)} of {what}") for kind, s, what in parts), rank=rank)
    step, exposed = milliseconds_text(median.step_s), milliseconds_text(median.exposed_s)
    plan = model.plans.get("the plan")
    if plan is not None and way in (*PLAN_NAMES, PLAIN_DDP):
        update_s = 0.0 if model.profile is None else model.profile.update_s  # which a run does not measure
        predicted_s = max(0.0, (plan.plain_s if way == PLAIN_DDP else plan.iteration_s) - update_s)
        tooltip = f"{way}: {milliseconds_text(predicted_s)} predicted, {step} measured"
        bars += (Bar("predicted", predicted_s, predicted_s, tooltip, {"predicted_s": predicted_s}),)
    hidden = [
        _covered_s([(bucket.start_s, bucket.end_s) for bucket in span.buckets], span.start_s, span.backward_end_s)
        for _, record in model.records
        for span in record.spans
        if span.way == way and span.buckets
    ]
    hidden_text = milliseconds_text(statistics.median(hidden)) if hidden else "–"
    quartiles = milliseconds_range(median.low_s, median.high_s)
    cells = (step, exposed, quartiles, hidden_text, size_text(median.sent_bytes), f"{median.steps:,}")
    return Row(way, bars, cells, quartiles=(median.low_s, median.high_s))


def step_by_cause(forecast: Forecast) -> Bars:
    """Show the first schedule's step cause by cause, with the numbers of the second beside it."""
    shown = dict(itertools.islice(forecast.predictions.items(), 2))  # narrow screens have room for two columns
    predictions, first = list(shown.values()), forecast.diagnosis.prediction
    rows = [_cause(KINDS["compute"], "compute", 0.0, [prediction.compute_s for prediction in predictions])]
    hidden = [
        sum(
            _covered_s([(span.start_s, span.end_s) for span in prediction.timeline.spans], *computing)
            for computing in ((0.0, prediction.backward_s), *prediction.timeline.forward)
        )
        for prediction in predictions
    ]
    if max(hidden) > 1e-9:
        end_s = min(first.compute_s, slowest_forward_and_update_s(forecast.profile, first)[0] + first.backward_s)
        tooltip = f"hidden behind computation: {milliseconds_text(hidden[0])} of communication that costs no time"
        bar = time_bar("hidden", hidden[0], tooltip, max(0.0, end_s - hidden[0]))
        rows.append(Row("hidden behind it", (bar,), tuple(f"({milliseconds_text(seconds)})" for seconds in hidden)))
    losses, small = [lost_to(prediction.losses) for prediction in predictions], [0.0] * len(predictions)
    parts, start_s = {"compute": first.compute_s, "exposed": 0.0, "waiting": 0.0, "own": 0.0}, first.compute_s
    for cause in dict.fromkeys(cause for lost in losses for cause in lost):
        seconds, kind = [lost.get(cause, 0.0) for lost in losses], _KIND_OF_CAUSE.get(cause, "exposed")
        parts[kind] += seconds[0]
        if any(s >= _DRAWN * made.iteration_s for s, made in zip(seconds, predictions, strict=True)):
            rows.append(_cause(CAUSES[cause], kind, start_s, seconds))
            start_s += seconds[0]
        else:
            small = [before + s for before, s in zip(small, seconds, strict=True)]
    if max(small) >= 5e-4 * first.iteration_s:
        rows.append(Row("other causes, too small to draw", cells=tuple(map(milliseconds_text, small))))
    whole = stacked(
        (kind, s, f"{KINDS[kind]}: {milliseconds_text(s)}, {share(s, first.iteration_s)} of the step")
        for kind, s in parts.items()
    )
    totals = tuple(milliseconds_text(prediction.iteration_s) for prediction in predictions)
    rows.append(Row("the whole step", whole, totals, strong=True))
    note = "Causes are removed one after the other and the step is simulated again, so they add up to the whole."
    return Bars(f"One step with {forecast.name}, cause by cause", rows, tuple(shown), forecast.source, note=note)


def _cause(name: str, kind: str, start_s: float, seconds: list[float]) -> Row:
    bar = time_bar(kind, seconds[0], f"{name}: {milliseconds_text(seconds[0])}", start_s)
    return Row(name, (bar,) if seconds[0] > 1e-9 else (), tuple(map(milliseconds_text, seconds)))


def _covered_s(spans: list[tuple[float, float]], low_s: float, high_s: float) -> float:
    """Return how much of the time from `low_s` to `high_s` at least one span covers."""
    total_s, reached_s = 0.0, low_s
    for start_s, end_s in sorted(spans):
        start_s, end_s = max(start_s, reached_s), min(end_s, high_s)
        if end_s > start_s:
            total_s, reached_s = total_s + end_s - start_s, end_s
    return total_s


def timeline_section(inputs: Inputs, model: ModelData) -> Iterator[Section]:
    charts = list(_measured_timelines(model))
    if (forecast := model.forecast) is not None:
        charts += [_predicted_timeline(forecast, *entry) for entry in forecast.predictions.items()]
    if charts:
        end_s = max(chart.end for chart in charts)
        charts = [msgspec.structs.replace(chart, common_end=end_s) for chart in charts]
        lead = "The first row is what the rank computes; below it are the buckets on their lanes. What is sent before "
        lead += "backward ends is hidden behind it; what is sent later makes the step longer."
        yield Section("timeline", "When gradients are sent", lead, charts, commands=inputs.again(*PREDICT))


def _measured_timelines(model: ModelData) -> Iterator[Bars]:
    """Show, for each schedule, the median of the steps whose buckets were recorded, on the first rank that has some."""
    shown = set()
    for rank, record in model.records:
        spans = [span for span in record.spans if span.buckets and span.way not in shown]
        for way in dict.fromkeys(span.way for span in spans):
            shown.add(way)
            candidates = sorted((s for s in spans if s.way == way), key=lambda span: span.end_s - span.start_s)
            span = candidates[len(candidates) // 2]
            activities = [
                ("compute", span.start_s, span.backward_s, "forward"),
                ("compute", span.backward_s, span.backward_end_s, "backward"),
                ("exposed", span.backward_end_s, span.end_s, "waiting for gradients"),
            ]
            caption = f"{capitalized(way)}, step {span.step} of rank {rank}: "
            caption += milliseconds_text(span.end_s - span.start_s)
            yield _timeline(caption, "measured", f"rank {rank}", activities, span.buckets, numbered=True)


def _predicted_timeline(forecast: Forecast, name: str, prediction: Prediction) -> Bars:
    """Draw the predicted step. Copies happen throughout a step; they are drawn at its end, which they delay."""
    profile, schedule, total_s = forecast.profile, prediction.schedule, prediction.iteration_s
    forward_s, update_s = slowest_forward_and_update_s(profile, prediction)
    # Backward starts at the zero of the predictor's clock.
    start_s, backward_s = -forward_s - prediction.losses.buffers_s, prediction.backward_s
    sent_s, end_s = max([backward_s, *prediction.timeline.end_s.values()]), start_s + total_s
    slowest_s = 0.0 if profile.slowest is None else max(0.0, profile.slowest.step_s - profile.step_s)
    late_s = max(0.0, profile.jitter_s - slowest_s) if prediction.ranks > 1 else 0.0
    if prediction.timeline.forward:
        start_s = 0.0
        activities = list(_until_next_forward_ends(prediction, update_s, total_s))
    else:
        activities = [
            ("exposed", start_s, -forward_s, "broadcasting buffers before forward"),
            ("compute", -forward_s, 0.0, "forward"),
            ("compute", 0.0, backward_s, "backward"),
            ("own", sent_s, end_s - update_s - late_s, "copies into and out of buckets"),
            ("waiting", end_s - update_s - late_s, end_s - update_s, "waiting for late ranks"),
            ("compute", end_s - update_s, end_s, "optimizer step"),
        ]
    phases: dict[tuple[int, int, str], list[PhaseSpan]] = {}
    for span in prediction.timeline.spans:
        level = "" if span.what == "work" else "world"
        phase = PhaseSpan(name=span.what, level=level, sent_bytes=0, start_s=span.start_s, end_s=span.end_s)
        half = span.what if prediction.timeline.forward else ""
        phases.setdefault((span.lane, int(span.bucket), half), []).append(phase)
    sizes = schedule.bucket_bytes(profile)
    buckets = []
    for (lane, index, half), parts in phases.items():
        first_s, last_s = min(part.start_s for part in parts), max(part.end_s for part in parts)
        times = {"ready_s": start_s, "start_s": first_s, "end_s": last_s}
        nbytes, used, phased = sizes[index], half or schedule.bucket_exchanges[index][0], tuple(parts)
        buckets.append(BucketSpan(bucket=index, lane=lane, bytes=nbytes, exchange=used, phases=phased, **times))
    caption = f"{capitalized(name)}: {milliseconds_text(total_s)} per step"
    return _timeline(caption, forecast.source, "computing", activities, buckets, numbered=schedule.lanes > 1)


def _until_next_forward_ends(prediction: Prediction, update_s: float, total_s: float) -> Iterator[_Activity]:
    """Yield what a rank does from the start of backward on, if weights are gathered behind the next forward."""
    backward_s, forward = prediction.backward_s, prediction.timeline.forward
    yield "compute", 0.0, backward_s, "backward"
    reduced = [span.end_s for span in prediction.timeline.spans if span.what != GATHERED]
    now_s = max([backward_s, *reduced])
    yield "exposed", backward_s, now_s, "waiting for gradients"
    yield "compute", now_s, now_s + update_s, "optimizer step"
    now_s += update_s
    for start_s, end_s in forward:
        yield "exposed", now_s, start_s, "waiting for weights"
        yield "compute", start_s, end_s, "next forward"
        now_s = end_s
    yield "waiting", now_s, max(now_s, total_s), "buffers, and waiting for late ranks"


def _timeline(
    caption: str, source: str, name: str, activities: Sequence[_Activity], buckets: Sequence[BucketSpan], numbered: bool
) -> Bars:
    """Draw a step, which starts with the first activity."""
    zero_s, total_s = activities[0][1], activities[-1][2] - activities[0][1]
    backward_end_s = next(end_s for _, _, end_s, what in activities if what == "backward") - zero_s
    hiding = [(0.0, backward_end_s)]
    hiding += [(start_s - zero_s, end_s - zero_s) for _, start_s, end_s, what in activities if what == "next forward"]
    computing = []
    for kind, start_s, end_s, what in activities:
        if end_s - start_s > 1e-3 * total_s:
            start_s, end_s = start_s - zero_s, end_s - zero_s
            data = {"start_s": start_s, "end_s": end_s}
            computing.append(Bar(kind, start_s, end_s, f"{what}, {_from_to(start_s, end_s)}", data, what))
    rows = [Row(name, tuple(computing))]
    for lane, in_lane in itertools.groupby(sorted(buckets, key=lambda b: (b.lane, b.start_s)), lambda b: b.lane):
        bars = tuple(_bucket_bars(in_lane, zero_s, hiding))
        rows.append(Row(f"lane {lane}" if numbered else "sending", bars))
    return Bars(caption, rows, source=source, limit=(backward_end_s, "backward ends"), compact=True)


def _bucket_bars(buckets: Iterator[BucketSpan], zero_s: float, hiding: Sequence[tuple[float, float]]) -> Iterator[Bar]:
    """Put buckets that overlap on lines of their own; a bar has another colour where computation hides it."""
    free_from: list[float] = []
    for bucket in buckets:
        number = str(bucket.bucket)
        ready_s, start_s, end_s = (max(0.0, at - zero_s) for at in (bucket.ready_s, bucket.start_s, bucket.end_s))
        line = next((i for i, free_s in enumerate(free_from) if free_s <= start_s + 1e-9), len(free_from))
        free_from[line : line + 1] = [end_s]
        ready = f"ready at {milliseconds_text(ready_s)}, " if ready_s else ""
        tooltip = f"bucket {number}: {size_text(bucket.bytes)} through {bucket.exchange}, {ready}"
        tooltip += _from_to(start_s, end_s)
        data: dict[str, str | float] = {"bucket": number, "bytes": bucket.bytes, "start_s": start_s, "end_s": end_s}
        parts = [
            Bar(kind, from_s, until_s, tooltip, data, line=line)
            for kind, from_s, until_s in _split(start_s, end_s, hiding)
        ]
        longest = max(parts, key=lambda bar: bar.end - bar.start)
        yield msgspec.structs.replace(longest, label=number)
        yield from (bar for bar in parts if bar is not longest and bar.end - bar.start > 1e-9)
        for phase in bucket.phases:
            own_s = phase.end_s - phase.start_s
            if not phase.level and own_s > 1e-9:
                tooltip = f"bucket {number}: {milliseconds_text(own_s)} of the exchange’s own work"
                data = {"bucket": number, "own_s": own_s}
                start_s, end_s = phase.start_s - zero_s, phase.end_s - zero_s
                yield Bar("own", start_s, end_s, tooltip, data, line=line, inner=True)


def _split(start_s: float, end_s: float, hiding: Sequence[tuple[float, float]]) -> Iterator[tuple[str, float, float]]:
    """Yield the parts of a transfer that computation hides, and those that it does not."""
    now_s = start_s
    for from_s, until_s in hiding:
        first_s, last_s = max(from_s, now_s), min(until_s, end_s)
        if last_s > first_s:
            if first_s > now_s:
                yield "exposed", now_s, first_s
            yield "hidden", first_s, last_s
            now_s = last_s
    if now_s < end_s or now_s == start_s:
        yield "exposed", now_s, end_s


def _from_to(start_s: float, end_s: float) -> str:
    took, start, end = map(milliseconds_text, (end_s - start_s, start_s, end_s))
    return f"from {start} to {end}: {took}"


def remedies_section(inputs: Inputs, model: ModelData) -> Iterator[Section]:
    if model.forecast is not None and model.forecast.diagnosis.remedies:
        lead = "Each change was simulated; those that save less than 2 % are left out."
        charts, reproduce = [remedies(model.forecast)], inputs.again(*PREDICT)
        yield Section("remedies", "What would make it faster", lead, charts, commands=reproduce)


def remedies(forecast: Forecast) -> Bars:
    """Show every remedy that saves something, simulated."""
    now, time = forecast.diagnosis.prediction, milliseconds_text(forecast.diagnosis.prediction.iteration_s)
    bar = time_bar("plain", now.iteration_s, f"now, {forecast.name}: {time}")
    rows = [Row(f"now: {forecast.name}", (bar,), (time, "", f"{now.scaling:.0%}", ""))]
    for remedy in forecast.diagnosis.remedies:
        seconds, scaling = remedy.prediction.iteration_s, f"{remedy.prediction.scaling:.0%}"
        step, saved = milliseconds_text(seconds), milliseconds_text(now.iteration_s - seconds)
        kind = "hardware" if remedy.hardware else "lossy" if remedy.lossy else "change"
        caveat = f"; {KINDS[kind]}" if kind != "change" else ""
        bar = time_bar(kind, seconds, f"{remedy.what}: {step} per step, {saved} less{caveat}")
        rows.append(Row(remedy.what, (bar,), (step, saved, scaling, kind if caveat else "")))
    columns, limit = ("per step", "saves", "scaling", ""), (now.compute_s, "computation alone")
    note = "In order of what they save; changes of what is applied in a step come last, however much they save."
    return Bars("A step with one thing changed", rows, columns, forecast.source, limit, note=note)
