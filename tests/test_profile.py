"""Profile files: loading, saving, validation and scaling; and measured profiles."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from syncline.errors import UsageError
from syncline.files import FileError
from syncline.measure.backward import measure_backward
from syncline.models.replay import ReplayModel
from syncline.records.profile import (
    ITEM_BYTES,
    Buffers,
    Gradient,
    Overheads,
    Profile,
    RankTimes,
    Spread,
    Work,
    load_profile,
    shipped_profiles,
)

loose = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def gradient(name: str, shape: tuple[int, ...], ready_s: float, dtype: str = "float32") -> Gradient:
    return Gradient(name=name, shape=shape, dtype=dtype, bytes=math.prod(shape) * ITEM_BYTES[dtype], ready_s=ready_s)


def profile(*gradients: Gradient) -> Profile:
    return Profile(
        model="made up",
        gradients=gradients,
        forward_s=0.002,
        backward_s=0.008,
        update_s=0.001,
        device="cpu",
        where="nowhere",
        how="by hand",
        steps=3,
        batch=None,
    )


PROFILE = profile(
    gradient("head.weight", (10, 8), 0.001),
    gradient("head.bias", (10,), 0.001),
    gradient("body.0.weight", (8, 3, 3), 0.004, "bfloat16"),
    gradient("scale", (), 0.006),
)
RICH = msgspec.structs.replace(
    PROFILE,
    buffers=(Buffers(dtype="float32", bytes=64), Buffers(dtype="int64", bytes=8), Buffers(dtype="bool", bytes=3)),
    ranks=(
        RankTimes(rank=0, forward_s=0.002, backward_s=0.008, update_s=0.001),
        RankTimes(rank=3, forward_s=0.003, backward_s=0.009, update_s=0.001),
    ),
    spread=Spread(low_s=0.010, high_s=0.012),
    jitter_s=0.0005,
    overheads=Overheads(
        copy_in_s_per_byte=1e-10,
        copy_out_s_per_byte=2e-10,
        hook_s=1e-5,
        work={"dense": Work(fixed_s=0.0, s_per_byte=0.0), "bf16": Work(fixed_s=1e-5, s_per_byte=5e-10)},
    ),
)
"""A profile with all optional fields."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "profile.json"


def edited(path: Path, place: str, **changes: Any) -> Path:
    """Write the valid profile with keys changed at the top level or in one gradient."""
    tree = msgspec.to_builtins(PROFILE)
    target = tree if place == "" else tree["gradients"][int(place)]
    target.update(changes)
    path.write_text(json.dumps(tree), encoding="utf-8")
    return path


OPTIONAL = ("buffers", "ranks", "spread", "jitter_s", "overheads")


def places(tree: Any, so_far: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Yield the path to every value of a JSON tree, including inner nodes."""
    branches = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    found = [so_far] if so_far else []
    return found + [place for key, branch in branches for place in places(branch, (*so_far, key))]


RICH_TREE = json.loads(json.dumps(msgspec.to_builtins(RICH)))
PLACES = places({key: RICH_TREE[key] for key in OPTIONAL})


def edited_rich(path: Path, place: tuple[str | int, ...], value: Any) -> Path:
    """Write the profile with all fields, with one value changed at any depth."""
    tree = json.loads(json.dumps(RICH_TREE))
    target = tree
    for key in place[:-1]:
        target = target[key]
    target[place[-1]] = value
    path.write_text(json.dumps(tree), encoding="utf-8")
    return path


def test_a_saved_profile_loads_as_itself(path: Path) -> None:
    PROFILE.save(path)
    assert Profile.load(path) == PROFILE
    assert load_profile(path) == PROFILE


def test_a_profile_of_several_ranks_with_overheads_loads_as_itself(path: Path) -> None:
    RICH.save(path)
    assert Profile.load(path) == RICH


def test_a_file_without_the_optional_fields_loads_with_their_defaults(path: Path) -> None:
    tree = msgspec.to_builtins(PROFILE)
    for field in OPTIONAL:
        del tree[field]
    path.write_text(json.dumps(tree), encoding="utf-8")
    assert Profile.load(path) == PROFILE
    assert PROFILE.slowest is None


def test_the_slowest_rank_is_the_one_whose_whole_step_takes_longest() -> None:
    assert RICH.slowest == RICH.ranks[1]


def test_gradient_bytes_counts_every_gradient() -> None:
    assert PROFILE.gradient_bytes == 4 * 80 + 4 * 10 + 2 * 72 + 4


@pytest.mark.parametrize(
    ("place", "changes", "expected"),
    [
        ("3", {"bytes": 8}, r"gradients\[3\]\.bytes: is 8, but float32 of shape \[\] takes 4"),
        ("1", {"name": "head.weight"}, r"gradients\[1\]\.name: head\.weight appears twice"),
        ("1", {"name": "head..bias"}, r"gradients\[1\]\.name: 'head\.\.bias' is not a valid parameter name"),
        ("2", {"ready_s": 0.0}, r"gradients\[2\]\.ready_s: is 0\.0, but 0\.001 for the one before"),
        ("0", {"ready_s": -0.1}, r"gradients\[0\]\.ready_s: must be at least 0"),
        ("3", {"ready_s": 0.009}, r"gradients\[3\]\.ready_s: is 0\.009, after backward_s"),
        ("3", {"ready_s": math.nan}, r"gradients\[3\]\.ready_s: must be a finite number, not nan"),
        ("0", {"dtype": "int32"}, r"gradients\[0\]\.dtype: int32 is unknown"),
        ("0", {"shape": [-10, -8]}, r"gradients\[0\]\.shape\[0\]: must be at least 0"),
        ("0", {"shape": "10x8"}, r"gradients\[0\]\.shape: expected array, got str"),
        ("", {"gradients": []}, r"gradients: is empty"),
        ("", {"forward_s": math.inf}, r"forward_s: must be a finite number"),
        ("", {"update_s": -1.0}, r"update_s: must be at least 0"),
        ("", {"steps": 0}, r"steps: must be at least 1"),
        ("", {"batch": 0}, r"batch: must be at least 1"),
        ("", {"device": "abacus"}, r"device: must be one of cpu, cuda"),
        ("", {"schema": 2}, r"schema: is 2, and this release reads up to 1; upgrade syncline"),
    ],
)
def test_contradictions_name_the_field(path: Path, place: str, changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(FileError, match=f"profile.json: {expected}"):
        Profile.load(edited(path, place, **changes))


@pytest.mark.parametrize(
    ("place", "value", "expected"),
    [
        (("buffers", 0, "dtype"), "quaternion", r"buffers\[0\]\.dtype: quaternion is unknown"),
        (("buffers", 1, "dtype"), "float32", r"buffers\[1\]\.dtype: float32 appears twice"),
        (("buffers", 1, "bytes"), 12, r"buffers\[1\]\.bytes: 12 is not a whole number of int64 elements"),
        (("buffers", 1, "bytes"), -8, r"buffers\[1\]\.bytes: must be at least 0"),
        (("ranks", 0, "rank"), -1, r"ranks\[0\]\.rank: must be at least 0"),
        (("ranks", 1, "rank"), 0, r"ranks\[1\]\.rank: 0 appears twice"),
        (("ranks", 1, "backward_s"), -1.0, r"ranks\[1\]\.backward_s: must be at least 0"),
        (("spread", "low_s"), 1.0, r"spread\.high_s: is 0\.012, below low_s"),
        (("spread", "high_s"), math.inf, r"spread\.high_s: must be a finite number"),
        (("jitter_s",), math.nan, r"jitter_s: must be a finite number"),
        (("jitter_s",), -1e-9, r"jitter_s: must be at least 0"),
        (("overheads", "hook_s"), -1.0, r"overheads\.hook_s: must be at least 0"),
        (
            ("overheads", "work", "bf16", "s_per_byte"),
            -1.0,
            r"overheads\.work\[\.\.\.\]\.s_per_byte: must be at least 0",
        ),
        (("overheads", "work", "bf16", "slope"), 1.0, r"overheads\.work\[\.\.\.\]\.slope: is not a known key"),
        (("ranks", 0, "host"), "a", r"ranks\[0\]\.host: is not a known key"),
    ],
)
def test_contradictions_in_the_optional_fields_name_them(
    path: Path, place: tuple[str | int, ...], value: Any, expected: str
) -> None:
    with pytest.raises(FileError, match=f"profile.json: {expected}"):
        Profile.load(edited_rich(path, place, value))


def test_the_last_gradient_may_be_late_by_rounding(path: Path) -> None:
    Profile.load(edited(path, "3", ready_s=0.008 + 1e-10))


def test_a_contradiction_cannot_be_constructed_either() -> None:
    with pytest.raises(ValueError, match=r"gradients\[1\]\.name"):
        profile(gradient("a", (1,), 0.0), gradient("a", (1,), 0.0))


keys_of_a_gradient = st.sampled_from(["name", "shape", "dtype", "bytes", "ready_s"])
odd_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=4),
    st.lists(st.integers(), max_size=3),
)


@given(place=st.sampled_from(PLACES), value=odd_values)
@loose
def test_any_edit_of_an_optional_field_loads_or_is_refused_in_one_line(
    path: Path, place: tuple[str | int, ...], value: Any
) -> None:
    try:
        Profile.load(edited_rich(path, place, value))
    except FileError as error:
        assert str(path) in str(error)
        assert "\n" not in str(error)


@given(index=st.integers(0, 3), key=keys_of_a_gradient, value=odd_values)
@loose
def test_any_edit_of_a_gradient_loads_or_is_refused_cleanly(path: Path, index: int, key: str, value: Any) -> None:
    try:
        loaded = Profile.load(edited(path, str(index), **{key: value}))
    except FileError as error:
        assert str(path) in str(error)
    else:
        assert all(before.ready_s <= after.ready_s for before, after in pairwise(loaded.gradients))


@given(index=st.integers(0, 3), key=keys_of_a_gradient)
@loose
def test_a_gradient_without_one_of_its_keys_is_refused(path: Path, index: int, key: str) -> None:
    tree = msgspec.to_builtins(PROFILE)
    del tree["gradients"][index][key]
    path.write_text(json.dumps(tree), encoding="utf-8")
    with pytest.raises(FileError, match=rf"gradients\[{index}\]\.{key}: is missing"):
        Profile.load(path)


@given(data=st.data())
@loose
def test_a_truncated_profile_is_refused(path: Path, data: st.DataObject) -> None:
    RICH.save(path)
    text = path.read_text(encoding="utf-8").rstrip()
    path.write_text(text[: data.draw(st.integers(0, len(text) - 1))], encoding="utf-8")
    with pytest.raises(FileError):
        Profile.load(path)


@given(time=st.floats(1e-3, 1e3), size=st.floats(1e-4, 10))
@loose
def test_scaling_keeps_names_order_and_proportions(time: float, size: float) -> None:
    scaled = PROFILE.scaled(time=time, bytes=size)
    assert [g.name for g in scaled.gradients] == [g.name for g in PROFILE.gradients]
    assert scaled.backward_s == pytest.approx(PROFILE.backward_s * time)
    for before, after in zip(PROFILE.gradients, scaled.gradients, strict=True):
        elements = math.prod(before.shape) * size
        assert after.ready_s == pytest.approx(before.ready_s * time)
        assert math.prod(after.shape) >= 1
        rows = after.shape[0] if len(after.shape) > 1 else 1
        assert elements < 1 or abs(math.prod(after.shape) - elements) <= max(0.5, rows / 2) or size == 1.0


@given(time=st.floats(1e-3, 1e3), size=st.floats(1e-4, 10))
@loose
def test_scaling_takes_ranks_spread_and_jitter_along_and_leaves_overheads(time: float, size: float) -> None:
    scaled = RICH.scaled(time=time, bytes=size)
    assert scaled.overheads == RICH.overheads
    assert scaled.jitter_s == pytest.approx(RICH.jitter_s * time)
    assert scaled.spread is not None
    assert (scaled.spread.low_s, scaled.spread.high_s) == pytest.approx((0.010 * time, 0.012 * time))
    assert [rank.step_s for rank in scaled.ranks] == pytest.approx([rank.step_s * time for rank in RICH.ranks])
    assert [entry.dtype for entry in scaled.buffers] == [entry.dtype for entry in RICH.buffers]
    assert scaled.buffers[0].bytes == 4 * max(1, round(16 * size))


def test_scaling_sizes_shrinks_both_sides_of_a_matrix_and_scaling_time_keeps_them() -> None:
    assert PROFILE.scaled(bytes=0.25).gradients[0].shape == (5, 4)
    assert PROFILE.scaled(bytes=1e-6).gradients[0].shape == (1, 1)
    assert PROFILE.scaled(time=0.1).gradients[0].shape == (10, 8)
    assert PROFILE.scaled() is PROFILE


@pytest.mark.parametrize("factor", [0.0, -1.0, math.nan, math.inf])
def test_impossible_factors_are_refused(factor: float) -> None:
    with pytest.raises(ValueError, match="time: must be a finite factor greater than 0"):
        PROFILE.scaled(time=factor)


def test_every_shipped_profile_loads() -> None:
    assert shipped_profiles()
    for name in shipped_profiles():
        assert load_profile(name).gradient_bytes > 0


def test_an_unknown_name_lists_the_shipped_ones() -> None:
    with pytest.raises(FileError, match=f"neither a file nor a shipped profile.*{shipped_profiles()[0]}"):
        load_profile("no-such-model")


def scalar(model: nn.Module) -> Tensor:
    loss: Tensor = model(torch.ones(2, 4)).sum()
    return loss


def test_measuring_a_replayed_profile_gives_its_order_and_never_less_than_its_times() -> None:
    measured = measure_backward(ReplayModel(PROFILE), scalar, steps=3, warmup=1, model_name="replay", batch=2)
    assert [g.name for g in measured.gradients] == [g.name for g in PROFILE.gradients]
    for recorded, found in zip(PROFILE.gradients, measured.gradients, strict=True):
        assert (found.shape, found.dtype, found.bytes) == (recorded.shape, recorded.dtype, recorded.bytes)
        assert found.ready_s >= recorded.ready_s
    assert measured.forward_s >= PROFILE.forward_s
    assert measured.backward_s >= PROFILE.backward_s
    assert (measured.model, measured.steps, measured.batch, measured.update_s) == ("replay", 3, 2, 0.0)


def test_layers_become_ready_from_the_last_to_the_first() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    measured = measure_backward(model, scalar, steps=3, warmup=1)
    assert {g.name for g in measured.gradients[:2]} == {"2.weight", "2.bias"}
    assert {g.name for g in measured.gradients[2:]} == {"0.weight", "0.bias"}


def test_measuring_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    measure_backward(model, scalar, steps=2, warmup=1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None and not p._post_accumulate_grad_hooks for p in model.parameters())


def test_an_optimizer_is_timed_and_really_steps() -> None:
    model = nn.Linear(4, 4)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert measure_backward(model, scalar, steps=2, warmup=1, optimizer=optimizer).update_s > 0
    assert not torch.equal(model.weight, before)


def test_frozen_parameters_are_left_out_and_unused_ones_are_ready_at_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].bias.requires_grad_(False)
    model.register_parameter("unused", nn.Parameter(torch.zeros(3)))
    measured = measure_backward(model, scalar, steps=2, warmup=0)
    assert [g.name for g in measured.gradients] == ["unused", "0.weight"]
    assert measured.gradients[0].ready_s == 0.0


def test_a_step_that_fails_leaves_no_hooks_behind() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(UsageError, match="step must return the loss"):
        measure_backward(model, lambda m: None)
    assert not model.weight._post_accumulate_grad_hooks
