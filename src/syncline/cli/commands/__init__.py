"""What can be typed: the options and the help of each command.

Nothing here imports torch, numpy or scipy, so that help and mistakes are answered at once. Each command imports the
module that does its work, `syncline.cli.NAME`, when it runs.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from syncline._version import __version__
from syncline.cli.commands import bench, cluster, demo, doctor, failure, plan, predict, probe, profile, report, run

app = typer.Typer(
    name="syncline",
    help="Makes data-parallel PyTorch training fast on slow or uneven networks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


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
    """Makes data-parallel PyTorch training fast on slow or uneven networks."""


app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.command("bench")(bench.bench)
app.command("profile")(profile.profile)
app.command("probe")(probe.probe_command)
app.command("predict")(predict.predict_command)
app.command("plan")(plan.plan_command)
app.command("report")(report.report)
app.command("failure")(failure.failure)
app.add_typer(cluster.app, name="cluster")


@app.command("run", context_settings={"ignore_unknown_options": True, "help_option_names": [], **run.SETTINGS})
def _run(arguments: list[str]) -> None:
    """Run a training script as it is, and have its DDP models exchange their gradients faster."""
    run.main(arguments)


def main() -> None:
    if sys.argv[1:2] == ["run"]:
        run.main(sys.argv[2:])  # outside of what catches exceptions for the other commands: they are the script's
    app()
