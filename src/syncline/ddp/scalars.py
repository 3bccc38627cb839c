"""Numbers about the last step, for TensorBoard.

All of them describe this rank, and nothing in this module communicates, so any rank may call it. Numbers that are not
known are left out: the times of a step that the GPU has not finished, and the period of the first step.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch

from syncline.ddp.engine import Engine
from syncline.dist.events import Listener
from syncline.dist.span import span_of
from syncline.errors import first_line, warn
from syncline.exchange import wire
from syncline.runtime.bucket_runner import Step

PREFIX = "syncline/"


class Writer(Protocol):
    """A `torch.utils.tensorboard.SummaryWriter`, or the `experiment` of Lightning's TensorBoard logger."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> Any: ...


def scalars_of(engine: Engine, step: Step, *, deep: bool = False) -> dict[str, float]:
    """Return the scalars of a step that is over. `Handle.scalars` describes them."""
    if not step.sent_bytes and not step.jobs:
        return {}
    values = _deep(engine, step) if deep else {}  # first, because it waits for the device: then times are known
    if step.period_s is not None:
        values["step_ms"] = step.period_s * 1e3
    values |= _times_ms(step)
    values["sent_bytes"] = sum(step.sent_bytes.values())
    values |= {f"sent_bytes/{level}": sent for level, sent in step.sent_bytes.items()}
    plain = sum(
        wire.sent_bytes("all_reduce", job.elements, job.itemsize, engine.runner.ranks, engine.runner.backend)
        for job in step.jobs
    )
    if plain:
        values["sent_share"] = values["sent_bytes"] / plain
    return {f"{PREFIX}{name}": float(value) for name, value in values.items()}


def _times_ms(step: Step) -> dict[str, float]:
    span = span_of(step.jobs)
    return {} if span is None else {"exchange_ms": span.exchange_s * 1e3, "exposed_ms": span.exposed_s * 1e3}


def _deep(engine: Engine, step: Step) -> dict[str, float]:
    """Return the scalars that need a pass over memory."""
    values = {}
    if step.applied:
        values["density"] = sum(int(count) for count, _ in step.applied) / sum(numel for _, numel in step.applied)
    if engine.keeps:
        squares = [
            torch.linalg.vector_norm(tensor, dtype=torch.float64) ** 2
            for kinds in engine.residuals()
            for kind, tensor in kinds.items()
            if kind != "velocity"  # momentum, which is not part of the residual
        ]
        values["residual_norm"] = float(sum(squares)) ** 0.5
    return values


class Log(Listener):
    """Writes the scalars of a model at regular intervals, until it is closed or its handle is detached.

    A step is written when a later step begins and the device has finished it, by the thread that runs backward. If
    writing fails, a warning follows, and training continues.
    """

    def __init__(self, engine: Engine, writer: Writer, every: int, deep: bool) -> None:
        self._engine = weakref.ref(engine)  # the engine holds this object
        self._writer, self._every, self._deep = writer, every, deep
        self._due: tuple[int, Step] | None = None
        engine.runner.events.listeners.append(self)

    def step_began(self, step: Step, number: int) -> None:
        """Write the step that is due, if its numbers are known."""
        engine = self._engine()
        if engine is None:
            return
        if engine.last_step.jobs and engine.steps % self._every == 0:
            self._write(engine)  # the step that is still due, with the numbers known so far
            self._due = (engine.steps, engine.last_step)
        # The residual changes in this step, so its norm cannot be computed later, and waits for the device.
        if self._due is not None and (_ended(self._due[1]) or (self._deep and engine.keeps)):
            self._write(engine)
        step.counts = step.counts or (self._deep and (number + 1) % self._every == 0)

    def _write(self, engine: Engine) -> None:
        due, self._due = self._due, None
        if due is None:
            return
        number, step = due
        try:
            for name, value in scalars_of(engine, step, deep=self._deep).items():
                self._writer.add_scalar(name, value, number)
        except Exception as error:  # noqa: BLE001 - whatever a writer raises, training goes on
            self._stop(engine)
            warn(f"scalars are no longer logged, because writing failed at step {number}: {first_line(error)}")

    def _stop(self, engine: Engine) -> None:
        if self in engine.runner.events.listeners:
            engine.runner.events.listeners.remove(self)

    def close(self) -> None:
        """Stop logging, and write the step that is due, as far as its numbers are known. The writer stays open."""
        engine = self._engine()
        if engine is not None and self in engine.runner.events.listeners:
            self._stop(engine)
            if self._due is None and engine.last_step.jobs and engine.steps % self._every == 0:
                self._due = (engine.steps, engine.last_step)
            self._write(engine)


def _ended(step: Step) -> bool:
    return all(job.marks.seconds() is not None for job in step.jobs)
