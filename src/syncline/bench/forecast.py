"""Predict the step time of every method before the bench measures the first one.

All ranks profile the workload at the same time without communication, and probe the links unless a network is given.
Syncline's exchanges state their own cost. For PyTorch's hooks, the bytes are known, and the computation is measured by
running each hook in a group of one rank, where nothing is sent.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from syncline.bench.methods import Prepared
from syncline.cluster import ClusterSpec, Rank, launch, why_not_shaped
from syncline.exchange import Exchange, Topology
from syncline.measure.backward import measure_backward
from syncline.measure.overhead import measure_overheads
from syncline.measure.probe import probe
from syncline.predict import Schedule, ddp_buckets, predict
from syncline.predict.schedule import ddp_caps
from syncline.records.bucket_caps import filled
from syncline.records.network import Network
from syncline.records.profile import Overheads, Profile, Work

_STEPS, _WARMUP = 8, 3
_ALONE_STEPS, _ALONE_WARMUP = 4, 3


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

    def predicted_s(self, prepared: Prepared, hook_s: float | None = None) -> float | None:
        """Predict the seconds per step of a method.

        Args:
            prepared: The method. The profile has the computation of its exchange under its name.
            hook_s: For PyTorch's hooks: seconds per step that the hook computes.
        """
        if prepared.method == "nosync":
            slowest = self.profile.slowest
            straggler_s = 0.0 if slowest is None else slowest.step_s - self.profile.step_s
            return self.profile.step_s + max(straggler_s, self.profile.jitter_s)
        if prepared.plan is not None:
            return prepared.plan.iteration_s
        if prepared.cost is None:
            schedule = Schedule.of(self.profile, bucket_mb=self.bucket_mb)
            recompute_s = 0.0
            if prepared.handle is not None:
                handle = prepared.handle
                schedule = Schedule(prepared.name, schedule.buckets, handle.exchange, prepared.name, handle.lanes)
            elif prepared.trainer is not None:
                trainer = prepared.trainer
                buckets = filled(self.profile.gradients, (trainer.bucket_bytes,))
                schedule = Schedule(prepared.name, buckets, trainer.exchange, prepared.name, trainer.lanes)
                recompute_s = self.profile.forward_s if trainer.recomputes else 0.0
            return recompute_s + predict(self.profile, self.network, schedule, paced=self.paced).iteration_s
        everything = (tuple(range(len(self.profile.gradients))),)
        buckets = everything if prepared.one_bucket else ddp_buckets(self.profile.gradients, self.bucket_mb)
        schedule = Schedule(prepared.method, buckets, prepared.cost, prepared.method)
        work = Work(fixed_s=0.0, s_per_byte=(hook_s or 0.0) / self.profile.gradient_bytes)
        overheads = Overheads(copy_in_s_per_byte=0.0, copy_out_s_per_byte=0.0, hook_s=0.0, work={prepared.method: work})
        profile = msgspec.structs.replace(self.profile, overheads=overheads)
        return predict(profile, self.network, schedule, paced=self.paced).iteration_s

    def hook_s(self, alone_s: float) -> float:
        """Return the computation of a hook, from the step time in a group of one rank."""
        return max(0.0, alone_s - self.profile.step_s)


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


def alone_s(step: Callable[[], None], device: torch.device) -> float:
    """Measure a step of a model whose group has one rank, on all ranks at once; return the mean of their medians."""
    times = []
    for number in range(_ALONE_WARMUP + _ALONE_STEPS):
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if number >= _ALONE_WARMUP:
            times.append(time.perf_counter() - start)
    mean = torch.tensor([statistics.median(times)], device=device)
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


def probe_emulated(
    spec: ClusterSpec, budget_s: float, on_progress: Callable[[int, int], None] | None = None
) -> Network:
    """Probe the links of an emulated cluster; the result has their nominal rates too."""

    def main(rank: Rank) -> object:
        rank.init_process_group(timeout_s=max(60.0, 4 * budget_s))
        say = (lambda done, of: rank.say([round(done), round(of)])) if rank.rank == 0 else None
        return msgspec.to_builtins(probe(budget_s=budget_s, on_progress=say))

    def reported(_rank: int, event: Any) -> None:
        if on_progress is not None:
            on_progress(*event)

    answers = launch(spec, main, deadline_s=120 + 6 * budget_s, on_event=reported)
    network = msgspec.convert(answers[0], Network)
    return network.with_nominal_rates(spec.rate_bps, spec.trunk_rate_bps) if why_not_shaped() is None else network
