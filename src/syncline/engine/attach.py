"""`attach`: an exchange for a stock DistributedDataParallel model, in one line."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from syncline._version import __version__
from syncline.engine.agreement import agree, flatten
from syncline.engine.comm import group_timeout
from syncline.engine.engine import Engine
from syncline.engine.hook import Switch, switch_of
from syncline.errors import ExchangeError, UsageError
from syncline.exchange import Dense, Exchange, settings

MAX_LANES = 16
_STATE_SCHEMA = 1


@dataclass(frozen=True)
class BucketTiming:
    """One bucket of the last step: seconds on this host's monotonic clock."""

    bucket: int
    lane: int
    bytes: int
    ready_s: float
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Stats:
    """What the exchange has done so far."""

    steps: int
    sent_bytes: dict[str, int]
    """In the last step, by the busiest rank, per level."""
    total_sent_bytes: dict[str, int]
    buckets: tuple[BucketTiming, ...]
    """Of the last step, in the order they were ready; those still under way are left out."""


class Handle:
    """An exchange attached to a model."""

    def __init__(self, ddp: DDP, switch: Switch, engine: Engine, guard: Any) -> None:
        self._ddp, self._switch, self._guard = ddp, switch, guard
        self._engine: Engine | None = engine
        self.exchange = engine.exchange

    @property
    def error(self) -> BaseException | None:
        """What made an exchange fail, if one did: the step was not applied, and the model cannot go on."""
        return self._attached.error

    def stats(self) -> Stats:
        engine = self._attached
        step = engine.last_step
        timings = []
        for job in step.jobs:
            seconds = job.marks.seconds()
            if seconds is not None:
                size = job.flat.numel() * job.flat.element_size()
                timings.append(
                    BucketTiming(job.bucket, job.lane, size, seconds["ready"], seconds["start"], seconds["end"])
                )
        return Stats(engine.steps, dict(step.sent_bytes), engine.sent_bytes, tuple(timings))

    def predicted_sent_bytes(self) -> dict[str, int]:
        """What a step should send, per level, by the exchange's own account of the buckets there are now."""
        return self._attached.predicted_sent_bytes

    def state_dict(self) -> dict[str, Any]:
        """What this rank must save beside the model: plain values, and tensors by parameter name."""
        engine = self._attached
        if engine.error is not None:
            raise ExchangeError(f"the state is unusable, because an exchange failed: {engine.error}")
        return {
            "schema": _STATE_SCHEMA,
            "exchange": settings(self.exchange),
            "rank": dist.get_rank(self._ddp.process_group),
            "world_size": dist.get_world_size(self._ddp.process_group),
            "steps": engine.steps,
            "tensors": engine.tensors(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` was taken: same exchange, same rank of as many."""
        engine = self._attached
        expected = {
            "schema": _STATE_SCHEMA,
            "exchange": settings(self.exchange),
            "rank": dist.get_rank(self._ddp.process_group),
            "world_size": dist.get_world_size(self._ddp.process_group),
        }
        for field, value in expected.items():
            if field not in state:
                raise UsageError(f"this is not the state of an exchange: {field!r} is missing")
            if state[field] != value:
                raise UsageError(f"the state's {field} is {state[field]!r}, here it is {value!r}")
        tensors: Mapping[str, Mapping[str, Tensor]] = state["tensors"]
        engine.load(tensors)
        engine.steps = int(state["steps"])

    def detach(self) -> None:
        """Gives the model back to plain DDP, between steps, on all ranks. The model stays the same object."""
        engine, self._engine = self._attached, None
        if self._switch.engine is engine:
            self._switch.engine = None
        if self._guard is not None:
            self._guard.remove()
        engine.close()

    @property
    def _attached(self) -> Engine:
        if self._engine is None:
            raise UsageError("this handle is detached: attach again to get a new one")
        return self._engine


def attach(
    model: nn.Module, exchange: Exchange | None = None, *, lanes: int = 1, timeout_s: float | None = None
) -> Handle:
    """Has `model`, a DistributedDataParallel, exchange its gradients through `exchange` (default: `Dense()`).

    All ranks of the model's process group call it, with the same arguments. `lanes` exchanges run at the same time,
    each over connections of its own. `timeout_s` is how long a collective may take; default: the process group's.
    Replaces what was attached before; raises, and leaves the model as it was, if anything does not fit.
    """
    ddp = _ddp_of(model)
    exchange = Dense() if exchange is None else exchange
    if not isinstance(exchange, Exchange):
        raise UsageError(f"{exchange!r} is not an exchange: pass an instance, for example syncline.Dense()")
    if not 1 <= lanes <= MAX_LANES:
        raise UsageError(f"lanes is {lanes}: there may be 1 to {MAX_LANES}")
    group: dist.ProcessGroup = ddp.process_group
    timeout = group_timeout(group) if timeout_s is None else timedelta(seconds=timeout_s)
    parameters = _trainable(ddp)
    agree(group, _fingerprint(ddp, group, exchange, lanes, parameters), "what is attached")
    switch = switch_of(ddp)
    engine = Engine(group, parameters, exchange, lanes, timeout)
    if switch.engine is not None:
        switch.engine.close()
    switch.engine = engine
    guard = ddp.register_forward_pre_hook(_refuse_no_sync) if _static_graph(ddp) else None
    return Handle(ddp, switch, engine, guard)


def _ddp_of(model: nn.Module) -> DDP:
    inner = getattr(model, "_orig_mod", model)  # torch.compile(DDP(net))
    if not isinstance(inner, DDP):
        raise UsageError(f"attach needs a DistributedDataParallel model, not {type(inner).__name__}: wrap it first")
    for name, module in inner.module.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise UsageError(f"{name or 'the model'} makes sparse gradients, which are not supported: sparse=False")
    return inner


def _trainable(ddp: DDP) -> dict[str, nn.Parameter]:
    ignored = getattr(ddp, "parameters_to_ignore", ())
    return {
        name.replace("_orig_mod.", ""): parameter
        for name, parameter in ddp.module.named_parameters()
        if parameter.requires_grad and name not in ignored
    }


def _fingerprint(
    ddp: DDP, group: dist.ProcessGroup, exchange: Exchange, lanes: int, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Any]:
    """Everything that must be the same on all ranks for their collectives to fit together."""
    model = {name: f"{tuple(p.shape)} {p.dtype} {p.stride()}" for name, p in parameters.items()}
    flags = {
        "static_graph": _static_graph(ddp),
        "find_unused_parameters": ddp.find_unused_parameters,
        "gradient_as_bucket_view": ddp.gradient_as_bucket_view,
        "bucket_bytes_cap": ddp.bucket_bytes_cap,
    }
    versions = {
        "syncline": __version__,
        "torch": str(torch.__version__),
        "backend": str(dist.get_backend(group)),
    }
    fields = flatten({"exchange": settings(exchange), "ddp": flags, "version": versions, "parameter": model})
    # Groups of a part of the world are named after how many there were before: other counts would wait forever.
    with contextlib.suppress(AttributeError):
        if group.size() < dist.get_world_size():
            fields["process groups created before"] = len(dist.distributed_c10d._world.pg_names)
    return {**fields, "lanes": lanes}


def _static_graph(ddp: DDP) -> bool:
    return bool(getattr(ddp, "static_graph", False))


def _refuse_no_sync(ddp: nn.Module, args: Any) -> None:
    if not ddp.require_backward_grad_sync:
        raise UsageError(
            "no_sync() with static_graph=True silently stops reducing gradients (a defect of DDP): "
            "build the model without static_graph, or accumulate without no_sync()"
        )
