"""Tests of plans on DDP models: buckets equal the plan's, results equal DDP's, and unsuitable plans are refused."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import made_up
import syncline
from ddp_helpers import (
    Branches,
    Images,
    MixedTypes,
    Mlp,
    Step,
    Way,
    assert_alike,
    batch,
    branch_step,
    image_step,
    on_ranks,
    open_groups,
    refusal,
    seeded,
    square_loss_step,
    train,
)
from syncline.cluster import Rank
from syncline.ddp import reducer
from syncline.exchange import Dense, Exchange, settings
from syncline.predict.schedule import DDP_CAPS
from syncline.records.network import Network
from syncline.records.plan import Plan, PlannedBucket, PlannedGradient, Where

READY = ("last.bias", "last.weight", "middle.bias", "middle.weight", "first.bias", "first.weight")
"""The parameters of `Mlp`, in the order in which their gradients are ready."""


def plan_for(
    net: nn.Module,
    layout: list[list[str]],
    exchanges: list[Exchange] | None = None,
    lanes: list[int] | None = None,
    ranks: int = 2,
    expected_s: float = 10.0,
) -> Plan:
    parameters = dict(net.named_parameters())
    given = exchanges or [Dense()] * len(layout)
    on = lanes or [0] * len(layout)
    return Plan(
        model="made up",
        gradients=tuple(
            PlannedGradient(
                name=name, shape=tuple(parameters[name].shape), dtype=str(parameters[name].dtype).removeprefix("torch.")
            )
            for names in layout
            for name in names
        ),
        where=Where(host_of_rank=(0,) * ranks, backend="gloo", device="cpu"),
        buckets=tuple(
            PlannedBucket(parameters=tuple(names), lane=lane, exchange=settings(exchange))
            for names, lane, exchange in zip(layout, on, given, strict=True)
        ),
        lanes=max(on) + 1,
        iteration_s=0.01,
        low_s=0.01,
        high_s=0.01,
        compute_s=0.01,
        plain_s=0.02,
        exchange_s=expected_s,
        reason="because",
        alternatives=(),
        how="by hand",
    )


def held(model: DDP) -> set[frozenset[str]]:
    """Return the parameters of each of DDP's current buckets."""
    engine = syncline.handle_of(model)._engine
    return {frozenset(slot.name for slot in bucket.layout.slots) for bucket in engine.buckets.values()}


def layout_of(*sizes: int) -> list[list[str]]:
    names = iter(READY)
    return [[next(names) for _ in range(size)] for size in sizes]


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True}],
    ids=lambda options: next(iter(options), "plain"),
)
def test_buckets_become_the_plan_s_and_gradients_stay_ddp_s(options: dict[str, Any]) -> None:
    def main(rank: Rank) -> None:
        step = square_loss_step(rank)
        plain = train(DDP(seeded(Mlp), **options), step, 5)
        # Without a rebuild, buckets follow the order in which parameters are defined.
        names = READY if "find_unused_parameters" not in options else tuple(reversed(dict(Mlp().named_parameters())))
        for sizes in ([1] * 6, [6], [2, 3, 1], [1, 4, 1]):
            order = iter(names)
            layout = [[next(order) for _ in range(size)] for size in sizes]
            lanes = [number % 2 for number in range(len(sizes))]
            net = seeded(Mlp)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                model = syncline.wrap(net, plan_for(net, layout, lanes=lanes), **options)
                trained = train(model, step, 5)
            assert_alike(trained, plain, Way(Dense(), error=1e-5))
            assert held(model) == {frozenset(names) for names in layout}
            assert syncline.handle_of(model).mismatch is None
            syncline.handle_of(model).detach()

    on_ranks(2, main)


def test_each_bucket_uses_its_own_exchange() -> None:
    def main(rank: Rank) -> None:
        net = seeded(Mlp)
        exchanges = [Dense(wire="bf16"), Dense(), syncline.OkTopk(density=0.5)]
        model = syncline.wrap(net, plan_for(net, layout_of(2, 2, 2), exchanges, [0, 1, 1]))
        plain = DDP(seeded(Mlp))
        optimizers = [torch.optim.SGD(ddp.parameters(), lr=0.0) for ddp in (model, plain)]
        for number in range(4):
            for ddp, optimizer in zip((model, plain), optimizers, strict=True):
                optimizer.zero_grad()
                square_loss_step(rank)(ddp, optimizer, number)
        gradients = {name: p.grad for name, p in model.module.named_parameters()}
        for name, parameter in plain.module.named_parameters():
            mine, theirs = gradients[name], parameter.grad
            assert mine is not None and theirs is not None
            exact = torch.allclose(mine, theirs, rtol=1e-6, atol=0)
            if name.startswith("middle"):
                assert exact
            elif name.startswith("last"):
                assert not exact and bool((mine - theirs).abs().max() <= 0.02 * theirs.abs().max())
        sparse = torch.cat([gradients[name].flatten() for name in ("first.weight", "first.bias")])
        assert 0.4 * sparse.numel() <= int((sparse == 0).sum()) <= 0.6 * sparse.numel()
        predicted = syncline.handle_of(model).predicted_sent_bytes()
        assert syncline.handle_of(model).stats().sent_bytes == predicted

    on_ranks(2, main)


@pytest.mark.parametrize(
    ("make", "make_step", "options"),
    [
        (Images, image_step, {}),
        (Branches, branch_step, {"find_unused_parameters": True}),
        (MixedTypes, square_loss_step, {}),
    ],
    ids=["channels-last", "unused parameters", "mixed types"],
)
def test_models_of_all_kinds_train_as_with_plain_ddp(
    make: Callable[[], nn.Module], make_step: Callable[[Rank], Step], options: dict[str, Any]
) -> None:
    def main(rank: Rank) -> None:
        plain = train(DDP(seeded(make), **options), make_step(rank), 4)
        net = seeded(make)
        by_type: dict[torch.dtype, list[str]] = {}
        for name, parameter in reversed(list(net.named_parameters())):
            by_type.setdefault(parameter.dtype, []).append(name)
        layout = [part for names in by_type.values() for part in (names[: len(names) // 2], names[len(names) // 2 :])]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # with several dtypes, buckets only resemble the plan's
            model = syncline.wrap(net, plan_for(net, layout), **options)
            trained = train(model, make_step(rank), 4)
        assert_alike(trained, plain, Way(Dense(), error=0.01))

    on_ranks(2, main)


def test_buckets_that_differ_from_the_plan_cause_a_warning_and_are_still_summed() -> None:
    def main(rank: Rank) -> str | None:
        net = seeded(Mlp)
        other = ("first.weight", "last.weight", "middle.bias", "middle.weight", "first.bias", "last.bias")
        order = iter(other)
        layout = [[next(order) for _ in range(size)] for size in (2, 2, 2)]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = syncline.wrap(net, plan_for(net, layout))
            trained = train(model, square_loss_step(rank), 4)
        assert_alike(trained, train(DDP(seeded(Mlp)), square_loss_step(rank), 4), Way(Dense(), error=1e-5))
        handle = syncline.handle_of(model)
        texts = [str(warning.message) for warning in caught if "does not match the plan" in str(warning.message)]
        assert len(texts) == (1 if rank.rank == 0 else 0)
        assert handle.mismatch is not None and handle.mismatch in handle.describe()
        return handle.mismatch

    first, second = on_ranks(2, main)
    assert first == second and "DDP's bucket 0 does not match the plan" in first and "Make a new plan" in first


def test_a_plan_for_something_else_is_refused_with_the_difference() -> None:
    def main(rank: Rank) -> None:
        good = plan_for(Mlp(), layout_of(3, 3))
        line = refusal(lambda: syncline.wrap(Mlp(8), good))
        assert "parameter last.weight is float32 of shape [4, 8], but float32 of shape [4, 16] in the plan" in line
        assert "on_mismatch='fallback'" in line
        where = msgspec.structs.replace(good.where, host_of_rank=(0, 1))
        moved = msgspec.structs.replace(good, where=where)
        difference = "the plan is for ranks on hosts [0, 1], but the ranks of this job are on hosts [0, 0]"
        assert difference in refusal(lambda: syncline.wrap(Mlp(), moved))
        frozen = Mlp()
        frozen.first.bias.requires_grad_(False)
        assert "first.bias is not in the model" in refusal(lambda: syncline.wrap(frozen, good))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = syncline.wrap(seeded(Mlp), moved, on_mismatch="fallback")
        assert [str(warning.message) for warning in caught if "plain DDP" in str(warning.message)] == (
            [f"the plan is not applied, and this is plain DDP: {difference}"] if rank.rank == 0 else []
        )
        assert "nothing is attached" in refusal(lambda: syncline.handle_of(model))
        plain = train(DDP(seeded(Mlp)), square_loss_step(rank), 3)
        assert_alike(train(model, square_loss_step(rank), 3), plain, Way(Dense()))
        assert "the plan sets the sizes of buckets" in refusal(lambda: syncline.wrap(Mlp(), good, bucket_cap_mb=5))
        assert "on_mismatch is 'ignore'" in refusal(lambda: syncline.wrap(Mlp(), good, on_mismatch="ignore"))
        assert "pass model.module" in refusal(lambda: syncline.wrap(DDP(Mlp()), good))
        assert open_groups() == 1

    on_ranks(2, main)


def test_ranks_with_different_plan_files_all_raise_and_the_field_is_shown(tmp_path: Path) -> None:
    first = plan_for(Mlp(), layout_of(3, 3), lanes=[0, 1])
    first.save(tmp_path / "0.json")
    other = msgspec.structs.replace(first.buckets[1], lane=0)
    msgspec.structs.replace(first, buckets=(first.buckets[0], other)).save(tmp_path / "1.json")

    def main(rank: Rank) -> str:
        return refusal(lambda: syncline.wrap(Mlp(), tmp_path / f"{rank.rank}.json"), syncline.MismatchError)

    for line in on_ranks(2, main):
        assert "plan.buckets[1].lane is 1 on rank 0; 0 on rank 1" in line


def test_a_plan_that_one_rank_cannot_read_is_refused_by_all(tmp_path: Path) -> None:
    plan_for(Mlp(), layout_of(3, 3)).save(tmp_path / "0.json")

    def main(rank: Rank) -> str:
        return refusal(lambda: syncline.wrap(Mlp(), tmp_path / f"{rank.rank}.json"), syncline.SynclineError)

    first, second = on_ranks(2, main)
    assert "1.json: cannot be read" in second
    assert "the plan is refused on rank 1" in first and "1.json: cannot be read" in first


def test_a_plan_to_do_nothing_is_plain_ddp() -> None:
    def main(rank: Rank) -> None:
        nothing = msgspec.structs.replace(plan_for(Mlp(), layout_of(6)), buckets=())
        model = syncline.wrap(seeded(Mlp), nothing)
        plain = train(DDP(seeded(Mlp)), square_loss_step(rank), 3)
        assert_alike(train(model, square_loss_step(rank), 3), plain, Way(Dense()))
        assert not model._comm_hooks and open_groups() == 1

    on_ranks(2, main)


def test_state_is_for_the_plan_it_was_saved_with() -> None:
    def main(rank: Rank) -> None:
        sparse: list[Exchange] = [syncline.OkTopk(density=0.5), Dense()]
        states = []
        for sizes in ((4, 2), (3, 3)):
            net = seeded(Mlp)
            model = syncline.wrap(net, plan_for(net, layout_of(*sizes), sparse))
            train(model, square_loss_step(rank), 3)
            states.append((syncline.handle_of(model), syncline.handle_of(model).state_dict()))
        (first, saved), (second, _) = states
        first.load_state_dict(saved)
        assert "saved with another plan" in refusal(lambda: second.load_state_dict(saved))

    on_ranks(2, main)


def test_drift_describes_exchanges_that_take_much_longer_than_planned() -> None:
    def main(rank: Rank) -> None:
        net = seeded(Mlp)
        slow = syncline.wrap(net, plan_for(net, layout_of(3, 3), expected_s=0.0))
        fine = syncline.wrap(seeded(Mlp), plan_for(net, layout_of(3, 3), expected_s=60.0))
        for model in (slow, fine):
            for number in range(30):
                model(batch(rank.rank, number) + 0.001 * rank.rank).square().mean().backward()
        # Drift allows an extra millisecond, and real exchanges may be faster than that: use made-up durations.
        slow_engine = syncline.handle_of(slow)._engine
        slow_engine._spans_s.extend([0.5] * 50)
        text = syncline.handle_of(slow).drift()
        assert text is not None and "takes 500.0 ms per step, but the plan expected 0.0" in text
        assert text.endswith("syncline.tune(model, step) makes a new plan")
        assert syncline.handle_of(fine).drift() is None

    on_ranks(2, main)


# --- tune ---------------------------------------------------------------------------------------------------------


class Noisy(nn.Module):
    """A model with buffers that a step changes, and with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(6)])
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return torch.dropout(self.norm(x), 0.5, train=True)


def links(mbit: float, ranks: int = 2, startup_s: float = 1e-3) -> Network:
    """Return a network of ranks on one host, with links of this rate."""
    network = made_up.network((0,) * ranks, mbit=mbit, startup_s=startup_s)
    return msgspec.structs.replace(network, links=(made_up.link("local", mbit), *network.links))


def noisy_step(rank: Rank) -> Callable[[nn.Module], None]:
    inputs = batch(rank.rank, 0, 8, 32)

    def step(model: nn.Module) -> None:
        model(inputs).square().mean().backward()

    return step


def test_tuning_changes_nothing_but_the_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncline.tuning.trials._MAX_RATIO", float("inf"))

    def main(rank: Rank) -> tuple[bool, str]:
        model, other = DDP(seeded(Noisy)), DDP(seeded(Noisy))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        twin = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
        step = noisy_step(rank)

        def run_steps(ddp: DDP, optimizer: torch.optim.Optimizer, steps: int) -> list[Tensor]:
            torch.manual_seed(rank.rank)
            for _ in range(steps):
                optimizer.zero_grad()
                step(ddp)
                optimizer.step()
            return [p.detach().clone() for p in ddp.parameters()]

        run_steps(model, optimizer, 3)
        run_steps(other, twin, 3)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        reducer = model.reducer
        state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
        tuned = syncline.tune(model, step, allow=("bf16",), budget_s=5, network=links(1.0), quiet=True)

        assert tuned.model is model and model.reducer is not reducer
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            assert parameter.grad is not None and gradient is not None and torch.equal(parameter.grad, gradient)
        assert torch.equal(torch.get_rng_state(), state[0]) and random.getstate() == state[1]
        assert (np.random.get_state()[1] == state[2]).all()
        assert tuned.trial is not None and tuned.handle is not None and not tuned.plan.nothing
        for mine, theirs in zip(run_steps(model, optimizer, 6), run_steps(other, twin, 6), strict=True):
            assert torch.allclose(mine, theirs, rtol=0.02, atol=0.02)
        assert tuned.handle.mismatch is None
        assert held(model) == {frozenset(bucket.parameters) for bucket in tuned.plan.buckets}
        assert tuned.handle.stats().steps == 6
        return tuned.plan.lossless, tuned.describe()

    (lossless, text), (_, other_text) = on_ranks(2, main)
    assert not lossless and text == other_text
    assert "Tried: plain DDP" in text and "the plan stays" in text


def test_if_no_plan_is_better_plain_ddp_stays_and_nothing_leaks(capfd: pytest.CaptureFixture[str]) -> None:
    def main(rank: Rank) -> str:
        model = DDP(seeded(Noisy))
        tuned = syncline.tune(model, noisy_step(rank), budget_s=5, network=links(1e6, startup_s=1e-7))
        assert tuned.handle is None and tuned.plan.nothing and tuned.trial is None
        assert not model._comm_hooks and open_groups() == 1
        assert tuned.plan.alternatives[0].name.startswith("do nothing")
        return tuned.describe()

    first, second = on_ranks(2, main)
    assert first == second and "plain DDP" in first.lower().replace("plain ddp", "plain DDP")
    assert capfd.readouterr().err.count(first) == 1


def test_a_plan_that_is_not_faster_when_tried_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncline.tuning.trials._MAX_RATIO", 0.0)

    def main(rank: Rank) -> None:
        model = DDP(seeded(Noisy), bucket_cap_mb=0.01)
        config = reducer.own(model)
        tuned = syncline.tune(model, noisy_step(rank), allow=("bf16",), budget_s=5, network=links(1.0), quiet=True)
        assert tuned.trial is not None and not tuned.trial.won and tuned.handle is None
        assert "plain DDP stays" in tuned.describe()
        assert model._bucket_config is config and not model._comm_hooks and open_groups() == 1
        plain = train(DDP(seeded(Mlp)), square_loss_step(rank), 3)
        assert_alike(train(DDP(seeded(Mlp)), square_loss_step(rank), 3), plain, Way(Dense()))

    on_ranks(2, main)


def test_tuning_again_replaces_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncline.tuning.trials._MAX_RATIO", float("inf"))

    def main(rank: Rank) -> None:
        model = DDP(seeded(Noisy))
        step = noisy_step(rank)
        first = syncline.tune(model, step, allow=("bf16",), budget_s=5, network=links(1.0), quiet=True)
        assert first.handle is not None
        second = syncline.tune(model, step, allow=("bf16",), budget_s=5, network=links(2.0), quiet=True)
        assert "detached" in refusal(lambda: first.handle.stats())
        assert second.handle is not None and second.handle.stats().steps == 0
        own = reducer.own(model)
        third = syncline.tune(model, step, budget_s=5, network=links(1e6, startup_s=1e-7), quiet=True)
        assert third.plan.nothing and model._bucket_config is own and not model._comm_hooks and open_groups() == 1
        net = seeded(Mlp)
        wrapped = syncline.wrap(net, plan_for(net, layout_of(1, 1, 4)))
        assert reducer.own_caps(wrapped) == DDP_CAPS

    on_ranks(2, main)


def test_what_cannot_be_tuned_is_refused() -> None:
    def main(rank: Rank) -> None:
        step, network = noisy_step(rank), links(1.0)
        model = DDP(seeded(Noisy))

        def tuning(step: Callable[[nn.Module], object] = step, **arguments: Any) -> Callable[[], object]:
            return lambda: syncline.tune(model, step, **{"network": network, "budget_s": 5, **arguments})

        assert "allow='int5': must be one of bf16" in refusal(tuning(allow=("int5",)))
        assert "pass a tuple" in refusal(tuning(allow="bf16"))
        assert "budget_s is 1" in refusal(tuning(budget_s=1))
        assert "wrap it" in refusal(lambda: syncline.tune(Noisy(), step))
        different = refusal(tuning(allow=("bf16",) if rank.rank else ()), syncline.MismatchError)
        assert "allow is [] on rank 0" in different
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if rank.rank else None
        assert "optimizer is null on rank 0" in refusal(tuning(optimizer=optimizer), syncline.MismatchError)
        model.register_comm_hook(None, allreduce_hook)
        assert "communication hook already (allreduce_hook)" in refusal(tuning())

    on_ranks(2, main)


@pytest.mark.parametrize("worth", [0.0, float("inf")], ids=["plain stays", "the plan stays"])
@pytest.mark.parametrize(
    "options", [{"static_graph": True}, {"gradient_as_bucket_view": True}], ids=lambda options: min(options)
)
def test_tuning_in_the_middle_of_training_does_not_change_the_result(
    worth: float, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("syncline.tuning.trials._MAX_RATIO", worth)

    def main(rank: Rank) -> None:
        step = square_loss_step(rank)

        def run_steps(model: DDP, optimizer: torch.optim.Optimizer, numbers: range) -> None:
            for number in numbers:
                optimizer.zero_grad()
                step(model, optimizer, number)

        models = [DDP(seeded(Mlp), **options) for _ in range(2)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in models]
        for model, optimizer in zip(models, optimizers, strict=True):
            run_steps(model, optimizer, range(3))
        tuned, plain = models
        inputs = batch(rank.rank, 99)
        result = syncline.tune(
            tuned,
            lambda model: model(inputs).square().mean().backward(),
            allow=("bf16",),
            budget_s=5,
            network=links(0.1),
            quiet=True,
        )
        assert result.trial is not None and (result.handle is not None) == (worth > 0)
        for model, optimizer in zip(models, optimizers, strict=True):
            run_steps(model, optimizer, range(3, 9))
        for mine, theirs in zip(tuned.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(mine, theirs, rtol=0.03, atol=0.003 if worth else 1e-7)
        gathered = [torch.zeros_like(mine) for _ in range(2)]
        torch.distributed.all_gather(gathered, mine.detach())
        assert torch.equal(*gathered)
        if result.handle is not None:
            assert result.handle.mismatch is None
            result.handle.detach()
        assert reducer.own_caps(tuned) == DDP_CAPS and not tuned._comm_hooks and not tuned._forward_pre_hooks

    on_ranks(2, main)


def test_a_plan_that_does_not_fit_one_rank_s_model_is_refused_by_all() -> None:
    def main(rank: Rank) -> str:
        net = Mlp()
        if rank.rank == 1:
            net.first.bias.requires_grad_(False)
        return refusal(lambda: syncline.wrap(net, plan_for(Mlp(), layout_of(3, 3))), syncline.MismatchError)

    for line in on_ranks(2, main):
        assert "first.bias is not in the model" in line and "rank 1" in line


def test_a_resumed_run_does_not_warn_about_buckets_before_ddp_has_rebuilt_them() -> None:
    def main(rank: Rank) -> None:
        net = seeded(Mlp)
        model = syncline.wrap(net, plan_for(net, layout_of(2, 2, 2)))
        train(model, square_loss_step(rank), 4)
        saved = syncline.handle_of(model).state_dict()
        again = seeded(Mlp)
        resumed = syncline.wrap(again, plan_for(again, layout_of(2, 2, 2)))
        handle = syncline.handle_of(resumed)
        handle.load_state_dict(saved)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(resumed, square_loss_step(rank), 3)
        assert handle.mismatch is None and handle.stats().steps == 7

    on_ranks(2, main)


def test_models_whose_buckets_cannot_change_are_refused(tmp_path: Path) -> None:
    def main(rank: Rank) -> None:
        def line(model: nn.Module, **arguments: Any) -> str:
            options = {"network": links(1.0), "budget_s": 5, **arguments}
            return refusal(lambda: syncline.tune(model, noisy_step(rank), **options))

        builtin = DDP(seeded(Noisy))
        builtin._register_builtin_comm_hook(torch.distributed.BuiltinCommHookType.ALLREDUCE)
        assert "communication hook already (BuiltinCommHookType.ALLREDUCE)" in line(builtin)
        frozen = DDP(seeded(Noisy))
        frozen.module.layers[0].weight.requires_grad_(False)
        assert "DDP was built for 14 parameters, and 13 are trained now" in line(frozen)
        model = DDP(seeded(Noisy))
        assert "tune the DDP model, and compile it afterwards" in line(torch.compile(model))
        assert "scaler is a str" in line(model, scaler="x")
        assert "network is a int" in line(model, network=5)
        assert "budget_s is inf" in line(model, budget_s=float("inf"))
        assert "missing.json: cannot be read" in line(model, network=tmp_path / "missing.json")
        assert "the network was measured with 3 ranks, but the model has 2" in line(model, network=links(1.0, ranks=3))
        assert "plan is a NoneType" in refusal(lambda: syncline.wrap(Mlp(), None))

    on_ranks(2, main)
