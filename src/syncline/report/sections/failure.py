"""A run that failed: which rank caused it, what each rank was doing, and what the others saw."""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Iterator, Sequence

from syncline.records.failure_report import Event, FailureReport
from syncline.records.postmortem import Postmortem
from syncline.records.run_record import RunRecord
from syncline.report import sentences
from syncline.report.charts import Bar, Bars, Chart, Row, Section, Table
from syncline.report.inputs import Inputs
from syncline.units import count_text, duration_text, ranks_text, size_text

_MOST_RANKS, _MOST_MISSING = 64, 16  # rows of the table, and those of ranks without a failure report
_MOST_ROWS, _MOST_LANES, _MOST_EVENTS = 16, 4, 400  # of the timeline
_CONTEXT = 0.5
"""How long before the failed exchanges the timeline begins, as a part of how long they lasted."""
_WRITES_NONE = "–"


def failure_section(inputs: Inputs) -> Iterator[Section]:
    failure = inputs.failure
    if failure is None and not any(map(sentences.has_failed, inputs.runs)):
        return
    charts: list[Chart]
    if failure is None:
        lead, charts = sentences.unfinished(inputs.runs), [_states(inputs.runs)]
        points = ["No rank wrote a failure report: a process that is killed cannot write one."]
    else:
        lead, _, *points = [*sentences.failure(failure), ""]  # the second is at the top of the page, too
        points = list(filter(None, points))
        charts = [_what_ranks_saw(failure, inputs.runs), *_timeline(failure)]
    folder = next(iter(inputs.files.get("failure", ())), "")
    commands = [("Read the last events", f"syncline failure {shlex.quote(folder)} --events 20")] if folder else []
    yield Section("failure", "The failure", lead, charts, points, commands)


def _states(runs: Sequence[RunRecord]) -> Table:
    rows = [(f"{run.rank}", run.host, f"{run.seconds:.0f} s", _short(run.state)) for run in runs[:_MOST_RANKS]]
    return Table("How each rank ended", ("rank", "host", "after", "state"), rows, "recorded")


def _what_ranks_saw(failure: Postmortem, runs: Sequence[RunRecord]) -> Table:
    """List the ranks by the time of their failure; ranks without a failure report come first."""
    began, run_of = min(report.moment() for report in failure.reports), {run.rank: run for run in runs}
    rows: list[tuple[str, ...]] = []
    for rank in failure.missing[:_MOST_MISSING]:
        run = run_of.get(rank)
        state = "no failure report" + ("" if run is None else f"; its record says: {_short(run.state)}")
        rows.append((f"{rank}", "" if run is None else run.host, _WRITES_NONE, "", state, "", ""))
    for report in sorted(failure.reports, key=FailureReport.moment):
        after_s = (report.moment() - began).total_seconds()
        suspects = "; ".join(f"rank {suspect.rank}: {suspect.why}" for suspect in report.suspects[:3])
        more = f" and {len(report.suspects) - 3} more" if len(report.suspects) > 3 else ""
        step = _WRITES_NONE if report.step is None else f"{report.step:,}"
        when = "first" if after_s < 5e-4 else f"+{duration_text(after_s)}"
        error = _short(report.error)
        rows.append((f"{report.rank}", report.host, step, when, error, _waited_for(report), suspects + more))
    date = began.astimezone(datetime.timezone.utc).isoformat(" ", "milliseconds").removesuffix("+00:00")
    note = "Times of ranks on different hosts are only as close as the clocks of these hosts."
    if hidden := len(failure.missing) + len(failure.reports) - len(rows[:_MOST_RANKS]):
        note += f" {count_text(hidden, 'more rank')} not shown."
    columns = ("rank", "host", "step", "when", "error", "was waiting for", "suspects")
    return Table(f"What each rank saw; the first failed at {date} UTC", columns, rows[:_MOST_RANKS], "recorded", note)


def _waited_for(report: FailureReport) -> str:
    """Say what the rank was waiting for: the last collective that it had started, and since when."""
    if not report.pending:
        return "" if report.step is not None else report.where
    oldest = max(report.pending, key=lambda pending: pending.age_s)
    text = f"bucket {oldest.bucket} of step {oldest.step}, {size_text(oldest.bytes)}"
    text += f", {oldest.exchange}" if oldest.exchange else ""
    if (last := _last_collective(report.events, (oldest.step, oldest.bucket))) is not None:
        text += f", in {last.what}" + (f" ({last.level})" if last.level else "")
    more = f", and {count_text(len(report.pending) - 1, 'more bucket')}" if len(report.pending) > 1 else ""
    return f"{text}, for {duration_text(oldest.age_s)}{more}"


def _last_collective(events: Sequence[Event], bucket: tuple[int, int]) -> Event | None:
    others = ("ready", "start", "end", "failed")
    known = (event for event in reversed(events) if event.what not in others and (event.step, event.bucket) == bucket)
    return next(known, None)


def _timeline(failure: Postmortem) -> Iterator[Bars]:
    """Show the last exchanges of each rank on the ranks' wall clocks, up to the moment when each failed."""
    began = min(report.moment() for report in failure.reports)
    spans: dict[int, list[tuple[float, float, Event, bool]]] = {}
    for report in failure.reports[:_MOST_ROWS]:
        failed_s = (report.moment() - began).total_seconds()
        if exchanges := list(_exchanges(report.events[-_MOST_EVENTS:])):
            spans[report.rank] = [
                (failed_s - event.before_s, failed_s - before_s, event, ended) for event, before_s, ended in exchanges
            ]
    unfinished = [span for of_rank in spans.values() for span in of_rank if not span[3]]
    if not unfinished:
        return
    first_s, end_s = min(span[0] for span in unfinished), max(span[1] for span in unfinished)
    zero_s = max(first_s - _CONTEXT * (end_s - first_s), min(span[0] for of_rank in spans.values() for span in of_rank))
    rows = []
    for rank, of_rank in spans.items():
        bars, lines = [], sorted({event.lane for _, _, event, _ in of_rank})[:_MOST_LANES]
        for start_s, stop_s, event, ended in of_rank:
            if stop_s > zero_s and event.lane in lines:
                start_s, stop_s = max(0.0, start_s - zero_s), stop_s - zero_s
                kind, what = ("ended", "exchanged in") if ended else ("failed", "not exchanged after")
                tooltip = f"rank {rank}, step {event.step}, bucket {event.bucket}, lane {event.lane}: {what} "
                tooltip += duration_text(stop_s - start_s)
                data: dict[str, str | float] = {"rank": rank, "step": event.step, "bucket": event.bucket}
                bars.append(Bar(kind, start_s, stop_s, tooltip, data, line=lines.index(event.lane)))
        rows.append(Row(f"rank {rank}", tuple(bars)))
    note = "Of each bucket, from the start of its exchange to its end, or to the failure; one line per lane."
    if absent := [rank for rank in failure.missing if rank not in spans]:
        note += f" Nothing is known of {ranks_text(absent, 8)}."
    caption = f"The last {duration_text(end_s - zero_s)} of the ranks that wrote failure reports"
    yield Bars(caption, rows, source="recorded", note=note, compact=True)


def _exchanges(events: Sequence[Event]) -> Iterator[tuple[Event, float, bool]]:
    """Yield the start of each exchange, how long before the failure it ended, and whether it succeeded."""
    started: dict[tuple[int, int, int], Event] = {}
    for event in events:
        bucket = (event.lane, event.step, event.bucket)
        if event.bucket >= 0 and event.what == "start":
            started[bucket] = event
        elif event.what in ("end", "failed") and (start := started.pop(bucket, None)) is not None:
            yield start, event.before_s, event.what == "end"
    yield from ((start, 0.0, False) for start in started.values())


def _short(text: str, most: int = 160) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
