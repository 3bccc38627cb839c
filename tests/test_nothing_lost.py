"""Ways in which a model or a training loop could make an exchange lose a residual, or hold on to memory."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import syncline
from ddp_helpers import SMALL_BUCKETS, Mlp, batch, on_ranks, refusal, seeded, square_loss_step, train
from syncline.cluster import Rank
from syncline.exchange import Comm, State, Work
from syncline.kernels import Slots, kernels_for
from test_ddp_plan import plan_for

SPARSE = syncline.OkTopk(density=0.05)
SIZE = 4000


class Two(nn.Module):
    """Two vectors, each with the gradient that is given for it, if any is."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(SIZE)), nn.Parameter(torch.zeros(SIZE))

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        return sum((getattr(self, name) * gradient).sum() for name, gradient in gradients.items())


def drawn(rank: int, step: int, names: str = "ab") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    both = {name: torch.randint(-1000, 1000, (SIZE,), generator=generator).float() for name in "ab"}
    return {name: both[name] for name in names}


def lost(handle: syncline.Handle, applied: dict[str, Tensor], came_in: dict[str, Tensor]) -> dict[str, float]:
    """Collective: by parameter, the largest element that was neither applied nor kept."""
    tensors, found = handle.state_dict()["tensors"], {}
    for name, total in came_in.items():
        waiting = torch.zeros_like(total) + tensors.get(name, {}).get("residual", 0.0)
        dist.all_reduce(waiting)
        found[name] = float((total - applied[name] - waiting).abs().max())
    return found


def average(gradient: Tensor) -> Tensor:
    mean = gradient / dist.get_world_size()
    dist.all_reduce(mean)
    return mean


@pytest.mark.parametrize("skip", [False, True], ids=["reduced", "skipped"])
@pytest.mark.parametrize("rarely", ["a", "b"])
def test_the_residual_of_a_parameter_that_nobody_uses_waits(rarely: str, skip: bool) -> None:
    """Skipped: DDP leaves out its whole bucket, which is the first or the last one."""

    def main(rank: Rank) -> None:
        options: dict[str, Any] = {"find_unused_parameters": True}
        if skip:
            options |= {"skip_all_reduce_unused_params": True, "bucket_cap_mb": 0.008}
        model = DDP(Two(), **options)
        handle = syncline.attach(model, SPARSE)
        came_in = {name: torch.zeros(SIZE) for name in "ab"}
        applied = {name: torch.zeros(SIZE) for name in "ab"}
        for number in range(6):
            names = "ab" if number % 3 == 0 else "ab".replace(rarely, "")
            model.zero_grad(set_to_none=True)
            given = drawn(rank.rank, number, names)
            if rarely in given:  # so large that much of it is still to be sent when nobody uses the parameter
                given[rarely] *= 8
            model(given).backward()
            for name, gradient in given.items():
                came_in[name] += average(gradient)
            for name, parameter in model.module.named_parameters():
                assert (parameter.grad is None) == (name not in names)
                applied[name] += 0.0 if parameter.grad is None else parameter.grad
            assert handle.stats().steps == number + 1
            assert lost(handle, applied, came_in) == {"a": 0.0, "b": 0.0}

    on_ranks(2, main)


class Gan(nn.Module):
    """Two halves in one model, which are trained in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.g, self.d = nn.Linear(64, 200), nn.Linear(200, 64)

    def forward(self, x: Tensor, turn: str) -> Tensor:
        made = torch.tanh(self.g(x))
        if turn == "g":
            return self.d(made).square().mean() * 100
        return self.d(made.detach()).sub(1).square().mean() * 100


def test_two_halves_that_take_turns_lose_nothing() -> None:
    """Frozen in turns, as Lightning's toggle_optimizer does it: DDP keeps frozen parameters in its buckets."""

    def main(rank: Rank) -> None:
        reference = seeded(Gan)
        model = DDP(seeded(Gan), find_unused_parameters=True)
        handle = syncline.attach(model, SPARSE)
        names = [name for name, _ in reference.named_parameters()]
        came_in = {name: torch.zeros_like(parameter) for name, parameter in reference.named_parameters()}
        applied = {name: torch.zeros_like(tensor) for name, tensor in came_in.items()}
        largest = 0.0
        for number in range(10):
            turn, inputs = "gd"[number % 2], batch(rank.rank, number, 8, 64)
            for net in (model.module, reference):
                for name, parameter in net.named_parameters():
                    parameter.requires_grad_(name.startswith(turn))
                net.zero_grad(set_to_none=True)
            model(inputs, turn).backward()
            reference(inputs, turn).backward()
            for name in names:
                expected, got = reference.get_parameter(name).grad, model.module.get_parameter(name).grad
                assert (expected is None) == (got is None)
                if expected is not None:
                    came_in[name] += average(expected)
                    applied[name] += got
                    largest = max(largest, float(came_in[name].abs().max()))
        assert max(lost(handle, applied, came_in).values()) < 1e-4 * largest

    on_ranks(2, main)


def test_a_dense_exchange_ends_its_steps_while_ddp_skips_the_last_bucket() -> None:
    def main(rank: Rank) -> None:
        model = DDP(Two(), find_unused_parameters=True, skip_all_reduce_unused_params=True, bucket_cap_mb=0.008)
        handle = syncline.attach(model)
        for number in range(20):
            model.zero_grad(set_to_none=True)
            model(drawn(rank.rank, number, "b")).backward()
            assert torch.equal(model.module.b.grad, average(drawn(rank.rank, number)["b"]))
            assert handle.stats().steps == number + 1
            assert len(handle.stats().buckets) == 1

    on_ranks(2, main)


def test_a_warm_up_ends_while_ddp_skips_the_last_bucket() -> None:
    def main(rank: Rank) -> None:
        model = DDP(Two(), find_unused_parameters=True, skip_all_reduce_unused_params=True, bucket_cap_mb=0.008)
        syncline.attach(model, syncline.OkTopk(density=0.05, warmup=3))
        dense = []
        for number in range(5):
            model.zero_grad(set_to_none=True)
            model(drawn(rank.rank, number, "b")).backward()
            dense.append(int(model.module.b.grad.count_nonzero()) > SIZE // 2)
        assert dense == [True, True, True, False, False]

    on_ranks(2, main)


def test_a_rank_that_has_joined_ends_its_steps_too() -> None:
    """Outside of a backward pass nobody says that it is over."""

    def main(rank: Rank) -> int:
        model = DDP(seeded(Mlp), find_unused_parameters=True, **SMALL_BUCKETS)
        handle = syncline.attach(model, SPARSE)
        with model.join():
            for number in range(3 + rank.rank):
                model(batch(rank.rank, number)).square().mean().backward()
        return handle.stats().steps

    assert on_ranks(2, main) == [4, 4]


class Checkpointed(nn.Module):
    """Each layer runs a backward pass of its own, inside of the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


def test_a_backward_pass_inside_of_another_does_not_end_the_step() -> None:
    def main(rank: Rank) -> list[tuple[int, int]]:
        model = DDP(seeded(Checkpointed), bucket_cap_mb=0.02)
        handle = syncline.attach(model, SPARSE, lanes=2)
        counted = []
        for number in range(4):
            model(batch(rank.rank, number, 4, 64).requires_grad_()).sum().backward()
            counted.append((handle.stats().steps, len(handle.stats().buckets)))
        return counted

    for counted in on_ranks(2, main):
        assert [steps for steps, _ in counted] == [1, 2, 3, 4]
        assert counted[-1][1] > 1


@pytest.mark.parametrize("infinite", ["a", "b"])
def test_a_step_that_the_scaler_skips_is_skipped_in_every_bucket_of_a_plan(infinite: str) -> None:
    """One bucket is sparse and the other dense; the infinite gradient is in one of them."""

    def main(rank: Rank) -> None:
        net = Two()
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
        plan = plan_for(net, [["b"], ["a"]], [syncline.Dense(), SPARSE])
        model = syncline.wrap(net, plan, scaler=scaler)
        handle, optimizer = syncline.handle_of(model), torch.optim.SGD(net.parameters(), lr=1.0)
        came_in = {name: torch.zeros(SIZE) for name in "ab"}
        skipped = 0
        for number in range(6):
            given = drawn(rank.rank, number)
            if number == 3 and rank.rank == 1:
                given[infinite][7] = float("inf")
            before = scaler.get_scale()
            optimizer.zero_grad()
            scaler.scale(model(given)).backward()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() < before:
                skipped += 1
            else:
                for name, gradient in given.items():
                    came_in[name] += average(gradient)
            applied = {name: -parameter.detach() for name, parameter in net.named_parameters()}
            assert lost(handle, applied, came_in) == {"a": 0.0, "b": 0.0}, number
        assert skipped == 1 and handle.mismatch is None

    on_ranks(2, main)


@pytest.mark.parametrize("unused", [False, True], ids=["all used", "b unused"])
def test_steps_of_a_static_graph_are_counted_and_lose_nothing_after_a_restart(unused: bool) -> None:
    """In the first step of a static graph DDP gives all buckets the index 0, and calls none of them the last."""

    def main(rank: Rank) -> None:
        came_in = {name: torch.zeros(SIZE) for name in "ab"}
        weights, state = Two().state_dict(), None
        for restart in range(2):
            net = Two()
            net.load_state_dict(weights)
            plan = plan_for(net, [["b"], ["a"]], [SPARSE, SPARSE])
            model = syncline.wrap(net, plan, static_graph=True)
            handle, optimizer = syncline.handle_of(model), torch.optim.SGD(net.parameters(), lr=1.0)
            if state is not None:
                handle.load_state_dict(state)
            for number in range(4):
                given = drawn(rank.rank, 10 * restart + number, "a" if unused else "ab")
                optimizer.zero_grad()
                model(given).backward()
                optimizer.step()
                for name, gradient in given.items():
                    came_in[name] += average(gradient)
                applied = {name: -parameter.detach() for name, parameter in net.named_parameters()}
                assert lost(handle, applied, came_in) == {"a": 0.0, "b": 0.0}, (restart, number)
                assert handle.stats().steps == 4 * restart + number + 1
            state, weights = handle.state_dict(), net.state_dict()
            handle.detach()

    on_ranks(2, main)


class Strided(nn.Module):
    """A parameter with gaps in memory, one without, and one that is dense in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.gaps = nn.Parameter(torch.zeros(64, 200)[:, ::2])
        self.plain = nn.Parameter(torch.zeros(64, 100))
        self.transposed = nn.Parameter(torch.zeros(100, 64).t())

    def forward(self, x: Tensor) -> Tensor:
        return (self.plain * x).sum() + (self.gaps * x * 2).sum() + (self.transposed * x * 3).sum()


def test_parameters_with_gaps_in_memory_keep_their_residual_in_place() -> None:
    """DDP lays their gradients out contiguously, and moves them when it rebuilds its buckets."""

    def main(rank: Rank) -> None:
        model = DDP(Strided())
        handle = syncline.attach(model, SPARSE)
        factors = {"gaps": 2, "plain": 1, "transposed": 3}
        came_in = {name: torch.zeros(64, 100) for name in factors}
        applied = {name: torch.zeros(64, 100) for name in factors}
        for number in range(4):
            x = drawn(rank.rank, number)["a"].repeat(2)[:6400].view(64, 100)
            model.zero_grad(set_to_none=True)
            model(x).backward()
            for name, parameter in model.module.named_parameters():
                came_in[name] += factors[name] * average(x)
                applied[name] += parameter.grad
            assert lost(handle, applied, came_in) == dict.fromkeys(factors, 0.0), number
            if number == 2:
                handle.load_state_dict(handle.state_dict())

    on_ranks(2, main)


@dataclass(frozen=True)
class Remembering(syncline.Dense):
    """Dense, with weak references to the buckets that it was given."""

    seen: list[weakref.ref[Tensor]] = field(default_factory=list, compare=False, hash=False)

    def run(self, flat: Tensor, state: State, comm: Comm) -> Work | None:
        self.seen.append(weakref.ref(flat))
        return super().run(flat, state, comm)


def test_nothing_holds_the_buckets_that_ddp_has_replaced() -> None:
    """DDP allocates other buckets before its second forward. Whoever holds the first ones takes as much memory as all
    gradients once more, at the worst time."""

    def main(rank: Rank) -> None:
        exchange = Remembering()
        model = DDP(seeded(Mlp), gradient_as_bucket_view=True, **SMALL_BUCKETS)
        syncline.attach(model, exchange)
        step = square_loss_step(rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model, optimizer, 0)
        first = list(exchange.seen)
        assert first and all(ref() is not None for ref in first)
        optimizer.zero_grad(set_to_none=True)
        gc.disable()  # nothing may wait for the garbage collector, either
        try:
            model(batch(rank.rank, 1))
            assert [ref() for ref in first] == [None] * len(first)
        finally:
            gc.enable()

    on_ranks(2, main)


def test_state_of_a_bucket_that_does_not_divide_evenly_loads() -> None:
    """Ten weights and a bias over shards of two ranks: the last shard is padded."""

    def main(rank: Rank) -> None:
        model = DDP(nn.Linear(10, 1))
        exchange = syncline.Hierarchical(levels=((0, 1), (2, 3)), shape="sharded")
        handle = syncline.attach(model, exchange)
        model(torch.ones(2, 10)).sum().backward()
        handle.load_state_dict(handle.state_dict())
        model(torch.ones(2, 10)).sum().backward()
        assert handle.stats().steps == 2

    on_ranks(4, main)


def test_an_exchange_that_keeps_something_refuses_a_torch_that_does_not_tell_what_was_unused() -> None:
    def main(rank: Rank) -> str:
        model = DDP(Two(), find_unused_parameters=True)
        model.reducer = object()
        syncline.attach(DDP(Two()), SPARSE).detach()
        return refusal(lambda: syncline.attach(model, SPARSE))

    for line in on_ranks(2, main):
        assert "does not report unused parameters" in line


# --- tune -------------------------------------------------------------------------------------------------------


def test_tuning_one_rank_runs_the_step_and_leaves_the_model_alone(one_rank: None) -> None:
    model = DDP(seeded(Mlp))
    calls: list[nn.Module] = []

    def step(net: nn.Module) -> None:
        calls.append(net)
        net(batch(0, 0)).square().mean().backward()

    tuned = syncline.tune(model, step, budget_s=5, quiet=True)
    assert tuned.handle is None and tuned.trial is None and tuned.plan.nothing
    assert tuned.describe() == "There is only one rank, which has nothing to exchange."
    assert calls and all(net is model.module for net in calls)
    step(model)  # which still trains


@pytest.mark.parametrize("how", ["optimizer", "data"])
def test_a_step_that_changes_weights_is_refused_and_they_are_put_back(how: str) -> None:
    def main(rank: Rank) -> str:
        model = DDP(seeded(Mlp))
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(net: nn.Module) -> None:
            net(batch(rank.rank, 0)).square().mean().backward()
            if how == "optimizer":
                optimizer.step()
            else:
                for parameter in net.parameters():
                    parameter.data.clamp_(-0.01, 0.01)

        line = refusal(lambda: syncline.tune(model, step, budget_s=5, quiet=True))
        assert all(torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))
        return line

    for line in on_ranks(2, main):
        assert "step changed middle.weight" in line and "The weights have been restored" in line
        assert "its state now differs between ranks" in line


# --- smaller ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", ["zeros", "hardly anything"])
def test_a_bucket_of_zeros_does_not_make_the_next_one_take_much_memory(before: str) -> None:
    """What the last step selected is a guess at what this one will; after zeros, everything would pass it."""
    size = 2_000_000
    slots = Slots.of(size, 2, 0.01, torch.bfloat16)
    assert slots is not None
    kernels = kernels_for(slots, torch.device("cpu"))
    kept, turn = torch.zeros(2, size), torch.zeros((), dtype=torch.int32)
    mine = torch.zeros(2, slots.bytes, dtype=torch.uint8)

    def pack(flat: Tensor) -> int:
        kept.zero_()
        tracemalloc.start()
        kernels.pack(flat.clone(), 1.0, kept, turn, None, mine)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    first = torch.randn(size, generator=torch.Generator().manual_seed(0))
    pack(first)
    expected = mine.clone()
    little = torch.zeros(size)
    if before == "hardly anything":
        little[::1000] = 1e-20
    pack(little)
    assert pack(first) < size * 4  # less than the bucket itself
    assert torch.equal(mine, expected)


@pytest.mark.parametrize("planned", [False, True], ids=["attached", "planned"])
def test_a_handle_can_be_detached_after_torch_distributed_was_started_anew(tmp_path: Path, planned: bool) -> None:
    def main(rank: Rank) -> None:
        net = seeded(Mlp)
        model = syncline.wrap(net, plan_for(net, [[name] for name, _ in net.named_parameters()])) if planned else None
        handle = syncline.handle_of(model) if model is not None else syncline.attach(DDP(net))
        dist.destroy_process_group()
        store = dist.FileStore(str(tmp_path / "again"), 2)
        dist.init_process_group("gloo", store=store, rank=rank.rank, world_size=2, timeout=timedelta(seconds=20))
        handle.detach()
        assert "detached" in refusal(handle.stats)
        train(DDP(seeded(Mlp)), square_loss_step(rank), 1)

    on_ranks(2, main)
