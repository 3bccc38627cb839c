"""OkTopk in one process: results, residuals, bytes, and a comparison with the published algorithm."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from oktopk_oracle import KINDS, Paper, Plain, largest, made, region_of
from syncline.dist.local_comm import LocalComm, run_ranks
from syncline.errors import UsageError
from syncline.exchange import Dense, Exchange, Hierarchical, Layout, OkTopk, Slot, State, Topology
from syncline.kernels import Slots
from syncline.testing import LAWS, place_ranks, run_steps

settings = functools.partial(hypothesis.settings, deadline=None, derandomize=True)

VALUES = ("bf16", "fp16", "fp32")
WORLD = "world"

Inputs = Sequence[Sequence[Tensor]]
Tensors = dict[str, dict[str, Tensor]]


def slots_of(exchange: OkTopk, numel: int, ranks: int) -> Slots:
    slots = exchange.slots(numel, torch.float32, ranks)
    assert slots is not None
    return slots


def normal(seed: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def heavy(seed: int, numel: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator) * torch.exp(2 * torch.randn(numel, generator=generator))


def steps_of(make: Callable[[int, int], Tensor], steps: int, ranks: int, numel: int) -> list[list[Tensor]]:
    return [[make(100 * step + rank, numel) for rank in range(ranks)] for step in range(steps)]


def saved(state: State, layout: Layout) -> Tensors:
    return {
        name: {kind: tensor.clone() for kind, tensor in kinds.items()} for name, kinds in state.tensors(layout).items()
    }


def one_step(
    exchange: Exchange,
    state: State,
    comm: LocalComm,
    step: int,
    gradient: Tensor,
    scale: float | None = None,
    others_finite: bool = True,
) -> Tensor:
    """Run a step as the engine does: the gradient is scaled, and the step is applied if all buckets are finite."""
    flat = gradient.clone() if scale is None else gradient * scale
    state.begin(step, None if scale is None else torch.tensor(scale))
    if (last := exchange.run(flat, state, comm)) is not None:
        last.wait()
    state.settle(state.finite(flat) & others_finite)
    return flat


@dataclass
class Played:
    """The results, residuals, checkpoints and sent bytes of one rank, by step."""

    results: list[Tensor] = field(default_factory=list)
    kept: list[Tensor | None] = field(default_factory=list)
    memory: list[Tensors] = field(default_factory=list)
    sent: list[dict[str, int]] = field(default_factory=list)
    way: str = ""


def play(
    exchange: Exchange,
    inputs: Inputs,
    scales: Sequence[float] | None = None,
    resume_after: int | None = None,
    share: float | None = None,
) -> list[Played]:
    """Run some steps on all ranks.

    Args:
        exchange: The exchange.
        inputs: The gradients of each step and rank.
        scales: The loss scale of each step.
        resume_after: The number of steps after which a new state loads what the first one saved.
        share: The factor for the gradients, applied by the state if it can.
    """
    layout = Layout.flat(inputs[0][0].numel(), inputs[0][0].dtype)

    def main(comm: LocalComm) -> Played:
        state, played = exchange.prepare(layout, comm), Played()
        played.way = state.describe()
        by_itself = share is None or state.average(share)
        for step, given in enumerate(inputs):
            if step == resume_after:
                tensors = saved(state, layout)
                state = exchange.prepare(layout, comm)
                state.load(layout, tensors)
            comm.counter.sent_bytes.clear()
            gradient = given[comm.rank] if by_itself else given[comm.rank] * share
            result = one_step(exchange, state, comm, step, gradient, scales[step] if scales else None)
            played.results.append(result)
            played.kept.append(None if (kept := state.kept()) is None else kept.clone())
            played.memory.append(saved(state, layout))
            played.sent.append(dict(comm.counter.sent_bytes))
        return played

    return run_ranks(place_ranks(exchange, len(inputs[0])), main)


def same(ours: Tensors, theirs: Tensors) -> bool:
    return ours.keys() == theirs.keys() and all(
        kinds.keys() == theirs[name].keys() and all(torch.equal(kinds[kind], theirs[name][kind]) for kind in kinds)
        for name, kinds in ours.items()
    )


# --- the laws, with buckets that are sent in slots --------------------------------------------------------------


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("law", LAWS)
def test_sparse_buckets_keep_every_law(law: str, values: str) -> None:
    exchange = OkTopk(density=0.2, values=values)
    for ranks, numel in ((2, 90), (7, 301)) if values == "bf16" else ((3, 501),):
        assert exchange.slots(numel, torch.float32, ranks) is not None
        LAWS[law](exchange, ranks, numel, torch.float32, "cpu")


@pytest.mark.parametrize(
    ("dtype", "values"),
    [(torch.float64, "fp32"), (torch.bfloat16, "fp16"), (torch.bfloat16, "bf16"), (torch.float16, "bf16")],
)
def test_sparse_buckets_of_other_types_keep_every_law(dtype: torch.dtype, values: str) -> None:
    exchange = OkTopk(density=0.15, values=values)
    assert exchange.slots(501, dtype, 3) is not None
    for law in LAWS.values():
        law(exchange, 3, 501, dtype, "cpu")


@pytest.mark.parametrize("exchange", [OkTopk(0.2, warmup=warmup, momentum=0.9) for warmup in (0, 1, 3)], ids=str)
def test_momentum_and_warmup_leave_no_trace_of_a_step_that_does_not_count(exchange: OkTopk) -> None:
    """With momentum, a gradient is applied more than once, so conservation does not hold."""
    for law in ("agreement", "commit_on_success", "data_independence"):
        LAWS[law](exchange, 3, 400, torch.float32, "cpu")


def test_a_warmup_conserves_what_comes_in() -> None:
    LAWS["conservation"](OkTopk(0.2, warmup=2), 3, 400, torch.float32, "cpu")


# --- a thousand steps of all kinds ------------------------------------------------------------------------------


def adversarial(
    steps: int, ranks: int, slots: Slots, finish: Callable[[Tensor], Tensor]
) -> tuple[list[list[Tensor]], list[bool]]:
    """Return steps of every kind, and whether each is finite: in some, one rank has a NaN or an infinity."""
    generator = torch.Generator().manual_seed(steps + ranks)
    inputs, finite = [], []
    for step in range(steps):
        kind = KINDS[int(torch.randint(len(KINDS), (), generator=generator))]
        gradients = [finish(made(kind, slots, generator)) for _ in range(ranks)]
        finite.append(step % 11 != 5)
        if not finite[-1]:
            culprit = (float("nan"), float("inf"), -float("inf"))[step % 3]
            gradients[step % ranks][int(torch.randint(slots.numel, (), generator=generator))] = culprit
        inputs.append(gradients)
    return inputs, finite


def accounts(exchange: OkTopk, inputs: Inputs, finite: Sequence[bool]) -> tuple[Tensor, Tensor]:
    """Return, by step, the gradients so far minus applied values and residuals, and the gradients of the step.

    Also check that ranks agree, and that a step that is not finite is detected on all ranks and changes nothing.
    """
    ran = run_steps(exchange, inputs)
    came_in, applied = torch.zeros(len(inputs), inputs[0][0].numel(), dtype=torch.float64), []
    for step, given in enumerate(inputs):
        for mine in ran:
            assert torch.equal(mine.results[step].view(torch.uint8), ran[0].results[step].view(torch.uint8))
            assert bool(mine.results[step].isfinite().all()) == finite[step]
            if not finite[step]:
                assert all(torch.equal(mine.memory[step][kind], mine.memory[step - 1][kind]) for kind in mine.memory[0])
        result = ran[0].results[step].double()
        applied.append(result if finite[step] else torch.zeros_like(result))
        if finite[step]:
            came_in[step] = torch.stack([gradient.double() for gradient in given]).sum(0)
    kept = torch.stack([torch.stack([rank.kept[step] for rank in ran]).double().sum(0) for step in range(len(inputs))])
    return came_in.cumsum(0) - torch.stack(applied).cumsum(0) - kept, came_in


@pytest.mark.parametrize(("values", "steps", "ranks"), [("bf16", 300, 3), ("fp16", 40, 7), ("fp32", 100, 2)])
def test_integers_of_all_kinds_are_conserved_exactly_in_every_step(values: str, steps: int, ranks: int) -> None:
    exchange = OkTopk(density=0.25, values=values)
    slots = slots_of(exchange, 301, ranks)
    inputs, finite = adversarial(steps, ranks, slots, lambda made: (8 * made).round().clamp(-4096, 4096))
    missing, _ = accounts(exchange, inputs, finite)
    assert not bool(missing.any())


@pytest.mark.parametrize(("values", "steps", "ranks"), [("bf16", 40, 7), ("fp16", 150, 3), ("fp32", 100, 2)])
def test_gradients_of_all_kinds_are_conserved_to_rounding_in_every_step(values: str, steps: int, ranks: int) -> None:
    exchange = OkTopk(density=0.25, values=values)
    slots = slots_of(exchange, 301, ranks)
    inputs, finite = adversarial(steps, ranks, slots, lambda made: made.clamp(-4096, 4096))
    missing, _ = accounts(exchange, inputs, finite)
    magnitude = torch.stack([torch.stack(list(given)).double().abs().nan_to_num(0, 0, 0).sum(0) for given in inputs])
    # Each step rounds sums with the residual, which is at most a few steps' gradients.
    allowed = ranks * 2.0**-23 * (magnitude.cumsum(0) + magnitude.amax())
    assert bool((missing.abs() <= allowed).all())


# --- comparison with the reference ------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(
    ("ranks", "dtype", "values"),
    [
        (2, torch.float32, "bf16"),
        (5, torch.float32, "fp16"),
        (3, torch.float32, "fp32"),
        (2, torch.bfloat16, "fp32"),
        (2, torch.float16, "bf16"),
    ],
)
def test_it_applies_and_keeps_what_plain_sorting_and_dense_buffers_do(
    ranks: int, dtype: torch.dtype, values: str, momentum: float
) -> None:
    """With momentum m: u = m·u + g and v += u on each rank; entries that it sent and that were applied are cleared."""
    exchange = OkTopk(density=0.2, values=values, momentum=momentum)
    inputs = [[gradient.to(dtype) for gradient in given] for given in steps_of(heavy, 8, ranks, 433)]
    inputs[4][1][7] = float("inf")
    plain = Plain(slots_of(exchange, 433, ranks), dtype, momentum)
    ran = play(exchange, inputs)
    for step, given in enumerate(inputs):
        applied = plain.step(given).applied
        for rank, mine in enumerate(ran):
            if step != 4:
                assert torch.equal(mine.results[step], applied)
            held = mine.memory[step]["flat"]
            assert torch.equal(held["residual"], plain.kept[rank])
            assert held.keys() == ({"residual", "velocity"} if momentum else {"residual"})
            if momentum:
                assert torch.equal(held["velocity"], plain.velocity[rank])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "exchange",
    [
        OkTopk(density=0.15, values="fp32"),
        OkTopk(density=0.15, momentum=0.5),
        OkTopk(density=0.15, warmup=2),
        OkTopk(density=0.15, warmup=2, momentum=0.5),
        OkTopk(density=0.001),
        OkTopk(density=0.001, momentum=0.5),
        Hierarchical(across=OkTopk(density=0.15), levels=[[0, 1], [2]]),
    ],
    ids=str,
)
def test_it_averages_by_itself_as_plain_ddp_does(exchange: Exchange, dtype: torch.dtype) -> None:
    """The results are bit-equal, in the bucket's type."""
    inputs = [[gradient.to(dtype) for gradient in given] for given in steps_of(heavy, 4, 3, 300)]
    averaged = play(exchange, inputs, share=1 / 3)
    beforehand = play(exchange, [[gradient * (1 / 3) for gradient in given] for given in inputs])
    for mine, theirs in zip(averaged, beforehand, strict=True):
        for step in range(4):
            assert torch.equal(mine.results[step], theirs.results[step])
            assert same(mine.memory[step], theirs.memory[step])


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_whole_buckets_apply_momentum_as_an_optimizer_would(momentum: float) -> None:
    inputs = steps_of(normal, 4, 3, 20)
    ran = play(OkTopk(density=0.2, momentum=momentum), inputs)
    velocity = [torch.zeros(20) for _ in range(3)]
    for step, given in enumerate(inputs):
        velocity = [momentum * held + gradient for held, gradient in zip(velocity, given, strict=True)]
        for mine in ran:
            assert torch.allclose(mine.results[step], torch.stack(velocity).sum(0), rtol=1e-6, atol=1e-6)


# --- bytes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numel", "ranks", "density", "values", "dtype"),
    [
        (1, 2, 1.0, "bf16", torch.float32),
        (1, 7, 0.5, "bf16", torch.float32),
        (5, 7, 1.0, "fp32", torch.float32),
        (1000, 2, 0.0001, "bf16", torch.float32),  # less than one entry
        (159, 2, 0.1, "bf16", torch.float32),  # 15 of 16
        (559, 7, 0.1, "bf16", torch.float32),  # 55 of 56
        (5000, 1, 0.1, "bf16", torch.float32),  # one rank
        (400, 2, 1.0, "bf16", torch.float32),  # slots would have more bytes
        (100, 2, 0.95, "bf16", torch.float32),  # slots would have as many bytes
        (400, 3, 0.7, "fp32", torch.float32),
        (400, 2, 0.5, "bf16", torch.bfloat16),
    ],
)
def test_a_bucket_that_gains_nothing_goes_whole_and_arrives_exactly(
    numel: int, ranks: int, density: float, values: str, dtype: torch.dtype
) -> None:
    exchange = OkTopk(density=density, values=values)
    generator = torch.Generator().manual_seed(numel)
    inputs = [[torch.randint(-8, 9, (numel,), generator=generator).to(dtype) for _ in range(ranks)] for _ in range(2)]
    ran = play(exchange, inputs)
    for mine in ran:
        assert mine.way == "whole"
        assert mine.kept == [None, None]
        for step, given in enumerate(inputs):
            assert torch.equal(mine.results[step], torch.stack(list(given)).sum(0))
            dense = Dense().cost(numel, dtype, Topology.flat(ranks)).sent_bytes
            assert mine.sent[step] == exchange.cost(numel, dtype, Topology.flat(ranks)).sent_bytes
            assert mine.sent[step] == (dense if ranks > 1 else {})


@pytest.mark.parametrize(
    ("numel", "ranks", "sparse"), [(160, 2, True), (159, 2, False), (560, 7, True), (559, 7, False)]
)
def test_eight_entries_for_each_rank_are_the_fewest_that_travel_in_slots(numel: int, ranks: int, sparse: bool) -> None:
    assert (OkTopk(density=0.1).slots(numel, torch.float32, ranks) is not None) == sparse


def test_bytes_by_hand() -> None:
    """Four ranks select 1,000 of 100,000 elements: each sends three slots of 250 entries in each collective. A region
    has 25 cells of 1,024 elements. The counts of its cells and the exponent take 26 words."""
    for values, slot in (
        ("bf16", 2 * (26 + 250 + 250)),
        ("fp16", 2 * (26 + 250 + 250)),
        ("fp32", 2 * (26 + 250 + 500)),
    ):
        exchange = OkTopk(density=0.01, values=values)
        cost = exchange.cost(100_000, torch.float32, Topology.flat(4))
        assert [(phase.kind, phase.sent_bytes) for phase in cost.phases] == [
            ("all_to_all", 3 * slot),
            ("all_gather", 3 * slot),
        ]
        ran = play(exchange, steps_of(normal, 1, 4, 100_000))
        assert all(mine.sent == [{WORLD: 6 * slot}] for mine in ran)
        assert ran[0].way == "sparse, 4 slots of 250 entries"


def bound_words(values: str, k: int, ranks: int) -> float:
    """Return the most words that a rank may send in a step. The paper's bound is 6k."""
    if values == "fp32":
        return 4.6 * k * (ranks - 1) / ranks
    return 2.5 * k


@pytest.mark.parametrize(
    ("numel", "ranks", "density", "values"),
    [
        (163, 2, 0.1, "bf16"),
        (163, 2, 0.1, "fp32"),
        (1000, 3, 0.1, "fp16"),
        (5003, 2, 0.01, "fp32"),
        (2000, 4, 0.25, "bf16"),
        (777, 7, 0.08, "bf16"),
        (20_011, 5, 0.003, "bf16"),
    ],
)
def test_every_step_sends_the_bytes_that_were_predicted_and_stays_under_the_bound(
    numel: int, ranks: int, density: float, values: str
) -> None:
    exchange = OkTopk(density=density, values=values)
    slots = slots_of(exchange, numel, ranks)
    generator = torch.Generator().manual_seed(numel)
    inputs = [[made(kind, slots, generator) for _ in range(ranks)] for kind in KINDS]
    predicted = exchange.cost(numel, torch.float32, Topology.flat(ranks)).sent_bytes
    assert predicted[WORLD] <= 4 * bound_words(values, int(density * numel), ranks)
    for mine in play(exchange, inputs):
        assert mine.sent == [predicted] * len(KINDS)


@hypothesis.given(
    numel=st.integers(1, 10**8),
    ranks=st.integers(2, 64),
    density=st.floats(0.00025, 1.0),
    values=st.sampled_from(VALUES),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
@settings(max_examples=400)
def test_bytes_stay_under_the_bound_for_any_bucket_and_never_exceed_those_of_a_whole_one(
    numel: int, ranks: int, density: float, values: str, dtype: torch.dtype
) -> None:
    exchange = OkTopk(density=density, values=values)
    sent = exchange.cost(numel, dtype, Topology.flat(ranks)).sent_bytes[WORLD]
    whole = Dense().cost(numel, dtype, Topology.flat(ranks)).sent_bytes[WORLD]
    if exchange.slots(numel, dtype, ranks) is None:
        assert sent == whole
    else:
        assert sent < whole
        assert sent <= 4 * bound_words(values, int(density * numel), ranks)


@pytest.mark.parametrize("values", ["bf16", "fp16"])
@pytest.mark.parametrize("ranks", [2, 3, 7, 8, 16, 31, 64])
@pytest.mark.parametrize("entries", [8, 9, 15, 16, 17, 31, 33])
def test_the_bound_holds_where_slots_are_smallest(entries: int, ranks: int, values: str) -> None:
    for k in (entries * ranks, entries * ranks + 1, entries * ranks + ranks - 1):
        for density in (0.00025, 0.001, 0.01, 0.1, 0.3):
            numel = round((k + 0.5) / density)
            exchange = OkTopk(density=density, values=values)
            if exchange.slots(numel, torch.float32, ranks) is not None:
                sent = exchange.cost(numel, torch.float32, Topology.flat(ranks)).sent_bytes[WORLD]
                assert sent <= 4 * bound_words(values, k, ranks)


# --- the published one ------------------------------------------------------------------------------------------


def balanced(slots: Slots, step: int) -> list[Tensor]:
    """Return gradients with as many large entries in each region as a slot has room for; all others are far smaller.

    Half of a region's largest sums are entries that all ranks have. The other half are entries that only one rank has,
    and that are larger than other such entries. Signs and magnitudes differ. Each step's entries are so much larger
    than those of the step before that residuals do not affect the selection.
    """
    generator = torch.Generator().manual_seed(step)
    ranks, half = slots.regions, slots.entries // 2
    unit = 256.0**step
    gradients = [unit * 0.001 * torch.randn(slots.numel, generator=generator) for _ in range(ranks)]

    def put(gradient: Tensor, where: Tensor, size: float) -> None:
        magnitude = 1 + 0.9 * torch.rand(len(where), generator=generator)
        gradient[where] = unit * size * magnitude * torch.randn(len(where), generator=generator).sign()

    for region in range(ranks):
        places = (region_of(slots) == region).nonzero().flatten()
        places = places[torch.randperm(len(places), generator=generator)]
        common, private = places[:half], places[half : half + ranks * half].view(ranks, half)
        for rank in range(ranks):
            put(gradients[rank], common, 1000.0)
            gradients[rank][common] = gradients[rank][common].abs()
            put(gradients[rank], private[rank], 10.0)
        winners = private.flatten()[torch.randperm(ranks * half, generator=generator)[:half]]
        for rank in range(ranks):
            put(gradients[rank], winners[torch.isin(winners, private[rank])], 40.0)
    return gradients


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_where_no_slot_overflows_it_applies_and_keeps_exactly_what_the_published_one_does(ranks: int) -> None:
    numel, entries = 1200 * ranks, 20
    exchange = OkTopk(density=entries * ranks / numel, values="fp32")
    slots = slots_of(exchange, numel, ranks)
    assert slots.entries == entries
    paper = Paper(numel, ranks, entries * ranks)
    inputs = [balanced(slots, step) for step in range(4)]
    ran = play(exchange, inputs)
    for step, given in enumerate(inputs):
        published = paper.step(given)
        assert int((published.applied != 0).sum()) == entries * ranks
        assert bool(
            (torch.stack(published.selected).sum(0)[published.applied == 0] > 0).any()
        )  # some entries were sent but not applied
        for rank, mine in enumerate(ran):
            assert torch.equal(mine.results[step], published.applied)
            assert torch.equal(mine.kept[step], paper.residuals[rank])


def test_on_any_input_it_applies_most_of_what_the_published_one_does_with_the_same_values() -> None:
    """Both get the same gradients and the same residuals in each step. Slots are filled by region, so the selections
    differ in the smallest entries: here in four to seven per cent."""
    ranks, numel, density = 4, 20_000, 0.02
    exchange = OkTopk(density=density, values="fp32")
    slots = slots_of(exchange, numel, ranks)
    inputs = steps_of(heavy, 6, ranks, numel)
    ran = play(exchange, inputs)
    shares = []
    for step, given in enumerate(inputs):
        paper = Paper(numel, ranks, int(density * numel))
        if step:
            paper.residuals = [mine.kept[step - 1] for mine in ran]
        accumulated = [held + gradient for held, gradient in zip(paper.residuals, given, strict=True)]
        published = paper.step(given)
        ours = ran[0].results[step]
        by_region = [(region_of(slots) == region).nonzero().flatten() for region in range(ranks)]
        alike = torch.ones(numel, dtype=torch.bool)
        for rank in range(ranks):
            mine = torch.zeros(numel, dtype=torch.bool)
            for places in by_region:
                mine[largest(accumulated[rank], places, slots.entries)] = True
            alike &= mine == published.selected[rank]
        both = (ours != 0) & (published.applied != 0)
        assert torch.equal(ours[both & alike], published.applied[both & alike])
        assert int((both & alike).sum()) > 0.95 * int(both.sum())
        shares.append(int(both.sum()) / int((published.applied != 0).sum()))
        assert int((ours != 0).sum()) <= slots.entries * ranks
    assert min(shares) >= 0.9, shares


def test_the_published_one_conserves_and_stays_within_its_own_bound() -> None:
    """Otherwise it could not serve as a reference."""
    ranks, numel, k = 4, 2000, 80
    paper = Paper(numel, ranks, k)
    inputs = steps_of(heavy, 5, ranks, numel)
    missing = torch.zeros(numel, dtype=torch.float64)
    for given in inputs:
        published = paper.step(given)
        missing += torch.stack(list(given)).double().sum(0) - published.applied
        assert int((published.applied != 0).sum()) == k
        assert max(published.words) < 6 * k
    kept = torch.stack(paper.residuals).double().sum(0)
    assert torch.allclose(missing, kept, rtol=1e-5, atol=1e-4)


# --- residuals by name ------------------------------------------------------------------------------------------


def layout_of(*names: str) -> Layout:
    """Return the layout of a bucket with these parameters, in this order."""
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
        "matrix": ((20, 15), (15, 1)),
        "images": ((4, 6, 3, 5), (90, 1, 30, 6)),  # channels-last
        "vector": ((250,), (1,)),
        "scalar": ((), ()),
        "small": ((31,), (1,)),
    }
    slots, offset = [], 0
    for name in names:
        shape, stride = shapes[name]
        numel = int(torch.tensor(shape).prod()) if shape else 1
        slots.append(Slot(name, shape, stride, offset, numel))
        offset += numel
    return Layout(tuple(slots), torch.float32, torch.device("cpu"))


def integers(layout: Layout, step: int, rank: int) -> Tensor:
    """Return integer gradients. Each parameter's gradient is the same in every layout."""
    flat = torch.zeros(layout.numel)
    for slot in layout.slots:
        generator = torch.Generator().manual_seed(1000 * step + 10 * rank + len(slot.name))
        slot.view(flat).copy_(torch.randint(-99, 100, slot.shape, generator=generator))
    return flat


NAMES = ("matrix", "images", "vector", "scalar", "small")
BUCKETS = {
    "merged": ((*NAMES,),),
    "merged in another order": (("small", "vector", "scalar", "images", "matrix"),),
    "split": (("matrix", "scalar"), ("images", "small"), ("vector",)),
    "split otherwise": (("vector", "images"), ("scalar",), ("small", "matrix")),
}


@pytest.mark.parametrize(
    ("before", "after", "values"),
    [
        ("merged", "split", "bf16"),
        ("merged", "merged in another order", "fp32"),
        ("split", "merged", "fp32"),
        ("split", "split otherwise", "bf16"),
        ("split otherwise", "merged in another order", "fp16"),
    ],
)
def test_nothing_is_lost_when_parameters_change_buckets(before: str, after: str, values: str) -> None:
    """Parameters move to other buckets and back; some buckets are sent in slots, and small ones are sent dense."""
    exchange = OkTopk(density=0.1, values=values)

    def main(comm: LocalComm) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        tensors: Tensors = {}
        applied: dict[str, Tensor] = {}
        for phase, buckets in enumerate((before, after, before)):
            layouts = [layout_of(*names) for names in BUCKETS[buckets]]
            states = [exchange.prepare(layout, comm) for layout in layouts]
            for layout, state in zip(layouts, states, strict=True):
                mine = {slot.name: tensors[slot.name] for slot in layout.slots if slot.name in tensors}
                state.load(layout, mine)
                held = saved(state, layout)
                for name, kinds in mine.items():
                    assert torch.equal(held[name]["residual"], kinds["residual"])
                for step in range(3 * phase, 3 * phase + 3):
                    result = one_step(exchange, state, comm, step, integers(layout, step, comm.rank))
                    for slot in layout.slots:
                        total = applied.setdefault(slot.name, torch.zeros(slot.shape))
                        total += slot.view(result)
            tensors = {}
            for layout, state in zip(layouts, states, strict=True):
                for name, kinds in saved(state, layout).items():
                    assert kinds["residual"].shape == next(slot.shape for slot in layout.slots if slot.name == name)
                    tensors[name] = kinds
        return applied, {name: kinds["residual"] for name, kinds in tensors.items()}

    ran = run_ranks(2, main)
    layout = layout_of(*NAMES)
    for slot in layout.slots:
        came_in = sum(slot.view(integers(layout, step, rank)) for step in range(9) for rank in range(2))
        kept = sum(held[slot.name] for _, held in ran if slot.name in held)
        assert torch.equal(ran[0][0][slot.name] + kept, came_in)


@pytest.mark.parametrize("trouble", ["none", "this bucket is not finite", "another bucket is not finite"])
def test_what_moves_to_a_bucket_that_goes_whole_is_applied_in_its_next_step_and_only_once(trouble: str) -> None:
    exchange = OkTopk(density=0.1)
    before, after = layout_of("vector", "small"), layout_of("small")

    def main(comm: LocalComm) -> tuple[Tensor, list[Tensor]]:
        sparse, whole = exchange.prepare(before, comm), exchange.prepare(after, comm)
        assert (sparse.describe(), whole.describe()) == ("sparse, 2 slots of 14 entries", "whole")
        for step in range(3):
            one_step(exchange, sparse, comm, step, integers(before, step, comm.rank))
        moved = saved(sparse, before)["small"]
        whole.load(after, {"small": moved})
        if trouble != "none":
            gradient = integers(after, 77, comm.rank)
            if trouble.startswith("this") and comm.rank == 1:
                gradient[3] = float("nan")
            one_step(exchange, whole, comm, 3, gradient, others_finite=not trouble.startswith("another"))
            assert torch.equal(saved(whole, after)["small"]["residual"], moved["residual"])
        results = [one_step(exchange, whole, comm, step, integers(after, step, comm.rank)) for step in (4, 5)]
        kept = whole.kept()
        assert kept is not None
        assert not bool(kept.any())
        return moved["residual"], results

    ran = run_ranks(2, main)
    moved = ran[0][0] + ran[1][0]
    assert bool(moved.any())
    for _, (first, second) in ran:
        assert torch.equal(first, moved + sum(integers(after, 4, rank) for rank in range(2)))
        assert torch.equal(second, sum(integers(after, 5, rank) for rank in range(2)))


def test_velocity_moves_with_its_parameter_and_stays_behind_where_there_is_no_momentum() -> None:
    before, after = layout_of("matrix", "images"), layout_of("images")

    def main(comm: LocalComm) -> None:
        exchange = OkTopk(density=0.1, momentum=0.9)
        state = exchange.prepare(before, comm)
        for step in range(3):
            one_step(exchange, state, comm, step, integers(before, step, comm.rank))
        tensors = saved(state, before)
        assert bool(tensors["images"]["velocity"].any())
        other = exchange.prepare(after, comm)
        other.load(after, tensors)
        assert same(saved(other, after), {"images": tensors["images"]})
        without = OkTopk(density=0.1).prepare(after, comm)
        without.load(after, tensors)
        assert same(saved(without, after), {"images": {"residual": tensors["images"]["residual"]}})

    run_ranks(2, main)


def test_loading_replaces_all_that_was_kept() -> None:
    layout = layout_of("matrix", "vector")

    def main(comm: LocalComm) -> None:
        exchange = OkTopk(density=0.1, momentum=0.9)
        state = exchange.prepare(layout, comm)
        for step in range(3):
            one_step(exchange, state, comm, step, integers(layout, step, comm.rank))
        tensors = saved(state, layout)
        state.load(layout, {"vector": tensors["vector"]})
        now = saved(state, layout)
        assert same({"vector": now["vector"]}, {"vector": tensors["vector"]})
        assert not any(bool(tensor.any()) for tensor in now["matrix"].values())

    run_ranks(2, main)


def test_loading_starts_without_a_scale() -> None:
    exchange, layout = OkTopk(density=0.1), layout_of("matrix", "vector")

    def main(comm: LocalComm) -> None:
        used, fresh = exchange.prepare(layout, comm), exchange.prepare(layout, comm)
        for step, scale in enumerate((8.0, 32.0, 4.0)):
            one_step(exchange, used, comm, step, integers(layout, step, comm.rank), scale)
        tensors = saved(used, layout)
        for state in (used, fresh):
            state.load(layout, tensors)
            assert same(saved(state, layout), tensors)
        mine, theirs = (one_step(exchange, state, comm, 3, integers(layout, 3, comm.rank)) for state in (used, fresh))
        assert torch.equal(mine, theirs)
        assert same(saved(used, layout), saved(fresh, layout))

    run_ranks(2, main)


@pytest.mark.parametrize(
    ("after", "scales"), [(1, None), (3, [4.0, 4.0, 8.0, 8.0, 2.0, 1024.0])], ids=["unscaled", "scaled"]
)
@pytest.mark.parametrize(
    "exchange",
    [
        *(OkTopk(density=0.2, values=values) for values in VALUES),
        OkTopk(density=0.2, momentum=0.9),
        OkTopk(density=0.2, warmup=2, momentum=0.5),
        OkTopk(density=0.001, momentum=0.9),
        Hierarchical(across=OkTopk(density=0.2), levels=[[0, 1], [2]], chunks=2),
    ],
    ids=str,
)
def test_what_was_saved_and_loaded_goes_on_as_if_nothing_had_happened(
    exchange: Exchange, scales: list[float] | None, after: int
) -> None:
    inputs = steps_of(heavy, 6, 3, 500)
    whole, resumed = play(exchange, inputs, scales), play(exchange, inputs, scales, resume_after=after)
    for mine, theirs in zip(whole, resumed, strict=True):
        for step in range(6):
            assert torch.equal(mine.results[step], theirs.results[step])
            assert same(mine.memory[step], theirs.memory[step])


# --- scaled gradients -------------------------------------------------------------------------------------------


@hypothesis.given(
    values=st.sampled_from(VALUES),
    momentum=st.sampled_from([0.0, 0.9]),
    octaves=st.lists(st.integers(-3, 16), min_size=6, max_size=6),
    broken=st.sets(st.integers(0, 5), max_size=2),
)
@settings(max_examples=25)
def test_scaled_gradients_give_the_scaled_result_whatever_the_scale_was_before(
    values: str, momentum: float, octaves: list[int], broken: set[int]
) -> None:
    """With powers of two, results are bit-equal, also after steps that are not applied. Checkpoints are not scaled."""
    inputs = steps_of(heavy, 6, 2, 300)
    for step in broken:
        inputs[step][1][step] = float("inf")
    scales = [2.0**octave for octave in octaves]
    exchange = OkTopk(density=0.15, values=values, momentum=momentum)
    assert exchange.slots(300, torch.float32, 2) is not None
    plain, scaled = play(exchange, inputs), play(exchange, inputs, scales)
    for mine, theirs in zip(plain, scaled, strict=True):
        for step, scale in enumerate(scales):
            if step not in broken:
                assert torch.equal(mine.results[step] * scale, theirs.results[step])
            assert same(mine.memory[step], theirs.memory[step])


def test_nothing_is_lost_at_scales_that_round() -> None:
    inputs, scales = steps_of(normal, 6, 2, 300), [3.0, 0.7, 1000.0, 11.0, 0.01, 5.0]
    ran = play(OkTopk(density=0.15), inputs, scales)
    applied = sum(result / scale for result, scale in zip(ran[0].results, scales, strict=True))
    kept = sum(mine.memory[-1]["flat"]["residual"] for mine in ran)
    came_in = torch.stack([torch.stack(given) for given in inputs]).sum((0, 1))
    assert torch.allclose(applied + kept, came_in, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [4.0, 0.5])
def test_what_moved_to_a_whole_bucket_is_applied_in_the_scale_of_the_step(scale: float) -> None:
    exchange, layout = OkTopk(density=0.1), layout_of("small")

    def main(comm: LocalComm) -> Tensor:
        state = exchange.prepare(layout, comm)
        state.load(layout, {"small": {"residual": torch.ones(31)}})
        return one_step(exchange, state, comm, 0, torch.ones(31), scale)

    for result in run_ranks(2, main):
        assert torch.equal(result, torch.full((31,), 4 * scale))


# --- warm-up ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("warmup", [0, 1, 3])
def test_a_warmup_is_dense_and_exact_and_keeps_nothing_until_it_is_over(warmup: int) -> None:
    exchange = OkTopk(density=0.1, warmup=warmup)
    generator = torch.Generator().manual_seed(0)
    inputs = [[torch.randint(-8, 9, (500,), generator=generator).float() for _ in range(3)] for _ in range(5)]
    dense, sparse = (way.cost(500, torch.float32, Topology.flat(3)).sent_bytes for way in (Dense(), exchange))
    for mine in play(exchange, inputs):
        for step, given in enumerate(inputs):
            exact = torch.equal(mine.results[step], torch.stack(list(given)).sum(0))
            assert exact == (step < warmup)
            assert (mine.kept[step] is None) == (step < warmup)
            assert mine.sent[step] == (dense if step < warmup else sparse)
            assert step < warmup or int((mine.results[step] != 0).sum()) <= 51


def test_velocity_grows_during_a_warmup_and_what_a_checkpoint_kept_waits_for_its_end() -> None:
    exchange = OkTopk(density=0.1, warmup=2, momentum=0.5)
    layout = Layout.flat(500)
    inputs = steps_of(normal, 3, 2, 500)

    def main(comm: LocalComm) -> list[Tensor]:
        state = exchange.prepare(layout, comm)
        waiting = normal(99 + comm.rank, 500)
        state.load(layout, {"flat": {"residual": waiting}})
        results = []
        for step in range(2):
            results.append(one_step(exchange, state, comm, step, inputs[step][comm.rank], scale=2.0))
            assert torch.equal(saved(state, layout)["flat"]["residual"], waiting)
        velocity = 0.5 * inputs[0][comm.rank] + inputs[1][comm.rank]
        assert torch.allclose(saved(state, layout)["flat"]["velocity"], velocity)
        one_step(exchange, state, comm, 2, inputs[2][comm.rank], scale=4.0)
        assert not torch.equal(saved(state, layout)["flat"]["residual"], waiting)
        return results

    for first, second in run_ranks(2, main):
        assert torch.allclose(first, 2 * (inputs[0][0] + inputs[0][1]))
        assert torch.allclose(second, first / 2 + 2 * (inputs[1][0] + inputs[1][1]), atol=1e-6)


def test_steps_that_are_counted_anew_are_warmed_up_anew() -> None:
    """This happens after going back to an early checkpoint."""
    exchange, layout = OkTopk(density=0.1, warmup=2), Layout.flat(500)

    def main(comm: LocalComm) -> None:
        state = exchange.prepare(layout, comm)
        assert bool((one_step(exchange, state, comm, 2, normal(comm.rank, 500)) == 0).any())
        assert torch.equal(one_step(exchange, state, comm, 0, torch.ones(500)), torch.full((500,), 2.0))
        flat = torch.full((500,), float("nan") if comm.rank else 1.0)
        state.begin(1)
        exchange.run(flat, state, comm).wait()
        assert not bool(state.finite(flat))  # the result of an earlier sparse step must not be reused

    run_ranks(2, main)


# --- between hosts ----------------------------------------------------------------------------------------------

HOSTS = {"of three, one and two": [[0, 1, 2], [3], [4, 5]], "of two": [[0, 1], [2, 3]]}


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("hosts", HOSTS)
def test_between_hosts_it_keeps_every_law(hosts: str, chunks: int) -> None:
    levels = HOSTS[hosts]
    exchange = Hierarchical(across=OkTopk(density=0.25), levels=levels, chunks=chunks)
    ranks = sum(map(len, levels))
    kinds = [phase.kind for phase in exchange.cost(600, torch.float32, place_ranks(exchange, ranks)).phases]
    assert kinds.count("all_to_all") == chunks
    for law in LAWS.values():
        law(exchange, ranks, 600, torch.float32, "cpu")


@pytest.mark.parametrize("hosts", HOSTS)
def test_only_the_first_of_each_host_keeps_anything(hosts: str) -> None:
    levels = HOSTS[hosts]
    exchange = Hierarchical(across=OkTopk(density=0.25, momentum=0.5), levels=levels, chunks=2)
    ran = play(exchange, steps_of(normal, 2, sum(map(len, levels)), 500))
    leaders = [host[0] for host in levels]
    for rank, mine in enumerate(ran):
        kept = mine.kept[-1]
        assert (kept is not None and bool(kept.any())) == (rank in leaders)
        assert bool(mine.memory[-1]) == (rank in leaders)
        assert torch.equal(mine.results[-1], ran[0].results[-1])


def test_between_hosts_it_exchanges_what_they_add_up_to() -> None:
    """The result is the same as if only leaders took part, with their hosts' sums."""
    inputs = steps_of(normal, 4, 4, 500)
    across = OkTopk(density=0.2, values="fp32")
    ran = play(Hierarchical(across=across, levels=[[0, 1], [2, 3]], chunks=1), inputs)
    alone = play(across, [[given[0] + given[1], given[2] + given[3]] for given in inputs])
    for step in range(4):
        assert all(torch.equal(mine.results[step], alone[0].results[step]) for mine in ran)
        assert torch.equal(ran[2].kept[step], alone[1].kept[step])


# --- settings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "trouble"),
    [
        *(
            ({"density": density}, f"OkTopk(density={density!r}): density must be a fraction of the gradients")
            for density in (0, 0.0, -1, 2, 1.0001, float("nan"), float("inf"), True, "0.01", None)
        ),
        *(
            ({"values": values}, f"OkTopk(values={values!r}): values must be one of fp32, bf16, fp16")
            for values in ("int8", "", None, 16, torch.bfloat16)
        ),
        *(
            ({"warmup": warmup}, f"OkTopk(warmup={warmup!r}): warmup must be a number of steps, at least 0")
            for warmup in (-1, 1.5, 2.0, True, "3", None)
        ),
        *(
            ({"momentum": momentum}, f"OkTopk(momentum={momentum!r}): momentum must be at least 0 and less than 1")
            for momentum in (1, 1.0, 1.5, -0.1, float("nan"), float("inf"), "0.9", None)
        ),
    ],
)
def test_impossible_settings_are_refused_at_construction_in_one_line(fields: dict[str, Any], trouble: str) -> None:
    with pytest.raises(UsageError) as refused:
        OkTopk(**fields)
    assert trouble in str(refused.value)
    assert "\n" not in str(refused.value)


def test_settings_at_the_edge_are_allowed() -> None:
    for exchange in (OkTopk(density=1), OkTopk(density=1e-4), OkTopk(momentum=0), OkTopk(momentum=0.999, warmup=10**6)):
        assert dataclasses.replace(exchange) == exchange
        assert exchange.keeps
        assert exchange.waits
        assert not exchange.lossless


def test_a_scaler_that_is_switched_off_leaves_what_is_kept_in_the_gradients_own_measure() -> None:
    exchange, inputs = OkTopk(density=0.2, values="fp32"), steps_of(heavy, 4, 2, 300)

    def main(comm: LocalComm, scales: Sequence[float | None]) -> Tensor:
        state = exchange.prepare(Layout.flat(300), comm)
        for step, (gradients, scale) in enumerate(zip(inputs, scales, strict=True)):
            flat = gradients[comm.rank] * (scale or 1.0)
            state.begin(step, None if scale is None else torch.tensor(scale))
            exchange.run(flat, state, comm)
            state.settle(state.finite(flat))
        kept = state.kept()
        assert kept is not None
        return kept

    plain = run_ranks(2, lambda comm: main(comm, (None, None, None, None)))
    switched = run_ranks(2, lambda comm: main(comm, (4.0, 8.0, None, None)))
    for mine, theirs in zip(switched, plain, strict=True):
        assert torch.equal(mine, theirs)
