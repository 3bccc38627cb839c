"""A profile says when each gradient is ready; one that contradicts itself cannot exist."""

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
from syncline.measure.profile import ITEM_BYTES, Gradient, Profile, load_profile, shipped_profiles
from syncline.models.replay import ReplayModel

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


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "profile.json"


def edited(path: Path, place: str, **changes: Any) -> Path:
    """The good profile's file, with keys changed at the top or in one gradient."""
    tree = msgspec.to_builtins(PROFILE)
    target = tree if place == "" else tree["gradients"][int(place)]
    target.update(changes)
    path.write_text(json.dumps(tree), encoding="utf-8")
    return path


def test_a_saved_profile_loads_as_itself(path: Path) -> None:
    PROFILE.save(path)
    assert Profile.load(path) == PROFILE
    assert load_profile(path) == PROFILE


def test_gradient_bytes_counts_every_gradient() -> None:
    assert PROFILE.gradient_bytes == 4 * 80 + 4 * 10 + 2 * 72 + 4


@pytest.mark.parametrize(
    ("place", "changes", "expected"),
    [
        ("3", {"bytes": 8}, r"gradients\[3\]\.bytes: is 8, but float32 of shape \[\] takes 4"),
        ("1", {"name": "head.weight"}, r"gradients\[1\]\.name: head\.weight appears twice"),
        ("1", {"name": "head..bias"}, r"gradients\[1\]\.name: 'head\.\.bias' is not a parameter's name"),
        ("2", {"ready_s": 0.0}, r"gradients\[2\]\.ready_s: is 0\.0, but 0\.001 for the one before"),
        ("0", {"ready_s": -0.1}, r"gradients\[0\]\.ready_s: must be seconds from 0 up"),
        ("3", {"ready_s": 0.009}, r"gradients\[3\]\.ready_s: is 0\.009, after backward_s"),
        ("3", {"ready_s": math.nan}, r"gradients\[3\]\.ready_s: must be a finite number, not nan"),
        ("0", {"dtype": "int32"}, r"gradients\[0\]\.dtype: int32 is unknown"),
        ("0", {"shape": [-10, -8]}, r"gradients\[0\]\.shape: has a negative size"),
        ("0", {"shape": "10x8"}, r"gradients\[0\]\.shape: expected array, got str"),
        ("", {"gradients": []}, r"gradients: is empty"),
        ("", {"forward_s": math.inf}, r"forward_s: must be a finite number"),
        ("", {"update_s": -1.0}, r"update_s: must be seconds from 0 up"),
        ("", {"steps": 0}, r"steps: must be at least 1"),
        ("", {"batch": 0}, r"batch: must be at least 1"),
        ("", {"device": "abacus"}, r"device: must be cpu or cuda"),
        ("", {"schema": 2}, r"schema: is 2, and this release reads up to 1; upgrade syncline"),
    ],
)
def test_contradictions_name_the_field(path: Path, place: str, changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(FileError, match=f"profile.json: {expected}"):
        Profile.load(edited(path, place, **changes))


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
    PROFILE.save(path)
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
        assert elements < 1 or abs(math.prod(after.shape) - elements) <= 0.5 or size == 1.0


def test_scaling_sizes_makes_shapes_flat_and_scaling_time_keeps_them() -> None:
    assert PROFILE.scaled(bytes=0.1).gradients[0].shape == (8,)
    assert PROFILE.scaled(time=0.1).gradients[0].shape == (10, 8)
    assert PROFILE.scaled() is PROFILE


@pytest.mark.parametrize("factor", [0.0, -1.0, math.nan, math.inf])
def test_impossible_factors_are_refused(factor: float) -> None:
    with pytest.raises(ValueError, match="time: must be a positive factor"):
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
