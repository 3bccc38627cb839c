"""`syncline run`: the options.

A script runs outside of the command line's own machinery, so that its exceptions, exit status and Ctrl-C are what they
would be without it. The command therefore returns what is to be done, and `main` does it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from syncline.cli.commands import choices

FOLDER = Path("syncline-run")
SETTINGS = {"allow_interspersed_args": False}
"""What follows the script is the script's."""


def run_command(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The training script; with -m, a module.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGUMENTS", help="The script's own.")] = None,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module, as for python -m.")] = False,
    nproc_per_node: Annotated[
        int | None, typer.Option(min=1, max=1024, metavar="N", help="Start N ranks here, through torchrun.")
    ] = None,
    observe_only: Annotated[bool, typer.Option("--observe-only", help="Measure and diagnose; change nothing.")] = False,
    allow: Annotated[str, typer.Option(metavar="A,B", help="What a plan may lose: bf16, fp16, sparse.")] = "",
    exchange: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"Instead of tuning: one of {', '.join(choices.EXCHANGES)}.")
    ] = None,
    plan: Annotated[Path | None, typer.Option(metavar="FILE", help="Instead of tuning: a plan's file.")] = None,
    network: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What syncline probe wrote, instead of probing.")
    ] = None,
    probe: Annotated[float, typer.Option(metavar="SECONDS", help="How long to probe the links.")] = choices.RUN_PROBE_S,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="How long a collective may take, DDP's own too.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="For the records and the report.")] = FOLDER,
    quiet: Annotated[bool, typer.Option("--quiet", help="Say nothing while the script runs.")] = False,
) -> Callable[[], NoReturn]:
    """Run a training script as it is, under torchrun, and have its DDP models exchange their gradients faster.

    torchrun --nproc-per-node 4 -m syncline.run train.py --epochs 3

    syncline run --nproc-per-node 4 train.py --epochs 3

    The script's own steps are watched, a plan is made and tried on them, and the faster way stays: same losses, to
    summation order, unless --allow says more. A report is written when the script ends.
    """
    from syncline.cli.run import prepare

    return prepare(
        script,
        arguments or [],
        module=module,
        nproc_per_node=nproc_per_node,
        observe_only=observe_only,
        allow=allow,
        exchange=exchange,
        plan=plan,
        network=network,
        probe=probe,
        timeout=timeout,
        out=out,
        quiet=quiet,
    )


def main(arguments: Sequence[str]) -> NoReturn:
    """`syncline run`, and `python -m syncline.run`."""
    _parse(arguments)()


def _parse(arguments: Sequence[str]) -> Callable[[], NoReturn]:
    asked: list[Callable[[], NoReturn]] = []
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

    @app.command(context_settings=SETTINGS)
    @functools.wraps(run_command)
    def keep(**given: Any) -> None:
        asked.append(run_command(**given))

    try:
        app(list(arguments), prog_name="syncline run")
    except SystemExit:
        if not asked:  # help was shown, or something is wrong
            raise
    return asked[0]
