"""What people use where memory is short or links are slow, to be compared with: the usual sparse hook."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from syncline.dist.comm import gather_into
from syncline.exchange import Cost, Phase, Topology

_UNSETTLED = 2
"""Steps after which DDP has the buckets that it keeps: what it had before is not worth a residual."""


@dataclass
class TopK:
    """Each rank's largest entries, gathered by everyone; what is not sent is added to the next gradient."""

    density: float = 0.01
    residual: dict[int, Tensor] = field(default_factory=dict)
    """By bucket, once: the least that this needs."""
    steps: int = 0

    def count(self, numel: int) -> int:
        return max(1, int(self.density * numel))


def topk_hook(state, bucket):  # type: ignore[no-untyped-def]
    flat, ranks = bucket.buffer(), dist.get_world_size()
    settled = state.steps >= _UNSETTLED
    state.steps += bucket.is_last()
    if not settled:
        work = dist.all_reduce(flat.div_(ranks), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])
    if bucket.index() not in state.residual:
        state.residual[bucket.index()] = torch.zeros_like(flat)
    held, count = state.residual[bucket.index()], state.count(flat.numel())
    held.add_(flat, alpha=1 / ranks)
    places = torch.topk(held.abs(), count, sorted=False).indices
    values, sent = held[places], places.to(torch.int32)
    all_places, all_values = sent.new_empty(ranks * count), values.new_empty(ranks * count)
    gather_into(all_places, sent)
    gather_into(all_values, values)
    held[places] = 0
    flat.zero_().index_add_(0, all_places, all_values)
    done: torch.futures.Future[Tensor] = torch.futures.Future(devices=[flat.device] if flat.is_cuda else None)
    done.set_result(flat)
    return done


def with_topk(model: DDP, density: float = 0.01) -> DDP:
    model.register_comm_hook(TopK(density), topk_hook)
    return model


@dataclass(frozen=True)
class TopKCost:
    """What that puts on the wire."""

    density: float = 0.01
    lossless: bool = False
    waits: bool = True

    def cost(self, numel: int, dtype: torch.dtype, topology: Topology) -> Cost:
        count = topology.ranks * max(1, int(self.density * numel))
        return Cost(tuple(Phase.of("all_gather", count, size, topology) for size in (4, dtype.itemsize)))
