"""Residuals follow their parameters, survive checkpoints, and are unusable after a failure."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import syncline
from ddp_helpers import SMALL_BUCKETS, TIMEOUT_S, Mlp, gradients, on_ranks, refusal, seeded, square_loss_step, train
from exchanges import ErrorFeedback, Residual
from syncline.cluster import ClusterSpec, Rank, launch_outcomes
from syncline.exchange import Comm, Layout, State

SHAPES = {"a": (17, 16), "b": (40,), "c": (4, 3, 5, 5), "d": (300,), "e": ()}
USED = ("d", "a", "e", "c", "b")
"""Not the order of definition, so that DDP rebuilds its buckets."""


class Dots(nn.Module):
    """A model whose gradients are its inputs: integers, so that sums are exact."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            data = torch.zeros(shape)
            if len(shape) == 4:
                data = data.to(memory_format=torch.channels_last)
            self.register_parameter(name, nn.Parameter(data))

    def forward(self, factors: Mapping[str, Tensor]) -> Tensor:
        total = torch.zeros(())
        for name in USED:
            total = (
                total.sin() + (getattr(self, name) * factors[name]).sum()
            )  # a chain, so that gradients become ready one by one
        return total


def integers(rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {name: torch.randint(-4000, 4000, shape, generator=generator).float() for name, shape in SHAPES.items()}


def residuals(handle: syncline.Handle) -> dict[str, Tensor]:
    return {name: kinds["residual"] for name, kinds in handle.state_dict()["tensors"].items()}


def bucket_bytes(handle: syncline.Handle) -> list[int]:
    return [bucket.bytes for bucket in handle.stats().buckets]


class Ledger:
    """Sums of the gradients that came in and were applied, by parameter, over all ranks."""

    def __init__(self, model: DDP, handle: syncline.Handle) -> None:
        self.model, self.handle = model, handle
        self.came_in = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
        self.applied = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}

    def step(self, number: int) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.model.zero_grad()
        self.model(integers(rank, number)).backward()
        for name, parameter in self.model.module.named_parameters():
            self.applied[name] += parameter.grad.double() * ranks
            self.came_in[name] += sum(integers(other, number)[name].double() for other in range(ranks))

    def check(self) -> None:
        """Check conservation: applied gradients plus residuals equal the gradients that came in, exactly."""
        for name, residual in residuals(self.handle).items():
            kept = residual.double() * dist.get_world_size()
            assert residual.shape == SHAPES[name]
            assert bool(kept.any()) or name == "e", f"{name}: the residual is zero, so nothing is tested"
            dist.all_reduce(kept)
            assert torch.equal(self.applied[name] + kept, self.came_in[name]), name


@pytest.mark.parametrize("static_graph", [True, False])
@pytest.mark.parametrize("lanes", [1, 2])
def test_residuals_follow_their_parameters_when_ddp_rebuilds_its_buckets(lanes: int, static_graph: bool) -> None:
    def main(rank: Rank) -> None:
        model = DDP(Dots(), static_graph=static_graph, **SMALL_BUCKETS)
        handle = syncline.attach(model, ErrorFeedback(), lanes=lanes)
        ledger = Ledger(model, handle)
        layouts = []
        for number in range(5):
            ledger.step(number)
            layouts.append(bucket_bytes(handle))
            assert residuals(handle).keys() == SHAPES.keys()
            ledger.check()
        assert layouts[0] != layouts[-1]
        assert len(layouts[-1]) > 2

    on_ranks(2, main)


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_non_finite_step_leaves_every_residual_as_it_was(lanes: int) -> None:
    """For an infinity in any bucket, on one rank only."""

    def main(rank: Rank) -> None:
        model = DDP(Dots(), **SMALL_BUCKETS)
        handle = syncline.attach(model, ErrorFeedback(), lanes=lanes)
        ledger = Ledger(model, handle)
        for number, name in enumerate(SHAPES):
            ledger.step(number)
            before = residuals(handle)
            factors = integers(rank.rank, number)
            if rank.rank == 1:
                factors[name].view(-1)[0] = torch.inf
            model.zero_grad()
            model(factors).backward()
            assert not bool(torch.isfinite(gradients(model.module)[name]).all())
            for other, residual in residuals(handle).items():
                assert torch.equal(residual, before[other]), (name, other)
        ledger.step(len(SHAPES))
        ledger.check()

    on_ranks(2, main)


def test_a_run_resumed_from_its_state_equals_the_uninterrupted_one() -> None:
    def main(rank: Rank) -> None:
        def start() -> tuple[DDP, torch.optim.Optimizer, syncline.Handle]:
            model = DDP(seeded(Mlp), **SMALL_BUCKETS)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
            return model, optimizer, syncline.attach(model, ErrorFeedback(), lanes=2)

        def steps(model: DDP, optimizer: torch.optim.Optimizer, numbers: range) -> None:
            for number in numbers:
                optimizer.zero_grad()
                square_loss_step(rank)(model, optimizer, number)

        def saved(*parts: Any) -> bytes:
            file = io.BytesIO()
            torch.save([part.state_dict() for part in parts], file)
            return file.getvalue()

        def loaded(file: bytes) -> list[Any]:
            return torch.load(io.BytesIO(file), weights_only=True)

        run = start()
        checkpoints = {0: saved(*run)}
        steps(*run[:2], range(3))
        checkpoints[3] = saved(*run)
        steps(*run[:2], range(3, 7))
        whole, whole_residuals = run[0].state_dict(), residuals(run[2])
        assert any(bool(residual.any()) for residual in whole_residuals.values())

        for resumed in (start(), run):  # in a model that has made no step, or back in the one that went on
            for number, checkpoint in checkpoints.items():
                model, optimizer, handle = resumed
                for part, state in zip(resumed, loaded(checkpoints[3]), strict=True):
                    part.load_state_dict(state)
                for part, state in zip(resumed, loaded(checkpoint), strict=True):
                    part.load_state_dict(state)  # replaces everything that was loaded before
                assert residuals(handle).keys() >= state["tensors"].keys()
                assert handle.stats().steps == number
                for name, residual in residuals(handle).items():
                    nothing = {"residual": torch.zeros_like(residual)}
                    assert torch.equal(residual, state["tensors"].get(name, nothing)["residual"]), (number, name)
                steps(model, optimizer, range(number, 7))
                assert handle.stats().steps == 7
                for name, tensor in model.state_dict().items():
                    assert torch.equal(tensor, whole[name]), (number, name)
                for name, residual in residuals(handle).items():
                    assert torch.equal(residual, whole_residuals[name]), (number, name)

    on_ranks(2, main)


def test_loading_a_state_needs_no_other_rank() -> None:
    def main(rank: Rank) -> None:
        model = DDP(seeded(Mlp), **SMALL_BUCKETS)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        handle = syncline.attach(model, ErrorFeedback())
        for number in range(4):
            if number == 3 and rank.rank == 0:
                handle.load_state_dict(handle.state_dict())
            square_loss_step(rank)(model, optimizer, number)

    on_ranks(2, main)


def test_a_state_that_does_not_fit_is_refused_in_one_line() -> None:
    def main(rank: Rank) -> None:
        model = DDP(Dots(), **SMALL_BUCKETS)
        handle = syncline.attach(model, ErrorFeedback())
        model(integers(rank.rank, 0)).backward()
        good = handle.state_dict()
        tensors: dict[str, Any] = good["tensors"]
        misfits = {
            "the state was saved by 3 ranks, but there are 2 now: load it on 3 ranks": {**good, "world_size": 3},
            f"the state was saved by rank {1 - rank.rank}, but this is rank {rank.rank}": {
                **good,
                "rank": 1 - rank.rank,
            },
            'the checkpoint was saved with type="Dense", but this model uses "ErrorFeedback": use the same': {
                **good,
                "exchange": {"type": "Dense", "wire": "bf16"},
            },
            "the checkpoint has schema 99": {**good, "schema": 99},
            "the residual of 'd' has shape (7,) in the checkpoint, but the parameter has shape (300,)": {
                **good,
                "tensors": {**tensors, "d": {"residual": torch.zeros(7)}},
            },
            "the checkpoint contains 'z', which is not a parameter": {**good, "tensors": {**tensors, "z": {}}},
            "the checkpoint contains 'y', which is not a parameter": {**good, "buckets": [["a", "y"]]},
            "expected object, got null: pass what state_dict() returned": None,
            "expected object, got array: pass": [good],
            "steps: expected int, got str": {**good, "steps": "three"},
            "steps: expected int >= 0": {**good, "steps": -1},
            "buckets: expected array, got int": {**good, "buckets": 3},
            "buckets[0][1]: expected str, got null": {**good, "buckets": [["a", None]]},
            "exchange: expected object, got str": {**good, "exchange": "OkTopk"},
            "tensors: expected object, got array: pass": {**good, "tensors": [1]},
            "'Tensor' object has no attribute 'keys': pass": {**good, "tensors": {"a": tensors["a"]["residual"]}},
            "tensors[...][...]: expected Tensor, got int": {**good, "tensors": {"a": {"residual": 3}}},
            "is unsupported": {**good, "exchange": {"type": object()}},
            **{f"missing required field {field}": {k: v for k, v in good.items() if k != field} for field in good},
        }
        for expected, misfit in misfits.items():
            line = refusal(lambda misfit=misfit: handle.load_state_dict(misfit))
            assert expected in line
        for name, residual in residuals(handle).items():  # nothing was loaded
            assert torch.equal(residual, tensors[name]["residual"])

    on_ranks(2, main)


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("end", ["dies", "raises", "stalls"])
def test_when_a_rank_ends_within_a_step_every_survivor_raises_in_time(end: str, lanes: int) -> None:
    lost, timeout_s = 1, 3.0

    def main(rank: Rank) -> dict[str, Any]:
        rank.init_process_group(TIMEOUT_S)
        store = dist.distributed_c10d._get_default_store()
        model = DDP(seeded(Mlp), **SMALL_BUCKETS)
        handle = syncline.attach(model, ErrorFeedback(), lanes=lanes, timeout_s=timeout_s)
        train(model, square_loss_step(rank), 2)

        def come_to_an_end(gradient: Tensor) -> None:
            if end == "dies":
                os._exit(17)
            if end == "raises":
                raise RuntimeError("the user's own mistake")
            store.wait(["0 has ended", "2 has ended"], timedelta(seconds=TIMEOUT_S))

        if rank.rank == lost:  # in the backward pass, while other buckets are being exchanged
            model.module.first.weight.register_hook(come_to_an_end)
        began_s = time.monotonic()
        try:
            train(model, square_loss_step(rank), 1)
        except RuntimeError as error:
            if rank.rank == lost:
                raise
            seen = {"text": str(error), "after_s": time.monotonic() - began_s}
        store.set(f"{rank.rank} has ended", "")
        seen["error"] = type(handle.error).__name__
        seen["refusal"] = refusal(handle.state_dict, syncline.ExchangeError)
        seen["steps"] = handle.stats().steps
        handle.detach()
        seen["detached_after_s"] = time.monotonic() - began_s
        if end == "stalls":
            store.wait(["0 has ended", "2 has ended"], timedelta(seconds=TIMEOUT_S))
            if rank.rank == 2:
                store.set("2 is through", "")
            else:  # this process hosts the store, so it must end last
                store.wait(["2 is through"], timedelta(seconds=TIMEOUT_S))
        return seen

    outcomes = launch_outcomes(ClusterSpec(hosts=3), main, deadline_s=60.0, grace_s=30.0, shaped=False)
    assert outcomes[lost].error is not None
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error is None, outcome
        assert "ExchangeError: exchanging bucket" in outcome.value["text"]
        assert outcome.value["error"] == "ExchangeError"
        assert outcome.value["refusal"].startswith(
            "the state is unusable, because an exchange failed: exchanging bucket"
        )
        assert outcome.value["steps"] == 2
        assert outcome.value["after_s"] < timeout_s + 5
        assert outcome.value["detached_after_s"] < 2 * timeout_s + 5


@dataclass(frozen=True)
class Unsettled(ErrorFeedback):
    """An exchange that fails when a step is settled."""

    def prepare(self, layout: Layout, comm: Comm) -> State:
        class Broken(Residual):
            def settle(self, applied: Tensor) -> None:
                raise ArithmeticError("out of something")

        return Broken(layout)


def test_a_step_that_cannot_be_settled_has_failed() -> None:
    def main(rank: Rank) -> None:
        model = DDP(seeded(Mlp), **SMALL_BUCKETS)
        handle = syncline.attach(model, Unsettled(), lanes=2)
        with pytest.raises(RuntimeError, match="out of something"):
            train(model, square_loss_step(rank), 1)
        assert isinstance(handle.error, syncline.ExchangeError)
        assert "unusable" in refusal(handle.state_dict, syncline.ExchangeError)

    on_ranks(2, main)
