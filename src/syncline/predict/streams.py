"""Tasks on streams: those of one stream run one after the other, in the order of the list, and may wait for others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_EPSILON = 1e-12


@dataclass(frozen=True)
class Task:
    """Something that takes time on a stream."""

    stream: str
    seconds: float
    after: tuple[int, ...] = ()
    """Indices of earlier tasks that must have ended before it starts."""


def run(tasks: Sequence[Task], slowdown: Mapping[str, float]) -> list[tuple[float, float]]:
    """Return when each task starts and ends. While all streams that `slowdown` names run, a task on one of them takes
    longer by its factor."""
    queues: dict[str, list[int]] = {}
    for index in reversed(range(len(tasks))):
        queues.setdefault(tasks[index].stream, []).append(index)
    starts, ends = [math.inf] * len(tasks), [math.inf] * len(tasks)
    left, now_s = [task.seconds for task in tasks], 0.0
    while any(queues.values()):
        heads = {stream: queue[-1] for stream, queue in queues.items() if queue}
        active = {s: i for s, i in heads.items() if all(ends[other] <= now_s for other in tasks[i].after)}
        together = bool(slowdown) and all(stream in active for stream in slowdown)
        speeds = {stream: 1 / slowdown[stream] if together and stream in slowdown else 1.0 for stream in active}
        for index in active.values():
            starts[index] = min(starts[index], now_s)
        seconds = min(left[index] / speeds[stream] for stream, index in active.items())
        now_s += seconds
        for stream, index in active.items():
            left[index] -= seconds * speeds[stream]
            if left[index] <= _EPSILON * (1 + tasks[index].seconds):
                ends[index] = now_s
                queues[stream].pop()
    return list(zip(starts, ends, strict=True))
