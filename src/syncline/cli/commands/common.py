"""Options that several commands share, and the function that makes a command of a dataclass of options."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

PANEL = "Emulated cluster"
_Options = TypeVar("_Options")

Hosts = Annotated[int, typer.Option(metavar="N", help="Number of hosts.", rich_help_panel=PANEL)]
PerHost = Annotated[str, typer.Option(metavar="N|N,N,…", help="Ranks per host, or a list.", rich_help_panel=PANEL)]
Rate = Annotated[str, typer.Option(metavar="RATE", help="Rate of each host's link.", rich_help_panel=PANEL)]
JsonFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result as JSON.")]
ReportFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Also write an HTML report.")]
Scale = Annotated[str, typer.Option(metavar="T,B", help="Multiply the profile's times by T and its sizes by B.")]
Timeout = Annotated[float, typer.Option(metavar="SECONDS", help="Give up after this time.")]


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """The options that describe an emulated cluster, as typed; `options.cluster_spec` checks them."""

    hosts: Hosts = 4
    per_host: PerHost = "1"
    rate: Rate = "200mbit"
    racks: Annotated[int, typer.Option(metavar="N", help="Number of racks.", rich_help_panel=PANEL)] = 1
    trunk_rate: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="Rate between each rack and the others.", rich_help_panel=PANEL),
    ] = None
    rank_order: Annotated[
        str,
        typer.Option(
            metavar="host|scrambled", help="Number ranks host by host, or round-robin.", rich_help_panel=PANEL
        ),
    ] = "host"
    device: Annotated[str, typer.Option(metavar="cpu|cuda", help="Device of the ranks.", rich_help_panel=PANEL)] = "cpu"


def command(options: type[_Options], start: Callable[[_Options], object]) -> Callable[..., None]:
    """Return a function for `typer`: the fields of the dataclass `options` are its parameters.

    Args:
        options: A dataclass whose docstring is the command's help. An option is a field; its annotation has the
            option's type and help, and its default is the option's.
        start: Called with the options that were typed.
    """

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
