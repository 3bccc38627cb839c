"""Predicted memory, choices under a budget, shared workspaces, and the commands that use them."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from typer.testing import CliRunner

from made_up import network as made_up_network
from made_up import profile as made_up_profile
from syncline.cli import app
from syncline.cli import predict as cli_predict
from syncline.dist.local_comm import LocalComm, run_ranks
from syncline.errors import UsageError
from syncline.exchange import EXCHANGES, Layout
from syncline.exchange.workspace import Workspace
from syncline.layerwise.activations import Managed, find_blocks
from syncline.layerwise.memory_budget import measure_activations
from syncline.memory_meter import metered
from syncline.models import gpt, zoo
from syncline.plan.memory import MemoryPlan, MemoryRow
from syncline.predict.memory import Training, best_batch, choose, largest_batch, peak_bytes, smallest_budget, step_s
from syncline.records.activations import Activations, Block, Line
from syncline.testing import place_ranks
from syncline.units import format_bytes, parse_bytes

CPU = torch.device("cpu")
runner = CliRunner()


def flat(each: float) -> Line:
    return Line(0.0, each)


def activations(blocks: int = 4, *, to_host_bps: float = 0.0) -> Activations:
    """Return activations of blocks that save 100 bytes per sample, 10 of which are their inputs."""
    one = {
        "held": flat(100), "input": flat(10), "forward_peak": flat(110), "backward_peak": flat(130),
        "forward_s": flat(1.0), "backward_s": flat(2.0),
    }  # fmt: skip
    return Activations(
        batches=(1, 2),
        blocks=tuple(Block(name=f"block {index}", **one) for index in range(blocks)),
        before=flat(5),
        behind_peak=flat(50),
        before_peak=flat(20),
        behind_s=flat(0.5),
        to_host_bps=to_host_bps,
        parameter_bytes=400,
        elements=100,
        largest_bytes=40,
    )


TRAINING = Training(parameter_bytes=400, buffer_bytes=0, optimizer_bytes=400, residual_bytes=400, workspace_bytes=100)


def test_the_peak_is_the_largest_of_forward_head_and_backward() -> None:
    found = activations()
    # All kept: the layers before, four blocks, and the head.
    assert peak_bytes(found, ["keep"] * 4, 1) == 5 + 4 * 100 + 50
    # All recomputed: the last block's backward, and the inputs of all blocks.
    assert peak_bytes(found, ["recompute"] * 4, 1) == 5 + 3 * 10 + 10 + 130
    # Gradients wait only in backward, and the last block's are first.
    assert peak_bytes(found, ["recompute"] * 4, 1, waiting_bytes=1000) == pytest.approx(300 + 5 + 10 + 130)
    assert peak_bytes(found, ["keep"] * 4, 3) == 3 * peak_bytes(found, ["keep"] * 4, 1)


@settings(max_examples=200, deadline=None)
@given(
    budget=st.floats(900, 3000),
    batch=st.integers(1, 8),
    bps=st.sampled_from([0.0, 10.0, 1e4]),
)
def test_a_choice_fits_the_budget_and_a_refusal_cannot_fit(budget: float, batch: int, bps: float) -> None:
    found = activations(to_host_bps=bps)
    choice, least = choose(found, TRAINING, batch, budget), smallest_budget(found, TRAINING, batch)
    if choice is None:
        assert least > budget
        assert choose(found, TRAINING, batch, math.ceil(least)) is not None
        assert largest_batch(found, TRAINING, budget) < batch
    else:
        assert choice.peak_bytes <= budget
        assert choice.peak_bytes == choice.states_bytes + peak_bytes(found, choice.ways, batch)
        assert choice.step_s >= step_s(found, ["keep"] * 4, batch)
        assert largest_batch(found, TRAINING, budget) >= batch


def test_activations_are_given_up_only_if_needed() -> None:
    found = activations()
    roomy = choose(found, TRAINING, 1, 10_000)
    assert roomy is not None
    assert roomy.ways == ("keep",) * 4
    tight = choose(found, TRAINING, 1, TRAINING.states_bytes("device") + 400)
    assert tight is not None
    assert sorted(tight.ways) == ["keep", "keep", "keep", "recompute"]
    # With a fast link to the host, moving takes no time but recomputing does.
    moved = choose(activations(to_host_bps=1e6), TRAINING, 1, TRAINING.states_bytes("device") + 400)
    assert moved is not None
    assert "recompute" not in moved.ways
    assert moved.step_s == step_s(activations(), ["keep"] * 4, 1)


def test_larger_batches_are_taken_where_a_sample_then_takes_less() -> None:
    found = activations()
    best = best_batch(found, TRAINING, 20_000, lambda choice: max(choice.step_s, 100.0))
    assert best is not None
    assert best.batch > 1
    assert best_batch(found, TRAINING, 500, lambda choice: choice.step_s) is None


@pytest.mark.parametrize("name", ["gpt-small", "resnet50"])
def test_measured_peaks_are_foreseen_and_nothing_is_left_behind(name: str) -> None:
    torch.manual_seed(0)
    batch = 2
    model = gpt.GPT(width=96, layers=4, heads=4) if name == "gpt-small" else zoo.build_model(name)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    state = torch.get_rng_state()

    def step_of(size: int) -> Any:
        inputs, targets = zoo.make_batch(name, size, torch.Generator().manual_seed(0))
        return lambda module: zoo.loss(module(inputs), targets)

    found = measure_activations(model, {batch: step_of(batch)})
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert [block.name for block in found.blocks] == list(find_blocks(model))
    for way in ("keep", "recompute"):
        managed = Managed(model, dict.fromkeys(find_blocks(model), way))
        step = step_of(batch)
        hooks = [p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)) for p in model.parameters()]
        with metered(CPU, [*model.parameters(), *model.buffers()]) as meter:
            base = meter.now()
            step(model).backward()
            peak = meter.peak() - base
        for hook in hooks:
            hook.remove()
        managed.close()
        assert peak_bytes(found, [way] * len(found.blocks), batch) == pytest.approx(peak, rel=0.1)


class Deep(nn.Module):
    """A block that saves many tensors of one shape, large enough to be moved."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.GELU())))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.layers(x)
        return result


@pytest.mark.parametrize("way", ["recompute", "offload", "park"])
def test_gradients_are_the_same_whatever_becomes_of_activations(way: str) -> None:
    torch.manual_seed(0)
    model, inputs = nn.Sequential(*(Deep() for _ in range(3))), torch.randn(512, 256)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(inputs).square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = gradients()
    managed = Managed(model, dict.fromkeys(find_blocks(model), way))
    found = gradients()
    copied = copy.deepcopy(model)
    nn.init.zeros_(copied[0].layers[0].weight)
    own = copied(inputs)
    managed.close()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert torch.equal(own, copied(inputs))  # a copy has its own weights
    assert not torch.equal(own, model(inputs))
    assert "forward" not in model[0].__dict__


def test_a_forward_of_the_users_own_is_there_again_afterwards() -> None:
    model = nn.Sequential(Deep())
    model[0].forward = lambda x: 2 * x
    Managed(model, {"0": "recompute"}).close()
    assert torch.equal(model(torch.ones(1)), torch.full((1,), 2.0))


def test_a_block_that_remembers_is_not_recomputed() -> None:
    class DynamicCache:
        def get_seq_length(self) -> int:
            return 0

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor, cache: object = None) -> Tensor:
            return self.layer(x)

    row = nn.ModuleList([Block()])
    managed = Managed(row, {"0": "recompute"})
    with pytest.raises(UsageError, match="use_cache=False"):
        row[0](torch.ones(1, 2, requires_grad=True), cache=DynamicCache())
    managed.close()
    with pytest.raises(UsageError, match="no module named 'nobody'"):
        Managed(row, {"nobody": "recompute"})


@pytest.mark.parametrize("name", EXCHANGES)
def test_buckets_that_share_their_memory_are_exchanged_as_if_they_did_not(name: str) -> None:
    """Two buckets of different sizes take turns; one of the steps is not finite."""
    exchange, ranks, sizes = EXCHANGES[name](), 4, (6000, 4099)

    def given(rank: int, step: int, size: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + rank)
        values = torch.randn(size, generator=generator)
        if step == 2 and rank == 1:
            values[7] = float("nan")
        return values

    def main(comm: LocalComm, workspace: Workspace | None) -> list[Tensor]:
        layouts = [Layout(Layout.flat(size).slots, torch.float32, CPU, workspace) for size in sizes]
        states = [exchange.prepare(layout, comm) for layout in layouts]
        results = []
        for step in range(4):
            for layout, state in zip(layouts, states, strict=True):
                values = given(comm.rank, step, layout.numel)
                state.begin(step)
                work = exchange.run(values, state, comm)
                if work is not None:
                    work.wait()
                state.settle(state.finite(values))
                results += [values, *(tensor for kinds in state.tensors(layout).values() for tensor in kinds.values())]
        return results

    topology = place_ranks(exchange, ranks)
    own = run_ranks(topology, lambda comm: main(comm, None))
    shared = run_ranks(topology, lambda comm: main(comm, Workspace(CPU)))
    for mine, theirs in zip(own, shared, strict=True):
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(one.isnan(), other.isnan())
            assert torch.equal(one.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize(
    ("text", "size"), [("8GiB", 8 * 2**30), ("500 MB", 500_000_000), ("1.5gib", 3 * 2**29), (7, 7)]
)
def test_sizes_are_read_as_people_write_them(text: Any, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "eight", "8 potatoes", "-1GiB", "0GiB", True, 0, None])
def test_what_is_no_size_is_refused(text: Any) -> None:
    with pytest.raises(UsageError, match="not a size of memory"):
        parse_bytes(text)
    assert format_bytes(8 * 2**30) == "8 GiB"
    assert format_bytes(300 * 2**20) == "300 MiB"


def plan(*options: str) -> Any:
    return runner.invoke(app, ["plan", *options])


@pytest.mark.parametrize(
    ("best", "told"),
    [
        (
            MemoryRow(name="plain DDP", lossless=True, batch=8, step_s=1.0),
            "Plain DDP fits, and no other method is more than 1 % faster",
        ),
        (
            MemoryRow(name="DDP, oktopk", lossless=False, batch=8, step_s=0.5, exchange="OkTopk()"),
            "Apply it: syncline.attach(model, syncline.OkTopk())",
        ),
        (
            MemoryRow(name="layerwise, dense", lossless=True, batch=1, step_s=0.1, exchange="Dense()", by_layer=True),
            'Apply it: syncline.Layerwise(net, optimizer, syncline.Dense(), memory_budget="1 GiB", step=step)',
        ),
    ],
)
def test_what_is_best_is_what_is_to_be_applied(best: MemoryRow, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    plain = MemoryRow(name="plain DDP", lossless=True, batch=8, step_s=1.0)
    rows = (best,) if best == plain else (best, plain)
    answer = MemoryPlan(model="m", budget_bytes=2**30, ranks=4, unit="sample", rows=rows)
    cli_predict._show_memory(answer, made_up_network())
    shown = capsys.readouterr().out
    assert f"Best: {best.name}, {best.batch} sample" in shown and shown.rstrip().splitlines()[-1].startswith(told)


def test_a_plan_for_a_budget_says_what_fits(tmp_path: Path) -> None:
    path, answer = tmp_path / "profile.json", tmp_path / "answer.json"
    msgspec.structs.replace(made_up_profile(), activations=activations()).save(path)
    options = ["--profile", str(path), "--rate", "1gbit", "--allow", "sparse"]
    shown = plan(*options, "--memory-budget", "1GiB", "--json", str(answer))
    assert shown.exit_code == 0, shown.output
    assert (
        "Best: plain DDP, 32 batches per rank" in shown.stdout
    )  # nothing else is faster, so there is nothing to apply
    assert (
        "Plain DDP fits, and no other method is more than 1 % faster" in shown.stdout
        and "how many samples its batch has" in shown.stdout
    )
    rows = json.loads(answer.read_text())["rows"]
    assert {row["name"] for row in rows} >= {"layerwise, dense", "layerwise, oktopk", "plain DDP"}
    assert all(row["peak_bytes"] <= 2**30 for row in rows)
    assert all(row["batch"] > 0 for row in rows)

    none = plan(*options, "--memory-budget", "1KB")
    assert none.exit_code == 1
    assert "not even one batch fits" in none.stderr
    assert plan(*options, "--memory-budget", "8").exit_code == 2
    assert plan(*options, "--memory-budget", "lots").exit_code == 2
    assert plan(*options, "--memory-budget", "1GiB", "--out", str(answer)).exit_code == 2
    made_up_profile().save(path)
    silent = plan(*options, "--memory-budget", "1GiB")
    assert silent.exit_code == 2
    assert "syncline profile --memory" in silent.stderr
