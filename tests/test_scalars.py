"""Tests of `Handle.scalars`."""

from __future__ import annotations

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
        for number in range(4):
            _step(rank, model, number)
        sparse = _plain(handle.scalars(deep=True))
        kept = handle.state_dict()["tensors"].values()
        norm = torch.cat([kinds["residual"].flatten() for kinds in kept if kinds]).norm()
        assert sparse["residual_norm"] == pytest.approx(float(norm), rel=1e-5)
        assert sparse["sent_share"] == pytest.approx(sparse["sent_bytes"] / dense["sent_bytes"])
        assert sparse["sent_share"] < 0.3
        assert "residual_norm" not in _plain(handle.scalars()), "only with deep=True"

    on_ranks(2, main)


def test_tensorboard_reads_the_scalars_of_a_resumed_run_with_its_step_numbers(tmp_path: Path) -> None:
    def main(rank: Rank) -> dict[str, float]:
        model, handle = _attached(OkTopk(density=0.1))
        _step(rank, model, 0)
        state = handle.state_dict()
        model, handle = _attached(OkTopk(density=0.1))
        handle.load_state_dict(state)
        writer = SummaryWriter(tmp_path / str(rank.rank))
        expected: dict[str, float] = {}
        for number in range(1, 9):
            _step(rank, model, number)
            if handle.stats().steps in (6, 9):
                expected = handle.scalars(deep=True)
                for name, value in expected.items():
                    writer.add_scalar(name, value, handle.stats().steps)
        writer.close()
        return expected

    expected = on_ranks(2, main)[0]
    events = EventAccumulator(str(tmp_path / "0"))
    events.Reload()
    tags = events.Tags()["scalars"]
    assert set(tags) == {f"syncline/{name}" for name in (*DENSE, "residual_norm")} == expected.keys()
    for tag in tags:
        read: Sequence[Any] = events.Scalars(tag)
        assert [event.step for event in read] == [6, 9], tag
        assert read[-1].value == pytest.approx(expected[tag], rel=1e-5), tag
