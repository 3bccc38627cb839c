"""Training with simulated ranks equals data-parallel training, so that the study of quality measures the exchanges."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import syncline
from ddp_helpers import on_ranks
from syncline.cluster import Rank
from syncline.exchange import Dense, Layout
from syncline.models.zoo import Batch, cnn, loss

STEPS = 14


class Study:
    """The modules of the study, in `benchmarks`."""

    def __init__(self) -> None:
        self.ranks: Any = importlib.import_module("simulated_ranks")
        self.tasks: Any = importlib.import_module("quality_tasks")
        self.methods: Any = importlib.import_module("quality_methods")
        self.peers: Any = importlib.import_module("peers")
        self.corpus: Any = importlib.import_module("corpus")
        self.data = self.tasks.Data(torch.device("cpu"), small=True)


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Study:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    return Study()


class RandomImages:
    """Random images, numbered."""

    def __init__(self, examples: int = 40) -> None:
        self.examples = examples
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(examples, 1, 28, 28, generator=generator)
        self.labels = torch.randint(10, (examples,), generator=generator)

    def batch(self, numbers: Tensor) -> Batch:
        return self.images[numbers], self.labels[numbers]


def dense_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.GELU(), nn.Linear(32, 10))


def normed_model() -> nn.Module:
    torch.manual_seed(0)
    convolution = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.BatchNorm2d(4), nn.GELU(), nn.Flatten())
    return nn.Sequential(convolution, nn.Linear(4 * 169, 32), nn.GELU(), nn.Linear(32, 10))


@pytest.fixture
def first_buckets(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep gradients in the order of DDP's first step, which DDP keeps if it has to find unused parameters."""
    monkeypatch.setattr(study.ranks, "bucket_order", lambda model: list(model.parameters()))


def numbers_of(ranks: int, examples: int) -> Tensor:
    return torch.randint(examples, (STEPS, ranks, 6), generator=torch.Generator().manual_seed(1))


def weights(model: nn.Module) -> Tensor:
    return torch.cat([tensor.detach().float().flatten() for tensor in model.state_dict().values()])


def test_a_dense_step_of_all_ranks_equals_a_step_with_the_whole_batch(study: Study) -> None:
    model = dense_model()
    source, numbers = RandomImages(), torch.arange(40).view(4, -1)
    task = replace(study.tasks.task_of("cnn", steps=1, small=False), examples=40)
    ranks = study.ranks.RankGradients([model] * 4, source, task, study.data.device)
    ranks.compute(numbers)
    sent = study.ranks.exchange_step(Dense(), ranks.layout, ranks.flats, [[] for _ in range(4)], 0)
    assert sent == 2 * 3 * -(-ranks.flats[0].numel() // 4) * 4
    averaged = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    inputs, targets = source.batch(numbers.flatten())
    whole = torch.autograd.grad(loss(model(inputs), targets), list(model.parameters()))
    for mine, expected in zip(averaged, whole, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-7)


def test_running_statistics_are_those_of_rank_0(study: Study) -> None:
    torch.manual_seed(0)
    model, alone = cnn(), cnn()
    alone.load_state_dict(model.state_dict())
    source, numbers = RandomImages(), torch.arange(40).view(4, -1)
    task = replace(study.tasks.task_of("cnn", steps=1, small=False), examples=40)
    ranks = study.ranks.RankGradients([model] * 4, source, task, study.data.device)
    for _ in range(2):
        ranks.compute(numbers)
        alone(source.batch(numbers[0])[0])
    for name, buffer in alone.named_buffers():
        if "running" in name:
            assert torch.equal(model.get_buffer(name), buffer)


def trained_here(study: Study, method: Any, model: nn.Module, ranks: int, warmup: int) -> list[Tensor]:
    """Train with simulated ranks, and return the weights of each."""
    source = RandomImages()
    task = replace(study.tasks.task_of("gpt-small", STEPS, small=False), examples=6 * ranks)
    share = warmup / STEPS
    training = study.ranks.training_of(method, model, source, task, 1e-2, study.data, ranks, share)
    assert training.warmup == warmup
    for step, numbers in enumerate(numbers_of(ranks, source.examples)):
        training.step(step, numbers)
    training.check()
    return [weights(model) for model in training.models]


def train_on_network(study: Study, rank: Rank, model: DDP, optimizer: torch.optim.Optimizer) -> None:
    """Take the same steps on a rank of a process group."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: study.ranks.schedule(step, STEPS))
    source = RandomImages()
    for numbers in numbers_of(dist.get_world_size(), source.examples):
        optimizer.zero_grad()
        inputs, targets = source.batch(numbers[rank.rank])
        loss(model(inputs), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()


@pytest.mark.usefixtures("first_buckets")
@pytest.mark.parametrize(
    ("name", "ranks", "warmup"),
    [
        ("updates:oktopk:0.05", 3, 4),
        ("updates:oktopk:0.05:every3:delay1", 2, 4),
        ("updates:chunks:0.05:every3:delay1", 3, 0),
        ("updates:chunks:0.05:bf16", 2, 4),
        ("diloco:every3", 2, 0),
    ],
)
def test_simulated_ranks_train_to_the_weights_of_real_ones(study: Study, name: str, ranks: int, warmup: int) -> None:
    method = study.methods.method_named(name)
    simulated = trained_here(study, method, normed_model(), ranks, warmup)
    task = study.tasks.TASKS["gpt-small"]

    def main(rank: Rank) -> None:
        model = DDP(normed_model(), find_unused_parameters=True)
        optimizer = task.optimize(list(model.parameters()), 1e-2)
        options = {"every": method.every, "delay": method.delay, "outer": method.outer, "warmup": warmup}
        syncline.attach(model, method.exchange, optimizer=optimizer, lanes=1, **options)
        train_on_network(study, rank, model, optimizer)
        torch.testing.assert_close(weights(model.module), simulated[rank.rank], rtol=0, atol=1e-6)

    assert not torch.equal(simulated[0], weights(normed_model()))
    on_ranks(ranks, main)


@dataclass
class OneBucket:
    """A bucket of gradients, as DDP gives it to a hook. In DDP over gloo, PyTorch's own hook mixes up collectives."""

    flat: Tensor
    layout: Layout

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def buffer(self) -> Tensor:
        return self.flat

    def gradients(self) -> list[Tensor]:
        return [slot.view(self.flat) for slot in self.layout.slots]


@pytest.mark.parametrize("factors", [1, 4])
def test_simulated_powersgd_equals_pytorchs_hook(study: Study, factors: int) -> None:
    layout = study.ranks._layout_of_gradients(normed_model().parameters(), torch.device("cpu"))
    gradients = torch.randn(6, 2, layout.numel, generator=torch.Generator().manual_seed(0))
    exchange = replace(study.methods.method_named(f"powersgd:{factors}").exchange, start=2)
    states: list[list[Any]] = [[], []]
    simulated = []
    for step, flats in enumerate(gradients.clone()):
        sent = study.ranks.exchange_step(exchange, layout, list(flats), states, step)
        assert (sent < layout.numel) == (step >= 2)
        simulated.append(flats[0].clone())

    def main(rank: Rank) -> None:
        torch.set_num_threads(1)  # the parent has used its threads, which a fork does not copy
        state = PowerSGDState(None, matrix_approximation_rank=factors, start_powerSGD_iter=2)
        for step, flats in enumerate(gradients.clone()):
            bucket: Any = OneBucket(flats[rank.rank], layout)
            result = powerSGD_hook(state, bucket).wait()
            torch.testing.assert_close(result, simulated[step], rtol=1e-4, atol=1e-5)

    on_ranks(2, main)


def test_one_bit_of_each_element_and_the_errors_add_up_to_what_came_in(study: Study) -> None:
    sizes, ranks = (30, 7, 200), 3
    bits = study.peers.OneBit(sizes, ranks, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    came_in, received = torch.zeros(237), torch.zeros(237)
    for _ in range(20):
        vectors = torch.randn(ranks, 237, generator=generator)
        came_in += vectors.mean(0)
        received += bits.mean(vectors)
    kept = bits._errors.mean(0) + bits._owner_error
    torch.testing.assert_close(received + kept, came_in, rtol=0, atol=1e-4)
    assert len(bits.mean(vectors).abs().unique()) <= len(sizes) + ranks - 1


def test_resets_and_turns_change_the_training(study: Study) -> None:
    """The variants of the study differ from the product where they should, and only there."""
    final = {}
    for words in ("", ":reset-own", ":reset-any", ":reset-none"):
        method = study.methods.method_named(f"updates:oktopk:0.05{words}")
        final[words] = trained_here(study, method, dense_model(), ranks=2, warmup=2)[0]
    assert torch.equal(final[""], final[":reset-own"])
    assert len({tuple(tensor.tolist()) for tensor in final.values()}) == 3


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("updates:oktopk:often", "the word 'often' is not known"),
        ("int5", "no method is called int5"),
        ("updates:oktopk:delay1", "use delay=0"),
        ("powersgd:4:every5", "are for updates"),
        ("diloco:every5:0.01", "density"),
    ],
)
def test_names_of_methods_that_do_not_exist(study: Study, name: str, told: str) -> None:
    with pytest.raises(syncline.UsageError, match=told):
        study.methods.method_named(name)


def test_the_same_seed_gives_the_same_training(study: Study) -> None:
    task = study.tasks.task_of("gpt", steps=2, small=True)
    run = study.ranks.Run("gpt", "dense", seed=1, lr=1e-3, ranks=4)
    first, again = (study.ranks.train(run, task, study.data, 0.0) for _ in range(2))
    other = study.ranks.train(replace(run, seed=2), task, study.data, 0.0)
    assert first["loss"] == again["loss"] != other["loss"]
    assert first["sent_bytes"] == [first["bytes_per_step"], 2 * first["bytes_per_step"]]
