"""Streams instead of threads, NCCL instead of gloo: two hosts of two ranks that share one GPU."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import syncline
from exchanges import ErrorFeedback, Residual
from survivors import wait_for
from syncline.cluster import ClusterSpec, Rank, launch, launch_outcomes
from syncline.exchange import Comm, Layout, State, Work
from syncline.overlap.guards import PendingParameter
from syncline.records.failure_report import FailureReport

if __name__ != "__main__":  # asking for a GPU is already enough to keep CUDA from forked ranks
    pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

STEPS = 6


@dataclass(frozen=True)
class Failing(ErrorFeedback):
    """Fails in its second step: while it runs, or when it is settled."""

    where: str = "run"

    def prepare(self, layout: Layout, comm: Comm) -> State:
        return FailingToSettle(layout) if self.where == "settle" else super().prepare(layout, comm)

    def run(self, flat: Tensor, state: State, comm: Comm) -> Work | None:
        if self.where == "run" and bool(state.kept().any()):
            raise ArithmeticError("no")
        return super().run(flat, state, comm)


class FailingToSettle(Residual):
    def settle(self, applied: Tensor) -> None:
        if bool(self.before.any()):
            raise ArithmeticError("no")
        super().settle(applied)


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.ReLU()))).cuda()


def _train(ddp: DDP, rank: int, broken_step: int = -1) -> torch.Tensor:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = ddp(torch.randn(16, 256, generator=generator).cuda()).square().mean()
        (loss * float("nan") if step == broken_step and rank == 1 else loss).backward()
        if step != broken_step:
            optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in ddp.parameters()])


def _ddp() -> DDP:
    return DDP(_net(), device_ids=[0], bucket_cap_mb=0.3)


def _layerwise(rank: int, exchange: syncline.Exchange, plain: Tensor, options: dict[str, Any]) -> dict[str, Any]:
    trainer = syncline.Layerwise(_net(), lambda p: torch.optim.SGD(p, lr=0.1), exchange, bucket_mb=0.3, **options)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        loss = trainer(torch.randn(16, 256, generator=generator).cuda()).square().mean()
        loss.backward()
    trained = torch.cat([parameter.detach().flatten() for parameter in trainer.module.parameters()])
    weights = [parameter.detach().clone() for parameter in trainer.module.parameters()]
    (trainer(torch.ones(16, 256, device="cuda")).square().mean() * float("nan" if rank == 1 else 1)).backward()
    stayed = all(torch.equal(a, b) for a, b in zip(weights, trainer.module.parameters(), strict=True))
    seen = {
        "difference": (trained - plain).abs().max().item(),
        "checksum": trained.double().sum().item(),
        "bytes": [trainer.stats().sent_bytes, trainer.predicted_sent_bytes()],
        "stayed": stayed,
        "dropped": trainer.dropped,
        "buckets": len(trainer.stats().buckets),
    }
    trainer.close()
    return seen


class _Halves(torch.nn.Module):
    """Two vectors, of which a step may use only the first; their gradients are the whole numbers that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.zeros(4000)) for _ in range(2))

    def forward(self, a: Tensor, b: Tensor | None) -> Tensor:
        return (self.a * a).sum() + (0 if b is None else (self.b * b).sum())


def _lost(rank: int, options: dict[str, bool]) -> dict[str, float]:
    """By parameter, the largest element that was neither applied nor kept, over steps that do not use `b`."""
    ddp = DDP(_Halves().cuda(), device_ids=[0], **options)
    handle = syncline.attach(ddp, syncline.OkTopk(density=0.05))
    came_in, applied = ({name: torch.zeros(4000, device="cuda") for name in "ab"} for _ in range(2))
    generator = torch.Generator().manual_seed(rank)
    for step in range(6):
        a, b = (torch.randint(-1000, 1000, (4000,), generator=generator).float().cuda() for _ in range(2))
        given = {"a": a, "b": 8 * b} if step % 3 == 0 or "static_graph" in options else {"a": a}
        ddp.zero_grad(set_to_none=True)
        ddp(given["a"], given.get("b")).backward()
        for name, parameter in ddp.module.named_parameters():
            if name in given:
                mean = given[name] / dist.get_world_size()
                dist.all_reduce(mean)
                came_in[name] += mean
            applied[name] += 0 if parameter.grad is None else parameter.grad
    lost = {}
    for name, kinds in handle.state_dict()["tensors"].items():
        waiting = kinds["residual"].clone()
        dist.all_reduce(waiting)
        lost[name] = (came_in[name] - applied[name] - waiting).abs().max().item()
    handle.detach()
    return lost


OVERLAP_STEPS = 20
OVERLAP_CASES: dict[str, dict[str, Any]] = {  # options of DDP
    "overlap": {},
    "overlap, views": {"gradient_as_bucket_view": True},
    "overlap, unused": {"find_unused_parameters": True},
}
LOSSLESS_CASES = [*OVERLAP_CASES, "overlap, hierarchical"]
LOSSY_CASES: dict[str, dict[str, Any]] = {  # options of attach
    "overlap, bf16": {"exchange": syncline.Dense(wire="bf16")},
    "overlap, weights in fp16": {"gather": "fp16"},
    "overlap, 4 bits and bf16": {"exchange": syncline.Quantized(bits=4), "gather": "bf16"},
}


def _clipped_steps(ddp: DDP, inputs: list[Tensor], clip: Any, optimizer: torch.optim.Optimizer) -> None:
    for x in inputs:
        optimizer.zero_grad()
        ddp(x).square().sum().backward()
        clip(0.1)
        optimizer.step()


def _overlapping(rank: int, options: dict[str, Any], exchange: dict[str, Any]) -> dict[str, Any]:
    """Train twice with AdamW and clipping, with plain DDP and with weights gathered behind the next forward."""
    generator = torch.Generator().manual_seed(rank)
    inputs = [torch.randn(16, 256, generator=generator).cuda() for _ in range(OVERLAP_STEPS + 3)]
    plain, model = (DDP(_net(), device_ids=[0], bucket_cap_mb=0.3, **options) for _ in range(2))
    # Where a gradient is almost zero, AdamW would turn the order of summation into steps of either sign.
    optimizers = [torch.optim.AdamW(ddp.parameters(), lr=1e-3, eps=1e-4) for ddp in (plain, model)]
    handle = syncline.attach(model, optimizer=optimizers[1], overlap="forward", **exchange)
    torch_clip = functools.partial(nn.utils.clip_grad_norm_, list(plain.parameters()))
    _clipped_steps(plain, inputs[:OVERLAP_STEPS], torch_clip, optimizers[0])
    with mock.patch("syncline.predict.overlap.best_whole", return_value=frozenset([1])):  # both kinds of buckets
        _clipped_steps(model, inputs[:OVERLAP_STEPS], handle.clip_grad_norm_, optimizers[1])
    pending = sum(type(parameter) is PendingParameter for parameter in model.parameters())
    stats = handle.stats()
    weights = [torch.cat([p.detach().flatten() for p in ddp.parameters()]) for ddp in (plain, model)]
    moments = handle.optimizer_state_dict()["state"]
    plain_moments = optimizers[0].state_dict()["state"]
    seen = {
        "pending": pending,
        "difference": (weights[0] - weights[1]).abs().max().item(),
        "moved": (weights[1] - torch.cat([p.detach().flatten() for p in _net().parameters()])).abs().max().item(),
        "checksum": weights[1].double().sum().item(),
        "moments": max((moments[i]["exp_avg"] - plain_moments[i]["exp_avg"]).abs().max().item() for i in plain_moments),
        "bytes": [stats.sent_bytes, handle.predicted_sent_bytes()],
        "state": [_state_numel(optimizer) for optimizer in optimizers],
    }
    torch.cuda.set_sync_debug_mode("error")  # the host must not wait for the device in a step
    try:
        _clipped_steps(model, inputs[OVERLAP_STEPS:], handle.clip_grad_norm_, optimizers[1])
        seen["synchronised"] = ""
    except RuntimeError as error:
        seen["synchronised"] = "".join(traceback.format_exception(error))[-3000:]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    handle.detach()
    seen["whole again"] = _state_numel(optimizers[1])
    return seen


def _overlap_main(rank: Rank) -> dict[str, Any]:
    torch.cuda.set_device(0)
    rank.init_process_group()
    seen = {name: _overlapping(rank.rank, options, {}) for name, options in OVERLAP_CASES.items()}
    seen["overlap, hierarchical"] = _overlapping(rank.rank, {}, {"exchange": syncline.Hierarchical(shape="sharded")})
    return seen | {name: _overlapping(rank.rank, {}, options) for name, options in LOSSY_CASES.items()}


def _state_numel(optimizer: torch.optim.Optimizer) -> int:
    return sum(v.numel() for state in optimizer.state.values() for v in state.values() if v.dim())


def _main(rank: Rank) -> dict[str, Any]:
    torch.cuda.set_device(0)
    rank.init_process_group()
    plain = _train(_ddp(), rank.rank)
    seen: dict[str, Any] = {}
    for name, exchange, lanes in (
        ("dense", syncline.Dense(), 1),
        ("two lanes", syncline.Dense(), 2),
        ("bf16", syncline.Dense(wire="bf16"), 2),
        ("fp16", syncline.Dense(wire="fp16"), 1),
        ("stateful", ErrorFeedback(), 2),
        ("leader", syncline.Hierarchical(shape="leader", chunks=2), 1),
        ("sharded", syncline.Hierarchical(shape="sharded", chunks=3), 2),
        ("hierarchical and stateful", syncline.Hierarchical(across=ErrorFeedback()), 1),
    ):
        ddp = _ddp()
        handle = syncline.attach(ddp, exchange, lanes=lanes)
        trained = _train(ddp, rank.rank)
        torch.cuda.synchronize()
        stats = handle.stats()
        seen[name] = {
            "equal": torch.equal(trained, plain),
            "difference": (trained - plain).abs().max().item(),
            "bytes": [stats.sent_bytes, handle.predicted_sent_bytes()],
            "ordered": all(b.ready_s <= b.start_s <= b.end_s for b in stats.buckets),
            "buckets": len(stats.buckets),
            "checksum": trained.double().sum().item(),
        }
        handle.detach()
    ddp = _ddp()
    handle = syncline.attach(ddp, ErrorFeedback(), lanes=2)
    _train(ddp, rank.rank, broken_step=3)
    kept = [t for kinds in handle.state_dict()["tensors"].values() for t in kinds.values()]
    seen["kept is finite"] = bool(kept) and all(bool(torch.isfinite(tensor).all()) for tensor in kept)
    seen["lost"] = {option: _lost(rank.rank, {option: True}) for option in ("find_unused_parameters", "static_graph")}
    for where in ("run", "settle"):
        ddp = _ddp()
        handle = syncline.attach(ddp, Failing(where))
        with pytest.raises(Exception, match="failed in step"):
            _train(ddp, rank.rank)
        with pytest.raises(syncline.ExchangeError, match="unusable"):
            handle.state_dict()
        seen[f"{where} fails"] = str(handle.error)
    for name, exchange, options in (
        ("dense", syncline.Dense(), {}),
        ("oktopk", syncline.OkTopk(density=0.05), {"residual": "host"}),
    ):
        seen[f"layerwise, {name}"] = _layerwise(rank.rank, exchange, plain, dict(options))
    seen["sharded model"] = _sharded(rank.rank)
    seen["weighted"] = _weighted(rank.rank)
    return seen


def _weighted(rank: int) -> dict[str, float]:
    """Return how far the weights after steps with unequal batches are from those of the large batch."""
    batches = (7, 2, 3, 4)
    inputs = [torch.randn(sum(batches), 256, generator=torch.Generator().manual_seed(step)).cuda() for step in range(3)]

    def trained(model: nn.Module, optimizer: torch.optim.Optimizer, parts: list[Tensor]) -> Tensor:
        for part in parts:
            optimizer.zero_grad()
            model(part).square().mean().backward()
            optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    net = _net()
    expected = trained(net, torch.optim.SGD(net.parameters(), lr=0.1), inputs)
    own = [part.split(batches)[rank] for part in inputs]
    found = {}
    for name in ("gradients", "lanes", "updates"):
        ddp = _ddp()
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        options: dict[str, Any] = {"optimizer": optimizer} if name == "updates" else {}
        options |= {"lanes": 2} if name == "lanes" else {}
        handle = syncline.attach(ddp, syncline.Dense(), shares=syncline.Shares(batches), **options)
        found[name] = (trained(ddp, optimizer, own) - expected).abs().max().item()
        handle.detach()
    return found


SHARDED: dict[str, tuple[syncline.Exchange, bool]] = {
    "dense": (syncline.Dense(), True),
    "bf16": (syncline.Dense(wire="bf16"), True),
    "int4": (syncline.Quantized(bits=4), True),
    "updates": (syncline.ChunkedTopk(density=0.1), True),
    "to shards": (syncline.Dense(), False),
    "to shards in 4 bits": (syncline.Quantized(bits=4), False),
}
"""Exchanges for sharded models, and whether they are between replicas."""


def _sharded(rank: int) -> dict[str, dict[str, Any]]:
    """Train models that are sharded on 2 hosts with 2 ranks each, or among all ranks, beside PyTorch's own."""
    grid = init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicate", "shard"))
    flat = init_device_mesh("cuda", (4,))

    def made(mesh: Any) -> Any:
        net: Any = _net()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)  # gradients are cast
        for layer in net[2::2]:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        return fully_shard(net, mesh=mesh, mp_policy=policy)

    def trained(model: Any, optimizer: Any) -> Tensor:
        generator = torch.Generator().manual_seed(rank)
        for _ in range(STEPS):
            optimizer.zero_grad()
            for part in range(2):
                model.set_requires_gradient_sync(part == 1)
                model(torch.randn(16, 256, generator=generator).cuda()).float().square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        return torch.cat([parameter.detach().full_tensor().flatten() for parameter in model.parameters()])

    first = torch.cat([parameter.detach().flatten() for parameter in _net().parameters()])
    native = {}
    for replicas, mesh in ((True, grid), (False, flat)):
        model = made(mesh)
        native[replicas] = trained(model, torch.optim.SGD(model.parameters(), lr=0.1))
    seen: dict[str, dict[str, Any]] = {}
    for name, (exchange, replicas) in SHARDED.items():
        model = made(grid["shard"] if replicas else flat)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options: dict[str, Any] = {"replicate": grid["replicate"]} if replicas else {}
        if name == "updates":
            options |= {"optimizer": optimizer, "every": 2, "warmup": 2}
        handle = syncline.attach(model, exchange, **options)
        weights = trained(model, optimizer)
        if name == "updates":
            handle.detach()
            weights = torch.cat([parameter.detach().full_tensor().flatten() for parameter in model.parameters()])
        torch.cuda.synchronize()
        seen[name] = {
            "difference": (weights - native[replicas]).abs().max().item(),
            "moved": (native[replicas] - first).abs().max().item(),
            "checksum": weights.double().sum().item(),
        }
        if name != "updates":
            seen[name]["bytes"] = [handle.stats().sent_bytes, handle.predicted_sent_bytes()]
            handle.detach()
    return seen


VICTIM, TIMEOUT_S = 2, 20.0


def _struck(fault: signal.Signals, folder: Path) -> list[Any]:
    """How ranks end of whom one is killed or stopped in the middle of its training, and after how long."""

    def train(rank: Rank) -> None:
        os.environ["SYNCLINE_FAILURES"] = str(folder)
        rank.init_process_group(timeout_s=TIMEOUT_S)
        ddp = _ddp()
        syncline.attach(ddp, syncline.OkTopk(density=0.05))
        _train(ddp, rank.rank)
        torch.cuda.synchronize()
        dist.barrier()
        rank.say(time.monotonic())
        if rank.rank == VICTIM:
            os.kill(os.getpid(), fault)
        try:
            _train(ddp, rank.rank)
            torch.cuda.synchronize()
        finally:  # rank 0 has the store, and must not be missed too
            with contextlib.suppress(dist.DistStoreError):
                wait_for(rank, *(one for one in range(rank.world_size) if one != VICTIM))

    struck_s: dict[int, float] = {}
    spec = ClusterSpec(hosts=2, per_host=(2, 2), rate_bps=10_000_000_000, device="cuda")
    outcomes = launch_outcomes(spec, train, deadline_s=90, grace_s=TIMEOUT_S + 10, on_event=struck_s.__setitem__)
    return [[one.error, one.finished_at_s - struck_s[VICTIM], one.traceback[-2000:]] for one in outcomes]


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    # A process of its own: ranks can only be forked from one that has not touched CUDA, as this one has by now.
    return _ran()


@pytest.fixture(scope="module")
def overlapped() -> list[dict[str, Any]]:
    return _ran("overlap")


def _ran(*arguments: str) -> list[dict[str, Any]]:
    ran = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, timeout=130)
    assert ran.returncode == 0, ran.stderr
    found: list[dict[str, Any]] = json.loads(ran.stdout.splitlines()[-1])
    return found


def test_dense_is_bit_equal_to_plain_ddp_on_any_number_of_lanes(seen: list[dict[str, Any]]) -> None:
    assert all(rank[name]["equal"] for rank in seen for name in ("dense", "two lanes"))


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_residuals_of_unused_parameters_wait(seen: list[dict[str, Any]], option: str) -> None:
    assert all(rank["lost"][option] == {"a": 0.0, "b": 0.0} for rank in seen)


@pytest.mark.parametrize("name", ["leader", "sharded"])
def test_a_hierarchical_exchange_differs_by_the_order_of_summation_alone(seen: list[dict[str, Any]], name: str) -> None:
    assert all(rank[name]["difference"] < 1e-6 for rank in seen)
    assert len({rank[name]["checksum"] for rank in seen}) == 1


@pytest.mark.parametrize("name", ["bf16", "fp16", "stateful", "hierarchical and stateful"])
def test_rounding_exchanges_stay_close_and_ranks_agree(seen: list[dict[str, Any]], name: str) -> None:
    assert all(0 < rank[name]["difference"] < 1e-2 for rank in seen)
    assert len({rank[name]["checksum"] for rank in seen}) == 1


@pytest.mark.parametrize(
    "name",
    ["dense", "two lanes", "bf16", "fp16", "stateful", "leader", "sharded", "hierarchical and stateful"],
)
def test_bytes_are_as_predicted_and_timings_are_in_order(seen: list[dict[str, Any]], name: str) -> None:
    predicted = seen[0][name]["bytes"][1]
    assert set(predicted) == ({"local", "hosts"} if name in ("leader", "sharded") else {*predicted})
    for level, expected in predicted.items():
        assert max(rank[name]["bytes"][0].get(level, 0) for rank in seen) == expected > 0
    for rank in seen:
        assert rank[name]["ordered"]
        assert rank[name]["buckets"] > 1


@pytest.mark.parametrize("name", LOSSLESS_CASES)
def test_weights_gathered_behind_the_forward_equal_plain_ddps(overlapped: list[dict[str, Any]], name: str) -> None:
    for rank in (rank[name] for rank in overlapped):
        assert rank["pending"] > 0
        assert rank["difference"] < 1e-5 < 1e-2 < rank["moved"]
        assert rank["moments"] < 1e-6
        assert rank["bytes"][0] == rank["bytes"][1]
        assert rank["state"][1] < rank["state"][0] == rank["whole again"]
    assert len({rank[name]["checksum"] for rank in overlapped}) == 1


@pytest.mark.parametrize("name", LOSSY_CASES)
def test_overlap_with_fewer_bits_stays_close_and_ranks_agree(overlapped: list[dict[str, Any]], name: str) -> None:
    for rank in (rank[name] for rank in overlapped):
        assert rank["pending"] > 0
        assert 0 < rank["difference"] < 1e-2
        assert rank["bytes"][0] == rank["bytes"][1]
    assert len({rank[name]["checksum"] for rank in overlapped}) == 1


@pytest.mark.parametrize("name", [name for name in (*LOSSLESS_CASES, *LOSSY_CASES) if name != "overlap, unused"])
def test_overlap_never_waits_on_the_host(overlapped: list[dict[str, Any]], name: str) -> None:
    assert [rank[name]["synchronised"] for rank in overlapped] == [""] * len(overlapped)


@pytest.mark.parametrize("name", ["gradients", "lanes", "updates"])
def test_unequal_batches_train_as_the_large_batch_does(seen: list[dict[str, Any]], name: str) -> None:
    assert all(rank["weighted"][name] < 1e-5 for rank in seen)


@pytest.mark.parametrize("where", ["run", "settle"])
def test_a_failure_reaches_the_user_and_the_handle(seen: list[dict[str, Any]], where: str) -> None:
    assert all("failed in step 1: no" in rank[f"{where} fails"] for rank in seen)


def test_a_non_finite_step_leaves_the_state_finite(seen: list[dict[str, Any]]) -> None:
    assert all(rank["kept is finite"] for rank in seen)


@pytest.mark.parametrize("name", SHARDED)
def test_sharded_models_train_like_pytorchs_own(seen: list[dict[str, Any]], name: str) -> None:
    """Gradients are reduced in bf16, so results differ by its rounding in any case."""
    allowed = {"updates": 0.5}.get(name, 0.05)
    for rank in seen:
        found = rank["sharded model"][name]
        assert found["difference"] <= allowed * found["moved"]
        assert found["checksum"] == seen[0]["sharded model"][name]["checksum"]
        if name != "updates":
            sent, predicted = found["bytes"]
            assert sent == predicted


def _ended_by(fault: str, folder: Path) -> list[Any]:
    ran = subprocess.run(
        [sys.executable, __file__, fault, str(folder)], capture_output=True, text=True, timeout=5 * TIMEOUT_S + 60
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def test_a_killed_rank_is_named_by_every_survivor(tmp_path: Path) -> None:
    for rank, (error, after_s, _) in enumerate(_ended_by("kill", tmp_path)):
        if rank != VICTIM:
            assert "ExchangeError" in error and f"suspect: rank {VICTIM} (no heartbeat" in error
            assert after_s < TIMEOUT_S + 10


def test_a_silent_rank_is_named_before_nccl_ends_the_survivors(tmp_path: Path) -> None:
    ended = _ended_by("stop", tmp_path)
    for rank in (rank for rank in range(len(ended)) if rank != VICTIM):
        note = FailureReport.load(tmp_path / f"rank-{rank}.json")
        assert [one.rank for one in note.suspects] == [VICTIM], note.suspects
        assert note.pending and "and NCCL ends this process after" in note.error
        assert "SIGABRT" in ended[rank][0]


@pytest.mark.parametrize("name", ["dense", "oktopk"])
def test_layer_by_layer_ranks_agree_and_drop_together(seen: list[dict[str, Any]], name: str) -> None:
    ranks = [rank[f"layerwise, {name}"] for rank in seen]
    assert len({rank["checksum"] for rank in ranks}) == 1
    assert all(rank["stayed"] and rank["dropped"] == rank["buckets"] > 1 for rank in ranks)
    assert all(rank["bytes"][0] == rank["bytes"][1] for rank in ranks)
    if name == "dense":
        assert all(rank["difference"] < 1e-6 for rank in ranks)


if __name__ == "__main__":
    FAULTS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
    SPEC = ClusterSpec(hosts=2, per_host=(2, 2), rate_bps=10_000_000_000, device="cuda")
    if sys.argv[1:] and sys.argv[1] in FAULTS:
        print(json.dumps(_struck(FAULTS[sys.argv[1]], Path(sys.argv[2]))))
        sys.exit()
    print(json.dumps(launch(SPEC, _overlap_main if sys.argv[1:] == ["overlap"] else _main)))
