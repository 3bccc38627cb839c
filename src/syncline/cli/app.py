"""The program `syncline`: turns the structs in `commands` into typer commands."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn, get_type_hints

import typer

from syncline._version import __version__
from syncline.cli import commands

# Everything after the script, or the command of `cluster run`, belongs to it.
RUN_SETTINGS = {"allow_interspersed_args": False}

app = typer.Typer(name="syncline", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
cluster_app = typer.Typer(no_args_is_help=True)


def command(options: type[Any], start: Callable[[Any], object]) -> Callable[..., None]:
    """Return a function for typer that calls `start`. The fields of the struct `options` are its parameters."""

    def run(**typed: Any) -> None:
        start(options(**typed))

    run.__doc__ = options.__doc__
    hints, signature = get_type_hints(options, include_extras=True), inspect.signature(options)
    typed_parameters = [entry.replace(annotation=hints[name]) for name, entry in signature.parameters.items()]
    run.__signature__ = signature.replace(parameters=typed_parameters)  # type: ignore[attr-defined]
    return run


def _add(to: typer.Typer, name: str, options: type[Any], module: str, **settings: Any) -> None:
    """Add a command. The function `NAME_command` in `module` does the work, and may import torch."""
    group, _, subcommand = name.partition(" ")

    def start(typed: object) -> None:
        from syncline.cli.options import one_line_errors

        work = getattr(importlib.import_module(f"syncline.cli.{module}"), f"{group}_command")
        with one_line_errors(f"syncline {name}"):
            work(typed)

    to.command(subcommand or group, **settings)(command(options, start))


@app.callback(invoke_without_command=True)
def _syncline(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    """Make data-parallel PyTorch training fast on slow or uneven networks."""
    if version:
        typer.echo(f"syncline {__version__}")
        raise typer.Exit


@cluster_app.callback()
def _cluster() -> None:
    """Emulate a cluster on this machine: hosts behind links of limited rate."""


_add(app, "demo", commands.Demo, "bench")
_add(app, "doctor", commands.Doctor, "doctor")
_add(app, "bench", commands.Bench, "bench")
_add(app, "profile", commands.Profile, "measure")
_add(app, "probe", commands.Probe, "measure")
_add(app, "predict", commands.Predict, "predict")
_add(app, "plan", commands.Plan, "predict")
_add(app, "report", commands.Report, "report")
_add(app, "failure", commands.Failure, "doctor")
_add(cluster_app, "cluster run", commands.ClusterRun, "bench", no_args_is_help=True, context_settings=RUN_SETTINGS)
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
