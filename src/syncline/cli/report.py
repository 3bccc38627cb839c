"""`syncline report`: one page of what Syncline's files tell together."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from syncline.cli import options, screen
from syncline.errors import UsageError
from syncline.files import write_json, write_text
from syncline.report.inputs import Inputs
from syncline.report.page import build_page, render
from syncline.report.read_inputs import read_inputs


def report(files: list[Path], output: Path, trace: Path | None, json: Path | None) -> None:
    with options.one_line_errors("syncline report"):
        for path in (output, trace, json):
            screen.check_writable(path)
        inputs = read_inputs(files)
        if trace is not None and not inputs.runs:
            raise UsageError("--trace is of a run: name the folder that syncline run wrote")
        write_page(output, inputs, json)
        if trace is not None:
            from syncline.report.trace import write_trace

            write_trace(trace, inputs.runs)
            screen.out.print(f"Steps, for https://ui.perfetto.dev: {trace}", soft_wrap=True)


def write_page(path: Path, inputs: Inputs, json: Path | None = None, *, short: bool = False) -> None:
    """And says where it is; what it says, too, unless the command has said as much (`short`)."""
    page = build_page(inputs)
    write_text(path, render(page))
    if json is not None:
        said = {
            "schema": 1,
            "verdict": page.verdict,
            "more": list(page.more),
            "warning": page.warning,
            "facts": [{"name": fact.name, "value": fact.value, "note": fact.note} for fact in page.facts],
            "sections": {section.name: section.title for section in page.sections},
        }
        write_json(json, said)
    if not short:
        if page.about:
            screen.out.print(page.about)
        if page.warning:
            screen.out.print(page.warning, style="yellow")
        screen.out.print()
        for sentence in (page.verdict, *page.more):
            screen.out.print(sentence)
            screen.out.print()
    screen.out.print(f"A page to look at: {path}", soft_wrap=True)


def typed() -> str:
    """The command that runs, as it was typed; nothing where something else called."""
    program = Path(sys.argv[0])
    ours = program.name == "syncline" or program.parts[-2:] == ("syncline", "__main__.py")
    return shlex.join(["syncline", *sys.argv[1:]]) if ours else ""
