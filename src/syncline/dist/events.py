"""The exchanges of a model's buckets as events, for everything that watches them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from syncline.dist.lane import Job
from syncline.dist.span import Span

if TYPE_CHECKING:
    from syncline.dist.comm import LaneGroups


class Listener:
    """Base class of everything that watches a model's exchanges. Override the events you need. They must not raise."""

    def step_began(self, step: Any, number: int) -> None:
        """Handle the first bucket of a step, in the thread that runs backward. The step before it is over."""

    def step_timed(self, span: Span | None, period_s: float) -> None:
        """Handle the duration of a step that is over; its span is None if a device has not finished it."""

    def bucket_submitted(self, job: Job, step: int) -> None:
        """Handle a bucket that is ready and goes to its lane, in the thread that runs backward."""

    def bucket_started(self, lane: int, step: int, bucket: int) -> None:
        """Handle the start of a bucket's exchange, on the lane."""

    def collective_issued(self, lane: int, kind: str, level: str, sent_bytes: int) -> None:
        """Handle a collective that the lane's bucket is about to issue, on the lane."""

    def bucket_ended(self, job: Job) -> None:
        """Handle the end of an exchange, with or without an error; on a device, all of it has been enqueued."""


class Events(Listener):
    """Passes each event on to all listeners."""

    def __init__(self) -> None:
        self.listeners: list[Listener] = []
        for event in [name for name in vars(Listener) if not name.startswith("_")]:
            setattr(self, event, _forward(event, weakref.ref(self)))

    def connect(self, groups: Sequence[LaneGroups]) -> None:
        """Pass on the collectives that the process groups of these lanes issue."""
        for lane, lane_groups in enumerate(groups):
            lane_groups.comm.counter.issued = functools.partial(self.collective_issued, lane)


def _forward(event: str, events: weakref.ref[Events]) -> Callable[..., None]:
    """Return a function that passes an event on. It does not keep the listeners of a released model alive."""

    def forward(*details: Any) -> None:
        for listener in tuple(found.listeners if (found := events()) is not None else ()):
            getattr(listener, event)(*details)

    return forward
