"""FSDP2: replicas of a sharded model that exchange through Syncline train like PyTorch's HSDP, with fewer bytes."""

from __future__ import annotations

import contextlib
import io
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint as recomputed

import made_up
import syncline
from ddp_helpers import Branches, batch, on_ranks, refusal
from syncline.cli.app import run_script
from syncline.cluster import Rank
from syncline.dist.local_comm import run_ranks
from syncline.exchange import Layout, Slot, Topology
from syncline.exchange.scatter import Scatter
from syncline.run import sharded as run_sharded
from syncline.tuning.settings import TuneSettings

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
    """Fifty steps of AdamW with accumulation and clipping, and fewer with gradients that are reduced in bf16."""

    def main(rank: Rank) -> None:
        mesh = two_by_two()
        for policy, steps in ((MixedPrecisionPolicy(), 50), (MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16), 8)):
            native, model = sharded(mesh, mp_policy=policy), sharded(mesh["shard"], mp_policy=policy)
            handle = syncline.attach(model, replicate=mesh["replicate"])
            predicted = handle.predicted_sent_bytes()  # before the first step
            for trained in (native, model):
                optimizer = AdamW(trained.parameters(), lr=0.01)
                train(trained, optimizer, rank.rank, range(steps), accumulate=2, clip=0.5)
            assert same_on_replicas(weights(model))
            torch.testing.assert_close(weights(model), weights(native), rtol=1e-6, atol=1e-7)
            assert handle.stats().sent_bytes == handle.predicted_sent_bytes() == predicted
            assert handle.stats().steps == steps
            assert "between 2 replicas of 2 shards" in syncline.handle_of(model).describe()
            handle.detach()  # from now on, what native HSDP does
            for trained in (native, model):
                train(trained, torch.optim.SGD(trained.parameters(), lr=0.01), rank.rank, range(3))
            torch.testing.assert_close(weights(model), weights(native), rtol=1e-6, atol=1e-7)
        # Updates of plain SGD that are exchanged losslessly in every step are the same as averaged gradients.
        native, model = sharded(mesh), sharded(mesh["shard"])
        optimizers = [torch.optim.SGD(trained.parameters(), lr=0.05, momentum=0.9) for trained in (native, model)]
        syncline.attach(model, replicate=mesh["replicate"], optimizer=optimizers[1])
        for trained, optimizer in zip((native, model), optimizers, strict=True):
            train(trained, optimizer, rank.rank, range(10))
        torch.testing.assert_close(weights(model), weights(native), rtol=1e-5, atol=1e-6)

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
            predicted = handle.predicted_sent_bytes()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            train(model, optimizer, rank.rank, range(10), accumulate=2, clip=0.5)
            assert handle.stats().sent_bytes == handle.predicted_sent_bytes() == predicted
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


def test_training_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    """Weights and the optimizer's state come from torch.distributed.checkpoint, and residuals from the handle."""
    ways: dict[str, dict[str, Any]] = {
        "int4": {"exchange": syncline.Quantized(bits=4)},
        "updates": {"exchange": syncline.ChunkedTopk(density=0.1), "every": 3, "warmup": 0},
        "warm-up": {"exchange": syncline.ChunkedTopk(density=0.1), "every": 3, "warmup": 5},
        "shards": {"exchange": syncline.Quantized(bits=4)},
    }

    def main(rank: Rank) -> None:
        mesh = two_by_two()
        flat = init_device_mesh("cpu", (4,))

        def started(name: str, way: dict[str, Any]) -> tuple[Any, Any, syncline.Handle]:
            model = sharded(flat if name == "shards" else mesh["shard"])
            optimizer = AdamW(model.parameters(), lr=0.01)
            between = {} if name == "shards" else {"replicate": mesh["replicate"]}
            updates = {"optimizer": optimizer} if "every" in way else {}
            return model, optimizer, syncline.attach(model, **way, **between, **updates)

        for name, way in ways.items():
            folder = tmp_path / name
            model, optimizer, handle = started(name, way)
            train(model, optimizer, rank.rank, range(4))
            handle.save(folder / "exchange")
            with handle.synced():
                states = get_state_dict(model, optimizer)
                checkpoint.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=folder / "model")
            train(model, optimizer, rank.rank, range(4, 8))
            expected = weights(model)
            model, optimizer, handle = started(name, way)
            states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            checkpoint.load(states, checkpoint_id=folder / "model")
            set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
            handle.load(folder / "exchange")
            assert handle.stats().steps == 4
            train(model, optimizer, rank.rank, range(4, 8))
            assert torch.equal(weights(model), expected), name
        text = refusal(lambda: handle.load(tmp_path / "int4" / "exchange", on_world_size="reset"))
        assert "Scatter" in text, text

    on_ranks(4, main)


def test_a_divide_factor_and_a_step_that_is_not_finite_do_as_in_native_hsdp() -> None:
    def main(rank: Rank) -> None:
        mesh = two_by_two()
        native, model = sharded(mesh), sharded(mesh["shard"])
        syncline.attach(model, replicate=mesh["replicate"])
        for trained in (native, model):
            for unit in trained.modules():
                if isinstance(unit, FSDPModule):
                    unit.set_gradient_divide_factor(2.0)
                    unit.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply in its reduce-scatter
            train(trained, torch.optim.SGD(trained.parameters(), lr=0.01), rank.rank, range(3))
        torch.testing.assert_close(weights(model), weights(native), rtol=1e-6, atol=1e-7)
        # The second shard of one replica is not finite: a GradScaler skips the step everywhere, and so do residuals.
        model = sharded(mesh["shard"])
        handle = syncline.attach(model, syncline.Quantized(bits=4), replicate=mesh["replicate"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        train(model, optimizer, rank.rank, range(2))
        before = handle.state_dict()["tensors"]
        optimizer.zero_grad()
        loss = model(batch(rank.rank, 2, 8, WIDTH)).square().mean()
        if rank.rank == 3:
            rows = torch.ones(WIDTH + 1, 1)
            rows[WIDTH:] = torch.inf
            model.first.weight.register_hook(lambda gradient: gradient * rows)
        loss.backward()
        finite = all(bool(p.grad.to_local().isfinite().all()) for p in model.parameters())
        assert finite == (rank.rank % 2 == 0)
        after = handle.state_dict()["tensors"]
        for name, kinds in before.items():
            assert torch.equal(kinds["residual"], after[name]["residual"]), name

    on_ranks(4, main)


def test_tiny_gradients_in_fp16_are_not_lost() -> None:
    """With reduce_dtype=float16, FSDP asks for a sum of what it has divided. Half of the smallest number is zero."""

    def main(rank: Rank) -> None:
        wide = 512

        def gradient(tiny: float, like: Any = None) -> Tensor:
            policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)
            net = sharded(init_device_mesh("cpu", (4,)), lambda: nn.Linear(wide, 4, bias=False), mp_policy=policy)
            if like is not None:
                syncline.attach(net, like)
            net(torch.full((1, wide), tiny)).sum().backward()
            return net.weight.grad.full_tensor()

        tiny = 2.0**-23  # FSDP divides by 2 before the sum, and by 2 after it
        assert gradient(tiny).eq(tiny).all()
        for like in (syncline.Dense(), syncline.Dense(wire="fp16")):
            assert gradient(tiny, like).eq(tiny).all(), like
        torch.testing.assert_close(gradient(1e-3, syncline.Quantized(8)), gradient(1e-3), rtol=0.02, atol=0.0)

    on_ranks(4, main)


class Checkpointed(Net):
    """A backward pass inside the backward pass recomputes the block."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(recomputed(self.block, torch.tanh(self.first(x)), use_reentrant=True))


def test_compiled_and_recomputed_models_exchange_as_others() -> None:
    def main(rank: Rank) -> None:
        mesh = two_by_two()
        found = {}
        for name in ("plain", "compiled blocks", "compiled", "recomputed"):
            torch.manual_seed(7)
            net: Any = Checkpointed() if name == "recomputed" else Net()
            if name == "compiled blocks":
                net.block.compile(backend="eager")
            fully_shard(net.block, mesh=mesh["shard"])
            model: Any = fully_shard(net, mesh=mesh["shard"])
            model = torch.compile(model, backend="eager") if name == "compiled" else model
            handle = syncline.attach(model, syncline.Quantized(bits=4), replicate=mesh["replicate"])
            train(model, torch.optim.SGD(net.parameters(), lr=0.1), rank.rank, range(3))
            assert handle.stats().steps == 3, name
            assert handle.stats().sent_bytes == handle.predicted_sent_bytes(), name
            found[name] = weights(net)
        assert all(torch.equal(other, found["plain"]) for other in found.values())

    on_ranks(4, main)


def test_what_is_not_supported_is_refused_with_one_line() -> None:
    def main(rank: Rank) -> None:
        mesh = two_by_two()
        replicas = {"replicate": mesh["replicate"]}
        model = sharded(mesh["shard"])
        optimizer = AdamW(model.parameters())
        cases: dict[str, Callable[[], Any]] = {
            "2-D mesh": lambda: syncline.attach(sharded(mesh), **replicas),
            "for sharded models": lambda: syncline.attach(Net(), **replicas),
            "pass replicate=": lambda: syncline.attach(model),
            "mesh['replicate']": lambda: syncline.attach(model, replicate=mesh),
            "replicate is a str": lambda: syncline.attach(model, replicate="replicate"),
            "other mesh dimension": lambda: syncline.attach(model, replicate=mesh["shard"]),
            "not all of the job's 4 ranks": lambda: syncline.attach(model, replicate=dist.group.WORLD),
            "overlap='forward' is for DDP": lambda: syncline.attach(model, overlap="forward", optimizer=optimizer),
            "every, warmup, delay": lambda: syncline.attach(model, **replicas, every=3),
            "leave it out with replicate": lambda: syncline.attach(model, **replicas, gather="bf16"),
            "gather is 'int4'": lambda: syncline.attach(sharded(init_device_mesh("cpu", (4,))), gather="int4"),
            "in bfloat16 and float32": lambda: syncline.attach(of_two_types(), gather="bf16"),
            "between 2 replicas": lambda: syncline.attach(model, **replicas, network=made_up.network((0,) * 4)),
            "Dense or Quantized": lambda: syncline.attach(sharded(init_device_mesh("cpu", (4,))), syncline.OkTopk()),
            "fully_shard": lambda: syncline.tune(model, lambda model: None),
            "nothing is attached": lambda: syncline.handle_of(model),
            "profile it with syncline profile": lambda: syncline.measure_backward(model, lambda model: None),
            "is not sharded": lambda: syncline.attach(partly_sharded(mesh["shard"]), **replicas),
        }
        for text, attempt in cases.items():
            line = refusal(attempt)
            assert text in line, line
        handle = syncline.attach(model, **replicas)
        model.set_requires_all_reduce(False)
        loss = model(batch(rank.rank, 0, 8, WIDTH)).sum()
        assert "set_requires_gradient_sync" in refusal(loss.backward)
        handle.detach()
        model = sharded(mesh["shard"])
        model.set_all_reduce_hook(lambda flat: None)
        assert "all-reduce hook already" in refusal(lambda: syncline.attach(model, **replicas))
        model = sharded(mesh["shard"], Branches)
        handle = syncline.attach(model, syncline.Quantized(bits=4), **replicas)
        assert "some of its parameters" in refusal(model(batch(rank.rank, 0), 0).sum().backward)

    on_ranks(4, main)


def of_two_types() -> Any:
    """Return a model with parameters of two types in one unit, among all ranks."""
    return fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16()), mesh=init_device_mesh("cpu", (4,)))


def test_one_rank_may_read_numbers_of_a_step_that_has_not_ended() -> None:
    """The steps of a model with residuals end on all shards together, so only calls of all ranks end one."""

    def main(rank: Rank) -> None:
        model = sharded(init_device_mesh("cpu", (2,)))
        handle = syncline.attach(model, syncline.Quantized(bits=4), gather="fp32")
        engine: Any = handle._engine
        ends, engine.in_backward = engine.in_backward, lambda: True  # as after a nested backward pass
        model(batch(rank.rank, 0, 8, WIDTH)).sum().backward()
        engine.in_backward = ends
        if rank.rank == 0:
            assert handle.stats().steps == 0 and handle.error is None
        assert handle.state_dict()["steps"] == 1
        model(batch(rank.rank, 1, 8, WIDTH)).sum().backward()
        assert handle.stats().steps == 2

    on_ranks(2, main)


def partly_sharded(mesh: DeviceMesh) -> Any:
    """Return a model with a parameter that FSDP is told to ignore."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return fully_shard(net, mesh=mesh, ignored_params={net[0].weight})


def test_syncline_run_attaches_to_a_model_that_is_sharded_among_all_ranks(tmp_path: Path) -> None:
    script = Path(__file__).parent / "scripts" / "shards.py"

    def main(rank: Rank) -> dict[str, str]:
        errors = {}
        ways = {name: ["--exchange", name] for name in ("int8", "oktopk")}
        for name, options in {"plain": [], **ways, "quiet": [*ways["int8"], "--quiet"]}.items():
            with contextlib.redirect_stderr(io.StringIO()) as printed, contextlib.suppress(SystemExit):
                run_script(["--out", str(tmp_path / f"run-{name}"), *options, str(script), str(tmp_path / name)])
            errors[name] = printed.getvalue()
        return errors

    printed = on_ranks(2, main)
    assert "is sharded with fully_shard, and left alone: to exchange between replicas" in printed[0]["plain"]
    assert "Scatter(like=Quantized(bits=8" in printed[0]["int8"]
    assert "left alone: OkTopk" in printed[0]["oktopk"] and "use Dense or Quantized" in printed[0]["oktopk"]
    assert "fully_shard" not in printed[1]["plain"] and not printed[0]["quiet"]
    losses = {
        name: torch.tensor([float(line) for line in (tmp_path / f"{name}-0").read_text().split()])
        for name in ("plain", "int8", "oktopk", "quiet")
    }
    assert torch.equal(losses["plain"], losses["oktopk"]) and torch.equal(losses["quiet"], losses["int8"])
    assert not torch.equal(losses["plain"], losses["int8"])
    torch.testing.assert_close(losses["int8"], losses["plain"], rtol=0.02, atol=0.0)


def test_syncline_run_finds_sharded_models_beside_weak_proxies_of_what_is_gone() -> None:
    gone = nn.Linear(2, 2)
    proxy = weakref.proxy(gone)
    del gone
    assert run_sharded._roots([]) == []
    assert type(proxy) is weakref.CallableProxyType  # it is still there


def test_syncline_run_attaches_to_sharded_models_in_the_order_of_their_optimizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks must attach in the same order, once, and with the scaler of the script."""
    nets, attached = [nn.Linear(2, 2) for _ in range(4)], []
    scaler = torch.amp.GradScaler("cpu")

    def attach(model: nn.Module, *_: object, scaler: object, **__: object) -> mock.Mock:
        attached.append((model, scaler))
        return mock.Mock()

    monkeypatch.setattr(run_sharded, "is_sharded", lambda entry: any(entry is net for net in nets))
    monkeypatch.setattr(run_sharded, "attach", attach)
    models = run_sharded.ShardedModels(TuneSettings(exchange=syncline.Dense(), quiet=True), lambda: scaler)
    order = [2, 0, 3]
    for net in nets:
        for parameter in net.parameters():
            parameter._local_tensor, parameter.grad = parameter.data, torch.zeros_like(parameter)
    optimizer = torch.optim.SGD([parameter for index in order for parameter in nets[index].parameters()], lr=0.1)
    with models.watched():
        optimizer.step()
        optimizer.step()
    assert [nets.index(model) for model, _ in attached] == order
    assert all(given is scaler for _, given in attached)
