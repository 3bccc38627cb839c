"""The sparse baseline for memory: DDP with the usual hook, which needs one residual and nothing else.

`topk-allgather` sends the same entries through Syncline's selection. It is the stronger baseline for time, because it
selects faster, and the weaker one for memory, because the selection has buffers of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from syncline.dist.comm import gather_into
from syncline.exchange import Cost, Phase, Topology

_DENSE_STEPS = 2
"""Steps that are exchanged densely, because DDP still changes its buckets."""


@dataclass(frozen=True)
class TopK:
    """The entries and the cost of the hook: the largest of each rank, gathered by all ranks."""

    density: float = 0.01
    lossless: bool = False
    waits: bool = True

    def count(self, numel: int) -> int:
        return max(1, int(self.density * numel))

    def cost(self, numel: int, dtype: torch.dtype, topology: Topology) -> Cost:
        count = topology.ranks * self.count(numel)
        return Cost(tuple(Phase.of("all_gather", count, size, topology) for size in (4, dtype.itemsize)))


@dataclass
class _State:
    topk: TopK
    residuals: dict[int, Tensor] = field(default_factory=dict)
    """By bucket."""
    steps: int = 0


def _hook(state, bucket):  # type: ignore[no-untyped-def] # torch rejects annotations that are strings
    flat, ranks = bucket.buffer(), dist.get_world_size()
    dense = state.steps < _DENSE_STEPS
    state.steps += bucket.is_last()
    if dense:
        work = dist.all_reduce(flat.div_(ranks), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])
    if bucket.index() not in state.residuals:
        state.residuals[bucket.index()] = torch.zeros_like(flat)
    residual, count = state.residuals[bucket.index()], state.topk.count(flat.numel())
    residual.add_(flat, alpha=1 / ranks)
    positions = torch.topk(residual.abs(), count, sorted=False).indices
    values, sent = residual[positions], positions.to(torch.int32)
    all_positions, all_values = sent.new_empty(ranks * count), values.new_empty(ranks * count)
    gather_into(all_positions, sent)
    gather_into(all_values, values)
    residual[positions] = 0
    flat.zero_().index_add_(0, all_positions, all_values)
    done: torch.futures.Future[Tensor] = torch.futures.Future(devices=[flat.device] if flat.is_cuda else None)
    done.set_result(flat)
    return done


def with_topk(model: DDP, density: float = 0.01) -> DDP:
    """Register the hook on a DDP model and return the model."""
    model.register_comm_hook(_State(TopK(density)), _hook)
    return model
