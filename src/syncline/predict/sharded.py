"""Predict the time of one step of a sharded model (FSDP2), and of its exchange between replicas.

A profile without FSDP's own work, or with it (`Sharding.measured_shards` is 1), has no collectives, so they are added.
One that was measured among several shards contains those among shards, and only the exchange between replicas is added.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from syncline.errors import UsageError
from syncline.exchange import Cost, Dense, Exchange, Level, Phase, Quantized, Topology, wire
from syncline.exchange.base import default_lanes
from syncline.exchange.scatter import Scatter
from syncline.predict.exchange_time import topology_of
from syncline.predict.overlap import transfer
from syncline.predict.prediction import Losses, Prediction, predict
from syncline.predict.schedule import UPDATES, Schedule, Updates
from syncline.predict.sharded_step import REPLICAS, SHARDS, Collectives, Step, UnitTimes
from syncline.predict.timeline import Timeline
from syncline.records.network import Network
from syncline.records.profile import ITEM_BYTES, Overheads, Profile
from syncline.records.sharding import ProfiledUnit, Sharding

_NO_OVERHEADS = Overheads(copy_in_s_per_byte=0.0, copy_out_s_per_byte=0.0, hook_s=0.0, work={})


@dataclass(frozen=True)
class ShardedMethod:
    """How a sharded model communicates."""

    replicas: bool  # whether there is a replica on each host; otherwise, the model is sharded among all ranks
    exchange: Exchange | None = None  # Syncline's, of gradients; None for PyTorch's own collectives
    updates: Updates | None = None
    work: str = ""  # the name under which a profile has the exchange's own work, unless it has the method's


SHARDED: dict[str, ShardedMethod] = {
    "fsdp": ShardedMethod(False),
    "fsdp+int4": ShardedMethod(False, Quantized(bits=4), work="int4"),
    "hsdp": ShardedMethod(True),
    "hsdp+dense": ShardedMethod(True, Dense(), work="dense"),
    "hsdp+int4": ShardedMethod(True, Quantized(bits=4), work="int4"),
    "hsdp+local-15": ShardedMethod(True, updates=UPDATES["local-15"], work="topk-chunks"),
}
"""Methods for sharded models, by the names that predictions and the bench use."""
FLOOR = "hsdp+nothing"
"""The name of a step without communication between replicas."""


@dataclass(frozen=True)
class ShardedPrediction:
    """One step of a sharded model on one cluster."""

    profile: Profile
    network: Network
    name: str
    method: ShardedMethod
    communicates: bool = True  # whether replicas exchange anything
    overheads: bool = True  # whether this cause of loss is included, as that below
    straggler: bool = True
    iteration_s: float = field(init=False)
    timeline: Timeline = field(init=False)  # the collectives, in seconds from the start of forward

    def __post_init__(self) -> None:
        if self.profile.sharding is None:
            raise UsageError(
                f"{self.name} needs a profile with FSDP's units: profile a model that fully_shard has prepared"
            )
        if len(set(map(len, self._hosts))) > 1:
            raise UsageError(f"{self.name} needs the same number of ranks on each host")
        measured = self.profile.sharding.measured_shards
        if measured > 1 and measured != self.shards:
            text = f"the profile was measured among {measured} shards, and {self.name} has {self.shards} here"
            raise UsageError(f"{text}: profile the model sharded among one rank, or not sharded")
        for name, value in zip(("iteration_s", "timeline"), self._simulated(), strict=True):
            object.__setattr__(self, name, value)

    @property
    def hosts(self) -> int:
        return self.network.hosts

    @property
    def ranks(self) -> int:
        return self.network.ranks

    @property
    def shards(self) -> int:
        """Number of ranks that share one copy of the model."""
        return self.ranks // self.hosts if self.method.replicas else self.ranks

    @property
    def compute_s(self) -> float:
        """Time of the step on a typical rank alone, with what a profile of several shards contains."""
        return self.profile.forward_s + self.profile.backward_s + self._update_s(self.profile.update_s)

    @property
    def scaling(self) -> float:
        """Scaling efficiency: time of computation divided by the time of the step; 1 if nothing is lost."""
        return self.compute_s / self.iteration_s if self.iteration_s else 1.0

    @property
    def sent_bytes(self) -> int:
        """Bytes per step sent by the busiest rank; with replicas, those between them."""
        if self.method.updates is not None:
            return self._updates(self.compute_s).sent_bytes
        if self.method.replicas:
            costs = [self._exchange_cost(unit) for unit in self._profiled]
        else:
            again = [unit for unit in self._profiled if unit.reshards]
            costs = [self._gather_cost(unit) for unit in (*self._profiled, *again)]
            costs += [self._reduce_cost(unit) for unit in self._profiled]
        return sum(phase.sent_bytes for cost in costs for phase in cost.phases)

    @functools.cached_property
    def low_s(self) -> float:
        """Time of the step at the low ends of the network's intervals and the profile's quartiles."""
        bound, spread = dataclasses.replace(self, network=self.network.bound(high=False)), self.profile.spread
        faster_s = 0.0 if spread is None else min(0.0, spread.low_s - self.profile.step_s)
        return max(self.compute_s, min(bound.iteration_s, self.iteration_s)) + faster_s

    @functools.cached_property
    def high_s(self) -> float:
        """Time of the step at the high ends of the network's intervals and the profile's quartiles."""
        bound, spread = dataclasses.replace(self, network=self.network.bound(high=True)), self.profile.spread
        slower_s = 0.0 if spread is None else max(0.0, spread.high_s - self.profile.step_s)
        return max(bound.iteration_s, self.iteration_s) + slower_s

    @functools.cached_property
    def losses(self) -> Losses:
        """Remove one cause after the other, and attribute the time that each saves to it."""
        without = ((name, other.iteration_s) for name, other in self._without_causes())
        return Losses.of(self.iteration_s, self.compute_s, without)

    def _without_causes(self) -> Iterator[tuple[str, ShardedPrediction]]:
        """Yield the causes of loss, and the step without them and all earlier ones."""
        replace = dataclasses.replace
        yield "overhead", (left := replace(self, overheads=False))
        yield "startups", (left := replace(left, network=left.network.without(startups=True)))
        for link in self.network.links:
            yield link.name, (left := replace(left, network=left.network.without(link=link.name)))
        yield "software", (left := replace(left, network=left.network.without(software=True)))
        yield "straggler", replace(left, straggler=False)

    # --- the cluster --------------------------------------------------------------------------------------------

    @property
    def _sharding(self) -> Sharding:
        assert self.profile.sharding is not None  # noqa: S101 - `__post_init__` has checked
        return self.profile.sharding

    @property
    def _profiled(self) -> tuple[ProfiledUnit, ...]:
        return self._sharding.units

    @property
    def _adds_shards(self) -> bool:
        """Whether the profile lacks the collectives among shards."""
        return self._sharding.measured_shards < 2

    @property
    def _blocks(self) -> bool:
        """Whether FSDP waits for each collective: it has streams on CUDA only."""
        return self.profile.device != "cuda"

    @functools.cached_property
    def _hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host."""
        of = self.network.host_of_rank
        return tuple(tuple(rank for rank, where in enumerate(of) if where == host) for host in range(self.hosts))

    @functools.cached_property
    def _among_shards(self) -> Topology:
        everything = topology_of(self.network)
        return everything.among(Level("local", self._hosts)) if self.method.replicas else everything

    @functools.cached_property
    def _among_replicas(self) -> Topology:
        """The topology of ranks with the same shard."""
        return topology_of(self.network).among(Level("hosts", tuple(zip(*self._hosts, strict=True))))

    # --- the sizes and costs of a unit --------------------------------------------------------------------------

    @functools.cached_property
    def _shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {gradient.name: gradient.shape for gradient in self.profile.gradients}

    def _shard_elements(self, unit: ProfiledUnit) -> int:
        """Return the elements of one rank's flat gradient. Each parameter is padded to equal numbers of rows."""
        return sum(math.prod(_shard_of(self._shapes[name], self.shards)) for name in unit.gradients)

    def _gather_cost(self, unit: ProfiledUnit) -> Cost:
        if self.shards == 1:
            return Cost(())
        elements = self._shard_elements(unit) + -(-unit.frozen_elements // self.shards)
        topology, itemsize = self._among_shards, ITEM_BYTES[unit.gathered]
        return Cost((Phase.of("all_gather", self.shards * elements, itemsize, topology),))

    def _reduce_cost(self, unit: ProfiledUnit) -> Cost:
        elements, dtype = self.shards * self._shard_elements(unit), getattr(torch, unit.reduced)
        if self.shards == 1 or not elements:
            return Cost(())
        if self.method.exchange is not None and not self.method.replicas:
            return Scatter(self.method.exchange).cost(elements, dtype, self._among_shards)
        kind = wire.REDUCE_SCATTER if self.network.backend == "nccl" else "all_reduce"  # gloo emulates it
        return Cost((Phase.of(kind, elements, dtype.itemsize, self._among_shards),))

    def _exchange_cost(self, unit: ProfiledUnit) -> Cost:
        elements = self._shard_elements(unit)
        if self.hosts == 1 or not self.method.replicas or self.method.updates is not None or not elements:
            return Cost(())
        exchange = self.method.exchange or Dense()
        return exchange.cost(elements, getattr(torch, unit.reduced), self._among_replicas)

    def _collectives(self, cost: Cost, nbytes: int = 0) -> Collectives:
        """Return the collectives of an exchange, and its own work on `nbytes`."""
        work = self._own.work.get(self._work) if nbytes else None
        own_s = 0.0 if work is None or not cost.phases else work.fixed_s + work.s_per_byte * nbytes
        return Collectives(own_s, tuple(transfer(self.network, phase) for phase in cost.phases))

    @property
    def _work(self) -> str:
        """The name under which the profile has the exchange's own work."""
        known = {} if self.profile.overheads is None else self.profile.overheads.work
        return self.name if self.name in known else self.method.work

    @functools.cached_property
    def _units(self) -> tuple[UnitTimes, ...]:
        """The units with their times, in the order of the profile's units."""
        # FSDP's own copies are in the profile of a model that was sharded.
        copies = self._own if not self._sharding.measured_shards else _NO_OVERHEADS
        found = []
        for unit in self._profiled:
            elements = self._shard_elements(unit)
            reduced, whole = elements * ITEM_BYTES[unit.reduced], self.shards * elements + unit.frozen_elements
            in_s = copies.copy_in_s_per_byte * reduced * self.shards + copies.hook_s
            out_s = copies.copy_out_s_per_byte * whole * ITEM_BYTES[unit.gathered] + copies.hook_s
            gather, reduce = self._gather_cost(unit), self._reduce_cost(unit)
            gathers = self._collectives(gather) if self._adds_shards else Collectives()
            coded = 0 if self.method.replicas or self.method.exchange is None else self.shards * reduced
            reduces = self._collectives(reduce, coded) if self._adds_shards else Collectives()
            exchanges = self._collectives(self._exchange_cost(unit), reduced) if self.communicates else Collectives()
            found.append(UnitTimes(unit.name, unit.reshards, in_s, out_s, gathers, reduces, exchanges))
        return tuple(found)

    @property
    def _own(self) -> Overheads:
        """The overheads, if they are included."""
        return (self.profile.overheads if self.overheads and self.ranks > 1 else None) or _NO_OVERHEADS

    # --- the step -----------------------------------------------------------------------------------------------

    def _simulated(self) -> tuple[float, Timeline]:
        """Return the time of the step, and the timeline of its collectives."""
        profile = self.profile
        slowest = profile.slowest if self.straggler and self.ranks > 1 else None
        pace = profile if slowest is None or slowest.step_s <= profile.step_s else slowest
        always_s = 0.0 if profile.slowest is None else profile.slowest.step_s - profile.step_s
        waiting_s = max(0.0, profile.jitter_s - max(0.0, always_s)) if self.straggler and self.ranks > 1 else 0.0
        step = Step(self._units, self._blocks)
        forward, backward = self._segments(pace.forward_s, pace.backward_s)
        step.forward(forward)
        step.backward(backward)
        beside = self.network.beside if self.method.replicas else None
        slowdown = {} if beside is None else {SHARDS: beside.inside, REPLICAS: beside.between}
        end_s, timeline = step.timeline(slowdown)
        floor_s = end_s + self._update_s(pace.update_s) + waiting_s
        if self.method.updates is None or not self.communicates or self.hosts == 1:
            return floor_s, timeline
        found = self._updates(floor_s)
        return found.iteration_s, found.timeline.shifted(floor_s)

    def _updates(self, floor_s: float) -> Prediction:
        """Predict steps of `floor_s` with an exchange of updates of this rank's shards, between replicas."""
        assert self.method.updates is not None  # noqa: S101 - the callers have checked
        shapes = {gradient: _shard_of(gradient.shape, self.shards) for gradient in self.profile.gradients}
        own = tuple(
            msgspec.structs.replace(gradient, shape=shape, ready_s=0.0, bytes=_nbytes(shape, gradient.dtype))
            for gradient, shape in shapes.items()
        )
        times: dict[str, float] = {"forward_s": floor_s, "backward_s": 0.0, "update_s": 0.0, "jitter_s": 0.0}
        others: dict[str, Any] = {"buffers": (), "ranks": (), "spread": None, "sharding": None}
        if not self.overheads:
            others |= {"overheads": None, "contention": None}
        alone = msgspec.structs.replace(self.profile, gradients=own, **times, **others)
        lanes = default_lanes(self.method.updates.exchange, self.network.backend)
        updates = dataclasses.replace(self.method.updates, exchange_name=self._work)
        schedule = Schedule.of_updates(alone, self.name, updates, lanes)
        return predict(alone, self.network, schedule, topology=self._among_replicas)

    def _update_s(self, update_s: float) -> float:
        """Return the time of the optimizer, which steps this rank's shards."""
        return update_s / self.shards if self._adds_shards else update_s

    def _segments(self, forward_s: float, backward_s: float) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
        """Return the units that compute one after the other, with their seconds, in forward and in backward.

        A unit computes until its gradients are ready. Forward is assumed to be the mirror image of backward.
        """
        unit_of = {name: index for index, unit in enumerate(self._profiled) for name in unit.gradients}
        backward: list[tuple[int, float]] = []
        before_s = 0.0
        for gradient in self.profile.gradients:
            if gradient.ready_s:  # a parameter without a gradient counts as ready at 0
                backward.append((unit_of[gradient.name], gradient.ready_s - before_s))
                before_s = gradient.ready_s
        last = backward[-1][0] if backward else len(self._profiled) - 1
        backward.append((last, self.profile.backward_s - before_s))
        stretch = backward_s / self.profile.backward_s if self.profile.backward_s else 1.0
        mirror = forward_s / self.profile.backward_s if self.profile.backward_s else 1.0
        forward = [(unit, seconds * mirror) for unit, seconds in reversed(backward)]
        return forward, [(unit, seconds * stretch) for unit, seconds in backward]


def _shard_of(shape: Sequence[int], shards: int) -> tuple[int, ...]:
    """Return the shape of a rank's part of a parameter, with padding: FSDP divides the first dimension."""
    rows, *others = shape or (1,)
    return (-(-rows // shards), *others)


def _nbytes(shape: Sequence[int], dtype: str) -> int:
    return math.prod(shape) * ITEM_BYTES[dtype]


def predict_sharded(profile: Profile, network: Network, name: str) -> ShardedPrediction:
    """Predict the time of one step of a method in `SHARDED`, or of `FLOOR`.

    Raises:
        UsageError: No method has this name, or the profile or the network does not fit it.
    """
    if name == FLOOR:
        return ShardedPrediction(profile, network, name, SHARDED["hsdp"], communicates=False)
    if name not in SHARDED:
        raise UsageError(f"no method for sharded models is called {name!r}; known: {', '.join((*SHARDED, FLOOR))}")
    return ShardedPrediction(profile, network, name, SHARDED[name])
