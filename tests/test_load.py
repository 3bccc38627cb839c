"""What computation and exchanges take from each other is measured on all ranks at once, and predictions use it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_helpers import on_ranks, open_groups
from syncline.cluster import Rank
from syncline.exchange import EXCHANGES, WORLD, Hierarchical, Level, Topology, Tree
from syncline.measure.backward import measure_backward
from syncline.measure.load import measure_contention
from syncline.predict.timeline import Bucket, Capacity, Collective, Work, simulate
from syncline.records.profile import Contention, Profile, UnderLoad
from syncline.records.profile import Work as Line


def test_ranks_measure_contention_together_and_leave_no_group_behind() -> None:
    def main(rank: Rank) -> Any:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 250), nn.ReLU(), nn.Linear(250, 70))
        optimizer, inputs = torch.optim.SGD(net.parameters(), lr=1e-3), torch.randn(16, 64)

        def step(model: nn.Module) -> Tensor:
            return model(inputs).square().mean()

        profile = measure_backward(net, step, steps=1, warmup=0, optimizer=optimizer)
        groups = open_groups()
        exchanges = {name: EXCHANGES[name] for name in ("bf16", "int4", "oktopk", "topk-chunks")}
        found = measure_contention(net, step, optimizer, exchanges, Topology.flat(2), rounds=2)
        assert open_groups() == groups
        total = torch.ones(1)
        dist.all_reduce(total)  # the default group still works
        assert total.item() == 2.0
        assert not any(parameter._post_accumulate_grad_hooks for parameter in net.parameters())
        return msgspec.to_builtins(msgspec.structs.replace(profile, contention=found))

    first, second = on_ranks(2, main)
    assert first["contention"] == second["contention"]
    profile = msgspec.convert(first, Profile)  # so all values are in range
    assert profile.contention is not None
    assert set(profile.contention.exchanges) == {"dense", "bf16", "int4", "oktopk", "topk-chunks"}
    for loaded in profile.contention.exchanges.values():
        assert loaded.beside.of(1 << 20) > 0
        assert loaded.alone.of(1 << 20) > 0


def test_ranks_of_unequal_hosts_measure_a_hierarchy_together() -> None:
    def main(rank: Rank) -> list[str]:
        net = nn.Linear(64, 250)
        levels = Tree.of_hosts((0, 1, 1)).levels  # only the hosts' first ranks are in a group between hosts
        exchanges = {"leader": lambda: Hierarchical(shape="leader")}
        topology = Topology(Level(WORLD, ((0, 1, 2),)), levels)
        inputs = torch.ones(4, 64)
        found = measure_contention(net, lambda model: model(inputs).sum(), None, exchanges, topology, rounds=1)
        return sorted(found.exchanges)

    assert on_ranks(3, main) == [["dense", "leader"]] * 3


def test_work_takes_longer_while_the_model_computes_and_slows_the_model_down() -> None:
    work = Work(1.0, beside_s=4.0, taken=0.5)
    timeline = simulate([Bucket("0", 0.0, 0, (work,))], {}, computing_s=1.0)
    # At half its speed the model needs 2 s. By then half of the work is done, and the rest takes half a second.
    assert timeline.end_s["0"] == pytest.approx(2.5)
    assert timeline.lost_s == pytest.approx(1.0)


def test_a_bucket_is_later_if_an_earlier_one_slows_the_model_down() -> None:
    work = Work(1.0, beside_s=2.0, taken=0.5)
    timeline = simulate([Bucket("0", 0.0, 0, (work,)), Bucket("1", 2.0, 1, (Work(1.0),))], {}, computing_s=3.0)
    assert timeline.end_s == {"0": pytest.approx(2.0), "1": pytest.approx(4.0)}


def test_bytes_that_are_sent_slow_the_model_down() -> None:
    sending = Collective("all_reduce", "world", 0.0, 0.0, {"host": 100.0}, sent_bytes=100.0)
    links = {"host": Capacity(100.0)}
    timeline = simulate([Bucket("0", 0.0, 0, (sending,))], links, computing_s=5.0, taken_s_per_byte=0.002)
    assert timeline.end_s["0"] == pytest.approx(1.0)
    assert timeline.lost_s == pytest.approx(0.2)


def test_bytes_take_longer_while_the_model_computes() -> None:
    sending = Collective("all_reduce", "world", 0.0, 0.0, {"host": 100.0}, sent_bytes=100.0)
    links = {"host": Capacity(100.0)}
    timeline = simulate([Bucket("0", 0.0, 0, (sending,))], links, computing_s=1.0, sending=2.0)
    assert timeline.end_s["0"] == pytest.approx(1.5)


def test_two_lanes_that_work_at_once_slow_each_other_down() -> None:
    work = Work(1.0, crowded=1.5)
    together = simulate([Bucket("0", 0.0, 0, (work,)), Bucket("1", 0.0, 1, (work,))], {})
    in_turns = simulate([Bucket("0", 0.0, 0, (work,)), Bucket("1", 0.0, 0, (work,))], {})
    assert together.end_s == {"0": pytest.approx(1.5), "1": pytest.approx(1.5)}
    assert in_turns.end_s["1"] == pytest.approx(2.0)


def test_contention_without_plain_all_reduces_is_refused() -> None:
    line = Line(fixed_s=0.0, s_per_byte=0.0)
    with pytest.raises(ValueError, match="dense"):
        Contention(exchanges={"int4": UnderLoad(beside=line, alone=line)})
