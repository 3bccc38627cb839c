"""DDP's semantics hold with an exchange attached: bit for bit with `Dense()`, up to rounding with 16-bit wires.

Each test compares real processes over real gloo with plain DDP from the same start, on the same buckets.
"""

from __future__ import annotations

import contextlib
import hashlib

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import syncline
from ddp_helpers import (
    EXACT,
    SMALL_BUCKETS,
    WAYS,
    Branches,
    Images,
    MixedTypes,
    Mlp,
    Trained,
    Way,
    assert_alike,
    assert_trains_like_plain_ddp,
    batch,
    branch_step,
    gradients,
    image_step,
    on_ranks,
    refusal,
    seeded,
    square_loss_step,
    train,
)
from exchanges import ErrorFeedback
from survivors import wait_for
from syncline.cluster import Rank


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_training_equals_plain_ddp(ranks: int) -> None:
    on_ranks(ranks, lambda rank: assert_trains_like_plain_ddp(Mlp, square_loss_step(rank)) and None)


def test_no_sync_accumulation_equals_the_large_batch() -> None:
    parts = 3

    def main(rank: Rank) -> None:
        def part(of: int, number: int, index: int) -> Tensor:
            return batch(of, parts * number + index)

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
            for index in range(parts):
                with model.no_sync() if index < parts - 1 else contextlib.nullcontext():
                    (model(part(rank.rank, number, index)).square().mean() / parts).backward()
            optimizer.step()

        def large_batch_step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
            everything = [part(of, number, index) for of in range(rank.world_size) for index in range(parts)]
            model(torch.cat(everything)).square().mean().backward()
            optimizer.step()

        plain = assert_trains_like_plain_ddp(Mlp, step)
        alone = train(seeded(Mlp), large_batch_step, 4)
        for number, (accumulated, large) in enumerate(zip(plain.gradients, alone.gradients, strict=True)):
            for name, gradient in large.items():
                assert torch.allclose(accumulated[f"module.{name}"], gradient, atol=1e-6), (number, name)

    on_ranks(2, main)


def test_join_with_uneven_inputs_equals_plain_ddps_join() -> None:
    def main(rank: Rank) -> None:
        def train_uneven(model: DDP) -> Trained:
            with model.join():
                return train(model, square_loss_step(rank), 2 + 2 * rank.rank)

        def final(model: DDP) -> Trained:
            train_uneven(model)
            return Trained(final={name: tensor.clone() for name, tensor in model.state_dict().items()})

        plain = final(DDP(seeded(Mlp), **SMALL_BUCKETS))
        for way in WAYS:
            model = DDP(seeded(Mlp), **SMALL_BUCKETS)
            syncline.attach(model, way.exchange, lanes=way.lanes)
            assert_alike(final(model), plain, way)

    on_ranks(3, main)


@pytest.mark.parametrize("attached", [True, False])
def test_join_by_the_effective_world_size_is_refused_on_every_rank(attached: bool) -> None:
    def main(rank: Rank) -> str:
        model = DDP(seeded(Mlp), **SMALL_BUCKETS)
        handle = syncline.attach(model)
        if not attached:
            handle.detach()

        def train_uneven() -> None:
            with model.join(divide_by_initial_world_size=False):
                for number in range(rank.rank):  # rank 0 has no inputs, and is refused too
                    model(batch(rank.rank, number)).sum().backward()

        line = refusal(train_uneven)
        wait_for(rank, 0, 1)  # a rank that ends would close its connections to the other, which may still be in join
        return line

    assert all("divide_by_initial_world_size=False" in line for line in on_ranks(2, main))


def test_parameters_that_some_or_all_ranks_leave_unused() -> None:
    def main(rank: Rank) -> None:
        plain = assert_trains_like_plain_ddp(Branches, branch_step(rank), find_unused_parameters=True)
        assert plain.gradients[0]["module.heads.0.weight"] is not None
        assert plain.gradients[0]["module.heads.2.weight"] is None

    on_ranks(2, main)


def test_frozen_parameters_are_not_exchanged() -> None:
    def frozen() -> nn.Module:
        net = Mlp()
        net.middle.requires_grad_(False)
        return net

    def main(rank: Rank) -> None:
        plain = assert_trains_like_plain_ddp(frozen, square_loss_step(rank))
        assert plain.gradients[0]["module.middle.weight"] is None

    on_ranks(2, main)


def test_parameters_frozen_and_unfrozen_during_training() -> None:
    def main(rank: Rank) -> None:
        plain_step = square_loss_step(rank)

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
            model.module.first.requires_grad_(number not in (2, 3))
            plain_step(model, optimizer, number)

        plain = assert_trains_like_plain_ddp(Mlp, step, steps=6, find_unused_parameters=True)
        assert plain.gradients[2]["module.first.weight"] is None
        assert plain.gradients[4]["module.first.weight"] is not None

    on_ranks(2, main)


def test_parameters_frozen_between_ddp_and_attach() -> None:
    def main(rank: Rank) -> None:
        def run(way: Way | None) -> Trained:
            model = DDP(seeded(Mlp), find_unused_parameters=True, **SMALL_BUCKETS)
            model.module.first.requires_grad_(False)  # still in DDP's buckets
            if way is not None:
                syncline.attach(model, way.exchange, lanes=way.lanes)
            return train(model, square_loss_step(rank), 3)

        plain = run(None)
        for way in WAYS:
            assert_alike(run(way), plain, way)

    on_ranks(2, main)


def test_static_graph_equals_plain_ddp_also_after_its_late_rebuild() -> None:
    def main(rank: Rank) -> None:
        assert_trains_like_plain_ddp(Mlp, square_loss_step(rank), steps=6, static_graph=True)

    on_ranks(2, main)


def test_static_graph_with_no_sync_is_refused_while_attached() -> None:
    def main(rank: Rank) -> str:
        model = DDP(seeded(Mlp), static_graph=True, **SMALL_BUCKETS)
        syncline.attach(model)
        handle = syncline.attach(model)
        with model.no_sync():
            line = refusal(lambda: model(batch(rank.rank, 0)))
        handle.detach()
        with model.no_sync():
            model(batch(rank.rank, 0))  # after detach, this is up to DDP
        return line

    assert all("no_sync() with static_graph=True" in line for line in on_ranks(2, main))


@pytest.mark.parametrize("view", [True, False])
def test_gradients_as_views_of_their_buckets(view: bool) -> None:
    def main(rank: Rank) -> None:
        assert_trains_like_plain_ddp(Mlp, square_loss_step(rank), gradient_as_bucket_view=view)

    on_ranks(2, main)


def test_an_overflow_on_one_rank_skips_the_step_on_all_of_them() -> None:
    overflow_at, steps = 2, 5

    def main(rank: Rank) -> list[str]:
        def run(way: Way | None) -> tuple[Trained, list[float]]:
            model = DDP(seeded(Mlp), **SMALL_BUCKETS)
            if way is not None:
                syncline.attach(model, way.exchange, lanes=way.lanes)
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
            trained, scales = Trained(), []
            for number in range(steps):
                before = [p.detach().clone() for p in model.parameters()]
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(batch(rank.rank, number)).square().mean()
                if number == overflow_at and rank.rank == 1:
                    loss = loss * torch.inf
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                scales.append(scaler.get_scale())
                skipped = all(torch.equal(b, p) for b, p in zip(before, model.parameters(), strict=True))
                assert skipped == (number == overflow_at), (way, number)
                if not skipped:
                    trained.gradients.append(gradients(model))
            trained.final = {name: p.detach().clone() for name, p in model.named_parameters()}
            return trained, scales

        plain, plain_scales = run(None)
        digests = []
        for way in WAYS:
            trained, scales = run(way)
            assert scales == plain_scales == [1024.0, 1024.0, 512.0, 512.0, 512.0], way
            assert_alike(trained, plain, way)
            final = b"".join(tensor.numpy().tobytes() for tensor in trained.final.values())
            digests.append(hashlib.sha256(final).hexdigest())
        return digests

    first, second = on_ranks(2, main)
    assert first == second


def test_parameters_of_several_types_in_one_model() -> None:
    def main(rank: Rank) -> None:
        assert_trains_like_plain_ddp(MixedTypes, square_loss_step(rank))
        model = DDP(seeded(MixedTypes), **SMALL_BUCKETS)
        handle = syncline.attach(model)
        train(model, square_loss_step(rank), 2)
        assert handle.stats().sent_bytes == handle.predicted_sent_bytes()  # bytes depend on the dtype of each bucket

    on_ranks(2, main)


@pytest.mark.parametrize("broadcast", [True, False])
def test_channels_last_convolutions_and_batch_norm_buffers(broadcast: bool) -> None:
    def main(rank: Rank) -> list[float]:
        plain = assert_trains_like_plain_ddp(Images, image_step(rank), ways=EXACT, broadcast_buffers=broadcast)
        assert plain.final["module.first.weight"].is_contiguous(memory_format=torch.channels_last)
        return plain.final["module.norm.running_mean"].tolist()

    first, second = on_ranks(2, main)
    assert first != second  # buffers depend on the rank's own batch; the helper has compared them on each rank


def test_the_state_of_a_channels_last_parameter_has_its_logical_shape() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last))

        def forward(self, x: Tensor) -> Tensor:
            return (self.weight * x).sum()

    def main(rank: Rank) -> None:
        model = DDP(Weighted())
        handle = syncline.attach(model, ErrorFeedback())
        gradient = 257.0 + torch.arange(48).reshape(
            4, 3, 2, 2
        )  # bf16 cannot represent most of these, so residuals are nonzero
        model(gradient).backward()
        residual = handle.state_dict()["tensors"]["weight"]["residual"]
        half = gradient / 2
        assert torch.equal(residual, half - half.bfloat16().float())

    on_ranks(2, main)


def test_models_that_take_turns_within_one_step() -> None:
    """Adversarial training: two forward passes before two backward passes, and one backward through both models."""

    def main(rank: Rank) -> None:
        def run(way: Way | None) -> list[Trained]:
            pair = [DDP(seeded(Mlp), **SMALL_BUCKETS), DDP(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))]
            torch.manual_seed(3)
            for parameter in pair[1].parameters():
                nn.init.normal_(parameter.data)
            if way is not None:
                for model in pair:
                    syncline.attach(model, way.exchange, lanes=way.lanes)
            maker, judge = pair
            optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in pair]
            trained = [Trained(), Trained()]
            for number in range(4):
                noise = batch(rank.rank, number)
                made, real = maker(noise), judge(noise[:, :4])
                real.mean().backward()
                made.square().mean().backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                judge(maker(noise)).square().mean().backward()
                for optimizer, model, record in zip(optimizers, pair, trained, strict=True):
                    record.gradients.append(gradients(model))
                    optimizer.step()
                    optimizer.zero_grad()
            return trained

        plain = run(None)
        for way in WAYS:
            for mine, theirs in zip(run(way), plain, strict=True):
                assert_alike(mine, theirs, way)

    on_ranks(2, main)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def test_a_model_of_one_parameter() -> None:
    on_ranks(3, lambda rank: assert_trains_like_plain_ddp(Scale, square_loss_step(rank)) and None)


class Thousands(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([torch.full((3,), 0.01 * index) for index in range(3000)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(list(self.parts)).sin() * x.sum()


def test_complex_parameters() -> None:
    class Rotation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Parameter(torch.randn(16, dtype=torch.complex64))
            self.scale = nn.Parameter(torch.randn(16))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.turn).abs() * self.scale

    def main(rank: Rank) -> None:
        def gradients(exchange: syncline.Exchange | None) -> tuple[Tensor, ...]:
            model = DDP(seeded(Rotation))
            handle = syncline.attach(model, exchange) if exchange is not None else None
            for number in range(3):
                model.zero_grad()
                model(batch(rank.rank, number)).sum().backward()
            if handle is not None and isinstance(exchange, ErrorFeedback):
                state = handle.state_dict()
                assert state["tensors"]["turn"]["residual"].shape == (16, 2)
                handle.load_state_dict(state)
            return model.module.turn.grad, model.module.scale.grad

        plain = gradients(None)
        for ours, theirs in zip(gradients(syncline.Dense()), plain, strict=True):
            assert torch.equal(ours, theirs)
        for ours, theirs in zip(gradients(ErrorFeedback()), plain, strict=True):
            assert torch.allclose(ours, theirs, rtol=0.02, atol=0.1)

    on_ranks(2, main)


def test_a_model_of_thousands_of_parameters() -> None:
    def main(rank: Rank) -> None:
        assert_trains_like_plain_ddp(Thousands, square_loss_step(rank), steps=3, ways=EXACT, bucket_cap_mb=0.01)

    on_ranks(2, main)


@pytest.mark.parametrize("outside", [True, False])
def test_compiled_models(outside: bool) -> None:
    width, buckets = 600, {"bucket_cap_mb": 1}  # the smallest at which torch.compile splits graphs at DDP's buckets

    def main(rank: Rank) -> None:
        def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
            model(batch(rank.rank, number, 4, width)).square().mean().backward()
            optimizer.step()

        def compiled() -> nn.Module:
            torch._dynamo.reset()
            net = seeded(lambda: Mlp(width))
            if outside:
                return torch.compile(DDP(net, **buckets), backend="aot_eager")
            return DDP(torch.compile(net, backend="aot_eager"), **buckets)

        plain = train(compiled(), step, 3)
        model = compiled()
        handle = syncline.attach(model)
        assert_alike(train(model, step, 3), plain, EXACT[0])
        assert len(handle.stats().buckets) > 1
        handle = syncline.attach(model, ErrorFeedback())
        train(model, step, 1)
        assert set(handle.state_dict()["tensors"]) == set(dict(Mlp().named_parameters()))

    on_ranks(2, main)
