"""`syncline run`: the options.

The script must run outside of typer, so that its exceptions, exit status and Ctrl-C are what they would be without
`syncline run`. The options therefore only prepare a function, and `main` calls it after typer has returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from syncline.cli.commands import choices, common

FOLDER = Path("syncline-run")
SETTINGS = {"allow_interspersed_args": False}
"""Everything after the script belongs to the script."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Run an unmodified training script and make its DDP models exchange gradients faster.

    torchrun --nproc-per-node 4 -m syncline.run train.py --epochs 3

    syncline run --nproc-per-node 4 train.py --epochs 3

    It measures the script's steps, tries a plan, and keeps it if it is faster.

    Losses stay the same, up to summation order, unless --allow permits more.
    """

    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="Training script; with -m, a module.")]
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Arguments of the script.")] = None
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module, as in python -m.")] = False
    nproc_per_node: Annotated[
        int | None, typer.Option(min=1, max=1024, metavar="N", help="Start N ranks on this host, through torchrun.")
    ] = None
    observe_only: Annotated[bool, typer.Option("--observe-only", help="Measure and diagnose; change nothing.")] = False
    allow: Annotated[
        str, typer.Option(metavar="A,B", help=f"Lossy exchanges to consider: {', '.join(choices.ALLOWED)}.")
    ] = ""
    exchange: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"Instead of tuning: {', '.join(choices.EXCHANGES)}.")
    ] = None
    plan: Annotated[Path | None, typer.Option(metavar="FILE", help="Instead of tuning: apply this plan.")] = None
    network: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Network from syncline probe, instead of probing.")
    ] = None
    probe: Annotated[float, typer.Option(metavar="SECONDS", help="Time for probing the links.")] = choices.RUN_PROBE_S
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Timeout of collectives, DDP's own included.")
    ] = None
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder for the records and the report.")] = FOLDER
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing while the script runs.")] = False

    def prepare(self) -> Callable[[], NoReturn]:
        from syncline.cli.run import prepare

        return prepare(self)


def main(arguments: Sequence[str]) -> NoReturn:
    """Run `syncline run` or `python -m syncline.run` with these arguments."""
    _parse(arguments)()


def _parse(arguments: Sequence[str]) -> Callable[[], NoReturn]:
    prepared: list[Callable[[], NoReturn]] = []
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(context_settings=SETTINGS)(common.command(Run, lambda run: prepared.append(run.prepare())))
    try:
        app(list(arguments), prog_name="syncline run")
    except SystemExit:
        if not prepared:  # help was shown, or the arguments are wrong
            raise
    return prepared[0]
