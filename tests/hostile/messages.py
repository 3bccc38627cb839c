"""What ranks send each other, of whom all but this one say what they like."""

from __future__ import annotations

import functools
import itertools
import random
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hostile.oracle import Finding, Format, finding, refusal_of, watched
from syncline.errors import ExchangeError
from syncline.exchange import AllgatherTopk, ChunkedTopk, Comm, Layout, OkTopk, Quantized, Topology, Work
from syncline.kernels import Blocks, Chunks, Slots
from syncline.kernels.blocks_cpu import CpuBlockKernels
from syncline.kernels.chunks_cpu import CpuChunkKernels
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

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Work:
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
    exchange: Any
    numel: int
    ranks: int
    rank: int
    dtype: torch.dtype = torch.float32

    @functools.cached_property
    def slots(self) -> Any:
        slots: Slots | None = self.exchange.slots(self.numel, self.dtype, self.ranks)
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
            if bool(flat.any()) and not torch.equal(flat, self._mine):
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


class Codes(Messages):
    """The same of quantised parts. All bytes are codes, so that nothing is refused: a scale can only make a step not
    count."""

    @functools.cached_property
    def slots(self) -> Any:
        blocks: Blocks | None = self.exchange.blocks(self.numel, self.dtype, self.ranks)
        assert blocks is not None, f"{self.name}: goes whole"
        return blocks

    @functools.cached_property
    def honest(self) -> tuple[Tensor, ...]:
        packed = torch.stack([self._packed(seed) for seed in range(2 * self.ranks)])
        ranks = torch.arange(self.ranks)
        return packed[: self.ranks, self.rank], packed[self.ranks + ranks, ranks]

    def _packed(self, seed: int) -> Tensor:
        rows = torch.zeros(self.ranks, self.slots.bytes, dtype=torch.uint8)
        turn = torch.zeros((), dtype=torch.int32)
        # As a rank that does not exist: no part is its own.
        CpuBlockKernels(self.slots).encode(self._gradient(seed), 1.0, None, turn, None, self.ranks, rows)
        return rows

    def _spoil(self, draw: random.Random, phase: bytearray, row: int) -> None:
        end, codes = row + self.slots.bytes, row + 2 * self.slots.blocks
        words = (0, 1, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7F7F, 0xFF7F, 0x7E7F, 0x7E80, 0x7D00, 0x3F80)
        at = draw.randrange(row, codes, 2)
        match draw.randrange(4):
            case 0 | 1:
                phase[at : at + 2] = struct.pack("<H", draw.choice(words))
            case 2:
                phase[codes:end] = draw.randbytes(end - codes)
            case _:
                phase[row:end] = draw.randbytes(end - row)

    def _expected(self, received: list[Tensor]) -> Tensor | None:
        blocks, bits = self.slots, self.slots.bits
        parts = []
        for row in received[1].numpy():
            words = row[: 2 * blocks.blocks].view("<u2").astype(np.uint32) << 16
            scales = words.view(np.float32)
            planes = row[2 * blocks.blocks :].reshape(-1, blocks.blocks, blocks.width).astype(np.int64)
            numbers = sum(plane << 8 * index for index, plane in enumerate(planes))
            size = 8 * len(planes)
            numbers = np.where(numbers >> (size - 1), numbers - (1 << size), numbers)
            for factor in {8: (), 4: (16,), 3: (4096, 64, 8)}[bits]:
                high = (numbers + factor // 2) // factor
                numbers = np.concatenate([numbers - factor * high, high], 1)
            scales = np.where(np.abs(scales) < 2.0 ** (129 - bits), scales, np.float32(np.nan))
            parts.append(torch.from_numpy(numbers.astype(np.float32) * scales[:, None]).view(-1))
        return torch.cat(parts)[: self.numel].to(self.dtype)


class InChunks(Messages):
    """The same of entries in chunks, read by their description, one bit after the other."""

    @functools.cached_property
    def slots(self) -> Any:
        chunks: Chunks | None = self.exchange.chunks(self.numel, self.dtype, self.ranks)
        assert chunks is not None, f"{self.name}: goes whole"
        return chunks

    @functools.cached_property
    def honest(self) -> tuple[Tensor, ...]:
        return (torch.stack([self._packed(seed) for seed in range(self.ranks)]),)

    def _packed(self, seed: int) -> Tensor:
        row, turn = torch.zeros(self.slots.bytes, dtype=torch.uint8), torch.zeros((), dtype=torch.int32)
        CpuChunkKernels(self.slots).pack(self._gradient(seed), 1.0, torch.zeros(2, self.numel), turn, None, row)
        return row

    def _spoil(self, draw: random.Random, phase: bytearray, row: int) -> None:
        chunks, end = self.slots, row + self.slots.bytes
        scales, plane = row + chunks.scales_at, draw.choice(chunks.planes)
        at = row + plane.start + draw.randrange(chunks.count * plane.bytes)
        match draw.randrange(7):
            case 0:  # the last chunk, which may be short: one entry, at its end
                for plane in chunks.planes:
                    last = row + plane.start + (chunks.count - 1) * plane.bytes
                    phase[last : last + plane.bytes] = b"\xff" * plane.bytes
            case 1:
                phase[at] = draw.choice((0, 0xFF, chunks.numel % chunks.chunk & 0xFF, draw.randrange(256)))
            case 2:
                phase[at] ^= 1 << draw.randrange(8)
            case 3:  # one value or scale
                word = draw.choice((0, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7F7F, 0xFF7F, 0x3F80, 1))
                place = draw.randrange(row, row + chunks.planes[0].start - 1, 2)
                phase[place : place + 2] = struct.pack("<H", word)
            case 4:
                other = draw.randrange(self.ranks) * chunks.bytes
                phase[row:end] = phase[other : other + chunks.bytes]
            case 5:
                phase[row:scales] = draw.randbytes(scales - row)
            case _:
                phase[row:end] = draw.choice((bytes(chunks.bytes), draw.randbytes(chunks.bytes)))

    def _expected(self, received: list[Tensor]) -> Tensor | None:
        sums, count = torch.zeros(self.numel), torch.zeros(self.numel)
        for row in received[0]:
            entries = self._entries_in(row.numpy().tobytes())
            if entries is None:
                return None
            for place, value in entries:
                sums[place] += value
                count[place] += value != 0
        if self.exchange.mean == "contributors":
            sums *= torch.full_like(count, self.ranks) / count.clamp(min=1)
        return sums.to(self.dtype)

    def _entries_in(self, row: bytes) -> Entries | None:
        chunks, found = self.slots, []
        for chunk in range(chunks.count):
            before = -1
            for index in range(chunks.entries):
                code = 0
                for plane in chunks.planes:
                    part, byte = divmod(index, plane.bytes)
                    bits = row[plane.start + chunk * plane.bytes + byte] >> part * plane.bits
                    code |= (bits & (1 << plane.bits) - 1) << plane.shift
                place, number = code % chunks.chunk, code // chunks.chunk
                if place < before or chunk * chunks.chunk + place >= chunks.numel:
                    return None
                if place > before:
                    found.append((chunk * chunks.chunk + place, self._value(row, chunk, index, number)))
                before = place
        return found

    def _value(self, row: bytes, chunk: int, index: int, number: int) -> float:
        chunks = self.slots

        def bf16(offset: int) -> float:
            value: float = struct.unpack("<f", bytes(2) + row[offset : offset + 2])[0]
            return value

        if chunks.values == "fp32":
            value: float = struct.unpack_from("<f", row, 4 * (chunk * chunks.entries + index))[0]
            return value
        if chunks.values == "bf16":
            return bf16(2 * (chunk * chunks.entries + index))
        if chunks.values == "int4":
            with np.errstate(over="ignore"):
                magnitude = float(np.float32(number % 8) * np.float32(bf16(2 * chunk)))
            return -magnitude if number & 8 else magnitude
        magnitude = bf16(4 * chunk + 2 * (number & 1))
        return -magnitude if number & 2 else magnitude


_GUARD, _UNTOUCHED = 64, 12345.0


MESSAGES: tuple[Format, ...] = (
    Messages("oktopk", OkTopk(density=0.1, values="bf16"), 1000, 3, 1),
    Messages("oktopk fp16", OkTopk(density=0.1, values="fp16", momentum=0.9), 777, 2, 0, torch.bfloat16),
    Messages("oktopk fp32", OkTopk(density=0.05, values="fp32"), 3001, 4, 3),
    Messages("topk-allgather", AllgatherTopk(density=0.05), 1001, 2, 0),
    InChunks("topk-chunks", ChunkedTopk(density=0.05, chunk=256, mean="contributors"), 1000, 3, 1),
    InChunks("topk-chunks int4", ChunkedTopk(density=0.1, chunk=64, values="int4"), 777, 2, 0, torch.float64),
    InChunks("topk-chunks bf16", ChunkedTopk(density=0.05, chunk=128, values="bf16"), 1501, 4, 3),
    InChunks("topk-chunks fp32", ChunkedTopk(density=0.02, chunk=512, values="fp32"), 1100, 2, 1),
    Messages("oktopk contributors", OkTopk(density=0.1, mean="contributors"), 1000, 3, 1),
    Codes("int8", Quantized(bits=8, block=64), 1000, 3, 1),
    Codes("int4", Quantized(bits=4, block=64), 777, 2, 0, torch.bfloat16),
    Codes("int3", Quantized(bits=3, block=32), 1501, 4, 3),
)
