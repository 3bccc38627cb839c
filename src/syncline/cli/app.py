"""The program `syncline`: turns the dataclasses in `commands` into typer commands."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn, TypeVar, get_type_hints

import typer

from syncline._version import __version__
from syncline.cli import commands

RUN_SETTINGS = {"allow_interspersed_args": False}
"""Everything after the script, or the command of `cluster run`, belongs to it."""
_Options = TypeVar("_Options")

app = typer.Typer(name="syncline", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
cluster_app = typer.Typer(no_args_is_help=True)


def command(options: type[_Options], start: Callable[[_Options], object]) -> Callable[..., None]:
    """Return a function for typer that calls `start`. The fields of the dataclass `options` are its parameters."""

    def run(**typed: Any) -> None:
        start(options(**typed))

    hints = get_type_hints(options, include_extras=True)
    run.__doc__ = options.__doc__
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
                annotation=hints[field.name],
            )
            for field in dataclasses.fields(options)  # type: ignore[arg-type]
        ]
    )
    return run


def _add(to: typer.Typer, name: str, options: type[Any], **settings: Any) -> None:
    """Add a command. `main` in the module with the command's name does the work, and may import torch."""
    module, _, subcommand = name.partition(" ")

    def start(typed: object) -> None:
        from syncline.cli.options import one_line_errors

        work = importlib.import_module(f"syncline.cli.{module}")
        with one_line_errors(f"syncline {name}"):
            work.main(typed)

    to.command(subcommand or module, **settings)(command(options, start))


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"syncline {__version__}")
        raise typer.Exit


@app.callback()
def _syncline(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Make data-parallel PyTorch training fast on slow or uneven networks."""


@cluster_app.callback()
def _cluster() -> None:
    """Emulate a cluster on this machine: hosts behind links of limited rate."""


for _type in (
    *(commands.Demo, commands.Doctor, commands.Bench, commands.Profile, commands.Probe),
    *(commands.Predict, commands.Plan, commands.Report, commands.Failure),
):
    _add(app, _type.__name__.lower(), _type)
_add(cluster_app, "cluster run", commands.ClusterRun, no_args_is_help=True, context_settings=RUN_SETTINGS)
app.add_typer(cluster_app, name="cluster")


@app.command("run", context_settings={"ignore_unknown_options": True, "help_option_names": [], **RUN_SETTINGS})
def _run(arguments: list[str]) -> None:
    """Run an unmodified training script and make its DDP models exchange gradients faster."""
    run_script(arguments)


def run_script(arguments: Sequence[str]) -> NoReturn:
    """Run `syncline run` or `python -m syncline.run` with these arguments.

    The script runs outside of typer, so that its exceptions, exit status and Ctrl-C are what they would be without
    `syncline run`: the options only prepare a function, which is called after typer has returned.
    """
    prepared: list[Callable[[], NoReturn]] = []

    def prepare(options: commands.Run) -> None:
        from syncline.cli.run import prepare

        prepared.append(prepare(options))

    parser = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    parser.command(context_settings=RUN_SETTINGS)(command(commands.Run, prepare))
    try:
        parser(list(arguments), prog_name="syncline run")
    except SystemExit:
        if not prepared:  # help was shown, or the arguments are wrong
            raise
    prepared[0]()


def main() -> None:
    if sys.argv[1:2] == ["run"]:
        run_script(sys.argv[2:])  # outside of `app`, which would catch the script's exceptions
    app()
