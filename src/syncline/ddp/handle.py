"""The handle of an exchange that is attached to a model."""

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
    """An exchange that is attached to a model. `attach` and `handle_of` return it.

    After `detach`, or after another `attach` for the same model, everything but `exchange`, `plan`, `tree` and `retune`
    raises a `UsageError`.

    Example:
        >>> handle = syncline.attach(model, syncline.OkTopk(density=0.01))
        >>> train(model)
        >>> handle.save("checkpoint/exchange")
        >>> handle.detach()
    """

    def __init__(self, ddp: DDP, switch: Switch, engine: Engine) -> None:
        self._ddp, self._switch, self._engine = ddp, switch, engine
        self._place, self._route = engine.place, engine.route
        self.tune: Callable[..., Any] | None = None
        """The function that `retune` calls. `tune` sets it, because this package cannot import `tune`."""

    @property
    def exchange(self) -> Exchange:
        """The exchange of all buckets. With a plan: one of its exchanges, and not `Dense()` if it has another."""
        return self._route.exchanges[-1]

    @property
    def plan(self) -> Plan | None:
        """The plan that was applied, or None."""
        return self._route.plan if isinstance(self._route, Planned) else None

    @property
    def mismatch(self) -> str | None:
        """How DDP's buckets differ from the plan's, or None. Known after the second step."""
        return self._attached.route.mismatch

    @property
    def error(self) -> BaseException | None:
        """The error of an exchange that failed, or None. The step was not applied, and training cannot continue."""
        return self._attached.error

    @property
    def straggler(self) -> str | None:
        """The rank that the others wait for, and how long, or None. Only rank 0 knows it, and updates it every 10 s."""
        return self._attached.runner.straggler

    def stats(self) -> Stats:
        """Return statistics of the exchange on this rank.

        Returns:
            The number of steps, the bytes sent, and the times of the last step's buckets.

        Raises:
            UsageError: The handle is detached.

        Example:
            >>> handle.stats().sent_bytes
            {'world': 51114064}
        """
        engine = self._attached
        step = engine.last_step
        return Stats(engine.steps, dict(step.sent_bytes), engine.runner.sent_bytes, timings_of(step.jobs))

    def trace(self, on: bool = True) -> None:
        """Record the collectives of each bucket, from the next step on.

        Args:
            on: False stops recording.

        Raises:
            UsageError: The handle is detached.

        Example:
            >>> handle.trace()
            >>> train_step(model)
            >>> [phase.name for phase in handle.stats().buckets[0].phases]
            ['all_reduce']
        """
        self._attached.runner.tracing = on

    def scalars(self, *, deep: bool = False) -> dict[str, float]:
        """Return numbers about the last step on this rank, with names for TensorBoard.

        Numbers that are not known yet are left out.

        - `syncline/step_ms`: the time between the first bucket of the previous step and that of this step. This
          includes the optimizer, loading data and everything else that the script does.
        - `syncline/exchange_ms`: the time from the gradients of the first bucket to the end of the last bucket.
        - `syncline/exposed_ms`: the part of `exchange_ms` after the last bucket was ready, which the backward pass
          cannot hide.
        - `syncline/sent_bytes`, and `syncline/sent_bytes/LEVEL` for each level: as in `stats`.
        - `syncline/sent_share`: the sent bytes divided by those that plain DDP would send for the same buckets.

        With `deep`, for exchanges with a residual:

        - `syncline/residual_norm`: the Euclidean norm of this rank's residual.
        - `syncline/density`: the fraction of nonzero elements in the results. Only for steps that
          `log_to(…, deep=True)` writes.

        Args:
            deep: Also return numbers that need a pass over memory, and on CUDA wait for the device.

        Returns:
            The numbers by name. Empty before the first step.

        Raises:
            UsageError: The handle is detached.

        Example:
            >>> handle.scalars()["syncline/exposed_ms"]
            3.2
        """
        engine = self._attached
        return scalars_of(engine, engine.last_step, deep=deep)

    def log_to(self, writer: Writer, every: int = 50, *, deep: bool = False) -> Log:
        """Write `scalars` to TensorBoard at regular intervals.

        Only the ranks that call this write. If the writer raises an exception, a warning follows, and the writer is not
        called again.

        Args:
            writer: An object with a method `add_scalar(name, value, step)`, such as TensorBoard's `SummaryWriter`. The
                `step` is the number of steps exchanged so far.
            every: The interval in steps.
            deep: As for `scalars`.

        Returns:
            The log. Its `close()` ends it, and so does `detach`.

        Raises:
            UsageError: An argument is invalid, or the handle is detached.

        Example:
            >>> if rank == 0:
            ...     log = handle.log_to(SummaryWriter("runs"), every=100)
        """
        engine = self._attached
        if isinstance(writer, type) or not callable(getattr(writer, "add_scalar", None)):
            raise UsageError(
                f"writer is {writer!r}: pass an object with add_scalar, such as TensorBoard's SummaryWriter"
            )
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise UsageError(f"every is {every!r}: it must be a number of steps, at least 1")
        return Log(engine, writer, every, deep)

    def describe(self) -> str:
        """Describe the attached exchange or plan, the topology if the exchange uses it, and the paths of buckets.

        Returns:
            A text of one or more lines.

        Raises:
            UsageError: The handle is detached.

        Example:
            >>> print(handle.describe())
            Dense(wire='fp32') among 4 ranks
        """
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
        """The topology as a tree of hosts and racks, or None if the exchange does not use it."""
        return None if self._place is None else self._place.tree

    @property
    def lanes(self) -> int:
        """The number of lanes."""
        return len(self._attached.runner.lanes)

    @property
    def ways(self) -> dict[str, int]:
        """The number of buckets on each path, if the exchange has several paths."""
        return self._attached.ways

    def predicted_sent_bytes(self) -> dict[str, int]:
        """Predict the bytes that a step sends, from the cost that the exchange states for the current buckets.

        Returns:
            The bytes that the busiest rank sends, per level.

        Raises:
            UsageError: The handle is detached.

        Example:
            >>> handle.predicted_sent_bytes() == handle.stats().sent_bytes
            True
        """
        return self._attached.predicted_sent_bytes

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state of the exchange, to be saved with the model.

        Returns:
            Plain values, and residuals by parameter name.

        Raises:
            ExchangeError: An exchange has failed, so the state is unusable.
            UsageError: The handle is detached.

        Example:
            >>> torch.save(handle.state_dict(), f"exchange-{rank}.pt")
        """
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
        """Continue from a state that `state_dict` returned. All ranks must load their states, or none.

        Args:
            state: The state of the same rank, from a job with the same exchange and number of ranks.

        Raises:
            UsageError: The state belongs to another exchange, model, rank or number of ranks; or the handle is
                detached.

        Example:
            >>> handle.load_state_dict(torch.load(f"exchange-{rank}.pt"))
        """
        self._checkpoints.check(state)
        self._continue_from(state)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Save the state of the exchange, one file per rank. All ranks call this between steps.

        If a rank cannot write, every rank raises, and the folder is unchanged. Otherwise, files in the folder that
        jobs with other numbers of ranks have saved are removed.

        Args:
            folder: The folder, which is created if necessary.

        Raises:
            ExchangeError: An exchange has failed, so the state is unusable.
            UsageError: This rank cannot write to the folder, or the handle is detached.
            MismatchError: Another rank cannot write, or the ranks are at different steps.

        Example:
            >>> handle.save("checkpoint/exchange")
        """
        self._checkpoints.save(folder, self.state_dict())

    def load(self, folder: str | os.PathLike[str], *, on_world_size: str = "refuse") -> None:
        """Continue from a checkpoint that `save` wrote. All ranks call this. If it raises, nothing is changed.

        Args:
            folder: The folder that was passed to `save`.
            on_world_size: What to do if the number of ranks has changed, or if residuals belong to hosts and the
                ranks are now on other hosts. `"refuse"` raises an error. `"reset"` discards the residuals, which loses
                part of the last gradients. `"redistribute"` divides them among the ranks, so that their sum stays the
                same; this is not possible for residuals that belong to hosts.

        Raises:
            UsageError: This rank's file is missing or damaged, it belongs to another exchange or model, an argument
                is invalid, or the handle is detached.
            MismatchError: Another rank cannot load its file, or the files do not belong to the same checkpoint.

        Example:
            >>> handle = syncline.attach(model, syncline.OkTopk(density=0.01))
            >>> handle.load("checkpoint/exchange")
        """
        self._continue_from(self._checkpoints.load(folder, on_world_size))

    def _continue_from(self, state: Mapping[str, Any]) -> None:
        self._attached.load(state["tensors"], state["buckets"], state["steps"])

    def drift(self) -> str | None:
        """Describe how much longer exchanges take than the plan predicted.

        Returns:
            A sentence if the median of the last steps is more than 1.5 times the prediction; None otherwise, without a
            plan, or if too few steps were measured.

        Raises:
            UsageError: The handle is detached.

        Example:
            >>> if handle.drift() is not None:
            ...     handle.retune(step)
        """
        return self._attached.drift()

    def retune(self, step: Callable[[nn.Module], object], **options: Any) -> Any:
        """Measure, plan and apply again. Only for handles that `tune` returned; for others, call `syncline.tune`.

        Args:
            step: A function that runs one forward and backward pass on the model, as for `tune`.
            **options: Further arguments of `tune`.

        Returns:
            A `Tuned`, as `tune` returns it.

        Raises:
            UsageError: `tune` did not return this handle, or an argument is invalid.

        Example:
            >>> tuned = syncline.tune(model, step)
            >>> tuned = tuned.handle.retune(step, budget_s=20)
        """
        if self.tune is None:
            raise UsageError("only a handle that syncline.tune returned can retune: call syncline.tune(model, step)")
        return self.tune(self._ddp, step, **options)

    def detach(self) -> None:
        """Return the model to plain DDP. All ranks call this between steps.

        The model stays the same object. If a plan has changed its buckets, they are restored.

        Raises:
            UsageError: The handle is detached already.

        Example:
            >>> handle.detach()
        """
        _ = self._attached  # raises if the handle is detached
        self._switch.turn_to(None)
        if self.plan is not None and buckets.why_not_change(self._ddp) is None:
            forget(self._ddp)
            buckets.put_back(self._ddp)

    @property
    def _checkpoints(self) -> Checkpoints:
        engine = self._attached
        # With `Hierarchical`, the residual belongs to the leaders of the hosts, so it depends on the topology.
        levels = repr(self._place.tree.root) if self._place is not None and engine.keeps else None
        group, device = self._ddp.process_group, only_device(parameters_of(self._ddp))
        return Checkpoints(group, device, self._route.settings(), levels, engine.misfit)

    @property
    def _attached(self) -> Engine:
        if self._switch.engine is not self._engine:
            raise UsageError(
                "this handle is detached, or another attach has replaced it: use the newest handle, or attach again"
            )
        self._engine.conclude()
        return self._engine
