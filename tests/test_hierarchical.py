"""Hierarchical in one process: the laws on many trees, residuals, the choice of a path, the order of collectives."""

from __future__ import annotations

import dataclasses
import itertools
import json
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from exchanges import ErrorFeedback
from made_up import network as made_up_network
from syncline.dist.local_comm import LocalComm, run_ranks
from syncline.errors import UsageError
from syncline.exchange import WORLD, Dense, Exchange, Hierarchical, Layout, Level, Slot, State, Topology, Tree, settings
from syncline.measure.assumed_network import assumed_links, assumed_network
from syncline.predict.exchange_time import topology_of
from syncline.records.network import Network
from syncline.testing import LAWS, place_ranks, run_steps

UNEQUAL = ((0, 1, 2), (3,), (4, 5))
SCRAMBLED = (((5, 0), (2, 7)), ((3, 1), (6, 4)))
ACROSS: tuple[Exchange, ...] = (Dense(), Dense(wire="bf16"), ErrorFeedback())


def count(levels: Any) -> int:
    if isinstance(levels[0], int):
        ranks = 1
        for size in levels:
            ranks *= size
        return ranks
    return len(_flat(levels))


def _flat(levels: Any) -> list[int]:
    return [levels] if isinstance(levels, int) else [rank for entry in levels for rank in _flat(entry)]


def topology(levels: Any, seconds: Any = None) -> Topology:
    """Return a topology with these levels."""
    ranks = count(levels)
    return Topology(Level(WORLD, (tuple(range(ranks)),)), Tree.given(levels, ranks).levels, seconds=seconds)


# --- the laws ---------------------------------------------------------------------------------------------------

TREES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "unequal hosts": (UNEQUAL, (1, 12, 100)),
    "three levels": ((2, 2, 2), (1, 101)),
    "three scrambled levels": (SCRAMBLED, (60,)),
    "a rack of one host": ((((0, 1), (2, 3)), ((4, 5),)), (1, 13)),
    "one rank per host": (((0,), (1,), (2,)), (1, 50)),
    "a single host": (((0, 1, 2),), (1, 50)),
}
"""Levels, and sizes of buckets."""


@pytest.mark.parametrize(
    ("across", "shape", "chunks"),
    [
        (Dense(), "sharded", 1),
        (Dense(wire="bf16"), "leader", 1),
        (Dense(wire="bf16"), "sharded", 3),
        (ErrorFeedback(), "leader", 3),
        (ErrorFeedback(), "auto", 1),
    ],
)
@pytest.mark.parametrize("tree", TREES)
def test_it_keeps_every_law_on_every_tree(tree: str, across: Exchange, shape: str, chunks: int) -> None:
    levels, numels = TREES[tree]
    exchange = Hierarchical(across=across, levels=levels, shape=shape, chunks=chunks)
    for law in LAWS.values():
        for numel in numels if chunks == 3 else numels[-1:]:
            law(exchange, count(levels), numel, torch.float32, "cpu")


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
@pytest.mark.parametrize("levels", [(2, 3), (2, 2, 2)], ids=str)
def test_it_keeps_every_law_with_sixteen_bits_inside(levels: tuple[int, ...], wire: str) -> None:
    inside, outside = Dense(wire="bf16"), Dense(wire=wire)
    exchange = Hierarchical(within=inside, across=outside, levels=levels, shape="sharded", chunks=3)
    for law in LAWS.values():
        law(exchange, count(levels), 101, torch.float32, "cpu")


@pytest.mark.parametrize("levels", [(2, 2, 2), (2, 2, 2, 2, 2)], ids=str)
def test_numbers_just_above_what_sixteen_bits_hold_stay_within_the_stated_bound(levels: tuple[int, ...]) -> None:
    """Each level rounds them down once more."""
    exchange = Hierarchical(within=Dense(wire="bf16"), levels=levels)
    inputs = [
        1 + 2**-8 + 0.1 * torch.rand(50, generator=torch.Generator().manual_seed(r)) for r in range(count(levels))
    ]
    result = run_steps(exchange, [inputs])[0].results[0].to(torch.float64)
    exact = torch.stack(inputs).to(torch.float64).sum(0)
    bound = exchange.rounding(torch.float32, count(levels)).of_sum
    assert bool(((result - exact).abs() <= bound * exact).all())


@pytest.mark.parametrize("law", ["agreement", "identity", "honesty"])
@pytest.mark.parametrize("shape", ["leader", "sharded"])
def test_five_levels_keep_the_laws(shape: str, law: str) -> None:
    exchange = Hierarchical(levels=(2, 2, 2, 2, 2), shape=shape, chunks=2)
    LAWS[law](exchange, 32, 70, torch.float32, "cpu")


def test_five_levels_keep_what_feedback_keeps() -> None:
    exchange = Hierarchical(levels=(2, 2, 2, 2, 2), across=ErrorFeedback())
    LAWS["conservation"](exchange, 32, 3, torch.float32, "cpu")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", ["leader", "sharded"])
def test_laws_hold_for_buckets_of_other_types(shape: str, dtype: torch.dtype) -> None:
    exchange = Hierarchical(levels=(2, 2), shape=shape, chunks=2)
    for law in LAWS.values():
        law(exchange, 4, 33, dtype, "cpu")


@st.composite
def trees(draw: st.DrawFn) -> Any:
    """Draw a tree of three levels, with ranks in any order and groups of any sizes."""
    sizes = draw(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=2), min_size=2, max_size=3))
    order = iter(draw(st.permutations(range(sum(map(sum, sizes))))))
    return [[list(itertools.islice(order, size)) for size in rack] for rack in sizes]


@given(levels=trees(), shape=st.sampled_from(["leader", "sharded"]), chunks=st.integers(1, 5), numel=st.integers(1, 40))
@hypothesis_settings(max_examples=60, deadline=None)
def test_any_tree_gives_the_exact_sum_of_integers_on_all_ranks(
    levels: Any, shape: str, chunks: int, numel: int
) -> None:
    ranks = count(levels)
    exchange = Hierarchical(levels=levels, shape=shape, chunks=chunks)
    inputs = [
        torch.randint(-99, 99, (numel,), generator=torch.Generator().manual_seed(r)).float() for r in range(ranks)
    ]
    expected = torch.stack(inputs).sum(0)
    for ran in run_steps(exchange, [inputs, inputs]):
        assert torch.equal(ran.results[0], expected)
        assert torch.equal(ran.results[1], expected)


@pytest.mark.parametrize("levels", [UNEQUAL, SCRAMBLED])
@pytest.mark.parametrize("shape", ["auto", "leader", "sharded"])
def test_it_equals_plain_summation_to_rounding_and_is_bit_equal_on_all_ranks(shape: str, levels: Any) -> None:
    ranks = count(levels)
    inputs = [torch.randn(10_000, generator=torch.Generator().manual_seed(rank)) for rank in range(ranks)]
    flat = run_steps(Dense(), [inputs])[0].results[0]
    ran = run_steps(Hierarchical(levels=levels, shape=shape, chunks=3), [inputs])
    for mine in ran:
        assert torch.equal(mine.results[0], ran[0].results[0])
    assert float((ran[0].results[0] - flat).abs().max()) <= 1e-6 * float(flat.abs().max())


@pytest.mark.parametrize("within", ["bf16", "fp16"])
@pytest.mark.parametrize("across", ["fp32", "bf16", "fp16"])
def test_two_levels_stay_within_their_stated_bound(within: str, across: str) -> None:
    exchange = Hierarchical(within=Dense(wire=within), across=Dense(wire=across), levels=(2, 2), shape="sharded")
    for spread in (0.1, 3.0):
        generator = torch.Generator().manual_seed(3)
        inputs = [1 + spread * torch.rand(20_000, generator=generator) for _ in range(4)]
        exact = torch.stack(inputs).double()
        bound = exchange.rounding(torch.float32, 4)
        allowed = bound.of_sum * exact.abs().sum(0) + bound.of_largest * exact.abs().max() + bound.absolute
        error = (run_steps(exchange, [inputs])[0].results[0].double() - exact.sum(0)).abs()
        assert bool((error <= allowed).all()), float((error / allowed).max())


@pytest.mark.parametrize(
    ("levels", "shape", "expected"),
    [
        # Leaders: gloo's reduce of q chunks and its broadcast tree; across, 2(m−1) chunks of the whole bucket.
        ((2, 3), "leader", {"level1": 2 * 300 + 600, "level2": 2 * 2 * 200}),
        # Shards: one of q parts to each rank, and one back; across, 2(m−1) chunks of a part.
        ((2, 3), "sharded", {"level1": 2 * 300, "level2": 2 * 2 * 100}),
        ((2, 2, 2), "sharded", {"level1": 2 * 300, "level2": 2 * 150, "level3": 2 * 75}),
        (UNEQUAL, "sharded", {"level1": 3 * 200 + 2 * 600, "level2": 2 * 2 * 200}),
    ],
)
@pytest.mark.parametrize("chunks", [1, 3])
def test_bytes_by_hand(levels: Any, shape: str, expected: dict[str, int], chunks: int) -> None:
    ranks = count(levels)
    exchange = Hierarchical(levels=levels, shape=shape, chunks=chunks)
    ran = run_steps(exchange, [[torch.ones(600)] * ranks])
    for level, elements in expected.items():
        assert max(rank.sent_bytes.get(level, 0) for rank in ran) == pytest.approx(4 * elements, rel=0.03), level
        assert ran[0].predicted_bytes[level] == max(rank.sent_bytes.get(level, 0) for rank in ran)
    assert set(ran[0].predicted_bytes) == set(expected)


@pytest.mark.parametrize("levels", [UNEQUAL, SCRAMBLED])
@pytest.mark.parametrize("shape", ["leader", "sharded"])
def test_a_cost_lists_what_the_busiest_rank_issues_in_its_order(shape: str, levels: Any) -> None:
    """Rank 0 leads at every level, so it issues all collectives."""
    exchange = Hierarchical(levels=levels, shape=shape)
    ran = run_steps(exchange, [[torch.ones(240)] * count(levels)])
    cost = exchange.cost(240, torch.float32, place_ranks(exchange, count(levels)))
    assert [(phase.level.name, phase.kind) for phase in cost.phases] == [call[:2] for call in ran[0].calls]


# --- residuals --------------------------------------------------------------------------------------------------


def test_only_leaders_keep_what_crosses() -> None:
    exchange = Hierarchical(levels=UNEQUAL, shape="leader", across=ErrorFeedback(), chunks=2)
    inputs = [[torch.randn(20, generator=torch.Generator().manual_seed(rank)) for rank in range(6)]]
    ran = run_steps(exchange, inputs)
    for rank, mine in enumerate(ran):
        if rank in (0, 3, 4):
            assert mine.kept[0] is not None
            assert bool(mine.kept[0].any())
            assert mine.memory[0].keys() == {"flat/residual"}
        else:
            assert mine.kept[0] is None
            assert mine.memory[0] == {}


LAYOUT = Layout(
    (
        Slot("matrix", (3, 5), (5, 1), 0, 15),
        Slot("scalar", (), (), 15, 1),
        Slot("images", (2, 3, 2, 2), (12, 1, 6, 3), 16, 24),  # channels-last
        Slot("vector", (30,), (1,), 40, 30),
    ),
    torch.float32,
    torch.device("cpu"),
)


def given_to(rank: int, step: int) -> Tensor:
    return torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(100 * step + rank))


def run_on(exchange: Exchange, state: State, comm: LocalComm, steps: range) -> list[Tensor]:
    results = []
    for step in steps:
        flat = given_to(comm.rank, step)
        if (last := exchange.run(flat, state, comm)) is not None:
            last.wait()
        state.settle(torch.isfinite(flat).all())
        results.append(flat)
    return results


@pytest.mark.parametrize("levels", [UNEQUAL, (2, 2), SCRAMBLED])
@pytest.mark.parametrize("chunks", [1, 4])
def test_what_was_saved_and_loaded_goes_on_as_if_nothing_had_happened(levels: Any, chunks: int) -> None:
    exchange = Hierarchical(levels=levels, chunks=chunks, across=ErrorFeedback())

    def main(comm: LocalComm) -> None:
        whole = exchange.prepare(LAYOUT, comm)
        run_on(exchange, whole, comm, range(3))
        saved = {
            name: {kind: tensor.clone() for kind, tensor in kinds.items()}
            for name, kinds in whole.tensors(LAYOUT).items()
        }
        for name, kinds in saved.items():
            slot = next(slot for slot in LAYOUT.slots if slot.name == name)
            assert {kind: tuple(tensor.shape) for kind, tensor in kinds.items()} == {"residual": slot.shape}
        resumed = exchange.prepare(LAYOUT, comm)
        run_on(exchange, resumed, comm, range(90, 92))  # `load` must discard these steps
        resumed.load(LAYOUT, saved)
        for mine, theirs in zip(
            run_on(exchange, whole, comm, range(3, 6)), run_on(exchange, resumed, comm, range(3, 6)), strict=True
        ):
            assert torch.equal(mine, theirs)
        after, again = whole.kept(), resumed.kept()
        assert (after is None) == (again is None)
        assert after is None or (again is not None and torch.equal(after, again))

    run_ranks(place_ranks(exchange, count(levels)), main)


def test_saved_tensors_hold_all_that_is_kept_in_logical_shape() -> None:
    exchange = Hierarchical(levels=SCRAMBLED, chunks=3, across=ErrorFeedback())

    def main(comm: LocalComm) -> tuple[Tensor | None, dict[str, Tensor]]:
        state = exchange.prepare(LAYOUT, comm)
        run_on(exchange, state, comm, range(2))
        return state.kept(), {name: kinds["residual"].clone() for name, kinds in state.tensors(LAYOUT).items()}

    for kept, saved in run_ranks(place_ranks(exchange, 8), main):
        if kept is None:
            assert saved == {}
            continue
        for slot in LAYOUT.slots:
            logical = slot.view(kept)
            assert torch.equal(saved.get(slot.name, torch.zeros(slot.shape)), logical)


def test_loading_nothing_starts_anew() -> None:
    exchange = Hierarchical(levels=(2, 2), chunks=3, across=ErrorFeedback())

    def main(comm: LocalComm) -> None:
        state = exchange.prepare(LAYOUT, comm)
        run_on(exchange, state, comm, range(2))
        state.load(LAYOUT, {})
        kept = state.kept()
        assert (kept is not None) == (comm.rank in (0, 2))  # the leaders
        assert kept is None or not bool(kept.any())

    run_ranks(place_ranks(exchange, 4), main)


def test_a_lossless_exchange_keeps_nothing_and_has_nothing_to_settle() -> None:
    exchange = Hierarchical(levels=(2, 2), chunks=2)

    def main(comm: LocalComm) -> None:
        state = exchange.prepare(LAYOUT, comm)
        assert not state.settles
        assert state.kept() is None
        assert state.tensors(LAYOUT) == {}

    run_ranks(place_ranks(exchange, 4), main)


@given(numel=st.integers(1, 60), start=st.integers(0, 70), width=st.integers(1, 40), again=st.integers(0, 40))
@hypothesis_settings(max_examples=100, deadline=None)
def test_pieces_of_a_layout_cover_it_once_and_pad_the_rest(numel: int, start: int, width: int, again: int) -> None:
    slots, offset = [], 0
    for number, size in enumerate((numel, 7, 1)):
        slots.append(Slot(f"p{number}", (size,), (1,), offset, size))
        offset += size
    layout = Layout(tuple(slots), torch.float32, torch.device("cpu"))
    names = [slot.name for slot in slots for _ in range(slot.numel)]

    def named(piece: Layout) -> list[str]:
        assert [slot.offset for slot in piece.slots] == list(
            itertools.accumulate([0, *(slot.numel for slot in piece.slots)][: len(piece.slots)])
        )
        return [slot.name for slot in piece.slots for _ in range(slot.numel)]

    padded = [*names, *[""] * 200]
    piece = layout.piece(start, width)
    assert piece.numel == width
    assert named(piece) == padded[start : start + width]
    assert named(piece.piece(again, width)) == [*named(piece), *[""] * 200][again : again + width]


# --- refused settings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "trouble"),
    [
        ({"within": ErrorFeedback()}, "within must be a Dense exchange, for example Dense()"),
        ({"within": Dense}, "within must be a Dense exchange"),
        ({"within": "fp32"}, "within must be a Dense exchange"),
        ({"across": Dense}, "pass an exchange, for example Dense()"),
        ({"across": "bf16"}, "pass an exchange"),
        ({"across": None}, "pass an exchange"),
        ({"across": Hierarchical()}, "use one Hierarchical, with as many levels as you need"),
        ({"shape": "ring"}, "shape is one of auto, leader, sharded"),
        ({"shape": None}, "shape is one of auto, leader, sharded"),
        ({"shape": "leader", "within": Dense(wire="bf16")}, "leaders receive gradients in their own type"),
        ({"chunks": 0}, "Hierarchical(chunks=0): chunks must be from 1 to 1024"),
        ({"chunks": -1}, "chunks must be from 1 to 1024"),
        ({"chunks": True}, "Hierarchical(chunks=True): chunks must be from 1 to 1024"),
        ({"chunks": 5000}, "Hierarchical(chunks=5000): chunks must be from 1 to 1024"),
        ({"chunks": 2.0}, "chunks must be from 1 to 1024"),
        ({"chunks": "2"}, "chunks must be from 1 to 1024"),
    ],
)
def test_impossible_settings_are_refused_at_construction_in_one_line(fields: dict[str, Any], trouble: str) -> None:
    with pytest.raises(UsageError) as refused:
        Hierarchical(**fields)
    assert trouble in str(refused.value)
    assert "\n" not in str(refused.value)


def test_sixteen_bits_inside_need_groups_of_equal_size() -> None:
    exchange = Hierarchical(within=Dense(wire="bf16"), levels=UNEQUAL)
    with pytest.raises(UsageError, match=r"those of level1 have 1 and 2 and 3 ranks: use within=Dense\(\)") as refused:
        place_ranks(exchange, 6)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("options", [{"shape": "sharded"}, {"within": Dense(wire="bf16")}], ids=str)
def test_what_is_kept_may_not_change_hands(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="its residual must stay on one rank") as refused:
        Hierarchical(across=ErrorFeedback(), **options)
    assert "\n" not in str(refused.value)


def test_an_exchange_with_settings_that_can_change_is_refused() -> None:
    @dataclass(frozen=True)
    class Loose(ErrorFeedback):
        settings: list[int] = field(default_factory=list)

    with pytest.raises(UsageError, match="frozen dataclass"):
        Hierarchical(across=Loose())


@pytest.mark.parametrize(
    "levels", [torch.arange(4), "2,2", {0: 1}, object(), 4], ids=lambda levels: type(levels).__name__
)
def test_levels_of_other_kinds_are_refused_at_construction_in_one_line(levels: Any) -> None:
    with pytest.raises(UsageError, match="write sizes, like") as refused:
        Hierarchical(levels=levels)
    assert "\n" not in str(refused.value)


def test_levels_without_an_end_are_refused_at_construction() -> None:
    endless: list[Any] = [[0, 1]]
    endless.append(endless)
    with pytest.raises(UsageError, match="up to 16 levels"):
        Hierarchical(levels=endless)


@pytest.mark.parametrize("numel", [3, 9, 15])
def test_bytes_are_those_of_the_group_that_sends_most_in_all(numel: int) -> None:
    """With three elements, a group of two sends more than a group of three in a reduce, and less in a broadcast."""
    LAWS["honesty"](Hierarchical(levels=UNEQUAL, chunks=1), 6, numel, torch.float32, "cpu")


def test_levels_that_do_not_fit_are_refused_when_the_number_of_ranks_is_known() -> None:
    exchange = Hierarchical(levels=(2, 3))
    with pytest.raises(UsageError, match="its sizes multiply to 6 ranks, and there are 4"):
        place_ranks(exchange, 4)


# --- settings ---------------------------------------------------------------------------------------------------

VARIANTS = (
    Hierarchical(),
    Hierarchical(within=Dense(wire="bf16")),
    Hierarchical(across=Dense(wire="bf16")),
    Hierarchical(across=ErrorFeedback()),
    Hierarchical(shape="leader"),
    Hierarchical(shape="sharded"),
    Hierarchical(levels=(2, 2)),
    Hierarchical(levels=[[0, 1], [2, 3]]),
    Hierarchical(levels=[[0, 2], [1, 3]]),
    Hierarchical(chunks=1),
    Hierarchical(chunks=2),
)


def test_settings_are_json_and_tell_any_two_apart() -> None:
    texts = [json.dumps(settings(exchange), sort_keys=True) for exchange in VARIANTS]
    assert len(set(texts)) == len(VARIANTS)
    assert msgspec.json.decode(msgspec.json.encode(settings(VARIANTS[0]))) == {
        "type": "Hierarchical",
        "within": {"type": "Dense", "wire": "fp32"},
        "across": {"type": "Dense", "wire": "fp32"},
        "shape": "auto",
        "levels": None,
        "chunks": None,
    }


def test_lists_and_tuples_of_levels_are_one_setting() -> None:
    listed, frozen = Hierarchical(levels=[[0, 1], [2, 3]]), Hierarchical(levels=((0, 1), (2, 3)))
    assert listed == frozen
    assert hash(listed) == hash(frozen)
    assert settings(listed) == settings(frozen)


@pytest.mark.parametrize("exchange", VARIANTS)
def test_it_is_lossless_where_both_of_its_parts_are(exchange: Hierarchical) -> None:
    assert exchange.lossless == (exchange.within.lossless and exchange.across.lossless)


# --- choice of a path -------------------------------------------------------------------------------------------

LARGE, TINY = 16_000_000, 500
HOST_BY_HOST = (0, 0, 0, 0, 1, 1, 1, 1)
ROUND_ROBIN = (0, 1) * 4


def way_of(exchange: Hierarchical, numel: int, network: Network) -> Any:
    return exchange.path(numel, torch.float32, topology_of(network))


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize(("hosts", "per_host"), [(4, 1), (1, 4)])
def test_one_rank_per_host_or_one_host_is_flat(hosts: int, per_host: int, backend: str) -> None:
    network = assumed_network(hosts, per_host, 1_000_000_000, backend)
    for numel in (TINY, LARGE):
        for exchange in VARIANTS[:6]:
            assert str(way_of(exchange, numel, network)) == "flat"


def test_flat_sends_across_what_hosts_have_and_within_what_one_host_has() -> None:
    exchange = Hierarchical(across=Dense(wire="bf16", roundings="two"))
    apart, together = (topology_of(assumed_network(*size, 1_000_000_000, "gloo")) for size in ((4, 1), (1, 4)))
    assert [phase.itemsize for phase in exchange.cost(LARGE, torch.float32, apart).phases] == [2, 2]
    assert [phase.itemsize for phase in exchange.cost(LARGE, torch.float32, together).phases] == [4]


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_scrambled_order_is_climbed(backend: str) -> None:
    network = assumed_links(ROUND_ROBIN, 1_000_000_000, backend)
    assert way_of(Hierarchical(), LARGE, network).shapes


@pytest.mark.parametrize("exchange", [VARIANTS[1], VARIANTS[2], VARIANTS[3], VARIANTS[4], VARIANTS[5]])
@pytest.mark.parametrize("numel", [1, TINY, LARGE])
def test_an_explicit_shape_and_a_lossy_part_are_never_flat(exchange: Hierarchical, numel: int) -> None:
    """A flat path would also lose values between ranks of one host."""
    network = assumed_network(2, 2, 34_000_000_000, "nccl").with_rate(100_000_000, "local")
    assert str(way_of(Hierarchical(), LARGE, network)) == "flat"
    way = way_of(exchange, numel, network)
    assert len(way.shapes) == 1
    assert exchange.shape in ("auto", *way.shapes)


def test_tiny_buckets_go_in_one_piece_and_large_ones_in_several() -> None:
    network = assumed_links(ROUND_ROBIN, 1_000_000_000, "gloo")
    for shape in ("auto", "leader", "sharded"):
        assert way_of(Hierarchical(shape=shape), TINY, network).chunks == 1
        assert way_of(Hierarchical(shape=shape), LARGE, network).chunks > 1


@pytest.mark.parametrize("chunks", [1, 3, 1024])
def test_as_many_chunks_as_were_asked_for(chunks: int) -> None:
    network = assumed_links(ROUND_ROBIN, 1_000_000_000, "gloo")
    for numel in (TINY, LARGE):
        assert way_of(Hierarchical(shape="sharded", chunks=chunks), numel, network).chunks == chunks


def test_local_links_slower_than_uplinks_make_it_flat() -> None:
    network = assumed_links(HOST_BY_HOST, 10_000_000_000, "gloo")
    assert way_of(Hierarchical(), LARGE, network.with_rate(1_000_000_000)).shapes
    assert not way_of(Hierarchical(), LARGE, network.with_rate(100_000_000, "local")).shapes


def test_start_ups_alone_may_make_it_flat() -> None:
    """Two start-ups per level take longer than one if all are equal and bytes cost nothing."""
    network = made_up_network((0, 0, 1, 1), mbit=1e7, startup_s=0.1)
    assert way_of(Hierarchical(), TINY, network) == way_of(Hierarchical(), TINY, network)
    assert str(way_of(Hierarchical(), TINY, network)) == "flat"


def test_the_way_taken_is_the_cheapest_of_all() -> None:
    for network in (
        assumed_links(ROUND_ROBIN, 1_000_000_000, "gloo"),
        assumed_links(HOST_BY_HOST, 10_000_000_000, "nccl"),
        made_up_network((0, 0, 1, 1, 2, 2), rack_of_host=(0, 0, 1), trunk_mbit=200.0, startup_s=1e-4),
    ):
        place = topology_of(network)
        assert place.seconds is not None
        for numel in (TINY, 100_000, LARGE):
            auto = place.seconds(Hierarchical().cost(numel, torch.float32, place))
            for shape, chunks in itertools.product(("leader", "sharded"), (1, 2, 4, 8, 16, 32)):
                if chunks > 1 and numel * 4 // chunks < 1 << 16:
                    continue  # the exchange does not consider such small chunks
                fixed = Hierarchical(shape=shape, chunks=chunks).cost(numel, torch.float32, place)
                assert auto <= place.seconds(fixed) * (1 + 1e-9), (shape, chunks, numel)
            assert auto <= place.seconds(Dense().cost(numel, torch.float32, place)) * (1 + 1e-9)


def test_the_choice_is_the_same_every_time_and_on_every_rank() -> None:
    for numel in (TINY, 100_000, 1_000_003, LARGE):
        ways = [way_of(Hierarchical(), numel, assumed_links(ROUND_ROBIN, 1_000_000_000, "gloo")) for _ in range(3)]
        assert ways[0] == ways[1] == ways[2]


def test_without_knowledge_of_links_it_climbs_in_one_piece() -> None:
    for levels in (UNEQUAL, SCRAMBLED):
        exchange = Hierarchical(levels=levels)
        path = exchange.path(LARGE, torch.float32, topology(levels))
        assert path.chunks == 1
        assert set(path.shapes) == {"leader"}


def test_unequal_levels_take_leaders_and_equal_ones_what_was_asked_for() -> None:
    levels = [[[0, 1], [2, 3]], [[4, 5]]]  # hosts of equal size, racks of unequal size
    way = Hierarchical(levels=levels, shape="sharded").path(TINY, torch.float32, topology(levels))
    assert way.shapes == ("sharded", "leader")


def test_a_state_tells_which_way_its_bucket_goes() -> None:
    exchange = Hierarchical(levels=[[[0, 1], [2, 3]], [[4, 5]]], shape="sharded", chunks=3)
    said = run_ranks(place_ranks(exchange, 6), lambda comm: exchange.prepare(Layout.flat(100), comm).describe())
    assert said == ["sharded, then leader, in 3 chunks"] * 6


def test_what_was_priced_is_what_runs() -> None:
    """The path, the bytes and the number of chunks agree, on links for which the path is not trivial."""
    network = assumed_links(ROUND_ROBIN[:4], 1_000_000_000, "gloo")
    place = topology_of(network)
    exchange = Hierarchical()
    cost = exchange.cost(300_000, torch.float32, place)
    ran = run_steps(exchange, [[torch.ones(300_000)] * 4], topology=place)
    assert bool((ran[0].results[0] == 4).all())
    assert cost.chunks == exchange.path(300_000, torch.float32, place).chunks > 1
    assert ran[0].predicted_bytes == cost.sent_bytes
    for level, sent in cost.sent_bytes.items():
        assert max(rank.sent_bytes[level] for rank in ran) == sent


# --- order of collectives ---------------------------------------------------------------------------------------


def issued(exchange: Exchange, ranks: int, numel: int = 120) -> list[list[tuple[Any, Any]]]:
    """Return level and kind of the collectives that each rank issues."""
    ran = run_steps(exchange, [[torch.ones(numel)] * ranks])
    return [[(call[0], call[1]) for call in rank.calls] for rank in ran]


def test_a_chunk_is_reduced_inside_before_anyone_waits_for_the_one_that_crosses() -> None:
    exchange = Hierarchical(levels=(2, 2), shape="leader", chunks=3)
    up, over, down = ("level1", "reduce"), ("level2", "all_reduce"), ("level1", "broadcast")
    calls = issued(exchange, 4)
    assert calls[0] == [up, up, over, up, over, down, over, down, down]
    assert calls[1] == [up, up, up, down, down, down]
    # The first broadcast follows the wait for the first all-reduce. By then a second chunk is reduced.
    assert calls[0].index(down) > [place for place, call in enumerate(calls[0]) if call == up][1]


def test_shards_climb_one_behind_the_other_too() -> None:
    exchange = Hierarchical(levels=(2, 2), shape="sharded", chunks=3)
    up, over, down = ("level1", "all_to_all"), ("level2", "all_reduce"), ("level1", "all_gather")
    for calls in issued(exchange, 4):
        assert calls == [up, up, over, up, over, down, over, down, down]


@pytest.mark.parametrize("levels", [UNEQUAL, SCRAMBLED, (2, 2, 2)])
@pytest.mark.parametrize("shape", ["leader", "sharded"])
@pytest.mark.parametrize("chunks", [2, 3, 7])
def test_all_ranks_of_a_group_issue_in_one_order(levels: Any, shape: str, chunks: int) -> None:
    exchange = Hierarchical(levels=levels, shape=shape, chunks=chunks)
    calls = issued(exchange, count(levels), 84)
    for level in Tree.given(levels, count(levels)).levels:
        for group in level.groups:
            if len(group) > 1:
                mine = [[call for call in calls[rank] if call[0] == level.name] for rank in group]
                assert all(theirs == mine[0] for theirs in mine)


def test_no_more_chunks_are_under_way_than_there_are_steps_to_take() -> None:
    """The first chunk is complete, and its buffers are free, before the fourth one starts."""
    calls = issued(Hierarchical(levels=(2, 2), shape="leader", chunks=8), 4)[0]
    under_way = most = 0
    for _, kind in calls:
        under_way += {"reduce": 1, "broadcast": -1}.get(kind, 0)
        most = max(most, under_way)
    assert under_way == 0
    assert most == 3


def test_a_bucket_smaller_than_its_chunks_has_fewer() -> None:
    exchange = Hierarchical(levels=(2, 2), shape="sharded", chunks=100)
    place = place_ranks(exchange, 4)
    assert exchange.cost(5, torch.float32, place).chunks == 3
    assert dataclasses.replace(exchange, shape="leader").cost(5, torch.float32, place).chunks == 5
