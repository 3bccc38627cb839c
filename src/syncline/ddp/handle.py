"""The handle of an exchange that is attached to a model."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from syncline.ddp import buckets
from syncline.ddp.engine import Engine, copied
from syncline.ddp.hook import Switch, attached_to
from syncline.dist.span import span_of
from syncline.errors import ExchangeError, UsageError
from syncline.exchange import Exchange, Tree, wire
from syncline.records.plan import Plan
from syncline.runtime.checkpoint import Checkpoints
from syncline.runtime.parameters import ddp_of, only_device, parameters_of
from syncline.runtime.stats import Stats


class Handle:
    """An exchange that is attached to a model. `attach` and `handle_of` return it.

    After `detach`, or after another `attach` for the same model, everything but `exchange`, `plan` and `tree` raises a
    `UsageError`.

    Example:
        >>> handle = syncline.attach(model, syncline.OkTopk(density=0.01))
        >>> handle.load("checkpoint/exchange")
        >>> handle.trace()
        >>> train(model)
        >>> print(handle.describe(), handle.stats().sent_bytes, handle.predicted_sent_bytes())
        >>> handle.save("checkpoint/exchange")
        >>> handle.detach()
    """

    def __init__(self, ddp: DDP, switch: Switch, engine: Engine) -> None:
        self._ddp, self._switch, self._engine = ddp, switch, engine
        self._topology, self._policy = engine.topology, engine.policy

    @property
    def exchange(self) -> Exchange:
        """The exchange of all buckets. With a plan: one of its exchanges, and not `Dense()` if it has another."""
        return self._policy.exchanges[-1]

    @property
    def plan(self) -> Plan | None:
        """The plan that was applied, or None."""
        return self._policy.plan

    @property
    def mismatch(self) -> str | None:
        """How DDP's buckets differ from the plan's, or None. Known after the second step."""
        return self._attached.policy.mismatch

    @property
    def error(self) -> BaseException | None:
        """The error of an exchange that failed, or None. The step was not applied, and training cannot continue."""
        return self._attached.runner.error

    @property
    def straggler(self) -> str | None:
        """The rank that the others wait for, and how long, or None. Only rank 0 knows it, and updates it every 10 s."""
        return self._attached.runner.straggler

    @property
    def tree(self) -> Tree | None:
        """The topology as a tree of hosts and racks, or None if the exchange does not use it."""
        return None if self._topology is None else self._topology.tree

    @property
    def lanes(self) -> int:
        """The number of lanes."""
        return len(self._attached.runner.lanes)

    @property
    def ways(self) -> dict[str, int]:
        """The number of buckets on each path, if the exchange has several paths."""
        states = [bucket.state for bucket in self._attached.buckets.values() if bucket.state is not None]
        return dict(Counter(path for state in states if (path := state.describe())))

    def stats(self) -> Stats:
        """Return the number of steps, the bytes sent, and the times of the last step's buckets, on this rank."""
        return self._attached.runner.stats()

    def trace(self, on: bool = True) -> None:
        """Record the collectives of each bucket from the next step on, for `stats`, or stop if `on` is False."""
        self._attached.runner.tracing = on

    def scalars(self, *, deep: bool = False) -> dict[str, float]:
        """Return numbers about the last step on this rank, for a logger such as TensorBoard.

        For example, `syncline/exposed_ms` is the communication that the backward pass did not hide. The guide "Traces
        and TensorBoard" describes all numbers. Those that are not known yet are left out.

        Args:
            deep: Also return the norm of the residual. This reads all of it, and on CUDA waits for the device.

        Example:
            >>> for name, value in handle.scalars().items():
            ...     writer.add_scalar(name, value, handle.stats().steps)
        """
        engine = self._attached
        runner, step = engine.runner, engine.runner.last_step
        values: dict[str, float] = {}
        if deep and engine.keeps and step.sent_bytes:  # first, because it waits for the device: then times are known
            squares = [
                torch.linalg.vector_norm(tensor, dtype=torch.float64) ** 2
                for kinds in engine.residuals().values()
                for kind, tensor in kinds.items()
                if kind != "velocity"  # momentum, which is not part of the residual
            ]
            values["residual_norm"] = float(sum(squares)) ** 0.5
        if step.period_s is not None:
            values["step_ms"] = step.period_s * 1e3
        if (span := span_of(step.jobs)) is not None:
            values |= {"exchange_ms": span.exchange_s * 1e3, "exposed_ms": span.exposed_s * 1e3}
        values |= {f"sent_bytes/{level}": sent for level, sent in step.sent_bytes.items()}
        if step.sent_bytes:
            values["sent_bytes"] = sum(step.sent_bytes.values())
        ranks, backend = runner.ranks, runner.groups[0].comm.topology.backend
        plain = sum(wire.sent_bytes("all_reduce", job.elements, job.itemsize, ranks, backend) for job in step.jobs)
        if plain:
            values["sent_share"] = sum(step.sent_bytes.values()) / plain
        return {f"syncline/{name}": float(value) for name, value in values.items()}

    def describe(self) -> str:
        """Describe the attached exchange or plan, the topology if the exchange uses it, and the paths of buckets."""
        ranks = self._attached.runner.ranks
        lines = [f"{self.exchange!r} among {ranks} ranks"]
        if self.plan is not None:
            lines = [f"a plan for {self.plan.model} among {ranks} ranks: {self.plan.reason}"]
            lines += [self.mismatch] if self.mismatch else []
        if self._topology is not None:
            lines += [self._topology.tree.describe(), f"links: {self._topology.known}"]
        return "\n".join([*lines, *(f"buckets: {count} × {path}" for path, count in self.ways.items())])

    def predicted_sent_bytes(self) -> dict[str, int]:
        """Return the bytes per level that the busiest rank should send in a step, by the cost of the exchange."""
        return self._attached.runner.predicted_sent_bytes(self._attached.buckets.values())

    def drift(self) -> str | None:
        """Return a sentence if the last exchanges took more than 1.5 times as long as planned, or None.

        This is a reason to tune again. It is None without a plan, and before enough steps were measured.
        """
        return self._attached.drift()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state of the exchange, to be saved with the model.

        Raises:
            ExchangeError: An exchange has failed, so the state is unusable.
        """
        engine = self._attached
        if (error := engine.runner.error) is not None:
            raise ExchangeError(f"the state is unusable, because an exchange failed: {error}")
        return {
            **self._checkpoints.identity,
            "steps": engine.runner.steps,
            "buckets": engine.bucket_names,
            "tensors": copied(engine.residuals()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` returned. All ranks must load their states, or none.

        Args:
            state: The state of the same rank, from a job with the same exchange and number of ranks.

        Raises:
            UsageError: The state belongs to another exchange, model, rank or number of ranks.
        """
        self._checkpoints.check(state)
        self._attached.load(state["tensors"], state["buckets"], state["steps"])

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Save the state of the exchange, one file per rank. All ranks call this between steps.

        If a rank cannot write, every rank raises, and the folder is unchanged. Otherwise, the files that jobs with
        other numbers of ranks have saved there are removed.

        Args:
            folder: The folder, which is created if necessary.

        Raises:
            ExchangeError: An exchange has failed, so the state is unusable.
            UsageError: This rank cannot write to the folder.
            MismatchError: Another rank cannot write, or the ranks are at different steps.
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
            UsageError: This rank's file is missing or damaged, it belongs to another exchange or model, or an argument
                is invalid.
            MismatchError: Another rank cannot load its file, or the files do not belong to the same checkpoint.
        """
        state = self._checkpoints.load(folder, on_world_size)
        self._attached.load(state["tensors"], state["buckets"], state["steps"])

    def detach(self) -> None:
        """Return the model to plain DDP, with the buckets that it has without a plan. All ranks call this."""
        _ = self._attached  # raises if the handle is detached
        self._switch.turn_to(None)
        if self.plan is not None and buckets.why_not_change(self._ddp) is None:
            buckets.make_plain(self._ddp)

    @property
    def _checkpoints(self) -> Checkpoints:
        engine = self._attached
        # With `Hierarchical`, the residual belongs to the leaders of the hosts, so it depends on the topology.
        levels = repr(self._topology.tree.root) if self._topology is not None and engine.keeps else None
        group, device = self._ddp.process_group, only_device(parameters_of(self._ddp))
        return Checkpoints(group, device, self._policy.settings(), levels, engine.misfit)

    @property
    def _attached(self) -> Engine:
        if self._switch.engine is not self._engine:
            raise UsageError(
                "this handle is detached, or another attach has replaced it: use the newest handle, or attach again"
            )
        self._engine.conclude()
        return self._engine


def handle_if_attached(ddp: DDP) -> Handle | None:
    """Return the handle of a model, or None if nothing is attached to it."""
    switch = attached_to(ddp)
    return None if switch is None or switch.engine is None else Handle(ddp, switch, switch.engine)


def handle_of(model: nn.Module) -> Handle:
    """Return the handle of a model to which `attach`, `wrap` or `tune` has attached an exchange.

    Args:
        model: A DistributedDataParallel model.

    Returns:
        A handle, equivalent to the one that `attach` returned.

    Raises:
        UsageError: The model is not a DDP model, or nothing is attached to it.

    Example:
        >>> model = syncline.wrap(net, plan="plan.json")
        >>> handle = syncline.handle_of(model)
    """
    handle = handle_if_attached(ddp_of(model))
    if handle is None:
        raise UsageError("nothing is attached to this model: it exchanges its gradients as plain DDP does")
    return handle
