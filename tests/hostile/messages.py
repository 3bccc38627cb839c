"""What ranks send each other, of whom all but this one say what they like."""

from __future__ import annotations

import functools
import itertools
import random
import struct
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hostile.oracle import Finding, Format, finding, refusal_of, watched
from syncline.errors import ExchangeError
from syncline.exchange import AllgatherTopk, Comm, Layout, OkTopk, Topology, Work
from syncline.kernels import Slots
from syncline.kernels.cpu import CpuKernels


class _Done:
    def wait(self) -> None: ...


@dataclass
class Peers:
    """A `Comm` of which all ranks but this one say what they like."""

    rank: int
    size: int
    rows: list[Tensor]
    """For each collective, in order: what the others send, a row per rank."""
    received: list[Tensor]
    topology: Topology

    def level(self, name: str) -> Comm | None:
        return None

    def all_to_all(self, output: Tensor, input: Tensor) -> Work:
        return self._deliver(output, input.view(self.size, -1)[self.rank])

    def all_gather(self, output: Tensor, input: Tensor) -> Work:
        return self._deliver(output, input.view(-1))

    def _deliver(self, output: Tensor, mine: Tensor) -> Work:
        rows = self.rows.pop(0).clone()
        rows[self.rank] = mine
        output.copy_(rows.view_as(output))
        self.received.append(rows)
        return _Done()

    def all_reduce(self, tensor: Tensor) -> Work:
        raise NotImplementedError

    def reduce(self, tensor: Tensor, root: int) -> Work:
        raise NotImplementedError

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        raise NotImplementedError


Entries = list[tuple[int, float]]


def entries_in(row: Tensor, slots: Slots, region: int) -> Entries | None:
    """A slot read by its description, one word after the other: places in the bucket, and values; None for one that
    cannot be."""
    words = struct.unpack(f"<{slots.words}H", row.numpy().tobytes())
    counts = words[1 : 1 + slots.cells]
    if sum(counts) > slots.entries or max(counts) > slots.cell:
        return None
    cells = [cell for cell, count in enumerate(counts) for _ in range(count)]
    places = words[slots.places_at : slots.places_at + len(cells)]
    where = [(cell * slots.regions + region) * slots.cell + place for cell, place in zip(cells, places, strict=True)]
    if any(place >= slots.cell for place in places) or any(place >= slots.numel for place in where):
        return None
    if any(before >= after for before, after in itertools.pairwise(where)):
        return None
    values = row.view(torch.int16)[slots.values_at :].clone().view(slots.values)[: len(where)].to(torch.float32)
    if slots.values == torch.float16:
        exponent = struct.unpack("<h", struct.pack("<H", words[0]))[0]
        values = values * 2.0 ** -max(-120, min(120, exponent))
    return list(zip(where, values.tolist(), strict=True))


@dataclass(frozen=True)
class Messages:
    """What this rank's exchange makes of anything that others send: the sum of it, an error, or a step that does not
    count; and nothing is written but the bucket."""

    name: str
    exchange: OkTopk | AllgatherTopk
    numel: int
    ranks: int
    rank: int
    dtype: torch.dtype = torch.float32

    @functools.cached_property
    def slots(self) -> Slots:
        slots = self.exchange.slots(self.numel, self.dtype, self.ranks)
        assert slots is not None, f"{self.name}: goes whole"
        return slots

    @functools.cached_property
    def honest(self) -> tuple[Tensor, ...]:
        """By collective: what others would send."""
        packed = torch.stack([self._packed(seed) for seed in range(2 * self.ranks)])
        ranks = torch.arange(self.ranks)
        if self.slots.regions == 1:
            return (packed[: self.ranks, 0],)
        return packed[: self.ranks, self.rank], packed[self.ranks + ranks, ranks]

    def _packed(self, seed: int) -> Tensor:
        rows = torch.zeros(self.slots.regions, self.slots.bytes, dtype=torch.uint8)
        turn, flat = torch.zeros((), dtype=torch.int32), self._gradient(seed)
        CpuKernels(self.slots).pack(flat, 1.0, torch.zeros(2, self.numel), turn, None, rows)
        return rows

    def _gradient(self, seed: int) -> Tensor:
        return torch.randn(self.numel, generator=torch.Generator().manual_seed(seed)).to(self.dtype)

    def case(self, seed: int, number: int) -> bytes:
        draw = random.Random(f"{self.name} {seed} {number}")
        phases = [bytearray(rows.contiguous().numpy().tobytes()) for rows in self.honest]
        for _ in range(draw.choice((1, 1, 2, 4))):
            phase = draw.choice(phases)
            row = draw.randrange(self.ranks) * self.slots.bytes
            self._spoil(draw, phase, row)
        return b"".join(phases)

    def _spoil(self, draw: random.Random, phase: bytearray, row: int) -> None:
        slots, end = self.slots, row + self.slots.bytes
        start, stop = draw.choice(((0, 1), (1, 1 + slots.cells), (slots.places_at, slots.values_at), (0, slots.words)))
        edges = (slots.cell, slots.cell - 1, slots.cell + 1, slots.entries)
        words = (0, 1, 2, 0xFFFF, 0x8000, 0x7FFF, 0x7F80, 0x7C00, *edges)
        at = row + 2 * draw.randrange(start, stop)
        match draw.randrange(8):
            case 0 | 1:
                phase[at : at + 2] = struct.pack("<H", draw.choice(words))
            case 2:
                phase[at] ^= 1 << draw.randrange(8)
            case 3:
                phase[row:end] = draw.randbytes(slots.bytes)
            case 4:
                phase[row:end] = bytes(slots.bytes)
            case 5:  # two entries, or counts, change places; or one is there twice
                other = row + 2 * draw.randrange(start, stop)
                phase[at : at + 2], phase[other : other + 2] = phase[other : other + 2], phase[at : at + 2]
                if draw.random() < 0.5:
                    phase[other : other + 2] = phase[at : at + 2]
            case 6:
                other = draw.randrange(self.ranks) * slots.bytes
                phase[row:end] = phase[other : other + slots.bytes]
            case _:
                values = row + 2 * slots.values_at
                phase[values:end] = draw.randbytes(end - values)

    def judge(self, case: bytes, folder: Path) -> str:
        rows = torch.frombuffer(bytearray(case), dtype=torch.uint8).view(len(self.honest), self.ranks, -1)
        comm = Peers(self.rank, self.ranks, list(rows), [], Topology.flat(self.ranks))
        state = self.exchange.prepare(Layout.flat(self.numel, self.dtype), comm)
        memory = torch.full((self.numel + 2 * _GUARD,), _UNTOUCHED, dtype=self.dtype)
        flat = memory[_GUARD:-_GUARD].copy_(self._mine)
        try:
            with watched():
                state.begin(0)
                self.exchange.run(flat, state, comm)
                finite = state.finite(flat)
                state.settle(finite)
            kind = "accepted"
        except ExchangeError as error:
            kind = refusal_of(error, "")
        except BaseException as error:
            raise finding(error) from error
        expected = self._expected(comm.received)
        if not bool((memory[:_GUARD] == _UNTOUCHED).all() & (memory[-_GUARD:] == _UNTOUCHED).all()):
            raise Finding("something was written beside the bucket")
        if expected is None:
            if kind == "accepted":
                raise Finding("a message that cannot be was taken for one")
            if bool(flat.any()):
                raise Finding("a message was refused after a part of it had been applied")
            return kind
        if kind != "accepted":
            raise Finding(f"a message was refused without need: {kind}")
        if not torch.equal(flat.nan_to_num(7.0), expected.nan_to_num(7.0)):
            raise Finding("the bucket holds something else than what was sent")
        if bool(finite) != bool(expected.isfinite().all()):
            raise Finding(f"the result is told to be finite: {bool(finite)}, and that is not so")
        kept = state.kept()
        if kept is None or not bool(kept.isfinite().all()):
            raise Finding("what is kept is no longer finite")
        return kind if bool(finite) else "accepted, not finite"

    @functools.cached_property
    def _mine(self) -> Tensor:
        return self._gradient(999)

    def _expected(self, received: list[Tensor]) -> Tensor | None:
        """What the bucket should hold after it; None where something arrived that cannot be."""
        sums = torch.zeros(self.numel)
        for phase, rows in enumerate(received):
            last = phase == len(self.honest) - 1
            for sender, row in enumerate(rows):
                spreads = last and self.slots.regions > 1
                entries = entries_in(row, self.slots, sender if spreads else self.rank % self.slots.regions)
                if entries is None:
                    return None
                if last and entries:
                    where = torch.tensor([place for place, _ in entries])
                    sums[where] += torch.tensor([value for _, value in entries], dtype=torch.float64).to(torch.float32)
        return sums.to(self.dtype) if len(received) == len(self.honest) else None


_GUARD, _UNTOUCHED = 64, 12345.0


MESSAGES: tuple[Format, ...] = (
    Messages("oktopk", OkTopk(density=0.1, values="bf16"), 1000, 3, 1),
    Messages("oktopk fp16", OkTopk(density=0.1, values="fp16", momentum=0.9), 777, 2, 0, torch.bfloat16),
    Messages("oktopk fp32", OkTopk(density=0.05, values="fp32"), 3001, 4, 3),
    Messages("topk-allgather", AllgatherTopk(density=0.05), 1001, 2, 0),
)
