"""The sections of a page, in order. Each is one function, which yields nothing if there is nothing to show."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from syncline.report.inputs import Inputs, ModelData
from syncline.report.layout import Section
from syncline.report.sections.assumptions import assumptions_section, sources_section
from syncline.report.sections.gradients import gradients_section
from syncline.report.sections.methods import bench_sections, demo_section
from syncline.report.sections.network import network_sections
from syncline.report.sections.plan import plan_sections
from syncline.report.sections.remedies import remedies_section
from syncline.report.sections.scaling import scaling_section
from syncline.report.sections.step import step_section
from syncline.report.sections.timeline import timeline_section
from syncline.report.sections.training import training_section

_BEFORE: tuple[Callable[[Inputs], Iterator[Section]], ...] = (demo_section, bench_sections)
_FOR_EACH_MODEL: tuple[Callable[[Inputs, ModelData], Iterator[Section]], ...] = (
    step_section,
    timeline_section,
    remedies_section,
    plan_sections,
    scaling_section,
    training_section,
    gradients_section,
)
_AFTER: tuple[Callable[[Inputs, Sequence[ModelData]], Iterator[Section]], ...] = (
    network_sections,
    assumptions_section,
    sources_section,
)


def all_sections(inputs: Inputs, models: Sequence[ModelData]) -> Iterator[Section]:
    for make in _BEFORE:
        yield from make(inputs)
    for number, model in enumerate(models, 1):
        for make_for in _FOR_EACH_MODEL:
            for section in make_for(inputs, model):
                if len(models) > 1:
                    name, title = f"{section.name}-m{number}", f"{section.title}: {model.name}"
                    section = dataclasses.replace(section, name=name, title=title)
                yield section
    for make_after in _AFTER:
        yield from make_after(inputs, models)
