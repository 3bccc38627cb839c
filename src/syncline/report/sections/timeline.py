"""When gradients are sent: one step in time, measured and predicted, with its buckets on their lanes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from syncline.predict import Prediction
from syncline.records.run_record import StepSpan
from syncline.report.charts import Bar, Bars, Row, Section
from syncline.report.forecast import Forecast, slowest_forward_and_update_s
from syncline.report.inputs import PREDICT, Inputs, ModelData
from syncline.report.sentences import capitalized
from syncline.units import milliseconds_text, size_text


def timeline_section(inputs: Inputs, model: ModelData) -> Iterator[Section]:
    charts = list(_measured_timelines(model))
    if (forecast := model.forecast) is not None:
        charts += [_predicted(forecast, name, prediction) for name, prediction in forecast.predictions.items()]
    if charts:
        end_s = max(chart.end for chart in charts)
        yield Section(
            "timeline",
            "When gradients are sent",
            "The first row is what the rank computes; below it are the buckets on their lanes. What is sent before "
            "backward ends is hidden behind it; what is sent later makes the step longer.",
            [dataclasses.replace(chart, common_end=end_s) for chart in charts],
            commands=inputs.again(*PREDICT),
        )


@dataclass(frozen=True)
class _Bucket:
    number: str
    nbytes: int
    exchange: str
    start_s: float
    end_s: float
    own: tuple[tuple[float, float], ...] = ()
    """When the exchange's own work ran."""
    ready: str = ""
    """When its last gradient was ready, as text."""


def _measured_timelines(model: ModelData) -> Iterator[Bars]:
    """Show, for each schedule, the median of the steps whose buckets were recorded, on the first rank that has some."""
    shown = set()
    for rank, record in model.records:
        spans = [span for span in record.spans if span.buckets and span.way not in shown]
        for way in dict.fromkeys(span.way for span in spans):
            candidates = sorted((s for s in spans if s.way == way), key=lambda span: span.end_s - span.start_s)
            shown.add(way)
            yield _measured(way, rank, candidates[len(candidates) // 2])


def _measured(way: str, rank: int, span: StepSpan) -> Bars:
    zero_s = span.start_s
    backward_s, backward_end_s, end_s = (at - zero_s for at in (span.backward_s, span.backward_end_s, span.end_s))
    lanes: dict[str, list[_Bucket]] = {}
    for bucket in sorted(span.buckets, key=lambda bucket: (bucket.lane, bucket.start_s)):
        lanes.setdefault(f"lane {bucket.lane}", []).append(
            _Bucket(
                str(bucket.bucket),
                bucket.bytes,
                bucket.exchange,
                max(0.0, bucket.start_s - zero_s),
                max(0.0, bucket.end_s - zero_s),
                tuple((part.start_s - zero_s, part.end_s - zero_s) for part in bucket.phases if not part.level),
                f"ready at {milliseconds_text(max(0.0, bucket.ready_s - zero_s))}, ",
            )
        )
    activities = [
        ("compute", 0.0, backward_s, "forward"),
        ("compute", backward_s, backward_end_s, "backward"),
        ("exposed", backward_end_s, end_s, "waiting for gradients"),
    ]
    caption = f"{capitalized(way)}, step {span.step} of rank {rank}: {milliseconds_text(end_s)}"
    return _timeline(caption, "measured", f"rank {rank}", activities, lanes, backward_end_s)


def _predicted(forecast: Forecast, name: str, prediction: Prediction) -> Bars:
    """Draw the predicted step. Copies happen throughout a step; they are drawn at its end, which they delay."""
    profile, schedule, total_s = forecast.profile, prediction.schedule, prediction.iteration_s
    forward_s, update_s = slowest_forward_and_update_s(profile, prediction)
    buffers_s = prediction.losses.buffers_s
    backward_s = buffers_s + forward_s  # when backward starts, the zero of the predictor's clock
    backward_end_s = backward_s + prediction.backward_s
    sent_s = backward_s + max([prediction.backward_s, *prediction.timeline.end_s.values()])
    slowest_s = 0.0 if profile.slowest is None else max(0.0, profile.slowest.step_s - profile.step_s)
    late_s = max(0.0, profile.jitter_s - slowest_s) if prediction.ranks > 1 else 0.0
    activities = [
        ("exposed", 0.0, buffers_s, "broadcasting buffers before forward"),
        ("compute", buffers_s, backward_s, "forward"),
        ("compute", backward_s, backward_end_s, "backward"),
        ("own", sent_s, total_s - update_s - late_s, "copies into and out of buckets"),
        ("waiting", total_s - update_s - late_s, total_s - update_s, "waiting for late ranks"),
        ("compute", total_s - update_s, total_s, "optimizer step"),
    ]
    sizes = schedule.bucket_bytes(profile)
    phases: dict[tuple[int, int], list[tuple[str, float, float]]] = {}
    for span in prediction.timeline.spans:
        times = (span.what, backward_s + span.start_s, backward_s + span.end_s)
        phases.setdefault((span.lane, int(span.bucket)), []).append(times)
    lanes: dict[str, list[_Bucket]] = {}
    for (lane, index), parts in sorted(phases.items()):
        lanes.setdefault(f"lane {lane}" if schedule.lanes > 1 else "sending", []).append(
            _Bucket(
                str(index),
                sizes[index],
                schedule.exchange_of(index)[0],
                min(start_s for _, start_s, _ in parts),
                max(end_s for _, _, end_s in parts),
                tuple((start_s, end_s) for what, start_s, end_s in parts if what == "work"),
            )
        )
    caption = f"{capitalized(name)}: {milliseconds_text(total_s)} per step"
    return _timeline(caption, forecast.source, "computing", activities, lanes, backward_end_s)


def _timeline(
    caption: str,
    source: str,
    name: str,
    activities: Sequence[tuple[str, float, float, str]],
    lanes: Mapping[str, Sequence[_Bucket]],
    backward_end_s: float,
) -> Bars:
    total_s = max([end_s for _, _, end_s, _ in activities])
    computing = tuple(
        Bar(kind, start_s, end_s, f"{what}, {_from_to(start_s, end_s)}", {"start_s": start_s, "end_s": end_s}, what)
        for kind, start_s, end_s, what in activities
        if end_s - start_s > 1e-3 * total_s
    )
    rows = [Row(name, computing)]
    rows += [Row(lane, tuple(_bucket_bars(buckets, backward_end_s))) for lane, buckets in lanes.items()]
    return Bars(caption, rows, source=source, limit=(backward_end_s, "backward ends"), compact=True)


def _bucket_bars(buckets: Sequence[_Bucket], backward_end_s: float) -> Iterator[Bar]:
    """Put buckets that overlap on lines of their own; a bar changes colour where backward ends."""
    free_from: list[float] = []
    for bucket in buckets:
        number, start_s, end_s = bucket.number, bucket.start_s, bucket.end_s
        line = next((i for i, free_s in enumerate(free_from) if free_s <= start_s + 1e-9), len(free_from))
        free_from[line : line + 1] = [end_s]
        through = f"{size_text(bucket.nbytes)} through {bucket.exchange}"
        tooltip = f"bucket {number}: {through}, {bucket.ready}{_from_to(start_s, end_s)}"
        data: dict[str, str | float] = {"bucket": number, "bytes": bucket.nbytes, "start_s": start_s, "end_s": end_s}
        split_s = min(max(start_s, backward_end_s), end_s)
        hidden = Bar("hidden", start_s, split_s, tooltip, data, line=line)
        exposed = Bar("exposed", split_s, end_s, tooltip, data, line=line)
        longer, shorter = (hidden, exposed) if split_s - start_s >= end_s - split_s else (exposed, hidden)
        yield dataclasses.replace(longer, label=number)
        if shorter.end - shorter.start > 1e-9:
            yield shorter
        for own_start_s, own_end_s in bucket.own:
            own_s = own_end_s - own_start_s
            if own_s > 1e-9:
                tooltip = f"bucket {number}: {milliseconds_text(own_s)} of the exchange’s own work"
                data = {"bucket": number, "own_s": own_s}
                yield Bar("own", own_start_s, own_end_s, tooltip, data, line=line, inner=True)


def _from_to(start_s: float, end_s: float) -> str:
    took, start, end = map(milliseconds_text, (end_s - start_s, start_s, end_s))
    return f"from {start} to {end}: {took}"
