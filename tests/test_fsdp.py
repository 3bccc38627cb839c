"""FSDP2: replicas of a sharded model that exchange through Syncline train like PyTorch's HSDP, with fewer bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import AdamW

import syncline
from ddp_helpers import batch, on_ranks
from syncline.cluster import Rank

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
