"""`syncline failure`: the options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def failure(
    folder: Annotated[
        Path | None,
        typer.Argument(help="Where ranks have left their notes. Default: $SYNCLINE_FAILURES, or syncline-failure."),
    ] = None,
    events: Annotated[int, typer.Option(min=0, metavar="N", help="Show so many of each rank's last events, too.")] = 0,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all of it for machines.")] = None,
) -> None:
    """Read what ranks left behind when an exchange failed: who failed where, whom they suspect, and what to look at.

    syncline failure

    syncline failure collected/ --events 10

    If there are no failure reports, it reads what syncline run wrote: a rank that was killed leaves nothing else.
    """
    from syncline.cli.failure import failure as explain

    explain(folder, events, json)
