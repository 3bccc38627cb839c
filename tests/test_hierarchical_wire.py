"""Hierarchical among real processes: on emulated hosts, and over loopback with all that DDP does to it."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import hashlib
import io
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import syncline
from ddp_helpers import (
    SMALL_BUCKETS,
    TIMEOUT_S,
    Branches,
    Images,
    MixedTypes,
    Mlp,
    Trained,
    Way,
    assert_alike,
    assert_back_to,
    assert_trains_like_plain_ddp,
    batch,
    branch_step,
    image_step,
    native_threads,
    on_ranks,
    open_groups,
    refusal,
    seeded,
    square_loss_step,
    train,
)
from exchanges import ErrorFeedback
from syncline.cluster import ClusterSpec, Rank, launch, launch_outcomes
from syncline.cluster.isolation import why_not_shaped
from syncline.exchange import Dense, Hierarchical
from syncline.measure.assumed_network import assumed_links, assumed_network

ROUNDING = 1e-6
LEVELS = (2, 2)
LEADER = Way(Hierarchical(levels=LEVELS, shape="leader", chunks=2), error=ROUNDING)
SHARDED = Way(Hierarchical(levels=LEVELS, shape="sharded", chunks=2), lanes=2, error=ROUNDING)
WAYS = (LEADER, SHARDED)


def digest(tensors: Mapping[str, Tensor | None]) -> str:
    data = b"".join(t.detach().cpu().contiguous().numpy().tobytes() for t in tensors.values() if t is not None)
    return hashlib.sha256(data).hexdigest()


# --- on emulated hosts ------------------------------------------------------------------------------------------

WIDTH, BUCKETS = 256, {"bucket_cap_mb": 0.2}
MEASURED_STEPS = 4


def wide() -> nn.Module:
    return Mlp(WIDTH)


def on_hosts(
    spec: ClusterSpec, exchanges: Mapping[str, syncline.Exchange], error: float = ROUNDING
) -> dict[str, list[dict[str, Any]]]:
    """By exchange, by rank: what training with it was like. Gradients are compared with plain DDP's on the way."""
    if (reason := why_not_shaped()) is not None:
        pytest.skip(reason)

    def main(rank: Rank) -> dict[str, Any]:
        from syncline.cluster import links

        rank.init_process_group(TIMEOUT_S)

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
            model(batch(rank.rank, number, 4, WIDTH)).square().mean().backward()
            optimizer.step()

        plain = train(DDP(seeded(wide), **BUCKETS), step, 3)
        seen = {}
        for name, exchange in exchanges.items():
            model = DDP(seeded(wide), **BUCKETS)
            handle = syncline.attach(model, exchange)
            trained = train(model, step, 3)
            assert_alike(trained, plain, Way(exchange, error=error if exchange.lossless else 0.02))
            counted = handle.stats().total_sent_bytes
            dist.barrier()
            before = links.sent_bytes()
            train(model, step, MEASURED_STEPS)
            dist.barrier()
            sent = links.sent_bytes() - before
            total = handle.stats().total_sent_bytes
            seen[name] = {
                "host": rank.host,
                "interface": sent,
                "counted": {level: total[level] - counted.get(level, 0) for level in total},
                "step": handle.stats().sent_bytes,
                "predicted": handle.predicted_sent_bytes(),
                "gradients": [digest(step) for step in trained.gradients],
                "description": handle.describe(),
                "ways": handle.paths,
            }
            handle.detach()
        return seen

    everyone = launch(spec, main)
    return {name: [rank[name] for rank in everyone] for name in exchanges}


def assert_agreed_and_honest(ranks: list[dict[str, Any]], across: str) -> None:
    """Same bits everywhere; as many bytes as predicted; and between hosts as many as their interfaces saw."""
    assert all(rank["gradients"] == ranks[0]["gradients"] for rank in ranks)
    for level, predicted in ranks[0]["predicted"].items():
        assert max(rank["step"].get(level, 0) for rank in ranks) == predicted, level
    assert {level for rank in ranks for level, sent in rank["step"].items() if sent} == set(ranks[0]["predicted"])
    for host in {rank["host"] for rank in ranks}:
        here = [rank for rank in ranks if rank["host"] == host]
        counted = sum(rank["counted"].get(across, 0) for rank in here)
        interface = max(rank["interface"] for rank in here)
        assert counted <= interface <= 1.06 * counted, f"host {host}: interface {interface}, counted {counted}"


def test_unequal_hosts_are_found_and_climbed() -> None:
    exchanges = {
        "auto": Hierarchical(),
        "leader": Hierarchical(shape="leader", chunks=3),
        "sharded": Hierarchical(shape="sharded"),
        "bf16": Hierarchical(across=Dense(wire="bf16")),
    }
    spec = ClusterSpec(hosts=3, per_host=(3, 1, 2), rate_bps=2_000_000_000)
    seen = on_hosts(spec, exchanges)
    for name, ranks in seen.items():
        text = ranks[0]["description"]
        assert "6 ranks in 3 hosts\n├─ host 0: ranks 0–2\n├─ host 1: rank 3\n└─ host 2: ranks 4–5\n" in text
        if name != "auto":  # which may go flat
            assert_agreed_and_honest(ranks, "hosts")
            assert all(way.startswith("leader, in ") for way in ranks[0]["ways"]), name
    assert list(seen["leader"][0]["ways"]) == ["leader, in 3 chunks"]
    halved = [seen[name][0]["step"]["hosts"] for name in ("bf16", "sharded")]
    assert 2 * halved[0] == pytest.approx(halved[1], rel=0.01)


def test_a_scrambled_order_is_found_and_nested_lists_are_followed() -> None:
    exchanges = {
        "auto": Hierarchical(),
        "leader": Hierarchical(shape="leader"),
        "sharded": Hierarchical(shape="sharded", chunks=3),
        "given": Hierarchical(shape="sharded", levels=[[0, 2], [1, 3]]),
        "three levels": Hierarchical(shape="sharded", levels=[[[0], [2]], [[1], [3]]], chunks=2),
    }
    spec = ClusterSpec(hosts=2, per_host=(2, 2), rank_order="scrambled", rate_bps=2_000_000_000)
    seen = on_hosts(spec, exchanges)
    for name in ("leader", "sharded"):
        assert_agreed_and_honest(seen[name], "hosts")
        assert "4 ranks in 2 hosts\n├─ host 0: ranks 0, 2\n└─ host 1: ranks 1, 3\n" in seen[name][0]["description"]
    assert_agreed_and_honest(seen["given"], "level2")
    assert_agreed_and_honest(seen["three levels"], "level3")
    assert "4 ranks in 4 groups in 2 groups\n├─ group 0\n" in seen["three levels"][0]["description"]
    assert all(rank["gradients"] == seen["auto"][0]["gradients"] for rank in seen["auto"])


def test_one_rank_per_host_is_plain_ddp_to_the_bit() -> None:
    spec = ClusterSpec(hosts=2, rate_bps=2_000_000_000)
    (ranks,) = on_hosts(spec, {"leader": Hierarchical(shape="leader")}, error=0.0).values()
    assert_agreed_and_honest(ranks, "world")
    assert set(ranks[0]["predicted"]) == {"world"}


# --- what DDP does, over loopback -------------------------------------------------------------------------------


def test_training_accumulating_and_static_graphs_equal_plain_ddp() -> None:
    def main(rank: Rank) -> list[str]:
        def accumulate(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
            for index in range(3):
                with model.no_sync() if index < 2 else contextlib.nullcontext():
                    (model(batch(rank.rank, 3 * number + index)).square().mean() / 3).backward()
            optimizer.step()

        default = Way(Hierarchical(levels=LEVELS), error=ROUNDING)
        assert_trains_like_plain_ddp(Mlp, square_loss_step(rank), ways=(*WAYS, default))
        assert_trains_like_plain_ddp(Mlp, accumulate, ways=WAYS)
        assert_trains_like_plain_ddp(Mlp, square_loss_step(rank), ways=WAYS, steps=5, static_graph=True)
        digests = []
        for way in WAYS:
            model = DDP(seeded(Mlp), **SMALL_BUCKETS)
            handle = syncline.attach(model, way.exchange, lanes=way.lanes)
            trained = train(model, square_loss_step(rank), 3)
            sent = handle.stats().sent_bytes
            assert sent["level1"] == handle.predicted_sent_bytes()["level1"]
            if rank.rank in (0, 2) or way is SHARDED:
                assert sent == handle.predicted_sent_bytes()
            digests += [digest(gradients) for gradients in trained.gradients]
        return digests

    everyone = on_ranks(4, main)
    assert all(rank == everyone[0] for rank in everyone)


def test_unused_parameters_several_types_channels_last_and_join_equal_plain_ddp() -> None:
    def main(rank: Rank) -> None:
        def final(model: DDP) -> Trained:
            with model.join():
                train(model, square_loss_step(rank), 2 + rank.rank)
            return Trained(final=copy.deepcopy(model.state_dict()))

        assert_trains_like_plain_ddp(Branches, branch_step(rank), ways=WAYS, find_unused_parameters=True)
        assert_trains_like_plain_ddp(Images, image_step(rank), ways=WAYS)
        coarse = tuple(Way(way.exchange, way.lanes, error=0.02) for way in WAYS)  # one of the types has 8 bits
        types = functools.partial(MixedTypes, torch.float32, torch.bfloat16, torch.float64)
        assert_trains_like_plain_ddp(types, square_loss_step(rank), ways=coarse)
        plain = final(DDP(seeded(Mlp), **SMALL_BUCKETS))
        for way in WAYS:
            model = DDP(seeded(Mlp), **SMALL_BUCKETS)
            syncline.attach(model, way.exchange, lanes=way.lanes)
            assert_alike(final(model), plain, way)

    on_ranks(4, main)


def test_only_the_ranks_of_a_subgroup_climb() -> None:
    """Among them, ranks count as in the model's group."""

    def main(rank: Rank) -> str | None:
        group = dist.new_group([1, 2, 3])
        described = None
        if rank.rank:
            options = {"process_group": group, **SMALL_BUCKETS}
            plain = train(DDP(seeded(Mlp), **options), square_loss_step(rank), 3)
            before = open_groups()
            for shape in ("leader", "sharded"):
                exchange = Hierarchical(levels=[[0, 2], [1]], shape=shape, chunks=2)
                model = DDP(seeded(Mlp), **options)
                handle = syncline.attach(model, exchange, lanes=2)
                assert_alike(train(model, square_loss_step(rank), 3), plain, Way(exchange, error=ROUNDING))
                described = handle.describe()
                handle.detach()
                assert open_groups() == before
        dist.barrier()  # rank 0 serves the others' store
        return described

    lines = on_ranks(4, main)
    assert lines[0] is None
    assert "3 ranks in 2 groups\n├─ group 0: ranks 0, 2\n└─ group 1: rank 1\n" in lines[1]


def test_detaching_gives_plain_ddp_back_and_leaves_nothing_behind() -> None:
    def main(rank: Rank) -> None:
        model = DDP(seeded(Mlp), **SMALL_BUCKETS)
        model(batch(rank.rank, 0)).sum().backward()
        before = open_groups(), native_threads()
        gc.disable()  # what only the garbage collector finds would pile up until it looks
        for number in range(8):
            way = WAYS[number % 2]
            handle = syncline.attach(model, way.exchange, lanes=way.lanes)
            model(batch(rank.rank, number)).sum().backward()
            handle.detach()
        assert_back_to(*before)
        gc.enable()

        def run(use: Callable[[DDP, int], None]) -> Trained:
            plain_step = square_loss_step(rank)

            def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
                use(model, number)
                plain_step(model, optimizer, number)

            return train(DDP(seeded(Mlp), **SMALL_BUCKETS), step, 5)

        handles: list[syncline.Handle] = []

        def in_the_middle(model: DDP, number: int) -> None:
            if number == 1:
                handles.append(syncline.attach(model, SHARDED.exchange))
            elif number == 3:
                handles[-1].detach()

        assert_alike(run(in_the_middle), run(lambda model, number: None), SHARDED)

    on_ranks(4, main)


# --- what is refused --------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_on_every_rank_and_the_model_goes_on(tmp_path: Path) -> None:
    def main(rank: Rank) -> dict[str, str]:
        odd = rank.rank == 1
        model = DDP(seeded(Mlp), **SMALL_BUCKETS)
        before = open_groups()

        def refused(exchange: Hierarchical, error: type[Exception] = syncline.UsageError, **options: Any) -> str:
            line = refusal(lambda: syncline.attach(model, exchange, **options), error)
            assert open_groups() == before
            return line

        mismatch = syncline.MismatchError
        here = (0, 0, 0, 0)
        lines = {
            "levels": refused(Hierarchical(levels=[[0, 2], [1, 3]] if odd else [[0, 1], [2, 3]]), mismatch),
            "shape": refused(Hierarchical(levels=LEVELS, shape="leader" if odd else "sharded"), mismatch),
            "chunks": refused(Hierarchical(levels=LEVELS, chunks=1 + odd), mismatch),
            "across": refused(Hierarchical(across=Dense(wire="bf16" if odd else "fp16")), mismatch),
            "network": refused(Hierarchical(), mismatch, network=assumed_links(here, 10**9 + odd, "gloo")),
            "sizes": refused(Hierarchical(levels=(2, 3))),
            "ranks": refused(Hierarchical(levels=[[0, 1], [2]])),
            "depth": refused(Hierarchical(levels=[[0, 1], 2, 3])),
            "other ranks": refused(Hierarchical(), network=assumed_links((0, 0, 0), backend="gloo")),
            "other hosts": refused(Hierarchical(), network=assumed_links((0, 0, 1, 1), backend="gloo")),
            "other backend": refused(Hierarchical(), network=assumed_links(here, backend="nccl")),
        }
        plain = train(DDP(seeded(Mlp), **SMALL_BUCKETS), square_loss_step(rank), 3)
        if rank.rank == 0:
            assumed_links(here, backend="gloo").save(tmp_path / "network.json")
        dist.barrier()
        syncline.attach(model, SHARDED.exchange, network=tmp_path / "network.json")
        assert_alike(train(model, square_loss_step(rank), 3), plain, SHARDED)
        return lines

    everyone = on_ranks(4, main)
    assert all(lines == everyone[0] for lines in everyone)
    expected = {
        "levels": "exchange.levels is [[0,1],[2,3]] on ranks 0, 2, 3; [[0,2],[1,3]] on rank 1",
        "shape": 'exchange.shape is "sharded" on ranks 0, 2, 3; "leader" on rank 1',
        "chunks": "exchange.chunks is 1 on ranks 0, 2, 3; 2 on rank 1",
        "across": 'exchange.across.wire is "fp16" on ranks 0, 2, 3; "bf16" on rank 1',
        "network": "network is ",
        "sizes": "levels=(2, 3): its sizes multiply to 6 ranks, and there are 4",
        "ranks": "it must name each of the ranks 0 to 3 once",
        "depth": "every rank must be nested equally deep",
        "other ranks": "the network was measured with 3 ranks, but the model has 4: probe this cluster again",
        "other hosts": "the network was measured with ranks on other hosts than the model's: probe this cluster again",
        "other backend": "the network was measured with nccl, but the model uses gloo: probe this cluster again",
    }
    for name, text in expected.items():
        assert text in everyone[0][name], everyone[0][name]


def test_sixteen_bits_inside_unequal_groups_are_refused_by_every_rank() -> None:
    def main(rank: Rank) -> str:
        model = DDP(seeded(Mlp), **SMALL_BUCKETS)
        exchange = Hierarchical(within=Dense(wire="bf16"), levels=[[0, 1], [2]])
        return refusal(lambda: syncline.attach(model, exchange))

    assert all("those of level1 have 1 and 2 ranks: use within=Dense()" in line for line in on_ranks(3, main))


def test_a_network_that_one_rank_cannot_read_is_an_error_on_every_rank(tmp_path: Path) -> None:
    assumed_network(1, 3, 10**9, "gloo").save(tmp_path / "network.json")

    def main(rank: Rank) -> list[str]:
        model = DDP(seeded(Mlp), **SMALL_BUCKETS)
        path = tmp_path / ("network.json" if rank.rank else "nowhere.json")
        error = syncline.MismatchError if rank.rank else syncline.SynclineError
        differs = refusal(lambda: syncline.attach(model, Hierarchical(), network=path), error)
        missing = refusal(
            lambda: syncline.attach(model, Hierarchical(), network=tmp_path / "no.json"), syncline.SynclineError
        )
        wrong = refusal(lambda: syncline.attach(model, Hierarchical(), network={}))
        handle = syncline.attach(model, syncline.Dense(), network=tmp_path / "network.json")
        train(model, square_loss_step(rank), 1)
        return [differs, missing, wrong, str(handle.paths)]

    for rank, (differs, missing, wrong, ways) in enumerate(on_ranks(3, main)):
        assert "nowhere.json" in differs and ("is refused on rank 0" in differs) == (rank > 0)
        assert "no.json" in missing
        assert "network is a dict: pass a Network" in wrong
        assert ways == "{}"


def test_flat_is_a_way_too() -> None:
    def main(rank: Rank) -> list[Any]:
        model = DDP(seeded(Mlp), **SMALL_BUCKETS)
        handle = syncline.attach(model, Hierarchical())  # all on one host
        train(model, square_loss_step(rank), 3)
        return [list(handle.paths), handle.describe()]

    for ways, text in on_ranks(2, main):
        assert ways == ["flat"]
        assert "× flat" in text


# --- what it remembers ------------------------------------------------------------------------------------------


def residuals(handle: syncline.Handle) -> dict[str, Tensor]:
    return {name: kinds["residual"] for name, kinds in handle.state_dict()["tensors"].items()}


def test_a_run_resumed_from_its_state_equals_the_uninterrupted_one_and_failures_leave_no_trace() -> None:
    def main(rank: Rank) -> None:
        def start() -> tuple[DDP, torch.optim.Optimizer, syncline.Handle]:
            model = DDP(seeded(Mlp), **SMALL_BUCKETS)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
            exchange = Hierarchical(across=ErrorFeedback(), levels=LEVELS, shape="leader", chunks=2)
            return model, optimizer, syncline.attach(model, exchange, lanes=2)

        def steps(model: DDP, optimizer: torch.optim.Optimizer, numbers: range) -> None:
            for number in numbers:
                optimizer.zero_grad()
                square_loss_step(rank)(model, optimizer, number)

        run = start()
        steps(*run[:2], range(3))
        file = io.BytesIO()
        torch.save([part.state_dict() for part in run], file)
        steps(*run[:2], range(3, 6))
        whole, kept = run[0].state_dict(), residuals(run[2])
        leads = rank.rank in (0, 2)
        assert set(kept) == (set(dict(Mlp().named_parameters())) if leads else set())
        assert not leads or any(bool(residual.any()) for residual in kept.values())

        for resumed in (start(), run):
            for part, state in zip(resumed, torch.load(io.BytesIO(file.getvalue()), weights_only=True), strict=True):
                part.load_state_dict(state)
            steps(*resumed[:2], range(3, 6))
            for name, tensor in resumed[0].state_dict().items():
                assert torch.equal(tensor, whole[name]), name
            for name, residual in residuals(resumed[2]).items():
                assert torch.equal(residual, kept[name]), name

        model, _, handle = run
        for sick in range(4):  # whichever rank it is, leader or not
            before = residuals(handle)
            model.zero_grad()
            loss = model(batch(rank.rank, sick)).square().mean()
            (loss * torch.inf if rank.rank == sick else loss).backward()
            assert not all(bool(torch.isfinite(p.grad).all()) for p in model.parameters())
            after = residuals(handle)
            assert after.keys() == before.keys()
            assert all(torch.equal(after[name], before[name]) for name in before)

    on_ranks(4, main)


def test_state_of_other_levels_is_refused() -> None:
    def main(rank: Rank) -> str:
        def attached(levels: Any) -> syncline.Handle:
            handle = syncline.attach(model, Hierarchical(across=ErrorFeedback(), levels=levels, shape="leader"))
            train(model, square_loss_step(rank), 1)
            return handle

        model = DDP(seeded(Mlp), **SMALL_BUCKETS)
        state = attached([[0, 1], [2, 3]]).state_dict()
        return refusal(lambda: attached([[0, 2], [1, 3]]).load_state_dict(state))

    assert all("the checkpoint was saved with" in line for line in on_ranks(4, main))


# --- when a rank ends -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lost", "way"), [(3, LEADER), (2, SHARDED)], ids=["member", "shard"])
def test_when_a_rank_dies_within_a_step_every_survivor_raises_in_time(lost: int, way: Way) -> None:
    timeout_s = 3.0

    def main(rank: Rank) -> dict[str, Any]:
        rank.init_process_group(TIMEOUT_S)
        model = DDP(seeded(Mlp), **SMALL_BUCKETS)
        handle = syncline.attach(model, way.exchange, lanes=way.lanes, timeout_s=timeout_s)
        train(model, square_loss_step(rank), 2)
        if rank.rank == lost:  # within backward, when other buckets are on their way
            model.module.first.weight.register_hook(lambda gradient: os._exit(17))
        began_s = time.monotonic()
        with pytest.raises(RuntimeError, match="ExchangeError: exchanging bucket"):
            train(model, square_loss_step(rank), 1)
        seen: dict[str, Any] = {"after_s": time.monotonic() - began_s}
        seen["error"] = type(handle.error).__name__
        seen["refusal"] = refusal(handle.state_dict, syncline.ExchangeError)
        handle.detach()
        seen["detached_after_s"] = time.monotonic() - began_s
        return seen

    outcomes = launch_outcomes(ClusterSpec(hosts=4), main, deadline_s=60.0, grace_s=30.0, shaped=False)
    assert outcomes[lost].error is not None
    for outcome in outcomes:
        if outcome.rank == lost:
            continue
        assert outcome.error is None, outcome
        assert outcome.value["error"] == "ExchangeError"
        assert outcome.value["refusal"].startswith("the state is unusable, because an exchange failed")
        assert outcome.value["after_s"] < timeout_s + 5
        assert outcome.value["detached_after_s"] < 2 * timeout_s + 5


def test_what_was_kept_on_other_leaders_is_refused_and_json_makes_no_difference() -> None:
    def main(rank: Rank) -> list[str]:
        model = DDP(seeded(Mlp), **SMALL_BUCKETS)
        handle = syncline.attach(model, Hierarchical(across=ErrorFeedback(), levels=(2, 2)))
        train(model, square_loss_step(rank), 2)
        state = handle.state_dict()
        handle.load_state_dict({**state, "exchange": json.loads(json.dumps(state["exchange"]))})
        elsewhere = {**state, "levels": "((0, 2), (1, 3))"}
        return [refusal(lambda: handle.load_state_dict(elsewhere)), state["levels"]]

    for refused, levels in on_ranks(4, main):
        assert levels == "((0, 1), (2, 3))"
        assert "the ranks on hosts ((0, 2), (1, 3)), but they are on ((0, 1), (2, 3)) now" in refused
