"""`syncline failure`: the options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from syncline.cli.commands import common


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Read the failure reports that ranks wrote: where each one failed, which rank is suspected, and what to check.

    syncline failure

    syncline failure collected/ --events 10

    If there are no failure reports, it reads the records of syncline run: a rank that was killed leaves nothing else.
    """

    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="FOLDER", help="Folder with the failure reports. Default: $SYNCLINE_FAILURES, or syncline-failure."
        ),
    ] = None
    events: Annotated[int, typer.Option(min=0, metavar="N", help="Also show the last N events of each rank.")] = 0
    json: common.JsonFile = None

    def start(self) -> None:
        from syncline.cli.failure import failure

        failure(self)
