"""Updates instead of gradients: the same weights as plain DDP where nothing is lost, and nothing lost where it is."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW, Optimizer

import syncline
from ddp_helpers import Mlp, batch, on_ranks, refusal, seeded
from syncline.cluster import Rank
from syncline.records.pieces import fragments_of

Make = Callable[[Any], Optimizer]


def sgd(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)


def adamw(parameters: Any) -> Optimizer:
    return AdamW(parameters, lr=0.01)


def sgd_in_groups(parameters: Any) -> Optimizer:
    first, *others = parameters
    return SGD([{"params": others}, {"params": [first], "lr": 0.02, "weight_decay": 0.0}], lr=0.05, momentum=0.9)


class Lion(Optimizer):
    """An optimizer of a user, with a first moment that has the usual name."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                average = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                parameter.sub_(average.lerp(parameter.grad, 0.1).sign(), alpha=group["lr"])
                average.lerp_(parameter.grad, 0.01)


class Normed(nn.Module):
    """A model with channels-last convolutions, BatchNorm and parameters of two types."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(6)
        self.head = nn.Linear(6 * 36, 3).to(torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        images = x[:, :128].reshape(-1, 2, 8, 8)
        return self.head(self.norm(self.conv(images)).flatten(1).double()).float()


def train(model: nn.Module, optimizer: Optimizer, rank: int, steps: range, shape: tuple[int, ...] = (8, 16)) -> None:
    for number in steps:
        optimizer.zero_grad()
        model(batch(rank, number, *shape)).square().mean().backward()
        optimizer.step()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([tensor.detach().double().flatten() for tensor in model.state_dict().values()])


def same_on_all(tensor: Tensor) -> bool:
    gathered = [torch.zeros_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    return all(torch.equal(tensor, other) for other in gathered)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_lossless_updates_of_sgd_give_plain_ddps_weights(ranks: int) -> None:
    def main(rank: Rank) -> None:
        plain, model = DDP(seeded(Mlp)), DDP(seeded(Mlp))
        optimizers = sgd_in_groups(plain.parameters()), sgd_in_groups(model.parameters())
        handle = syncline.attach(model, optimizer=optimizers[1])
        schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 5) for optimizer in optimizers]
        for number in range(20):
            for trained, optimizer, scheduler in zip((plain, model), optimizers, schedulers, strict=True):
                train(trained, optimizer, rank.rank, range(number, number + 1))
                scheduler.step()
            assert same_on_all(weights(model))
        torch.testing.assert_close(weights(model), weights(plain), rtol=1e-5, atol=1e-6)
        assert handle.stats().steps == 20

    on_ranks(ranks, main)


EXCHANGES = {
    "dense": syncline.Dense(),
    "int4": syncline.Quantized(bits=4),
    "oktopk": syncline.OkTopk(density=0.1),
    "hierarchical": syncline.Hierarchical(across=syncline.OkTopk(density=0.2), levels=(2, 2), shape="leader"),
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_ranks_agree_on_the_weights_after_each_exchange(name: str) -> None:
    def main(rank: Rank) -> None:
        for every, delay in ((1, 0), (3, 0), (4, 2)):
            check_agreement(rank.rank, EXCHANGES[name], every, delay)

    on_ranks(4 if name == "hierarchical" else 3, main)


def check_agreement(rank: int, exchange: syncline.Exchange, every: int, delay: int) -> None:
    model = DDP(seeded(lambda: Mlp(64)))
    optimizer = adamw(model.parameters())
    before = weights(model)
    handle = syncline.attach(model, exchange, optimizer=optimizer, every=every, delay=delay, warmup=2)
    for number in range(2 + 4 * every):
        train(model, optimizer, rank, range(number, number + 1), (8, 64))
        with handle.synced():
            agreed = weights(model)
        assert same_on_all(agreed)
        if every == 1 or number < 2 or (delay == 0 and (number - 2) % every == 0):
            assert same_on_all(weights(model))
        else:
            assert not same_on_all(weights(model))
    assert not torch.equal(agreed, before)
    handle.detach()
    assert same_on_all(weights(model))
    for state in optimizer.state.values():
        assert all(same_on_all(tensor) for tensor in state.values())
    plain = weights(model)
    train(model, optimizer, rank, range(3), (8, 64))  # plain DDP again
    assert same_on_all(weights(model))
    assert not torch.equal(weights(model), plain)


@pytest.mark.parametrize("every", [1, 3])
def test_bytes_equal_those_predicted(every: int) -> None:
    def main(rank: Rank) -> None:
        model = DDP(seeded(lambda: Mlp(64)))
        optimizer = adamw(model.parameters())
        handle = syncline.attach(model, syncline.OkTopk(density=0.1), optimizer=optimizer, every=every, warmup=0)
        train(model, optimizer, rank.rank, range(every), (8, 64))
        first = handle.stats().total_sent_bytes["world"]
        train(model, optimizer, rank.rank, range(2 * every), (8, 64))
        assert handle.stats().total_sent_bytes["world"] == 3 * first
        assert abs(handle.predicted_sent_bytes()["world"] - first / every) <= 1

    on_ranks(3, main)


def test_fragments_take_turns_that_are_about_equal() -> None:
    tensors = {f"layer {index}": torch.zeros(1 << 19) for index in range(9)} | {"wide": torch.zeros(5 << 20)}
    fragments = fragments_of(tensors, 5)
    sizes = [sum(piece.numel for turn, pieces in fragments if turn == now for piece in pieces) for now in range(5)]
    assert sum(sizes) == sum(tensor.numel() for tensor in tensors.values())
    assert max(sizes) < 1.5 * min(sizes)


def test_buffers_are_averaged_and_mixed_types_keep_their_own() -> None:
    def main(rank: Rank) -> None:
        plain, model = DDP(seeded(Normed)), DDP(seeded(Normed))
        optimizer = sgd(model.parameters())
        handle = syncline.attach(model, optimizer=optimizer)
        train(model, optimizer, rank.rank, range(9), (8, 128))
        assert not same_on_all(weights(model))  # the statistics of BatchNorm
        with handle.synced():
            assert same_on_all(weights(model))
        train(model, optimizer, rank.rank, range(9, 21), (8, 128))
        assert same_on_all(weights(model))
        train(plain, sgd(plain.parameters()), rank.rank, range(21), (8, 128))
        for name, parameter in plain.named_parameters():
            mine = model.get_parameter(name)
            assert mine.dtype == parameter.dtype
            assert mine.stride() == parameter.stride()
            torch.testing.assert_close(mine, parameter, rtol=1e-4, atol=1e-5)

    on_ranks(2, main)


def test_weights_in_bf16_lose_no_update() -> None:
    def main(rank: Rank) -> None:
        model = DDP(seeded(lambda: Mlp().to(torch.bfloat16)))
        start = weights(model)
        optimizer = SGD(model.parameters(), lr=2**-6)
        handle = syncline.attach(model, optimizer=optimizer)
        for number in range(8):
            optimizer.zero_grad()
            model(batch(rank.rank, number).to(torch.bfloat16)).square().mean().backward()
            optimizer.step()
            assert same_on_all(weights(model))
        anchor = torch.cat([kinds["anchor"].flatten() for kinds in handle.state_dict()["tensors"].values()])
        assert anchor.dtype == torch.float32
        torch.testing.assert_close(anchor.to(torch.bfloat16).double().sort()[0], weights(model).sort()[0])
        assert not torch.equal(weights(model), start)

    on_ranks(2, main)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
def test_first_moments_start_anew_where_an_update_was_applied(options: dict[str, Any]) -> None:
    def main(rank: Rank) -> None:
        model = DDP(seeded(lambda: Mlp(64)))
        optimizer = AdamW(model.parameters(), lr=0.01, **options)
        syncline.attach(model, syncline.OkTopk(density=0.05), optimizer=optimizer, warmup=0)
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        train(model, optimizer, rank.rank, range(1), (8, 64))
        reset = changed = 0
        for name, parameter in model.named_parameters():
            applied = parameter.detach() != before[name]
            moment = optimizer.state[parameter]["exp_avg"]
            assert not ((moment == 0) & ~applied & (optimizer.state[parameter]["exp_avg_sq"] > 0)).any()
            reset += int(((moment == 0) & applied).sum())
            changed += int(applied.sum())
        assert 0 < reset <= changed

    on_ranks(2, main)


def test_first_moments_of_a_users_optimizer_start_anew_too() -> None:
    def main(rank: Rank) -> None:
        model = DDP(seeded(lambda: Mlp(64)))
        optimizer = Lion(model.parameters())
        handle = syncline.attach(model, syncline.OkTopk(density=0.05), optimizer=optimizer, warmup=0)
        before = weights(model)
        train(model, optimizer, rank.rank, range(1), (8, 64))
        applied = weights(model) != before
        moments = torch.cat([optimizer.state[parameter]["exp_avg"].flatten() for parameter in model.parameters()])
        assert 0 < int((moments == 0).sum()) <= int(applied.sum())
        assert not ((moments == 0) & ~applied).any()
        train(model, optimizer, rank.rank, range(1, 6), (8, 64))
        assert same_on_all(weights(model))
        assert handle.stats().steps == 6

    on_ranks(2, main)


class OwnMomentum(Optimizer):
    """An optimizer whose first moment has a name that nobody knows."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                average = self.state[parameter].setdefault("my_average", torch.zeros_like(parameter))
                parameter.sub_(average.mul_(0.9).add_(parameter.grad), alpha=0.1)


def test_an_unknown_first_moment_is_refused_for_sparse_updates_in_every_step() -> None:
    def main(rank: Rank) -> None:
        model = DDP(seeded(lambda: Mlp(64)))
        optimizer = OwnMomentum(model.parameters())
        syncline.attach(model, syncline.OkTopk(density=0.05), optimizer=optimizer, warmup=0)
        with pytest.raises(syncline.UsageError, match=r"OwnMomentum has a state 'my_average' for .*every=5 or more"):
            train(model, optimizer, rank.rank, range(1), (8, 64))
        for exchange, every in ((syncline.OkTopk(density=0.05), 2), (syncline.Quantized(bits=8), 1)):
            other = DDP(seeded(lambda: Mlp(64)))
            syncline.attach(other, exchange, optimizer=OwnMomentum(other.parameters()), every=every, warmup=0)

    on_ranks(2, main)


def test_accumulation_needs_no_no_sync_and_accepts_it() -> None:
    def main(rank: Rank) -> None:
        final = []
        for inside in (True, False):
            model = DDP(seeded(Mlp))
            optimizer = sgd(model.parameters())
            syncline.attach(model, optimizer=optimizer)
            for number in range(0, 6, 2):
                optimizer.zero_grad(set_to_none=inside)
                if inside:
                    with model.no_sync():
                        model(batch(rank.rank, number)).square().mean().backward()
                else:
                    model(batch(rank.rank, number)).square().mean().backward()
                model(batch(rank.rank, number + 1)).square().mean().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
            final.append(weights(model))
        assert torch.equal(*final)
        assert same_on_all(final[0])

    on_ranks(2, main)


def test_an_average_of_synced_weights_is_the_same_on_all_ranks() -> None:
    def main(rank: Rank) -> None:
        model = DDP(seeded(lambda: Mlp(64)))
        optimizer = adamw(model.parameters())
        handle = syncline.attach(model, EXCHANGES["oktopk"], optimizer=optimizer, every=3, delay=1, warmup=2)
        decay = torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
        average = torch.optim.swa_utils.AveragedModel(model.module, multi_avg_fn=decay)
        start = weights(average)
        for number in range(9):
            train(model, optimizer, rank.rank, range(number, number + 1), (8, 64))
            with handle.synced():
                average.update_parameters(model.module)
        assert not same_on_all(weights(model))
        assert same_on_all(weights(average))
        assert not torch.equal(weights(average), start)

    on_ranks(2, main)


def test_one_rank_may_evaluate_alone_but_no_rank_may_train_on_synced_weights() -> None:
    def main(rank: Rank) -> None:
        finals = []
        for evaluates in (False, True):
            model = DDP(seeded(lambda: Mlp(64)))
            optimizer = adamw(model.parameters())
            handle = syncline.attach(model, EXCHANGES["oktopk"], optimizer=optimizer, every=4, delay=2, warmup=2)
            for number in range(9):
                train(model, optimizer, rank.rank, range(number, number + 1), (8, 64))
                if evaluates and rank.rank == 0:
                    with handle.synced(), torch.no_grad():
                        model.eval()
                        loss = model(batch(0, 100, 8, 64)).square().mean()
                        model.train()
                        with handle.synced():  # a function that also evaluates
                            assert loss == model.module(batch(0, 100, 8, 64)).square().mean()
            finals.append(weights(model))
        assert torch.equal(*finals)
        with handle.synced(), pytest.raises(syncline.UsageError, match=r"optimizer.step\(\) inside handle.synced\(\)"):
            optimizer.step()
        assert torch.equal(weights(model), finals[0])

    on_ranks(2, main)


@pytest.mark.parametrize("inside", [True, False])
def test_a_loop_that_all_ranks_end_early_leaves_the_same_model_everywhere(inside: bool) -> None:
    def main(rank: Rank) -> None:
        model = DDP(seeded(lambda: Mlp(64)))
        optimizer = sgd_in_groups(model.parameters())
        handle = syncline.attach(model, EXCHANGES["int4"], optimizer=optimizer, every=5, delay=2, warmup=1)
        for number in range(100):
            train(model, optimizer, rank.rank, range(number, number + 1), (8, 64))
            if number == 7:  # every=5, so that parts were sent at different steps, and results are under way
                break
        assert not same_on_all(weights(model))
        if inside:
            with handle.synced():
                agreed = weights(model)
                handle.detach()
            torch.testing.assert_close(weights(model), agreed)
        else:
            handle.detach()
        assert same_on_all(weights(model))
        assert all(same_on_all(tensor) for state in optimizer.state.values() for tensor in state.values())
        train(model, optimizer, rank.rank, range(3), (8, 64))
        assert same_on_all(weights(model))

    on_ranks(2, main)


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_that_one_ranks_scaler_skips(fused: bool) -> None:
    def main(rank: Rank) -> None:
        model = DDP(seeded(Mlp))
        optimizer = AdamW(model.parameters(), lr=0.01, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        handle = syncline.attach(model, optimizer=optimizer, warmup=1, scaler=scaler)
        other = DDP(seeded(Mlp))  # its handle must not take the scaler from the first one
        syncline.attach(other, optimizer=adamw(other.parameters()), scaler=scaler).detach()
        for number in range(6):
            before = weights(model)
            optimizer.zero_grad()
            loss = model(batch(rank.rank, number)).square().mean()
            scaler.scale(loss * (float("inf") if (number, rank.rank) == (3, 1) else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            assert same_on_all(weights(model))
            assert not torch.equal(before, weights(model))
        assert scaler.get_scale() == (4.0 if rank.rank == 1 else 8.0)
        assert handle.stats().steps == 6
        handle.detach()
        assert "step" not in vars(scaler)

    on_ranks(2, main)


@pytest.mark.parametrize("every", [1, 2])
def test_parameters_that_get_other_memory_are_still_exchanged(every: int) -> None:
    """Some frameworks copy parameters when they evaluate for the first time."""

    def main(rank: Rank) -> None:
        model = DDP(seeded(lambda: Mlp(64)))
        optimizer = adamw(model.parameters())
        handle = syncline.attach(model, EXCHANGES["oktopk"], optimizer=optimizer, every=every, warmup=0)
        for number in range(6):
            train(model, optimizer, rank.rank, range(number, number + 1), (8, 64))
            before = weights(model)
            with handle.synced():
                for parameter in model.parameters():
                    parameter.data = parameter.data.clone()
                assert same_on_all(weights(model))
            assert torch.equal(weights(model), before)
        handle.detach()
        assert same_on_all(weights(model))

    on_ranks(2, main)


@pytest.mark.parametrize("every", [1, 2])
def test_updates_that_are_not_finite_are_dropped_on_all_ranks(every: int) -> None:
    def main(rank: Rank) -> None:
        model = DDP(seeded(Mlp))
        optimizer = adamw(model.parameters())
        syncline.attach(model, syncline.Quantized(bits=8), optimizer=optimizer, every=every, warmup=0)
        with pytest.warns(match="the updates are not finite") if rank.rank == 0 else pytest.warns():
            for number in range(8):
                optimizer.zero_grad()
                loss = model(batch(rank.rank, number)).square().mean()
                (loss * (float("nan") if (number, rank.rank) == (2 * every, 1) else 1.0)).backward()
                optimizer.step()
            if rank.rank:
                import warnings

                warnings.warn("so that this rank has a warning, too", stacklevel=1)
        assert torch.isfinite(weights(model)).all()
        for state in optimizer.state.values():
            assert all(torch.isfinite(tensor).all() for tensor in state.values())

    on_ranks(2, main)


def resumed(
    exchange: syncline.Exchange,
    options: Mapping[str, Any],
    make: Make,
    folder: Path,
    saved_at: int,
    net: Callable[[], nn.Module] = lambda: Mlp(128),
    **ddp: Any,
) -> None:
    def main(rank: Rank) -> None:
        def attached() -> tuple[DDP, Optimizer, syncline.Handle]:
            model = DDP(seeded(net), **ddp)
            optimizer = make(model.parameters())
            return model, optimizer, syncline.attach(model, exchange, optimizer=optimizer, **options)

        model, optimizer, handle = attached()
        train(model, optimizer, rank.rank, range(saved_at), (8, 128))
        with handle.synced() if saved_at > 2 else contextlib.nullcontext():
            handle.save(folder)  # saves each rank's own weights in any case
        of_first = [copy.deepcopy(model.module.state_dict()), copy.deepcopy(optimizer.state_dict())]
        dist.broadcast_object_list(of_first)  # what scripts save: rank 0's model and optimizer
        train(model, optimizer, rank.rank, range(saved_at, saved_at + 9), (8, 128))

        other, other_optimizer, other_handle = attached()
        other.module.load_state_dict(of_first[0])
        other_optimizer.load_state_dict(of_first[1])
        other_handle.load(folder)
        assert other_handle.stats().steps == saved_at
        train(other, other_optimizer, rank.rank, range(saved_at, saved_at + 9), (8, 128))
        assert torch.equal(weights(other), weights(model))
        for one, two in zip(optimizer.state.values(), other_optimizer.state.values(), strict=True):
            assert all(torch.equal(one[key], two[key]) for key in one)

    on_ranks(2, main)


@pytest.mark.parametrize("name", ["oktopk", "int4"])
@pytest.mark.parametrize(("every", "delay"), [(1, 0), (4, 2)])
@pytest.mark.parametrize("saved_at", [2, 8])
def test_a_checkpoint_resumes_bit_equal(name: str, every: int, delay: int, saved_at: int, tmp_path: Path) -> None:
    resumed(EXCHANGES[name], {"every": every, "delay": delay, "warmup": 4}, adamw, tmp_path / "state", saved_at)


def test_a_checkpoint_resumes_bit_equal_with_an_outer_optimizer_groups_and_a_static_graph(tmp_path: Path) -> None:
    options = {"every": 3, "outer": syncline.Nesterov(), "warmup": 1}
    resumed(syncline.Dense(), options, sgd_in_groups, tmp_path / "state", 7, net=Normed, static_graph=True)


def test_rank_0s_model_and_optimizer_alone_resume() -> None:
    def main(rank: Rank) -> None:
        model = DDP(seeded(lambda: Mlp(64)))
        optimizer = adamw(model.parameters())
        syncline.attach(model, EXCHANGES["oktopk"], optimizer=optimizer, every=3, warmup=0)
        train(model, optimizer, rank.rank, range(8), (8, 64))
        saved = [copy.deepcopy(model.module.state_dict()), copy.deepcopy(optimizer.state_dict())]
        dist.broadcast_object_list(saved)
        net = Mlp(64)
        net.load_state_dict(saved[0])
        other = DDP(net)
        again = adamw(other.parameters())
        again.load_state_dict(saved[1])
        syncline.attach(other, EXCHANGES["oktopk"], optimizer=again, every=3, warmup=0)
        start = weights(other)
        train(other, again, rank.rank, range(8, 14), (8, 64))
        assert torch.isfinite(weights(other)).all()
        assert not torch.equal(weights(other), start)

    on_ranks(2, main)


def test_a_checkpoint_of_another_world_size(tmp_path: Path) -> None:
    options: dict[str, Any] = {"every": 3, "warmup": 0}

    def save(rank: Rank) -> None:
        model = DDP(seeded(lambda: Mlp(64)))
        optimizer = adamw(model.parameters())
        handle = syncline.attach(model, EXCHANGES["oktopk"], optimizer=optimizer, **options)
        train(model, optimizer, rank.rank, range(7), (8, 64))
        handle.save(tmp_path / "state")

    def load(rank: Rank) -> None:
        for how in ("redistribute", "reset"):
            model = DDP(seeded(lambda: Mlp(64)))
            optimizer = adamw(model.parameters())
            handle = syncline.attach(model, EXCHANGES["oktopk"], optimizer=optimizer, **options)
            with pytest.raises(syncline.UsageError, match="saved by 3 ranks"):
                handle.load(tmp_path / "state")
            handle.load(tmp_path / "state", on_world_size=how)
            with handle.synced():
                assert same_on_all(weights(model))
            train(model, optimizer, rank.rank, range(7, 14), (8, 64))
            with handle.synced():
                assert same_on_all(weights(model))

    on_ranks(3, save)
    on_ranks(2, load)


@pytest.mark.parametrize("options", [{"static_graph": True}, {"find_unused_parameters": True}, {}])
@pytest.mark.parametrize("warmup", [0, 1, 3])
def test_options_of_ddp(options: dict[str, Any], warmup: int) -> None:
    def main(rank: Rank) -> None:
        model, plain = (DDP(seeded(Mlp), gradient_as_bucket_view=True, **options) for _ in range(2))
        optimizer = sgd(model.parameters())
        handle = syncline.attach(model, optimizer=optimizer, warmup=warmup)
        train(model, optimizer, rank.rank, range(8))
        assert same_on_all(weights(model))
        if not warmup:
            train(plain, sgd(plain.parameters()), rank.rank, range(8))
            torch.testing.assert_close(weights(model), weights(plain), rtol=1e-5, atol=1e-6)
        handle.detach()
        train(model, optimizer, rank.rank, range(4))
        assert same_on_all(weights(model))

    on_ranks(2, main)


def test_another_attach_starts_from_common_weights() -> None:
    def main(rank: Rank) -> None:
        model = DDP(seeded(Mlp))
        optimizer = sgd(model.parameters())
        old = syncline.attach(model, optimizer=optimizer, every=5, warmup=0)
        train(model, optimizer, rank.rank, range(4))
        assert not same_on_all(weights(model))
        syncline.attach(model, syncline.Dense())
        assert same_on_all(weights(model))
        assert "detached" in refusal(old.stats)
        train(model, optimizer, rank.rank, range(4))
        assert same_on_all(weights(model))

    on_ranks(2, main)


def test_join_is_refused_on_every_rank() -> None:
    def main(rank: Rank) -> None:
        model = DDP(seeded(Mlp))
        optimizer = sgd(model.parameters())
        syncline.attach(model, optimizer=optimizer)
        with pytest.raises(syncline.UsageError, match=r"join\(\) is not supported while updates"), model.join():
            train(model, optimizer, rank.rank, range(2))

    on_ranks(2, main)


def test_wrong_arguments_are_refused_with_one_line() -> None:
    def main(rank: Rank) -> None:
        model = DDP(seeded(Mlp))
        optimizer = sgd(model.parameters())
        for options, expected in (
            ({"every": 0, "optimizer": optimizer}, "every is 0: it must be a number of steps, at least 1"),
            ({"warmup": -1, "optimizer": optimizer}, "warmup is -1"),
            ({"delay": 1, "optimizer": optimizer}, "spoils the training: use delay=0, or every=5 or more"),
            ({"delay": 5, "every": 5, "optimizer": optimizer}, "delay is 5: it must be less than every"),
            ({"outer": 0.7, "optimizer": optimizer}, r"outer is 0.7: pass syncline.Nesterov"),
            ({"every": 5}, "every, warmup, delay and outer are for updates: pass optimizer= too"),
            ({"optimizer": "sgd"}, "optimizer is a str"),
            ({"optimizer": torch.optim.LBFGS(model.parameters())}, "the updates of LBFGS cannot be exchanged"),
            ({"optimizer": sgd(list(model.parameters())[:2])}, "requires a gradient, but the optimizer does not have"),
            ({"optimizer": sgd([*model.parameters(), nn.Parameter(torch.ones(1))])}, "not in this model"),
        ):
            told = refusal(lambda options=options: syncline.attach(model, syncline.OkTopk(), **options))
            assert expected in told, told
        slower = SGD(model.parameters(), lr=0.1 + rank.rank)
        told = refusal(lambda: syncline.attach(model, optimizer=slower), syncline.MismatchError)
        assert "optimizer.group 0.lr is 0.1 on rank 0; 1.1 on rank 1" in told

    on_ranks(2, main)
