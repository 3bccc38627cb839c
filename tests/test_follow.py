"""`follow` changes a model between its own steps or leaves it alone, and never disturbs the training."""

from __future__ import annotations

import copy
import gc
import io
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import syncline
from syncline.cluster import ClusterSpec, Rank, launch
from syncline.measure.assumed_network import assumed_links
from syncline.records.network import Network
from syncline.tuning.step_log import Thinned

TWO = ClusterSpec(hosts=1, per_host=(2,))


def slow_starts() -> Network:
    links = assumed_links((0, 0), backend="gloo")
    return msgspec.structs.replace(links, collectives=tuple(one.scaled(50.0, 50.0, 50.0) for one in links.collectives))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.ReLU())], nn.Linear(32, 4))


def train(model: nn.Module, steps: int, *, keep_gradients: bool = False) -> list[float]:
    losses = []
    for _ in range(steps):
        if not keep_gradients:
            model.zero_grad()
        loss = model(torch.randn(8, 32)).square().mean()
        loss.backward()
        losses.append(loss.item())
    return losses


def state() -> list[Any]:
    return [torch.get_rng_state().tolist(), repr(random.getstate()), repr(np.random.get_state())]


def test_tuning_during_training_changes_no_result_and_keeps_the_faster() -> None:
    def main(rank: Rank) -> None:
        rank.init_process_group()
        torch.set_num_threads(1)
        outcomes = []
        for kind in ("followed", "alone"):
            torch.manual_seed(rank.rank)
            random.seed(rank.rank)
            np.random.seed(rank.rank)
            model = DDP(net(), bucket_cap_mb=0.002, gradient_as_bucket_view=True)
            following = syncline.follow(model, network=slow_starts(), quiet=True) if kind == "followed" else None
            # Gradients accumulate over all steps, so that a lost one shows in the end.
            losses = train(model, 64, keep_gradients=True)
            weights = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
            outcomes.append((losses, weights, state()))
            if following is not None:
                assert following.done
                assert following.trial is not None
                assert (following.handle is not None) == following.trial.won
                assert following.trial.steps in (8, 16)  # fewer if the first turns are clear
                record = following.record()
                assert record.steps == 64
                assert record.way == ("the plan" if following.trial.won else "plain DDP")
                following.close()
        (ours, gradients, numbers), (theirs, plain, expected) = outcomes
        assert ours == pytest.approx(theirs, rel=1e-5)
        torch.testing.assert_close(gradients, plain, rtol=1e-5, atol=1e-6)
        assert numbers == expected

    launch(TWO, main, shaped=False)


def test_models_that_cannot_be_changed_are_left_alone_with_the_reason() -> None:
    def main(rank: Rank) -> dict[str, str]:
        rank.init_process_group()
        torch.set_num_threads(1)
        outcomes = {}

        def left(name: str, model: DDP, act: Any = None, steps: int = 20) -> None:
            following = syncline.follow(model, network=slow_starts(), quiet=True)
            if act is not None:
                act(model)
            train(model, steps)
            outcomes[name] = following.describe()
            assert following.record().steps == steps
            following.close()

        left("hook", DDP(net()), lambda model: model.register_comm_hook(None, fp16_compress_hook))
        left("attached", DDP(net()), lambda model: syncline.attach(model))
        left("short", DDP(net()), steps=5)
        model = DDP(net())
        following = syncline.follow(model, network=slow_starts(), quiet=True)
        with model.join():
            train(model, 3 + rank.rank)
        train(model, 3)
        outcomes["join"] = following.describe()

        half = [dist.new_group([one]) for one in range(2)][rank.rank]
        left("alone", DDP(net(), process_group=half))
        late = DDP(net(), bucket_cap_mb=0.002)
        following = syncline.follow(late, network=slow_starts(), quiet=True)
        train(late, 16)  # in the middle of the trial the script takes over
        handle = syncline.attach(late, syncline.Dense(wire="bf16"))
        train(late, 40)
        outcomes["taken over"] = following.describe()
        assert handle.stats().steps == 40
        return outcomes

    outcomes = launch(TWO, main, shaped=False, deadline_s=100)
    assert outcomes[0] == outcomes[1]
    for name, reason in {
        "hook": "communication hook (fp16_compress_hook)",
        "attached": "the script attaches to this model itself",
        "short": "the script ended too early",
        "join": "under join()",
        "alone": "one rank",
        "taken over": "the script attaches to this model itself",
    }.items():
        assert reason in outcomes[0][name]


def test_an_exchange_is_attached_when_training_begins() -> None:
    def main(rank: Rank) -> list[Any]:
        rank.init_process_group()
        model = DDP(net())
        following = syncline.follow(model, exchange=syncline.OkTopk(density=0.5), quiet=True)
        with torch.no_grad():
            model(torch.randn(8, 32))
        model.eval()
        if rank.rank == 0:
            model.module(torch.randn(8, 32))
        model.train()
        assert following.handle is None  # no training forward yet
        train(model, 4)
        assert following.handle is not None
        following.handle.detach()
        assert following.handle is None

        # A plan that does not fit raises in the first training forward, on all ranks.
        other = DDP(net())
        refused = syncline.follow(other, plan="nowhere.json", quiet=True)
        with pytest.raises(syncline.SynclineError, match=r"nowhere\.json"):
            train(other, 1)
        assert refused.error is not None
        return train(other, 2)  # and the model still trains

    launch(TWO, main, shaped=False)


def test_updates_of_an_optimizer_are_exchanged_as_by_attach() -> None:
    """Also with accumulation, where the first forward of a step is inside `no_sync()`."""

    def main(rank: Rank) -> list[str]:
        rank.init_process_group()
        options: dict[str, Any] = {"exchange": syncline.OkTopk(density=0.05), "every": 2, "warmup": 2}
        finals, outcomes = [], []
        for follows in (False, True):
            model = DDP(net())
            optimizer = torch.optim.AdamW(model.parameters())
            following = None
            if follows:
                following = syncline.follow(model, optimizer=optimizer, quiet=True, **options)
            else:
                syncline.attach(model, optimizer=optimizer, **options)
            torch.manual_seed(rank.rank)
            for _ in range(7):
                with model.no_sync():
                    model(torch.randn(8, 32)).square().mean().backward()
                assert (following is None) or (following.handle is not None)
                model(torch.randn(8, 32)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            finals.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
            if following is not None:
                record = following.record()
                assert (record.steps, record.way) == (7, "updates by oktopk(density=0.05)")
                outcomes.append(following.describe())
        assert torch.equal(*finals)
        return outcomes

    ((outcome,), _) = launch(TWO, main, shaped=False)
    assert outcome.startswith("As requested, updates by OkTopk(density=0.05")
    assert outcome.endswith("updates of AdamW.")


def test_copies_of_a_followed_model_are_not_followed_and_it_is_freed_with_its_last_reference() -> None:
    def main(rank: Rank) -> None:
        rank.init_process_group()
        model = DDP(net())
        following = syncline.follow(model, network=slow_starts(), quiet=True)
        train(model, 5)  # while it is profiled, when there are the most hooks
        steps = following.record().steps
        train(copy.deepcopy(model.module), 2)
        file = io.BytesIO()
        torch.save(model.module, file)
        file.seek(0)
        train(torch.load(file, weights_only=False), 2)
        torch.save(model, io.BytesIO())
        assert following.record().steps == steps
        train(model, 1)

        gone = weakref.ref(model)
        del model
        gc.collect()  # while it is profiled there is a reference cycle
        assert gone() is None
        assert following.record().steps == 6  # the record outlives the model

        attached = DDP(net())
        other = syncline.follow(attached, exchange=syncline.OkTopk(density=0.5), quiet=True)
        train(attached, 3)
        lanes = [thread for thread in threading.enumerate() if thread.name.startswith("syncline-lane")]
        assert lanes
        gone, weight = weakref.ref(attached), weakref.ref(attached.module[0].weight)
        gc.collect()
        gc.disable()  # the model must not wait for the garbage collector
        try:
            del attached
            assert gone() is None and weight() is None
        finally:
            gc.enable()
        for thread in lanes:
            thread.join(timeout=20)
            assert not thread.is_alive()
        assert other.record().steps == 3

    launch(TWO, main, shaped=False)


class Odd(nn.Module):
    """Returns one of its parameters, and has a part that is frozen in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = net(), nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": self.head(self.body(inputs)), "bias": self.head.bias}


def frozen_in_turns(model: DDP, step: int) -> torch.Tensor:
    for parameter in (*model.module.body[0].parameters(), *model.module.body[2].parameters()):
        parameter.requires_grad_(step % 5 != 4)
    return model(torch.randn(8, 32, dtype=torch.float64))["out"].square().mean()


def twice_and_with_slopes(model: DDP, step: int) -> torch.Tensor:
    inputs = torch.randn(8, 32, dtype=torch.float64, requires_grad=True)
    out = model(inputs)["out"]
    (slope,) = torch.autograd.grad(out.sum(), inputs, create_graph=True)
    loss = out.square().mean() + slope.square().mean()
    if step % 2:
        loss.backward(retain_graph=True)
    return loss


@pytest.mark.parametrize("script", [frozen_in_turns, twice_and_with_slopes])
def test_unusual_scripts_train_as_without_syncline(script: Callable[[DDP, int], torch.Tensor]) -> None:
    """In double precision, and with a process group that has a backend for each kind of device."""

    def main(rank: Rank) -> str:
        dist.init_process_group()
        torch.set_num_threads(1)
        trained = {}
        for kind in ("alone", "followed"):
            torch.manual_seed(0)
            unused = script is frozen_in_turns
            model = DDP(Odd().double(), find_unused_parameters=unused, bucket_cap_mb=0.002)
            following = syncline.follow(model, network=slow_starts(), quiet=True) if kind == "followed" else None
            torch.manual_seed(rank.rank)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for step in range(80):
                optimizer.zero_grad()
                script(model, step).backward()
                optimizer.step()
            trained[kind] = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        assert following is not None
        assert following.record().steps == 80
        assert not model.module.head.bias._backward_hooks
        torch.testing.assert_close(trained["followed"], trained["alone"], rtol=1e-9, atol=1e-9)
        return following.describe()

    outcomes = launch(TWO, main, shaped=False, deadline_s=100)
    assert "Tried: plain DDP" in outcomes[0], outcomes[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"exchange": syncline.Dense(), "plan": "plan.json"}, "exclude each other"),
        ({"exchange": "dense"}, "exchange"),
        ({"plan": 3}, "plan is a int"),
        ({"allow": ("everything",)}, "everything"),
        ({"exchange": syncline.Dense(), "change": False}, "are for tuning"),
        ({"probe_s": 0}, "probe_s is 0"),
        ({"scaler": 3}, "scaler is a int"),
        ({"every": 5}, "every, warmup, delay and outer are for updates"),
    ],
)
def test_wrong_arguments_are_refused_at_once(arguments: dict[str, Any], message: str) -> None:
    with one_rank(), pytest.raises(syncline.UsageError, match=message):
        syncline.follow(DDP(net()), **arguments)


def test_a_thinned_series_stays_bounded_and_even() -> None:
    series: Thinned[int] = Thinned(most=100)
    for number in range(12345):
        series.append(number)
    assert 50 <= len(series.kept) < 100
    steps = {after - before for before, after in zip(series.kept, series.kept[1:], strict=False)}
    assert len(steps) == 1
    assert series.kept[0] == 0


class one_rank:  # noqa: N801 - a context
    def __enter__(self) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def __exit__(self, *_: object) -> None:
        dist.destroy_process_group()
