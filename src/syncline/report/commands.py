"""The commands that make a page, or a part of it, again."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from syncline.report.charts import Commands
from syncline.report.inputs import Inputs

PREDICT = "Predict again", "syncline predict --profile {profile} --network {network}"
PLAN = "Plan again", "syncline plan --profile {profile} --network {network}"
PROBE = "Probe again, on the cluster", "torchrun … -m syncline probe --output {network}"
PROFILE = "Profile again", "syncline profile MODEL --output {profile}"


def with_files(inputs: Inputs, purpose: str, command: str) -> Commands:
    """Put the names of the files that were read into a command; where one is missing, return that of the whole page."""
    files = {kind: shlex.quote(paths[0]) for kind, paths in inputs.files.items() if paths}
    try:
        return ((purpose, command.format_map(files)),)
    except KeyError:
        return whole_page(inputs)


def whole_page(inputs: Inputs) -> Commands:
    return tuple(_recorded(inputs))[:1]


def _recorded(inputs: Inputs) -> Iterator[tuple[str, str]]:
    """Yield the commands that were recorded, the one that explains most of the page first."""
    sources = [("Make this page again", inputs.command)]
    sources += [("Run again", run.command) for run in inputs.runs]
    sources += [("Train again", inputs.demo.command)] if inputs.demo is not None else []
    sources += [("Measure again", bench.command) for bench in inputs.benches]
    return ((purpose, command) for purpose, command in sources if command)
