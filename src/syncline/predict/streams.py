"""Tasks on streams: those of one stream run one after the other, in the order of the list, and may wait for others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from syncline.predict.overlap import Line, Transfers

_EPSILON = 1e-12


@dataclass(frozen=True)
class Task:
    """Something that takes time on a stream."""

    stream: str
    seconds: float
    after: tuple[int, ...] = ()
    """Indices of earlier tasks that must have ended before it starts."""
    line: Line | None = None
    """The busiest link of the task's collectives, which gains credit for a burst while it is idle."""
    transfers: Transfers = ()
    """The task's collectives; they run after its own `seconds`."""


def run(tasks: Sequence[Task], slowdown: Mapping[str, float]) -> list[tuple[float, float]]:
    """Return when each task starts and ends. While all streams that `slowdown` names run, a task on one of them takes
    longer by its factor."""
    queues: dict[str, list[int]] = {}
    for index in reversed(range(len(tasks))):
        queues.setdefault(tasks[index].stream, []).append(index)
    starts, ends = [math.inf] * len(tasks), [math.inf] * len(tasks)
    left, whole, now_s = [0.0] * len(tasks), [0.0] * len(tasks), 0.0
    while any(queues.values()):
        heads = {stream: queue[-1] for stream, queue in queues.items() if queue}
        active = {s: i for s, i in heads.items() if all(ends[other] <= now_s for other in tasks[i].after)}
        together = bool(slowdown) and all(stream in active for stream in slowdown)
        speeds = {stream: 1 / slowdown[stream] if together and stream in slowdown else 1.0 for stream in active}
        for index in active.values():
            if starts[index] == math.inf:
                starts[index] = now_s
                left[index] = whole[index] = _seconds(tasks[index], now_s)
        seconds = min(left[index] / speeds[stream] for stream, index in active.items())
        now_s += seconds
        for stream, index in active.items():
            left[index] -= seconds * speeds[stream]
            if left[index] <= _EPSILON * (1 + whole[index]):
                ends[index] = now_s
                if (line := tasks[index].line) is not None:
                    line.free_s = now_s
                queues[stream].pop()
    return list(zip(starts, ends, strict=True))


def _seconds(task: Task, now_s: float) -> float:
    """Return how long a task takes alone, if it starts now."""
    if task.line is None:
        return task.seconds
    return task.line.carry(now_s + task.seconds, task.transfers)[1] - now_s
