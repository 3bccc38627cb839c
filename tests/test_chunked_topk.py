"""ChunkedTopk: its kernels against a plain reference, CUDA against the CPU, damaged rows, and the laws.

Run as a script, this compares the CUDA kernels with the CPU's in Triton's interpreter, and prints the differences as
JSON.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

import syncline
from syncline.errors import ExchangeError, UsageError
from syncline.exchange import EXCHANGES, ChunkedTopk, Hierarchical, Topology, for_updates, made_of, name_of, settings
from syncline.kernels import CHUNK_VALUES, ChunkKernels, Chunks, chunk_kernels_for
from syncline.kernels.chunks_cpu import CpuChunkKernels
from syncline.testing import LAWS, run_steps

pytestmark = pytest.mark.usefixtures("interpreter")
examples = functools.partial(hypothesis_settings, deadline=None, derandomize=True)

Make = Callable[[Chunks, bool], ChunkKernels]
KINDS = ("normal", "heavy-tailed", "integers", "equal", "zero", "few", "tiny", "the end", "huge")


def made(kind: str, numel: int, generator: torch.Generator) -> Tensor:
    """Return a gradient of this kind."""
    normal = torch.randn(numel, generator=generator)
    match kind:
        case "heavy-tailed":
            return normal * torch.exp(4 * torch.randn(numel, generator=generator))
        case "integers":
            return torch.randint(-3, 4, (numel,), generator=generator).float()
        case "equal":
            return torch.full((numel,), -0.75)
        case "zero":
            return torch.zeros(numel)
        case "few":  # fewer than there are entries
            return normal * (torch.rand(numel, generator=generator) < 0.01)
        case "tiny":  # partly below what is ever sent
            return normal * 2.0**-118
        case "the end":
            return torch.where(torch.arange(numel) >= numel - 5, normal, 0.0)
        case "huge":
            return normal.clamp(-2, 2) * 2.0**120
        case _:
            return normal


class World:
    """As many ranks as wanted, in one process, without a Comm. Rows are reused without being cleared."""

    def __init__(self, chunks: Chunks, ranks: int, make: Callable[[], ChunkKernels], device: str = "cpu") -> None:
        self.chunks, self.ranks = chunks, range(ranks)
        self.kernels = [make() for _ in self.ranks]
        self._memory = torch.zeros(ranks, 4, chunks.numel, device=device)
        self.kept = self._memory[:, 1:3]
        self.turn = torch.zeros((), dtype=torch.int32, device=device)
        self.rows = torch.full((ranks, chunks.bytes), 0xAB, dtype=torch.uint8, device=device)
        self.flags = torch.full((ranks, chunks.numel), 7, dtype=torch.int8, device=device)

    def step(self, gradients: Sequence[Tensor], ratio: float | None = None, share: float = 1.0) -> dict[str, Tensor]:
        device = self.rows.device
        factor = None if ratio is None else torch.tensor(ratio, device=device)
        flats = [gradient.to(device, copy=True) for gradient in gradients]
        for rank in self.ranks:
            self.kernels[rank].pack(
                flats[rank], share, self.kept[rank], self.turn, factor, self.rows[rank], self.flags[rank]
            )
        packed = self.kept[:, 1 - int(self.turn)].clone()
        finite = [
            self.kernels[rank].total(self.rows, flats[rank], rank, self.kept[rank], self.turn) for rank in self.ranks
        ]
        self.turn = 1 - self.turn
        assert not bool(self._memory[:, 0].any() | self._memory[:, 3].any()), "written outside of the residuals"
        seen = {
            "rows": self.rows, "packed": packed, "flats": torch.stack(flats), "kept": self.kept[:, int(self.turn)],
            "flags": self.flags, "finite": torch.stack(finite),
        }  # fmt: skip
        return {name: tensor.cpu().clone() for name, tensor in seen.items()}


def as_sent(values: Tensor, kind: str) -> Tensor:
    """Return one chunk's values as a receiver reads them."""
    if kind in ("fp32", "bf16") or not len(values):
        return values.to(torch.bfloat16).to(torch.float32) if kind == "bf16" else values
    magnitudes = values.abs().double()
    if kind == "int4":
        scale = (values.abs().max() * torch.tensor(1 / 7)).to(torch.bfloat16).to(torch.float32)
        return values.sign() * (values.abs() * (1 / scale) + 0.5).floor().clamp(max=7) * scale
    high = magnitudes * len(values) > magnitudes.sum()
    means = [magnitudes[part].mean() if bool(part.any()) else torch.zeros(()) for part in (~high, high)]
    low, top = (mean.to(torch.float32).to(torch.bfloat16).to(torch.float32) for mean in means)
    return values.sign() * torch.where(high, top, low)


def plain_pack(sums: Tensor, chunks: Chunks) -> Tensor:
    """Return what a rank sends, as a dense tensor."""
    sent = torch.zeros_like(sums)
    for start in range(0, chunks.numel, chunks.chunk):
        here = sums[start : start + chunks.chunk]
        order = torch.sort(here.abs(), descending=True, stable=True).indices[: chunks.entries]
        order = order[here[order].abs() >= 2.0**-118].sort().values
        sent[start + order] = as_sent(here[order], chunks.values)
    return sent


@st.composite
def any_chunks(draw: st.DrawFn) -> Chunks:
    chunk = draw(st.sampled_from([64, 128, 256, 1024, 4096]))
    numel = draw(st.integers(1, min(6000, 5 * chunk)))
    return Chunks(numel, chunk, draw(st.integers(1, chunk // draw(st.sampled_from([1, 8, 30])))), draw(
        st.sampled_from(CHUNK_VALUES)
    ))  # fmt: skip


# --- on the CPU -------------------------------------------------------------------------------------------------


@given(
    chunks=any_chunks(),
    ranks=st.integers(1, 4),
    kinds=st.lists(st.sampled_from(KINDS[:-1]), min_size=1, max_size=3),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float64]),
    ratio=st.sampled_from([None, 0.95]),
    contributors=st.booleans(),
    seed=st.integers(0, 99),
)
@examples(max_examples=120)
def test_rows_results_and_residuals_are_those_of_plain_sorting(
    chunks: Chunks, ranks: int, kinds: list[str], dtype: torch.dtype, ratio: float | None, contributors: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    world = World(chunks, ranks, lambda: CpuChunkKernels(chunks, contributors=contributors))
    kept = torch.zeros(ranks, chunks.numel)
    for kind in kinds:
        gradients = [made(kind, chunks.numel, generator).to(dtype) for _ in range(ranks)]
        seen = world.step(gradients, ratio)
        sums = kept * torch.tensor(1.0 if ratio is None else ratio) + torch.stack(gradients).to(torch.float32)
        # The oracle computes means in fp64, which rounds to another bf16 number only if it is next to a boundary.
        close = {"rtol": 2.0**-7, "atol": 0} if chunks.values == "int2" else {"rtol": 0, "atol": 0}
        sent = torch.stack([plain_pack(mine, chunks) for mine in sums])
        assert torch.allclose(sums - seen["packed"], sent, rtol=2.0**-7, atol=float(sums.abs().max()) * 2.0**-22)
        assert torch.equal(seen["flags"] != 0, sent != 0)
        read = [CpuChunkKernels(chunks)._read(row.numpy(), "it") for row in seen["rows"]]
        found = torch.zeros_like(sent)
        for rank, (where, values) in enumerate(read):
            found[rank, torch.from_numpy(where)] = torch.from_numpy(values)
        assert torch.allclose(found, sent, **close)
        total = functools.reduce(torch.add, found, torch.zeros(chunks.numel))
        count = (found != 0).sum(0).clamp(min=1).to(torch.float32)
        if contributors:
            total = total * (torch.full_like(count, ranks) / count)
        for flat in seen["flats"]:
            assert torch.equal(flat, total.to(dtype).to(flat.dtype))
        assert bool(seen["finite"].all())
        kept = seen["kept"]


@given(chunks=any_chunks(), before=st.lists(st.sampled_from(KINDS), max_size=3), kind=st.sampled_from(KINDS))
@examples(max_examples=80)
def test_what_is_selected_does_not_depend_on_what_was_selected_before(
    chunks: Chunks, before: list[str], kind: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    used, turn = CpuChunkKernels(chunks), torch.zeros((), dtype=torch.int32)

    def packed(kernels: ChunkKernels, gradient: Tensor) -> Tensor:
        row = torch.zeros(chunks.bytes, dtype=torch.uint8)
        kernels.pack(gradient.clone(), 1.0, torch.zeros(2, chunks.numel), turn, None, row)
        return row

    for earlier in before:
        packed(used, made(earlier, chunks.numel, generator))
    gradient = made(kind, chunks.numel, generator)
    assert torch.equal(packed(used, gradient), packed(CpuChunkKernels(chunks), gradient))


def test_large_buckets_are_read_in_pieces() -> None:
    chunks = Chunks.of(300_001, 4096, 0.01, "fp32")
    gradient = torch.randn(300_001, generator=torch.Generator().manual_seed(0))
    seen = World(chunks, 1, lambda: CpuChunkKernels(chunks)).step([gradient])
    assert torch.equal(seen["flats"][0], plain_pack(gradient, chunks))
    assert torch.equal(seen["kept"][0] + seen["flats"][0], gradient)


@pytest.mark.parametrize("values", CHUNK_VALUES)
@pytest.mark.parametrize("culprit", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_seen_by_all(values: str, culprit: float) -> None:
    chunks = Chunks(600, 256, 5, values)
    for place in (0, 299, 599):
        gradients = [torch.ones(600), torch.ones(600)]
        gradients[1][place] = culprit
        seen = World(chunks, 2, lambda: CpuChunkKernels(chunks)).step(gradients)
        assert not bool(seen["finite"].any())
        assert not bool(seen["flats"][:, place].isfinite().any())


@pytest.mark.parametrize("values", CHUNK_VALUES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_rank_keeps_what_rounding_the_sum_loses(values: str, dtype: torch.dtype) -> None:
    chunks = Chunks(600, 64, 5, values)
    generator = torch.Generator().manual_seed(0)
    gradients = [made("normal", 600, generator).to(dtype) for _ in range(3)]
    seen = World(chunks, 3, lambda: CpuChunkKernels(chunks)).step(gradients)
    came_in = torch.stack(gradients).double().sum(0)
    error = (came_in - seen["flats"][0].double() - seen["kept"].double().sum(0)).abs()
    assert float(error.max()) < 2e-6


@given(
    numel=st.integers(1, 10**8),
    chunk=st.sampled_from([64, 128, 256, 512, 1024, 2048, 4096]),
    density=st.floats(1e-4, 1.0),
    values=st.sampled_from(CHUNK_VALUES),
)
@examples(max_examples=200)
def test_rows_have_room_for_all_parts(numel: int, chunk: int, density: float, values: str) -> None:
    chunks = Chunks.of(numel, chunk, density, values)
    assert 1 <= chunks.entries <= chunks.chunk
    assert (chunks.count - 1) * chunks.chunk < numel <= chunks.count * chunks.chunk
    bits = chunks.place_bits + {"int2": 2, "int4": 4}.get(values, 0)
    assert sum(plane.bits for plane in chunks.planes) == bits
    exact = chunks.count * (chunks.entries * (bits / 8 + {"bf16": 2, "fp32": 4}.get(values, 0)) + 2 * chunks.scales)
    assert exact <= chunks.bytes <= exact + chunks.count * len(chunks.planes) + 4
    assert chunks.bytes % 4 == 0


# --- damaged rows -----------------------------------------------------------------------------------------------

ODD = Chunks(333, 64, 8, "int4")
"""The last chunk has 13 elements."""


def packed(chunks: Chunks, seed: int = 0) -> Tensor:
    row = torch.zeros(chunks.bytes, dtype=torch.uint8)
    gradient = torch.randn(chunks.numel, generator=torch.Generator().manual_seed(seed))
    CpuChunkKernels(chunks).pack(
        gradient, 1.0, torch.zeros(2, chunks.numel), torch.zeros((), dtype=torch.int32), None, row
    )
    return row


def damaged(defect: str) -> Tensor:
    row = packed(ODD)
    places = row[ODD.planes[0].start :].view(-1)  # the plane of 8 bits: 6 bits of the place, 2 of the value
    match defect:
        case "not in order":
            places[8], places[9] = 40, 39
        case "behind the bucket":
            places[5 * 8 : 6 * 8] = 13
        case "an infinite scale":
            row[:2].view(torch.int16)[0] = 0x7F80
        case "a scale that is no number":
            row[:2].view(torch.int16)[0] = 0x7FC1
    return row


REFUSED = {"not in order": "rank 1 sent entries that are not in order", "behind the bucket": "rank 1 sent entry 333 of"}
DEFECTS = [*REFUSED, "an infinite scale", "a scale that is no number"]


@pytest.mark.parametrize("defect", DEFECTS)
def test_damage_is_refused_or_makes_the_step_not_finite(defect: str) -> None:
    flat, kept, turn = torch.zeros(ODD.numel), torch.zeros(2, ODD.numel), torch.zeros((), dtype=torch.int32)
    kernels, rows = CpuChunkKernels(ODD, contributors=True), torch.stack([packed(ODD, 1), damaged(defect)])
    if defect in REFUSED:
        with pytest.raises(ExchangeError, match=REFUSED[defect]):
            kernels.total(rows, flat, 0, kept, turn)
        assert not bool(flat.any())
    else:
        assert not bool(kernels.total(rows, flat, 0, kept, turn))
    again = torch.stack([packed(ODD, 1), packed(ODD)])
    kernels.total(again, flat, 0, kept, turn)  # buffers are as before
    fresh = torch.zeros(ODD.numel)
    CpuChunkKernels(ODD, contributors=True).total(again, fresh, 0, kept, turn)
    assert torch.equal(flat, fresh)


@given(noise=st.binary(min_size=ODD.bytes, max_size=ODD.bytes), values=st.sampled_from(CHUNK_VALUES))
@examples(max_examples=100)
def test_rows_of_noise_are_refused_or_valid(noise: bytes, values: str) -> None:
    chunks = Chunks(100, 64, 3, values)
    row = torch.frombuffer(bytearray((noise * 2)[: chunks.bytes]), dtype=torch.uint8)
    memory = torch.full((300,), 7.0)
    flat, kept = memory[100:200], torch.zeros(2, 100)
    try:
        finite = CpuChunkKernels(chunks).total(row, flat, 0, kept, torch.zeros((), dtype=torch.int32))
    except ExchangeError:
        assert bool((memory == 7).all())
    else:
        assert bool(finite) == bool(flat.isfinite().all())
        assert bool((memory[:100] == 7).all() & (memory[200:] == 7).all())


# --- on CUDA: the same bits -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    chunks: Chunks
    kinds: tuple[str, ...]
    ranks: int = 2
    dtype: torch.dtype = torch.float32
    ratio: float | None = None
    contributors: bool = True


CASES = {
    **{
        f"{values}, all kinds": Case(Chunks(700, 256, 9, values), KINDS, ranks, ratio=0.95)
        for values, ranks in (("int2", 3), ("int4", 2))
    },
    "bf16, some kinds": Case(Chunks(700, 256, 9, "bf16"), ("heavy-tailed", "equal", "tiny")),
    "fp32, some kinds": Case(Chunks(700, 256, 9, "fp32"), ("normal", "zero", "huge"), ratio=0.95),
    "int2, the largest chunks": Case(Chunks(9001, 4096, 123, "int2"), ("heavy-tailed", "normal", "huge")),
    "int2, bf16 buckets": Case(Chunks(700, 64, 7, "int2"), ("normal", "integers"), dtype=torch.bfloat16),
    "int4, fp16 buckets, mean over ranks": Case(
        Chunks(700, 128, 7, "int4"), ("normal", "few"), dtype=torch.float16, contributors=False
    ),
    "fp32, fp64 buckets": Case(Chunks(700, 512, 30, "fp32"), ("normal", "the end"), dtype=torch.float64),
    "int2, whole chunks": Case(Chunks(700, 64, 64, "int2"), ("normal", "few")),
}


def shortened(case: Case) -> Case:
    """Return the case with two chunks, of which the last is short, for the interpreter."""
    return dataclasses.replace(case, chunks=dataclasses.replace(case.chunks, numel=case.chunks.chunk * 6 // 5))


def difference(case: Case, make: Make, device: str) -> str:
    """Describe the first difference from the CPU kernels; return an empty string if all bits are the same."""
    generator = torch.Generator().manual_seed(case.chunks.numel)
    on_cpu = World(case.chunks, case.ranks, lambda: CpuChunkKernels(case.chunks, contributors=case.contributors))
    there = World(case.chunks, case.ranks, lambda: make(case.chunks, case.contributors), device)
    for number, kind in enumerate(case.kinds):
        gradients = [made(kind, case.chunks.numel, generator).to(case.dtype) for _ in range(case.ranks)]
        share = (
            1.0 if case.dtype == torch.float64 else 1 / 3
        )  # kernels multiply in fp32, so that states do not ask them
        ours, theirs = (world.step(gradients, case.ratio, share) for world in (on_cpu, there))
        for what, mine in ours.items():
            used = mine[:, : case.chunks.planes[-1].start] if what == "rows" else mine
            other = theirs[what][:, : used.shape[1]] if what == "rows" else theirs[what]
            unequal = used.contiguous().view(torch.uint8) != other.contiguous().view(torch.uint8)
            if bool(unequal.any()):
                return f"step {number} ({kind}): {int(unequal.sum())} bytes of {what} differ"
    return ""


def harm(defect: str, make: Make, device: str) -> str:
    """Describe the harm that a damaged row does: a step that is applied, or a write outside of the bucket."""
    memory, kept = torch.zeros(3, ODD.numel, device=device), torch.zeros(2, ODD.numel, device=device)
    rows, turn = torch.stack([packed(ODD, 1), damaged(defect)]), torch.zeros((), dtype=torch.int32, device=device)
    finite = make(ODD, True).total(rows.to(device), memory[1], 0, kept, turn)
    found = ["a result that counts"] if bool(finite) or bool(memory[1].isfinite().all()) else []
    return ", ".join(found + (["a write beside the bucket"] if bool((memory[::2] != 0).any()) else []))


def not_finite(make: Make, device: str) -> str:
    for values in CHUNK_VALUES:
        chunks = Chunks(150, 128, 5, values)
        for culprit in (float("nan"), -float("inf")):
            gradients = [torch.ones(150), torch.ones(150)]
            gradients[1][149] = culprit
            seen = World(chunks, 2, functools.partial(make, chunks, True), device).step(gradients)
            if bool(seen["finite"].any()) or bool(seen["flats"][:, 149].isfinite().any()):
                return f"{culprit} passes for a number in {values}"
    return ""


def report(make: Make, device: str) -> dict[str, str]:
    """Run all checks and return what is wrong, by check; empty strings if nothing is."""
    cases = CASES if device == "cuda" else {name: shortened(case) for name, case in CASES.items()}
    return {
        **{name: difference(case, make, device) for name, case in cases.items()},
        **{defect: harm(defect, make, device) for defect in DEFECTS},
        "not a number": not_finite(make, device),
    }


CHECKS = [*CASES, *DEFECTS, "not a number"]


@pytest.mark.parametrize("check", CHECKS)
def test_interpreted_cuda_kernels_give_the_bits_of_the_cpu_s(check: str, interpreted: dict[str, str]) -> None:
    assert interpreted[check] == ""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("check", CHECKS)
def test_cuda_kernels_give_the_bits_of_the_cpu_s(check: str, on_cuda: dict[str, str]) -> None:
    assert on_cuda[check] == ""


@pytest.fixture(scope="module")
def on_cuda() -> dict[str, str]:
    pytest.importorskip("triton")
    return report(lambda chunks, counted: chunk_kernels_for(chunks, torch.device("cuda"), None, counted), "cuda")


# --- the exchange -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", CHUNK_VALUES)
@pytest.mark.parametrize("law", LAWS)
def test_sparse_buckets_keep_every_law(law: str, values: str) -> None:
    for exchange in (
        ChunkedTopk(density=0.05, values=values, chunk=128),
        ChunkedTopk(density=0.1, values=values, chunk=64, mean="contributors", decay=0.95),
    ):
        for ranks, numel in ((2, 301), (5, 333)):
            assert exchange.chunks(numel, torch.float32, ranks) is not None
            LAWS[law](exchange, ranks, numel, torch.float32, "cpu")


def test_bytes_by_hand() -> None:
    exchange = ChunkedTopk()
    chunks = exchange.chunks(4096 * 10, torch.float32, 4)
    assert chunks is not None
    assert chunks.entries == 123
    # two scales, and planes of 8, 4 and 2 bits
    assert chunks.bytes == 10 * (4 + 123 + 62 + 31)
    assert exchange.cost(4096 * 10, torch.float32, Topology.flat(4)).sent_bytes["world"] == 3 * 2200


@pytest.mark.parametrize(("numel", "ranks"), [(1, 2), (15, 2), (1000, 1), (64, 4)])
def test_a_bucket_that_gains_nothing_is_sent_dense(numel: int, ranks: int) -> None:
    exchange = ChunkedTopk(density=0.5, values="fp32")
    assert exchange.chunks(numel, torch.float32, ranks) is None
    inputs = [[torch.full((numel,), float(rank)) for rank in range(ranks)]]
    assert torch.equal(run_steps(exchange, inputs)[0].results[0], torch.stack(inputs[0]).sum(0))


def test_everything_that_is_sent_is_applied_and_divided_by_its_senders() -> None:
    inputs = [torch.zeros(4096) for _ in range(4)]
    for rank in range(4):
        inputs[rank][: rank + 1] = 0.25 * (1 + torch.arange(rank + 1))  # element i comes from ranks i to 3
    exchange = ChunkedTopk(density=0.01, values="fp32", mean="contributors")
    ran = run_steps(exchange, [inputs])
    assert ran[0].results[0][:5].tolist() == [1.0, 2.0, 3.0, 4.0, 0.0]
    assert all(not bool(rank.kept[0].any()) for rank in ran)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"chunk": 63}, "ChunkedTopk(chunk=63): chunk must be a power of two from 64 to 4096"),
        ({"chunk": 8192}, "chunk must be a power of two from 64 to 4096"),
        ({"chunk": 64.0}, "chunk must be a power of two from 64 to 4096"),
        ({"chunk": True}, "chunk must be a power of two from 64 to 4096"),
        ({"values": "fp16"}, "ChunkedTopk(values='fp16'): values must be one of int2, int4, bf16, fp32"),
        ({"density": 0}, "ChunkedTopk(density=0): density must be"),
        ({"mean": "all"}, "ChunkedTopk(mean='all'): mean must be one of"),
        ({"decay": 2}, "ChunkedTopk(decay=2): decay must be"),
    ],
)
def test_impossible_settings_are_refused_in_one_line(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        ChunkedTopk(**fields)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_it_has_a_name_and_can_be_written_to_a_file() -> None:
    exchange = syncline.ChunkedTopk(density=0.016, chunk=1024)
    assert EXCHANGES["topk-chunks"]() == ChunkedTopk()
    assert name_of(exchange) == "topk-chunks(density=0.016, chunk=1024)"
    assert made_of(settings(exchange)) == exchange
    assert settings(exchange) == {"type": "ChunkedTopk", "density": 0.016, "values": "int2", "chunk": 1024}
    resolved = ChunkedTopk(mean="contributors", decay=0.95)
    assert for_updates(ChunkedTopk(), 15) == resolved
    assert for_updates(Hierarchical(across=ChunkedTopk()), 15) == Hierarchical(across=resolved)


def main() -> None:
    from syncline.kernels.chunks_cuda import CudaChunkKernels

    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    print(json.dumps(report(lambda chunks, counted: CudaChunkKernels(chunks, cpu, None, counted), "cpu")))


if __name__ == "__main__":
    main()
