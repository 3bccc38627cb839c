"""Watching a running job sees its steps, changes nothing, and explains why if it saw no step."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import syncline
from ddp_helpers import Mlp, batch, gradients, on_ranks, seeded
from syncline.cluster import Rank
from syncline.errors import UsageError
from syncline.measure.backward_watch import BackwardWatch, watch_backward
from syncline.records.profile import Profile

NAMES = {f"{layer}.{kind}" for layer in ("first", "middle", "last") for kind in ("weight", "bias")}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def loss(model: nn.Module, number: int = 0, rank: int = 0) -> Tensor:
    value: Tensor = model(batch(rank, number)).square().mean()
    return value


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, rank: int = 0) -> None:
    for number in range(steps):
        optimizer.zero_grad()
        loss(model, number, rank).backward()
        optimizer.step()


def hooks_left(model: nn.Module) -> list[Any]:
    inner = model.module if isinstance(model, DDP) else model
    on_parameters = [p for p in model.parameters() if p._post_accumulate_grad_hooks]
    return [*inner._forward_pre_hooks, *inner._forward_hooks, *on_parameters]


def test_a_watched_job_gives_a_profile_of_its_last_steps() -> None:
    model = Mlp()
    optimizer = sgd(model)
    with watch_backward(model, optimizer, steps=4, skip=2, model_name="mlp", batch=8) as watch:
        train(model, optimizer, 9)
        assert watch.steps == 4
    profile = watch.profile()
    assert {g.name for g in profile.gradients} == NAMES
    assert {g.name for g in profile.gradients[:2]} == {"last.weight", "last.bias"}
    assert (profile.model, profile.steps, profile.batch) == ("mlp", 4, 8)
    assert profile.forward_s > 0 and profile.gradients[0].ready_s > 0 and profile.update_s > 0
    assert "4 steps of a running job" in profile.how


def test_without_an_optimizer_every_backward_is_a_step() -> None:
    model = Mlp()
    with watch_backward(model, skip=0) as watch:
        for number in range(3):
            loss(model, number).backward()
    assert watch.steps == 3 and watch.profile().update_s == 0.0


def test_leaving_the_context_leaves_no_hooks_and_ends_the_watch() -> None:
    model = Mlp()
    optimizer = sgd(model)
    with pytest.raises(KeyError), watch_backward(model, optimizer, skip=0) as watch:
        train(model, optimizer, 1)
        raise KeyError
    assert not hooks_left(model)
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    train(model, optimizer, 2)
    assert watch.steps == 1


def test_a_graph_that_outlives_the_watch_is_left_alone() -> None:
    model = Mlp()
    with watch_backward(model, skip=0) as watch:
        value = loss(model)
    value.backward()
    assert watch.steps == 0


def test_accumulated_passes_are_one_step_and_count_as_its_forward() -> None:
    model = Mlp()
    optimizer = sgd(model)
    with watch_backward(model, optimizer, skip=0) as watch:
        watch.clock = Ticks()
        for _ in range(2):
            optimizer.zero_grad()
            for number in range(3):
                loss(model, number).backward()
            optimizer.step()
    assert watch.steps == 2
    profile = watch.profile()
    # The clock ticks at each mark. A forward takes 1, and a pass 8: start, backward, six gradients, end.
    assert (profile.forward_s, profile.backward_s, profile.update_s) == (2 * 8 + 1, 7, 1)


class Ticks:
    """A clock that advances by one second at each mark."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def mark(self) -> float:
        self.now_s += 1.0
        return self.now_s

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def settle(self) -> None:
        pass


def skipped_by_zeroing(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss(model).backward()
    optimizer.zero_grad()


def skipped_by_zeroing_in_place(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss(model).backward()
    optimizer.zero_grad(set_to_none=False)


def skipped_by_the_scaler(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss(model) * torch.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def failed(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise RuntimeError("out of memory")

    inside = model.first.register_forward_hook(lambda _module, _inputs, output: Fails.apply(output))
    with contextlib.suppress(RuntimeError):
        loss(model).backward()
    inside.remove()
    optimizer.zero_grad()


def evaluated(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        loss(model)
    loss(model)


@pytest.mark.parametrize(
    "wasted", [skipped_by_zeroing, skipped_by_zeroing_in_place, skipped_by_the_scaler, failed, evaluated]
)
def test_passes_that_no_update_uses_are_left_out(
    wasted: Callable[[nn.Module, torch.optim.Optimizer], None],
) -> None:
    model = Mlp()
    optimizer = sgd(model)
    with watch_backward(model, optimizer, skip=0) as watch:
        watch.clock = Ticks()
        train(model, optimizer, 1)
        wasted(model, optimizer)
        train(model, optimizer, 2)
    assert watch.steps == 3
    assert (watch.profile().forward_s, watch.profile().backward_s) == (1, 7)


def test_one_backward_through_two_forwards_began_with_the_first() -> None:
    model = Mlp()
    with watch_backward(model, skip=0) as watch:
        watch.clock = Ticks()
        (loss(model, 0) + loss(model, 1)).backward()
    assert watch.profile().forward_s == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_are_watched_too(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Mlp()
            self.head = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(checkpoint(self.inner, x.requires_grad_(), use_reentrant=reentrant))
            return out

    model = Checkpointed()
    with watch_backward(model, skip=0) as watch:
        for number in range(2):
            loss(model, number).backward()
    profile = watch.profile()
    assert {g.name for g in profile.gradients} == {*(f"inner.{n}" for n in NAMES), "head.weight", "head.bias"}
    assert all(g.ready_s > 0 for g in profile.gradients)


@pytest.mark.parametrize("wrapped", [lambda x: {"loss": (x, 3)}, lambda x: [x], lambda x: (None, {"a": x})])
def test_outputs_may_be_nested(wrapped: Callable[[Tensor], Any]) -> None:
    class Nested(Mlp):
        def forward(self, x: Tensor) -> Any:
            self.out = super().forward(x).sum()
            return wrapped(self.out)

    model = Nested()
    with watch_backward(model, skip=0) as watch:
        model(batch(0, 0))
        model.out.backward()
    assert watch.steps == 1


def nothing(model: nn.Module) -> None:
    pass


def too_short(model: nn.Module) -> None:
    loss(model).backward()


def forward_only(model: nn.Module) -> None:
    loss(model)


@pytest.mark.parametrize(
    ("act", "skip", "message"),
    [
        (nothing, 0, "forward was not called"),
        (too_short, 2, "only 1 steps were seen, and the first 2 are left out"),
        (forward_only, 0, "no backward from the model's output was seen"),
    ],
)
def test_a_watch_without_steps_says_what_to_do(act: Callable[[nn.Module], None], skip: int, message: str) -> None:
    model = Mlp()
    with watch_backward(model, skip=skip) as watch:
        act(model)
    with pytest.raises(UsageError, match=message):
        watch.profile()


def test_an_optimizer_that_never_steps_is_named() -> None:
    model = Mlp()
    with watch_backward(model, sgd(model), skip=0) as watch:
        loss(model).backward()
        with pytest.raises(UsageError, match="the optimizer made no step"):
            watch.profile()


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(UsageError, match="steps must be at least 1"):
        watch_backward(Mlp(), steps=0)
    with watch_backward(Mlp()) as watch, pytest.raises(UsageError, match="watched already"):
        watch.__enter__()
    model = Mlp()
    model.compile(backend="eager")
    with pytest.raises(UsageError, match=r"model\.compile\(\)"), watch_backward(model):
        pass


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_is_watched_under_its_own_names(backend: str) -> None:
    model: Any = torch.compile(Mlp(), backend=backend)
    optimizer = sgd(model)
    with watch_backward(model, optimizer, skip=1) as watch:
        train(model, optimizer, 3)
    assert {g.name for g in watch.profile().gradients} == NAMES
    assert all(g.ready_s > 0 for g in watch.profile().gradients)


def test_a_copy_made_meanwhile_is_not_watched_when_it_only_evaluates() -> None:
    model = Mlp()
    with watch_backward(model, skip=0) as watch:
        loss(model).backward()
        average = copy.deepcopy(model)
        with torch.no_grad():
            loss(average)
    assert watch.steps == 1


class Plain(contextlib.AbstractContextManager[None]):
    """A context that watches nothing."""

    def __exit__(self, *_: object) -> None:
        pass


def trained_on(rank: Rank, kind: str, watched: bool) -> tuple[dict[str, Tensor | None], BackwardWatch | None]:
    """Train DDP for a few steps, with buffers, accumulation under `no_sync` and a rebuild of the buckets."""
    net = seeded(lambda: nn.Sequential(Mlp(), nn.BatchNorm1d(4)))
    # torch.compile splits a model by DDP's buckets, and needs the first one, of 1 MB, to be the smallest.
    bucket_cap_mb = 25 if kind == "compiled" else 0.001
    ddp = DDP(net, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=kind == "views")
    if kind == "attached":
        syncline.attach(ddp, syncline.Dense())
    model: Any = torch.compile(ddp, backend="aot_eager") if kind == "compiled" else ddp
    optimizer = sgd(ddp)
    watch = watch_backward(model, optimizer, skip=1) if watched else None
    with watch or Plain():
        for number in range(5):
            optimizer.zero_grad()
            with ddp.no_sync():
                loss(model, 2 * number, rank.rank).backward()
            loss(model, 2 * number + 1, rank.rank).backward()
            optimizer.step()
    assert not hooks_left(ddp)
    return {**ddp.state_dict(), **{f"grad {name}": value for name, value in gradients(ddp).items()}}, watch


@pytest.mark.parametrize("kind", ["plain", "views", "attached", "compiled"])
def test_ddp_trains_bit_for_bit_the_same_while_it_is_watched(kind: str) -> None:
    def main(rank: Rank) -> Any:
        expected, _ = trained_on(rank, kind, watched=False)
        found, watch = trained_on(rank, kind, watched=True)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert value is not None and torch.equal(found[name], value), name
        assert watch is not None and watch.steps == 4
        profile = watch.profile(torch.distributed.group.WORLD)
        return msgspec.to_builtins(profile)

    first, second = [msgspec.convert(tree, Profile) for tree in on_ranks(2, main)]
    assert first == second
    assert {g.name for g in first.gradients} == {*(f"0.{name}" for name in NAMES), "1.weight", "1.bias"}
    assert [one.rank for one in first.ranks] == [0, 1]
    assert [entry.dtype for entry in first.buffers] == ["float32", "int64"]
