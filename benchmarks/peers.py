"""Methods of others, to compare with.

PowerSGD as PyTorch's hook computes it and the arithmetic of 1-bit Adam, for ranks that are simulated in one process;
and the implementations of torchft and DeepSpeed, for real ranks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from syncline.cluster import Rank
from syncline.dist.comm import gather_bytes
from syncline.errors import UsageError
from syncline.exchange import Comm, Cost, Layout, Rounding, Slot, State, Topology, Work

# --- PowerSGD ---------------------------------------------------------------------------------------------------------

_LEAST_COMPRESSION = 2
"""The default of PyTorch's `min_compression_rate`: matrices that would not become smaller by this are sent whole."""


@dataclass
class _Factors(State):
    """The state of PowerSGD for one bucket on one rank."""

    layout: Layout
    rank: int
    error: Tensor
    ps: Tensor
    qs: Tensor
    step: int = 0
    warm: bool = False
    """True once the factors of an earlier step can be reused."""
    random: np.random.RandomState = field(default_factory=lambda: np.random.RandomState(0))

    def begin(self, step: int, scale: Tensor | None = None) -> None:
        self.step = step

    def describe(self) -> str:
        return f"rank {self.rank}"


@dataclass(frozen=True)
class PowerSGD:
    """PowerSGD with error feedback and warm start, like `powerSGD_hook` with its defaults.

    Args:
        rank: `matrix_approximation_rank`.
        start: `start_powerSGD_iter`, the number of dense steps at the beginning.
    """

    rank: int
    start: int = 0
    lossless = False
    keeps = True
    waits = True

    def prepare(self, layout: Layout, comm: Comm) -> State:
        groups = self._groups(layout)
        rows = sum(len(slots) * n * rank for (n, _, rank), slots in groups.items())
        columns = sum(len(slots) * m * rank for (_, m, rank), slots in groups.items())
        error, ps, qs = (torch.zeros(size, device=layout.device) for size in (layout.numel, rows, columns))
        return _Factors(layout, self.rank, error, ps, qs)

    def run(self, flat: Tensor, state: State, comm: Comm) -> Work | None:
        assert isinstance(state, _Factors)
        if state.step < self.start:
            return comm.all_reduce(flat)
        flat.add_(state.error)
        before = flat.clone()
        groups = self._groups(state.layout)
        ps, qs = _views(state.ps, groups, 0), _views(state.qs, groups, 1)
        if not state.warm:
            drawn = torch.Generator().manual_seed(int(state.random.randint(1_000_000_000)))
            for q in (q for batch in qs for q in batch):
                q.copy_(torch.randn(1, *q.shape, generator=drawn)[0])
            state.warm = True
        matrices = [torch.stack([slot.view(flat).view(n, m) for slot in slots]) for (n, m, _), slots in groups.items()]
        # From rank 3, the hook orthogonalises by QR instead. The product of the factors is the same, but QR of many
        # small matrices is slow on CUDA.
        for matrix, p, q in zip(matrices, ps, qs, strict=True):
            powerSGD_hook._orthogonalize_gram_schmidt(q)
            torch.bmm(matrix, q, out=p)
        compressed = {slot.name for slots in groups.values() for slot in slots}
        whole = [slot.view(flat) for slot in state.layout.slots if slot.name not in compressed]
        if whole:
            joined = torch.cat([part.view(-1) for part in whole])
            comm.all_reduce(joined).wait()
            parts = joined.split([part.numel() for part in whole])
            torch._foreach_copy_(whole, [part.view_as(own) for part, own in zip(parts, whole, strict=True)])
        comm.all_reduce(state.ps).wait()
        for matrix, p, q in zip(matrices, ps, qs, strict=True):
            powerSGD_hook._orthogonalize_gram_schmidt(p)
            torch.bmm(matrix.transpose(1, 2), p, out=q)
        comm.all_reduce(state.qs).wait()
        for slots, p, q in zip(groups.values(), ps, qs, strict=True):
            for slot, product in zip(slots, torch.bmm(p, q.transpose(1, 2)), strict=True):
                slot.view(flat).copy_(product.view(slot.shape))
        # The bucket came in divided by the number of ranks, so its sum is the average, and errors are divided, too.
        torch.sub(before, flat.div(comm.size), out=state.error)
        return None

    def cost(self, numel: int, dtype: torch.dtype, topology: Topology) -> Cost:
        raise NotImplementedError("the study counts bytes, and does not predict them")

    def rounding(self, dtype: torch.dtype, ranks: int) -> Rounding:
        raise NotImplementedError("PowerSGD has no bound")

    def _groups(self, layout: Layout) -> dict[tuple[int, int, int], list[Slot]]:
        """Return the parameters that are compressed, by rows, columns and rank of their matrices."""
        groups = dict[tuple[int, int, int], list[Slot]]()
        for slot in layout.slots:
            n, m = slot.shape[0], slot.numel // slot.shape[0]
            rank = min(n, m, self.rank)
            if powerSGD_hook._should_compress(n, m, rank, _LEAST_COMPRESSION)[0]:
                groups.setdefault((n, m, rank), []).append(slot)
        return groups


def _views(flat: Tensor, groups: dict[tuple[int, int, int], list[Slot]], side: int) -> list[Tensor]:
    """Return the factors of each group: side 0 has a row for each row of the matrices, side 1 for each column."""
    shapes = [(len(slots), key[side], key[2]) for key, slots in groups.items()]
    parts = flat.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


# --- 1-bit Adam -------------------------------------------------------------------------------------------------------


class OneBit:
    """The mean of all ranks' vectors in 1 bit per element, with error feedback on both hops, as in 1-bit Adam.

    Each rank sends the signs of its vector, with one magnitude for each parameter. The owner of each equal part of the
    vector averages what it receives, and sends the signs of that.
    """

    def __init__(self, sizes: Sequence[int], ranks: int, device: torch.device) -> None:
        total, ends = sum(sizes), {0}
        for size in sizes:
            ends.add(max(ends) + size)
        ends |= {total * rank // ranks for rank in range(ranks)}
        bounds = sorted(ends)
        self._sizes = [end - start for start, end in pairwise(bounds)]
        self._lengths = torch.tensor(self._sizes, device=device)
        self._ranks = ranks
        self._errors = torch.zeros(ranks, total, device=device)
        self._owner_error = torch.zeros(total, device=device)

    @property
    def sent_bytes(self) -> int:
        """Bytes that each rank sends per step."""
        once = -(-int(self._lengths.sum()) // 8) + 4 * len(self._sizes)
        return 2 * once * (self._ranks - 1) // self._ranks

    def mean(self, vectors: Tensor) -> Tensor:
        """Return the mean of the rows as all ranks receive it."""
        total = torch.zeros_like(self._owner_error)
        for vector, error in zip(vectors, self._errors, strict=True):
            total.add_(self._coded(error.add_(vector)))
        return self._coded(self._owner_error.add_(total, alpha=1 / self._ranks))

    def _coded(self, vector: Tensor) -> Tensor:
        """Return what remains of a vector in 1 bit per element, and subtract it from the vector."""
        norms = torch.stack(torch._foreach_norm(vector.split(self._sizes)))
        scales = (norms / self._lengths.sqrt()).repeat_interleave(self._lengths, output_size=vector.numel())
        coded = torch.where(vector >= 0, scales, -scales)
        vector.sub_(coded)
        return coded


# --- real implementations ---------------------------------------------------------------------------------------------


def torchft_manager(rank: Rank) -> Any:
    """Start torchft on this rank: a lighthouse on rank 0, and a manager for this rank as a replica group of its own."""
    from torchft import Manager, ProcessGroupGloo
    from torchft._torchft import LighthouseServer

    os.environ.setdefault("RUST_LOG", "error")
    own = os.environ["SYNCLINE_HOST_ADDR"]
    address = b""
    if rank.rank == 0:
        lighthouse = LighthouseServer(bind="0.0.0.0:0", min_replicas=rank.world_size, join_timeout_ms=60_000)
        address = f"http://{own}:{lighthouse.address().rpartition(':')[2]}".encode()
        _KEPT.append(lighthouse)
    store = TCPStore(own, 0, is_master=True, wait_for_workers=False)
    _KEPT.append(store)
    limit = timedelta(seconds=300)
    return Manager(
        pg=ProcessGroupGloo(timeout=limit),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=rank.world_size,
        use_async_quorum=False,
        timeout=limit,
        quorum_timeout=limit,
        rank=0,
        world_size=1,
        store_addr=own,
        store_port=store.port,
        lighthouse_addr=gather_bytes(dist.group.WORLD, address)[0].decode(),
        replica_id=f"replica_{rank.rank}",
        hostname=own,
        init_sync=False,
    )


_KEPT: list[Any] = []
"""Servers that live as long as the process."""


def one_bit_adam(flat: nn.Parameter, group: dict[str, Any], rank: Rank, freeze_step: int) -> tuple[Any, Any]:
    """Return DeepSpeed's `OnebitAdam` of one flat parameter, and a stand-in for the engine that it talks to.

    DeepSpeed packs bits with a kernel that it has for accelerators only. Here, NumPy packs them. The rest is its own
    code: `OnebitAdam` and `CompressedBackend`.
    """
    import deepspeed.ops.op_builder as op_builder
    from deepspeed import comm

    op_builder.PackbitsBuilder = _NumpyPacker
    try:
        from deepspeed.runtime.comm import compressed
        from deepspeed.runtime.fp16.onebit.adam import OnebitAdam
    except ModuleNotFoundError as error:
        raise UsageError("this DeepSpeed has no 1-bit Adam; the last one that has it is 0.19.6") from error
    if not comm.is_initialized():
        comm.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    compressed.dist = _GlooComm(comm)
    engine = SimpleNamespace(mpu=None, local_rank=rank.local_rank, enable_backward_allreduce=True)
    settings = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
    optimizer = OnebitAdam([flat], engine, freeze_step=freeze_step, comm_backend_name="compressed", **settings)
    return optimizer, engine


class _NumpyPacker:
    """The interface of DeepSpeed's `PackbitsBuilder`, on a CPU."""

    def load(self) -> _NumpyPacker:
        return self

    def packbits(self, values: Tensor, size: int, rank: int) -> Tensor:
        return torch.from_numpy(np.packbits(values.numpy() >= 0))

    def unpackbits(self, packed: Tensor, size: int, rank: int) -> Tensor:
        return torch.from_numpy(np.unpackbits(packed.numpy())).float().mul_(2).sub_(1)


class _GlooComm:
    """DeepSpeed's collectives. gloo refuses to gather a scalar into vectors of one element, as DeepSpeed does."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def all_gather(self, parts: list[Tensor], tensor: Tensor, group: Any) -> Any:
        return self._comm.all_gather(parts, tensor.view(parts[0].shape), group=group)
