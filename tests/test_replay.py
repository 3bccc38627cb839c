"""A replayed model returns real gradients in the recorded order, and never before the recorded time."""

from __future__ import annotations

import time

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_helpers import on_ranks
from syncline.cluster import Rank
from syncline.errors import UsageError
from syncline.measure.backward import measure_backward
from syncline.models import replay
from syncline.models.replay import ReplayModel
from syncline.records.profile import BUFFER_ITEM_BYTES, ITEM_BYTES, Buffers, Gradient, Profile, RankTimes

NAMES = ["head.bias", "head.weight", "blocks.1.norm.weight", "blocks.1.weight", "blocks.0.weight", "scale"]
SHAPES = [(5,), (5, 7), (3,), (4, 2, 3), (300, 1000), ()]


def recorded(dtype: str = "float32", step_s: float = 0.002) -> Profile:
    """A profile whose fifth gradient is larger than the pool of random numbers."""
    gradients = tuple(
        Gradient(
            name=name,
            shape=shape,
            dtype=dtype,
            bytes=torch.Size(shape).numel() * ITEM_BYTES[dtype],
            ready_s=index * step_s,
        )
        for index, (name, shape) in enumerate(zip(NAMES, SHAPES, strict=True))
    )
    return Profile(
        model="made up",
        gradients=gradients,
        forward_s=2 * step_s,
        backward_s=len(NAMES) * step_s,
        update_s=0.0,
        device="cpu",
        where="nowhere",
        how="by hand",
        steps=1,
        batch=None,
    )


def step(model: nn.Module) -> dict[str, Tensor]:
    """Take one step without previous gradients; return copies of the new ones."""
    model.zero_grad()
    model().backward()
    return gradients_of(model)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {
        name.removeprefix("module."): p.grad.detach().clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def test_parameters_have_the_recorded_names_shapes_and_dtypes() -> None:
    model = ReplayModel(recorded("bfloat16"))
    parameters = dict(model.named_parameters())
    assert set(parameters) == set(NAMES)
    assert [tuple(parameters[name].shape) for name in NAMES] == SHAPES
    assert {p.dtype for p in parameters.values()} == {torch.bfloat16}
    assert list(model.buffers()) == []


def test_gradients_come_in_order_and_never_early() -> None:
    profile = recorded()
    model = ReplayModel(profile)
    ready_s: dict[str, float] = {}
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: ready_s.__setitem__(name, time.monotonic()))
    for _ in range(3):
        ready_s.clear()
        start_s = time.monotonic()
        loss = model()
        backward_s = time.monotonic()
        loss.backward()
        end_s = time.monotonic()
        assert list(ready_s) == NAMES
        assert backward_s - start_s >= profile.forward_s
        assert all(ready_s[g.name] - backward_s >= g.ready_s for g in profile.gradients)
        assert end_s - backward_s >= profile.backward_s


def test_a_late_start_delays_everything_but_sleeps_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a simulated clock, each sleep is 1 ms too long, and the last gradient is only 1 ms late."""
    now_s = 100.0
    sleeps: list[float] = []

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds + 0.001
        sleeps.append(now_s)

    monkeypatch.setattr(replay.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(replay.time, "sleep", sleep)
    loss = ReplayModel(recorded())()
    now_s = 200.0
    loss.backward()
    assert sleeps[1:] == pytest.approx([200.003, 200.005, 200.007, 200.009, 200.011, 200.013])


def test_gradients_are_dense_random_numbers_that_change_with_step_and_seed() -> None:
    model, twin, other = (
        ReplayModel(recorded(), seed=1),
        ReplayModel(recorded(), seed=1),
        ReplayModel(recorded(), 2),
    )
    first, second = step(model), step(model)
    for name, value in step(twin).items():
        assert torch.equal(value, first[name])
        assert not torch.equal(value, second[name])
    for name, value in step(other).items():
        assert not torch.equal(value, first[name])
    large = first["blocks.0.weight"]
    assert large.unique().numel() > 100_000
    assert large.std().item() == pytest.approx(1e-3, rel=0.05)


def test_changing_a_gradient_does_not_change_later_ones() -> None:
    model, untouched = ReplayModel(recorded()), ReplayModel(recorded())

    def spoil(p: Tensor) -> None:
        p.grad.fill_(torch.nan)

    hooks = [p.register_post_accumulate_grad_hook(spoil) for p in model.parameters()]
    for _ in range(3):
        assert all(value.isnan().all() for value in step(model).values())
        step(untouched)
    for hook in hooks:
        hook.remove()
    expected = step(untouched)
    assert all(torch.equal(value, expected[name]) for name, value in step(model).items())


def test_no_two_gradients_share_memory() -> None:
    model = ReplayModel(recorded())
    kept: list[Tensor] = []
    for _ in range(2):
        model.zero_grad()
        model().backward()
        kept.extend(p.grad for p in model.parameters() if p.grad is not None)
    assert len({grad.untyped_storage().data_ptr() for grad in kept}) == 2 * len(NAMES)


def test_gradients_accumulate() -> None:
    model, twin = ReplayModel(recorded()), ReplayModel(recorded())
    first, second = step(twin), step(twin)
    model().backward()
    model().backward()
    for name, value in gradients_of(model).items():
        torch.testing.assert_close(value, first[name] + second[name])


def test_frozen_parameters_get_nothing_and_no_grad_only_takes_the_forward_time() -> None:
    model = ReplayModel(recorded())
    model.get_parameter("scale").requires_grad_(False)
    assert set(step(model)) == set(NAMES) - {"scale"}
    with torch.no_grad():
        assert not model().requires_grad


def test_channels_last_parameters_get_gradients_in_their_own_layout() -> None:
    gradient = Gradient(name="weight", shape=(4, 3, 3, 3), dtype="float32", bytes=432, ready_s=0.0)
    model = ReplayModel(msgspec.structs.replace(recorded(), gradients=(gradient,)))
    model.to(memory_format=torch.channels_last)
    model().backward()
    grad = model.get_parameter("weight").grad
    assert grad is not None
    assert grad.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_every_dtype_of_a_profile_replays(dtype: str) -> None:
    model = ReplayModel(recorded(dtype, step_s=0.0))
    assert {value.dtype for value in step(model).values()} == {getattr(torch, dtype)}


@pytest.mark.parametrize("dtype", BUFFER_ITEM_BYTES)
def test_buffers_of_every_dtype_are_real_ones(dtype: str) -> None:
    buffers = (Buffers(dtype=dtype, bytes=3 * BUFFER_ITEM_BYTES[dtype]),)
    (buffer,) = ReplayModel(msgspec.structs.replace(recorded(), buffers=buffers)).buffers()
    assert (str(buffer.dtype), buffer.numel()) == (f"torch.{dtype}", 3)


def test_a_straggler_is_replayed_at_its_own_pace_and_unknown_ranks_at_the_median() -> None:
    profile = recorded()
    slow = RankTimes(rank=3, forward_s=0.006, backward_s=2 * profile.backward_s, update_s=0.0)
    profile = msgspec.structs.replace(profile, ranks=(slow,))
    paced = ReplayModel(profile, rank=3)._profile
    assert (paced.forward_s, paced.backward_s) == (0.006, slow.backward_s)
    assert [g.ready_s for g in paced.gradients] == [2 * g.ready_s for g in profile.gradients]
    assert ReplayModel(profile, rank=0)._profile == ReplayModel(profile)._profile == profile


def rank_main(rank: Rank) -> None:
    torch.set_num_threads(1)
    for as_bucket_view in (False, True):
        averages_over_ranks(rank.rank, as_bucket_view)
    measured = measure_backward(
        DistributedDataParallel(ReplayModel(recorded())), lambda model: model(), steps=1, warmup=0
    )
    assert [g.name for g in measured.gradients] == NAMES
    broadcasts_buffers(rank.rank)


def broadcasts_buffers(rank: int) -> None:
    profile = msgspec.structs.replace(
        recorded(step_s=0.0), buffers=(Buffers(dtype="float32", bytes=8), Buffers(dtype="int64", bytes=8))
    )
    ddp = DistributedDataParallel(ReplayModel(profile), init_sync=False)
    for buffer in ddp.buffers():
        buffer.fill_(10 + rank)
    ddp().backward()
    assert all((buffer == 10).all() for buffer in ddp.buffers())


def averages_over_ranks(rank: int, as_bucket_view: bool) -> None:
    ddp = DistributedDataParallel(
        ReplayModel(recorded(), seed=rank),
        gradient_as_bucket_view=as_bucket_view,
        bucket_cap_mb=0.0001,  # several buckets, so that the rebuild after the first step changes them
        init_sync=False,
    )
    alone = [ReplayModel(recorded(), seed=seed) for seed in (0, 1)]

    def average(*terms: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: sum((term[name] for term in terms), torch.zeros(())) / 2 for name in NAMES}

    for _ in range(3):
        torch.testing.assert_close(step(ddp), average(*map(step, alone)))
        for p in ddp.parameters():
            p.grad.fill_(torch.nan)

    local = [step(model) for model in alone]
    with ddp.no_sync():
        torch.testing.assert_close(step(ddp), local[rank])
    ddp().backward()
    torch.testing.assert_close(gradients_of(ddp), average(*local, *map(step, alone)))


def test_ddp_averages_replayed_gradients_through_rebuild_and_no_sync() -> None:
    on_ranks(2, rank_main)


def test_a_profile_whose_names_cannot_coexist_is_refused() -> None:
    profile = recorded("float32")
    for name in (f"{NAMES[0]}.inner", "training"):
        first, *others = profile.gradients
        clashing = msgspec.structs.replace(profile, gradients=(first, msgspec.structs.replace(others[0], name=name)))
        with pytest.raises(UsageError, match="the profile cannot be replayed: no module can have a parameter"):
            ReplayModel(clashing)
