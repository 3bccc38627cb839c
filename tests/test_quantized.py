"""Quantized: the kernels against a plain definition, CUDA against the CPU, and the exchange in one process.

Run as a script, this compares the CUDA kernels with the CPU's in Triton's interpreter, and prints the differences as
JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from syncline.dist.local_comm import LocalComm, run_ranks
from syncline.errors import UsageError
from syncline.exchange import (
    EXCHANGES,
    Dense,
    Hierarchical,
    Layout,
    Level,
    Quantized,
    Slot,
    Topology,
    made_of,
    name_of,
    quantized,
    settings,
)
from syncline.kernels import BITS, BlockKernels, Blocks, block_kernels_for
from syncline.kernels.blocks_cpu import CpuBlockKernels
from syncline.plan.search import ALLOWED
from syncline.testing import LAWS, run_steps

pytestmark = pytest.mark.usefixtures("interpreter")
KINDS = ("normal", "heavy-tailed", "zero", "one non-zero", "denormal", "huge", "equal")
TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def drawn(kind: str, numel: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator)
    match kind:
        case "heavy-tailed":
            return values * torch.exp(2 * torch.randn(numel, generator=generator))
        case "zero":
            return torch.zeros(numel)
        case "one non-zero":
            return torch.zeros(numel).index_fill_(0, torch.tensor([numel - 1]), -3.0)
        case "denormal":
            return values * 2.0**-130
        case "huge":
            return values * 2.0**100
        case "equal":
            return torch.full((numel,), 0.7)
    return values


# --- ranks in one process without a Comm ------------------------------------------------------------------------


class World:
    """All ranks of an exchange. Residuals are pieces of larger ones, between guard areas, which must stay zero."""

    def __init__(self, blocks: Blocks, make: Callable[[], BlockKernels], feedback: bool, device: str = "cpu") -> None:
        self.blocks, self.feedback = blocks, feedback
        ranks = range(blocks.parts)
        self.kernels = [make() for _ in ranks]
        self._memory = torch.zeros(blocks.parts, 4, blocks.numel + 7, device=device)
        self._residuals = self._memory[:, 1:3, 4:-3]
        self.kept = [self._residuals[rank] if feedback else None for rank in ranks]
        self.turn = torch.zeros((), dtype=torch.int32, device=device)
        self.sent = torch.full((blocks.parts, blocks.parts, blocks.bytes), 0x11, dtype=torch.uint8, device=device)
        self.received = torch.zeros_like(self.sent)
        self.picked = torch.full((blocks.parts, blocks.bytes), 0x11, dtype=torch.uint8, device=device)
        self.flats: list[Tensor] = []

    def step(self, gradients: Sequence[Tensor], share: float = 1.0, ratio: float | None = None) -> list[Tensor]:
        """Return everything that was sent, the results, the residuals, and whether the results are finite."""
        device, ranks = self.sent.device, range(self.blocks.parts)
        factor = None if ratio is None else torch.tensor(ratio, device=device)
        if not self.flats:  # the same tensors in every step, so that kernels are replayed
            self.flats = [gradient.to(device, copy=True) for gradient in gradients]
        for flat, gradient in zip(self.flats, gradients, strict=True):
            flat.copy_(gradient)
        for rank in ranks:
            kernels, kept = self.kernels[rank], self.kept[rank]
            kernels.encode(self.flats[rank], share, kept, self.turn, factor, rank, self.sent[rank])
        self.received.copy_(self.sent.transpose(0, 1))
        for rank in ranks:
            received, row = self.received[rank], self.picked[rank]
            self.kernels[rank].total(received, self.flats[rank], share, self.kept[rank], self.turn, rank, row)
        finite = [self.kernels[rank].decode(self.picked, self.flats[rank]) for rank in ranks]
        self.turn.bitwise_xor_(torch.ones((), dtype=torch.bool, device=device))
        guards = (self._memory[:, ::3], self._memory[..., :4], self._memory[..., -3:])
        assert not any(bool(guard.any()) for guard in guards), "something was written outside of the residuals"
        residuals = [self._residuals[rank, int(self.turn)] for rank in ranks if self.feedback]
        return [tensor.cpu().clone() for tensor in (self.sent, self.picked, *self.flats, *residuals, *finite)]


# --- the definition ---------------------------------------------------------------------------------------------


def quantised(values: np.ndarray[Any, Any], bits: int, block: int) -> np.ndarray[Any, Any]:
    """Round to codes, block by block, with one scale each; return the values that codes and scales stand for."""
    out, largest = np.zeros_like(values), np.float32(2 ** (bits - 1) - 1)
    for start in range(0, len(values), block):
        part = values[start : start + block]
        quotient = max(np.abs(part).max() * (np.float32(1) / largest), np.float32(2.0**-120))
        scale = torch.tensor(float(quotient)).to(torch.bfloat16).to(torch.float32).numpy()
        codes = np.rint(part * (np.float32(1) / scale))
        assert np.abs(codes).max() <= largest, "an element is clipped"
        out[start : start + block] = codes * scale
    return out


def plain(
    held: list[np.ndarray[Any, Any]], gradients: Sequence[Tensor], share: float, blocks: Blocks, feedback: bool
) -> tuple[Tensor, list[np.ndarray[Any, Any]]]:
    """One step as it is described; returns the result and the residuals."""
    ranks, dtype = range(blocks.parts), gradients[0].dtype
    whole = np.zeros((blocks.parts, blocks.parts * blocks.part), np.float32)
    for rank in ranks:
        whole[rank, : blocks.numel] = (gradients[rank] * share).to(torch.float32).numpy()
        if feedback:
            whole[rank, : blocks.numel] += held[rank]
    accumulated = whole.reshape(blocks.parts, blocks.parts, blocks.part)
    lost, result = np.zeros_like(accumulated), np.zeros((blocks.parts, blocks.part), np.float32)
    for owner in ranks:
        total = np.zeros(blocks.part, np.float32)
        for rank in ranks:
            mine = accumulated[rank, owner]
            sent = mine if rank == owner else quantised(mine, blocks.bits, blocks.block)
            lost[rank, owner] = mine - sent
            total += sent
        decoded = quantised(total, blocks.bits, blocks.block)
        result[owner] = torch.from_numpy(decoded).to(dtype).to(torch.float32).numpy()
        lost[owner, owner] = total - result[owner]
    return torch.from_numpy(result).view(-1)[: blocks.numel].to(dtype), [
        lost[rank].reshape(-1)[: blocks.numel] for rank in ranks
    ]


@given(
    bits=st.sampled_from(BITS),
    block=st.sampled_from([32, 64, 256]),
    ranks=st.integers(2, 5),
    numel=st.integers(1, 1500),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
    dtype=st.sampled_from(TYPES),
    share=st.sampled_from([1.0, 0.5, 1 / 3]),
    feedback=st.booleans(),
    seed=st.integers(0, 999),
)
@hypothesis.settings(max_examples=80, deadline=None, derandomize=True)
def test_codes_sums_and_residuals_are_those_of_the_definition(
    bits: int,
    block: int,
    ranks: int,
    numel: int,
    kinds: list[str],
    dtype: torch.dtype,
    share: float,
    feedback: bool,
    seed: int,
) -> None:
    blocks = Blocks(numel, ranks, bits, block)
    world = World(blocks, lambda: CpuBlockKernels(blocks), feedback)
    held = [np.zeros(numel, np.float32) for _ in range(ranks)]
    for number, kind in enumerate(kinds):
        if dtype == torch.float16 and kind == "huge":
            continue
        gradients = [drawn(kind, numel, seed + 100 * number + rank).to(dtype) for rank in range(ranks)]
        _, _, *seen = world.step(gradients, share)
        result, held = plain(held, gradients, share, blocks, feedback)
        for flat in seen[:ranks]:
            assert torch.equal(flat, result)
        for mine, theirs in zip(seen[ranks : 2 * ranks] if feedback else [], held, strict=False):
            assert torch.equal(mine, torch.from_numpy(theirs))
        assert [bool(flag) for flag in seen[-ranks:]] == [bool(result.isfinite().all())] * ranks


def test_buckets_that_are_processed_in_several_pieces_are_quantised_as_one() -> None:
    blocks = Blocks(1_000_003, 2, 4, 256)
    gradients = [drawn("heavy-tailed", blocks.numel, rank) for rank in range(2)]
    _, _, *seen = World(blocks, lambda: CpuBlockKernels(blocks), True).step(gradients)
    result, held = plain([np.zeros(blocks.numel, np.float32)] * 2, gradients, 1.0, blocks, True)
    assert torch.equal(seen[0], result)
    assert torch.equal(seen[2], torch.from_numpy(held[0]))


@pytest.mark.parametrize("bits", BITS)
def test_every_byte_that_a_rank_can_receive_is_a_code_within_the_range_of_its_bits(bits: int) -> None:
    blocks = Blocks(2 * 4096, 2, bits, 32)
    rows = torch.randint(0, 256, (2, blocks.bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(bits))
    rows[:, : 2 * blocks.blocks].view(torch.bfloat16).fill_(1.0)
    flat = torch.zeros(blocks.numel)
    assert bool(CpuBlockKernels(blocks).decode(rows, flat))
    assert torch.equal(flat, flat.round())
    assert int(flat.abs().max()) == blocks.largest + 1


# --- what is not finite -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("culprit", [float("nan"), float("inf"), -float("inf"), 3.4e38])
def test_what_is_not_finite_or_overflows_in_the_sum_is_seen_by_all_ranks(bits: int, culprit: float) -> None:
    blocks = Blocks(700, 3, bits, 64)
    for position in (0, 250, 699):  # of the sender's own part, and of others
        gradients = [torch.full((700,), 1.0) for _ in range(3)]
        for gradient in gradients:
            gradient[position] = culprit
        _, _, *seen = World(blocks, lambda: CpuBlockKernels(blocks), True).step(gradients)
        for flat, finite in zip(seen[:3], seen[-3:], strict=True):
            assert not bool(flat[position].isfinite())
            assert not bool(finite)


def test_a_sum_that_is_too_large_for_the_bucket_s_type_is_not_finite() -> None:
    blocks = Blocks(700, 2, 8, 64)
    gradients = [torch.full((700,), 60_000.0, dtype=torch.float16) for _ in range(2)]
    _, _, *seen = World(blocks, lambda: CpuBlockKernels(blocks), True).step(gradients)
    assert not bool(seen[-1])
    assert not bool(seen[0].isfinite().any())


SCALES = {"nan": 0x7FC0, "inf": 0x7F80, "-inf": 0xFF80, "largest": 0x7F7F, "-largest": 0xFF7F}


def harm(scale: int, make: Callable[[Blocks], BlockKernels], device: str) -> str:
    """Describe the harm that a hostile scale does: a step that is applied, or a write outside of the bucket."""
    blocks, found = Blocks(1001, 3, 4, 64), []
    noise = torch.randint(0, 256, (3, blocks.bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    noise[:, : 2 * blocks.blocks].view(torch.bfloat16).fill_(1.0)
    noise[1].view(torch.int16)[2] = scale - (1 << 16 if scale >> 15 else 0)
    noise = noise.to(device)
    kernels, turn = make(blocks), torch.zeros((), dtype=torch.int32, device=device)
    memory, kept = torch.zeros(3, 1001, device=device), torch.zeros(4, 1001, device=device)
    row = torch.zeros(blocks.bytes, dtype=torch.uint8, device=device)
    kernels.total(noise, memory[1], 1.0, kept[1:3], turn, 0, row)
    if bool(row[: 2 * blocks.blocks].view(torch.bfloat16)[2].isfinite()):
        found.append("a sum with it is finite")
    if bool(kernels.decode(noise, memory[1])) or bool(memory[1].isfinite().all()):
        found.append("a result that counts")
    if bool(memory[::2].any()) or bool(kept[::3].any()):
        found.append("something beside the bucket")
    return ", ".join(found)


@pytest.mark.parametrize("scale", SCALES)
def test_a_hostile_scale_only_makes_the_step_not_count(scale: str) -> None:
    assert harm(SCALES[scale], CpuBlockKernels, "cpu") == ""


# --- on CUDA: the same bits -------------------------------------------------------------------------------------

Case = tuple[Blocks, torch.dtype, bool, tuple[tuple[str, float | None], ...]]
CASES: dict[str, Case] = {
    f"{bits} bits, {str(dtype).removeprefix('torch.')}{'' if feedback else ', no error feedback'}": (
        Blocks(numel, ranks, bits, block), dtype, feedback, steps
    )
    for bits, numel, ranks, block, dtype, feedback, steps in (
        (8, 1301, 2, 256, torch.float32, True, (("heavy-tailed", None), ("denormal", 2.0**-126))),
        (4, 1301, 3, 256, torch.float32, True, (("heavy-tailed", 0.3), ("zero", 2.0), ("normal", None))),
        (4, 900, 2, 32, torch.float32, False, (("heavy-tailed", None),)),
        (3, 1301, 3, 256, torch.float32, True, (("heavy-tailed", 0.3), ("one non-zero", None))),
        (8, 700, 2, 64, torch.bfloat16, False, (("normal", None),)),
        (4, 900, 3, 128, torch.bfloat16, True, (("heavy-tailed", None), ("huge", 0.5))),
        (3, 900, 2, 64, torch.float16, True, (("normal", None), ("equal", 0.3))),
        (3, 900, 2, 512, torch.float64, False, (("heavy-tailed", None),)),
        (4, 900, 2, 64, torch.float64, True, (("heavy-tailed", None),)),
    )
}  # fmt: skip
LARGE: dict[str, Case] = {
    f"a large bucket, {bits} bits": (
        Blocks(1_000_003, 3, bits, 256), torch.float32, True, (("heavy-tailed", None), ("normal", 2.0), ("normal", 0.3))
    )
    for bits in BITS
}  # fmt: skip
"""Cases that are too large for the interpreter."""
CHECKS = [*CASES, *(f"scale {name}" for name in SCALES)]


def difference(case: Case, make: Callable[[Blocks], BlockKernels], device: str) -> str:
    """Describe the first difference from the CPU kernels; return an empty string if all bits are the same."""
    blocks, dtype, feedback, steps = case
    reference = World(blocks, lambda: CpuBlockKernels(blocks), feedback)
    world = World(blocks, lambda: make(blocks), feedback, device)
    share = 1.0 if dtype == torch.float64 else 1 / 3
    for number, (kind, ratio) in enumerate(steps):
        gradients = [drawn(kind, blocks.numel, 10 * number + rank).to(dtype) for rank in range(blocks.parts)]
        ours, theirs = (ranks.step(gradients, share, ratio) for ranks in (reference, world))
        for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            unequal = mine.view(torch.uint8) != other.view(torch.uint8)
            if bool(unequal.any()):
                return f"step {number} ({kind}): {int(unequal.sum())} bytes of tensor {index} differ"
    return ""


def report(make: Callable[[Blocks], BlockKernels], device: str) -> dict[str, str]:
    """Run all checks and return what is wrong, by check; empty strings if nothing is."""
    cases = CASES if device == "cpu" else {**CASES, **LARGE}
    return {
        **{name: difference(case, make, device) for name, case in cases.items()},
        **{f"scale {name}": harm(scale, make, device) for name, scale in SCALES.items()},
    }


@pytest.fixture(scope="module")
def on_cuda() -> dict[str, str]:
    pytest.importorskip("triton")
    return report(lambda blocks: block_kernels_for(blocks, torch.device("cuda")), "cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("check", [*CHECKS, *LARGE])
def test_cuda_kernels_give_the_bits_of_the_cpu_s_and_hostile_scales_do_no_harm(
    check: str, on_cuda: dict[str, str]
) -> None:
    assert on_cuda[check] == ""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("bits", BITS)
def test_steps_that_are_replayed_give_the_bits_of_the_cpu_s(bits: int) -> None:
    pytest.importorskip("triton")
    blocks = Blocks(60_001, 3, bits, 256)
    on_cpu = World(blocks, lambda: CpuBlockKernels(blocks), True)
    on_cuda = World(blocks, lambda: block_kernels_for(blocks, torch.device("cuda")), True, "cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        for step in range(5):
            gradients = [drawn("normal", blocks.numel, 10 * step + rank) for rank in range(3)]
            for mine, theirs in zip(on_cpu.step(gradients, 0.25), on_cuda.step(gradients, 0.25), strict=True):
                assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)), step
    names = ("encode", "total", "decode")
    assert all(getattr(kernels, f"_to_{name}")._graph is not None for kernels in on_cuda.kernels for name in names)


# --- the exchange -----------------------------------------------------------------------------------------------


def steps_of(kind: str, steps: int, ranks: int, numel: int) -> list[list[Tensor]]:
    return [[drawn(kind, numel, 100 * step + rank) for rank in range(ranks)] for step in range(steps)]


VARIANTS = [Quantized(bits=bits, block=block, error_feedback=feedback)
            for bits, block, feedback in ((8, 256, False), (4, 64, True), (4, 64, False), (3, 32, True))]  # fmt: skip


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("exchange", VARIANTS, ids=str)
def test_laws_hold_for_other_settings(exchange: Quantized, law: str) -> None:
    for ranks, numel, dtype in ((2, 200, torch.float32), (3, 1501, torch.float32), (3, 1501, torch.bfloat16)):
        assert exchange.blocks(numel, dtype, ranks) is not None
        LAWS[law](exchange, ranks, numel, dtype, "cpu")


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("exchange", [Quantized(bits=4, block=64), Quantized(bits=8, block=32, error_feedback=False)])
def test_laws_hold_for_buckets_in_pieces(exchange: Quantized, law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "_PIECE_BYTES", 100)
    for ranks, numel, dtype in ((2, 1500, torch.float32), (3, 5001, torch.float32), (3, 5001, torch.bfloat16)):
        assert len(exchange.pieces(numel, dtype, Topology.flat(ranks))) > 2
        LAWS[law](exchange, ranks, numel, dtype, "cpu")


def test_large_buckets_are_sent_in_pieces_of_the_same_bytes_where_the_cpu_computes() -> None:
    exchange, numel, flat = Quantized(bits=4), 5_250_000, Topology.flat(4)
    whole, pieces = exchange.blocks(numel, torch.float32, 4), exchange.pieces(numel, torch.float32, flat)
    assert whole is not None
    assert len(pieces) == 8
    assert sum(piece.numel for piece in pieces) == numel
    assert sum(piece.bytes for piece in pieces) == whole.bytes
    assert exchange.cost(numel, torch.float32, flat).chunks == 8
    inside = flat.among(Level("hosts", ((0, 1, 2, 3),)))
    for topology in (Topology.flat(4, "nccl"), inside):
        assert exchange.pieces(numel, torch.float32, topology) == (whole,)
    assert len(exchange.pieces(300_000, torch.float32, flat)) == 1


def test_several_pieces_are_on_the_wire_before_the_first_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """All parts are sent before the first sums, which is faster than all-to-alls and all-gathers at the same time."""
    monkeypatch.setattr(quantized, "_PIECE_BYTES", 100)
    exchange, layout = Quantized(bits=4, block=64), Layout.flat(5000)

    def main(comm: LocalComm) -> list[object]:
        state = exchange.prepare(layout, comm)
        assert state.describe() == "4 bits, 79 blocks of 64, 8 pieces"
        exchange.run(torch.ones(5000), state, comm)
        return [kind for _, kind, *_ in comm.log]

    assert run_ranks(2, main) == [["all_to_all"] * 8 + ["all_gather"] * 8] * 2


@given(
    values=st.lists(st.lists(st.floats(width=32, max_value=2.0**110, min_value=-(2.0**110)), min_size=4, max_size=4),
                    min_size=2, max_size=5),
    bits=st.sampled_from(BITS),
    dtype=st.sampled_from(TYPES),
)  # fmt: skip
@hypothesis.settings(max_examples=80, deadline=None, derandomize=True)
def test_without_error_feedback_results_stay_within_the_stated_bound_at_any_scale(
    values: list[list[float]], bits: int, dtype: torch.dtype
) -> None:
    inputs = [torch.tensor(row).repeat(50).to(dtype) / len(values) for row in values]
    exchange = Quantized(bits=bits, block=32, error_feedback=False)
    assert exchange.blocks(200, dtype, len(inputs)) is not None or dtype.itemsize == 2
    result = run_steps(exchange, [inputs])[0].results[0].to(torch.float64)
    exact = torch.stack(inputs).to(torch.float64)
    bound = exchange.rounding(dtype, len(inputs))
    allowed = bound.of_sum * exact.abs().sum(0) + bound.of_largest * exact.abs().max() + bound.absolute
    error = (result - exact.sum(0)).abs()
    if bool(torch.isfinite(result).all()) or exact.abs().sum(0).max() < torch.finfo(dtype).max / 4:
        assert bool((error <= allowed).all()), (error.max(), allowed.min())


@pytest.mark.parametrize("bits", BITS)
def test_with_error_feedback_the_mean_of_many_steps_is_exact_where_without_it_is_not(bits: int) -> None:
    """A gradient that is the same in every step, of which rounding loses the small elements."""
    gradient = torch.linspace(-1, 1, 512).pow(9)
    errors = []
    for feedback in (True, False):
        exchange = Quantized(bits=bits, error_feedback=feedback)
        ran = run_steps(exchange, [[gradient, gradient]] * 64)
        errors.append(float((torch.stack(ran[0].results).mean(0) - 2 * gradient).abs().max()))
    assert errors[0] < errors[1] / 10


@pytest.mark.parametrize(("bits", "block", "times"), [(8, 256, 3.97), (4, 256, 7.88), (3, 128, 10.24)])
def test_bytes_are_those_of_the_bits_and_the_scales_by_default(bits: int, block: int, times: float) -> None:
    topology, exchange = Topology.flat(4), Quantized(bits=bits)
    sent = exchange.cost(1_048_576, torch.float32, topology).sent_bytes["world"]
    assert sent == 2 * 3 * (1_048_576 // 4 * bits // 8 + 1_048_576 // 4 // block * 2)
    dense = Dense().cost(1_048_576, torch.float32, topology).sent_bytes["world"]
    assert dense / sent == pytest.approx(times, rel=0.001)


def test_buckets_that_would_not_become_smaller_are_sent_dense() -> None:
    exchange = Quantized(bits=4)
    assert exchange.blocks(130, torch.float32, 4) is None  # 4 parts of one block: 520 bytes
    assert exchange.blocks(131, torch.float32, 4) is not None
    assert exchange.blocks(131, torch.bfloat16, 4) is None
    assert exchange.blocks(10**6, torch.float32, 1) is None


def test_a_restored_state_continues_with_the_same_bits_also_in_other_buckets() -> None:
    """The first bucket is divided into two, one of which is so small that it is sent dense."""
    exchange, numel = Quantized(bits=3, block=64), 900
    inputs = steps_of("heavy-tailed", 4, 2, numel)
    whole = Layout(
        (Slot("a", (30, 29), (29, 1), 0, 870), Slot("b", (30,), (1,), 870, 30)), torch.float32, torch.device("cpu")
    )
    parts = [
        Layout((Slot("b", (30,), (1,), 0, 30),), torch.float32, torch.device("cpu")),
        Layout((Slot("a", (30, 29), (29, 1), 0, 870),), torch.float32, torch.device("cpu")),
    ]

    def main(comm: LocalComm) -> tuple[Tensor, Tensor, Tensor]:
        def run(state: Any, layout: Layout, step: int, flat: Tensor) -> Tensor:
            state.begin(step)
            if (work := exchange.run(flat, state, comm)) is not None:
                work.wait()
            state.settle(state.finite(flat))
            return flat

        state = exchange.prepare(whole, comm)
        for step in range(2):
            run(state, whole, step, inputs[step][comm.rank].clone())
        saved = state.tensors(whole)
        again = exchange.prepare(whole, comm)
        again.load(whole, saved)
        results = [run(one, whole, 2, inputs[2][comm.rank].clone()) for one in (state, again)]
        assert torch.equal(*results)
        kept = torch.zeros(())
        for layout in parts:
            part = exchange.prepare(layout, comm)
            part.load(layout, saved)
            gradient = torch.zeros(layout.numel)
            applied = run(part, layout, 2, gradient)
            residual = part.kept()
            assert residual is not None
            kept = kept + torch.stack([residual.double().sum(), applied.double().sum() / comm.size]).sum()
        before = sum((tensor.double().sum() for kinds in saved.values() for tensor in kinds.values()), torch.zeros(()))
        return kept, before, results[0]

    ran = run_ranks(2, main)
    assert float(sum(kept for kept, _, _ in ran)) == pytest.approx(float(sum(before for _, before, _ in ran)), rel=1e-6)


def test_a_changed_loss_scale_rescales_the_residual() -> None:
    exchange, layout = Quantized(bits=4, block=64), Layout.flat(600)
    inputs = steps_of("normal", 3, 2, 600)

    def trained(scales: Sequence[float | None]) -> list[Tensor]:
        def main(comm: LocalComm) -> Tensor:
            state, total = exchange.prepare(layout, comm), torch.zeros(600)
            for step, scale in enumerate(scales):
                factor = 1.0 if scale is None else scale
                flat = inputs[step][comm.rank] * factor
                state.begin(step, None if scale is None else torch.tensor(scale))
                exchange.run(flat, state, comm)
                state.settle(state.finite(flat))
                total += flat / factor
            return torch.stack([total, state.tensors(layout)["flat"]["residual"]])

        return run_ranks(2, main)

    for mine, theirs in zip(trained([None] * 3), trained([2.0**16, 2.0**15, 2.0**10]), strict=True):
        assert torch.equal(mine, theirs)


def test_without_error_feedback_there_is_no_state() -> None:
    exchange, layout = Quantized(bits=8, error_feedback=False), Layout.flat(5000)

    def main(comm: LocalComm) -> tuple[object, ...]:
        state = exchange.prepare(layout, comm)
        flat = torch.ones(5000)
        assert state.average(0.5)
        exchange.run(flat, state, comm)
        assert torch.allclose(flat, torch.ones(5000), rtol=1e-2)
        return state.kept(), state.tensors(layout), state.state_bytes, state.settles, exchange.keeps

    assert run_ranks(2, main) == [(None, {}, 0, False, False)] * 2


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"bits": 5}, "Quantized(bits=5): bits must be one of 8, 4, 3"),
        ({"bits": True}, "Quantized(bits=True): bits must be one of 8, 4, 3"),
        ({"bits": "4"}, "Quantized(bits='4'): bits must be one of 8, 4, 3"),
        ({"block": 100}, "Quantized(block=100): block must be a power of two from 32 to 4096"),
        ({"block": 16}, "Quantized(block=16): block must be a power of two from 32 to 4096"),
        ({"block": 256.0}, "Quantized(block=256.0): block must be a power of two from 32 to 4096"),
        ({"error_feedback": 1}, "Quantized(error_feedback=1): pass True or False"),
    ],
)
def test_settings_out_of_range_are_refused_with_what_fits(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as error:
        Quantized(**fields)
    assert str(error.value) == says


def test_names_and_plans_describe_all_settings() -> None:
    assert [name_of(EXCHANGES[name]()) for name in ("int8", "int4", "int3", "hierarchical+int4")] == [
        "int8", "int4", "int3", "hierarchical+int4",
    ]  # fmt: skip
    assert name_of(Quantized(bits=3, block=64)) == "int3(block=64)"
    assert name_of(Hierarchical(across=Quantized(bits=8))) == "hierarchical+int8"
    exchange = Quantized(bits=np.int64(3), block=np.int32(64), error_feedback=False)
    assert made_of(json.loads(json.dumps(settings(exchange)))) == exchange
    assert list(ALLOWED) == ["bf16", "fp16", "int8", "int4", "int3", "sparse"], "the gentlest first"


@pytest.mark.parametrize("check", CHECKS)
def test_interpreted_cuda_kernels_give_the_bits_of_the_cpu_s_and_hostile_scales_do_no_harm(
    check: str, interpreted: dict[str, str]
) -> None:
    assert interpreted[check] == ""


def main() -> None:
    from syncline.kernels.blocks_cuda import CudaBlockKernels

    torch.set_num_threads(1)
    print(json.dumps(report(lambda blocks: CudaBlockKernels(blocks, torch.device("cpu")), "cpu")))


if __name__ == "__main__":
    main()
