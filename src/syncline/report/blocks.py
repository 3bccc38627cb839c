"""What a page is made of, before anything is drawn: figures, what they are called, and what is said of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

KINDS = {
    "compute": "computation",
    "hidden": "communication behind computation",
    "exposed": "communication that nothing hides",
    "waiting": "waiting for slower ranks",
    "own": "copies, hooks, an exchange’s own work",
    "between": "between steps: optimizer, data, logging",
    "plain": "as it is",
    "chosen": "the plan",
    "other": "alternatives",
    "change": "what you can change",
    "lossy": "changes numerics",
    "hardware": "needs other hardware",
}
"""What colours mean, on every chart alike."""
STEP = ("compute", "hidden", "exposed", "waiting", "own")
"""Those that a step is made of."""

Value = str | float | int


@dataclass(frozen=True)
class Segment:
    """From here to there, of one kind."""

    kind: str
    start: float
    end: float
    says: str
    """What the mark tells whoever points at it."""
    label: str = ""
    """Written on it where it is wide enough."""
    data: Mapping[str, Value] = field(default_factory=dict)
    row: int = 0
    """Among those that run at the same time."""


@dataclass(frozen=True)
class Marker:
    """A point on a track: what was foreseen."""

    at: float
    says: str
    data: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class Track:
    """One row: a name, what lies where, and figures beside it."""

    name: str
    segments: tuple[Segment, ...] = ()
    markers: tuple[Marker, ...] = ()
    spread: tuple[float, float] | None = None
    """Quartiles."""
    figures: tuple[str, ...] = ()
    note: str = ""
    strong: bool = False

    @property
    def rows(self) -> int:
        return 1 + max((segment.row for segment in self.segments), default=0)


def present(rows: Sequence[Track], kinds: Sequence[str]) -> tuple[str, ...]:
    """Of these kinds, what is drawn."""
    return tuple(kind for kind in kinds if any(mark.kind == kind for row in rows for mark in row.segments))


@dataclass(frozen=True)
class Tracks:
    """Rows over one scale: bars, a waterfall, a timeline."""

    caption: str
    rows: tuple[Track, ...]
    end: float
    """Of the scale, which begins at 0."""
    columns: tuple[str, ...] = ()
    """Of the figures; those from the third on are left out where the page is narrow."""
    source: str = ""
    """`measured` or `predicted`."""
    line: tuple[float, str] | None = None
    """A place that matters to all rows, and what it is."""
    legend: tuple[str, ...] = ()
    """Kinds."""
    marked: str = ""
    """What its markers are."""
    note: str = ""
    unit: str = "seconds"
    """Or `bytes`."""
    whole: bool = False
    """A timeline: rows belong together, and are drawn without space between them."""


@dataclass(frozen=True)
class Dot:
    x: float
    y: float
    says: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Series:
    name: str
    line: tuple[tuple[float, float], ...] = ()
    dots: tuple[Dot, ...] = ()
    band: tuple[tuple[float, float, float], ...] = ()
    """x, low, high."""
    dashed: bool = False
    hue: int = 0


@dataclass(frozen=True)
class Axis:
    name: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False


@dataclass(frozen=True)
class Lines:
    caption: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    source: str = ""
    note: str = ""
    small: bool = False
    """One of several that stand beside each other."""
    quiet: bool = False
    """Dots are there for who points at them; the line says enough."""


@dataclass(frozen=True)
class Cell:
    text: str
    says: str = ""
    heat: int | None = None
    """0 to 8, of what is coloured."""
    value: float | None = None


@dataclass(frozen=True)
class Table:
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    source: str = ""
    note: str = ""


Block = Tracks | Lines | Table


@dataclass(frozen=True)
class Section:
    """One thing that there is to see."""

    name: str
    """In addresses: `#links`."""
    title: str
    lead: str = ""
    blocks: tuple[Block, ...] = ()
    points: tuple[str, ...] = ()
    """As a list."""
    how: tuple[tuple[str, str], ...] = ()
    """How to get this: what it does, and the command."""


@dataclass(frozen=True)
class Fact:
    """One of the few figures at the top."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Page:
    title: str
    about: str
    """Which model, on which cluster."""
    verdict: str
    more: tuple[str, ...]
    """What else there is to say, in sentences."""
    facts: tuple[Fact, ...]
    sections: tuple[Section, ...]
    made: str
    """With what, and when."""
    warning: str = ""
