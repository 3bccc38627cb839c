"""16-bit wires: the backend's own all-reduce or two hops, and what each rounds."""

from __future__ import annotations

import pytest
import torch

from syncline.dist.local_comm import run_ranks
from syncline.errors import UsageError
from syncline.exchange import Dense, Layout, Topology, made_of, settings

RANKS = 6


def _kinds(exchange: Dense, backend: str) -> list[str]:
    return [phase.kind for phase in exchange.cost(1000, torch.float32, Topology.flat(RANKS, backend)).phases]


def test_backends_add_sixteen_bits_themselves_unless_two_roundings_are_asked_for() -> None:
    for backend in ("gloo", "nccl"):
        assert _kinds(Dense(wire="bf16"), backend) == ["all_reduce"]
        assert _kinds(Dense(wire="fp16"), backend) == ["all_reduce", "all_reduce"]
        for wire in ("bf16", "fp16"):
            assert _kinds(Dense(wire=wire, roundings="two"), backend) == ["all_to_all", "all_gather"]


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
@pytest.mark.parametrize("numel", [1, 7, 1000])
@pytest.mark.parametrize("roundings", ["fastest", "two"])
@pytest.mark.parametrize("wire", ["bf16", "fp16"])
def test_the_error_is_within_the_bound(wire: str, roundings: str, numel: int, scale: float) -> None:
    """The local comm adds 16-bit numbers in 16 bits, as a ring that rounds at every hop."""
    exchange = Dense(wire=wire, roundings=roundings)
    inputs = [scale * torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(RANKS)]

    def main(comm: object) -> tuple[torch.Tensor, list[str]]:
        flat = inputs[comm.rank].clone()  # type: ignore[attr-defined]
        exchange.run(flat, exchange.prepare(Layout.flat(numel), comm), comm)  # type: ignore[arg-type]
        return flat, [call[1] for call in comm.log]  # type: ignore[attr-defined]

    answers = run_ranks(Topology.flat(RANKS), main)
    bound = exchange.rounding(torch.float32, RANKS)
    whole = torch.stack(inputs).double()
    allowed = bound.of_sum * whole.abs().sum(0) + bound.of_largest * whole.abs().max() + bound.absolute
    for flat, kinds in answers:
        assert kinds == _kinds(exchange, "gloo")
        assert torch.equal(flat, answers[0][0])
        assert bool(((flat.double() - whole.sum(0)).abs() <= allowed).all())


def test_equal_numbers_of_both_signs_do_not_overflow_fp16() -> None:
    """The partial sums are six times as large as any input, and the total is not."""
    signs = [1.0, 1.0, 1.0, -1.0, -1.0, -1.0]
    exchange = Dense(wire="fp16")

    def main(comm: object) -> torch.Tensor:
        flat = torch.full((10,), 32768.0 * signs[comm.rank])  # type: ignore[attr-defined]
        exchange.run(flat, exchange.prepare(Layout.flat(10), comm), comm)  # type: ignore[arg-type]
        return flat

    for flat in run_ranks(Topology.flat(RANKS), main):
        assert torch.equal(flat, torch.zeros(10))


def test_small_values_of_a_16_bit_bucket_survive_the_average() -> None:
    """The average of four equal values is that value, even if a quarter of it is too small for the bucket's type."""
    tiny = 6e-8

    def main(comm: object) -> torch.Tensor:
        flat = torch.full((8,), tiny, dtype=torch.float16)
        exchange = Dense(wire="bf16")
        state = exchange.prepare(Layout.flat(8, torch.float16), comm)  # type: ignore[arg-type]
        assert state.average(0.25)
        exchange.run(flat, state, comm)  # type: ignore[arg-type]
        return flat

    for flat in run_ranks(4, main):
        assert torch.equal(flat, torch.full((8,), tiny, dtype=torch.float16))


def test_the_bound_grows_with_the_ranks_unless_values_are_rounded_twice() -> None:
    few, many = (Dense(wire="bf16").rounding(torch.float32, ranks).of_sum for ranks in (4, 64))
    assert many > 10 * few
    two = Dense(wire="bf16", roundings="two")
    assert two.rounding(torch.float32, 64).of_sum < 1.01 * two.rounding(torch.float32, 4).of_sum


def test_settings_of_earlier_releases_stay_the_same() -> None:
    assert settings(Dense(wire="bf16")) == {"type": "Dense", "wire": "bf16"}
    chosen = Dense(wire="bf16", roundings="two")
    assert made_of(settings(chosen)) == chosen != Dense(wire="bf16")


def test_an_unknown_number_of_roundings_is_refused() -> None:
    with pytest.raises(UsageError, match="fastest or two"):
        Dense(wire="bf16", roundings="three")


def test_a_wire_that_is_not_a_name_is_refused() -> None:
    with pytest.raises(UsageError, match="wire must be one of"):
        Dense(wire=["bf16"])  # type: ignore[arg-type]
