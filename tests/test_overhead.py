"""The overhead of DDP and of exchanges is measured on one rank or several, and no process group remains."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist

from ddp_helpers import on_ranks, refusal
from syncline.cluster import Rank
from syncline.errors import UsageError
from syncline.exchange import EXCHANGES, Comm, Dense, Layout, Level, Topology, Tree
from syncline.measure import overhead
from syncline.measure.overhead import SilentComm, measure_overheads
from syncline.records.profile import Overheads, Work


def test_every_exchange_is_measured_and_the_process_group_is_gone_afterwards() -> None:
    found = measure_overheads()
    assert set(found.work) == set(EXCHANGES)
    assert found.work["bf16"].s_per_byte > found.work["dense"].s_per_byte
    assert not dist.is_initialized()
    # A profile accepts the values, so all are finite and not negative.
    assert all(value >= 0 for value in (found.copy_in_s_per_byte, found.copy_out_s_per_byte, found.hook_s))


def test_only_the_exchanges_asked_for_are_measured() -> None:
    assert set(measure_overheads(exchanges={"mine": Dense}, topology=2).work) == {"mine"}


def test_ranks_that_measure_together_get_the_same_numbers() -> None:
    def main(rank: Rank) -> Any:
        alone = measure_overheads(exchanges={})
        both = measure_overheads(exchanges={"bf16": EXCHANGES["bf16"]}, group=dist.group.WORLD)
        total = torch.ones(1)
        dist.all_reduce(total)  # the default group still works
        assert total.item() == 2.0
        return [msgspec.to_builtins(alone), msgspec.to_builtins(both)]

    (alone, first), (_, second) = on_ranks(2, main)
    assert first == second
    assert set(first["work"]) == {"bf16"}
    assert alone["work"] == {}


def test_medians_are_taken_number_by_number() -> None:
    def one(copy_in: float, hook: float, fixed: float) -> Overheads:
        work = {"dense": Work(fixed_s=fixed, s_per_byte=0.0)}
        return Overheads(copy_in_s_per_byte=copy_in, copy_out_s_per_byte=0.0, hook_s=hook, work=work)

    found = overhead._medians([one(1.0, 30.0, 2.0), one(2.0, 10.0, 3.0), one(3.0, 20.0, 1.0)])
    assert (found.copy_in_s_per_byte, found.hook_s, found.work["dense"].fixed_s) == (2.0, 20.0, 2.0)


def test_a_silent_comm_acts_as_the_first_rank() -> None:
    tree = Tree.given([[[0], [1, 2, 3]], [[4, 5], [6, 7]]], 8)
    comm = SilentComm(Topology(Level("world", (tuple(range(8)),)), tree.levels))
    assert comm.level("level1") is None
    sizes = [level.size for name in ("level2", "level3") if (level := comm.level(name)) is not None]
    assert (comm.size, sizes) == (8, [2, 2])


@pytest.mark.parametrize("name", EXCHANGES)
def test_an_exchange_computes_finite_values_over_a_silent_comm(name: str) -> None:
    comm: Comm = SilentComm(Topology.flat(4), rank=1, echo=True)
    exchange = EXCHANGES[name]()
    flat = torch.ones(10)
    exchange.run(flat, exchange.prepare(Layout.flat(10), comm), comm)
    assert torch.isfinite(flat).all()
    comm.reduce(flat, 0).wait()
    comm.broadcast(flat, 0).wait()


@pytest.mark.parametrize(
    ("seconds", "fixed_s", "s_per_byte"),
    [
        ([3.0, 5.0, 9.0], 1.0, 2.0),
        ([2.0, 4.0, 8.0], 0.0, 2.0),
        ([5.0, 3.0, 1.0], 3.0, 0.0),
        ([0.0, 0.0, 0.0], 0.0, 0.0),
    ],
)
def test_a_line_is_found_and_never_falls_below_zero(seconds: list[float], fixed_s: float, s_per_byte: float) -> None:
    line = overhead.fit_work((1, 2, 4), seconds)
    assert (line.fixed_s, line.s_per_byte) == pytest.approx((fixed_s, s_per_byte), abs=1e-6)


def test_a_line_that_would_start_below_zero_starts_at_zero() -> None:
    line = overhead.fit_work((1, 2, 4), [0.5, 2.0, 7.0])
    assert line.fixed_s == 0.0
    assert np.isfinite(line.s_per_byte) and line.s_per_byte > 0


def test_what_cannot_be_measured_is_refused_in_one_line() -> None:
    assert "not meta" in refusal(lambda: measure_overheads("meta"))
    assert "at least 1 rank" in refusal(lambda: measure_overheads(topology=0), UsageError)
