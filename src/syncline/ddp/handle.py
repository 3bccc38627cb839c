"""What a user holds of an exchange that is attached to a model."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from syncline.ddp import buckets
from syncline.ddp.engine import Engine
from syncline.ddp.hook import Switch, forget
from syncline.ddp.scalars import Log, Writer, scalars_of
from syncline.errors import ExchangeError, UsageError
from syncline.exchange import Exchange, Tree
from syncline.records.plan import Plan
from syncline.runtime.bucket_policy import Planned
from syncline.runtime.checkpoint import Checkpoints
from syncline.runtime.parameters import only_device, parameters_of
from syncline.runtime.stats import Stats, timings_of


class Handle:
    """An exchange attached to a model."""

    def __init__(self, ddp: DDP, switch: Switch, engine: Engine) -> None:
        self._ddp, self._switch, self._engine = ddp, switch, engine
        self._place, self._route = engine.place, engine.route
        self.tune: Callable[..., Any] | None = None
        """What `retune` calls. Set by `tune`, which this package cannot import."""

    @property
    def exchange(self) -> Exchange:
        """Of all buckets; of a plan's, one that is not plain, if any is."""
        return self._route.exchanges[-1]

    @property
    def plan(self) -> Plan | None:
        """What buckets follow, if a plan was applied."""
        return self._route.plan if isinstance(self._route, Planned) else None

    @property
    def mismatch(self) -> str | None:
        """How DDP's buckets are not the plan's, if they are not. Known after the second step."""
        return self._attached.route.mismatch

    @property
    def error(self) -> BaseException | None:
        """What made an exchange fail, if one did: the step was not applied, and the model cannot go on."""
        return self._attached.error

    @property
    def straggler(self) -> str | None:
        """Which rank keeps the others waiting, and for how long, if one does: the first rank looks every 10 s."""
        return self._attached.runner.straggler

    def stats(self) -> Stats:
        engine = self._attached
        step = engine.last_step
        return Stats(engine.steps, dict(step.sent_bytes), engine.runner.sent_bytes, timings_of(step.jobs))

    def trace(self, on: bool = True) -> None:
        """Has `stats().buckets` tell each bucket's collectives too, from the next step on, or not any more."""
        self._attached.runner.tracing = on

    def scalars(self, *, deep: bool = False) -> dict[str, float]:
        """The last step in numbers, by names for TensorBoard. This rank's own; what is not known is left out.

        - `syncline/step_ms`: from when its first bucket was ready, or on CUDA was enqueued, back to when that of the
          step before was: all that lies between, with the update, data and whatever else the script does;
        - `syncline/exchange_ms`: from its first bucket's gradients to its last bucket's end;
        - `syncline/exposed_ms`: of that, what came after the last bucket was ready, when backward has nothing left to
          hide it behind;
        - `syncline/sent_bytes`, and `syncline/sent_bytes/LEVEL` of each level, as in `stats`;
        - `syncline/sent_share`: of the bytes that plain DDP would send for the same buckets.

        `deep`: what takes a pass over memory, and on CUDA waits for the device. For exchanges that keep something back:

        - `syncline/residual_norm`: the Euclidean norm of all that this rank keeps and was not applied yet;
        - `syncline/density`: of the elements that went through such exchanges, those that came out as something else
          than zero. Only of steps that a `log_to(…, deep=True)` was going to write.
        """
        engine = self._attached
        return scalars_of(engine, engine.last_step, deep=deep)

    def log_to(self, writer: Writer, every: int = 50, *, deep: bool = False) -> Log:
        """Writes `scalars` of every so many steps with `writer.add_scalar(name, value, step)`, of this rank: call it on
        rank 0, or wherever you want to know. `step` is how many were exchanged until then.

        A `SummaryWriter` does, or the `experiment` of Lightning's TensorBoard logger. If it raises, a warning says so,
        and it is not called again. `close()` what this returns to end it; detaching ends it too.
        """
        engine = self._attached
        if isinstance(writer, type) or not callable(getattr(writer, "add_scalar", None)):
            raise UsageError(f"writer is {writer!r}: pass an object with add_scalar, as TensorBoard's SummaryWriter")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise UsageError(f"every is {every!r}: it is a number of steps, at least 1")
        return Log(engine, writer, every, deep)

    def describe(self) -> str:
        """What is attached, where ranks sit as far as the exchange asks, and which way buckets go."""
        ranks = dist.get_world_size(self._ddp.process_group)
        lines = [f"{self.exchange!r} among {ranks} ranks"]
        if self.plan is not None:
            lines = [f"a plan for {self.plan.model} among {ranks} ranks: {self.plan.reason}"]
            lines += [self.mismatch] if self.mismatch else []
        if self._place is not None:
            lines += [self._place.tree.describe(), f"links: {self._place.known}"]
        return "\n".join([*lines, *(f"buckets: {count} × {way}" for way, count in self.ways.items())])

    @property
    def tree(self) -> Tree | None:
        """Where ranks sit, for an exchange that asks."""
        return None if self._place is None else self._place.tree

    @property
    def lanes(self) -> int:
        return len(self._attached.runner.lanes)

    @property
    def ways(self) -> dict[str, int]:
        """Where an exchange has several ways for a bucket to go: which, and for how many buckets it takes them."""
        return self._attached.ways

    def predicted_sent_bytes(self) -> dict[str, int]:
        """What a step should send, per level, by the exchange's own account of the buckets there are now."""
        return self._attached.predicted_sent_bytes

    def state_dict(self) -> dict[str, Any]:
        """What this rank must save beside the model: plain values, and tensors by parameter name."""
        engine = self._attached
        if engine.error is not None:
            raise ExchangeError(f"the state is unusable, because an exchange failed: {engine.error}")
        return {
            **self._checkpoints.identity,
            "steps": engine.steps,
            "buckets": engine.bucket_names,
            "tensors": engine.tensors(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` was taken: same exchange, same rank of as many. All ranks load, or none."""
        self._checkpoints.check(state)
        self._go_on(state)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes what this rank must save to a file of its own in `folder`. All ranks call it, between steps.

        If one of them cannot write, every rank raises and the folder holds what it held before. If all can, what
        other numbers of ranks saved there is removed.
        """
        self._checkpoints.save(folder, self.state_dict())

    def load(self, folder: str | os.PathLike[str], *, on_world_size: str = "refuse") -> None:
        """Goes on where `save` was called, on all ranks together.

        `on_world_size`: what to do where not so many ranks are here as saved it, or where hosts kept something for
        their ranks and those sit on other hosts now. `refuse` to go on; or `reset`: forget what was kept, which loses
        some of the last gradients; or `redistribute` it, so that its sum stays the same: not for what hosts kept.
        """
        self._go_on(self._checkpoints.load(folder, on_world_size))

    def _go_on(self, state: Mapping[str, Any]) -> None:
        engine = self._attached
        engine.load(state["tensors"], state["buckets"], state["steps"])

    def drift(self) -> str | None:
        """How much longer buckets take than the plan expected, where that is so much that another might be better."""
        return self._attached.drift()

    def retune(self, step: Callable[[nn.Module], object], **options: Any) -> Any:
        """Measures, plans and applies anew, as `tune` does, which explains its arguments and what it returns. Of a
        handle that `tune` has returned; for others, call `syncline.tune`."""
        if self.tune is None:
            raise UsageError("only a handle that syncline.tune returned can retune: call syncline.tune(model, step)")
        return self.tune(self._ddp, step, **options)

    def detach(self) -> None:
        """Gives the model back to plain DDP, between steps, on all ranks. The model stays the same object; after a plan
        its buckets are its own again."""
        _ = self._attached  # raises where there is nothing to detach
        self._switch.turn_to(None)
        if self.plan is not None and buckets.why_not_change(self._ddp) is None:
            forget(self._ddp)
            buckets.put_back(self._ddp)

    @property
    def _checkpoints(self) -> Checkpoints:
        engine = self._attached
        # Levels count for what keeps something on leaders.
        levels = repr(self._place.tree.root) if self._place is not None and engine.keeps else None
        group, device = self._ddp.process_group, only_device(parameters_of(self._ddp))
        return Checkpoints(group, device, self._route.settings(), levels, engine.misfit)

    @property
    def _attached(self) -> Engine:
        if self._switch.engine is not self._engine:
            raise UsageError("this handle is detached, or another attach has replaced it: use the newest, or attach")
        self._engine.conclude()
        return self._engine
