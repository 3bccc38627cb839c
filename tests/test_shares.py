"""Batches of unequal size: how a batch is divided, how a dataset is dealt, and how the speed of ranks is measured."""

from __future__ import annotations

import itertools
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

import syncline
from ddp_helpers import Mlp, on_ranks, refusal, seeded
from syncline.balance.division import RankCost, dealt, divide, fitted
from syncline.cluster import Rank

BATCHES = st.lists(st.integers(1, 40), min_size=1, max_size=7)
costs = st.builds(RankCost, st.floats(0, 5), st.floats(0.01, 5), st.none() | st.integers(1, 20))


# --- dividing a batch -----------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.lists(costs, min_size=1, max_size=3), st.integers(1, 14))
def test_no_other_division_ends_earlier(ranks: list[RankCost], total: int) -> None:
    def slowest(batches: tuple[int, ...]) -> float:
        return max(cost.seconds(batch) for cost, batch in zip(ranks, batches, strict=True))

    ranges = [range(1, min(total, cost.most or total) + 1) for cost in ranks]
    possible = [batches for batches in itertools.product(*ranges) if sum(batches) == total]
    if not possible:
        with pytest.raises(syncline.UsageError, match=r"needs at least one sample|memory budget permits only"):
            divide(total, ranks)
        return
    batches = divide(total, ranks)
    assert batches in possible
    assert slowest(batches) <= min(map(slowest, possible)) * (1 + 1e-9)


def test_a_rank_of_half_the_speed_gets_half_the_samples() -> None:
    assert divide(70, [RankCost(0.0, 1.0)] * 3 + [RankCost(0.0, 2.0)]) == (20, 20, 20, 10)


def test_a_fixed_cost_and_a_cost_per_sample_are_recovered_from_times() -> None:
    fixed_s, sample_s = fitted([(n, 0.05 + 0.002 * n) for n in (10, 20, 40)])
    assert (fixed_s, sample_s) == (pytest.approx(0.05), pytest.approx(0.002))
    assert fitted([(10, 1.0), (20, 1.0)])[1] > 0, "otherwise one rank would get all samples"


@given(BATCHES, st.integers(0, 400))
def test_any_number_of_samples_is_dealt_in_proportion(batches: list[int], more: int) -> None:
    samples = len(batches) + more
    parts = dealt(samples, batches)
    assert sum(parts) == samples and min(parts) >= 1
    if samples <= sum(batches):
        assert all(part <= batch for part, batch in zip(parts, batches, strict=True))
    if samples == sum(batches):
        assert list(parts) == batches


# --- dealing a dataset ----------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(BATCHES, st.integers(0, 500), st.booleans(), st.booleans(), st.integers(0, 3))
def test_every_sample_is_dealt_exactly_once_per_epoch(
    batches: list[int], size: int, shuffle: bool, drop_last: bool, epoch: int
) -> None:
    total, ranks = sum(batches), len(batches)

    def samplers() -> Any:
        made = [syncline.Shares(tuple(batches), rank=rank) for rank in range(ranks)]
        return [one.sampler(size, shuffle=shuffle, seed=5, drop_last=drop_last) for one in made]

    if size < ranks or (drop_last and size < total):
        with pytest.raises(syncline.UsageError, match=f"the dataset has {size} samples"):
            samplers()
        return
    dealt_out = []
    for sampler in samplers():
        sampler.set_epoch(epoch)
        dealt_out.append(list(sampler))
        assert len(sampler) == len(dealt_out[-1]), "the same number of steps on all ranks"
    steps = list(zip(*dealt_out, strict=True))
    assert all(batch for step in steps for batch in step), "no rank has a step without samples"
    seen = [index for step in steps for batch in step for index in batch]
    assert len(seen) == len(set(seen)) == (size - size % total if drop_last else size)
    assert set(seen) <= set(range(size))
    whole = max(0, size // total - (0 if drop_last or size % total >= ranks else 1))
    for step in steps[:whole]:
        assert [len(batch) for batch in step] == batches
    if total >= 2 * ranks:
        assert all(len(batch) <= n for step in steps for batch, n in zip(step, batches, strict=True))
    if not shuffle:
        assert seen == sorted(seen)


def test_each_epoch_and_each_seed_has_an_order_of_its_own() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        sampler = syncline.Shares((3, 1), rank=0).sampler(40, seed=seed)
        sampler.set_epoch(epoch)
        return [index for batch in sampler for index in batch]

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1) and order(0, 0) != order(1, 0)


def test_a_dataset_without_a_length_and_a_seed_that_is_no_integer_are_refused() -> None:
    shares: Any = syncline.Shares((2, 1), rank=0)
    with pytest.raises(syncline.UsageError, match="the dataset is a generator without a length"):
        shares.sampler(number for number in range(9))
    with pytest.raises(syncline.UsageError, match=r"seed is 1.5: pass an integer, the same on all ranks"):
        shares.sampler(9, seed=1.5)
    assert len(list(shares.sampler(9, seed=np.int64(3)))) == 3


def test_a_data_loader_takes_the_sampler_with_and_without_workers() -> None:
    data = torch.arange(23)
    shares = syncline.Shares((3, 2, 1), rank=1)
    for workers in (0, 1):
        loader = DataLoader(data, batch_sampler=shares.sampler(data, shuffle=False), num_workers=workers)  # type: ignore[arg-type]
        assert [batch.tolist() for batch in loader] == [[3, 4], [9, 10], [15, 16], [20, 21]]


# --- the result -----------------------------------------------------------------------------------------------------


def test_shares_are_saved_and_loaded(tmp_path: Path) -> None:
    shares = syncline.Shares((5, 3), rank=1, equal_s=0.2, step_s=0.15)
    assert (shares.batch, shares.total, shares.saved_s) == (3, 8, pytest.approx(0.05))
    shares.save(tmp_path / "shares.json")
    assert syncline.Shares.load(tmp_path / "shares.json", rank=1) == shares
    assert "150 ms instead of 200 ms with equal batches: 1.33× faster" in shares.describe()
    (tmp_path / "shares.json").write_text('{"schema": 1, "batches": [5, 0]}')
    with pytest.raises(syncline.UsageError, match=r"shares.json: the batch of rank 1 is 0"):
        syncline.Shares.load(tmp_path / "shares.json", rank=0)
    (tmp_path / "shares.json").write_text('{"schema": 1, "batches": "all"}')
    with pytest.raises(syncline.UsageError, match=r"shares.json: batches"):
        syncline.Shares.load(tmp_path / "shares.json", rank=0)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"batches": 5}, "batches is 5: pass the samples of each rank"),
        ({"batches": (5, 2.5), "rank": 0}, "the batch of rank 1 is 2.5"),
        ({"batches": (5, True), "rank": 0}, "the batch of rank 1 is True"),
        ({"batches": (), "rank": 0}, "there are 0 batches"),
        ({"batches": (5, 5)}, "there is neither a process group nor torchrun"),
        ({"batches": (5, 5), "rank": 2}, "there are 2 batches, and this is rank 2"),
        ({"batches": (5, 5), "rank": 0, "count": 3}, "count is 3: pass a function"),
    ],
)
def test_shares_that_cannot_be_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(syncline.UsageError, match=text):
        syncline.Shares(**arguments)


# --- measuring ------------------------------------------------------------------------------------------------------


class Paced(nn.Module):
    """A model whose step takes a fixed time and a time per sample, in which it sleeps."""

    def __init__(self, fixed_s: float, sample_s: float) -> None:
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()
        self.fixed_s, self.sample_s = fixed_s, sample_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.fixed_s + self.sample_s * len(x))
        return self.drop(self.norm(self.layer(x)))


def paced_step(model: nn.Module, samples: int) -> None:
    model(torch.randn(samples, 4) + random.random() + float(np.random.rand())).square().mean().backward()


@pytest.mark.alone
def test_a_slow_rank_gets_fewer_samples_and_nothing_of_the_model_changes() -> None:
    def main(rank: Rank) -> tuple[Any, ...]:
        slow = 2 if rank.rank == 2 else 1
        net = Paced(0.004 * slow, 0.0005 * slow)
        model = DDP(net)
        paced_step(model, 8)  # gradients, and statistics of BatchNorm
        before = [t.clone() for t in (*net.state_dict().values(), *(p.grad for p in net.parameters()))]
        states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        shares = syncline.shares(model, paced_step, total=96, budget_s=2.0, quiet=True)
        after = [*net.state_dict().values(), *(p.grad for p in net.parameters())]
        assert all(map(torch.equal, before, after))
        assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
        assert states[2] == np.random.get_state()[1].tolist()
        assert shares.rank == rank.rank
        return shares.batches, shares.equal_s, shares.step_s

    answers = on_ranks(3, main)
    assert answers[0] == answers[1] == answers[2], "all ranks get the same answer"
    batches, equal_s, step_s = answers[0]
    ideal = (40, 40, 16)  # 4 ms + 0.5 ms a sample, and twice that
    assert sum(batches) == 96
    assert all(abs(n - m) <= 3 for n, m in zip(batches, ideal, strict=True)), batches
    assert step_s < 0.8 * equal_s
    assert step_s < 1.15 * 0.024


@pytest.mark.alone
def test_ranks_of_the_same_speed_get_equal_batches() -> None:
    def main(rank: Rank) -> Any:
        return syncline.shares(Paced(0.002, 0.0005), paced_step, total=41, budget_s=1.0, quiet=True).batches

    for first, second in on_ranks(2, main):
        assert first + second == 41 and abs(first - second) <= 3


def test_memory_limits_a_rank_and_the_others_take_over() -> None:
    def main(rank: Rank) -> Any:
        net = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 64))

        def step(model: nn.Module, samples: int) -> None:
            model(torch.ones(samples, 64)).square().mean().backward()

        budget = "3MiB" if rank.rank == 1 else None
        shares = syncline.shares(net, step, total=400, memory_budget=budget, budget_s=0.2, quiet=True)
        if rank.rank == 1:
            from syncline.memory_meter import metered

            with metered(torch.device("cpu"), [*net.parameters(), *net.buffers()]) as meter:
                step(net, shares.batch)
                assert meter.peak() <= 3 << 20
        return shares.batches

    first, second = on_ranks(2, main)
    assert first == second and sum(first) == 400
    assert first[1] < 250

    def too_small(rank: Rank) -> str:
        net = nn.Linear(512, 512)

        def step(model: nn.Module, samples: int) -> None:
            model(torch.ones(samples, 512)).square().mean().backward()

        return refusal(lambda: syncline.shares(net, step, total=8, memory_budget="1MiB", budget_s=0.1, quiet=True))

    for text in on_ranks(2, too_small):
        assert "memory_budget is 1 MiB, but a step with 1 samples needs" in text


def test_bad_input_is_refused_on_all_ranks() -> None:
    def main(rank: Rank) -> None:
        net = seeded(Mlp)

        def step(model: nn.Module, samples: int) -> None:
            model(torch.ones(samples, 16)).mean().backward()

        def steps_the_weights(model: nn.Module, samples: int) -> None:
            step(model, samples)
            torch.optim.SGD(model.parameters(), lr=1.0).step()

        def fails_on_one(model: nn.Module, samples: int) -> None:
            if rank.rank == 1:
                raise ValueError("no data here")
            step(model, samples)

        def refused(*arguments: Any, **options: Any) -> str:
            return refusal(lambda: syncline.shares(*arguments, quiet=True, budget_s=0.1, **options), Exception)

        assert "total is 1, but each of the 2 ranks needs at least one" in refused(net, step, 1)
        assert "total is 2.5: it must be the number of samples" in refused(net, step, 2.5)
        assert "total is True" in refused(net, step, True)
        assert "step_of_batch is 3: pass a function" in refused(net, 3)
        assert "is not a size of memory" in refused(net, step, memory_budget="much")
        assert "pass an nn.Module" in refused("net", step)
        assert "static graph" in refused(DDP(seeded(Mlp), static_graph=True), step)
        assert "step_of_batch changed middle.weight" in refused(net, steps_the_weights)
        assert "total" in refused(net, step, 8 + rank.rank)
        assert "no data here" in refused(net, fails_on_one)
        assert all(map(torch.equal, net.parameters(), seeded(Mlp).parameters()))
        assert syncline.shares(net, step, 8, quiet=True, budget_s=0.1).total == 8

    on_ranks(2, main)


def test_without_a_process_group_the_error_says_what_to_do() -> None:
    with pytest.raises(syncline.UsageError, match="there is no process group: call"):
        syncline.shares(Mlp(), paced_step)
