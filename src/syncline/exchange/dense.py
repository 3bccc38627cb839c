"""Dense: send every element of every gradient, in its own type or in 16 bits.

On the wire, for P ranks and a bucket of S bytes:

- `wire="fp32"` is one all-reduce in the gradients' own type. The result equals plain DDP's, bit for bit, on the same
  buckets. Each rank sends 2(P−1)/P·S bytes.
- `wire="bf16"` and `wire="fp16"` send half of that: each rank sends the i-th part of its bucket to rank i (all-to-all);
  rank i sums the parts in fp32; the sums are sent to all ranks (all-gather). This rounds each value twice. A 16-bit
  ring would round at every hop.
- fp16 parts are scaled by a power of two, which is sent with each part. Without it, gradients multiplied by a
  GradScaler would overflow or underflow.

When a 16-bit wire loses: the link is faster than two additional passes over memory; buckets are so small that start-ups
dominate, of which it has two instead of one; or the training must give the same bits as plain DDP.

Paper: none. The all-reduce is plain DDP's; ADR 0005 explains the 16-bit wire.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from syncline.errors import UsageError
from syncline.exchange.base import Comm, Rounding, State, Work
from syncline.exchange.layout import Layout
from syncline.exchange.topology import Cost, Phase, Topology

_WIRE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_FP16_TOP_EXPONENT = 15  # parts are scaled to stay under 2^15: half of fp16's largest
_EXPONENT_LIMIT = 120.0  # 2^±120 and its reciprocal are fp32 numbers


@dataclass(frozen=True)
class Dense:
    """Send all gradients.

    Args:
        wire: The number format on the wire: `fp32` (the gradients' own type), `bf16` or `fp16`.

    Raises:
        UsageError: `wire` is something else.

    Example:
        >>> handle = syncline.attach(model, syncline.Dense(wire="bf16"))
    """

    wire: str = "fp32"
    keeps = False

    def __post_init__(self) -> None:
        if self.wire not in _WIRE:
            raise UsageError(f"Dense(wire={self.wire!r}): wire must be one of {', '.join(_WIRE)}")

    @property
    def lossless(self) -> bool:
        return self.wire == "fp32"

    @property
    def waits(self) -> bool:
        return not self.lossless

    def prepare(self, layout: Layout, comm: Comm) -> State:
        return State() if self.lossless or comm.size == 1 else self.halves(layout, comm.size)

    def run(self, flat: Tensor, state: State, comm: Comm) -> Work | None:
        if comm.size == 1:
            return None
        if not isinstance(state, Halves):
            return comm.all_reduce(flat)
        state.scatter(flat, comm).wait()
        state.gather(state.shard(), flat, comm).wait()
        state.finish(flat)
        return None

    def cost(self, numel: int, dtype: torch.dtype, topology: Topology) -> Cost:
        if topology.ranks == 1:
            return Cost(())
        if self.lossless:
            return Cost((Phase.of("all_reduce", numel, dtype.itemsize, topology),))
        return Cost(self.halves_cost(numel, dtype, topology))

    def halves(self, layout: Layout, ranks: int) -> Halves:
        """Return a reduce-scatter and the all-gather that completes it, for an exchange that runs something in between.

        The reduce-scatter is an all-to-all and a local sum: gloo would emulate its own with an all-reduce, which sends
        twice the bytes.
        """
        return Halves(layout, ranks) if self.lossless else _Packed(layout, ranks, _WIRE[self.wire])

    def halves_cost(self, numel: int, dtype: torch.dtype, topology: Topology) -> tuple[Phase, Phase]:
        """Return the two phases of `halves`."""
        itemsize = dtype.itemsize if self.lossless else 2
        elements = topology.ranks * (part_of(numel, topology.ranks) + (1 if self.wire == "fp16" else 0))
        scatter, gather = (Phase.of(kind, elements, itemsize, topology) for kind in ("all_to_all", "all_gather"))
        return scatter, gather

    def rounding(self, dtype: torch.dtype, ranks: int) -> Rounding:
        if self.lossless or ranks == 1:
            return Rounding.of_summation(dtype, ranks)
        unit = torch.finfo(_WIRE[self.wire]).eps / 2
        summation = ranks * torch.finfo(torch.float32).eps
        # Two roundings, in scatter and gather: (1+u)² − 1. For a 16-bit bucket, the result's own type rounds once more.
        relative = 2 * unit + unit**2 + summation + torch.finfo(dtype).eps / 2
        if self.wire == "bf16":
            return Rounding(relative, absolute=2 * ranks * 2.0**-134)
        # fp16's last bit is 2^-24, which is 2^38 below the part's largest value after scaling; in scatter and gather.
        return Rounding(relative, of_largest=2 * ranks * 2.0**-38, absolute=2 * ranks * 2.0**-144)


def part_of(numel: int, ranks: int) -> int:
    """Return the number of elements in each rank's part. The last part may be padded."""
    return -(-numel // ranks)


class Halves(State):
    """A reduce-scatter and the all-gather that completes it, on one rank, with gradients in their own type."""

    def __init__(self, layout: Layout, ranks: int) -> None:
        part = part_of(layout.numel, ranks)
        self._numel = layout.numel
        self._received = layout.buffer("received", ranks, part)
        self._sum = layout.buffer("sum", part)
        self._padded = layout.buffer("padded", ranks * part) if ranks * part != layout.numel else None

    def scatter(self, flat: Tensor, comm: Comm) -> Work:
        """Send each rank its part of `flat`."""
        if self._padded is not None:
            self._padded[: self._numel].copy_(flat)
            self._padded[self._numel :].zero_()
        return comm.all_to_all(self._received.view(-1), flat if self._padded is None else self._padded)

    def shard(self) -> Tensor:
        """Return this rank's part of the sum, after `scatter` has ended. An incomplete part is padded with zeros."""
        return torch.sum(self._received, 0, out=self._sum)  # torch sums 16-bit types in fp32 and rounds once

    def gather(self, shard: Tensor, flat: Tensor, comm: Comm) -> Work:
        """Collect all ranks' shards, for `flat`."""
        return comm.all_gather(flat if self._padded is None else self._padded, shard)

    def finish(self, flat: Tensor) -> None:
        """Write the sum to `flat`, after `gather` has ended."""
        if self._padded is not None:
            flat.copy_(self._padded[: self._numel])


class _Packed(Halves):
    """Gradients in 16 bits, one packed part per rank, summed in fp32."""

    def __init__(self, layout: Layout, ranks: int, wire: torch.dtype) -> None:  # without the buffers of `Halves`
        self._scaled = wire == torch.float16
        self._payload = part_of(layout.numel, ranks)
        width = self._payload + (1 if self._scaled else 0)
        self._packed = layout.buffer("packed", ranks, width, dtype=wire)
        self._received = layout.buffer("received", ranks, width, dtype=wire)
        self._even = ranks * self._payload == layout.numel

    def scatter(self, flat: Tensor, comm: Comm) -> Work:
        if not self._even:
            self._packed.zero_()
        for index, part in enumerate(flat.split(self._payload)):
            self._encode(part, self._packed[index])
        return comm.all_to_all(self._received, self._packed)

    def shard(self) -> Tensor:
        total = self._decode(self._received[0])
        for part in self._received[1:]:
            total += self._decode(part)
        return total

    def gather(self, shard: Tensor, flat: Tensor, comm: Comm) -> Work:
        mine = self._packed[comm.rank]
        self._encode(shard, mine)
        return comm.all_gather(self._received, mine)

    def finish(self, flat: Tensor) -> None:
        for part, packed in zip(flat.split(self._payload), self._received, strict=False):
            part.copy_(self._decode(packed)[: part.numel()])

    def _encode(self, part: Tensor, packed: Tensor) -> None:
        if not self._scaled:
            packed[: part.numel()].copy_(part)
            return
        largest = (part.abs().max() if part.numel() else part.new_zeros(())).to(torch.float32)
        exponent = _FP16_TOP_EXPONENT - torch.frexp(largest).exponent.to(torch.float32)
        exponent = exponent.clamp(-_EXPONENT_LIMIT, _EXPONENT_LIMIT)
        packed[0] = exponent
        # Convert to fp32 first: on CUDA, a scale above 65504 would become infinite in an fp16 part's own type.
        wide = part.to(torch.promote_types(part.dtype, torch.float32))
        packed[1 : 1 + part.numel()].copy_(wide * torch.exp2(exponent))

    def _decode(self, packed: Tensor) -> Tensor:
        if not self._scaled:
            return packed.to(torch.float32)
        return packed[1:].to(torch.float32) * torch.exp2(-packed[0].to(torch.float32))
