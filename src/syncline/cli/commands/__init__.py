"""The options and the help of each command, as dataclasses; see `syncline.cli`.

Nothing here imports torch, numpy or scipy, so that help and wrong options are answered at once.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from syncline._version import __version__
from syncline.cli.commands import bench, cluster, demo, doctor, failure, plan, predict, probe, profile, report, run
from syncline.cli.commands.common import command

app = typer.Typer(name="syncline", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


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


app.command("demo")(command(demo.Demo, demo.Demo.start))
app.command("doctor")(command(doctor.Doctor, doctor.Doctor.start))
app.command("bench")(command(bench.Bench, bench.Bench.start))
app.command("profile")(command(profile.Profile, profile.Profile.start))
app.command("probe")(command(probe.Probe, probe.Probe.start))
app.command("predict")(command(predict.Predict, predict.Predict.start))
app.command("plan")(command(plan.Plan, plan.Plan.start))
app.command("report")(command(report.Report, report.Report.start))
app.command("failure")(command(failure.Failure, failure.Failure.start))
app.add_typer(cluster.app, name="cluster")


@app.command("run", context_settings={"ignore_unknown_options": True, "help_option_names": [], **run.SETTINGS})
def _run(arguments: list[str]) -> None:
    """Run an unmodified training script and make its DDP models exchange gradients faster."""
    run.main(arguments)


def main() -> None:
    if sys.argv[1:2] == ["run"]:
        run.main(sys.argv[2:])  # outside of `app`, which would catch the script's exceptions
    app()
