"""Your own exchange: 8 bits per gradient, and rounding errors are added to the next step's gradients.

python examples/int8_exchange.py                                                              # check the laws
syncline cluster run --hosts 4 --rate 100mbit -- torchrun examples/int8_exchange.py           # train with it
syncline cluster run --hosts 4 --rate 100mbit -- torchrun examples/int8_exchange.py --plain   # train without it

- On the wire: each rank sends the i-th part of its bucket to rank i in 8 bits (all-to-all), rank i sums the parts in
  fp32, and sends the sum to all ranks in 8 bits (all-gather). Every 256 values share a power of two as their scale.
- Cost: a quarter of plain DDP's bytes, for any number of ranks, and 8 bytes of memory per parameter.
- When it loses: on fast links, because packing passes over memory several times.
- Paper: none; this is quantisation with error feedback in its simplest form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from syncline.exchange import Comm, Cost, Layout, Phase, Rounding, State, Topology, Work

BLOCK = 256
"""Values that share a scale, which is sent after them as one more byte."""
NOT_FINITE = 127
"""The exponent that marks a block with a NaN or an infinity, so that every rank detects it."""


@dataclass(frozen=True)
class Int8:
    """Send all gradients in 8 bits, with error feedback. Fields, if it had any, would be its settings."""

    lossless = False
    keeps = True
    waits = True

    def prepare(self, layout: Layout, comm: Comm) -> State:
        return Int8State(layout, comm.size, rows(layout.numel, layout.dtype, comm.size))

    def run(self, flat: Tensor, state: State, comm: Comm) -> Work | None:
        assert isinstance(state, Int8State)  # noqa: S101 - as prepared
        state.add_to(flat)
        if state.received is None:  # one rank, or a bucket too small to be worth packing
            state.keep_instead(torch.zeros(flat.numel(), device=flat.device))
            return comm.all_reduce(flat) if comm.size > 1 else None

        wanted = state.padded(flat).view(comm.size, -1, BLOCK)
        packed = pack(wanted)
        comm.all_to_all(state.received, packed).wait()
        error = wanted - unpack(packed)

        total = unpack(state.received).sum(0)  # this rank's part of the sum
        packed = pack(total)
        error[comm.rank] += total - unpack(packed)
        comm.all_gather(state.received, packed).wait()

        flat.copy_(unpack(state.received).view(-1)[: flat.numel()])
        state.keep_instead(error.view(-1)[: flat.numel()])
        return None

    def cost(self, numel: int, dtype: torch.dtype, topology: Topology) -> Cost:
        ranks = topology.ranks
        if ranks == 1:
            return Cost(())
        blocks = rows(numel, dtype, ranks)
        if blocks is None:
            return Cost((Phase.of("all_reduce", numel, dtype.itemsize, topology),))
        nbytes = ranks * blocks * (BLOCK + 1)
        return Cost(tuple(Phase.of(kind, nbytes, 1, topology) for kind in ("all_to_all", "all_gather")))

    def rounding(self, dtype: torch.dtype, ranks: int) -> Rounding:
        """Bound the error of fp32 sums. Errors of the 8-bit format are in the residual, so they do not count."""
        unit = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
        return Rounding(of_sum=4 * ranks * unit, of_largest=4 * ranks * unit)


def rows(numel: int, dtype: torch.dtype, ranks: int) -> int | None:
    """Return the number of blocks in each rank's part, or None if packing would not make the bucket smaller."""
    blocks = -(-numel // (ranks * BLOCK))
    smaller = ranks * blocks * (BLOCK + 1) < numel * dtype.itemsize
    return blocks if ranks > 1 and smaller else None


def pack(values: Tensor) -> Tensor:
    """Convert (…, BLOCK) in fp32 to (…, BLOCK + 1) in int8. Scales are powers of two, so rounding errors are exact."""
    largest = values.abs().amax(-1, keepdim=True)
    exponent = (torch.frexp(largest).exponent - 7).clamp(-120, 120)
    exponent = torch.where(torch.isfinite(largest), exponent, NOT_FINITE)
    steps = (values * torch.exp2(-exponent.to(values.dtype))).round().clamp(-127, 127)
    return torch.cat((steps, exponent.to(steps.dtype)), -1).nan_to_num(0.0).to(torch.int8)


def unpack(packed: Tensor) -> Tensor:
    """Convert the result of `pack` back to fp32."""
    exponent = packed[..., BLOCK:].to(torch.float32)
    scale = torch.where(exponent == NOT_FINITE, torch.nan, torch.exp2(exponent))
    return packed[..., :BLOCK] * scale


class Int8State(State):
    """The residual, in fp32 and without loss scale, and the buffer that a step needs."""

    def __init__(self, layout: Layout, ranks: int, blocks: int | None) -> None:
        self._residual = torch.zeros(layout.numel, device=layout.device)
        self._next: Tensor | None = None
        self._scale: Tensor | float = 1.0
        self._pad = 0 if blocks is None else ranks * blocks * BLOCK - layout.numel
        self.received = None
        if blocks is not None:
            self.received = layout.buffer("received", ranks, blocks, BLOCK + 1, dtype=torch.int8)

    def begin(self, step: int, scale: Tensor | None = None) -> None:
        self._scale = 1.0 if scale is None else scale.to(torch.float32)

    def add_to(self, flat: Tensor) -> None:
        flat.add_(self._residual * self._scale)

    def padded(self, flat: Tensor) -> Tensor:
        return torch.nn.functional.pad(flat.to(torch.float32), (0, self._pad))

    def keep_instead(self, error: Tensor) -> None:
        """Set the residual that `settle` will keep if the step is applied."""
        self._next = error / self._scale

    def settle(self, applied: Tensor) -> None:
        """Keep the new residual where the result was applied, and the old one elsewhere: everywhere if any bucket of
        the step was not finite, and for parameters that no rank has used."""
        if self._next is not None:
            self._residual, self._next = torch.where(applied, self._next, self._residual), None

    def kept(self) -> Tensor:
        return self._residual

    @property
    def state_bytes(self) -> int:
        return self._residual.numel() * self._residual.element_size()

    def tensors(self, layout: Layout) -> dict[str, dict[str, Tensor]]:
        """Return the residual by parameter name, because buckets may differ when a checkpoint is loaded."""
        return {slot.name: {"error": slot.view(self._residual)} for slot in layout.slots}

    def load(self, layout: Layout, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        self._residual.zero_()
        for slot in layout.slots:
            if "error" in tensors.get(slot.name, {}):
                slot.view(self._residual).copy_(tensors[slot.name]["error"])


def train(plain: bool) -> None:
    """Train a CNN on handwritten digits for one epoch. `torchrun` calls this once per rank."""
    import time

    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    import syncline
    from syncline.models.data import digits
    from syncline.models.zoo import build_model, loss

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rank, ranks, data = dist.get_rank(), dist.get_world_size(), digits()
    model = DDP(build_model("cnn"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    handle = None if plain else syncline.attach(model, Int8())

    order = torch.randperm(len(data.train_labels))[rank::ranks].split(32)[:-1]
    begin = time.monotonic()
    for mine in order:
        optimizer.zero_grad()
        loss(model(data.train_images[mine]), data.train_labels[mine]).backward()
        optimizer.step()
    per_step_ms = (time.monotonic() - begin) / len(order) * 1000
    if rank == 0:
        model.eval()
        with torch.no_grad():
            right = model.module(data.held_out_images).argmax(-1) == data.held_out_labels
        sent = "" if handle is None else f", {handle.stats().sent_bytes} bytes sent in the last step"
        print(f"{per_step_ms:.0f} ms per step, {right.float().mean():.1%} of held-out digits right{sent}")
    dist.destroy_process_group()


if __name__ == "__main__":
    import os
    import sys

    if "RANK" in os.environ:
        train(plain="--plain" in sys.argv[1:])
    else:
        from syncline.testing import check_laws

        check_laws(Int8(), dtypes=(torch.float32, torch.bfloat16))
        print("Int8 keeps the laws.")
