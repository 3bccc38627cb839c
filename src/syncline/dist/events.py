"""What happens to the buckets of a model, as one stream of events for everyone who watches it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from syncline.dist.lane import Job
from syncline.dist.span import Span

if TYPE_CHECKING:
    from syncline.dist.comm import LaneGroups


class Listener:
    """Base class of what watches a model's exchanges. Override the events you need. They must not raise."""

    def step_began(self, step: Any, number: int) -> None:
        """Handle the first bucket of a step, in the thread that runs backward. The step before it is over."""

    def step_timed(self, span: Span | None, period_s: float) -> None:
        """Handle the duration of a step that is over; its span is None if a device has not finished it."""

    def bucket_submitted(self, job: Job, step: int) -> None:
        """Handle a bucket that is ready and goes to its lane, in the thread that runs backward."""

    def bucket_started(self, lane: int, step: int, bucket: int) -> None:
        """Handle a bucket that its lane has come to, on the lane."""

    def collective_issued(self, lane: int, kind: str, level: str, sent_bytes: int) -> None:
        """Handle a collective that the lane's bucket is about to issue, on the lane."""

    def bucket_ended(self, job: Job) -> None:
        """Handle the end of an exchange, with or without an error; on a device, all of it has been enqueued."""


class Events(Listener):
    """Passes each event on to all listeners."""

    def __init__(self) -> None:
        self.listeners: list[Listener] = []

    def connect(self, groups: Sequence[LaneGroups]) -> None:
        """Pass on what the process groups of these lanes issue."""
        for lane, lane_groups in enumerate(groups):
            lane_groups.notes.issued = functools.partial(_issued, weakref.ref(self), lane)

    def step_began(self, step: Any, number: int) -> None:
        for listener in tuple(self.listeners):
            listener.step_began(step, number)

    def step_timed(self, span: Span | None, period_s: float) -> None:
        for listener in tuple(self.listeners):
            listener.step_timed(span, period_s)

    def bucket_submitted(self, job: Job, step: int) -> None:
        for listener in tuple(self.listeners):
            listener.bucket_submitted(job, step)

    def bucket_started(self, lane: int, step: int, bucket: int) -> None:
        for listener in tuple(self.listeners):
            listener.bucket_started(lane, step, bucket)

    def collective_issued(self, lane: int, kind: str, level: str, sent_bytes: int) -> None:
        for listener in tuple(self.listeners):
            listener.collective_issued(lane, kind, level, sent_bytes)

    def bucket_ended(self, job: Job) -> None:
        for listener in tuple(self.listeners):
            listener.bucket_ended(job)


def _issued(events: weakref.ref[Events], lane: int, kind: str, level: str, sent_bytes: int) -> None:
    """A comm is in a reference cycle, which must not keep the listeners of a released model alive."""
    if (found := events()) is not None:
        found.collective_issued(lane, kind, level, sent_bytes)
