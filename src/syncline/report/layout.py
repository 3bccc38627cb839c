"""What a page consists of: a summary at the top, then sections, each with charts and the commands that reproduce it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from syncline.report.charts import Chart, Lines

Commands = tuple[tuple[str, str], ...]
"""What a command does, and the command."""


@dataclass(frozen=True)
class Section:
    name: str
    """Also its address on the page: `#timeline`."""
    title: str
    lead: str = ""
    charts: Sequence[Chart | Sequence[Lines]] = ()
    """Line charts in a sequence of their own are drawn small and side by side."""
    points: Sequence[str] = ()
    """Sentences, as a list."""
    commands: Commands = ()


@dataclass(frozen=True)
class Fact:
    """One of the few large numbers at the top."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Page:
    title: str
    about: str
    """The model and the cluster."""
    verdict: str
    more: Sequence[str]
    """Further sentences below the verdict."""
    facts: Sequence[Fact]
    sections: Sequence[Section]
    made_by: str
    """Version and date."""
    warning: str = ""
