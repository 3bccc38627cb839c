"""`attach`: an exchange for a stock DistributedDataParallel model, in one line."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP

from syncline._version import __version__
from syncline.engine import buckets
from syncline.engine.agreement import current_device, digest, flatten, meet
from syncline.engine.checkpoint import Checkpoints
from syncline.engine.comm import group_timeout
from syncline.engine.engine import Engine
from syncline.engine.hook import Switch, forget, other_hooks, switch_of
from syncline.engine.model import ddp_of, only_device, parameters_of
from syncline.engine.place import Place, find_place
from syncline.engine.route import Planned, Route, Uniform
from syncline.errors import ExchangeError, SynclineError, UsageError
from syncline.exchange import Dense, Exchange, Tree, default_lanes
from syncline.measure.network import Network
from syncline.plan.plan import Plan
from syncline.predict.schedule import MAX_LANES


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

    def __init__(self, ddp: DDP, switch: Switch, engine: Engine, place: Place | None = None) -> None:
        self._ddp, self._switch, self._engine = ddp, switch, engine
        self._place = place
        self._route = engine.route

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
        return self._attached.lanes

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
            **self._identity,
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
        engine.load(state["tensors"], state["buckets"])
        engine.steps = state["steps"]

    def drift(self) -> str | None:
        """How much longer buckets take than the plan expected, where that is so much that another might be better."""
        return self._attached.drift()

    def retune(self, step: Callable[[nn.Module], object], **options: Any) -> Any:
        """Measures, plans and applies anew, as `tune` does, which explains its arguments and what it returns."""
        from syncline.engine.tuning import tune

        return tune(self._ddp, step, **options)

    def detach(self) -> None:
        """Gives the model back to plain DDP, between steps, on all ranks. The model stays the same object; after a plan
        its buckets are its own again."""
        _ = self._attached  # raises where there is nothing to detach
        self._switch.turn_to(None)
        if self.plan is not None and buckets.why_not_change(self._ddp) is None:
            forget(self._ddp)
            buckets.put_back(self._ddp)

    @property
    def _identity(self) -> dict[str, Any]:
        return self._checkpoints.identity

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
        return self._engine


def attach(
    model: nn.Module,
    exchange: Exchange | None = None,
    *,
    lanes: int | None = None,
    timeout_s: float | None = None,
    network: Network | str | os.PathLike[str] | None = None,
    scaler: GradScaler | None = None,
) -> Handle:
    """Has `model`, a DistributedDataParallel, exchange its gradients through `exchange` (default: `Dense()`).

    All ranks of the model's process group call it, with the same arguments. `lanes` exchanges run at the same time,
    each over connections of its own; default: one, or two where an exchange over gloo waits between its collectives,
    so that another uses the links meanwhile. `timeout_s` is how long a collective may take; default: the group's own.
    `network`, or the file that `syncline probe` wrote of it, is for exchanges that choose by what links take, and knows
    racks; without one, hosts are found and ordinary links are assumed. `scaler` is the GradScaler that the loss is
    scaled with, if any: an exchange that keeps gradients for later must know when their scale changes.
    Replaces what was attached before; raises, and leaves the model as it was, if anything does not fit.
    """
    ddp = ddp_of(model)
    exchange = Dense() if exchange is None else exchange
    if isinstance(exchange, type) or not isinstance(exchange, Exchange):
        raise UsageError(f"{exchange!r} is not an exchange: pass an instance, for example syncline.Dense()")
    if lanes is None:
        lanes = default_lanes(exchange, str(dist.get_backend(ddp.process_group)))
    if not isinstance(lanes, int) or isinstance(lanes, bool) or not 1 <= lanes <= MAX_LANES:
        raise UsageError(f"lanes is {lanes!r}: there may be 1 to {MAX_LANES}")
    if timeout_s is not None and not timeout_s > 0:
        raise UsageError(f"timeout_s is {timeout_s!r}: a collective needs some time")
    return attach_route(ddp, Uniform(exchange, lanes), timeout_s=timeout_s, network=network, scaler=scaler)


def attach_route(
    ddp: DDP,
    route: Route,
    *,
    timeout_s: float | None = None,
    network: Network | str | os.PathLike[str] | None = None,
    scaler: GradScaler | None = None,
) -> Handle:
    """`attach`, for buckets that go different ways."""
    check_scaler(scaler)
    group: dist.ProcessGroup = ddp.process_group
    timeout = group_timeout(group) if timeout_s is None else timedelta(seconds=timeout_s)
    parameters = parameters_of(ddp)
    with current_device(only_device(parameters)):
        known = read_network(network)
        scaled = scaler is not None and scaler.is_enabled()
        meet(group, {**_fingerprint(ddp, group, route, parameters, known), "scaler": scaled})
        if isinstance(known, SynclineError):
            raise known
        place = find_place(group, route.exchanges, known)
        topology = None if place is None else place.topology
        engine = Engine(group, parameters, route, timeout, topology, _scale_of(scaler))
        engine.place = place
    try:
        switch = switch_of(ddp)
    except BaseException:
        engine.close()
        raise
    switch.turn_to(engine)
    return Handle(ddp, switch, engine, place)


def check_scaler(scaler: object) -> None:
    known = all(callable(getattr(scaler, name, None)) for name in ("is_enabled", "get_scale"))
    if scaler is not None and (isinstance(scaler, type) or not known):
        raise UsageError(
            f"scaler is a {type(scaler).__name__}: pass the GradScaler that the loss is scaled with, or leave it out"
        )


def _scale_of(scaler: GradScaler | None) -> Callable[[], Tensor | None]:
    """What its losses are multiplied with, where it is now."""

    def scale() -> Tensor | None:
        if scaler is None or not scaler.is_enabled():
            return None
        on_device = getattr(scaler, "_get_scale_async", None)  # private: without it, asking waits for the device
        found: Tensor | None = on_device() if on_device is not None else None
        return torch.tensor(scaler.get_scale()) if found is None else found

    return scale


def read_network(network: object) -> Network | SynclineError | None:
    """An error is returned: what one rank cannot read is an error for all of them, once they have met."""
    if network is None or isinstance(network, Network):
        return network
    if not isinstance(network, str | os.PathLike):
        kind = type(network).__name__
        return UsageError(f"network is a {kind}: pass a Network, or the file that syncline probe wrote")
    try:
        return Network.load(network)
    except SynclineError as error:
        return error


def _fingerprint(
    ddp: DDP,
    group: dist.ProcessGroup,
    route: Route,
    parameters: Mapping[str, nn.Parameter],
    network: Network | SynclineError | None,
) -> dict[str, Any]:
    """Everything that must be the same on all ranks for their collectives to fit together."""
    model = {
        name: f"{tuple(p.shape)} {p.dtype} {p.stride()} {'trained' if p.requires_grad else 'frozen'}"
        for name, p in parameters.items()
    }
    flags = {
        "static_graph": bool(getattr(ddp, "static_graph", False)),
        "find_unused_parameters": ddp.find_unused_parameters,
        "gradient_as_bucket_view": ddp.gradient_as_bucket_view,
        "bucket_bytes_cap": ddp.bucket_bytes_cap,
        "other hooks": other_hooks(ddp),
    }
    versions = {
        "syncline": __version__,
        "torch": str(torch.__version__),
        "backend": str(dist.get_backend(group)),
    }
    fields = flatten({**route.fingerprint(), "ddp": flags, "version": versions, "parameter": model})
    # Ranks choose by it, so it has to be the same file; what it says is none of the fingerprint's business.
    known = f"unreadable: {network}" if isinstance(network, SynclineError) else None
    if isinstance(network, Network):
        known = f"one with digest {digest(msgspec.to_builtins(network)).hex()[:8]}"
    return {**fields, "network": known}
