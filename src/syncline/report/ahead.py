"""What could be: remedies, the plan and what it was chosen from, more hosts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from syncline.predict import Prediction
from syncline.predict.diagnosis import Remedy
from syncline.records.bench_result import BenchResult
from syncline.records.plan import Plan
from syncline.report import commands, figures, scales
from syncline.report.blocks import (
    KINDS,
    Block,
    Cell,
    Dot,
    Lines,
    Section,
    Segment,
    Series,
    Table,
    Track,
    Tracks,
    present,
)
from syncline.report.outlook import Curve, Outlook
from syncline.report.story import Story, Subject

_MOST_REMEDIES, _MOST_ALTERNATIVES, _MOST_BUCKETS = 12, 14, 40
_SIMILAR = 0.03
_STEEP = 6
"""Times a step's computation, from which on an axis counts in powers."""


def remedies_section(outlook: Outlook, story: Story) -> Section | None:
    """Every remedy that saves something, simulated."""
    found = outlook.diagnosis
    if not found.remedies:
        return None
    now_s = found.prediction.iteration_s
    says = f"as it is, {outlook.first[0]}: {figures.step(now_s)}"
    rows = [
        Track(
            f"as it is: {outlook.first[0]}",
            (Segment("plain", 0.0, now_s, says, data={"seconds": now_s}),),
            figures=(figures.step(now_s), "", f"{found.prediction.scaling:.0%}", ""),
        ),
        *(_remedy(one, now_s) for one in found.remedies[:_MOST_REMEDIES]),
    ]
    return Section(
        "remedies",
        "What would change it",
        "Each of these was simulated before it was named; what saves less than 2 % is left out.",
        (
            Tracks(
                caption="A step, if one thing were different",
                rows=tuple(rows),
                end=now_s,
                columns=("per step", "saves", "scaling", ""),
                source=outlook.source,
                line=(found.prediction.compute_s, "computation alone"),
                legend=present(rows, ("plain", "change", "lossy", "hardware")),
            ),
        ),
        how=commands.of_prediction(story),
    )


def _remedy(one: Remedy, now_s: float) -> Track:
    seconds = one.prediction.iteration_s
    saved = f"{figures.step(now_s - seconds)}"
    note = "hardware" if one.hardware else "lossy" if one.lossy else ""
    says = f"{one.what}: {figures.step(seconds)} per step, {saved} less{note and f'; {KINDS[note]}'}"
    mark = Segment(note or "change", 0.0, seconds, says, data={"seconds": seconds})
    return Track(one.what, (mark,), figures=(figures.step(seconds), saved, f"{one.prediction.scaling:.0%}", note))


def plan_sections(story: Story, subject: Subject, outlook: Outlook | None) -> Iterator[Section]:
    for number, (name, plan) in enumerate(subject.plans.items()):
        lead = plan.reason
        again = outlook.predictions.get(name) if outlook is not None else None
        if again is not None and plan.iteration_s and abs(again.iteration_s / plan.iteration_s - 1) > _SIMILAR:
            lead += (
                f" It was made with other measurements, and expects {figures.step(plan.iteration_s)}; with those on "
                f"this page it would take {figures.step(again.iteration_s)}."
            )
        blocks: list[Block] = [_alternatives(plan)] if plan.alternatives else []
        if not plan.nothing:
            blocks.append(_buckets(plan))
        yield Section(
            "plan" if number == 0 else f"plan-{number + 1}",
            figures.capital(name),
            lead,
            tuple(blocks),
            how=(*commands.of_plan(story), *_applied(story, plan)),
        )


def _applied(story: Story, plan: Plan) -> commands.How:
    path = next(iter(story.files.get("plan", ())), None)
    return (("Apply it", f'model = syncline.wrap(net, "{path}")'),) if path is not None and not plan.nothing else ()


def _alternatives(plan: Plan) -> Tracks:
    nothing, *others = plan.alternatives
    rows = []
    if not plan.nothing:
        says = f"the plan: {figures.step(plan.iteration_s)}, expected between {_range(plan)}"
        mark = Segment("chosen", 0.0, plan.iteration_s, says, data={"seconds": plan.iteration_s})
        cells = _cells(plan, plan.iteration_s, plan.lossless)
        rows.append(Track("the plan", (mark,), (), (plan.low_s, plan.high_s), cells, strong=True))
    for other in [nothing, *others[:_MOST_ALTERNATIVES]]:
        says = f"{other.name}: {figures.step(other.iteration_s)} per step{'' if other.lossless else ', lossy'}"
        kind = "plain" if other is nothing else "other"
        mark = Segment(kind, 0.0, other.iteration_s, says, data={"seconds": other.iteration_s})
        cells = _cells(plan, other.iteration_s, other.lossless)
        rows.append(Track(other.name, (mark,), figures=cells, strong=plan.nothing and other is nothing))
    left = len(others) - _MOST_ALTERNATIVES
    return Tracks(
        caption="What it was chosen from, and what each would take per step",
        rows=tuple(rows),
        end=max([plan.high_s if not plan.nothing else 0.0, *(mark.end for row in rows for mark in row.segments)]),
        columns=("per step", "faster", "scaling", ""),
        source="predicted",
        line=(plan.compute_s, "computation alone"),
        legend=present(rows, ("chosen", "plain", "other")),
        note=f"{figures.count(left, 'slower one')} not drawn." if left > 0 else "",
    )


def _cells(plan: Plan, seconds: float, lossless: bool) -> tuple[str, ...]:
    times = f"{plan.plain_s / seconds:.2f}×" if seconds else "–"
    return figures.step(seconds), times, figures.share(plan.compute_s, seconds), "" if lossless else "lossy"


def _range(plan: Plan) -> str:
    return f"{figures.step(plan.low_s)} and {figures.step(plan.high_s)}"


def _buckets(plan: Plan) -> Table:
    sizes = {gradient.name: gradient.bytes for gradient in plan.gradients}
    rows = tuple(
        (
            Cell(str(index)),
            Cell(str(bucket.lane)),
            Cell(figures.size(sum(sizes[name] for name in bucket.parameters))),
            Cell(figures.exchange(exchange)),
            Cell(_first_and_last(bucket.parameters)),
        )
        for index, (bucket, exchange) in enumerate(zip(plan.buckets, plan.exchanges, strict=True))
    )
    left = len(rows) - _MOST_BUCKETS
    return Table(
        f"Its {figures.count(len(rows), 'bucket')} on {figures.count(plan.lanes, 'lane')}",
        ("bucket", "lane", "size", "exchange", "gradients"),
        rows[:_MOST_BUCKETS],
        note=f"{figures.count(left, 'bucket')} more." if left > 0 else "",
    )


def _first_and_last(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)})"


def scaling_section(outlook: Outlook, story: Story, subject: Subject) -> Section | None:
    if not outlook.curves:
        return None
    measured = [*_benched(outlook, story), *_ran(subject)]
    counts = [one.hosts for curve in outlook.curves for one in curve.predictions]
    highest = [one.high_s for curve in outlook.curves for one in curve.predictions]
    compute_s = outlook.diagnosis.prediction.compute_s
    x = scales.doubling("hosts", [*counts, *(round(dot.x) for dot in measured)])
    alone = Series("computation alone", line=((x.low, compute_s), (x.high, compute_s)), dashed=True, hue=7)
    series = [alone, *(_curve(curve, hue) for hue, curve in enumerate(outlook.curves))]
    if measured:
        series.append(Series("measured", dots=tuple(measured), hue=6))
    drawn = [compute_s, *highest, *(dot.y for dot in measured)]
    steep = compute_s > 0 and max(drawn) > _STEEP * compute_s
    y = scales.logarithmic("per step, in powers", drawn, figures.fine) if steep else scales.duration("per step", drawn)
    last = outlook.curves[0].predictions[-1]
    lead = (
        f"On {figures.count(last.hosts, 'host')}, a step with {outlook.curves[0].name} is predicted to take "
        f"{figures.step(last.iteration_s)}, between {figures.step(last.low_s)} and {figures.step(last.high_s)}: "
        f"scaling {last.scaling:.0%}."
    )
    return Section(
        "scaling",
        "On more hosts",
        lead,
        (
            Lines(
                "A step’s time over the number of hosts",
                x,
                y,
                tuple(series),
                outlook.source,
                note="Bands: the network’s figures at the ends of their intervals, and on more hosts than were "
                "measured start-ups that grow as a tree’s or as a ring’s.",
            ),
            _scaling_table(outlook.curves),
        ),
        how=commands.of_prediction(story),
    )


def _curve(curve: Curve, hue: int) -> Series:
    return Series(
        curve.name,
        line=tuple((float(one.hosts), one.iteration_s) for one in curve.predictions),
        dots=tuple(
            Dot(
                float(one.hosts),
                one.iteration_s,
                f"{curve.name} on {figures.count(one.hosts, 'host')}: {figures.step(one.iteration_s)} per step, "
                f"{figures.step(one.low_s)} to {figures.step(one.high_s)}; scaling {one.scaling:.0%}",
            )
            for one in curve.predictions
        ),
        band=tuple((float(one.hosts), one.low_s, one.high_s) for one in curve.predictions),
        hue=hue,
    )


def _scaling_table(curves: Sequence[Curve]) -> Table:
    first = curves[0]
    return Table(
        f"The same in figures: {first.name}" if len(curves) == 1 else "The same in figures",
        ("hosts", *(curve.name for curve in curves), "scaling" if len(curves) == 1 else f"scaling, {first.name}"),
        tuple(
            (
                Cell(f"{one.hosts:,}"),
                *(_predicted(curve.predictions[place]) for curve in curves),
                Cell(f"{one.scaling:.0%}"),
            )
            for place, one in enumerate(first.predictions)
        ),
    )


def _predicted(one: Prediction) -> Cell:
    between = f"{figures.step(one.low_s)} to {figures.step(one.high_s)}"
    return Cell(figures.step(one.iteration_s), between, value=one.iteration_s)


def _benched(outlook: Outlook, story: Story) -> Iterator[Dot]:
    """Only of the same model, on links and hosts of the same kind."""
    for result in story.benches:
        if _comparable(outlook, result):
            for row in result.rows:
                if row.method in ("ddp", "plan", "plan-lossy"):
                    says = f"{row.method}, measured on {figures.count(result.cluster.hosts, 'host')}: "
                    says += f"{figures.ms(row.step_ms)} per step"
                    low, high = row.step_ms_low / 1e3, row.step_ms_high / 1e3
                    yield Dot(float(result.cluster.hosts), row.step_ms / 1e3, says, low, high)
    if story.demo is not None:
        for one in story.demo.rows:
            if one.method != "nosync":
                says = f"{one.method}, measured: {figures.ms(one.step_ms)} per step"
                low, high = one.step_ms_low / 1e3, one.step_ms_high / 1e3
                yield Dot(float(story.demo.cluster.hosts), one.step_ms / 1e3, says, low, high)


def _comparable(outlook: Outlook, result: BenchResult) -> bool:
    link = outlook.network.link("host")
    each = outlook.network.ranks // outlook.network.hosts
    return (
        result.model.gradient_bytes == outlook.profile.gradient_bytes
        and link is not None
        and link.nominal_bps == result.cluster.rate_bps
        and result.cluster.per_host == each
    )


def _ran(subject: Subject) -> Iterator[Dot]:
    for rank, model in subject.records[:1]:
        hosts = len(set(model.host_of_rank))
        for pace in model.paces if hosts else ():
            says = (
                f"{pace.way}, measured by rank {rank} on {figures.count(hosts, 'host')}: {figures.step(pace.step_s)} "
                "per step, without the optimizer’s"
            )
            yield Dot(float(hosts), pace.step_s, says, pace.low_s, pace.high_s)
