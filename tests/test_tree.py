"""Trees of ranks, detected or written by a user, and the groups at each of their levels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.errors import UsageError
from syncline.exchange import Level, Tree

law = settings(max_examples=150, deadline=None)


def groups(tree: Tree) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return the groups by level."""
    return {level.name: level.groups for level in tree.levels}


# --- detected ---------------------------------------------------------------------------------------------------


def test_ranks_of_a_host_meet_and_so_do_ranks_of_the_same_place_on_each_host() -> None:
    tree = Tree.of_hosts([0, 0, 1, 1, 2, 2])
    assert groups(tree) == {"local": ((0, 1), (2, 3), (4, 5)), "hosts": ((0, 2, 4), (1, 3, 5))}


def test_a_scrambled_order_of_ranks_changes_who_is_where_and_nothing_else() -> None:
    tree = Tree.of_hosts([0, 1, 2, 0, 1, 2])
    assert groups(tree) == {"local": ((0, 3), (1, 4), (2, 5)), "hosts": ((0, 1, 2), (3, 4, 5))}


def test_unequal_hosts_are_represented_by_their_first_ranks_alone() -> None:
    tree = Tree.of_hosts([0, 0, 0, 1, 2, 2])
    assert groups(tree) == {"local": ((0, 1, 2), (3,), (4, 5)), "hosts": ((0, 3, 4),)}


def test_hosts_that_appear_late_lead_with_their_smallest_rank() -> None:
    tree = Tree.of_hosts([1, 1, 0, 1, 0])
    assert groups(tree) == {"local": ((0, 1, 3), (2, 4)), "hosts": ((0, 2),)}


def test_one_host_has_nobody_to_meet_outside() -> None:
    assert groups(Tree.of_hosts([0, 0, 0])) == {"local": ((0, 1, 2),), "hosts": ((0,), (1,), (2,))}


def test_one_rank_per_host_has_nobody_to_meet_inside() -> None:
    assert groups(Tree.of_hosts([0, 1, 2])) == {"local": ((0,), (1,), (2,)), "hosts": ((0, 1, 2),)}


def test_hosts_of_a_rack_meet_before_racks_do() -> None:
    tree = Tree.of_hosts([0, 0, 1, 1, 2, 2, 3, 3], [0, 0, 1, 1])
    assert groups(tree) == {
        "local": ((0, 1), (2, 3), (4, 5), (6, 7)),
        "hosts": ((0, 2), (1, 3), (4, 6), (5, 7)),
        "racks": ((0, 4), (1, 5), (2, 6), (3, 7)),
    }


def test_racks_of_unequal_numbers_of_hosts_still_divide_what_their_hosts_divide() -> None:
    """The only host of the second rack takes part in the level of racks with each of its ranks."""
    tree = Tree.of_hosts([0, 0, 1, 1, 2, 2], [0, 0, 1])
    assert groups(tree)["hosts"] == ((0, 2), (1, 3), (4,), (5,))
    assert groups(tree)["racks"] == ((0, 4), (1, 5))


def test_hosts_that_take_turns_in_racks() -> None:
    tree = Tree.of_hosts([0, 1, 2, 3], [0, 1, 0, 1])
    assert groups(tree)["hosts"] == ((0, 2), (1, 3))
    assert groups(tree)["racks"] == ((0, 1), (2, 3))


@pytest.mark.parametrize("racks", [(), (0, 0), (5, 5)])
def test_one_rack_is_no_level(racks: tuple[int, ...]) -> None:
    assert Tree.of_hosts([0, 1, 1], racks) == Tree.of_hosts([0, 1, 1])


# --- written by a user ------------------------------------------------------------------------------------------


def test_sizes_count_from_the_inside_out() -> None:
    tree = Tree.given((2, 3), 6)
    assert groups(tree) == {"level1": ((0, 1), (2, 3), (4, 5)), "level2": ((0, 2, 4), (1, 3, 5))}
    assert tree == Tree.given([[0, 1], [2, 3], [4, 5]], 6)


def test_a_single_size_is_one_level_of_everyone() -> None:
    assert groups(Tree.given([4], 4)) == {"level1": ((0, 1, 2, 3),)}


def test_sizes_of_one_are_levels_at_which_nobody_meets() -> None:
    assert groups(Tree.given((1, 2, 1), 2)) == {"level1": ((0,), (1,)), "level2": ((0, 1),), "level3": ((0,), (1,))}


def test_three_nested_levels() -> None:
    tree = Tree.given([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], 8)
    assert tree == Tree.given((2, 2, 2), 8)
    assert groups(tree) == {
        "level1": ((0, 1), (2, 3), (4, 5), (6, 7)),
        "level2": ((0, 2), (1, 3), (4, 6), (5, 7)),
        "level3": ((0, 4), (1, 5), (2, 6), (3, 7)),
    }


def test_groups_are_in_the_order_of_ranks_however_they_were_written() -> None:
    assert groups(Tree.given([[3, 0], [1, 2]], 4)) == {"level1": ((0, 3), (1, 2)), "level2": ((0, 1), (2, 3))}


def test_lists_and_tuples_mean_the_same() -> None:
    assert Tree.given([(0, 1), [2, 3]], 4) == Tree.given(((0, 1), (2, 3)), 4)


# --- properties of all trees ------------------------------------------------------------------------------------


@st.composite
def nested(draw: st.DrawFn, most: int = 3, deepest: int = 4) -> tuple[Any, int]:
    """Draw nested lists of equal depth, with ranks in any order, and the number of ranks."""
    depth = draw(st.integers(1, deepest))
    sizes = [draw(st.none() | st.integers(1, most)) for _ in range(depth)]
    sizes[-1] = sizes[-1] or draw(st.integers(2, most))  # at least two ranks
    count = itertools.count()

    def build(height: int) -> Any:
        if height < 0:
            return next(count)
        size = sizes[height] or draw(st.integers(1, most))
        return [build(height - 1) for _ in range(size)]

    built = build(depth - 1)
    ranks = next(count)
    order = draw(st.permutations(range(ranks)))

    def renumbered(unit: Any) -> Any:
        return order[unit] if isinstance(unit, int) else [renumbered(child) for child in unit]

    built = renumbered(built)
    if depth == 1 and all(isinstance(entry, int) for entry in built):
        built = [built]  # bare numbers would be sizes
    return built, ranks


def units_at(tree: Tree) -> list[list[Any]]:
    """Return the lists of each level, from the inside out."""
    found: list[list[Any]] = [[tree.root]]
    while not isinstance(found[0][0][0], int):
        found.insert(0, [child for unit in found[0] for child in unit])
    return found


def ranks_in(unit: Any) -> Iterator[int]:
    if isinstance(unit, int):
        yield unit
    else:
        for child in unit:
            yield from ranks_in(child)


def places(levels: tuple[Level, ...]) -> list[dict[int, int]]:
    """Return the position of each rank in its group, by level."""
    return [{rank: place for group in level.groups for place, rank in enumerate(group)} for level in levels]


@given(made=nested())
@law
def test_no_rank_is_in_two_groups_of_a_level_and_all_are_in_one_of_the_innermost(made: tuple[Any, int]) -> None:
    lists, ranks = made
    tree = Tree.given(lists, ranks)
    for level in tree.levels:
        members = [rank for group in level.groups for rank in group]
        assert len(members) == len(set(members))
        assert all(group == tuple(sorted(group)) for group in level.groups)
    assert sorted(rank for group in tree.levels[0].groups for rank in group) == list(range(ranks))


@given(made=nested())
@law
def test_innermost_groups_are_the_lists_themselves(made: tuple[Any, int]) -> None:
    tree = Tree.given(*made)
    assert tree.levels[0].groups == tuple(tuple(sorted(unit)) for unit in units_at(tree)[0])


@given(made=nested())
@law
def test_each_group_holds_one_rank_of_every_list_that_meets_there(made: tuple[Any, int]) -> None:
    tree = Tree.given(*made)
    for level, units in zip(tree.levels, units_at(tree), strict=True):
        left = list(level.groups)
        for unit in units:
            inside = set(ranks_in(unit))
            mine = [group for group in left if set(group) <= inside]
            assert mine
            for group in mine:
                left.remove(group)
                assert len(group) == len(unit)
                for child in unit:
                    assert len(set(ranks_in(child)) & set(group)) == 1
        assert not left


@given(made=nested())
@law
def test_ranks_that_meet_hold_the_same_part(made: tuple[Any, int]) -> None:
    """They have the same position in their groups at every level below, and the first one where groups are unequal."""
    tree = Tree.given(*made)
    stands = places(tree.levels)
    for height, level in enumerate(tree.levels):
        for group in level.groups:
            held = {tuple(stands[below][rank] for below in range(height)) for rank in group}
            assert len(held) == 1
            for place, below in zip(held.pop(), tree.levels, strict=False):
                assert below.equal or place == 0


@given(made=nested())
@law
def test_every_part_of_a_list_has_a_group_of_its_own(made: tuple[Any, int]) -> None:
    tree = Tree.given(*made)
    parts = 1
    for level, units in zip(tree.levels, units_at(tree), strict=True):
        assert len(level.groups) == parts * len(units)
        parts *= level.ranks if level.equal else 1


@given(made=nested())
@law
def test_leaders_of_leaders_are_one_group_per_list(made: tuple[Any, int]) -> None:
    """If every level has leaders, a group consists of the first rank of each list."""
    tree = Tree.given(*made)
    levels = list(tree.levels)
    for height in range(len(levels)):
        assert len(levels[height].groups) == len(units_at(tree)[height])
        levels[height + 1 :] = [level.led_by(levels[height]) for level in levels[height + 1 :]]


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4))
@law
def test_sizes_are_the_sizes_of_groups(sizes: list[int]) -> None:
    ranks = 1
    for size in sizes:
        ranks *= size
    tree = Tree.given(sizes, ranks)
    assert [level.sizes for level in tree.levels] == [[size] for size in sizes]
    assert all(len(level.groups) * size == ranks for level, size in zip(tree.levels, sizes, strict=True))


@given(hosts=st.lists(st.integers(0, 3), min_size=1, max_size=12))
@law
def test_found_trees_are_given_ones_with_other_names(hosts: list[int]) -> None:
    lists = [[rank for rank, at in enumerate(hosts) if at == host] for host in dict.fromkeys(hosts)]
    found, written = Tree.of_hosts(hosts), Tree.given(lists, len(hosts))
    assert [level.groups for level in found.levels] == [level.groups for level in written.levels]


# --- as text ----------------------------------------------------------------------------------------------------


def test_a_description_shows_who_sits_where() -> None:
    assert Tree.of_hosts([0, 0, 0, 1, 2, 2]).describe().splitlines() == [
        "6 ranks in 3 hosts",
        "├─ host 0: ranks 0–2",
        "├─ host 1: rank 3",
        "└─ host 2: ranks 4–5",
    ]


def test_a_description_indents_what_is_inside() -> None:
    assert Tree.of_hosts([0, 1, 2, 0, 1, 2], [0, 0, 1]).describe().splitlines() == [
        "6 ranks in 3 hosts in 2 racks",
        "├─ rack 0",
        "│  ├─ host 0: ranks 0, 3",
        "│  └─ host 1: ranks 1, 4",
        "└─ rack 1",
        "   └─ host 2: ranks 2, 5",
    ]


def test_a_long_description_says_how_many_more_there_are() -> None:
    lines = Tree.of_hosts(range(15)).describe().splitlines()
    assert lines[0] == "15 ranks in 15 hosts"
    assert lines[-2:] == ["├─ host 10: rank 10", "└─ and 4 more"]
    assert len(lines) == 1 + 12


def test_what_just_fits_is_shown_whole() -> None:
    lines = Tree.of_hosts(range(12)).describe().splitlines()
    assert len(lines) == 1 + 12
    assert lines[-1] == "└─ host 11: rank 11"


def test_one_host_and_one_level_are_described_too() -> None:
    assert Tree.of_hosts([0, 0]).describe() == "2 ranks in 1 host\n└─ host 0: ranks 0–1"
    assert Tree.given((2, 2), 4).describe().splitlines()[0] == "4 ranks in 2 groups"
    assert Tree.given((4,), 4).describe() == "4 ranks"


# --- refused input ----------------------------------------------------------------------------------------------


def own_member() -> list[Any]:
    endless: list[Any] = [[0, 1]]
    endless.append(endless)
    return endless


def nested_so_deep(depth: int) -> Any:
    return [0, 1] if depth == 1 else [nested_so_deep(depth - 1)]


@pytest.mark.parametrize(
    ("levels", "trouble"),
    [
        ((), "write sizes, like (4, 2), or nested lists of ranks"),
        ([], "write sizes"),
        ("2,2", "write sizes"),
        (4, "write sizes"),
        ({0: [1, 2]}, "write sizes"),
        ([[0, 1], [2]], "each of the ranks 0 to 3 once"),
        ([[0, 1], [2, 4]], "each of the ranks 0 to 3 once"),
        ([[0, 1], [2, -3]], "each of the ranks 0 to 3 once"),
        ([[0, 1], [1, 2, 3]], "each of the ranks 0 to 3 once"),
        ([[0, 1], [2, 3, 3]], "each of the ranks 0 to 3 once"),
        ([[0, 1], [2, True]], "True is neither a number nor a list of numbers"),
        ((True, 4), "True is neither a number nor a list of numbers"),
        ([[0, 1], [2, 3.0]], "3.0 is neither a number"),
        ([["0", "1"], ["2", "3"]], "'0' is neither a number"),
        ([[0, 1], "23"], "'23' is neither a number"),
        ([[0, 1], [], [2, 3]], "[] is neither a number"),
        ([[0, 1], None], "None is neither a number"),
        ([[0, 1], 2, 3], "nested equally deep"),
        ([[[0], [1]], [2, 3]], "nested equally deep"),
        ((2, 3), "its sizes multiply to 6 ranks, and there are 4"),
        ((2,), "its sizes multiply to 2 ranks, and there are 4"),
        ((4, 0), "sizes must be at least 1; to list ranks, nest the lists"),
        ((-2, -2), "sizes must be at least 1; to list ranks, nest the lists"),
        ((4, *(1,) * 16), "up to 16 levels"),
    ],
)
def test_levels_that_fit_nothing_are_refused_in_one_line(levels: Any, trouble: str) -> None:
    with pytest.raises(UsageError) as refused:
        Tree.given(levels, 4)
    text = str(refused.value)
    assert trouble in text
    assert text.startswith("levels=")
    assert "\n" not in text


@pytest.mark.parametrize("levels", [nested_so_deep(17), nested_so_deep(30), own_member()])
def test_lists_too_deep_or_endless_are_refused_in_one_line(levels: Any) -> None:
    with pytest.raises(UsageError, match="up to 16 levels") as refused:
        Tree.given(levels, 2)
    assert "\n" not in str(refused.value)


def test_sixteen_levels_are_not_too_deep() -> None:
    assert len(Tree.given(nested_so_deep(16), 2).levels) == 16


def test_a_refusal_of_something_long_stays_short() -> None:
    with pytest.raises(UsageError) as refused:
        Tree.given([list(range(1000))], 4)
    assert len(str(refused.value)) < 200


def test_units_keep_their_numbers_behind_those_that_are_not_shown() -> None:
    lines = Tree.of_hosts(range(30), [host // 15 for host in range(30)]).describe().splitlines()
    assert lines[13] == "│  └─ and 4 more"
    assert lines[15] == "   ├─ host 15: rank 15"


def test_a_refusal_is_one_line_whatever_was_given() -> None:
    with pytest.raises(UsageError) as refused:
        Tree.given(np.arange(400).reshape(20, 20), 400)
    assert "\n" not in str(refused.value)


def test_more_sizes_than_levels_there_may_be_are_refused() -> None:
    with pytest.raises(UsageError, match="up to 16 levels"):
        Tree.given((1,) * 5000 + (4,), 4)
