"""Settings of sparse exchanges for updates: the mean over contributors, the decay, and flags of what was applied."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import syncline
from exchanges import VARIANTS
from syncline.dist.local_comm import LocalComm, run_ranks
from syncline.errors import UsageError
from syncline.exchange import (
    AllgatherTopk,
    Dense,
    Exchange,
    Hierarchical,
    Layout,
    OkTopk,
    Quantized,
    for_updates,
    made_of,
    name_of,
    settings,
)
from syncline.testing import place_ranks, run_steps

SPARSE = [OkTopk, AllgatherTopk]


# --- settings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SPARSE)
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mean": "median"}, "mean='median'): mean must be one of auto, ranks, contributors"),
        ({"mean": None}, "mean=None): mean must be one of"),
        ({"mean": ["ranks"]}, "mean must be one of"),
        ({"decay": 0}, "decay=0): decay must be greater than 0 and at most 1"),
        ({"decay": 1.5}, "decay must be greater than 0 and at most 1"),
        ({"decay": float("nan")}, "decay must be greater than 0 and at most 1"),
        ({"decay": True}, "decay must be greater than 0 and at most 1"),
        ({"decay": "0.9"}, "decay must be greater than 0 and at most 1"),
    ],
)
def test_impossible_settings_are_refused_in_one_line(kind: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        kind(**fields)
    assert message in str(error.value)
    assert str(error.value).startswith(kind.__name__)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", SPARSE)
def test_settings_that_are_left_open_are_not_written_to_files(kind: Any) -> None:
    assert settings(kind()).keys().isdisjoint({"mean", "decay"})
    chosen = kind(mean="contributors", decay=0.95)
    assert settings(chosen)["mean"] == "contributors"
    assert settings(chosen)["decay"] == 0.95
    assert made_of(settings(chosen)) == chosen
    assert "mean='contributors'" in name_of(chosen)


def test_positions_of_earlier_settings_have_not_changed() -> None:
    assert OkTopk(0.1, "fp16", 3, 0.5) == OkTopk(density=0.1, values="fp16", warmup=3, momentum=0.5)


@pytest.mark.parametrize(("every", "decay"), [(1, 1.0), (2, 0.95), (15, 0.95)])
def test_updates_take_the_mean_over_contributors_and_decay_between_exchanges(every: int, decay: float) -> None:
    resolved = OkTopk(0.1, mean="contributors", decay=decay)
    assert for_updates(OkTopk(0.1), every) == resolved
    assert for_updates(Hierarchical(across=OkTopk(0.1)), every) == Hierarchical(across=resolved)
    assert for_updates(AllgatherTopk(), every) == AllgatherTopk(mean="contributors", decay=decay)
    assert for_updates(for_updates(OkTopk(0.1), every), 7) == resolved
    for other in (Dense(), Quantized(), Hierarchical(), OkTopk(mean="ranks", decay=0.5)):
        assert for_updates(other, every) == other


def test_settings_for_gradients_are_refused_for_updates() -> None:
    with pytest.raises(UsageError, match=r"OkTopk\(momentum=0.9\): the optimizer has its own momentum"):
        for_updates(OkTopk(momentum=0.9), 1)
    with pytest.raises(UsageError, match=r"OkTopk\(warmup=10\): pass warmup to attach"):
        for_updates(Hierarchical(across=syncline.OkTopk(warmup=10)), 5)


# --- the mean over contributors ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SPARSE)
def test_an_entry_is_divided_by_the_ranks_that_sent_it(kind: Any) -> None:
    numel, ranks = 400, 4
    inputs = [torch.zeros(numel) for _ in range(ranks)]
    for rank in range(ranks):
        inputs[rank][: rank + 1] = 0.25 * (1 + torch.arange(rank + 1))  # element i comes from ranks i to 3
    exchange = kind(density=0.1, values="fp32")
    by_ranks, by_contributors = (
        run_steps(dataclasses.replace(exchange, mean=mean), [inputs])[0].results[0] for mean in ("auto", "contributors")
    )
    assert by_ranks[:5].tolist() == [1.0, 1.5, 1.5, 1.0, 0.0]
    assert by_contributors[:5].tolist() == [1.0, 2.0, 3.0, 4.0, 0.0]


def test_an_owner_selects_by_the_value_that_is_applied() -> None:
    """Two ranks sent one entry each, and both sent another one of half the size: as means, the former are larger."""
    exchange = OkTopk(density=0.04, values="fp32", mean="contributors")
    slots = exchange.slots(400, torch.float32, 2)
    assert slots is not None
    inputs = [torch.zeros(400), torch.zeros(400)]
    first = torch.arange(slots.entries - 1)
    for tensor in inputs:
        tensor[first] = 100.0
    inputs[0][20], inputs[1][20] = 1.0, 1.5
    inputs[1][21] = 2.0  # 4.0 as a mean, and less than 20's sum
    applied = run_steps(exchange, [inputs])[0].results[0]
    assert applied[21] == 4.0
    assert applied[20] == 0.0


@pytest.mark.parametrize("decay", [0.95, 0.5])
def test_a_residual_decays_before_the_input_is_added_and_only_if_the_step_is_applied(decay: float) -> None:
    exchange = OkTopk(density=0.1, decay=decay)
    generator = torch.Generator().manual_seed(0)
    step = [torch.randn(400, generator=generator) for _ in range(2)]
    zeros = [torch.zeros(400), torch.zeros(400)]
    for applied, share in ((True, decay), (False, 1.0)):
        ran = run_steps(exchange, [step, zeros], applied={1: torch.tensor(applied)})
        for rank in ran:
            before, after = rank.kept[0], rank.kept[1]
            assert before is not None
            assert after is not None
            untouched = rank.results[1] == 0
            assert torch.equal(after[untouched], (before * torch.tensor(share))[untouched])


@pytest.mark.parametrize("scales", [[8.0, 8.0, 4.0], [None, 4.0, None]])
def test_a_loss_scale_and_a_decay_multiply(scales: list[float | None]) -> None:
    exchange = OkTopk(density=0.1, decay=0.5)
    generator = torch.Generator().manual_seed(0)
    inputs = [[torch.randn(400, generator=generator) for _ in range(2)] for _ in scales]
    plain = run_steps(exchange, inputs)

    def main(comm: LocalComm) -> list[Tensor]:
        layout = Layout.flat(400)
        state, residuals = exchange.prepare(layout, comm), []
        for number, scale in enumerate(scales):
            flat = inputs[number][comm.rank] * (scale or 1.0)
            state.begin(number, None if scale is None else torch.tensor(scale))
            exchange.run(flat, state, comm)
            state.settle(state.finite(flat))
            residuals.append(state.tensors(layout)["flat"]["residual"].clone())
        state.load(layout, state.tensors(layout))
        state.begin(len(scales))
        exchange.run(torch.zeros(400), state, comm)
        state.settle(torch.tensor(True))
        return residuals

    for rank, residuals in enumerate(run_ranks(2, main)):
        for number, residual in enumerate(residuals):
            assert torch.equal(residual, plain[rank].memory[number]["flat/residual"])


# --- flags of what was applied ----------------------------------------------------------------------------------


def flags_of(exchange: Exchange, inputs: list[list[Tensor]], *, ask: bool = True) -> list[list[Tensor | None]]:
    """Return the flags by rank and step. A residual must have changed exactly where an entry of the rank was sent."""

    def main(comm: LocalComm) -> list[Tensor | None]:
        layout = Layout.flat(inputs[0][0].numel(), inputs[0][0].dtype)
        state, found = exchange.prepare(layout, comm), []
        if ask:
            state.track_applied()
        for number, step in enumerate(inputs):
            flat = step[comm.rank].clone()
            state.begin(number)
            if (work := exchange.run(flat, state, comm)) is not None:
                work.wait()
            flags = state.applied_here()
            found.append(None if flags is None else flags.clone())
            if flags is not None:
                assert flags.dtype == torch.bool
                assert not bool((flags & (flat == 0)).any())
            state.settle(state.finite(flat))
        return found

    return run_ranks(place_ranks(exchange, len(inputs[0])), main)


def drawn(ranks: int, numel: int, steps: int = 3) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(ranks)
    return [[torch.randn(numel, generator=generator) for _ in range(ranks)] for _ in range(steps)]


@pytest.mark.parametrize(
    "name", [name for name, exchange in VARIANTS.items() if not isinstance(exchange, Hierarchical)]
)
def test_flags_are_set_where_a_rank_s_own_entries_were_applied(name: str) -> None:
    exchange, inputs = VARIANTS[name], drawn(3, 501)
    ran, found = run_steps(exchange, inputs), flags_of(exchange, inputs)
    decay = torch.tensor(getattr(exchange, "decay", None) or 1.0)
    for rank, mine in enumerate(ran):
        before = torch.zeros(501)
        for number, flags in enumerate(found[rank]):
            assert flags is not None
            after = mine.kept[number]
            assert after is not None
            changed = after != before * decay + inputs[number][rank]
            owner_s_error = changed & ~flags  # the owner's residual also holds errors of sums that it did not send to
            assert bool(changed[flags].all())
            assert not bool((owner_s_error & (mine.results[number] == 0)).any())
            before = after
        assert bool(found[rank][-1].any())
    flagged = torch.stack([flags[-1] for flags in found])
    assert torch.equal(flagged.any(0), ran[0].results[-1] != 0)


def test_flags_are_none_where_everything_is_applied_or_nobody_asks() -> None:
    inputs = drawn(4, 501)
    for exchange in (
        Dense(),
        Quantized(),
        OkTopk(0.01),
        OkTopk(0.2, warmup=3),
        Hierarchical(),
        Hierarchical(across=OkTopk(0.01)),
    ):
        assert all(flags is None for rank in flags_of(exchange, inputs) for flags in rank), exchange
    for exchange in (OkTopk(0.2), Hierarchical(across=OkTopk(0.2))):
        assert all(flags is None for rank in flags_of(exchange, inputs, ask=False) for flags in rank)


@pytest.mark.parametrize("chunks", [1, 3])
def test_between_hosts_flags_are_set_where_the_result_is_not_zero(chunks: int) -> None:
    exchange, inputs = Hierarchical(across=OkTopk(0.2), chunks=chunks), drawn(5, 501)
    results = run_steps(exchange, inputs)[0].results
    for rank in flags_of(exchange, inputs):
        for number, flags in enumerate(rank):
            assert flags is not None
            assert torch.equal(flags, results[number] != 0)


def test_on_one_host_flags_are_those_of_the_flat_exchange() -> None:
    inputs = drawn(3, 501)
    exchange = Hierarchical(across=OkTopk(0.2), levels=[[0], [1], [2]])
    for mine, flat in zip(flags_of(exchange, inputs), flags_of(OkTopk(0.2), inputs), strict=True):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(mine, flat, strict=True))
