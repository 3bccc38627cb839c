"""The command line: one file per command, thin."""

from __future__ import annotations

from typing import Annotated

import typer

from syncline._version import __version__
from syncline.cli import bench, cluster, demo, plan, predict, probe, profile

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
app.command("bench")(bench.bench)
app.command("profile")(profile.profile)
app.command("probe")(probe.probe_command)
app.command("predict")(predict.predict_command)
app.command("plan")(plan.plan_command)
app.add_typer(cluster.app, name="cluster")


def main() -> None:
    app()
