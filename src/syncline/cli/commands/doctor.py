"""`syncline doctor`: the options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def doctor(
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all of it for machines.")] = None,
    wait: Annotated[
        float, typer.Option(min=1, max=600, metavar="SECONDS", help="Under torchrun: for ranks to meet.")
    ] = 30.0,
) -> None:
    """Look at this machine: what works here, what does not, and what to do about it. Under five seconds.

    syncline doctor

    torchrun --nnodes 2 … -m syncline doctor     # do the ranks of a job meet?
    """
    from syncline.cli.doctor import doctor as examine

    examine(json, wait)
