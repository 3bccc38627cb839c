"""The sections of a page, in order. Each is made by one function, which yields nothing if there is nothing to show."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from syncline.report.charts import Section
from syncline.report.inputs import Inputs, ModelData
from syncline.report.sections.assumptions import assumptions_section, sources_section
from syncline.report.sections.methods import bench_sections, demo_section
from syncline.report.sections.network import network_sections
from syncline.report.sections.plan import plan_sections
from syncline.report.sections.scaling import scaling_section
from syncline.report.sections.step import remedies_section, step_section
from syncline.report.sections.timeline import timeline_section
from syncline.report.sections.training import gradients_section, training_section

_FOR_EACH_MODEL = (
    *(step_section, timeline_section, remedies_section, plan_sections),
    *(scaling_section, training_section, gradients_section),
)


def all_sections(inputs: Inputs, models: Sequence[ModelData]) -> Iterator[Section]:
    yield from demo_section(inputs)
    yield from bench_sections(inputs)
    for number, model in enumerate(models, 1):
        for make in _FOR_EACH_MODEL:
            for section in make(inputs, model):
                if len(models) > 1:
                    name, title = f"{section.name}-m{number}", f"{section.title}: {model.name}"
                    section = dataclasses.replace(section, name=name, title=title)
                yield section
    yield from network_sections(inputs, models)
    yield from assumptions_section(inputs, models)
    yield from sources_section(inputs)
