"""`syncline failure`: the options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def failure(
    folder: Annotated[
        Path | None,
        typer.Argument(help="The folder of failure reports. Default: $SYNCLINE_FAILURES, or syncline-failure."),
    ] = None,
    events: Annotated[int, typer.Option(min=0, metavar="N", help="Show the last N events of each rank, too.")] = 0,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result as JSON.")] = None,
) -> None:
    """Read the failure reports of all ranks together: what failed, which ranks are suspected, and what to look at.

    syncline failure

    syncline failure collected/ --events 10

    If there are no failure reports, it reads the records of syncline run: a rank that was killed leaves nothing else.
    """
    from syncline.cli.failure import failure as explain

    explain(folder, events, json)
