"""The handle of an exchange that is attached to a model."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from syncline.balance.shares import Shares
from syncline.ddp import reducer
from syncline.ddp.engine import Engine
from syncline.ddp.hook import Switch, switches
from syncline.ddp.overlapping import Overlapping, OverlapPolicy
from syncline.ddp.updating import DdpUpdating
from syncline.dist.lane import span_of
from syncline.errors import ExchangeError, UsageError, warn
from syncline.exchange import Exchange, Tree, wire
from syncline.fsdp.attach import AnyShardEngine
from syncline.fsdp.hook import Switch as ShardSwitch
from syncline.fsdp.hook import switch_of
from syncline.fsdp.units import is_sharded
from syncline.records.plan import Plan
from syncline.runtime.checkpoint import Checkpoints
from syncline.runtime.gradient_engine import copied
from syncline.runtime.stats import Stats
from syncline.runtime.validation import ddp_of, group_or_default, only_device

AnyEngine = Engine | DdpUpdating | Overlapping | AnyShardEngine


class Handle:
    """An exchange that is attached to a model. `attach` and `handle_of` return it.

    After `detach`, or another `attach` for the model, everything but `exchange`, `plan` and `tree` raises a UsageError.

    Example:
        >>> handle = syncline.attach(model, syncline.OkTopk(density=0.01))
        >>> train(model)
        >>> print(handle.describe(), handle.stats().sent_bytes, handle.predicted_sent_bytes())
        >>> handle.save("checkpoint/exchange")
    """

    def __init__(self, model: nn.Module, switch: Switch | ShardSwitch, engine: AnyEngine) -> None:
        self._model, self._switch, self._engine = model, switch, engine
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
    def shares(self) -> Shares | None:
        """The batches of the ranks, if gradients or updates are weighted by samples."""
        weights = self._switch.weights if isinstance(self._switch, Switch) else None
        return None if weights is None else weights.shares

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
    def paths(self) -> dict[str, int]:
        """The number of buckets on each path, if the exchange has several paths."""
        states = [bucket.state for bucket in self._attached.buckets.values() if bucket.state is not None]
        return dict(Counter(path for state in states if (path := state.describe())))

    @property
    def caps(self) -> tuple[int, ...]:
        """The sizes in bytes at which buckets are closed, if a profile decided them; otherwise empty."""
        return self._policy.caps if isinstance(self._policy, OverlapPolicy) else ()

    @property
    def exchanges_updates(self) -> bool:
        """True if the next step exchanges updates of the optimizer, and False if it exchanges gradients, as in the
        warm-up."""
        return not self._attached.exchanges_gradients

    @property
    def period(self) -> int:
        """The number of steps in which everything is exchanged at least once: 1 for gradients."""
        return max((getattr(bucket, "period", 1) for bucket in self._attached.buckets.values()), default=1)

    def wait(self) -> None:
        """Wait for what is exchanged beside computation: updates with a `delay`, or weights with `overlap="forward"`.

        All ranks call this between steps. Training waits by itself when results are due. Measurements need this, and
        with overlap, code that reads weights without a function of torch.
        """
        self._concluded.wait()

    def stats(self) -> Stats:
        """Return the number of steps, the bytes sent, and the times of the last step's buckets, on this rank."""
        return self._attached.stats()

    def trace(self, on: bool = True) -> None:
        """Record the collectives of each bucket from the next step on, for `stats`, or stop if `on` is False."""
        self._attached.runner.tracing = on

    def scalars(self, *, deep: bool = False) -> dict[str, float]:
        """Return numbers about the last step on this rank, as far as they are known, for a logger such as TensorBoard.

        For example, `syncline/exposed_ms` is the communication that the backward pass did not hide. The guide "Traces
        and TensorBoard" describes all of them.

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
            kept = [t for kinds in engine.residuals().values() for kind, t in kinds.items() if kind == "residual"]
            squares = [torch.linalg.vector_norm(tensor, dtype=torch.float64) ** 2 for tensor in kept]
            values["residual_norm"] = float(sum(squares)) ** 0.5
        if step.period_s is not None:
            values["step_ms"] = step.period_s * 1e3
        if (span := span_of(step.jobs)) is not None:
            values |= {"exchange_ms": span.exchange_s * 1e3, "exposed_ms": span.exposed_s * 1e3}
        values |= {f"sent_bytes/{level}": sent for level, sent in step.sent_bytes.items()}
        sent = sum(step.sent_bytes.values())
        values |= {"sent_bytes": sent} if step.sent_bytes else {}
        ranks, backend = runner.ranks, runner.groups[0].comm.topology.backend
        if plain := sum(wire.sent_bytes("all_reduce", j.elements, j.itemsize, ranks, backend) for j in step.jobs):
            values["sent_share"] = sent / plain
        return {f"syncline/{name}": float(value) for name, value in values.items()}

    def describe(self) -> str:
        """Describe the attached exchange or plan, the topology if the exchange uses it, and the paths of buckets."""
        ranks = self._attached.runner.ranks
        lines = [f"{self._policy} among {ranks} ranks"]
        if self.plan is not None:
            lines = [f"a plan for {self.plan.model} among {ranks} ranks: {self.plan.reason}"]
            lines += [self.mismatch] if self.mismatch else []
        lines += [] if self.shares is None else [f"weighted by samples: {self.shares.describe()}"]
        if self._topology is not None and self._topology.tree is not None:
            lines += [self._topology.tree.describe(), f"links: {self._topology.known}"]
        return "\n".join([*lines, *(f"buckets: {count} × {path}" for path, count in self.paths.items())])

    def predicted_sent_bytes(self) -> dict[str, int]:
        """Return the bytes per level that the busiest rank should send in a step, by the cost of the exchange.

        For updates, this is the average over the steps in which all weights are exchanged once.
        """
        return self._attached.predicted_sent_bytes()

    def drift(self) -> str | None:
        """Return a sentence if the last exchanges took over 1.5 times as long as planned: a reason to tune again.

        It is None otherwise, without a plan, and before enough steps were measured.
        """
        return self._attached.drift()

    def synced(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model has the weights that all ranks agreed on last, without communication.

        Between exchanges of updates, every rank has weights of its own. Evaluate, and save the model, in this context.
        A rank may do so alone. `save` stores each rank's own weights also here, but `optimizer.step()` is refused.
        With gradients, all ranks always have the same weights, and the context does nothing.

        Example:
            >>> with handle.synced():
            ...     evaluate(model)
        """
        return self._attached.synced()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the averaged gradients so that their norm is at most `max_norm`. All ranks call this before the step.

        With `overlap="forward"`, this replaces `torch.nn.utils.clip_grad_norm_`, which would see the gradients of one
        rank only. Otherwise the two are the same.

        Args:
            max_norm: The largest norm of all gradients together.
            norm_type: The type of the norm, which may be `inf`.
            error_if_nonfinite: Raise a RuntimeError if the norm is not finite.

        Returns:
            The norm of all gradients before they were scaled.
        """
        engine = self._attached
        if isinstance(engine, Overlapping):
            return engine.clip_grad_norm(float(max_norm), float(norm_type), error_if_nonfinite)
        norm: Any = nn.utils.clip_grad_norm_(self._model.parameters(), max_norm, norm_type, error_if_nonfinite)
        whole: torch.Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # a DTensor if sharded
        return whole

    def optimizer_state_dict(self) -> dict[str, Any]:
        """Return the whole state of the optimizer, which a plain DDP training can load. All ranks call this.

        With `overlap="forward"`, each rank has its shard of the state, and `optimizer.state_dict()` raises.
        `optimizer.load_state_dict` takes the whole state on all ranks, and keeps this rank's shard.

        Raises:
            UsageError: The exchange was attached without `overlap="forward"`: use `optimizer.state_dict()`.
        """
        engine = self._attached
        if not isinstance(engine, Overlapping):
            raise UsageError("the optimizer's state is not in shards here: use optimizer.state_dict()")
        return engine.optimizer_state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state of the exchange, to be saved with the model. All ranks call this between steps.

        Raises:
            ExchangeError: An exchange has failed, so the state is unusable.
        """
        engine = self._concluded
        if engine.runner.error is not None:
            raise ExchangeError(f"the state is unusable, because an exchange failed: {engine.runner.explained}")
        state = {"steps": engine.steps, "buckets": engine.bucket_names, "tensors": copied(engine.residuals())}
        if self.shares is not None:
            state["batches"] = list(self.shares.batches)
        return {**self._checkpoints.identity, **state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` returned. All ranks must load their states, or none.

        Args:
            state: The state of the same rank, from a job with the same exchange and number of ranks.

        Raises:
            UsageError: The state belongs to another exchange, model, rank or number of ranks.
        """
        self._checkpoints.check(state)
        self._apply(state)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Save the state of the exchange, one file per rank. All ranks call this between steps.

        If a rank cannot write, every rank raises, and the folder is unchanged. Otherwise, the files of other world
        sizes are removed.

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
            on_world_size: What to do if the number of ranks, or the hosts to which residuals belong, have changed.
                `"refuse"` raises an error. `"reset"` discards the residuals, which loses part of the last gradients.
                `"redistribute"` divides them among the ranks, so that their sum stays the same, but not among hosts.

        Raises:
            UsageError: This rank's file is missing, damaged, or that of another exchange or model.
            MismatchError: Another rank cannot load its file, or the files do not belong to the same checkpoint.
        """
        self._apply(self._checkpoints.load(folder, on_world_size))

    def _apply(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that was checked. Residuals fit any batches, but training with others differs."""
        self._concluded.load(state["tensors"], state["buckets"], state["steps"])
        saved, own = state.get("batches"), self.shares
        if saved is None or self._checkpoints.group.rank():
            return
        if own is None:
            text = f"the checkpoint's steps were weighted by samples, in batches of {', '.join(map(str, saved))}"
            warn(f"{text}: pass shares= to attach again, unless all ranks have equal batches now")
        elif sum(saved) != own.total:
            warn(f"the checkpoint was saved with {sum(saved)} samples per step, and there are {own.total} now")

    def detach(self) -> None:
        """Return the model to plain DDP, with the buckets that it has without a plan. All ranks call this.

        If updates were exchanged, the weights of the ranks are averaged first, and all ranks get the optimizer state of
        the first one. With `overlap="forward"`, the optimizer gets its whole state again, and the last gradients must
        have been stepped. Residuals are dropped. Inside `synced()`, ranks keep the weights that they agreed on last.
        A sharded model returns to FSDP's own collectives, with PyTorch's all-reduce between its replicas. Gradients are
        no longer weighted by samples.
        """
        _ = self._attached  # raises if the handle is detached
        self._switch.turn_to(None)
        if isinstance(self._switch, Switch):
            self._switch.weigh(None)
        if isinstance(self._model, DDP):
            reducer.set_caps(self._model, ())

    @property
    def _checkpoints(self) -> Checkpoints:
        engine, device = self._attached, only_device(dict(self._model.named_parameters()))
        tree = self.tree if engine.keeps else None
        # The shards of a replica are not in one group with those of another: all ranks save and load.
        group = self._model.process_group if isinstance(self._model, DDP) else group_or_default(None)
        return Checkpoints(group, device, self._policy.settings(), tree, engine.misfit)

    @property
    def _attached(self) -> AnyEngine:
        if self._switch.engine is not self._engine:
            text = "this handle is detached, or another attach has replaced it"
            raise UsageError(f"{text}: use the newest handle, or attach again")
        if not self._engine.concludes_together:
            self._engine.conclude()
        return self._engine

    @property
    def _concluded(self) -> AnyEngine:
        """Collective: the engine, after the end of its last step. The steps of a sharded model end on all ranks
        together, so reading a number on one rank must not end one."""
        engine = self._attached
        engine.conclude()
        return engine


def handle_if_attached(ddp: DDP) -> Handle | None:
    """Return the handle of a model, or None if nothing is attached to it."""
    switch = switches.get(ddp)
    if switch is None or not isinstance(switch.engine, Engine | DdpUpdating | Overlapping):
        return None
    return Handle(ddp, switch, switch.engine)


def handle_of(model: nn.Module) -> Handle:
    """Return the handle of a model to which `attach`, `wrap` or `tune` has attached an exchange.

    Args:
        model: A DistributedDataParallel model, or one that is sharded with `fully_shard`.

    Returns:
        A handle, equivalent to the one that `attach` returned.

    Raises:
        UsageError: The model is neither a DDP model nor sharded, or nothing is attached to it.

    Example:
        >>> handle = syncline.handle_of(syncline.wrap(net, plan="plan.json"))
    """
    if is_sharded(model):
        sharded: nn.Module = getattr(model, "_orig_mod", model)
        switch = switch_of(sharded)
        handle = None if switch is None or switch.engine is None else Handle(sharded, switch, switch.engine)
    else:
        handle = handle_if_attached(ddp_of(model))
    if handle is None:
        raise UsageError("nothing is attached to this model: it exchanges its gradients as PyTorch does")
    return handle
