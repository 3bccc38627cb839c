"""Weights that are gathered behind the next forward pass: the same training as plain DDP, and never a stale value."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.checkpoint import checkpoint

import made_up
import syncline
from ddp_helpers import Mlp, batch, on_ranks, refusal, seeded
from syncline.cluster import Rank
from syncline.ddp import reducer
from syncline.dist.local_comm import LocalComm, run_ranks
from syncline.exchange import Layout
from syncline.exchange.halves import AllGather, ReduceScatter, ShardState
from syncline.exchange.lossy_halves import halves_of, owners_of
from syncline.models import zoo
from syncline.models.gpt import GPT
from syncline.overlap.guards import PendingParameter, UnfinishedGradient
from syncline.predict import Schedule, predict
from syncline.predict.bucket_size import best_overlap
from syncline.predict.overlap import GATHERED, BucketTimes, Transfer, best_whole, gather_order, overlapped
from syncline.records.profile import load_profile
from syncline.report.sections import step as step_section

SMALL = {"bucket_cap_mb": 0.002}
WARM = 8  # steps after which weights are in shards, whatever DDP rebuilds

Make = Callable[[Any], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "sgd without state": lambda p: SGD(p, lr=0.05),
    "adam foreach": lambda p: Adam(p, lr=0.01, foreach=True),
    "adamw fused": lambda p: AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: RMSprop(p, lr=0.01, momentum=0.5),
    "adagrad": lambda p: Adagrad(p, lr=0.05),
}


def weights(model: nn.Module) -> Tensor:
    return torch.cat([tensor.detach().double().flatten() for tensor in model.state_dict().values()])


def attach(model: DDP, optimizer: Optimizer) -> syncline.Handle:
    return syncline.attach(model, optimizer=optimizer, overlap="forward")


def pending(model: nn.Module) -> int:
    return sum(type(parameter) is PendingParameter for parameter in model.parameters())


def step(model: nn.Module, optimizer: Optimizer, rank: int, number: int) -> None:
    optimizer.zero_grad()
    model(batch(rank, number)).square().mean().backward()
    optimizer.step()


def warmed_up(rank: Rank) -> tuple[DDP, Optimizer, syncline.Handle]:
    """Return a model whose weights are in shards, with its optimizer and handle."""
    model = DDP(seeded(Mlp), **SMALL)
    optimizer = AdamW(model.parameters(), lr=0.01)
    handle = attach(model, optimizer)
    for number in range(WARM):
        step(model, optimizer, rank.rank, number)
    return model, optimizer, handle


class Odd(nn.Module):
    """Tied weights, a module that is used twice, a checkpointed one, a scalar, channels-last, and weights that another
    module reads."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.once, self.twice = nn.Linear(16, 16), nn.Linear(16, 16)
        self.tied = nn.Linear(16, 16, bias=False)
        self.tied.weight = self.once.weight
        self.conv = nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.read = nn.Linear(16, 16)
        self.attention = nn.MultiheadAttention(16, 2, bias=False, batch_first=True)  # the gradient of a bias is noise

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.once(x)) + checkpoint(self.twice, x, use_reentrant=False)
        x = self.twice(x) + self.tied(x) + nn.functional.linear(x, self.read.weight, self.read.bias)
        x = self.attention(x[None], x[None], x[None])[0][0]
        return self.conv(x[:, :8].reshape(-1, 2, 2, 2)).flatten(1) * self.scale


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["sgd", "adamw fused"])
def test_weights_equal_plain_ddps(ranks: int, name: str) -> None:
    def main(rank: Rank) -> None:
        for make in (Mlp, Odd):
            plain, model = (DDP(seeded(make), **SMALL) for _ in range(2))
            optimizers = [OPTIMIZERS[name](m.parameters()) for m in (plain, model)]
            handle = attach(model, optimizers[1])
            for number in range(25):
                for trained, optimizer in zip((plain, model), optimizers, strict=True):
                    step(trained, optimizer, rank.rank, number)
            if ranks > 1:
                assert pending(model) > 0  # it was really gathered behind the forward passes
            torch.testing.assert_close(weights(model), weights(plain), rtol=1e-4, atol=1e-6)
            assert handle.stats().sent_bytes == handle.predicted_sent_bytes()
            if ranks > 1:  # a step has the weights that were gathered behind its forward, and its gradients
                timings = handle.stats().buckets
                gathers = [timing for timing in timings if timing.exchange == "AllGather"]
                sums = [timing for timing in timings if timing.exchange != "AllGather"]
                assert gathers and max(t.end_s for t in gathers) <= min(t.start_s for t in sums)
                held = sum(v.numel() for s in optimizers[1].state.values() for v in s.values() if v.dim())
                whole = sum(v.numel() for s in optimizers[0].state.values() for v in s.values() if v.dim())
                assert held < whole

    on_ranks(ranks, main)


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_elementwise_optimizer_with_groups_and_a_schedule(ranks: int) -> None:
    def main(rank: Rank) -> None:
        for make in OPTIMIZERS.values():
            plain, model = (DDP(seeded(Mlp), **SMALL) for _ in range(2))
            optimizers, schedulers = [], []
            for trained in (plain, model):
                named = list(trained.named_parameters())
                groups = [
                    {"params": [p for n, p in named if "first.bias" in n], "weight_decay": 0.0},
                    {"params": [p for n, p in named if "first.bias" not in n], "weight_decay": 0.01},
                ]
                optimizers.append(make(groups))
                schedulers.append(CosineAnnealingLR(optimizers[-1], 20))
            attach(model, optimizers[1])
            for number in range(15):
                for trained, optimizer, scheduler in zip((plain, model), optimizers, schedulers, strict=True):
                    step(trained, optimizer, rank.rank, number)
                    scheduler.step()
            torch.testing.assert_close(weights(model), weights(plain), rtol=1e-4, atol=1e-6)

    on_ranks(ranks, main)


def test_a_gpt_with_accumulation_and_clipping() -> None:
    def main(rank: Rank) -> None:
        torch.set_num_threads(1)
        plain, model = (DDP(seeded(lambda: GPT(width=32, layers=2, heads=2, context=16)), **SMALL) for _ in range(2))
        optimizers = [AdamW(m.parameters(), lr=1e-3) for m in (plain, model)]
        handle = attach(model, optimizers[1])
        for number in range(40):
            generator = torch.Generator().manual_seed(100 * number + rank.rank)
            text = torch.randint(256, (2, 2, 17), generator=generator)
            norms = []
            for trained, optimizer in zip((plain, model), optimizers, strict=True):
                optimizer.zero_grad()
                with trained.no_sync():
                    zoo.loss(trained(text[0, :, :-1]), text[0, :, 1:]).backward()
                zoo.loss(trained(text[1, :, :-1]), text[1, :, 1:]).backward()
                if trained is plain:
                    norms.append(nn.utils.clip_grad_norm_(trained.parameters(), 0.1))
                else:
                    norms.append(handle.clip_grad_norm_(0.1))
                optimizer.step()
            torch.testing.assert_close(norms[0], norms[1], rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(weights(model), weights(plain), rtol=1e-3, atol=1e-4)

    on_ranks(2, main)


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_skips_the_same_steps_on_all_ranks(fused: bool) -> None:
    def main(rank: Rank) -> None:
        plain, model = (DDP(seeded(Mlp), **SMALL) for _ in range(2))
        optimizers = [AdamW(m.parameters(), lr=0.01, fused=fused) for m in (plain, model)]
        scalers = [GradScaler("cpu", init_scale=2.0**10, growth_interval=5) for _ in range(2)]
        handle = attach(model, optimizers[1])
        for number in range(30):
            for trained, optimizer, scaler in zip((plain, model), optimizers, scalers, strict=True):
                optimizer.zero_grad()
                loss = trained(batch(rank.rank, number)).square().mean()
                if number in (3, 14, 20) and rank.rank == 1:
                    loss = loss * float("inf")
                scaler.scale(loss).backward()
                if number % 2:
                    scaler.unscale_(optimizer)
                    (
                        nn.utils.clip_grad_norm_(trained.parameters(), 0.5)
                        if trained is plain
                        else handle.clip_grad_norm_(0.5)
                    )
                scaler.step(optimizer)
                scaler.update()
            assert scalers[0].get_scale() == scalers[1].get_scale()
        torch.testing.assert_close(weights(model), weights(plain), rtol=1e-4, atol=1e-6)

    on_ranks(3, main)


def test_weights_are_never_read_before_they_have_arrived() -> None:
    def main(rank: Rank) -> None:
        plain, model = (DDP(seeded(Mlp), **SMALL) for _ in range(2))
        optimizers = [OPTIMIZERS["sgd"](m.parameters()) for m in (plain, model)]
        attach(model, optimizers[1])
        average = torch.optim.swa_utils.AveragedModel(plain.module), torch.optim.swa_utils.AveragedModel(model.module)
        for number in range(2 * WARM):
            for trained, optimizer, mean in zip((plain, model), optimizers, average, strict=True):
                step(trained, optimizer, rank.rank, number)
                if number % 2:
                    mean.update_parameters(trained.module)
                else:
                    parameter = next(trained.parameters())
                    parameter.data = parameter.data * 0.9  # other values, in other memory
            expected = dict(plain.module.named_parameters())
            close = {"rtol": 1e-4, "atol": 1e-6}
            ways: list[Callable[[], Any]] = [
                lambda: dict(model.module.state_dict()),
                lambda: dict(copy.deepcopy(model.module).named_parameters()),
                lambda: {n: p.data for n, p in model.module.named_parameters()},
                lambda: {n: p.clone() for n, p in model.module.named_parameters()},
                lambda: _saved(model.module),
            ]
            found = ways[number % len(ways)]()
            for name, value in found.items():
                assert type(value) is not PendingParameter
                torch.testing.assert_close(value.detach(), expected[name].detach(), **close)
            with torch.no_grad():
                torch.testing.assert_close(model(batch(0, 99)), plain(batch(0, 99)), **close)
        torch.testing.assert_close(weights(average[1]), weights(average[0]), rtol=1e-4, atol=1e-6)

    on_ranks(3, main)


def _saved(module: nn.Module) -> dict[str, Tensor]:
    memory = io.BytesIO()
    torch.save(module.state_dict(), memory)
    memory.seek(0)
    loaded: dict[str, Tensor] = torch.load(memory, weights_only=True)
    return loaded


def test_unfinished_gradients_are_refused_and_can_be_zeroed() -> None:
    def main(rank: Rank) -> None:
        model, optimizer, handle = warmed_up(rank)
        optimizer.zero_grad()
        model(batch(rank.rank, 50)).square().mean().backward()
        parameter = next(model.parameters())
        assert type(parameter.grad) is UnfinishedGradient
        assert parameter.grad.shape == parameter.shape
        for use in (
            lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
            lambda: parameter.grad.norm(),
            lambda: parameter.grad + 1,
        ):
            assert "handle.clip_grad_norm_(max_norm)" in refusal(use)
        assert "handle.optimizer_state_dict()" in refusal(optimizer.state_dict)
        assert "closure" in refusal(lambda: optimizer.step(lambda: torch.zeros(())))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        assert type(parameter.grad) is Tensor
        assert not parameter.grad.any()
        model(batch(rank.rank, 51)).square().mean().backward()
        optimizer.step()
        with pytest.raises(Exception, match="zero_grad"):  # not zeroed
            model(batch(rank.rank, 52)).square().mean().backward()
        assert handle.error is None

    on_ranks(2, main)


def test_state_moves_between_plain_ddp_and_shards() -> None:
    def main(rank: Rank) -> None:
        plain, model = (DDP(seeded(Mlp), **SMALL) for _ in range(2))
        optimizers = [AdamW(m.parameters(), lr=0.01) for m in (plain, model)]
        handle = attach(model, optimizers[1])
        for number in range(12):
            for trained, optimizer in zip((plain, model), optimizers, strict=True):
                step(trained, optimizer, rank.rank, number)
        whole, expected = handle.optimizer_state_dict(), optimizers[0].state_dict()
        assert whole["param_groups"] == expected["param_groups"]
        for index, values in expected["state"].items():
            for key, value in values.items():
                torch.testing.assert_close(whole["state"][index][key], value, rtol=1e-4, atol=1e-6)
        # A plain training continues from it, and shards continue from a plain one.
        later = DDP(copy.deepcopy(model.module), **SMALL)
        again = AdamW(later.parameters(), lr=0.01)
        again.load_state_dict(whole)
        optimizers[1].load_state_dict(expected)
        for number in range(12, 18):
            for trained, optimizer in zip((plain, model, later), (*optimizers, again), strict=True):
                step(trained, optimizer, rank.rank, number)
        for other in (model, later):
            torch.testing.assert_close(weights(other), weights(plain), rtol=1e-4, atol=1e-6)
        handle.detach()
        assert not pending(model)
        assert optimizers[1].state.keys() == set(model.parameters())
        for number in range(18, 24):
            for trained, optimizer in zip((plain, model), optimizers[:2], strict=True):
                step(trained, optimizer, rank.rank, number)
        torch.testing.assert_close(weights(model), weights(plain), rtol=1e-4, atol=1e-6)

    on_ranks(3, main)


def test_what_would_be_silently_wrong_raises() -> None:
    def main(rank: Rank) -> None:
        model = DDP(seeded(Mlp).double(), **SMALL)
        optimizer = SGD(model.parameters(), lr=0.05)
        handle = attach(model, optimizer)

        def backward(number: int) -> Tensor:
            loss = model(batch(rank.rank, number).double()).square().mean()
            loss.backward(retain_graph=True)
            return loss

        for number in range(WARM):
            optimizer.zero_grad()
            backward(number)
            optimizer.step()
        optimizer.zero_grad()
        loss = backward(50)
        assert "before detach" in refusal(lambda: handle._attached.finish())  # gradients exist only in shards
        assert float(handle.clip_grad_norm_(1e-3)) > 0  # in fp64
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # a graph of the old weights
            loss.backward()
        optimizer.zero_grad()
        with model.no_sync():
            backward(51)
        assert "synchronised" in refusal(optimizer.step)
        optimizer.zero_grad()
        model.module.extra = nn.Parameter(torch.ones(1))
        model.module.extra.grad = torch.ones(1)
        optimizer.add_param_group({"params": [model.module.extra]})
        backward(52)
        assert "DDP does not exchange" in refusal(optimizer.step)

    on_ranks(2, main)


def test_a_collective_that_fails_between_backward_and_forward_is_explained_like_an_exchange() -> None:
    def main(rank: Rank) -> None:
        model, optimizer, handle = warmed_up(rank)
        optimizer.zero_grad()
        model(batch(rank.rank, WARM)).square().mean().backward()
        failing = mock.patch.object(dist, "all_reduce", side_effect=RuntimeError("Connection closed by peer"))
        with failing, pytest.raises(syncline.ExchangeError, match="exchanging the norm of gradients failed in step"):
            handle.clip_grad_norm_(1.0)
        assert handle.error is not None
        with pytest.raises(syncline.ExchangeError, match="unusable"):
            handle.state_dict()

    on_ranks(2, main)


def test_a_gradient_that_is_zeroed_before_the_step_is_stepped_as_zero() -> None:
    def main(rank: Rank) -> None:
        plain, model = (DDP(seeded(Mlp), **SMALL) for _ in range(2))
        optimizers = [OPTIMIZERS["sgd"](m.parameters()) for m in (plain, model)]
        attach(model, optimizers[1])
        for number in range(2 * WARM):
            for trained, optimizer in zip((plain, model), optimizers, strict=True):
                optimizer.zero_grad()
                trained(batch(rank.rank, number)).square().mean().backward()
                for parameter in list(trained.parameters())[:3]:
                    assert parameter.grad is not None
                    parameter.grad.zero_()
                optimizer.step()
        torch.testing.assert_close(weights(model), weights(plain), rtol=1e-4, atol=1e-6)

    on_ranks(2, main)


def test_nothing_stays_alive_when_a_model_is_dropped() -> None:
    def main(rank: Rank) -> None:
        model, optimizer, handle = warmed_up(rank)
        handle.wait()
        engine = weakref.ref(handle._attached._engine)
        del model, optimizer, handle
        gc.collect()
        assert engine() is None

    on_ranks(2, main)


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.rarely, self.never = (nn.Linear(16, 16) for _ in range(3))
        self.number = 0

    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        x = self.always(x)
        return self.rarely(x) if self.number % 3 == 0 else x


@pytest.mark.parametrize(
    "options", [{"find_unused_parameters": True}, {"gradient_as_bucket_view": True}, {"static_graph": True}]
)
def test_options_of_ddp(options: dict[str, Any]) -> None:
    def main(rank: Rank) -> None:
        make = Sometimes if "find_unused_parameters" in options else Mlp
        plain, model = (DDP(seeded(make), **SMALL, **options) for _ in range(2))
        optimizers = [OPTIMIZERS["sgd"](m.parameters()) for m in (plain, model)]
        attach(model, optimizers[1])
        for number in range(24):
            for trained, optimizer in zip((plain, model), optimizers, strict=True):
                step(trained, optimizer, rank.rank, number)
        assert pending(model)
        torch.testing.assert_close(weights(model), weights(plain), rtol=1e-4, atol=1e-6)

    on_ranks(2, main)


def test_buffers_are_those_of_the_first_rank_as_in_plain_ddp() -> None:
    """Also after steps that a script skips, and for buffers that it writes or replaces between two steps."""

    def main(rank: Rank) -> None:
        plain, model = (DDP(seeded(lambda: nn.Sequential(nn.BatchNorm1d(16), Mlp())), **SMALL) for _ in range(2))
        optimizers = [OPTIMIZERS["sgd"](m.parameters()) for m in (plain, model)]
        attach(model, optimizers[1])
        broadcasts = []
        model._sync_buffers = lambda own=model._sync_buffers: (broadcasts.append(number), own())
        for number in range(24):
            for trained, optimizer in zip((plain, model), optimizers, strict=True):
                if number == 18:
                    trained.module[0].running_mean = torch.full((16,), 3.0)
                    trained.module[0].running_var.fill_(5.0)
                inputs = torch.randn(4, 16, generator=torch.Generator().manual_seed(rank.rank + 10 * number))
                optimizer.zero_grad()
                trained(inputs).sum().backward()
                if number != 15:
                    optimizer.step()
            torch.testing.assert_close(dict(model.named_buffers()), dict(plain.named_buffers()), rtol=1e-4, atol=1e-5)
        assert 16 in broadcasts  # no step came before this forward pass
        assert not {14, 15, 17, 18, 19, 23} & set(broadcasts)

    on_ranks(3, main)


@pytest.mark.parametrize("levels", [(2, 2), [[0, 3], [1, 2]]])
def test_shards_of_a_hierarchical_exchange(levels: Any) -> None:
    def main(rank: Rank) -> None:
        plain, model = (DDP(seeded(Odd), **SMALL) for _ in range(2))
        optimizers = [OPTIMIZERS["adamw fused"](m.parameters()) for m in (plain, model)]
        exchange = syncline.Hierarchical(levels=levels, shape="sharded")
        handle = syncline.attach(model, exchange, optimizer=optimizers[1], overlap="forward")
        with mock.patch("syncline.predict.overlap.best_whole", return_value=frozenset([0])):  # both kinds of buckets
            for number in range(20):
                for trained, optimizer in zip((plain, model), optimizers, strict=True):
                    step(trained, optimizer, rank.rank, number)
        assert pending(model)
        torch.testing.assert_close(weights(model), weights(plain), rtol=1e-4, atol=1e-6)
        stats = handle.stats()
        assert stats.sent_bytes == handle.predicted_sent_bytes()
        assert set(stats.sent_bytes) == {"level1", "level2"}
        state, expected = handle.optimizer_state_dict()["state"], optimizers[0].state_dict()["state"]
        for index, values in expected.items():
            torch.testing.assert_close(state[index]["exp_avg"], values["exp_avg"], rtol=1e-3, atol=1e-6)
        handle.detach()
        for trained, optimizer in zip((plain, model), optimizers, strict=True):
            step(trained, optimizer, rank.rank, 20)
        torch.testing.assert_close(weights(model), weights(plain), rtol=1e-4, atol=1e-6)
        uneven = syncline.Hierarchical(levels=[[0, 1, 2], [3]])
        options = {"optimizer": optimizers[1], "overlap": "forward"}
        assert "equal size" in refusal(lambda: syncline.attach(model, uneven, **options))
        lossy = syncline.Hierarchical(across=syncline.Quantized())
        assert "across=Dense()" in refusal(lambda: syncline.attach(model, lossy, **options))

    on_ranks(4, main)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_halves_of_three_levels_give_the_sum_on_all_ranks(backend: str) -> None:
    tree = syncline.exchange.Tree.given((2, 2, 2), 8)
    topology = replace(syncline.exchange.Topology.flat(8, backend), levels=tree.levels)
    numel = 1001

    def main(comm: LocalComm) -> Tensor:
        layout = Layout.flat(numel)
        scatter, gather, part = halves_of(syncline.Hierarchical(), "fp32", numel, torch.float32, topology)
        states = [half.prepare(layout, comm) for half in (scatter, gather)]
        scatter.run(torch.arange(numel, dtype=torch.float32) + comm.rank, states[0], comm)
        flat = torch.zeros(8 * part)
        flat.view(8, -1)[owners_of(syncline.Hierarchical(), topology)[comm.rank]] = states[0].gradient
        gather.run(flat, states[1], comm)
        costs = [half.cost(numel, torch.float32, topology).sent_bytes for half in (scatter, gather)]
        assert comm.counter.sent_bytes == {name: sum(cost[name] for cost in costs) for name in costs[0]}
        return flat[:numel]

    for total in run_ranks(topology, main):
        assert torch.equal(total, 8 * torch.arange(numel, dtype=torch.float32) + 28)


def test_a_profile_and_a_network_decide_the_size_of_buckets() -> None:
    def main(rank: Rank) -> None:
        plain, model = (DDP(seeded(Mlp)) for _ in range(2))
        optimizers = [OPTIMIZERS["sgd"](m.parameters()) for m in (plain, model)]
        named = list(seeded(Mlp).named_parameters())[::-1]
        profile = made_up.profile([p.numel() for _, p in named], forward_s=0.02)
        gradients = zip(profile.gradients, named, strict=True)
        renamed = (msgspec.structs.replace(g, name=name, shape=tuple(p.shape)) for g, (name, p) in gradients)
        profile = msgspec.structs.replace(profile, gradients=tuple(renamed))
        options = {"optimizer": optimizers[1], "overlap": "forward"}
        # All gradients together take as long as computation, and start-ups take no time.
        mbit = 8e-6 * profile.gradient_bytes / (profile.backward_s + profile.forward_s)
        links = (made_up.link("local", mbit),)  # ranks are on one host here
        network = msgspec.structs.replace(made_up.network((0, 0), startup_s=1e-9), links=links)
        endless = msgspec.structs.replace(network, links=(made_up.link("local", 1e9),))
        own = reducer.own_caps(model)
        handle = syncline.attach(model, **options, network=network, profile=profile)
        for number in range(20):
            for trained, optimizer in zip((plain, model), optimizers, strict=True):
                step(trained, optimizer, rank.rank, number)
        assert len(handle.stats().buckets) > 2
        torch.testing.assert_close(weights(model), weights(plain), rtol=1e-4, atol=1e-6)
        chosen = handle.caps
        assert chosen and chosen != own
        handle.detach()
        assert (model.bucket_bytes_cap, reducer.own_caps(model)) == (plain.bucket_bytes_cap, own)
        # An attach that fails changes no buckets, whether the model has its own or those of a profile.
        some = OPTIMIZERS["sgd"](list(model.parameters())[:2])
        wrong = {**options, "optimizer": some, "network": network, "profile": profile}
        before = model._bucket_config
        assert "optimizer" in refusal(lambda: syncline.attach(model, **wrong))
        assert model._bucket_config is before
        handle = syncline.attach(model, **options, network=network, profile=profile)
        changed = model._bucket_config
        assert handle.caps == chosen and changed is not before
        assert "optimizer" in refusal(lambda: syncline.attach(model, **{**options, "optimizer": some}))
        assert model._bucket_config is changed
        # Another attach without a profile, or one whose best buckets are the model's own, restores these.
        for unneeded in ({}, {"network": endless, "profile": profile}):
            handle = syncline.attach(model, **options, network=network, profile=profile)
            assert handle.caps == chosen
            handle = syncline.attach(model, **options, **unneeded)
            assert not handle.caps and model._bucket_config is before
            for number in range(20, 28):
                for trained, optimizer in zip((plain, model), optimizers, strict=True):
                    step(trained, optimizer, rank.rank, number)
            torch.testing.assert_close(weights(model), weights(plain), rtol=1e-4, atol=1e-6)
        handle.detach()
        other = load_profile("bert-base-cuda")
        assert "another model" in refusal(lambda: syncline.attach(model, **options, network=network, profile=other))
        assert "network=" in refusal(lambda: syncline.attach(model, **options, profile=profile))
        assert "overlap='forward'" in refusal(lambda: syncline.attach(model, profile=profile))

    on_ranks(2, main)


class NormScaled(SGD):
    """Not elementwise."""


def test_wrong_use_is_refused_with_one_line() -> None:
    def main(rank: Rank) -> None:
        model = DDP(seeded(Mlp))
        optimizer = SGD(model.parameters(), lr=0.1)
        for arguments, says in (
            ({"overlap": "backward", "optimizer": optimizer}, "'forward'"),
            ({"overlap": "forward"}, "optimizer=optimizer"),
            ({"overlap": "forward", "optimizer": optimizer, "every": 2}, "leave them out"),
            ({"overlap": "forward", "optimizer": optimizer, "exchange": syncline.OkTopk()}, "Dense, Quantized or"),
            ({"overlap": "forward", "optimizer": optimizer, "gather": "int8"}, "fp32, bf16, fp16"),
            ({"gather": "bf16"}, "overlap='forward'"),
            ({"overlap": "forward", "optimizer": optimizer, "lanes": 2}, "one lane"),
            ({"overlap": "forward", "optimizer": NormScaled(model.parameters(), lr=0.1)}, "elementwise = True"),
        ):
            assert says in refusal(lambda arguments=arguments: syncline.attach(model, **arguments))
        handle = syncline.attach(model, optimizer=optimizer, overlap="forward")
        with pytest.raises(Exception, match="join"), model.join():
            model(batch(rank.rank, 0)).sum().backward()
        handle.detach()
        assert "optimizer.state_dict()" in refusal(syncline.attach(model).optimizer_state_dict)
        dist.barrier()

    on_ranks(2, main)


# --- the halves, and the prediction -----------------------------------------------------------------------------------


def test_halves_send_as_many_bytes_as_an_all_reduce() -> None:
    topology = syncline.exchange.Topology.flat(4)
    halves = [h.cost(1000, torch.float32, topology) for h in (ReduceScatter(), AllGather())]
    whole = syncline.Dense().cost(1000, torch.float32, topology)
    assert sum(phase.sent_bytes for cost in halves for phase in cost.phases) == sum(p.sent_bytes for p in whole.phases)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("numel", [1, 7, 1000])
def test_both_halves_give_the_sum_on_all_ranks(numel: int, backend: str) -> None:
    def main(comm: LocalComm) -> tuple[Tensor, dict[str, int]]:
        layout = Layout.flat(numel)
        scatter, gather = ReduceScatter(), AllGather()
        state = scatter.prepare(layout, comm)
        assert isinstance(state, ShardState)
        flat = torch.arange(numel, dtype=torch.float32) + comm.rank
        scatter.run(flat, state, comm)
        assert comm.log[0][1] == ("all_to_all" if backend == "gloo" else "reduce_scatter")
        weights = torch.zeros(comm.size * state.gradient.numel())
        weights.view(comm.size, -1)[comm.rank] = state.gradient
        gather.run(weights, gather.prepare(layout, comm), comm)
        costs = [half.cost(numel, torch.float32, comm.topology) for half in (scatter, gather)]
        predicted = sum(sum(cost.sent_bytes.values()) for cost in costs)
        assert sum(comm.counter.sent_bytes.values()) == predicted
        return weights[:numel], comm.counter.sent_bytes

    results = run_ranks(syncline.exchange.Topology.flat(3, backend), main)
    for total, _ in results:
        assert torch.equal(total, 3 * torch.arange(numel, dtype=torch.float32) + 3)


def even(count: int, communication_s: float, backward_s: float = 2.0) -> list[BucketTimes]:
    each = communication_s / count
    return [BucketTimes.measured(backward_s * (n + 1) / count, each) for n in range(count)]


@pytest.mark.parametrize(("communication_s", "least_s"), [(1.0, 3.0), (3.0, 3.0), (4.0, 4.0), (6.0, 6.0)])
def test_a_step_takes_as_long_as_computation_or_communication(communication_s: float, least_s: float) -> None:
    buckets = even(100, communication_s)
    whole = best_whole(buckets, 1.0, 2.0)
    step_s, timeline = overlapped(buckets, 1.0, 2.0, whole)
    assert least_s - 1e-9 <= step_s <= least_s * 1.06
    spans = sorted(timeline.spans, key=lambda span: span.start_s)
    assert all(a.end_s <= b.start_s + 1e-9 for a, b in itertools.pairwise(spans))
    halves_s, _ = overlapped(buckets, 1.0, 2.0, ())
    assert step_s <= halves_s


def test_a_link_that_waits_inside_a_collective_regains_its_burst() -> None:
    gather = (Transfer(0.001, busy_s=0.010, wasted_s=0.003, burst_s=0.004),)
    buckets = [BucketTimes(0.1, gather, gather, gather)] * 50
    step_s, _ = overlapped(buckets, 0.0, 0.1, range(50))
    assert step_s == pytest.approx(0.1 + 50 * 0.010 - 0.001)  # the first one starts with a full burst
    wasteful = (Transfer(0.001, busy_s=0.010, wasted_s=0.007, burst_s=0.004),)
    step_s, _ = overlapped([BucketTimes(0.1, wasteful, gather, gather)] * 50, 0.0, 0.1, range(50))
    assert step_s == pytest.approx(0.1 + 50 * 0.013)  # no more than the burst


def test_weights_are_gathered_in_the_order_in_which_forward_was_seen_to_use_them() -> None:
    times = [BucketTimes.measured(1.0 + n, 1.0, needed) for n, needed in enumerate((0.0, 0.2, 0.1, 0.3))]
    assert gather_order(times, 1.0, 4.0) == [0, 2, 1, 3]
    assert gather_order([replace(bucket, needed_s=None) for bucket in times], 1.0, 4.0) == [3, 2, 1, 0]
    step_s, timeline = overlapped(times, 1.0, 4.0, ())
    gathers = [span for span in timeline.spans if span.what == GATHERED]
    assert [span.bucket for span in gathers] == ["0", "2", "1", "3"]
    assert sum(end_s - start_s for start_s, end_s in timeline.forward) == pytest.approx(1.0)
    assert timeline.forward[0][0] == pytest.approx(gathers[0].end_s)
    assert timeline.forward[-1][1] == pytest.approx(step_s)


def test_small_buckets_are_chosen_where_forward_waits_for_the_first_one() -> None:
    profile = load_profile("bert-base-cuda").scaled(time=10.0, bytes=0.1)
    slow = made_up.network(host_of_rank=(0, 1, 2, 3), startup_s=1e-4).with_rate(600_000_000)
    own, (best, caps) = predict(profile, slow, Schedule.of(profile, "overlap")), best_overlap(profile, slow)
    assert len(caps) == 1 and caps[0] < 25 * 2**20
    assert best.iteration_s < 0.99 * own.iteration_s
    costly = made_up.network(host_of_rank=(0, 1, 2, 3), startup_s=0.05).with_rate(600_000_000)
    _, fewer = best_overlap(profile, costly)
    assert len(fewer) > 1 or fewer[0] > caps[0]


def test_fewer_bits_are_predicted_to_take_less_time() -> None:
    profile = load_profile("bert-base-cuda")
    network = made_up.network(host_of_rank=(0, 1, 2, 3)).with_rate(1_000_000_000)
    full = Schedule.of(profile, "overlap")
    times, sent = [], []
    for exchange, gather in ((syncline.Dense(), "fp32"), (syncline.Dense(), "bf16"), (syncline.Quantized(), "bf16")):
        prediction = predict(profile, network, replace(full, exchange=exchange, gather=gather))
        times.append(prediction.iteration_s)
        sent.append(prediction.link_bytes["host"])
        assert prediction.schedule.lossless == (gather == "fp32")
    assert times == sorted(times, reverse=True)
    assert sent[1] == pytest.approx(0.75 * sent[0], rel=0.01) and sent[2] == pytest.approx(0.316 * sent[0], rel=0.02)


def test_a_drawn_step_ends_with_the_next_forward_and_the_gathers_behind_it() -> None:
    profile = load_profile("bert-base-cuda")
    network = made_up.network(host_of_rank=(0, 1, 2, 3)).with_rate(10_000_000_000)
    prediction = predict(profile, network, Schedule.of(profile, "overlap"))
    forecast = mock.Mock(profile=profile, source="predicted")
    chart = step_section._predicted_timeline(forecast, "overlap", prediction)
    computing, sending = chart.rows
    assert [bar.label for bar in computing.bars][:1] == ["backward"] and "next forward" in [
        bar.label for bar in computing.bars
    ]
    gathers = [bar for bar in sending.bars if "through all_gather" in bar.tooltip]
    scatters = [bar for bar in sending.bars if "through reduce_scatter" in bar.tooltip]
    whole = [bar for bar in sending.bars if "through all_reduce" in bar.tooltip]
    assert (
        gathers
        and scatters
        and len({bar.data["bucket"] for bar in scatters + whole}) == len(prediction.schedule.buckets)
    )
    assert min(bar.start for bar in gathers) >= max(bar.end for bar in scatters)
    assert any(bar.kind == "hidden" for bar in gathers)


def test_nothing_is_whole_where_that_saves_nothing() -> None:
    assert not best_whole(even(10, 0.0), 1.0, 2.0)
    assert not best_whole(even(10, 8.0), 1.0, 2.0)
