"""Types of record fields with their limits, which msgspec checks when it reads a file.

Checks of several fields together are in `__post_init__` of each record, and raise `ValueError("field: problem")`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta

MOST = 10**18  # upper limit for counts and measurements, so that products of several stay finite


def one_of(*names: str) -> Meta:
    """Return the constraint that a text is one of these names."""
    return Meta(pattern=rf"^({'|'.join(names)})\Z")


Schema = Annotated[int, Meta(ge=1, le=1)]
Seconds = Annotated[float, Meta(ge=0, le=1e15)]
Amount = Annotated[float, Meta(ge=0, le=MOST)]
Share = Annotated[float, Meta(ge=0, lt=1)]
PositiveAmount = Annotated[float, Meta(gt=0, le=MOST)]
Count = Annotated[int, Meta(ge=0, le=MOST)]
PositiveCount = Annotated[int, Meta(ge=1, le=MOST)]
Device = Annotated[str, one_of("cpu", "cuda")]


def check_unique(field: str, names: Iterable[object]) -> None:
    """Raise if a name appears twice. `{}` in `field` stands for the index of the second one."""
    seen: set[object] = set()
    for index, name in enumerate(names):
        if name in seen:
            raise ValueError(f"{field.format(index)}: {name} appears twice")
        seen.add(name)
