"""Backward is measured on all ranks at once, without communication, compiled or not, and leaves no hooks."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_helpers import on_ranks, refusal
from syncline.cluster import Rank
from syncline.errors import MismatchError, SynclineError, UsageError
from syncline.measure.backward import measure_backward
from syncline.measure.steps import Measured, Subject, merge
from syncline.models.replay import ReplayModel
from syncline.records.profile import Buffers, Profile

PROFILE = msgspec.convert(
    {
        "model": "made up",
        "gradients": [
            {"name": "b", "shape": [2], "dtype": "float32", "bytes": 8, "ready_s": 0.001},
            {"name": "a", "shape": [3], "dtype": "float32", "bytes": 12, "ready_s": 0.002},
        ],
        "forward_s": 0.001,
        "backward_s": 0.004,
        "update_s": 0.0,
        "device": "cpu",
        "where": "nowhere",
        "how": "by hand",
        "steps": 3,
        "batch": None,
    },
    Profile,
)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def step(model: nn.Module) -> Tensor:
    loss: Tensor = model(torch.ones(3, 4)).square().sum()
    return loss


NAMES = {"0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"}


def names(profile: Profile) -> set[str]:
    return {gradient.name for gradient in profile.gradients}


def paced(step_s: list[float], **changes: float) -> Measured:
    return Measured(msgspec.structs.replace(PROFILE, **changes), step_s)


def test_ranks_are_merged_by_medians_and_jitter_is_the_wait_for_the_slowest_of_each_step() -> None:
    merged = merge(
        [
            paced([0.005, 0.006, 0.005], forward_s=0.001),
            paced([0.007, 0.005, 0.005], forward_s=0.003, backward_s=0.005),
            paced([0.005, 0.005, 0.009], forward_s=0.002, backward_s=0.006),
        ]
    )
    assert (merged.forward_s, merged.backward_s) == (0.002, 0.005)
    assert [(rank.rank, rank.forward_s) for rank in merged.ranks] == [(0, 0.001), (1, 0.003), (2, 0.002)]
    assert merged.jitter_s == pytest.approx(0.002)
    assert merged.slowest is not None and merged.slowest.rank == 1


def test_a_gradient_is_ready_at_its_median_over_ranks_and_the_order_follows() -> None:
    late = tuple(
        msgspec.structs.replace(g, ready_s=r) for g, r in zip(PROFILE.gradients[::-1], (0.0, 0.003), strict=True)
    )
    slow = Measured(msgspec.structs.replace(PROFILE, gradients=late), [0.005])
    merged = merge([paced([0.005]), slow, slow])
    assert [(g.name, g.ready_s) for g in merged.gradients] == [("a", 0.0), ("b", 0.003)]


def test_ranks_with_different_models_are_refused_by_the_parameter_that_differs() -> None:
    other = msgspec.structs.replace(PROFILE, gradients=PROFILE.gradients[:1])
    with pytest.raises(MismatchError, match=r"different models: a is \[3\] float32 on rank 0 and missing on rank 1"):
        merge([paced([0.005]), Measured(other, [0.005])])


def test_one_rank_has_a_spread_and_no_others() -> None:
    measured = measure_backward(net(), step, steps=3, warmup=1)
    assert measured.ranks == () and measured.jitter_s == 0.0
    assert measured.spread is not None and 0 < measured.spread.low_s <= measured.spread.high_s


def test_buffers_are_summed_by_type() -> None:
    measured = measure_backward(net(), step, steps=1, warmup=0)
    assert measured.buffers == (Buffers(dtype="float32", bytes=64), Buffers(dtype="int64", bytes=8))


def test_progress_counts_every_step() -> None:
    seen: list[tuple[int, int]] = []
    measure_backward(net(), step, steps=2, warmup=1, on_progress=lambda done, of: seen.append((done, of)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def compiled(model: nn.Module, backend: str) -> Any:
    return torch.compile(model, backend=backend)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_has_the_names_of_the_original(backend: str) -> None:
    measured = measure_backward(compiled(net(), backend), step, steps=2, warmup=1)
    assert names(measured) == NAMES
    assert measured.model == "Sequential"
    assert measured.gradients[-1].ready_s > 0


def test_a_model_with_a_compiled_part_has_the_names_of_the_original() -> None:
    model = net()
    model[3] = compiled(model[3], "aot_eager")
    assert names(measure_backward(model, step, steps=1, warmup=1)) == NAMES


def test_a_gradient_that_comes_without_its_hook_is_an_error_and_not_a_zero() -> None:
    class Hidden(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.bias.grad = torch.ones_like(self.bias)  # like compiled code that writes gradients itself
            return nn.functional.linear(x, self.weight)

    with pytest.raises(UsageError, match="bias got a gradient, but its hook did not fire"):
        measure_backward(Hidden(4, 2), step, steps=1, warmup=0)


def test_parameters_and_buffers_that_ddp_ignores_are_not_part_of_a_profile() -> None:
    model = net()
    model._ddp_params_and_buffers_to_ignore = ["3.bias", "1.num_batches_tracked"]
    subject = Subject.of(model)
    assert set(subject.parameters) == NAMES - {"3.bias"}
    assert [entry.dtype for entry in subject.buffers] == ["float32"]


def test_all_ranks_get_the_same_profile_with_everyones_pace() -> None:
    def main(rank: Rank) -> Any:
        model = ReplayModel(PROFILE.scaled(time=20.0 if rank.rank == 2 else 1.0))
        return msgspec.to_builtins(measure_backward(model, lambda m: m(), steps=3, warmup=1))

    first, *others = [msgspec.convert(tree, Profile) for tree in on_ranks(3, main)]
    assert others == [first, first]
    assert [one.rank for one in first.ranks] == [0, 1, 2]
    assert first.slowest is not None and first.slowest.rank == 2
    assert first.ranks[2].backward_s >= 0.08
    assert first.jitter_s > 0
    assert "3 ranks at the same time" in first.how


def test_a_rank_that_fails_ends_the_measurement_on_all_of_them() -> None:
    def main(rank: Rank) -> Any:
        calls = 0

        def fails(model: nn.Module) -> Tensor:
            nonlocal calls
            calls += 1
            if rank.rank == 1 and calls == 3:
                raise UsageError("no more data")
            return step(model)

        return refusal(lambda: measure_backward(net(), fails, steps=4, warmup=1), SynclineError)

    mine, theirs = on_ranks(2, main)[::-1]
    assert mine == "no more data"
    assert theirs == "the measurement failed on rank 1: UsageError: no more data"


def test_measuring_ddp_communicates_nothing_in_its_steps_and_leaves_the_replicas_equal() -> None:
    def main(rank: Rank) -> Any:
        torch.manual_seed(0)
        ddp = DDP(net())
        before = {name: value.clone() for name, value in ddp.state_dict().items()}
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        reduced = 0

        def hook(state: Any, bucket: Any) -> Any:
            nonlocal reduced
            reduced += 1
            return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])

        hook.__annotations__.clear()
        ddp.register_comm_hook(None, hook)
        found = []
        for model in (ddp, compiled(ddp, "aot_eager")):
            measured = measure_backward(model, step, steps=2, warmup=1, optimizer=optimizer)
            found.append(sorted(names(measured)))
            assert measured.update_s > 0 and len(measured.ranks) == 2
        assert all(torch.equal(value, before[name]) for name, value in ddp.state_dict().items())
        assert not optimizer.state_dict()["state"]
        assert reduced == 0
        step(ddp).backward()
        assert reduced == 1
        return found

    assert on_ranks(2, main) == [[sorted(NAMES)] * 2] * 2
