"""What each rank spends its time on: computation, waiting for slower ranks, and communication."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from syncline.records.run_record import ModelRecord, StepSpan
from syncline.report.charts import Bars, Row, Section, stacked
from syncline.report.inputs import Inputs, ModelData
from syncline.report.sentences import last_pace, share
from syncline.units import count_text, milliseconds_text

_FEWEST_STEPS = 5
_MOST_RANKS = 32  # rows of the chart: the ranks that others wait for come first
_WORTH_SAYING = 0.03  # part of the time that is lost to waiting


class RankTimes(msgspec.Struct, frozen=True):
    """Mean seconds per step of one rank. Together they are the whole time of the training."""

    compute_s: float  # forward and backward
    between_s: float
    waiting_s: float  # until the slowest rank of a step has computed its gradients
    communicating_s: float  # the rest of the exposed communication

    @property
    def whole_s(self) -> float:
        return self.compute_s + self.between_s + self.waiting_s + self.communicating_s


def ranks_section(inputs: Inputs, model: ModelData) -> Iterator[Section]:
    known = dict(model.records)
    if len(known) < 2 or (last := last_pace(model.records[0][1])) is None:
        return
    way = last.way
    times, steps = rank_times(known, way)
    if not times:
        return
    rows = sorted(times.items(), key=lambda entry: (entry[1].waiting_s, entry[0]))[:_MOST_RANKS]
    note = f"Means of {count_text(steps, 'step')} with {way}, on each rank’s own clock. "
    note += "All ranks end a step together, so a rank waits for as long as the slowest one takes longer to compute."
    if hidden := len(times) - len(rows):
        note += f" {count_text(hidden, 'more rank')} not shown, which wait longer."
    columns = ("per step", "waiting", "computing", "communicating", "between steps")
    chart = Bars("Time per step of each rank", [_row(*row) for row in rows], columns, "measured", note=note)
    yield Section("ranks", "What each rank spends its time on", _verdict(times), [chart], commands=inputs.again())


def rank_times(known: Mapping[int, ModelRecord], way: str) -> tuple[dict[int, RankTimes], int]:
    """Return the times of each rank over those steps of a method that all ranks recorded, and the number of steps."""
    spans = {rank: {span.step: span for span in record.spans if span.way == way} for rank, record in known.items()}
    common = sorted(set.intersection(*(set(of_rank) for of_rank in spans.values())))[1:]  # the first one settles
    between_s = {
        rank: max(0.0, next((pace.between_s for pace in record.paces if pace.way == way), 0.0))
        for rank, record in known.items()
    }
    if len(common) < _FEWEST_STEPS:
        return {}, 0
    waiting_s: dict[int, list[float]] = {rank: [] for rank in known}
    for step in common:
        own_s = {rank: _computing_s(of_rank[step]) + between_s[rank] for rank, of_rank in spans.items()}
        slowest_s = max(own_s.values())
        for rank, of_rank in spans.items():
            span = of_rank[step]
            waiting_s[rank].append(min(span.end_s - span.backward_end_s, slowest_s - own_s[rank]))
    times = {}
    for rank, of_rank in spans.items():
        waited_s = statistics.fmean(waiting_s[rank])
        exposed_s = statistics.fmean(of_rank[step].end_s - of_rank[step].backward_end_s for step in common)
        compute_s = statistics.fmean(_computing_s(of_rank[step]) for step in common)
        times[rank] = RankTimes(compute_s, between_s[rank], waited_s, exposed_s - waited_s)
    return times, len(common)


def _computing_s(span: StepSpan) -> float:
    return span.backward_end_s - span.start_s


def _verdict(times: Mapping[int, RankTimes]) -> str:
    lost = {rank: of_rank.waiting_s / of_rank.whole_s for rank, of_rank in times.items() if of_rank.whole_s}
    mean = statistics.fmean(lost.values()) if lost else 0.0
    if mean < _WORTH_SAYING:
        return f"The ranks lose {mean:.0%} of their time to waiting for slower ranks."
    waits_least = min(lost, key=lambda rank: lost[rank])
    longest = max(lost, key=lambda rank: lost[rank])
    text = f"The ranks lose {mean:.0%} of their time to waiting for slower ranks: rank {longest} {lost[longest]:.0%}, "
    others = [rank for rank in lost if rank != waits_least]
    if others and statistics.fmean(lost[rank] for rank in others) > 2 * lost[waits_least] + _WORTH_SAYING:
        return f"{text}and rank {waits_least}, for which the others wait, {lost[waits_least]:.0%}."
    return f"{text}rank {waits_least} {lost[waits_least]:.0%}. None of them is always the slowest."


def _row(rank: int, times: RankTimes) -> Row:
    whole_s = times.whole_s
    parts: Sequence[tuple[str, float, str]] = (
        ("compute", times.compute_s, "computing"),
        ("between", times.between_s, "between steps"),
        ("waiting", times.waiting_s, "waiting for slower ranks"),
        ("exposed", times.communicating_s, "communicating"),
    )
    bars = stacked(
        ((kind, s, f"rank {rank}: {milliseconds_text(s)} {what}, {share(s, whole_s)}") for kind, s, what in parts),
        rank=rank,
    )
    shares = (times.waiting_s, times.compute_s, times.communicating_s, times.between_s)
    return Row(f"rank {rank}", bars, (milliseconds_text(whole_s), *(share(part, whole_s) for part in shares)))
