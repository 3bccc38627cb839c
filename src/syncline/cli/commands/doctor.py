"""`syncline doctor`: the options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from syncline.cli.commands import common


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Check what works on this machine, and say how to repair what does not. Under five seconds.

    syncline doctor

    torchrun --nnodes 2 … -m syncline doctor     # can the ranks of a job reach each other?
    """

    json: common.JsonFile = None
    wait: Annotated[
        float,
        typer.Option(min=1, max=600, metavar="SECONDS", help="Under torchrun: how long to wait for the other ranks."),
    ] = 30.0

    def start(self) -> None:
        from syncline.cli.doctor import doctor

        doctor(self)
