"""Exchanges for tests: variants whose buckets are sparse also if they are small, and the smallest with a residual."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from syncline.exchange import AllgatherTopk, ChunkedTopk, Exchange, Hierarchical, OkTopk
from syncline.exchange.base import Comm, Rounding, State, Work
from syncline.exchange.layout import Layout
from syncline.exchange.topology import Cost, Phase, Topology

VARIANTS: dict[str, Exchange] = {
    "oktopk, contributors": OkTopk(density=0.2, mean="contributors"),
    "oktopk, fp32, contributors": OkTopk(density=0.2, values="fp32", mean="contributors"),
    "oktopk, fp16, contributors, decay": OkTopk(density=0.2, values="fp16", mean="contributors", decay=0.95),
    "oktopk, decay": OkTopk(density=0.2, decay=0.95),
    "topk-allgather, contributors": AllgatherTopk(density=0.1, mean="contributors"),
    "topk-allgather, contributors, decay": AllgatherTopk(density=0.1, mean="contributors", decay=0.95),
    "topk-chunks, contributors, decay": ChunkedTopk(density=0.05, chunk=128, mean="contributors", decay=0.95),
    "topk-chunks, int4": ChunkedTopk(density=0.05, chunk=64, values="int4"),
    "hierarchical, chunks": Hierarchical(across=ChunkedTopk(density=0.05, chunk=128, mean="contributors")),
    "hierarchical, contributors, decay": Hierarchical(across=OkTopk(density=0.2, mean="contributors", decay=0.95)),
}
"""Exchanges with settings that those in `EXCHANGES` do not have."""


@dataclass(frozen=True)
class ErrorFeedback:
    """Send gradient plus residual rounded to bf16, and keep the rounding error as the next step's residual."""

    @property
    def keeps(self) -> bool:
        return True

    @property
    def waits(self) -> bool:
        return True

    @property
    def lossless(self) -> bool:
        return False

    def prepare(self, layout: Layout, comm: Comm) -> State:
        return Residual(layout)

    def run(self, flat: Tensor, state: State, comm: Comm) -> Work | None:
        assert isinstance(state, Residual)
        flat.add_(state.residual)
        coarse = flat.to(torch.bfloat16).to(flat.dtype)
        state.before.copy_(state.residual)
        state.residual.copy_(flat - coarse)
        flat.copy_(coarse)
        return comm.all_reduce(flat)

    def cost(self, numel: int, dtype: torch.dtype, topology: Topology) -> Cost:
        return Cost((Phase.of("all_reduce", numel, dtype.itemsize, topology),))

    def rounding(self, dtype: torch.dtype, ranks: int) -> Rounding:
        return Rounding.of_summation(dtype, ranks)


class Residual(State):
    def __init__(self, layout: Layout) -> None:
        self.residual = torch.zeros(layout.numel, dtype=layout.dtype, device=layout.device)
        self.before = torch.zeros_like(self.residual)

    def kept(self) -> Tensor | None:
        return self.residual

    def tensors(self, layout: Layout) -> dict[str, dict[str, Tensor]]:
        return {slot.name: {"residual": slot.view(self.residual)} for slot in layout.slots}

    def load(self, layout: Layout, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.residual.zero_()
        for slot in layout.slots:
            if slot.name in tensors:
                slot.view(self.residual).copy_(tensors[slot.name]["residual"])

    def settle(self, applied: Tensor) -> None:
        self.residual.copy_(torch.where(applied, self.residual, self.before))
