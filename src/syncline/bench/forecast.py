"""Predict the step time of every method before the bench measures the first one.

All ranks profile the workload at the same time without communication, and probe the links unless a network is given.
Syncline's exchanges state their own cost. PyTorch's hooks are not predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from syncline.bench.methods import HOOKS, Prepared
from syncline.exchange import Exchange, Topology
from syncline.layerwise.trainer import Layerwise
from syncline.measure.backward import measure_backward
from syncline.measure.overhead import measure_overheads
from syncline.predict import Schedule, predict
from syncline.predict.schedule import ddp_caps
from syncline.records.bucket_caps import filled
from syncline.records.network import Network
from syncline.records.profile import Profile

_STEPS, _WARMUP = 8, 3


@dataclass(frozen=True)
class Forecast:
    """The inputs of all predictions, the same on all ranks."""

    profile: Profile
    network: Network
    paced: bool
    """True for a replay, whose computation is not slowed down by communication."""
    bucket_mb: float | None

    @property
    def caps(self) -> tuple[int, ...]:
        """Sizes in bytes at which DDP closes its buckets."""
        return ddp_caps(self.bucket_mb)

    def predicted_s(self, prepared: Prepared) -> float | None:
        """Predict the seconds per step of a method, whose name the profile has for its exchange's computation."""
        profile, name, handle = self.profile, prepared.name, prepared.handle
        if prepared.method in HOOKS:
            return None
        if prepared.method == "nosync":
            straggler_s = 0.0 if profile.slowest is None else profile.slowest.step_s - profile.step_s
            return profile.step_s + max(straggler_s, profile.jitter_s)
        if prepared.plan is not None:
            return prepared.plan.iteration_s
        recompute_s, schedule = 0.0, Schedule.of(profile, bucket_mb=self.bucket_mb)
        if isinstance(handle, Layerwise):
            buckets = filled(profile.gradients, (handle.bucket_bytes,))
            schedule = Schedule(name, buckets, handle.exchange, name, handle.lanes)
            recompute_s = profile.forward_s if handle.recomputes else 0.0
        elif handle is not None:
            schedule = Schedule(name, schedule.buckets, handle.exchange, name, handle.lanes)
        return recompute_s + predict(profile, self.network, schedule, paced=self.paced).iteration_s


def profile_workload(
    net: nn.Module,
    loss_of: Callable[[nn.Module], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    name: str,
    topology: Topology | None = None,
    exchanges: Mapping[str, Callable[[], Exchange]] | None = None,
) -> Profile:
    """Profile the workload on all ranks at once, without communication.

    Args:
        exchanges: Exchanges whose computation on `topology` is measured too. Default: all.
    """
    profile = measure_backward(net, loss_of, steps=_STEPS, warmup=_WARMUP, optimizer=optimizer, model_name=name)
    device = next(net.parameters()).device
    overheads = measure_overheads(device, exchanges, topology=topology or dist.get_world_size(), group=dist.group.WORLD)
    return msgspec.structs.replace(profile, overheads=overheads)
