"""`syncline report`: make one HTML page from Syncline's files."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from syncline.cli import commands, screen
from syncline.cli.screen import say
from syncline.errors import UsageError
from syncline.files import write_text
from syncline.report.inputs import Inputs
from syncline.report.page import build_page, render
from syncline.report.read_inputs import read_inputs
from syncline.report.trace import write_trace


def report_command(args: commands.Report) -> None:
    screen.check_writable(args.output, args.trace, args.json)
    inputs = read_inputs(args.files)
    if args.trace is not None and not inputs.runs:
        raise UsageError("--trace needs a run: add the folder that syncline run wrote")
    write_page(args.output, inputs, args.json)
    if args.trace is not None:
        write_trace(args.trace, inputs.runs)
        say(f"Trace, for https://ui.perfetto.dev: {args.trace}", soft_wrap=True)


def write_page(path: Path | None, inputs: Inputs, json: Path | None = None, *, short: bool = False) -> None:
    """Write a report, if the user named a file for it, and print its path; print its text too, unless `short`."""
    if path is None:
        return
    page = build_page(inputs)
    write_text(path, render(page))
    contents = {name: getattr(page, name) for name in ("verdict", "more", "warning", "recommendation")}
    facts = [fact._asdict() for fact in page.facts]
    titles = {section.name: section.title for section in page.sections}
    screen.save(json, {"schema": 1, **contents, "facts": facts, "sections": titles})
    if not short:
        if page.about:
            say(page.about)
        if page.warning:
            say(page.warning, style="yellow")
        advice = [f"Recommendation: {page.recommendation}"] if page.recommendation else []
        say("\n" + "\n\n".join([page.verdict, *advice, *page.more]) + "\n")
    say(f"Report: {path}", soft_wrap=True)


def typed() -> str:
    """Return the command line as it was typed; empty if another program called Syncline."""
    program = Path(sys.argv[0])
    is_syncline = program.name == "syncline" or program.parts[-2:] == ("syncline", "__main__.py")
    return shlex.join(["syncline", *sys.argv[1:]]) if is_syncline else ""
