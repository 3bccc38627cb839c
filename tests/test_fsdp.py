"""FSDP2: replicas of a sharded model that exchange through Syncline train like PyTorch's HSDP, with fewer bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import AdamW

import syncline
from ddp_helpers import batch, on_ranks
from syncline.cluster import Rank
from syncline.dist.local_comm import run_ranks
from syncline.exchange import Layout, Slot, Topology
from syncline.exchange.scatter import Scatter

WIDTH = 40


class Net(nn.Module):
    """Three blocks, of which one contains another one, and sizes that two ranks cannot divide evenly."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(width, width + 1)
        self.block = nn.Sequential(nn.Linear(width + 1, 33), nn.Sequential(nn.Linear(33, 35), nn.Tanh()))
        self.last = nn.Linear(35, 1)  # its bias has one element: the second shard is empty

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(torch.tanh(self.first(x))))


def sharded(mesh: DeviceMesh, make: Callable[[], nn.Module] = Net, **options: Any) -> Any:
    torch.manual_seed(7)
    net = make()
    if isinstance(net, Net):
        fully_shard(net.block[1], mesh=mesh, **options)  # nested
        fully_shard(net.block, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def two_by_two(replicate: str = "replicate") -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=(replicate, "shard"))


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().full_tensor().flatten() for parameter in model.parameters()])


def train(
    model: Any, optimizer: Any, rank: int, steps: range, *, accumulate: int = 1, clip: float | None = None
) -> None:
    for number in steps:
        optimizer.zero_grad()
        for part in range(accumulate):
            model.set_requires_gradient_sync(part == accumulate - 1)
            model(batch(rank, accumulate * number + part, 8, WIDTH)).square().mean().backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def same_on_replicas(tensor: Tensor) -> bool:
    gathered = [torch.zeros_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    return all(torch.equal(tensor, other) for other in gathered)


def test_dense_between_replicas_trains_like_native_hsdp() -> None:
    """Fifty steps of AdamW with accumulation and clipping, in fp32 and with gradients reduced in bf16."""

    def main(rank: Rank) -> None:
        mesh = two_by_two()
        for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)):
            native, model = sharded(mesh, mp_policy=policy), sharded(mesh["shard"], mp_policy=policy)
            handle = syncline.attach(model, replicate=mesh["replicate"])
            for trained in (native, model):
                optimizer = AdamW(trained.parameters(), lr=0.01)
                train(trained, optimizer, rank.rank, range(50), accumulate=2, clip=0.5)
            assert same_on_replicas(weights(model))
            torch.testing.assert_close(weights(model), weights(native), rtol=1e-6, atol=1e-7)
            assert handle.stats().sent_bytes == handle.predicted_sent_bytes()
            assert handle.stats().steps == 50
            assert "between 2 replicas of 2 shards" in syncline.handle_of(model).describe()
            handle.detach()  # from now on, what native HSDP does
            for trained in (native, model):
                train(trained, torch.optim.SGD(trained.parameters(), lr=0.01), rank.rank, range(3))
            torch.testing.assert_close(weights(model), weights(native), rtol=1e-6, atol=1e-7)

    on_ranks(4, main)


class Wide(nn.Module):
    """Parameters in blocks that are large compared with the padding of codes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layers(x.repeat(1, 7)[:, :256]))


def test_bits_and_updates_send_as_many_bytes_as_predicted_and_many_fewer() -> None:
    def main(rank: Rank) -> None:
        mesh = two_by_two()
        dense = sum(p.numel() for p in Wide().parameters()) // 2 * 4  # of a rank's shard, between two replicas
        model = sharded(mesh["shard"], Wide)
        handle = syncline.attach(model, syncline.Quantized(bits=4), replicate=mesh["replicate"])
        optimizer = AdamW(model.parameters(), lr=0.003)
        train(model, optimizer, rank.rank, range(5), accumulate=2, clip=0.5)
        assert same_on_replicas(weights(model))
        assert handle.stats().sent_bytes == handle.predicted_sent_bytes()
        assert dense / handle.stats().sent_bytes["world"] > 7.5
        # It replaces the exchange above. Bytes are those after the warm-up, as a mean over whole periods.
        exchange = syncline.ChunkedTopk(density=0.03)
        options = {"optimizer": optimizer, "every": 15, "warmup": 4}
        handle = syncline.attach(model, exchange, replicate=mesh["replicate"], **options)
        train(model, optimizer, rank.rank, range(5, 8))
        assert not handle.exchanges_updates and handle.stats().sent_bytes["world"] * 7.5 < dense
        train(model, optimizer, rank.rank, range(8, 9))
        assert handle.exchanges_updates
        first = handle.stats().total_sent_bytes["world"]
        train(model, optimizer, rank.rank, range(9, 9 + 45), clip=0.5)
        sent = (handle.stats().total_sent_bytes["world"] - first) / 45
        assert abs(sent - handle.predicted_sent_bytes()["world"]) <= 1
        assert dense / sent > 50
        assert not same_on_replicas(weights(model))
        with handle.synced():
            assert same_on_replicas(weights(model))
        handle.detach()
        assert same_on_replicas(weights(model))
        for state in optimizer.state.values():
            assert same_on_replicas(state["exp_avg"].full_tensor())

    on_ranks(4, main)


@pytest.mark.parametrize("like", [syncline.Dense(), syncline.Dense(wire="bf16"), *map(syncline.Quantized, (8, 4))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_plus_residuals_equal_what_came_in(like: Any, dtype: torch.dtype) -> None:
    """Three ranks in one process, rows that are no multiple of a block, and a step that is not applied."""
    ranks, row, steps = 3, 700, 5
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(steps, ranks, ranks * row, generator=generator).to(dtype)
    slots = [Slot("a", (ranks, 300), (row, 1), 0, 900), Slot("b", (ranks, 400), (row, 1), 300, 1200)]
    layout, exchange = Layout(tuple(slots), dtype, torch.device("cpu")), Scatter(like)

    def main(comm: Any) -> tuple[Tensor, Tensor, int]:
        state: Any = exchange.prepare(layout, comm)
        assert state.average(1.0) or not like.keeps
        comm.counter.sent_bytes.clear()
        applied = torch.zeros(row, dtype=torch.float64)
        for number in range(steps):
            flat = inputs[number, comm.rank].clone()
            if number == 2:
                flat[comm.rank] = torch.nan
            state.begin(number)
            assert exchange.run(flat, state, comm) is None
            assert bool(state.finite(flat)) == (number != 2) or comm.rank > 0
            if state.settles:
                state.settle(torch.tensor(number != 2))
            if number != 2:
                applied += state.shard.double()
        residual = torch.zeros(ranks, row, dtype=torch.float64)
        if state.settles:
            saved = state.tensors(layout)
            residual = torch.cat([saved["a"]["residual"], saved["b"]["residual"]], 1).double()
        return applied, residual, comm.counter.sent_bytes["world"]

    ran = run_ranks(Topology.flat(ranks), main)
    came_in = inputs[[0, 1, 3, 4]].double().sum((0, 1)).view(ranks, row)
    got = torch.stack([applied for applied, *_ in ran]) + sum(residual for _, residual, _ in ran)
    lossy = 0.1 if not like.lossless and not like.keeps else (0.05 if dtype == torch.bfloat16 and not like.keeps else 0)
    torch.testing.assert_close(got, came_in, rtol=0, atol=lossy or 1e-5)
    assert ran[0][2] == steps * sum(exchange.cost(ranks * row, dtype, Topology.flat(ranks)).sent_bytes.values())


def test_gradients_to_the_owners_of_shards_train_like_fsdp() -> None:
    """Flat FSDP over four ranks: half of gloo's bytes in fp32, and fewer with 16, 8 and 4 bits."""
    ways: dict[str, Any] = {
        "dense": (syncline.Dense(), {}, 1e-6),
        "bf16": (syncline.Dense(wire="bf16"), {"gather": "bf16"}, 0.02),
        "int8": (syncline.Quantized(bits=8), {}, 0.02),
        "int4": (syncline.Quantized(bits=4), {}, 0.05),
    }

    def main(rank: Rank) -> dict[str, int]:
        mesh = init_device_mesh("cpu", (4,))
        plain = sharded(mesh, Wide)
        train(plain, torch.optim.SGD(plain.parameters(), lr=0.5), rank.rank, range(10), accumulate=2, clip=0.5)
        sent = {}
        for name, (exchange, options, error) in ways.items():
            model = sharded(mesh, Wide)
            handle = syncline.attach(model, exchange, **options)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            train(model, optimizer, rank.rank, range(10), accumulate=2, clip=0.5)
            assert handle.stats().sent_bytes == handle.predicted_sent_bytes()
            sent[name] = handle.stats().sent_bytes["world"]
            off = (weights(model) - weights(plain)).abs().max()
            assert off <= error * weights(plain).abs().max(), (name, off)
            before = weights(model)
            handle.detach()
            train(model, optimizer, rank.rank, range(10, 12))
            assert not torch.equal(weights(model), before)
            assert same_on_replicas(weights(model))
        return sent

    sent = on_ranks(4, main)[0]
    dense = 3 * 256 * 256 * 4
    assert sent["dense"] == dense * 3 // 4  # gloo's own reduce-scatter, an all-reduce, sends twice as many
    assert dense / sent["bf16"] > 2.6 and dense / sent["int8"] > 5 and dense / sent["int4"] > 10
