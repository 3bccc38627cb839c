"""What a person sees: tables on standard output, progress on standard error, numbers rounded to what they mean."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from syncline.cluster import ClusterSpec, unshaped_notice, why_not_shaped
from syncline.errors import UsageError

# Without markup: names and paths may have brackets in them.
out = Console(highlight=False, markup=False)
err = Console(stderr=True, highlight=False, markup=False)


@contextlib.contextmanager
def progress(what: str, *, shown: bool = True) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal; silence elsewhere, and where it is not to be `shown`."""
    with Progress(
        TextColumn(what),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TimeRemainingColumn(),
        console=err,
        transient=True,
        disable=not (shown and err.is_terminal),
    ) as bar:
        task = bar.add_task(what, total=1)
        yield lambda done, of: bar.update(task, completed=done, total=of)


def say_if_not_shaped() -> None:
    if (reason := why_not_shaped()) is not None:
        err.print(unshaped_notice(reason), style="yellow")


def links(spec: ClusterSpec, emulated: bool) -> str:
    """The cluster, without a rate where there was none."""
    return spec.describe() if emulated else f"{spec.world_size} ranks on the loopback interface, links not shaped"


def check_writable(path: Path | None) -> None:
    """Before a long run, rather than after it."""
    if path is None:
        return
    if str(path) == "-":
        raise UsageError("- is no file: name one, or /dev/stdout")
    try:
        if path.is_dir():
            raise UsageError(f"{path} is a folder: name a file to write to")
        if not path.parent.is_dir():
            raise UsageError(f"{path}: there is no folder {path.parent}: create it first")
        if path.exists():
            allowed = os.access(path, os.W_OK)
        else:
            allowed = True
            with tempfile.TemporaryFile(dir=path.parent):  # the only way to know
                pass
    except OSError:  # not even to be looked at
        allowed = False
    if not allowed:
        raise UsageError(f"{path}: may not be written by this user: choose another place")


def table(*columns: str, words: str = "") -> Table:
    """The first column is a name, and so may be one that is called so; the others are figures. Where 80 columns are too
    few, names go on in the next line, and figures stay whole."""
    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for index, column in enumerate(columns):
        name = index == 0 or (column and column == words)
        made.add_column(column, justify="left" if name else "right", no_wrap=not name)
    return made
