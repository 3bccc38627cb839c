"""Fewer bits with weights that are gathered behind the next forward pass, to the owners and on the way back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW

import syncline
from ddp_helpers import Mlp, batch, on_ranks, refusal, seeded
from syncline import Dense, Quantized
from syncline.cluster import Rank
from syncline.dist.local_comm import LocalComm, run_ranks
from syncline.exchange import Exchange, Layout
from syncline.exchange.lossy_halves import halves_of
from syncline.overlap.guards import PendingParameter

SMALL = {"bucket_cap_mb": 0.002}
WARM = 8  # steps after which weights are in shards, whatever DDP rebuilds
KINDS: dict[str, tuple[Exchange, str, float]] = {  # exchange, format of weights, largest difference from plain DDP
    "bf16 to the owner": (Dense(wire="bf16"), "fp32", 2e-3),
    "fp16 to the owner": (Dense(wire="fp16"), "fp32", 2e-3),
    "8 bits to the owner": (Quantized(bits=8, block=32), "fp32", 2e-3),
    "4 bits without feedback": (Quantized(bits=4, block=32, error_feedback=False), "fp32", 2e-2),
    "weights in bf16": (Dense(), "bf16", 4e-3),
    "weights in fp16": (Dense(), "fp16", 1e-3),
    "4 bits there, bf16 back": (Quantized(bits=4, block=32), "bf16", 2e-2),
}


def weights(model: nn.Module) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in model.parameters()])


def equal_on_all_ranks(tensor: Tensor) -> bool:
    first = tensor.clone()
    dist.broadcast(first, 0)
    return torch.equal(first, tensor)


@pytest.mark.parametrize("ranks", [2, 3])
def test_training_stays_close_to_plain_ddp_and_ranks_agree(ranks: int) -> None:
    def main(rank: Rank) -> None:
        for name, (exchange, gather, tolerance) in KINDS.items():
            plain, model = (DDP(seeded(Mlp), **SMALL) for _ in range(2))
            optimizers = [SGD(m.parameters(), lr=0.05, momentum=0.5) for m in (plain, model)]
            options = {"optimizer": optimizers[1], "overlap": "forward", "gather": gather}
            handle = syncline.attach(model, exchange, **options)
            for number in range(20):
                for trained, optimizer in zip((plain, model), optimizers, strict=True):
                    optimizer.zero_grad()
                    trained(batch(rank.rank, number)).square().mean().backward()
                    optimizer.step()
            assert any(type(p) is PendingParameter for p in model.parameters()), name
            assert handle.stats().sent_bytes == handle.predicted_sent_bytes(), name
            dense = 2 * (ranks - 1) / ranks * 4 * weights(model).numel()
            assert sum(handle.stats().sent_bytes.values()) < 0.9 * dense, name
            trained = weights(model)
            assert equal_on_all_ranks(trained), name
            assert 0 < (trained - weights(plain)).abs().max() < tolerance, name
            rounded = trained.to(torch.bfloat16).float()
            assert torch.equal(trained, rounded) == (gather == "bf16"), name
            handle.detach()
            exact = weights(model)  # the masters, if weights were rounded
            assert equal_on_all_ranks(exact), name
            assert torch.equal(exact, trained) == (gather == "fp32"), name
            torch.testing.assert_close(exact, trained, rtol=2**-8, atol=1e-6)

    on_ranks(ranks, main)


class Given(nn.Module):
    """Two vectors whose gradients are the numbers that a step is given."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(700)), nn.Parameter(torch.zeros(1300))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return (self.a * a).sum() + (self.b * b).sum()


def given(rank: int, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(700, generator=generator), torch.randn(1300, generator=generator)


def test_what_was_applied_plus_the_residuals_equals_what_came_in(tmp_path: Path) -> None:
    def main(rank: Rank) -> None:
        came_in = torch.zeros(2000)

        def step(model: DDP, optimizer: SGD, number: int, factor: float = 1.0, *, skip: bool = False) -> None:
            a, b = given(rank.rank, number)
            optimizer.zero_grad()
            (model(a, b) * factor).backward()
            if not skip:
                came_in.add_(torch.cat([a, b]))
                optimizer.step()

        def check(model: DDP, handle: syncline.Handle) -> None:
            mean = came_in / rank.world_size
            dist.all_reduce(mean)
            tensors = handle.state_dict()["tensors"]
            kept = torch.cat([tensors[name]["residual"] for name in ("a", "b")]) if tensors else torch.zeros(2000)
            dist.all_reduce(kept)
            assert kept.abs().max() > 0
            torch.testing.assert_close(-weights(model) + kept, mean, rtol=1e-4, atol=1e-5)

        model = DDP(Given(), bucket_cap_mb=0.004)
        optimizer = SGD(model.parameters(), lr=1.0)
        handle = syncline.attach(model, Quantized(bits=4), optimizer=optimizer, overlap="forward")
        for number in range(WARM + 4):
            step(model, optimizer, number)
        check(model, handle)
        before = handle.state_dict()["tensors"]
        step(model, optimizer, 90, float("nan"), skip=True)  # as a GradScaler does
        step(model, optimizer, 91, skip=True)
        optimizer.zero_grad()
        after = handle.state_dict()["tensors"]
        assert all(torch.equal(before[name]["residual"], after[name]["residual"]) for name in "ab")
        step(model, optimizer, 92)
        check(model, handle)
        handle.save(tmp_path)
        trained = model.module.state_dict()
        other = DDP(Given(), bucket_cap_mb=0.002)
        other.module.load_state_dict(trained)
        optimizer = SGD(other.parameters(), lr=1.0)
        handle = syncline.attach(other, Quantized(bits=4), optimizer=optimizer, overlap="forward")
        handle.load(tmp_path)
        check(other, handle)
        for number in range(100, 100 + WARM + 2):
            step(other, optimizer, number)
        check(other, handle)

    on_ranks(3, main)


def test_weights_that_the_script_changes_reach_the_master() -> None:
    def main(rank: Rank) -> None:
        model = DDP(seeded(Mlp), **SMALL)
        optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
        handle = syncline.attach(model, optimizer=optimizer, overlap="forward", gather="bf16")
        for number in range(WARM):
            optimizer.zero_grad()
            model(batch(rank.rank, number)).square().mean().backward()
            optimizer.step()
        handle.wait()
        for parameter in model.parameters():
            parameter.data.fill_(0.3)  # neither a new tensor nor a change that torch counts
        optimizer.zero_grad()
        model(batch(rank.rank, WARM)).square().mean().backward()
        optimizer.step()
        handle.detach()
        assert ((weights(model) - 0.3).abs() < 0.02).all()
        assert equal_on_all_ranks(weights(model))

    on_ranks(2, main)


def test_residuals_of_unused_parameters_are_refused() -> None:
    def main(rank: Rank) -> None:
        model = DDP(seeded(Mlp), find_unused_parameters=True)
        optimizer = SGD(model.parameters(), lr=0.1)
        assert "find_unused_parameters" in refusal(
            lambda: syncline.attach(model, Quantized(bits=4), optimizer=optimizer, overlap="forward")
        )

    on_ranks(2, main)


@pytest.mark.parametrize("numel", [33, 1000, 4097])
@pytest.mark.parametrize("exchange", [Quantized(bits=8), Quantized(bits=3, error_feedback=False), Dense(wire="bf16")])
def test_bytes_of_halves_are_as_predicted(exchange: Exchange, numel: int) -> None:
    def main(comm: LocalComm) -> None:
        layout = Layout.flat(numel)
        scatter, gather, part = halves_of(exchange, "fp16", numel, torch.float32, comm.topology)
        states = [half.prepare(layout, comm) for half in (scatter, gather)]
        for state in states:
            state.average(1 / comm.size)
        scatter.run(torch.randn(numel), states[0], comm)
        states[1].master.copy_(states[0].gradient)
        flat = torch.zeros(comm.size * part)
        gather.run(flat, states[1], comm)
        predicted = [half.cost(numel, torch.float32, comm.topology).sent_bytes["world"] for half in (scatter, gather)]
        assert comm.counter.sent_bytes["world"] == sum(predicted)
        torch.testing.assert_close(flat.view(comm.size, -1)[comm.rank], states[0].gradient, rtol=1e-3, atol=1e-6)

    run_ranks(3, main)
