"""Output of the commands: tables on standard output, progress on standard error, results in files."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from syncline.cluster import ClusterSpec, unshaped_notice, why_not_shaped
from syncline.errors import UsageError
from syncline.files import write_json
from syncline.report.charts import Bars
from syncline.report.charts import Table as Numbers

# Without markup, because names and paths may contain brackets.
out = Console(highlight=False, markup=False)
err = Console(stderr=True, highlight=False, markup=False)
say = out.print


@contextlib.contextmanager
def progress(what: str, *, shown: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar if standard error is a terminal and `shown` is true."""
    count = TextColumn("{task.completed:.0f}/{task.total:.0f}")
    columns = (TextColumn(what), BarColumn(), count, TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not (shown and err.is_terminal)) as bar:
        task = bar.add_task(what, total=1)
        yield lambda done, of: bar.update(task, completed=done, total=of)


def warn_if_not_shaped() -> None:
    """Warn if this machine cannot emulate links."""
    if (reason := why_not_shaped()) is not None:
        err.print(unshaped_notice(reason), style="yellow")


def links(spec: ClusterSpec, emulated: bool) -> str:
    """Describe the cluster; its rates only if links were emulated."""
    return spec.describe() if emulated else f"{spec.world_size} ranks on the loopback interface, links not shaped"


def check_writable(*paths: Path | None) -> None:
    """Raise `UsageError` if one of the files cannot be written; call it before a long run."""
    for path in filter(None, paths):
        if str(path) == "-":
            raise UsageError("- is not a file name: write to a file, or to /dev/stdout")
        try:
            if path.is_dir():
                raise UsageError(f"{path} is a folder: name a file to write to")
            if not path.parent.is_dir():
                raise UsageError(f"{path}: there is no folder {path.parent}: create it first")
            if not path.exists():
                tempfile.TemporaryFile(dir=path.parent).close()  # permission bits alone do not show whether this works
            elif not os.access(path, os.W_OK):
                raise PermissionError
        except OSError:  # also if a folder on the path is not readable
            raise UsageError(f"{path}: this user may not write there: choose another file") from None


def save(path: Path | None, result: msgspec.Struct | dict[str, Any], label: str = "") -> None:
    """Write a result as JSON, if the user named a file for it. Print the path after `label`, if there is one."""
    if path is not None:
        write_json(path, result)
        if label:
            say(f"{label}: {path}", soft_wrap=True)


def show(chart: Bars | Numbers, most: int = 9) -> None:
    """Print the numbers of a chart of the report, up to `most` rows of them."""
    say(f"{chart.caption}:")
    if isinstance(chart, Bars):
        table(("", *chart.columns), [(row.name, *row.cells) for row in chart.rows[:most]])
    else:
        texts = ([cell if isinstance(cell, str) else cell.text for cell in row] for row in chart.rows[:most])
        table(chart.columns, texts, chart.text_columns)
    if len(chart.rows) > most:
        say(f"and {len(chart.rows) - most} more", style="dim")
    if chart.note:
        say(chart.note, style="dim")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], words: Collection[int] = ()) -> None:
    """Print a table whose first column, and those in `words`, hold text, and the others numbers.

    If a row is too wide, text is wrapped and numbers are not.
    """
    grid = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for index, column in enumerate(columns):
        if index == 0 or index in words:
            grid.add_column(column, overflow="fold")
        else:
            grid.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        grid.add_row(*row)
    say(grid)
