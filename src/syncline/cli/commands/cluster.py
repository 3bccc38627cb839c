"""`syncline cluster`: the options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from syncline.cli.commands import common

app = typer.Typer(help="Emulate a cluster on this machine: hosts behind links that hold a rate.", no_args_is_help=True)


@dataclass(frozen=True, kw_only=True)
class Run(common.ClusterOptions):
    """Run a command on every host of an emulated cluster.

    syncline cluster run --hosts 4 --per-host 2 --rate 1gbit -- torchrun train.py

    torchrun needs no options: the environment has the numbers of hosts and ranks, and the addresses.
    """

    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="Command to run, after --.")]
    per_rank: Annotated[bool, typer.Option("--per-rank", help="Start it once per rank, without torchrun.")] = False

    def start(self) -> None:
        from syncline.cli.cluster import run

        run(self)


@app.callback()
def _cluster() -> None:
    """Emulate a cluster on this machine: hosts behind links that hold a rate."""


app.command("run", no_args_is_help=True, context_settings={"allow_interspersed_args": False})(
    common.command(Run, Run.start)
)
