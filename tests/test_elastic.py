"""Real replicas over real gloo and a real lighthouse: one is killed or cut off, the others go on, and it comes back."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # optimizers import it, and that takes seconds: once here, not in every replica
from torch import Tensor, nn

import syncline
from syncline.cluster import ClusterSpec, Rank, launch
from syncline.cluster.isolation import why_not_shaped
from syncline.cluster.processes import fork
from syncline.exchange import Comm, Dense, Exchange, State, Work

pytest.importorskip("torchft")

REPLICAS, EVERY, VICTIM = 3, 4, 3
STARTS, MORE = 4, 4
"""Exchanges before the fault, and after the victim has come back."""
LIGHTHOUSE = {"min_replicas": 2, "join_timeout_ms": 8000, "heartbeat_timeout_ms": 3000}


@dataclass(frozen=True)
class Deadly(Dense):
    """Kills the process in the middle of an exchange if this file contains its number."""

    file: str = ""

    def run(self, flat: Tensor, state: State, comm: Comm) -> Work | None:
        if Path(self.file).exists() and Path(self.file).read_text() == str(os.getpid()):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().run(flat, state, comm)


class Net(nn.Module):
    """With buffers: the running statistics are averaged, and the number of batches is not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 8))

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.layers(inputs)
        return out


def digest_of(net: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> str:
    tensors = [tensor for name, tensor in sorted(net.state_dict().items()) if tensor.is_floating_point()]
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()[:16]


def train(lighthouse: str, number: int, start: int, folder: Path, exchange: Exchange, fault: str) -> int:
    torch.set_num_threads(1)
    os.environ["RUST_LOG"] = "error"
    torch.manual_seed(10 * number + start)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    manager = syncline.elastic.Manager(lighthouse, name=f"replica {number}")
    handle = syncline.attach(net, exchange, optimizer=optimizer, every=EVERY, manager=manager, timeout_s=3.0)
    log = (folder / f"{number}-{start}.jsonl").open("w", buffering=1)
    moments = len(optimizer.state_dict()["state"])
    log.write(json.dumps({"joined": handle.stats().exchanges, "moments": moments}) + "\n")
    was_away, end, stats = start > 0, None, handle.stats()
    while end is None or stats.exchanges < end:
        inputs = torch.randn(16, 32)
        optimizer.zero_grad()
        (net(inputs) - inputs[:, :8].sin()).square().mean().backward()
        optimizer.step()
        before, stats = stats, handle.stats()
        if stats.exchanges == before.exchanges:
            continue
        with handle.synced():
            log.write(json.dumps({"exchange": stats.exchanges, "digest": digest_of(net), **vars_of(stats)}) + "\n")
        was_away = was_away or len(stats.replicas) < REPLICAS or stats.rejoins > 0
        if was_away and end is None and len(stats.replicas) == REPLICAS:
            end = stats.exchanges + MORE
        if number == VICTIM and start == 0 and stats.exchanges == STARTS and fault:
            strike(fault, folder)
    manager.shutdown()
    return 0


def vars_of(stats: Any) -> dict[str, Any]:
    names = ("replicas", "failed", "skipped", "joins", "leaves", "rejoins", "longest_stop_s")
    return {name: getattr(stats, name) for name in names}


def strike(fault: str, folder: Path) -> None:
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "kill in an exchange":
        (folder / "die").write_text(str(os.getpid()))
    else:
        from syncline.cluster import links

        links.cut()
        timer = threading.Timer(float(fault), links.mend)
        timer.daemon = True
        timer.start()


def run(folder: Path, exchange: Exchange, fault: str, *, shaped: bool = False) -> dict[int, list[dict[str, Any]]]:
    """What each replica has logged. Rank 0 has the lighthouse, and each other rank starts its replica again."""

    def main(rank: Rank) -> None:
        if rank.rank == 0:
            from torchft.coordination import LighthouseServer

            os.environ["RUST_LOG"] = "error"
            address = "127.0.0.1"
            if shaped:
                from syncline.cluster import links

                address = links.host_address(0)
            server = LighthouseServer(bind=f"{address}:0", **LIGHTHOUSE)
            port = server.address().rpartition(":")[2]
            (folder / "draft").write_text(f"http://{address}:{port}")
            (folder / "draft").rename(folder / "lighthouse")
            wait_for(lambda: sum((folder / f"{n}.done").exists() for n in range(1, REPLICAS + 1)) == REPLICAS)
            server.shutdown()
            return
        wait_for((folder / "lighthouse").exists)
        lighthouse = (folder / "lighthouse").read_text()
        for start in range(2):
            pid = fork(lambda start=start: train(lighthouse, rank.rank, start, folder, exchange, fault))
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if status != -signal.SIGKILL:
                assert status == 0
                break
        (folder / f"{rank.rank}.done").touch()

    launch(ClusterSpec(hosts=REPLICAS + 1), main, shaped=shaped, deadline_s=80)
    logs: dict[int, list[dict[str, Any]]] = {number: [] for number in range(1, REPLICAS + 1)}
    for path in sorted(folder.glob("*.jsonl")):
        logs[int(path.stem.split("-")[0])] += [json.loads(line) for line in path.read_text().splitlines()]
    return logs


def wait_for(condition: Any, limit_s: float = 75.0) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def check(logs: dict[int, list[dict[str, Any]]]) -> None:
    """All agree after each exchange, the survivors went on without the victim, and it took part again."""
    digests: dict[int, set[str]] = {}
    for entries in logs.values():
        for entry in entries:
            if "digest" in entry:
                digests.setdefault(entry["exchange"], set()).add(entry["digest"])
    assert all(len(found) == 1 for found in digests.values())
    last = max(digests)
    for entries in logs.values():
        assert entries[-1]["exchange"] == last
        assert len(entries[-1]["replicas"]) == REPLICAS
    for survivor in (1, 2):
        exchanged = [entry for entry in logs[survivor] if "exchange" in entry]
        assert [entry["exchange"] for entry in exchanged] == list(range(1, last + 1)), "every exchange, once"
        assert any(len(entry["replicas"]) == REPLICAS - 1 for entry in exchanged), "without the victim"
        assert (exchanged[-1]["leaves"], exchanged[-1]["joins"], exchanged[-1]["rejoins"]) == (1, 1, 0)
        assert exchanged[-1]["longest_stop_s"] < 15


EXCHANGES = {
    "dense": Dense(),
    "oktopk": syncline.OkTopk(density=0.05),
    "topk-chunks in levels": syncline.Hierarchical(across=syncline.ChunkedTopk(density=0.05)),
    "4 bits": syncline.Quantized(bits=4),
}


@pytest.mark.waits
@pytest.mark.parametrize("name", EXCHANGES)
def test_a_killed_replica_is_left_out_and_comes_back(name: str, tmp_path: Path) -> None:
    logs = run(tmp_path, EXCHANGES[name], "kill")
    check(logs)
    again = [entry for entry in logs[VICTIM] if "joined" in entry][1]
    assert again["joined"] > STARTS, "the newest weights"
    assert again["moments"] > 0, "and the optimizer's state"


@pytest.mark.waits
def test_a_replica_that_dies_in_an_exchange_does_not_stop_the_others(tmp_path: Path) -> None:
    logs = run(tmp_path, Deadly(file=str(tmp_path / "die")), "kill in an exchange")
    check(logs)
    assert any(entry.get("failed") for survivor in (1, 2) for entry in logs[survivor])


@pytest.mark.waits
@pytest.mark.skipif(why_not_shaped() is not None, reason=f"links are not emulated here: {why_not_shaped()}")
def test_a_replica_whose_link_was_cut_comes_back(tmp_path: Path) -> None:
    logs = run(tmp_path, Dense(), "8", shaped=True)
    check(logs)
    assert logs[VICTIM][-1]["rejoins"] == 1
