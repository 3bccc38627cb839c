"""Tests of attach and detach: refused arguments, replaced exchanges, leaked resources and counted bytes."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import syncline
from ddp_helpers import (
    EXACT,
    SMALL_BUCKETS,
    WAYS,
    Mlp,
    Way,
    assert_alike,
    assert_back_to,
    batch,
    native_threads,
    on_ranks,
    open_groups,
    refusal,
    seeded,
    square_loss_step,
    train,
)
from exchanges import ErrorFeedback
from syncline.cluster import Rank
from syncline.dist.agreement import agree, difference
from syncline.dist.comm import LaneGroups
from syncline.exchange import Comm, State, Work


def test_wrong_arguments_are_refused_in_one_line() -> None:
    def main(rank: Rank) -> None:
        model = DDP(seeded(Mlp))
        assert "the model is a Mlp: wrap it" in refusal(lambda: syncline.attach(Mlp()))
        embedding = DDP(nn.Sequential(nn.Embedding(4, 2, sparse=True)))
        assert "0 makes sparse gradients" in refusal(lambda: syncline.attach(embedding))
        for lanes in (0, -1, 17, "2", 1.5):
            assert f"lanes is {lanes!r}" in refusal(lambda lanes=lanes: syncline.attach(model, lanes=lanes))
        for exchange in ("dense", syncline.Dense, object()):
            line = refusal(lambda exchange=exchange: syncline.attach(model, exchange))
            assert "is not an exchange: pass an instance" in line
        for timeout_s in (0, -1.0, float("nan")):
            assert "timeout_s" in refusal(lambda timeout_s=timeout_s: syncline.attach(model, timeout_s=timeout_s))
        for scaler in (True, 1024.0, torch.amp.GradScaler):
            line = refusal(lambda scaler=scaler: syncline.attach(model, scaler=scaler))
            assert f"scaler is a {type(scaler).__name__}: pass the GradScaler" in line
        assert open_groups() == 1
        model.register_comm_hook(None, allreduce_hook)  # the refused calls have not used up the model's only hook

    on_ranks(1, main)


@pytest.mark.parametrize("builtin", [True, False])
def test_an_existing_hook_is_refused_and_keeps_working(builtin: bool) -> None:
    def main(rank: Rank) -> str:
        def with_hook() -> DDP:
            model = DDP(seeded(Mlp), **SMALL_BUCKETS)
            if builtin:
                model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
            else:
                model.register_comm_hook(None, allreduce_hook)
            return model

        plain = train(with_hook(), square_loss_step(rank), 3)
        model = with_hook()
        line = refusal(lambda: syncline.attach(model))
        assert len(model._comm_hooks) == (0 if builtin else 1)
        assert open_groups() == 1
        assert_alike(train(model, square_loss_step(rank), 3), plain, EXACT[0])
        return line

    assert all("has a communication hook already" in line for line in on_ranks(2, main))


def test_a_hook_of_the_reducer_itself_is_refused_each_time_and_nothing_leaks() -> None:
    """DDP's own data do not contain this hook."""

    def main(rank: Rank) -> None:
        model = DDP(seeded(Mlp), **SMALL_BUCKETS)
        dist._register_comm_hook(model.reducer, None, allreduce_hook)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="register_comm_hook"):
                syncline.attach(model)
            assert model._comm_hooks == []
            assert open_groups() == 1

    on_ranks(2, main)


def test_differences_between_ranks_are_named_on_every_rank_and_nothing_leaks() -> None:
    def main(rank: Rank) -> list[str]:
        odd = rank.rank == 1
        model = DDP(seeded(Mlp), **SMALL_BUCKETS)
        hooked = DDP(seeded(Mlp), **SMALL_BUCKETS)
        if odd:
            hooked.register_comm_hook(None, allreduce_hook)
        attempts: list[Callable[[], Any]] = [
            lambda: syncline.attach(model, syncline.Dense(wire="bf16" if odd else "fp32")),
            lambda: syncline.attach(model, ErrorFeedback() if odd else syncline.Dense()),
            lambda: syncline.attach(model, lanes=2 if odd else 1),
            lambda: syncline.attach(hooked),
        ]
        lines = [refusal(attempt, syncline.MismatchError) for attempt in attempts]
        assert open_groups() == 1
        plain = train(DDP(seeded(Mlp), **SMALL_BUCKETS), square_loss_step(rank), 3)
        syncline.attach(model)
        assert_alike(train(model, square_loss_step(rank), 3), plain, EXACT[0])
        return lines

    first, second, third = on_ranks(3, main)
    assert first == second == third
    wire, kind, lanes, hook = first
    assert 'exchange.wire is "fp32" on ranks 0, 2; "bf16" on rank 1' in wire
    assert 'exchange.type is "Dense" on ranks 0, 2; "ErrorFeedback" on rank 1' in kind
    assert "lanes is 1 on ranks 0, 2; 2 on rank 1" in lanes
    assert 'ddp.other hook is null on ranks 0, 2; "allreduce_hook" on rank 1' in hook


def test_errors_show_the_differing_part_of_long_values() -> None:
    buckets = [f"layer{number}.weight" for number in range(200)]
    line = difference({0: {"buckets": buckets}, 1: {"buckets": [*buckets[:-1], "other"]}, 2: {"buckets": []}})
    assert len(line) < 400
    assert '"layer0.weight","layer1.weight"' in line
    assert "[] on rank 2" in line
    line = difference({0: {"buckets": buckets}, 1: {"buckets": [*buckets[:100], "other", *buckets[101:]]}})
    assert len(line) < 300
    assert '"layer99.weight","layer100.weight"' in line and '"layer99.weight","other"' in line
    assert "layer0." not in line and "layer199" not in line


def test_an_error_on_one_rank_is_the_only_thing_that_the_others_report() -> None:
    def main(rank: Rank) -> str:
        fields = {"error": "its disk is full"} if rank.rank % 2 else {"error": None, "steps": list(range(100))}
        return refusal(lambda: agree(dist.group.WORLD, fields, "what is loaded"), syncline.MismatchError)

    assert set(on_ranks(3, main)) == {"what is loaded is refused on rank 1: its disk is full"}


@pytest.mark.skipif("bucket_cap_mb_list" not in DDP.__init__.__code__.co_varnames, reason="this torch has no lists")
def test_buckets_that_differ_between_ranks_are_named_before_anything_is_exchanged() -> None:
    def main(rank: Rank) -> str:
        model = DDP(seeded(Mlp), bucket_cap_mb_list=[0.0001 if rank.rank else 0.001, 0.001])
        handle = syncline.attach(model)
        with pytest.raises(RuntimeError, match="MismatchError: a gradient bucket differs between ranks"):
            train(model, square_loss_step(rank), 3)
        assert isinstance(handle.error, syncline.MismatchError)
        return str(handle.error)

    first, second = on_ranks(2, main, timeout_s=10.0)
    assert first == second
    assert 'on rank 0; "' in first


def test_attach_replaces_the_attached_exchange_and_its_old_handle_raises() -> None:
    def main(rank: Rank) -> None:
        plain = train(DDP(seeded(Mlp), **SMALL_BUCKETS), square_loss_step(rank), 3)
        model = DDP(seeded(Mlp), **SMALL_BUCKETS)
        old = syncline.attach(model, syncline.Dense(wire="bf16"), lanes=3)
        new = syncline.attach(model, syncline.Dense())
        assert_unusable(old)
        assert open_groups() == 2
        assert_alike(train(model, square_loss_step(rank), 3), plain, EXACT[0])
        assert new.stats().steps == 3

    on_ranks(2, main)


def assert_unusable(handle: syncline.Handle) -> None:
    uses: list[Callable[[], Any]] = [
        handle.stats,
        handle.state_dict,
        lambda: handle.load_state_dict({}),
        handle.predicted_sent_bytes,
        handle.detach,
        lambda: handle.error,
    ]
    for use in uses:
        assert "this handle is detached, or another attach has replaced it" in refusal(use)


def test_detach_restores_plain_ddp_and_attach_works_again() -> None:
    def main(rank: Rank) -> None:
        def run(use: Callable[[DDP, int], None]) -> Any:
            model = DDP(seeded(Mlp), **SMALL_BUCKETS)
            plain_step = square_loss_step(rank)

            def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
                use(model, number)
                plain_step(model, optimizer, number)

            return train(model, step, 9)

        handles: list[syncline.Handle] = []

        def attached_in_the_middle(model: DDP, number: int) -> None:
            if number in (2, 6):
                handles.append(syncline.attach(model, lanes=2))
            elif number in (4, 8):
                handles[-1].detach()
                assert_unusable(handles[-1])

        assert_alike(run(attached_in_the_middle), run(lambda model, number: None), EXACT[0])
        assert len(handles) == 2

    on_ranks(2, main)


@pytest.mark.parametrize("part_of_the_world", [True, False])
def test_attaching_and_detaching_thirty_times_leaks_nothing(part_of_the_world: bool) -> None:
    def main(rank: Rank) -> None:
        group = dist.new_group([0, 1]) if part_of_the_world else None
        if rank.rank == 2:
            return
        model = DDP(seeded(Mlp), process_group=group, **SMALL_BUCKETS)
        model(batch(rank.rank, 0)).sum().backward()
        before = open_groups(), native_threads()
        gc.disable()  # so that reference cycles show as leaks
        for number in range(30):
            handle = syncline.attach(model, lanes=1 + number % 2)
            model(batch(rank.rank, number)).sum().backward()
            handle.detach()
        assert_back_to(*before)

    on_ranks(3 if part_of_the_world else 2, main)


def test_the_lanes_of_a_deleted_model_end() -> None:
    def main(rank: Rank) -> None:
        model = DDP(seeded(Mlp), **SMALL_BUCKETS)
        syncline.attach(model, lanes=2)
        model(batch(rank.rank, 0)).sum().backward()
        lanes = [thread for thread in threading.enumerate() if thread.name.startswith("syncline-lane")]
        assert len(lanes) == 2
        del model
        end = time.monotonic() + 10
        while time.monotonic() < end and any(lane.is_alive() for lane in lanes):
            gc.collect()  # a callback on one of gloo's threads may hold the last bucket for a moment
        assert not any(lane.is_alive() for lane in lanes)

    on_ranks(2, main)


def test_an_attach_that_fails_half_way_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    create = LaneGroups.create

    def main(rank: Rank) -> None:
        plain = train(DDP(seeded(Mlp), **SMALL_BUCKETS), square_loss_step(rank), 3)
        model = DDP(seeded(Mlp), **SMALL_BUCKETS)
        before = open_groups(), native_threads()
        created = []

        def create_only_two(*args: Any) -> LaneGroups:
            if len(created) == 2:
                raise RuntimeError("no more connections")
            created.append(create(*args))
            return created[-1]

        monkeypatch.setattr(LaneGroups, "create", create_only_two)
        with pytest.raises(RuntimeError, match="no more connections"):
            syncline.attach(model, lanes=3)
        assert len(created) == 2
        created.clear()
        assert_back_to(*before)
        model.register_comm_hook(dist.group.WORLD, allreduce_hook)  # its only hook is still unused
        assert_alike(train(model, square_loss_step(rank), 3), plain, Way(syncline.Dense(), error=1e-6))

    on_ranks(2, main)


def test_a_copy_of_an_attached_model_is_plain_ddp() -> None:
    def main(rank: Rank) -> None:
        plain = train(DDP(seeded(Mlp), **SMALL_BUCKETS), square_loss_step(rank), 3)
        model = DDP(seeded(Mlp), **SMALL_BUCKETS)
        handle = syncline.attach(model)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
            assert_alike(train(other, square_loss_step(rank), 3), plain, EXACT[0])
        assert handle.stats().steps == 0
        other = copy.deepcopy(model)
        assert syncline.attach(other).stats().steps == 0  # and the copy can be attached

    on_ranks(2, main)


def test_disjoint_subgroups_train_different_models_at_once() -> None:
    def main(rank: Rank) -> list[float]:
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        mine = groups[rank.rank // 2]

        def make() -> nn.Module:
            net = Mlp()
            return net if rank.rank < 2 else nn.Sequential(net, nn.Linear(4, 4))

        plain = train(DDP(seeded(make), process_group=mine, **SMALL_BUCKETS), square_loss_step(rank), 4)
        for way in WAYS:
            model = DDP(seeded(make), process_group=mine, **SMALL_BUCKETS)
            handle = syncline.attach(model, way.exchange, lanes=way.lanes)
            assert_alike(train(model, square_loss_step(rank), 4), plain, way)
            assert handle.state_dict()["world_size"] == 2
            assert handle.state_dict()["rank"] == rank.rank % 2
        dist.barrier()  # rank 0 serves the store of the others
        return [float(tensor.double().sum()) for tensor in plain.final.values()]

    finals = on_ranks(4, main)
    assert finals[0] == finals[1] != finals[2] == finals[3]


def test_only_the_members_of_a_subgroup_attach_whatever_other_groups_they_are_in() -> None:
    def main(rank: Rank) -> str | None:
        group = dist.new_group([1, 2])
        if rank.rank == 0:
            dist.barrier()  # this rank serves the store of the others
            return None
        if rank.rank == 1:  # torch would name the groups of lanes differently on the two members
            dist.new_group([1], use_local_synchronization=True)
        plain = train(DDP(seeded(Mlp), process_group=group, **SMALL_BUCKETS), square_loss_step(rank), 3)
        model = DDP(seeded(Mlp), process_group=group, **SMALL_BUCKETS)
        syncline.attach(model, lanes=2)
        assert_alike(train(model, square_loss_step(rank), 3), plain, EXACT[1])
        line = refusal(lambda: syncline.attach(model, lanes=rank.rank), syncline.MismatchError)
        dist.barrier()
        return line

    lines = on_ranks(3, main, timeout_s=15.0)
    assert "lanes is 1 on rank 1; 2 on rank 2" in lines[1]  # ranks of the job, not of the group
    assert lines[1] == lines[2]


def test_bytes_are_counted_as_predicted_and_buckets_timed_in_order() -> None:
    runs_s: list[float] = []

    class Timed(ErrorFeedback):
        def run(self, flat: Tensor, state: State, comm: Comm) -> Work | None:
            runs_s.append(time.monotonic())
            return super().run(flat, state, comm)

    def main(rank: Rank) -> None:
        for way in (*WAYS, Way(ErrorFeedback(), lanes=2), Way(Timed())):
            model = DDP(seeded(Mlp), **SMALL_BUCKETS)
            handle = syncline.attach(model, way.exchange, lanes=way.lanes)
            total = 0
            for number in range(1, 4):
                runs_s.clear()
                began_s = time.monotonic()
                model(batch(rank.rank, number)).sum().backward()
                ended_s = time.monotonic()
                stats = handle.stats()
                assert stats.sent_bytes == handle.predicted_sent_bytes(), (way, number)
                total += stats.sent_bytes["world"]
                assert stats.steps == number
                assert sum(bucket.bytes for bucket in stats.buckets) == 4 * sum(p.numel() for p in model.parameters())
                for bucket in stats.buckets:
                    assert began_s <= bucket.ready_s <= bucket.start_s <= bucket.end_s <= ended_s, (way, bucket)
                for bucket, run_s in zip(stats.buckets, runs_s, strict=False):  # only `Timed` records these
                    assert bucket.start_s <= run_s <= bucket.end_s, (way, bucket)
            assert len(stats.buckets) > 1
            assert {bucket.lane for bucket in stats.buckets} == set(range(way.lanes))
            assert stats.total_sent_bytes == {"world": total}

    on_ranks(3, main)
