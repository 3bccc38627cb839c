"""From what is known to a page: what there is to see, in the order in which people ask."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterator

from syncline._version import __version__
from syncline.measure.network import Network
from syncline.report import ahead, commands, figures, links, measured, steps, verdict
from syncline.report.blocks import Cell, Fact, Page, Section, Table
from syncline.report.outlook import Outlook, outlook_of
from syncline.report.record import FINISHED, RUNNING, RunRecord
from syncline.report.story import Story, Subject

_MOST_SUBJECTS = 6
"""Models of one script that are looked at."""
_ASSUMPTIONS = "docs/assumptions.md"


def tell(story: Story) -> Page:
    subjects = story.subjects[:_MOST_SUBJECTS]
    outlooks = [outlook_of(story, subject) for subject in subjects]
    sections = [*measured.sections(story)]
    for place, (subject, outlook) in enumerate(zip(subjects, outlooks, strict=True)):
        found = list(_of_subject(story, subject, outlook))
        several = len(subjects) > 1
        sections += [_renamed(one, f"-m{place + 1}", subject.name) for one in found] if several else found
    networks = list(dict.fromkeys(_of_subjects(subjects)))
    sections += [_renamed(links.links_section(one, story), _suffix(n)) for n, one in enumerate(networks)]
    sections += [_assumptions(story, subjects, outlooks), *_sources(story)]
    said, more = _verdict(story, subjects, outlooks)
    about = _about(story, subjects, outlooks)
    return Page(
        title=about or "Syncline",
        about=about,
        verdict=said,
        more=tuple(more),
        facts=tuple(_facts(story, subjects, outlooks))[:4],
        sections=tuple(sections),
        made=f"syncline {__version__}, {datetime.datetime.now().astimezone().isoformat(timespec='minutes', sep=' ')}",
        warning=_warning(story, subjects),
    )


def _suffix(number: int) -> str:
    return "" if number == 0 else f"-{number + 1}"


def _renamed(section: Section, suffix: str, name: str = "") -> Section:
    title = f"{section.title}: {name}" if name else section.title
    return dataclasses.replace(section, name=section.name + suffix, title=title)


def _of_subjects(subjects: tuple[Subject, ...]) -> Iterator[Network]:
    for subject in subjects:
        if subject.network is not None:
            yield subject.network


def _of_subject(story: Story, subject: Subject, outlook: Outlook | None) -> Iterator[Section]:
    yield from steps.sections(subject, outlook, _step_how(story, subject, outlook))
    if outlook is not None and (found := ahead.remedies_section(outlook, story)) is not None:
        yield found
    yield from ahead.plan_sections(story, subject, outlook)
    if outlook is not None and (found := ahead.scaling_section(outlook, story, subject)) is not None:
        yield found
    if (found := measured.training_section(story, subject)) is not None:
        yield found
    if (found := measured.model_section(subject, story)) is not None:
        yield found


def _step_how(story: Story, subject: Subject, outlook: Outlook | None) -> commands.How:
    predicted = commands.of_prediction(story) if outlook is not None else ()
    run = commands.of_run(story) if subject.records else ()
    return tuple(dict.fromkeys((*run, *predicted)))


def _about(story: Story, subjects: tuple[Subject, ...], outlooks: list[Outlook | None]) -> str:
    subject = subjects[0]
    parts = [figures.listed([one.name for one in subjects if one.name])]
    if len(subjects) == 1:
        parameters = subject.parameters
        if parameters is None and story.benches:
            parameters = story.benches[0].model.parameters
        parts += [f"{parameters:,} parameters"] if parameters else []
        parts += [f"{figures.size(subject.gradient_bytes)} of gradients"] if subject.gradient_bytes else []
    parts.append(_cluster(story, subject, outlooks[0]))
    return " · ".join(part for part in parts if part)


def _cluster(story: Story, subject: Subject, outlook: Outlook | None) -> str:
    if subject.records:
        model = subject.records[0][1]
        return _placed(model.host_of_rank, model.backend, subject.network)
    network = subject.network if outlook is None else outlook.network
    if network is not None:
        return _placed(network.host_of_rank, network.backend, network)
    if story.demo is not None:
        return measured.cluster(story.demo.cluster)
    if story.benches:
        return measured.cluster(story.benches[0].cluster)
    plan = next(iter(subject.plans.values()), None)
    return "" if plan is None else _placed(plan.where.host_of_rank, plan.where.backend, None)


def _placed(host_of_rank: tuple[int, ...], backend: str, network: Network | None) -> str:
    if not host_of_rank:  # nobody had asked where ranks sit
        return backend
    hosts, ranks = len(set(host_of_rank)), len(host_of_rank)
    each = f", {figures.count(ranks, 'rank')}" if ranks != hosts else ""
    link = None if network is None else network.link("host")
    rate = ""
    if link is not None:
        rate = f", {figures.rate(link.nominal_bps or link.bytes_per_s * 8)} links"
    return f"{figures.count(hosts, 'host')}{each}{rate} · {backend}"


def _verdict(story: Story, subjects: tuple[Subject, ...], outlooks: list[Outlook | None]) -> tuple[str, list[str]]:
    """The sentence at the top, and those below it: what was measured before what was predicted."""
    sentences: list[str] = []
    if story.demo is not None:
        sentences += [verdict.of_demo_in_short(story.demo), *verdict.of_demo(story.demo)]
    if story.runs and not any(subject.records for subject in subjects):
        sentences.append("The script made no DistributedDataParallel model: there was nothing to follow.")
    for subject in subjects:
        if subject.records:
            model = subject.records[0][1]
            sentences += [verdict.of_run(model), model.outcome]
            pace = verdict.pace_of(model)
            if model.plan is not None and not model.plan.lossless and model.way in verdict.PLANNED:
                sentences.append("The plan changes numerics, as it was allowed to.")
            sentences += [steps.between_s(model, pace)] if pace is not None else []
    for result in story.benches:
        sentences += [verdict.of_bench(result), verdict.of_forecasts(result)]
    for subject, outlook in zip(subjects, outlooks, strict=True):
        if outlook is not None:
            if not sentences:
                others = {name: outlook.predictions[name] for name in outlook.others}
                sentences.append(verdict.of_diagnosis_in_short(outlook.diagnosis, outlook.first[0], others))
            named = f"{subject.name}, " if len(subjects) > 1 else ""
            said = verdict.of_diagnosis(outlook.diagnosis)
            sentences.append(f"Predicted for {named}{outlook.first[0]}: {said[:1].lower()}{said[1:]}")
        if story.demo is None and not subject.records:
            sentences += [plan.reason for plan in subject.plans.values()]
    if not sentences:
        sentences += [verdict.of_network(one) for one in dict.fromkeys(_of_subjects(subjects))]
        sentences += [verdict.of_profile(subject.profile) for subject in subjects if subject.profile is not None]
    first, *more = [sentence for sentence in sentences if sentence] or ["There is nothing to tell yet."]
    return first, more


def _facts(story: Story, subjects: tuple[Subject, ...], outlooks: list[Outlook | None]) -> Iterator[Fact]:
    """The few figures that someone would repeat at lunch."""
    if story.demo is not None:
        plain, best = story.demo.row("ddp"), min(story.demo.rows[1:], key=lambda row: row.step_ms)
        yield Fact("plain DDP", figures.ms(plain.step_ms), "per step, measured")
        if best is not plain:
            name = {"tune": "tuned, lossless", "tune-bf16": "tuned, 16 bits allowed"}.get(best.method, best.method)
            yield Fact(name, figures.ms(best.step_ms), f"{figures.pace(best.vs_ddp)}, measured")
        floor = story.demo.row("nosync")
        yield Fact("no communication", figures.ms(floor.step_ms), "the floor, measured")
        if best.held_out_accuracy is not None:
            yield Fact("accuracy", f"{best.held_out_accuracy:.1%}", f"plain DDP: {plain.held_out_accuracy or 0:.1%}")
        return
    for subject in subjects:
        for pace in subject.records[0][1].paces[-2:] if subject.records else ():
            yield Fact(pace.way, figures.step(pace.step_s), f"per step of {subject.name}, measured")
    for result in story.benches[:1]:
        rows = {row.method: row for row in result.rows}
        fastest = [row.method for row in sorted(result.rows, key=lambda row: row.step_ms) if row.method != "nosync"]
        for name in dict.fromkeys(["nosync", "ddp", *fastest[:1]]):
            if name in rows:
                yield Fact(
                    {"nosync": "no communication", "ddp": "plain DDP"}.get(name, name),
                    figures.ms(rows[name].step_ms),
                    "per step, measured",
                )
    outlook = outlooks[0]
    if outlook is not None:
        for name, one in list(outlook.predictions.items())[:2]:
            yield Fact(name, figures.step(one.iteration_s), "per step, predicted")
        first = outlook.diagnosis.prediction
        change = next((one for one in outlook.diagnosis.remedies if not (one.lossy or one.hardware)), None)
        if change is not None and not outlook.others:
            yield Fact("best lossless change", figures.step(change.prediction.iteration_s), change.what)
        yield Fact("scaling", f"{first.scaling:.0%}", f"{outlook.first[0]} on {figures.count(first.hosts, 'host')}")
        yield Fact("computation", figures.step(first.compute_s), "per step, on a rank alone")
        return
    profile, network = subjects[0].profile, subjects[0].network
    if profile is not None:
        yield Fact("computation", figures.step(profile.step_s), "per step")
        yield Fact("gradients", figures.size(profile.gradient_bytes), f"{len(profile.gradients):,} of them")
    for plan in subjects[0].plans.values():
        yield Fact("plain DDP", figures.step(plan.plain_s), "per step, predicted")
        if not plan.nothing:
            yield Fact("the plan", figures.step(plan.iteration_s), "per step, predicted")
    if network is not None:
        for link in network.links[:2]:
            known = "measured" if network.measured else "assumed"
            yield Fact(links.LINKS.get(link.name, link.name), figures.rate(link.bytes_per_s * 8), known)


def _is_victim(run: RunRecord) -> tuple[bool, bool, float]:
    """Ranks end because one of them did: what it raised says more than that it was gone."""
    lost = any(word in run.ended for word in ("Connection closed", "Connection reset", "NCCL", "imed out"))
    return run.ended == RUNNING, lost, run.seconds  # a process that was killed could not say why


def _warning(story: Story, subjects: tuple[Subject, ...]) -> str:
    """What someone must know before believing the rest."""
    parts = []
    early = [run for run in story.runs if run.ended != FINISHED]
    if early:
        first = min(early, key=_is_victim)
        said = first.state if len(first.state) <= 160 else f"{first.state[:159]}…"
        others = f", before {figures.count(len(early) - 1, 'other rank')}" if len(early) > 1 else ""
        parts.append(f"The run did not finish: rank {first.rank}{others}: {said}.")
    if 0 < len(story.runs) < story.runs[0].ranks:
        missing = sorted(set(range(story.runs[0].ranks)) - {run.rank for run in story.runs})
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        parts.append(f"No record is here of rank {', '.join(map(str, missing[:8]))}{more}.")
    if any(not network.measured for network in _of_subjects(subjects)):
        parts.append("Links are not measured but assumed: syncline probe measures yours.")
    left = len(story.subjects) - len(subjects)
    if left > 0:
        parts.append(f"{figures.count(left, 'more model')} of this script not shown.")
    return " ".join(parts)


def _assumptions(story: Story, subjects: tuple[Subject, ...], outlooks: list[Outlook | None]) -> Section:
    networks = list(_of_subjects(subjects))
    points = []
    if any(outlook is not None for outlook in outlooks):
        points.append(
            "Predictions simulate one step from the profile’s and the network’s figures. They take processors for "
            "free: where communication and computation share them, steps take longer than predicted."
        )
        points.append("A step’s computation is what was profiled: the same model, batch and device on every host.")
    if any(outlook is not None and outlook.curves for outlook in outlooks):
        points.append(
            "More hosts than were measured are hosts of the same kind on links of the same kind, behind a switch that "
            "carries them all."
        )
    if any(not network.measured for network in networks):
        points.append(f"Links were not measured: {next(n.how for n in networks if not n.measured)}.")
    if any(network.one_machine for network in networks):
        points.append("Hosts were emulated on one machine: without latency or loss, and sharing its processors.")
    if any(not plan.lossless for subject in subjects for plan in subject.plans.values()):
        points.append(
            "A plan on this page is lossy: it was allowed to change numerics, and a model may train otherwise."
        )
    if len(story.runs) == 1 and story.runs[0].ranks > 1:
        rank, ranks = story.runs[0].rank, story.runs[0].ranks
        points.append(
            f"A run is shown as rank {rank} of {ranks} saw it: syncline report and the run’s folder show all of them."
        )
    if story.runs:
        points.append("Times of a run are each rank’s own; the optimizer, data and logging are not in them.")
    if story.benches or story.demo:
        points.append("Methods were measured in turns in the same processes, each step after the links had rested.")
    points.append(f"All that Syncline assumes, and what breaks its promises: {_ASSUMPTIONS} in its source.")
    return Section("assumptions", "What this assumes", points=tuple(points))


def _sources(story: Story) -> Iterator[Section]:
    """From what the page was made."""
    rows = [
        (Cell(kind), Cell(path), Cell(about))
        for kind, paths in story.files.items()
        for path, about in zip(paths, _described(story, kind, len(paths)), strict=True)
    ]
    how = commands.whole(story)
    if rows or how:
        blocks = (Table("What was read", ("", "file", "what it is"), tuple(rows[:40])),) if rows else ()
        yield Section("sources", "What it is made from", "", blocks, how=how)


def _described(story: Story, kind: str, number: int) -> list[str]:
    if kind == "profile" and story.profile is not None:
        one = story.profile
        return [f"{one.model} on {one.where}: {one.how}; {figures.count(one.steps, 'step')}"]
    if kind == "network" and story.network is not None:
        net = story.network
        return [", ".join(filter(None, [net.where, net.how, net.date]))]
    if kind == "plan":
        return [f"{plan.model}: {plan.how}" for plan in story.plans.values()]
    if kind == "bench":
        return [f"{one.model.name}, {figures.count(one.rounds, 'round')}, {one.date}" for one in story.benches]
    if kind == "run":
        return [f"rank {run.rank} of {run.ranks}, {run.state}, {run.seconds:.0f} s, {run.date}" for run in story.runs]
    if kind == "demo" and story.demo is not None:
        return [f"{figures.count(story.demo.steps, 'step')}, {measured.cluster(story.demo.cluster)}"]
    return [""] * number
