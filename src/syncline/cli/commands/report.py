"""`syncline report`: the options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE|FOLDER…", help="What profile, probe, plan, bench, demo or run wrote, in any order."
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where the page goes, in HTML.")
    ] = Path("report.html"),
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also a run's steps for Perfetto or chrome://tracing.")
    ] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write what it says for machines.")] = None,
) -> None:
    """Make one self-contained page of Syncline's files: what limits a training, and what would help.

    syncline report profile.json network.json plan.json

    syncline report FOLDER, where FOLDER is what syncline run wrote: a page of that run.
    """
    from syncline.cli.report import report as run

    run(files, output, trace, json)
