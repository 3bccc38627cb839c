"""Selection of large entries: the CPU against sorting, CUDA against the CPU, and damaged slots.

Run as a script, this compares the CUDA kernels with the CPU's in Triton's interpreter, and prints the differences as
JSON.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from oktopk_oracle import KINDS, Plain, largest, made, region_of
from syncline.errors import ExchangeError
from syncline.kernels import VALUES, Kernels, Slots, kernels_for
from syncline.kernels.cpu import CpuKernels

pytestmark = pytest.mark.usefixtures("interpreter")
settings = functools.partial(hypothesis_settings, deadline=None, derandomize=True)

TYPES = (torch.bfloat16, torch.float16, torch.float32)


# --- ranks in one process without a Comm ------------------------------------------------------------------------


@dataclass
class Seen:
    """The slots, sums, results and residuals of one step, by rank."""

    slots: list[Tensor]
    sums: list[Tensor]
    gathered: Tensor
    flats: list[Tensor]
    kept: list[Tensor]
    velocity: list[Tensor]
    flags: list[Tensor]
    finite: list[bool]


class World:
    """As many ranks as there are regions. Slots are reused in the next step without being cleared, and the residuals
    lie between guard areas, which must stay zero."""

    def __init__(self, slots: Slots, make: Callable[[], Kernels], device: str = "cpu") -> None:
        self.slots = slots
        ranks = range(slots.regions)
        self.kernels = [make() for _ in ranks]
        self._memory = torch.zeros(slots.regions, 2, 4, slots.numel, device=device)
        self.kept, self.velocity = self._memory[:, 0, 1:3], self._memory[:, 1, 1:3]
        self.flags = torch.full((slots.regions, slots.numel), 7, dtype=torch.int8, device=device)
        self.turns = [torch.zeros((), dtype=torch.int32, device=device) for _ in ranks]
        self.sent = torch.full((slots.regions, slots.regions, slots.bytes), 0xAB, dtype=torch.uint8, device=device)
        self.picked = torch.full((slots.regions, slots.bytes), 0xAB, dtype=torch.uint8, device=device)

    def step(self, gradients: Sequence[Tensor], ratio: float | None = None, share: float = 1.0) -> Seen:
        ranks, device, dtype = range(self.slots.regions), self.sent.device, gradients[0].dtype
        factor = None if ratio is None else torch.tensor(ratio, device=device)
        flats = [gradient.to(device, copy=True) for gradient in gradients]
        for rank in ranks:
            self.velocity[rank, 1 - int(self.turns[rank])] = 1.0
            self.kernels[rank].pack(flats[rank], share, self.kept[rank], self.turns[rank], factor, self.sent[rank])
            assert not bool(flats[rank].any()), "the bucket must be cleared"
        sums = []
        for rank in ranks:
            sums.append(self.kernels[rank].total(self.sent[:, rank].contiguous()).clone())
            self.kernels[rank].select(rank, self.kept[rank], self.turns[rank], dtype, self.picked[rank])
        finite = []
        for rank in ranks:
            finite.append(bool(self.kernels[rank].spread(self.picked.clone(), flats[rank])))
            kept, velocity, turn = self.kept[rank], self.velocity[rank], self.turns[rank]
            self.kernels[rank].release(flats[rank], kept, turn, velocity, self.flags[rank])
            self.turns[rank] = 1 - self.turns[rank]
        assert self.guarded(), "something was written outside of the residuals"
        return Seen(
            [slot.cpu().clone() for slot in self.sent],
            [total.cpu() for total in sums],
            self.picked.cpu().clone(),
            [flat.cpu() for flat in flats],
            [self.kept[rank, int(self.turns[rank])].cpu().clone() for rank in ranks],
            [self.velocity[rank, int(self.turns[rank])].cpu().clone() for rank in ranks],
            [flags.cpu().clone() for flags in self.flags],
            finite,
        )

    def guarded(self) -> bool:
        return not bool(self._memory[:, :, 0].any()) and not bool(self._memory[:, :, 3].any())


def decoded(slot: Tensor, slots: Slots, region: int) -> tuple[Tensor, Tensor]:
    """Return positions in the bucket and values of the entries of one slot."""
    words = slot.view(torch.int16)
    positions, first = [], slots.places_at
    for cell, count in enumerate(words[1 : 1 + slots.cells].tolist()):
        for place in words[first : first + count].tolist():
            positions.append((cell * slots.regions + region) * slots.cell + place)
        first += count
    found = first - slots.places_at
    if slots.values == torch.float32:
        return torch.tensor(positions, dtype=torch.int64), slot.view(torch.float32)[slots.values_at // 2 :][:found]
    values = words[slots.values_at :][:found].view(slots.values).to(torch.float32)
    return torch.tensor(positions, dtype=torch.int64), values * 2.0 ** -int(words[0])


def dense_region(flat: Tensor, slots: Slots, region: int) -> Tensor:
    """Return the cells of one region, concatenated, with zeros beyond the end of the bucket."""
    whole = torch.zeros(slots.cells * slots.regions * slots.cell)
    whole[: slots.numel] = flat
    return whole.view(slots.cells, slots.regions, slots.cell)[:, region].reshape(-1)


@st.composite
def any_slots(draw: st.DrawFn) -> Slots:
    """Draw slots, some of which no density gives: few cells or many, or more entries than a region has elements."""
    regions, cell = draw(st.integers(1, 7)), draw(st.sampled_from([1, 32, 64, 256]))
    numel = draw(st.integers(1, min(1600, cell * regions * 12)))
    entries = draw(st.integers(1, 2 + numel // regions))
    return Slots(numel, regions, entries, cell, draw(st.sampled_from(TYPES)))


# --- on the CPU -------------------------------------------------------------------------------------------------


@given(
    slots=any_slots(),
    steps=st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from([-20, 0, 20])), min_size=1, max_size=3),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float64]),
    ratio=st.sampled_from([None, None, 1.0, 0.5, 4.0, 0.3]),
    share=st.sampled_from([1.0, 0.5, 1 / 3]),
    contributors=st.booleans(),
    seed=st.integers(0, 999),
)
@settings(max_examples=150)
def test_slots_sums_and_what_is_kept_are_those_of_plain_sorting(
    slots: Slots,
    steps: list[tuple[str, int]],
    dtype: torch.dtype,
    ratio: float | None,
    share: float,
    contributors: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    world = World(slots, lambda: CpuKernels(slots, contributors=contributors))
    plain = Plain(slots, dtype, contributors=contributors)
    for kind, octaves in steps:
        gradients = [(made(kind, slots, generator) * 2.0**octaves).to(dtype) for _ in range(slots.regions)]
        seen = world.step(gradients, ratio, share)
        expected = plain.step(gradients, 1.0 if ratio is None else ratio, share)
        for rank in range(slots.regions):
            for region in range(slots.regions):
                where, values = decoded(seen.slots[rank][region], slots, region)
                assert torch.equal(where, expected.sent[rank][region][0])
                assert torch.equal(values, expected.sent[rank][region][1])
            assert torch.equal(seen.sums[rank], dense_region(expected.sums, slots, rank))
            where, values = decoded(seen.gathered[rank], slots, rank)
            assert torch.equal(where, expected.picked[rank][0])
            assert torch.equal(values, expected.picked[rank][1])
            assert torch.equal(seen.flats[rank], expected.applied)
            assert torch.equal(seen.kept[rank], plain.kept[rank])
            released = plain_released(expected.sent[rank], expected.applied)
            assert torch.equal(seen.velocity[rank] == 0, released)
            assert torch.equal(seen.flags[rank].view(torch.bool), released)
        assert all(seen.finite)


def plain_released(sent: list[tuple[Tensor, Tensor]], applied: Tensor) -> Tensor:
    """Return a mask of the entries that a rank sent and that were applied."""
    released = torch.zeros(applied.numel(), dtype=torch.bool)
    for where, _ in sent:
        released[where] = applied[where] != 0
    return released


@given(
    slots=any_slots(),
    before=st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from([-40, -20, 0, 20, 40])), min_size=1, max_size=4),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 999),
)
@settings(max_examples=150)
def test_what_is_selected_does_not_depend_on_what_was_selected_before(
    slots: Slots, before: list[tuple[str, int]], kind: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    used, turn = CpuKernels(slots), torch.zeros((), dtype=torch.int32)

    def packed(kernels: Kernels, gradient: Tensor) -> Tensor:
        rows = torch.zeros(slots.regions, slots.bytes, dtype=torch.uint8)
        kernels.pack(gradient.clone(), 1.0, torch.zeros(2, slots.numel), turn, None, rows)
        return rows

    for earlier, octaves in before:
        packed(used, made(earlier, slots, generator) * 2.0**octaves)
    gradient = made(kind, slots, generator)
    assert torch.equal(packed(used, gradient), packed(CpuKernels(slots), gradient))


@pytest.mark.parametrize("values", TYPES)
@pytest.mark.parametrize("numel", [300_001, 131_072])
def test_buckets_that_are_read_in_several_pieces_are_sorted_as_one(values: torch.dtype, numel: int) -> None:
    slots = Slots.of(numel, 3, 0.001, values)
    assert slots is not None
    assert slots.cell == 1 << 13
    generator = torch.Generator().manual_seed(numel)
    world, plain = World(slots, lambda: CpuKernels(slots)), Plain(slots)
    for octaves in (0, -20, 20):
        gradients = [made("heavy-tailed", slots, generator) * 2.0**octaves for _ in range(3)]
        seen, expected = world.step(gradients), plain.step(gradients)
        assert torch.equal(seen.flats[1], expected.applied)
        for rank in range(3):
            assert torch.equal(seen.kept[rank], plain.kept[rank])


def test_the_largest_cells_hold_places_up_to_their_end() -> None:
    slots = Slots.of(2 * 32768 + 1000, 2, 0.0005, torch.bfloat16)
    assert slots is not None
    assert slots.cell == 1 << 14
    slots = Slots(2 * 32768 + 1000, 2, 40, 1 << 15, torch.bfloat16)
    gradient = torch.zeros(slots.numel)
    edges = torch.tensor([0, 32767, 32768, 65535, 65536, slots.numel - 1])
    gradient[edges] = 1.0
    seen = World(slots, lambda: CpuKernels(slots)).step([gradient, gradient])
    assert torch.equal(seen.flats[0], 2 * gradient)
    assert not bool(seen.kept[0].any())


@given(
    slots=any_slots(), seed=st.integers(0, 999), limit=st.sampled_from([1, 8, 300, 1 << 16]), steps=st.integers(1, 4)
)
@settings(max_examples=60)
def test_integers_are_conserved_exactly_whatever_they_travel_in(
    slots: Slots, seed: int, limit: int, steps: int
) -> None:
    """16 bits hold the leading bits of an integer, so the rounding error is an integer too."""
    generator = torch.Generator().manual_seed(seed)
    world, came_in, applied = World(slots, lambda: CpuKernels(slots)), torch.zeros(slots.numel), 0
    for _ in range(steps):
        gradients = [
            torch.randint(-limit, limit + 1, (slots.numel,), generator=generator).float() for _ in range(slots.regions)
        ]
        came_in += torch.stack(gradients).sum(0)
        seen = world.step(gradients)
        applied = applied + seen.flats[0]
        assert torch.equal(applied + torch.stack(seen.kept).sum(0), came_in)


def test_the_first_of_equal_entries_are_selected() -> None:
    slots = Slots(400, 2, 10, 32, torch.float32)
    seen = World(slots, lambda: CpuKernels(slots)).step([torch.ones(400), -torch.ones(400)])
    for region in (0, 1):
        assert decoded(seen.slots[0][region], slots, region)[0].tolist() == list(range(32 * region, 32 * region + 10))


def test_entries_whose_keys_are_equal_count_as_equal_and_the_next_key_as_more() -> None:
    slots = Slots(64, 1, 2, 32, torch.float32)
    gradient = torch.zeros(64)
    gradient[[5, 9, 40, 60]] = torch.tensor([1.0, 1.0624, 1.0625, -1.0])  # sixteen keys per octave
    seen = World(slots, lambda: CpuKernels(slots)).step([gradient])
    assert decoded(seen.slots[0][0], slots, 0)[0].tolist() == [5, 40]


def test_the_smallest_magnitudes_that_have_a_key_are_selected_and_those_below_never() -> None:
    slots = Slots(64, 1, 64, 32, torch.float32)
    gradient = torch.zeros(64)
    gradient[7], gradient[8] = 2.0**-130, 2.0**-131
    seen = World(slots, lambda: CpuKernels(slots)).step([gradient])
    assert seen.flats[0].nonzero().flatten().tolist() == [7]
    assert seen.kept[0].nonzero().flatten().tolist() == [8]


def test_a_region_is_summed_in_the_order_of_ranks_in_fp32() -> None:
    slots = Slots(64, 3, 8, 32, torch.float32)
    big, tiny = torch.zeros(64), torch.zeros(64)
    big[3], tiny[3] = 2.0**24, 1.0  # adding 1 is lost to rounding, adding 2 is not
    for order, expected in (([big, tiny, tiny], 2.0**24), ([tiny, tiny, big], 2.0**24 + 2)):
        seen = World(slots, lambda: CpuKernels(slots)).step(order)
        assert seen.sums[0][3] == expected
        assert all(flat[3] == expected for flat in seen.flats)


@pytest.mark.parametrize("values", TYPES)
@pytest.mark.parametrize("dtype", TYPES)
def test_an_owner_keeps_what_casting_its_sums_loses(values: torch.dtype, dtype: torch.dtype) -> None:
    slots = Slots(64, 2, 8, 32, values)
    gradients = [torch.zeros(64), torch.zeros(64)]
    gradients[0][40] = 1.0
    gradients[1][40] = 2.0**-6 + 2.0**-8  # the sum needs more bits than bf16 has, and fewer than fp16 has
    seen = World(slots, lambda: CpuKernels(slots)).step([gradient.to(dtype) for gradient in gradients])
    applied = seen.flats[0][40].float()
    assert applied == (1.0 + 2.0**-6 if torch.bfloat16 in (values, dtype) else 1.0 + 2.0**-6 + 2.0**-8)
    assert seen.kept[1][40] == 1.0 + 2.0**-6 + 2.0**-8 - applied  # rank 1 owns region 1
    assert not bool(seen.kept[0].any())


def test_what_a_rank_s_own_cast_loses_stays_with_it() -> None:
    slots = Slots(64, 2, 8, 32, torch.bfloat16)
    gradients = [torch.zeros(64), torch.zeros(64)]
    gradients[0][40] = 1.0 + 2.0**-12
    seen = World(slots, lambda: CpuKernels(slots)).step(gradients)
    assert seen.flats[1][40] == 1.0
    assert seen.kept[0][40] == 2.0**-12
    assert seen.kept[1][40] == 0.0


@pytest.mark.parametrize("values", TYPES)
def test_a_sum_that_the_bucket_s_type_cannot_hold_waits_where_it_is(values: torch.dtype) -> None:
    slots = Slots(64, 2, 8, 32, values)
    gradient = torch.zeros(64, dtype=torch.float16)
    gradient[50] = 2.0**-24
    world = World(slots, lambda: CpuKernels(slots))
    world.kept[0, 0, 10] = 2.0**-30
    seen = world.step([gradient, gradient])
    assert seen.flats[0][50] == 2.0**-23
    assert seen.flats[0][10] == 0.0
    assert seen.kept[0][10] == 2.0**-30
    assert seen.kept[1][10] == 0.0


def test_what_fp16_cannot_hold_beside_the_largest_is_kept() -> None:
    slots = Slots(64, 2, 8, 32, torch.float16)
    gradient = torch.zeros(64)
    gradient[3], gradient[4] = 1e30, 1.0
    seen = World(slots, lambda: CpuKernels(slots)).step([gradient, torch.zeros(64)])
    assert seen.flats[0][3] == pytest.approx(1e30, rel=2**-10)
    assert seen.flats[0][4] == 0.0
    assert seen.kept[0][4] == 1.0
    assert seen.finite == [True, True]


@pytest.mark.parametrize("values", TYPES)
@pytest.mark.parametrize("scale", [1e-36, 1e-20, 1.0, 1e20, 1e36])
def test_values_of_any_size_travel_with_their_type_s_precision(values: torch.dtype, scale: float) -> None:
    slots = Slots(640, 2, 60, 32, values)
    generator = torch.Generator().manual_seed(1)
    gradients = [made("normal", slots, generator) * scale for _ in range(2)]
    seen = World(slots, lambda: CpuKernels(slots)).step(gradients)
    for rank in (0, 1):
        for region in (0, 1):
            where, sent = decoded(seen.slots[rank][region], slots, region)
            assert len(where) == 60
            error = (sent - gradients[rank][where]).abs()
            assert bool((error <= torch.finfo(values).eps / 2 * gradients[rank][where].abs()).all())


@pytest.mark.parametrize("values", TYPES)
@pytest.mark.parametrize("culprit", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_goes_before_everything_else_and_is_seen_by_all(values: torch.dtype, culprit: float) -> None:
    slots = Slots(600, 3, 5, 32, values)
    generator = torch.Generator().manual_seed(2)
    for place in (0, 299, 599):
        gradients = [made("heavy-tailed", slots, generator) for _ in range(3)]
        gradients[1][place] = culprit
        seen = World(slots, lambda: CpuKernels(slots)).step(gradients)
        assert seen.finite == [False] * 3
        assert all(not bool(flat[place].isfinite()) for flat in seen.flats)


def test_a_sum_that_is_too_large_for_the_bucket_s_type_is_not_finite() -> None:
    slots = Slots(64, 2, 8, 32, torch.bfloat16)
    gradient = torch.zeros(64, dtype=torch.float16)
    gradient[40] = 40_000.0
    assert World(slots, lambda: CpuKernels(slots)).step([gradient, gradient]).finite == [False, False]


@pytest.mark.parametrize("ratio", [0.5, 1.0, 8.0, 2.0**-20, 0.3])
def test_what_was_kept_is_scaled_before_the_gradient_is_added(ratio: float) -> None:
    slots = Slots(100, 1, 3, 32, torch.float32)
    generator = torch.Generator().manual_seed(3)
    kept = torch.stack([made("normal", slots, generator), torch.zeros(100)])
    before, gradient = kept[0].clone(), made("normal", slots, generator)
    rows = torch.zeros(1, slots.bytes, dtype=torch.uint8)
    turn = torch.zeros((), dtype=torch.int32)
    CpuKernels(slots).pack(gradient.clone(), 1.0, kept, turn, torch.tensor(ratio), rows)
    assert torch.equal(kept[0], before)  # unchanged until the step is applied
    assert torch.equal(kept[1], before * torch.tensor(ratio) + gradient)
    where, values = decoded(rows[0], slots, 0)
    assert torch.equal(where, largest(kept[1], torch.arange(100), 3))
    assert torch.equal(values, kept[1][where])


def test_cells_are_dealt_to_regions_like_cards() -> None:
    slots = Slots(330, 3, 200, 32, torch.float32)
    seen = World(slots, lambda: CpuKernels(slots)).step([torch.ones(330)] * 3)
    for region in range(3):
        where, _ = decoded(seen.slots[0][region], slots, region)
        assert torch.equal(where, (region_of(slots) == region).nonzero().flatten())
        assert [int(first) // 32 for first in where[::32]] == list(range(region, 11, 3))


def test_kernels_are_found_by_device() -> None:
    assert isinstance(kernels_for(Slots(64, 1, 2, 32, torch.float32), torch.device("cpu")), CpuKernels)


# --- slots ------------------------------------------------------------------------------------------------------


@given(
    numel=st.integers(1, 10**8),
    regions=st.integers(1, 64),
    density=st.floats(1e-6, 1.0),
    values=st.sampled_from(TYPES),
)
@settings(max_examples=300)
def test_slots_have_room_for_the_density_and_words_for_every_place(
    numel: int, regions: int, density: float, values: torch.dtype
) -> None:
    slots = Slots.of(numel, regions, density, values)
    selected = int(density * numel)
    if slots is None:
        assert selected < 8 * regions
        return
    assert selected >= 8 * regions
    assert selected <= slots.entries * regions < selected + regions
    assert slots.cell & (slots.cell - 1) == 0
    assert slots.cell <= 1 << 15  # a place is 16 bits
    assert slots.cells * slots.regions * slots.cell >= numel > (slots.regions - 1) * slots.cell  # no region is empty
    assert 1 + slots.cells <= slots.places_at
    assert slots.places_at + slots.entries <= slots.values_at
    assert slots.values_at % 2 == 0  # fp32 values lie on their own boundaries
    assert slots.bytes == 2 * slots.words
    assert slots.bytes % 4 == 0
    assert slots.words >= slots.values_at + slots.entries * values.itemsize // 2


@pytest.mark.parametrize("regions", [2, 4, 16, 64])
@pytest.mark.parametrize("density", [0.003, 0.1])
def test_regions_of_a_large_bucket_have_their_share_of_it(regions: int, density: float) -> None:
    slots = Slots.of(4_000_037, regions, density, torch.bfloat16)
    assert slots is not None
    owned = torch.bincount(region_of(slots), minlength=regions)
    assert int(owned.max()) - int(owned.min()) <= slots.cell
    assert int(owned.min()) > 0.9 * 4_000_037 / regions


# --- damaged slots ----------------------------------------------------------------------------------------------

ODD = Slots(141, 2, 20, 32, torch.float32)
"""The last cell of region 0 is partly beyond the end of the bucket, and that of region 1 completely."""


def packed(slots: Slots, seed: int = 0) -> Tensor:
    """Return valid slots, as two ranks send them to an owner, or two owners to all ranks."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.zeros(slots.regions, slots.bytes, dtype=torch.uint8)
    turn = torch.zeros((), dtype=torch.int32)
    CpuKernels(slots).pack(made("normal", slots, generator), 1.0, torch.zeros(2, slots.numel), turn, None, rows)
    return rows


def with_words(rows: Tensor, row: int, words: dict[int, int]) -> Tensor:
    changed = rows.clone()
    for place, word in words.items():
        changed[row].view(torch.int16)[place] = word
    return changed


BEHIND = "a place behind the bucket"
"""The first place beyond the bucket in region 0. The valid places depend on the region, so `select` checks it."""

_COUNTS = range(1, 1 + ODD.cells)

DEFECTS = {
    "more entries in a cell than in a slot": {1: ODD.entries + 1},
    "more entries in a cell than it has elements": {1: ODD.cell + 1},
    "as many entries as words can say": dict.fromkeys(_COUNTS, -1),
    "more entries in all than there is room for": {1: ODD.entries},
    "one entry more than there is room for, all of them alike": {
        **dict.fromkeys(range(ODD.words), 0),
        1: ODD.entries + 1,
    },
    "a place behind its cell": {ODD.places_at: ODD.cell},
    "a place before its cell": {ODD.places_at: -1},
    BEHIND: {**dict.fromkeys(_COUNTS, 0), ODD.cells: 1, ODD.places_at: ODD.numel % ODD.cell},
}
"""Words that replace others, by name of the defect."""


def damaged(defect: str) -> Tensor:
    """Return slots of which the second has this defect."""
    return with_words(packed(ODD), 1, DEFECTS[defect])


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_damaged_slot_is_refused_before_anything_is_written(defect: str) -> None:
    flat = torch.zeros(ODD.numel)
    with pytest.raises(ExchangeError, match="a region's owner sent") as refused:
        CpuKernels(ODD).spread(damaged(defect), flat)
    assert "\n" not in str(refused.value)
    assert not bool(flat.any())


def test_the_last_element_of_a_bucket_is_the_last_that_an_owner_may_send() -> None:
    cell, last = (ODD.numel - 1) // ODD.cell // ODD.regions, (ODD.numel - 1) % ODD.cell
    empty, flat = torch.zeros(ODD.regions, ODD.bytes, dtype=torch.uint8), torch.zeros(ODD.numel)
    rows = with_words(empty, 0, {1 + cell: 1, ODD.places_at: last, ODD.values_at + 1: 0x3F80})
    CpuKernels(ODD).spread(rows, flat)
    assert flat.nonzero().flatten().tolist() == [ODD.numel - 1]
    with pytest.raises(ExchangeError, match=f"entry {ODD.numel} of a bucket of {ODD.numel}"):
        CpuKernels(ODD).spread(with_words(rows, 0, {ODD.places_at: last + 1}), flat)


def test_a_cell_cannot_have_more_entries_than_elements_however_many_a_slot_has() -> None:
    slots = Slots(64, 1, 60, 32, torch.float32)
    rows = with_words(torch.zeros(1, slots.bytes, dtype=torch.uint8), 0, {1: 33})
    with pytest.raises(ExchangeError):
        CpuKernels(slots).spread(rows, torch.zeros(64))


@pytest.mark.parametrize("defect", [defect for defect in DEFECTS if defect != BEHIND])
def test_a_damaged_slot_is_not_summed_and_its_sender_is_named(defect: str) -> None:
    with pytest.raises(ExchangeError, match="rank 1 sent"):
        CpuKernels(ODD).total(damaged(defect))


@pytest.mark.parametrize("rank", [0, 1])
def test_an_entry_behind_the_bucket_is_refused_by_the_owner_of_its_region(rank: int) -> None:
    kernels, kept, turn = CpuKernels(ODD), torch.zeros(2, ODD.numel), torch.zeros((), dtype=torch.int32)
    with pytest.raises(ExchangeError) as refused:
        kernels.total(damaged(BEHIND))
        kernels.select(rank, kept, turn, torch.float32, torch.zeros(ODD.bytes, dtype=torch.uint8))
    assert "\n" not in str(refused.value)
    assert not bool(kept.any())


@given(
    values=st.sampled_from(TYPES),
    words=st.dictionaries(st.integers(0, 63), st.integers(-(1 << 15), (1 << 15) - 1), max_size=4),
    small=st.dictionaries(st.integers(0, 63), st.integers(0, 40), max_size=4),
    rank=st.integers(0, 1),
    seed=st.integers(0, 9),
)
@settings(max_examples=200)
def test_slots_with_any_words_in_them_are_refused_or_valid(
    values: torch.dtype, words: dict[int, int], small: dict[int, int], rank: int, seed: int
) -> None:
    slots = Slots(ODD.numel, ODD.regions, ODD.entries, ODD.cell, values)
    changed = {place % slots.words: word for place, word in {**words, **small}.items()}
    rows = with_words(packed(slots, seed), rank, changed)
    check_refused_or_valid(slots, rows, rank)


@given(noise=st.binary(min_size=2 * ODD.bytes, max_size=2 * ODD.bytes), rank=st.integers(0, 1), blank=st.booleans())
@settings(max_examples=100)
def test_slots_of_noise_are_refused_or_valid(noise: bytes, rank: int, blank: bool) -> None:
    rows = torch.frombuffer(bytearray(noise), dtype=torch.uint8).view(2, ODD.bytes)
    if blank:  # small counts, so that more than the first count is checked
        rows.view(torch.int16)[:, 1 : 1 + ODD.cells] %= 4
    check_refused_or_valid(ODD, rows, rank)


def check_refused_or_valid(slots: Slots, rows: Tensor, rank: int) -> None:
    flat = torch.zeros(slots.numel)
    try:
        finite = CpuKernels(slots).spread(rows, flat)
    except ExchangeError:
        assert not bool(flat.any())
    else:
        entries = [decoded(row, slots, region) for region, row in enumerate(rows)]
        where = torch.cat([positions for positions, _ in entries])
        assert set(flat.nonzero().flatten().tolist()) <= set(where.tolist())
        assert bool(finite) == bool(torch.cat([values for _, values in entries]).isfinite().all())
    kernels, turn = CpuKernels(slots), torch.zeros((), dtype=torch.int32)
    try:
        kernels.total(rows)
        kernels.select(rank, torch.zeros(2, slots.numel), turn, torch.float32, slot := torch.zeros_like(rows[0]))
    except ExchangeError:
        return
    where, _ = decoded(slot, slots, rank)
    assert len(where) == 0 or int(where.max()) < slots.numel


# --- on CUDA: the same bits -------------------------------------------------------------------------------------


Make = Callable[[Slots, bool], Kernels]
"""Returns kernels for slots, with or without `contributors`."""


@dataclass(frozen=True)
class Case:
    """Steps to run, each with a kind of data, octaves by which it is larger, and the factor for the residual. `share`
    is the factor for the gradients. `contributors`: sums are scaled by the number of ranks that sent each entry."""

    slots: Slots
    steps: tuple[tuple[str, int, float | None], ...]
    dtype: torch.dtype = torch.float32
    share: float = 1 / 3
    contributors: bool = False


CASES = {
    "bf16 values": Case(
        Slots(1501, 2, 38, 256, torch.bfloat16), (("normal", 0, None), ("heavy-tailed", 0, 2.0), ("equal", 1, 0.3))
    ),
    "fp32 values, three ranks": Case(
        Slots(701, 3, 100, 128, torch.float32), (("heavy-tailed", 0, None), ("denormal", 0, 2.0**-126))
    ),
    "fp32 values, full cells, guesses far too high and far too low": Case(
        Slots(1100, 2, 22, 256, torch.float32),
        (("normal", 20, None), ("the first cell", 20, None), ("zero", 0, 2.0**-30), ("normal", 20, None)),
    ),
    "cells that are looked at in parts": Case(
        Slots(17_001, 2, 60, 8192, torch.float16), (("few magnitudes", 0, None), ("heavy-tailed", 0, None))
    ),
    "bf16 buckets": Case(
        Slots(1003, 2, 25, 256, torch.bfloat16), (("few magnitudes", 0, None), ("integers", 0, None)), torch.bfloat16
    ),
    "fp16 buckets, fp32 values, sums too small for them": Case(
        Slots(1003, 2, 25, 256, torch.float32), (("normal", 0, None), ("one non-zero", 0, 2.0**-25)), torch.float16
    ),
    "fp16 buckets, fp16 values": Case(
        Slots(1003, 2, 25, 256, torch.float16), (("the end", 0, None), ("one non-zero", 0, 0.5)), torch.float16
    ),
    "contributors, bf16 values": Case(
        Slots(1501, 2, 38, 256, torch.bfloat16),
        (("normal", 0, None), ("heavy-tailed", 0, 0.95), ("equal", 1, 0.95)),
        contributors=True,
    ),
    "contributors, fp16 values, bf16 buckets, full cells": Case(
        Slots(1103, 3, 40, 128, torch.float16),
        (("normal", 0, None), ("the first cell", 0, 0.95), ("few magnitudes", 0, None)),
        torch.bfloat16,
        contributors=True,
    ),
    "contributors, fp32 values": Case(
        Slots(701, 2, 30, 128, torch.float32), (("heavy-tailed", 0, None), ("denormal", 0, 0.95)), contributors=True
    ),
}

LARGE = {
    f"a large bucket, {values}": Case(
        Slots(1_000_003, 3, 9000, cell, values),
        (
            ("heavy-tailed", 0, None),
            ("few magnitudes", 0, None),
            ("normal", -20, 2.0**-20),
            ("the first cell", 0, None),
        ),
    )
    for values, cell in ((torch.bfloat16, 32), (torch.float16, 1024), (torch.float32, 1 << 15))
}
LARGE |= {f"{name}, contributors": dataclasses.replace(case, contributors=True) for name, case in LARGE.items()}
"""Cases that are too large for the interpreter."""


def shortened(case: Case) -> Case:
    """Return the case with as few cells as possible, for the interpreter: one region has two, and the last is short."""
    slots = case.slots
    numel = min(slots.numel, (slots.regions + 1) * slots.cell + 5)
    return dataclasses.replace(case, slots=dataclasses.replace(slots, numel=numel))


def difference(case: Case, make: Make, device: str) -> str:
    """Describe the first difference from the CPU kernels; return an empty string if all bits are the same."""
    slots = case.slots
    generator = torch.Generator().manual_seed(slots.numel)
    contributors = case.contributors
    reference = World(slots, lambda: CpuKernels(slots, contributors=contributors))
    world = World(slots, lambda: make(slots, contributors), device)
    for number, (kind, octaves, ratio) in enumerate(case.steps):
        gradients = [(made(kind, slots, generator) * 2.0**octaves).to(case.dtype) for _ in range(slots.regions)]
        ours, theirs = (ranks.step(gradients, ratio, case.share) for ranks in (reference, world))
        for what in ("slots", "sums", "gathered", "flats", "kept", "velocity", "flags"):
            for rank, (mine, other) in enumerate(zip(getattr(ours, what), getattr(theirs, what), strict=True)):
                unequal = mine.view(torch.uint8) != other.view(torch.uint8)
                if bool(unequal.any()):
                    return f"step {number} ({kind}), rank {rank}: {int(unequal.sum())} bytes of {what} differ"
        if ours.finite != theirs.finite:
            return f"step {number} ({kind}): {theirs.finite} where the CPU says {ours.finite}"
    return ""


def harm(rows: Tensor, make: Make, device: str) -> str:
    """Describe the harm that damaged slots do: a step that is applied, or a write outside of the buffers."""
    return ", ".join(harm_by(kernels, rows, device) for kernels in (make(ODD, False), make(ODD, True))).strip(", ")


def harm_by(kernels: Kernels, rows: Tensor, device: str) -> str:
    found = []
    memory = torch.zeros(3 * ODD.numel, device=device)
    flat, beside = memory[ODD.numel : 2 * ODD.numel], memory.view(3, ODD.numel)[::2]
    if bool(kernels.spread(rows.to(device), flat)):
        found.append("a result that counts")
    if bool(flat.isfinite().all()):
        found.append("a finite result")
    if bool((beside != 0).any()):
        found.append("a result beside the bucket")
    for rank in range(ODD.regions):
        memory = torch.zeros(4, ODD.numel, device=device)
        turn = torch.zeros((), dtype=torch.int32, device=device)
        slot = torch.zeros(ODD.bytes, dtype=torch.uint8, device=device)
        kernels.total(torch.stack([packed(ODD)[rank], rows[1]]).to(device))
        kernels.select(rank, memory[1:3], turn, torch.bfloat16, slot)
        if bool((memory[::3] != 0).any()):
            found.append(f"something beside what rank {rank} keeps")
    return ", ".join(found)


def not_finite(make: Make, device: str) -> str:
    slots = Slots(300, 2, 5, 128, torch.bfloat16)
    for culprit in (float("nan"), -float("inf")):
        gradients = [torch.ones(300), torch.ones(300)]
        gradients[1][299] = culprit
        seen = World(slots, lambda: make(slots, False), device).step(gradients)
        if any(seen.finite) or bool(seen.flats[0][299].isfinite()):
            return f"{culprit} passes for a number"
    return ""


def carried(device: str) -> str:
    """Check the prefix sums over cells when there are more cells than fit into one block."""
    from syncline.kernels import cuda

    generator = torch.Generator().manual_seed(0)
    cells, room = 2500, 3000
    above, ties = (torch.randint(4, (cells,), generator=generator, dtype=torch.int32) for _ in range(2))
    taken = (ties.cumsum(0).clamp(max=room) - (ties.cumsum(0) - ties).clamp(max=room)).to(torch.int32)
    count = above + taken
    starts = (count.cumsum(0) - count).to(torch.int32)
    number = functools.partial(torch.full, (1,), dtype=torch.int32, device=device)
    found, words = torch.zeros(cells, dtype=torch.int32, device=device), torch.zeros(cells + 1, dtype=torch.int16)
    left, words = ties.to(device), words.to(device)
    cuda._deal[(1,)](
        above.to(device), left, number(room), number(0), found, words, cells + 1, cells, HALF=False, BLOCK=1024
    )
    if not (torch.equal(left.cpu(), taken) and torch.equal(words[1:].cpu(), count.to(torch.int16))):
        return "entries are dealt to other cells"
    if not torch.equal(found.cpu(), starts):
        return "cells start elsewhere in what is sent"
    cuda._offsets[(1,)](words, again := torch.zeros_like(found), number(0), cells + 1, cells, BLOCK=1024)
    return "" if torch.equal(again.cpu(), starts) else "cells start elsewhere in what was received"


def report(make: Make, device: str) -> dict[str, str]:
    """Run all checks and return what is wrong, by check; empty strings if nothing is."""
    short = {name: shortened(case) for name, case in CASES.items()}
    cases = short if device == "cpu" else {**CASES, **LARGE}
    return {
        **{name: difference(case, make, device) for name, case in cases.items()},
        **{defect: harm(damaged(defect), make, device) for defect in DEFECTS},
        "not a number": not_finite(make, device),
        "many cells": carried(device),
    }


CHECKS = [*CASES, *DEFECTS, "not a number", "many cells"]


@pytest.mark.parametrize("check", CHECKS)
def test_interpreted_cuda_kernels_give_the_bits_of_the_cpu_s_and_damage_does_no_harm(
    check: str, interpreted: dict[str, str]
) -> None:
    assert interpreted[check] == ""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("check", [*CHECKS, *LARGE])
def test_cuda_kernels_give_the_bits_of_the_cpu_s_and_damage_does_no_harm(check: str, on_cuda: dict[str, str]) -> None:
    assert on_cuda[check] == ""


@pytest.fixture(scope="module")
def on_cuda() -> dict[str, str]:
    pytest.importorskip("triton")
    return report(lambda slots, counted: kernels_for(slots, torch.device("cuda"), contributors=counted), "cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_steps_that_are_replayed_give_the_bits_of_the_cpu_s(values: torch.dtype) -> None:
    pytest.importorskip("triton")
    slots = Slots.of(60_001, 3, 0.02, values)
    assert slots is not None
    on_cpu, on_cuda = (Rehearsal(slots, torch.device(device)) for device in ("cpu", "cuda"))
    with torch.cuda.stream(torch.cuda.Stream()):
        for step in range(6):
            gradients = [
                torch.randn(slots.numel, generator=torch.Generator().manual_seed(10 * step + rank))
                for rank in range(slots.regions)
            ]
            there = [tensor.cpu() for tensor in on_cuda.step(gradients)]
            for mine, theirs in zip(on_cpu.step(gradients), there, strict=True):
                assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)), step
    assert on_cuda.replays == 5 * slots.regions


class Rehearsal:
    """All ranks of an exchange in one process, with the same tensors in every step."""

    def __init__(self, slots: Slots, device: torch.device) -> None:
        ranks = range(slots.regions)
        self.kernels = [kernels_for(slots, device) for _ in ranks]
        self.flats = [torch.zeros(slots.numel, device=device) for _ in ranks]
        self.kept = [torch.zeros(2, slots.numel, device=device) for _ in ranks]
        self.turn = torch.zeros((), dtype=torch.int32, device=device)
        self.ratio = torch.ones((), device=device)
        self.mine, self.theirs = (
            torch.zeros(slots.regions, slots.regions, slots.bytes, dtype=torch.uint8, device=device) for _ in range(2)
        )
        self.picked = torch.zeros(slots.regions, slots.bytes, dtype=torch.uint8, device=device)

    def step(self, gradients: list[Tensor]) -> list[Tensor]:
        """Run a step and return each rank's result and residual."""
        for rank, (kernels, flat) in enumerate(zip(self.kernels, self.flats, strict=True)):
            flat.copy_(gradients[rank])
            kernels.pack(flat, 0.25, self.kept[rank], self.turn, self.ratio, self.mine[rank])
        self.theirs.copy_(self.mine.transpose(0, 1))
        for rank, kernels in enumerate(self.kernels):
            kernels.total(self.theirs[rank])
            kernels.select(rank, self.kept[rank], self.turn, torch.float32, self.picked[rank])
        for rank, (kernels, flat) in enumerate(zip(self.kernels, self.flats, strict=True)):
            assert bool(kernels.spread(self.picked, flat))
            kernels.release(flat, self.kept[rank], self.turn)
        self.turn.bitwise_xor_(torch.ones((), dtype=torch.bool, device=self.turn.device))
        self.ratio.mul_(0.5)
        return [*self.flats, *self.kept]

    @property
    def replays(self) -> int:
        """Number of kernel sequences that are replayed as a graph."""
        names = ("pack", "total", "select", "spread", "release")
        return sum(getattr(one, f"_to_{name}")._graph is not None for one in self.kernels for name in names)


def main() -> None:
    from syncline.kernels.cuda import CudaKernels

    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    print(json.dumps(report(lambda slots, counted: CudaKernels(slots, cpu, contributors=counted), "cpu")))


if __name__ == "__main__":
    main()
