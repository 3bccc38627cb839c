"""Dense: send every element of every gradient, in its own type or in 16 bits.

On the wire, for P ranks and a bucket of S bytes:

- `wire="fp32"` is one all-reduce in the gradients' own type. The result equals plain DDP's, bit for bit, on the same
  buckets. Each rank sends 2(P−1)/P·S bytes.
- `wire="bf16"` and `wire="fp16"` send half of that, in one all-reduce of 16-bit numbers. Each hop adds in fp32 and
  rounds the partial sum to 16 bits, so a value is rounded up to P times.
- With `roundings="two"`, each rank sends the i-th part of its bucket to rank i (all-to-all); rank i sums the parts in
  fp32; the sums are sent to all ranks (all-gather). Each value is rounded twice, whatever the number of ranks.
- fp16 values are scaled by a power of two. Without it, gradients multiplied by a GradScaler would overflow or
  underflow. In an all-reduce, all ranks use the same scale: a small all-reduce first adds the largest magnitudes of all
  ranks, and no partial sum can exceed this total. In two hops, each part is sent with its own scale.

When a 16-bit wire loses: the link is faster than two additional passes over memory; buckets are so small that start-ups
dominate, of which it has two instead of one; or the training must give the same bits as plain DDP.

Paper: none. The all-reduce is plain DDP's; ADR 0005 explains the 16-bit wire.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
from torch import Tensor

from syncline.errors import UsageError
from syncline.exchange.base import Comm, Rounding, State, Work
from syncline.exchange.layout import Layout
from syncline.exchange.topology import Cost, Phase, Topology

_WIRE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SIXTEEN_BITS = {name: dtype for name, dtype in _WIRE.items() if dtype != torch.float32}
_ROUNDINGS = ("fastest", "two")
_FP16_TOP_EXPONENT = 15  # parts are scaled to stay under 2^15: half of fp16's largest
_EXPONENT_LIMIT = 120.0  # 2^±120 and its reciprocal are fp32 numbers


@dataclass(frozen=True)
class Dense:
    """Send all gradients.

    Args:
        wire: The number format on the wire: `fp32` (the gradients' own type), `bf16` or `fp16`.
        roundings: How often a 16-bit wire may round: `fastest` allows one rounding per rank, `two` rounds twice. NCCL
            before 2.27.3 always rounds twice, because its 16-bit all-reduce does not add in fp32.

    Raises:
        UsageError: `wire` or `roundings` is something else.

    Example:
        >>> handle = syncline.attach(model, syncline.Dense(wire="bf16"))
    """

    wire: str = "fp32"
    roundings: str = field(default="fastest", metadata={"optional": True})
    keeps = False

    def __post_init__(self) -> None:
        if not isinstance(self.wire, str) or self.wire not in _WIRE:
            raise UsageError(f"Dense(wire={self.wire!r}): wire must be one of {', '.join(_WIRE)}")
        if self.roundings not in _ROUNDINGS:
            raise UsageError(f"Dense(roundings={self.roundings!r}): roundings must be {' or '.join(_ROUNDINGS)}")

    @property
    def lossless(self) -> bool:
        return self.wire == "fp32"

    @property
    def waits(self) -> bool:
        return not self.lossless

    def prepare(self, layout: Layout, comm: Comm) -> State:
        if self.lossless or comm.size == 1:
            return State()
        return (
            _Ring(layout, _WIRE[self.wire]) if self._in_ring(comm.topology.backend) else self.halves(layout, comm.size)
        )

    def run(self, flat: Tensor, state: State, comm: Comm) -> Work | None:
        if comm.size == 1:
            return None
        if isinstance(state, _Ring):
            if state.scaled:
                comm.all_reduce(state.bound(flat)).wait()
            comm.all_reduce(state.encode(flat)).wait()
            state.decode(flat)
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
        if self._in_ring(topology.backend):
            scale = (Phase.of("all_reduce", 1, 4, topology),) if self.wire == "fp16" else ()
            return Cost((*scale, Phase.of("all_reduce", numel, 2, topology)))
        return Cost(self.halves_cost(numel, dtype, topology))

    def halves(self, layout: Layout, ranks: int) -> Halves:
        """Return a reduce-scatter and the all-gather that completes it, for an exchange that runs something in between.
        The reduce-scatter is an all-to-all and a local sum: gloo would emulate its own with an all-reduce, which sends
        twice the bytes."""
        return Halves(layout, ranks) if self.lossless else PackedHalves(layout, ranks, _WIRE[self.wire])

    def halves_cost(self, numel: int, dtype: torch.dtype, topology: Topology) -> tuple[Phase, Phase]:
        """Return the two phases of `halves`."""
        itemsize = dtype.itemsize if self.lossless else 2
        elements = topology.ranks * (part_of(numel, topology.ranks) + (1 if self.wire == "fp16" else 0))
        scatter, gather = (Phase.of(kind, elements, itemsize, topology) for kind in ("all_to_all", "all_gather"))
        return scatter, gather

    def _in_ring(self, backend: str) -> bool:
        """Return whether a 16-bit wire is the backend's own all-reduce, which must add in fp32."""
        return self.roundings == "fastest" and (backend == "gloo" or (backend == "nccl" and _nccl_adds_in_fp32()))

    def rounding(self, dtype: torch.dtype, ranks: int) -> Rounding:
        if self.lossless or ranks == 1:
            return Rounding.of_summation(dtype, ranks)
        unit = torch.finfo(_WIRE[self.wire]).eps / 2
        summation = ranks * torch.finfo(torch.float32).eps
        # Two hops round in scatter and gather. A ring rounds the input and each of `ranks` − 1 partial sums. For a
        # 16-bit bucket, the result's own type rounds once more.
        times = 2 if self.roundings == "two" else max(2, ranks)
        relative = (1 + unit) ** times - 1 + summation + torch.finfo(dtype).eps / 2
        if self.wire == "bf16":
            return Rounding(relative, absolute=times * ranks * 2.0**-134)
        # fp16's last bit is 2^-24. Scaling brings the part's largest value to 2^14 or more in two hops, and the sum of
        # all ranks' largest values in a ring.
        return Rounding(relative, of_largest=times * ranks * 2.0**-38, absolute=times * ranks * 2.0**-144)


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
        return comm.all_to_all(self._received.view(-1), self._with_equal_parts(flat))

    def _with_equal_parts(self, flat: Tensor) -> Tensor:
        """Return the bucket, padded with zeros if it does not divide evenly by the ranks."""
        if self._padded is None:
            return flat
        self._padded[: self._numel].copy_(flat)
        self._padded[self._numel :].zero_()
        return self._padded

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


class PackedHalves(Halves):
    """Gradients in 16 bits, one packed part per rank, summed in fp32. Only sums of one part are temporary."""

    def __init__(self, layout: Layout, ranks: int, wire: torch.dtype) -> None:  # without the buffers of `Halves`
        self._scaled = wire == torch.float16
        self._payload = part_of(layout.numel, ranks)
        width = self._payload + (1 if self._scaled else 0)
        self._packed = layout.buffer("packed", ranks, width, dtype=wire)
        self._received = layout.buffer("received", ranks, width, dtype=wire)
        self._even = ranks * self._payload == layout.numel
        self._share = 1.0

    def average(self, share: float) -> bool:
        self._share = share  # for sums of one part, not for the whole bucket
        return True

    def scatter(self, flat: Tensor, comm: Comm) -> Work:
        if not self._even:
            self._packed.zero_()
        if self._scaled:
            for part, packed in zip(flat.split(self._payload), self._packed, strict=False):
                _encode_scaled(part, packed)
        else:
            self._packed.view(-1)[: flat.numel()].copy_(flat)
        return comm.all_to_all(self._received, self._packed)

    def shard(self) -> Tensor:
        first, *others = self._received
        total = torch.empty(self._payload, device=first.device)
        if self._scaled:
            total.copy_(first[1:]).mul_(_factor(first) * self._share)
            scratch = torch.empty_like(total)
            for part in others:
                total.addcmul_(scratch.copy_(part[1:]), _factor(part) * self._share)
            return total
        total.copy_(first).mul_(self._share)
        for part in others:
            total.add_(part, alpha=self._share)  # torch converts small blocks on the way, without a copy in fp32
        return total

    def gather(self, shard: Tensor, flat: Tensor, comm: Comm) -> Work:
        return comm.all_gather(self._received, self._encoded(shard, comm.rank))

    def _encoded(self, shard: Tensor, rank: int) -> Tensor:
        """Return this rank's shard, as it is sent."""
        mine = self._packed[rank]
        if self._scaled:
            _encode_scaled(shard, mine)
        else:
            mine.copy_(shard)
        return mine

    def rounded(self, shard: Tensor, rank: int) -> Tensor:
        """Return this rank's shard as all ranks receive it."""
        mine, rounded = self._encoded(shard, rank), torch.empty_like(shard)
        if self._scaled:
            _unscale(mine[1:], _factor(mine), rounded)
        else:
            rounded.copy_(mine)
        return rounded

    def finish(self, flat: Tensor) -> None:
        if self._scaled:
            for part, packed in zip(flat.split(self._payload), self._received, strict=False):
                _unscale(packed[1 : 1 + part.numel()], _factor(packed), part)
        else:
            flat.copy_(self._received.view(-1)[: flat.numel()])


class _Ring(State):
    """A bucket in 16 bits, for the backend's own all-reduce."""

    def __init__(self, layout: Layout, wire: torch.dtype) -> None:
        self.scaled = wire == torch.float16
        self._packed = layout.buffer("packed", layout.numel, dtype=wire)
        self._bound = layout.buffer("bound", 1, dtype=torch.float32)
        self._share = 1.0

    def average(self, share: float) -> bool:
        self._share = share
        return True

    def bound(self, flat: Tensor) -> Tensor:
        """Return the largest magnitude of the bucket. Added over all ranks, it bounds every partial sum."""
        return torch.mul(_largest(flat), self._share, out=self._bound[0]).view(1)

    def encode(self, flat: Tensor) -> Tensor:
        if not self.scaled:
            return torch.mul(_wide(flat), self._share, out=self._packed)
        return torch.mul(_wide(flat), torch.exp2(_exponent(self._bound[0])) * self._share, out=self._packed)

    def decode(self, flat: Tensor) -> None:
        if self.scaled:
            _unscale(self._packed, torch.exp2(-_exponent(self._bound[0])), flat)
        else:
            flat.copy_(self._packed)


def _wide(part: Tensor) -> Tensor:
    """Return a part in at least 32 bits: on CUDA, a scale above 65504 would become infinite in 16 bits."""
    return part.to(torch.promote_types(part.dtype, torch.float32))


def _largest(part: Tensor) -> Tensor:
    """Return the largest magnitude, in fp32."""
    if not part.numel():
        return torch.zeros((), device=part.device)
    return torch.stack(part.aminmax()).abs().amax().to(torch.float32)


def _exponent(largest: Tensor) -> Tensor:
    """Return the power of two that scales a magnitude to between 2^14 and 2^15, within the range of fp32."""
    exponent = _FP16_TOP_EXPONENT - torch.frexp(largest).exponent.to(torch.float32)
    return exponent.clamp(-_EXPONENT_LIMIT, _EXPONENT_LIMIT)


def _encode_scaled(part: Tensor, packed: Tensor) -> None:
    """Write a power of two and the scaled part."""
    packed[0] = exponent = _exponent(_largest(part))
    torch.mul(_wide(part), torch.exp2(exponent), out=packed[1 : 1 + part.numel()])


def _unscale(packed: Tensor, factor: Tensor, part: Tensor) -> None:
    """Write values multiplied by a factor, which is applied in at least 32 bits."""
    if part.dtype in (torch.float32, torch.float64):
        part.copy_(packed).mul_(factor)
    else:
        part.copy_(packed.to(torch.float32) * factor)


def _factor(packed: Tensor) -> Tensor:
    """Return the factor that undoes the scale of a packed part."""
    return torch.exp2(-packed[0].to(torch.float32))


@functools.cache
def _nccl_adds_in_fp32() -> bool:
    """Return whether NCCL adds 16-bit numbers in fp32. A machine without NCCL predicts for a current version."""
    try:
        return tuple(torch.cuda.nccl.version()) >= (2, 27, 3)
    except AttributeError:
        return True
