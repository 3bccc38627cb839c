"""Tests of `Handle.scalars` and `Handle.log_to`."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.tensorboard import SummaryWriter

import syncline
from ddp_helpers import SMALL_BUCKETS, batch, on_ranks, refusal, seeded
from syncline.cluster import Rank
from syncline.exchange import Dense, Hierarchical, OkTopk

DENSE = {"step_ms", "exchange_ms", "exposed_ms", "sent_bytes", "sent_bytes/world", "sent_share"}


def _wide() -> nn.Module:
    """Return two layers, of which only the larger is suitable for a sparse exchange."""
    return nn.Sequential(nn.Linear(16, 256), nn.Linear(256, 2))


def _attached(exchange: syncline.Exchange) -> tuple[DDP, syncline.Handle]:
    model = DDP(seeded(_wide), **SMALL_BUCKETS)
    return model, syncline.attach(model, exchange)


def _step(rank: Rank, model: nn.Module, number: int) -> None:
    model.zero_grad()
    model(batch(rank.rank, number)).square().mean().backward()


def _plain(scalars: dict[str, float]) -> dict[str, float]:
    assert all(name.startswith("syncline/") and type(value) is float for name, value in scalars.items())
    return {name.removeprefix("syncline/"): value for name, value in scalars.items()}


def test_scalars_give_times_bytes_and_the_residual_of_a_step() -> None:
    def main(rank: Rank) -> None:
        model, handle = _attached(Dense())
        assert handle.scalars() == handle.scalars(deep=True) == {}
        _step(rank, model, 0)
        assert set(_plain(handle.scalars())) == DENSE - {"step_ms"}, "the first step has no period"
        _step(rank, model, 1)
        dense = _plain(handle.scalars(deep=True))
        assert set(dense) == DENSE, "a dense exchange has no residual"
        buckets = handle.stats().buckets
        first, last = min(b.ready_s for b in buckets), max(b.ready_s for b in buckets)
        end = max(b.end_s for b in buckets)
        assert dense["exchange_ms"] == pytest.approx((end - first) * 1e3)
        assert dense["exposed_ms"] == pytest.approx((end - last) * 1e3)
        assert dense["sent_bytes"] == dense["sent_bytes/world"] == handle.stats().sent_bytes["world"]
        assert dense["sent_share"] == 1.0
        assert dense["step_ms"] > 0
        handle.detach()
        assert "detached" in refusal(handle.scalars)

        model, handle = _attached(Hierarchical(levels=(2, 1), shape="leader", chunks=1))
        _step(rank, model, 0)
        levels = {name for name in _plain(handle.scalars()) if name.startswith("sent_bytes/")}
        assert levels == {f"sent_bytes/{level}" for level in handle.stats().sent_bytes}

        model, handle = _attached(OkTopk(density=0.1))
        log = handle.log_to(_Recorder(), every=2, deep=True)
        for number in range(4):
            _step(rank, model, number)
        sparse = _plain(handle.scalars(deep=True))
        kept = handle.state_dict()["tensors"].values()
        norm = torch.cat([kinds["residual"].flatten() for kinds in kept if kinds]).norm()
        assert sparse["residual_norm"] == pytest.approx(float(norm), rel=1e-5)
        elements = [parameter.grad for parameter in model.parameters()]
        nonzero = sum(int(gradient.count_nonzero()) for gradient in elements)
        assert sparse["density"] == pytest.approx(nonzero / sum(gradient.numel() for gradient in elements))
        assert 0.08 < sparse["density"] < 0.3
        assert sparse["sent_share"] == pytest.approx(sparse["sent_bytes"] / dense["sent_bytes"])
        assert sparse["sent_share"] < 0.3
        assert {"density", "residual_norm"}.isdisjoint(_plain(handle.scalars())), "only with deep=True"
        log.close()
        _step(rank, model, 4)
        _step(rank, model, 5)
        assert "density" not in _plain(handle.scalars(deep=True)), "no log was going to write this step"

    on_ranks(2, main)


class _Recorder:
    """A writer that stores its arguments."""

    def __init__(self) -> None:
        self.written: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.written.append((name, value, step))

    @property
    def steps(self) -> list[int]:
        return sorted({step for _, _, step in self.written})


class _Full:
    """A writer whose disk is full from its third call on."""

    def __init__(self) -> None:
        self.calls = 0

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.calls += 1
        if self.calls > 2:
            raise OSError("no space left on device")


def test_tensorboard_reads_the_scalars_of_every_third_step(tmp_path: Path) -> None:
    def main(rank: Rank) -> dict[str, float] | None:
        model, handle = _attached(OkTopk(density=0.1))
        expected: dict[str, float] = {}
        writer = SummaryWriter(tmp_path) if rank.rank == 0 else None
        log = None if writer is None else handle.log_to(writer, every=3, deep=True)
        for number in range(9):
            _step(rank, model, number)
            if number == 5:
                expected = handle.scalars(deep=True)
        if writer is not None and log is not None:
            log.close()  # writes the ninth step, after which no other began
            for number in range(9, 13):
                _step(rank, model, number)
            writer.close()
            return expected
        for number in range(9, 13):
            _step(rank, model, number)
        return None

    expected = on_ranks(2, main)[0]
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    tags = events.Tags()["scalars"]
    assert set(tags) == {f"syncline/{name}" for name in (*DENSE, "density", "residual_norm")} == expected.keys()
    for tag in tags:
        read: Sequence[Any] = events.Scalars(tag)
        assert [event.step for event in read] == [3, 6, 9], tag
        assert read[1].value == pytest.approx(expected[tag], rel=1e-5), tag


def _assert_refuses(handle: syncline.Handle) -> None:
    for wrong in (None, "runs/", SummaryWriter, object()):
        assert "pass an object with add_scalar" in refusal(lambda wrong=wrong: handle.log_to(wrong))
    for every in (0, -1, 2.0, True):
        assert f"every is {every!r}" in refusal(lambda every=every: handle.log_to(_Recorder(), every))


def test_a_failing_log_does_not_stop_training_and_logs_end_with_their_handle() -> None:
    def main(rank: Rank) -> list[str]:
        model, handle = _attached(Dense())
        _assert_refuses(handle)
        full, kept = _Full(), _Recorder()
        handle.log_to(full, 1)
        log = handle.log_to(kept, every=2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for number in range(6):
                _step(rank, model, number)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a failing log must not raise then either
            handle.log_to(_Full(), 1)
            for number in range(6, 8):
                _step(rank, model, number)
        assert full.calls == 3
        assert kept.steps == [2, 4, 6]
        engine = weakref.ref(handle._engine)
        handle.detach()
        for number in range(8, 11):
            _step(rank, model, number)
        assert kept.steps == [2, 4, 6]
        gc.disable()
        del handle
        assert engine() is None, "a log must not keep the engine alive"
        gc.enable()
        log.close()  # does nothing after detach
        return [str(warning.message) for warning in caught if "scalars" in str(warning.message)]

    for (line,) in on_ranks(2, main):
        assert line.endswith("failed at step 1: no space left on device")


def test_a_log_continues_the_step_count_of_a_checkpoint() -> None:
    def main(rank: Rank) -> list[int]:
        model, handle = _attached(Dense())
        for number in range(3):
            _step(rank, model, number)
        state = handle.state_dict()
        model, handle = _attached(Dense())
        handle.load_state_dict(state)
        kept = _Recorder()
        handle.log_to(kept, every=2)
        for number in range(3, 8):
            _step(rank, model, number)
        return kept.steps

    assert on_ranks(2, main) == [[4, 6]] * 2
