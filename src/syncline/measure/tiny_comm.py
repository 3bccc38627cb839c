"""Collectives that carry only some bytes, to measure what the software around them takes."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from syncline.dist.comm import GroupComm
from syncline.exchange import Comm, wire
from syncline.exchange import Work as IssuedWork
from syncline.measure.overhead import SilentComm

_TINY = 64


@dataclass(frozen=True)
class TinyComm(SilentComm):
    """Collectives that are issued, but carry only some bytes instead of the exchange's own.

    Every rank acts as the first rank of the topology, so that all ranks do the same. Where hosts have unequal numbers
    of ranks, some are in no group of a level: they issue nothing there.
    """

    comm: GroupComm | None = None
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    """How often each collective was issued on each level."""

    def level(self, name: str) -> Comm | None:
        found = super().level(name)
        own = None if self.comm is None else self.comm.level(name)
        return None if found is None else dataclasses.replace(cast(TinyComm, found), comm=cast(GroupComm | None, own))

    def _issue(self, kind: str, nbytes: int, device: torch.device) -> IssuedWork:
        level, backend = self.topology.whole.name, self.topology.backend
        kind = wire.protocol(kind, nbytes, self.size, level, backend, self.topology.paced_bytes)
        self.calls[level, kind] += 1
        return self if self.comm is None else issue_tiny(self.comm, kind, device)

    def all_reduce(self, tensor: Tensor, root: int = 0) -> Any:
        return self._issue("all_reduce", tensor.nbytes, tensor.device)

    def reduce(self, tensor: Tensor, root: int = 0) -> Any:
        return self._issue("reduce", tensor.nbytes, tensor.device)

    def broadcast(self, tensor: Tensor, root: int = 0) -> Any:
        return self._issue("broadcast", tensor.nbytes, tensor.device)

    def all_gather(self, output: Tensor, input: Tensor) -> Any:
        return self._issue("all_gather", output.nbytes, output.device)

    def all_to_all(self, output: Tensor, input: Tensor) -> Any:
        return self._issue("all_to_all", input.nbytes, input.device)

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Any:
        return self._issue(wire.REDUCE_SCATTER, input.nbytes, input.device)


def issue_tiny(comm: GroupComm, kind: str, device: torch.device) -> IssuedWork:
    """Issue a collective of some bytes."""
    whole, part = torch.zeros(comm.size * _TINY, device=device), torch.zeros(_TINY, device=device)
    match kind:
        case "all_to_all" | wire.PACED:
            paced_bytes = 0 if kind == wire.PACED else wire.NEVER_BYTES
            chosen = dataclasses.replace(comm, topology=dataclasses.replace(comm.topology, paced_bytes=paced_bytes))
            return chosen.all_to_all(torch.empty_like(whole), whole)
        case "all_gather":
            return comm.all_gather(whole, part)
        case wire.REDUCE_SCATTER:
            return comm.reduce_scatter(part, whole)
        case "all_reduce":
            return comm.all_reduce(part)
        case _:
            issued: IssuedWork = getattr(comm, kind)(part, 0)
            return issued
