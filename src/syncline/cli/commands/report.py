"""`syncline report`: the options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from syncline.cli.commands import common


@dataclass(frozen=True, kw_only=True)
class Report:
    """Make one self-contained HTML page from Syncline's files: what limits a training, and what would help.

    syncline report profile.json network.json plan.json

    syncline report syncline-run     # the folder that syncline run wrote
    """

    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE|FOLDER…", help="Files from profile, probe, plan, bench or demo; folders from run. Any order."
        ),
    ]
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="File for the page.")] = Path(
        "report.html"
    )
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write the steps of a run for Perfetto or chrome://tracing."),
    ] = None
    json: common.JsonFile = None

    def start(self) -> None:
        from syncline.cli.report import report

        report(self)
