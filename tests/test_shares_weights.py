"""Gradients and updates are weighted by samples: unequal batches train as the large batch does."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

import syncline
from ddp_helpers import SMALL_BUCKETS, Mlp, on_ranks, refusal, seeded
from exchanges import VARIANTS
from survivors import wait_for
from syncline.cluster import ClusterSpec, Rank, launch_outcomes
from syncline.exchange import EXCHANGES, for_updates
from syncline.records.pieces import fragments_of

BATCHES = (7, 2, 3)
TOTAL = sum(BATCHES)
CLOSE = {"rtol": 2e-5, "atol": 2e-7}
EVERY: dict[str, syncline.Exchange] = {**{name: make() for name, make in EXCHANGES.items()}, **VARIANTS}


def data(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(count, 16, generator=generator), torch.randint(4, (count,), generator=generator))


def loss_of(model: nn.Module, indices: Sequence[int], count: int = 60) -> Tensor:
    inputs, labels = data(count)[list(indices)]
    return F.cross_entropy(model(inputs), labels)


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1)


def trained_alone(steps: Sequence[Sequence[int]]) -> nn.Module:
    """Train one process on the batches of all ranks together."""
    net = seeded(Mlp)
    optimizer = sgd(net)
    for indices in steps:
        optimizer.zero_grad()
        loss_of(net, indices, 120).backward()
        optimizer.step()
    return net


def assert_same_weights(one: nn.Module, other: nn.Module, **close: float) -> None:
    for (name, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, **(close or CLOSE), msg=lambda text, name=name: f"{name}: {text}")


def steps_of(size: int, batches: Sequence[int] = BATCHES, **options: Any) -> list[list[list[int]]]:
    """Return the samples of each step, by rank."""
    samplers = [syncline.Shares(tuple(batches), rank=r).sampler(size, **options) for r in range(len(batches))]
    return [list(step) for step in zip(*samplers, strict=True)]


def whole(steps: list[list[list[int]]]) -> list[list[int]]:
    return [[index for batch in step for index in batch] for step in steps]


@pytest.mark.parametrize("size", [60, 53, 50, 49])  # without a tail, with tails of 5, 2 (fewer than the ranks) and 1
def test_an_epoch_of_unequal_batches_gives_the_weights_of_the_large_batch(size: int) -> None:
    def main(rank: Rank) -> None:
        shares = syncline.Shares(BATCHES)
        model = DDP(seeded(Mlp), **SMALL_BUCKETS)
        handle = syncline.attach(model, shares=shares)
        assert handle.shares == shares and "12 samples on 3 ranks: 7, 2, 3" in handle.describe()
        optimizer = sgd(model)
        dataset = data(size)
        loader = DataLoader(dataset, batch_sampler=shares.sampler(dataset, seed=4))
        for epoch in range(2):
            loader.batch_sampler.set_epoch(epoch)
            for inputs, labels in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()

        net = seeded(Mlp)
        alone = sgd(net)
        for epoch in range(2):
            order = torch.randperm(size, generator=torch.Generator().manual_seed(4 + epoch)).tolist()
            begin = 0
            for total in loader.batch_sampler.totals:
                inputs, labels = dataset[order[begin : begin + total]]
                begin += total
                alone.zero_grad()
                F.cross_entropy(net(inputs), labels).backward()
                alone.step()
        assert_same_weights(model.module, net)

    on_ranks(3, main)


def test_every_lossless_exchange_gives_the_large_batch_and_others_conserve_the_weighted_sum() -> None:
    def main(rank: Rank) -> None:
        indices = steps_of(TOTAL, shuffle=False)[0]
        reference = seeded(Mlp)
        loss_of(reference, whole([indices])[0]).backward()
        for name, exchange in EVERY.items():
            model = DDP(seeded(Mlp))
            handle = syncline.attach(model, exchange, shares=syncline.Shares(BATCHES))
            loss_of(model, indices[rank.rank]).backward()
            tensors = handle.state_dict()["tensors"]
            for (parameter_name, parameter), expected in zip(
                model.module.named_parameters(), reference.parameters(), strict=True
            ):
                assert parameter.grad is not None and expected.grad is not None
                kept = tensors.get(parameter_name, {}).get("residual", torch.zeros_like(parameter)).double()
                torch.distributed.all_reduce(kept)
                applied = parameter.grad.double()
                if exchange.lossless:
                    torch.testing.assert_close(parameter.grad, expected.grad, **CLOSE, msg=name)
                elif getattr(exchange, "mean", "ranks") != "contributors" and "contributors" not in name:
                    assert torch.allclose(applied + kept, expected.grad.double(), rtol=1e-2, atol=4e-3), name
                    if exchange.keeps:
                        torch.testing.assert_close(
                            applied + kept, expected.grad.double(), rtol=1e-4, atol=1e-6, msg=name
                        )
            handle.detach()
            assert handle.exchange == exchange

    on_ranks(3, main, deadline_s=110)


def test_accumulation_clipping_and_a_scaler_give_the_large_batchs_weights() -> None:
    def main(rank: Rank) -> None:
        steps = steps_of(48, shuffle=False)
        model = DDP(seeded(Mlp), **SMALL_BUCKETS)
        scaler = GradScaler("cpu", init_scale=64.0)
        syncline.attach(model, shares=syncline.Shares(BATCHES), scaler=scaler)
        optimizer = sgd(model)
        net = seeded(Mlp)
        alone = sgd(net)
        for first, second in (steps[:2], steps[2:]):
            optimizer.zero_grad()
            with model.no_sync():
                scaler.scale(loss_of(model, first[rank.rank]) / 2).backward()
            scaler.scale(loss_of(model, second[rank.rank]) / 2).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()

            alone.zero_grad()
            loss_of(net, whole([first, second])[0] + whole([first, second])[1]).backward()
            expected = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            alone.step()
            torch.testing.assert_close(norm, expected, rtol=1e-5, atol=1e-7)
        assert_same_weights(model.module, net)

    on_ranks(3, main)


def test_overlap_with_forward_and_a_static_graph_are_weighted_too() -> None:
    def main(rank: Rank) -> None:
        steps = steps_of(12 * 9 + 5, shuffle=False)
        expected = trained_alone(whole(steps))
        for overlap in (None, "forward"):
            model = DDP(seeded(Mlp), static_graph=overlap is None)
            optimizer = sgd(model)
            options: dict[str, Any] = {"overlap": overlap, "optimizer": optimizer} if overlap else {}
            handle = syncline.attach(model, shares=syncline.Shares(BATCHES), **options)
            for step in steps:
                optimizer.zero_grad()
                loss_of(model, step[rank.rank], 120).backward()
                optimizer.step()
            handle.detach()
            assert_same_weights(model.module, expected)

    on_ranks(3, main)


def simulated_updates(steps: list[list[list[int]]], every: int) -> nn.Module:
    """Train ranks one after the other in this process, and average what they did, weighted by their samples."""
    nets = [seeded(Mlp) for _ in BATCHES]
    optimizers = [sgd(net) for net in nets]
    anchor = {name: p.detach().clone() for name, p in nets[0].named_parameters()}
    fragments = fragments_of(anchor, every)
    counts = [[0.0] * len(nets) for _ in fragments]

    def average(index: int) -> None:
        total = sum(counts[index])
        if not total:
            return
        for piece in fragments[index][1]:
            agreed, owns = piece.of(anchor[piece.name]), [piece.of(net.get_parameter(piece.name).data) for net in nets]
            agreed += sum(n / total * (own - agreed) for n, own in zip(counts[index], owns, strict=True))
            for own in owns:
                own.copy_(agreed)
        counts[index] = [0.0] * len(nets)

    for number, step in enumerate(steps):
        for rank, (net, optimizer, indices) in enumerate(zip(nets, optimizers, step, strict=True)):
            optimizer.zero_grad()
            loss_of(net, indices, 120).backward()
            optimizer.step()
            for count in counts:
                count[rank] += len(indices)
        for index, (turn, _) in enumerate(fragments):
            if (number - turn) % every == 0:
                average(index)
    for index in range(len(fragments)):  # as `detach` does
        average(index)
    return nets[0]


@pytest.mark.parametrize(("every", "delay", "warmup"), [(1, 0, 0), (2, 0, 0), (3, 0, 0), (3, 1, 0), (1, 0, 2)])
def test_updates_are_weighted_by_the_samples_since_their_last_exchange(every: int, delay: int, warmup: int) -> None:
    def main(rank: Rank) -> None:
        steps = steps_of(12 * 6 + 5, shuffle=False)  # the last step is smaller
        model = DDP(seeded(Mlp))
        optimizer = sgd(model)
        options: dict[str, Any] = {"every": every, "warmup": warmup, "delay": delay}
        handle = syncline.attach(model, shares=syncline.Shares(BATCHES), optimizer=optimizer, **options)
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, step[rank.rank], 120).backward()
            optimizer.step()
        handle.wait()
        handle.detach()
        if delay == 0 and warmup == 0:
            assert_same_weights(model.module, simulated_updates(steps, every))
        if every == 1 and warmup == 0:
            assert_same_weights(model.module, trained_alone(whole(steps)))
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        gathered = [torch.zeros_like(flat) for _ in BATCHES]
        torch.distributed.all_gather(gathered, flat)
        assert all(torch.equal(flat, other) for other in gathered)

    on_ranks(3, main)


def test_weighted_sparse_updates_of_adamw_agree_on_all_ranks() -> None:
    def main(rank: Rank) -> None:
        steps = steps_of(48, shuffle=False)
        for exchange in (VARIANTS["oktopk, contributors"], syncline.Quantized(bits=4)):
            model = DDP(seeded(Mlp))
            optimizer = AdamW(model.parameters(), lr=1e-2)
            handle = syncline.attach(
                model, for_updates(exchange, 1), optimizer=optimizer, warmup=1, shares=syncline.Shares(BATCHES)
            )
            for step in steps:
                optimizer.zero_grad()
                loss_of(model, step[rank.rank]).backward()
                optimizer.step()
            flat = torch.cat([p.detach().flatten() for p in model.parameters()])
            gathered = [torch.zeros_like(flat) for _ in BATCHES]
            torch.distributed.all_gather(gathered, flat)
            assert all(torch.equal(flat, other) for other in gathered)
            handle.detach()

    on_ranks(3, main)


def test_weights_end_with_detach_and_with_an_attach_without_shares() -> None:
    def main(rank: Rank) -> None:
        model = DDP(seeded(Mlp))
        reference = DDP(seeded(Mlp))
        indices = steps_of(TOTAL, shuffle=False)[0][rank.rank]
        loss_of(reference, indices).backward()
        for detached in (True, False):
            handle = syncline.attach(model, shares=syncline.Shares(BATCHES))
            loss_of(model, indices).backward()
            assert not torch.equal(model.module.last.weight.grad, reference.module.last.weight.grad)
            if detached:
                handle.detach()
            else:
                assert syncline.attach(model).shares is None
            model.zero_grad()
            loss_of(model, indices).backward()
            for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, theirs.grad, **CLOSE)
        assert not model._forward_pre_hooks_with_kwargs

    on_ranks(3, main)


class Packed(nn.Module):
    """A model that gets all samples of a batch in one row."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)

    def forward(self, *, rows: Tensor, samples: int) -> Tensor:
        return self.net(rows.view(samples, 4))


def test_samples_are_counted_by_a_users_function() -> None:
    def count(*, rows: Tensor, samples: int) -> int:
        return samples

    def main(rank: Rank) -> None:
        own = BATCHES[rank.rank]
        inputs = torch.arange(TOTAL * 4).float().view(TOTAL, 4) / 40
        begin = sum(BATCHES[: rank.rank])
        model, net = DDP(seeded(Packed)), seeded(Packed)
        syncline.attach(model, shares=syncline.Shares(BATCHES, count=count))
        rows = inputs[begin : begin + own].reshape(1, -1)
        model(rows=rows, samples=own).square().mean().backward()
        net(rows=inputs.reshape(1, -1), samples=TOTAL).square().mean().backward()
        torch.testing.assert_close(model.module.net.weight.grad, net.net.weight.grad, **CLOSE)

        uncounted = DDP(seeded(Packed))
        syncline.attach(uncounted, shares=syncline.Shares(BATCHES))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            uncounted(rows=rows, samples=own).square().mean().backward()
        said = any("pass count= if the first dimension is not the batch" in str(w.message) for w in caught)
        assert said == (rank.rank < 2)  # the share of the last rank is not far from a third

    on_ranks(3, main)


def test_what_cannot_be_weighted_is_refused() -> None:
    def main(rank: Rank) -> None:
        model = DDP(seeded(Mlp))
        attach: Callable[..., Any] = syncline.attach
        assert "has batches for 3 ranks" in refusal(lambda: attach(model, shares=syncline.Shares((1, 2, 3))))
        assert "shares is (1, 2): pass what" in refusal(lambda: attach(model, shares=(1, 2)))
        different = syncline.Shares((1, 2 + rank.rank))
        assert "shares.batches" in refusal(lambda: attach(model, shares=different), syncline.MismatchError)
        handle = attach(model, shares=syncline.Shares((1, 2)))
        with contextlib.ExitStack() as joined, pytest.raises(syncline.UsageError, match=r"join\(\) is not supported"):
            joined.enter_context(model.join())
            model(torch.ones(1, 16))
        assert handle.shares is not None

    on_ranks(2, main)


def test_a_checkpoint_of_weighted_training_continues_exactly(tmp_path: Path) -> None:
    def main(rank: Rank) -> None:
        steps = steps_of(48, shuffle=False)

        def run(load: bool, numbers: range, net: nn.Module) -> tuple[nn.Module, syncline.Handle]:
            model = DDP(net)
            optimizer = sgd(model)
            handle = syncline.attach(model, syncline.Quantized(bits=4), shares=syncline.Shares(BATCHES))
            if load:
                handle.load(tmp_path)
            for number in numbers:
                optimizer.zero_grad()
                loss_of(model, steps[number][rank.rank]).backward()
                optimizer.step()
            return net, handle

        whole_run, _ = run(False, range(4), seeded(Mlp))
        half, handle = run(False, range(2), seeded(Mlp))
        handle.save(tmp_path)
        resumed, _ = run(True, range(2, 4), half)
        assert all(map(torch.equal, whole_run.parameters(), resumed.parameters()))

        for shares, text in (
            (None, "in batches of 7, 2, 3: pass shares="),
            ((1, 1, 1), "12 samples per step, and .* 3"),
        ):
            model = DDP(seeded(Mlp))
            other = None if shares is None else syncline.Shares(shares)
            handle = syncline.attach(model, syncline.Quantized(bits=4), shares=other)
            with pytest.warns(match=text) if rank.rank == 0 else contextlib.nullcontext():
                handle.load(tmp_path)

    on_ranks(3, main)


def test_tune_keeps_the_weights_and_names_shares_where_a_rank_is_slow() -> None:
    def main(rank: Rank) -> Any:
        indices = steps_of(TOTAL, shuffle=False)[0][rank.rank]
        model = DDP(seeded(Mlp))
        shares = syncline.Shares(BATCHES)
        syncline.attach(model, syncline.Quantized(), shares=shares)
        tuned = syncline.tune(model, lambda net: loss_of(net, indices).backward(), budget_s=5.0, quiet=True)
        model.zero_grad()
        loss_of(model, indices).backward()
        reference = seeded(Mlp)
        loss_of(reference, range(TOTAL)).backward()
        for mine, expected in zip(model.module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, expected.grad, **CLOSE)
        assert "syncline.shares" not in tuned.describe()

        def step(net: nn.Module) -> None:
            time.sleep(0.02 if rank.rank == 1 else 0.005)
            loss_of(net, indices).backward()

        return syncline.tune(DDP(seeded(Mlp)), step, budget_s=5.0, quiet=True).describe()

    for text in on_ranks(3, main):
        assert re.search(r"Rank 1 computes for .*\(syncline\.shares\) would save about \d", text), text


@pytest.mark.waits
def test_a_rank_that_dies_is_named_by_the_others() -> None:
    def main(rank: Rank) -> str:
        rank.init_process_group(8.0)
        model = DDP(seeded(Mlp))
        handle = syncline.attach(model, shares=syncline.Shares(BATCHES))
        inputs = torch.ones(BATCHES[rank.rank], 16)
        for _ in range(3):  # in the second step, DDP itself exchanges something
            model(inputs).mean().backward()
        if rank.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RuntimeError):
            for _ in range(3):
                model(inputs).mean().backward()
        wait_for(rank, 0, 1)
        return str(handle.error)

    outcomes = launch_outcomes(ClusterSpec(hosts=3), main, deadline_s=60.0, grace_s=30.0, shaped=False)
    for outcome in outcomes[:2]:
        assert "rank 2" in str(outcome.value), outcome
