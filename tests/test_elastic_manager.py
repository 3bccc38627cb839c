"""What a replica needs from others: a manager, connections of its own, and state without pickle."""

from __future__ import annotations

import gc
import json
import os
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

import syncline
from ddp_helpers import on_ranks
from syncline.cluster import Rank
from syncline.dist.comm import gather_bytes
from syncline.elastic import manager as managers
from syncline.elastic.groups import Connections, connect
from syncline.elastic.standing import Member, Standing
from syncline.elastic.transfer import receive, send
from syncline.errors import ExchangeError, UsageError
from syncline.exchange import Layout, Slot

HOST = "127.0.0.1"


def together(count: int, main: Callable[[Connections], Any], exchange: Any = None) -> list[Any]:
    """What `main` returns on each of some members, which are processes with connections to each other."""

    def on_rank(rank: Rank) -> Any:
        store = managers._store_on(HOST)
        addresses = [data.decode() for data in gather_bytes(dist.group.WORLD, f"{HOST}/{store.port}".encode())]
        members = [Member(f"m{number}:1", address, Standing("same")) for number, address in enumerate(addresses)]
        exchanges = () if exchange is None else (exchange,)
        made = connect("key", members, members[rank.rank].replica, HOST, exchanges, 10.0, 10.0)
        try:
            return main(made)
        finally:
            dist.barrier()
            made.close()

    return on_ranks(count, on_rank)


def test_a_joining_replica_receives_the_same_bits() -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "half": torch.randn(7).bfloat16(),
        "step": torch.tensor(12.0),
        "count": torch.tensor(3),
        "none": torch.empty(0),
        "flags": torch.tensor([True, False]),
        "large": torch.arange(3_000_000, dtype=torch.int32),
    }

    def main(made: Connections) -> Any:
        if made.rank == 0:
            send(made.group, {"number": 3}, tensors)
            return None
        about, received = receive(made.group, lambda shapes: None if shapes["a"] == (3, 5) else "a")
        assert {key: t.dtype for key, t in received.items()} == {key: t.dtype for key, t in tensors.items()}
        assert all(torch.equal(received[key], tensor) for key, tensor in tensors.items())
        return about

    assert together(3, main)[1:] == [{"number": 3}, {"number": 3}]


def test_state_that_does_not_fit_is_refused_before_memory_is_allocated() -> None:
    def main(made: Connections) -> Any:
        if made.rank == 0:
            header = {"about": {}, "tensors": {"a": {"dtype": "float32", "shape": [99999999999]}}, "digest": ""}
            gather_bytes(made.group, json.dumps(header).encode())
            return None
        with pytest.raises(ExchangeError) as refused:
            receive(made.group, lambda shapes: f"a has the shape {shapes['a']}")
        return str(refused.value)

    assert "a has the shape (99999999999,)" in together(2, main)[1]


def test_a_member_that_closes_its_connections_ends_the_collectives_of_the_others() -> None:
    """Also of those that do not wait for it directly: otherwise they would wait for the timeout of 10 s."""

    def main(made: Connections) -> Any:
        flat = torch.ones(1_000_000)
        made.ready.all_reduce(flat).wait()
        try:
            if made.rank > 0:
                made.ready.all_reduce(flat).wait()
        except RuntimeError as error:
            return str(error)
        finally:
            made.close()
        return float(flat[0])

    alive, *failed = together(4, main)
    assert alive == 4.0
    assert all(isinstance(error, str) and "Timed out" not in error for error in failed)


@pytest.mark.parametrize(
    "exchange",
    [syncline.Dense(), syncline.OkTopk(density=0.1), syncline.Hierarchical(across=syncline.Quantized(bits=4))],
    ids=["dense", "sparse", "in levels"],
)
def test_exchanges_run_on_connections_without_a_default_process_group(exchange: Any) -> None:
    def main(made: Connections) -> list[float]:
        layout = Layout((Slot("w", (4096,), (1,), 0, 4096),), torch.float32, torch.device("cpu"))
        state = exchange.prepare(layout, made.ready)
        flat = torch.randn(4096, generator=torch.Generator().manual_seed(made.rank))
        averages = state.average(1 / 3)
        state.begin(0)
        if not averages:
            flat.mul_(1 / 3)
        work = exchange.run(flat, state, made.ready)
        if work is not None:
            work.wait()
        return [float(value) for value in flat]

    first, *others = together(3, main, exchange)
    assert all(first == other for other in others)


def test_a_store_listens_on_one_address_only() -> None:
    import psutil

    store = managers._store_on(HOST)
    listening = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"]
    assert [address.ip for address in listening if address.port == store.port] == [HOST]


# --- bad input --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lighthouse", ["", "10.0.0.1:29510", "https://10.0.0.1:1", "http://10.0.0.1", 7, "http://a:b"])
def test_the_address_of_a_lighthouse_is_checked(lighthouse: Any) -> None:
    with pytest.raises(UsageError, match=r"lighthouse is .* as http://HOST:PORT"):
        syncline.elastic.Manager(lighthouse)


def test_an_interface_must_exist() -> None:
    with pytest.raises(UsageError, match=r"interface is '203.0.113.7', which this host does not have"):
        syncline.elastic.Manager("http://127.0.0.1:9", interface="203.0.113.7")


def test_a_lighthouse_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchft")
    monkeypatch.setattr(managers, "_CONNECT_S", 0.3)
    with pytest.raises(UsageError, match=r"the lighthouse at http://127.0.0.1:9 does not answer"):
        syncline.elastic.Manager("http://127.0.0.1:9")


def unconnected() -> Any:
    made = object.__new__(managers.Manager)
    made.is_shut_down = made.is_used = False
    return made


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "with a manager, updates are exchanged: pass optimizer= too"),
        ({"optimizer": True}, "every is 1: with a manager, pass the number of steps between exchanges, 2 or more"),
        ({"optimizer": True, "every": 5, "delay": 2}, "delay cannot be used with a manager: leave it out"),
        ({"optimizer": True, "every": 5, "warmup": 9}, "warmup cannot be used with a manager: leave it out"),
        ({"optimizer": True, "every": 5, "overlap": "forward"}, "overlap cannot be used with a manager: leave it out"),
        ({"optimizer": True, "every": 5, "lanes": 2}, "lanes cannot be used with a manager: leave it out"),
        ({"optimizer": True, "every": 5, "manager": "http://10.0.0.1:1"}, "manager is a builtins.str: that is not"),
    ],
)
def test_arguments_that_do_not_fit_a_manager_are_refused(options: dict[str, Any], message: str) -> None:
    net = nn.Linear(3, 2)
    options = {"manager": unconnected(), **options}
    if "optimizer" in options:
        options["optimizer"] = AdamW(net.parameters())
    with pytest.raises(UsageError, match=message):
        syncline.attach(net, syncline.Dense(), **options)


def test_torchfts_own_manager_is_refused() -> None:
    torchft = pytest.importorskip("torchft")
    theirs = object.__new__(torchft.Manager)
    with pytest.raises(UsageError, match=r"torchft's own Manager cannot be used: pass a syncline.elastic.Manager"):
        syncline.attach(nn.Linear(3, 2), syncline.Dense(), manager=theirs)


# --- one replica with a real lighthouse -------------------------------------------------------------------------


def with_lighthouse(least: int, main: Callable[[str], Any]) -> Any:
    """What `main` returns in a process that has a lighthouse, which needs this many replicas for a quorum."""
    pytest.importorskip("torchft")

    def on_rank(rank: Rank) -> Any:
        from torchft.coordination import LighthouseServer

        os.environ["RUST_LOG"] = "error"
        server = LighthouseServer(bind=f"{HOST}:0", min_replicas=least, join_timeout_ms=100)
        try:
            return main(f"http://{HOST}:{server.address().rpartition(':')[2]}")
        finally:
            server.shutdown()

    return on_ranks(1, on_rank)[0]


def attached(lighthouse: str) -> tuple[nn.Module, AdamW, Any]:
    net = nn.Linear(3, 2)
    optimizer = AdamW(net.parameters(), lr=0.1)
    manager = syncline.elastic.Manager(lighthouse, name="a")
    return net, optimizer, syncline.attach(net, syncline.Dense(), optimizer=optimizer, every=2, manager=manager)


def values(net: nn.Module) -> list[float]:
    return [float(value) for parameter in net.parameters() for value in parameter.detach().flatten()]


def step(net: nn.Module, optimizer: AdamW) -> None:
    optimizer.zero_grad()
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def test_a_request_that_a_replica_has_given_up_does_not_speak_for_it_any_more() -> None:
    """Otherwise it might contribute to an exchange with weights that the others do not have."""

    def main(lighthouse: str) -> Any:
        first, second = (syncline.elastic.Manager(lighthouse, name=name) for name in "ab")
        old, new = Standing("same", 7, (7, 3, "old")), Standing("same")
        answer = first.ask(new)
        first.ask(old)  # replaces the newer statement in the lighthouse
        for _ in range(20):  # quorums with both, until one has the newer statement
            second.ask(Standing("same")).result(10)
            if answer.done():
                break
        own = [member.standing for member in answer.result(10) if member.replica == first.replica]
        for manager in (first, second):
            manager.shutdown()
        return own == [new]

    assert with_lighthouse(2, main)


def test_a_result_that_was_applied_to_some_of_the_weights_is_not_applied_to_them_again() -> None:
    def main(lighthouse: str) -> Any:
        net, optimizer, handle = attached(lighthouse)
        weights = handle._elastic._weights
        commit, begun = weights.commit, handle.stats().exchanges

        def fail_once(result: Any, steps: int) -> bool:
            weights.commit = commit
            commit(result, steps)
            once.append(values(net))
            raise RuntimeError("out of memory")

        weights.commit, once = fail_once, list[Any]()
        step(net, optimizer)
        step(net, optimizer)
        with handle.synced():
            agreed = values(net)
        stats = handle.stats()
        step(net, optimizer)
        step(net, optimizer)
        more = handle.stats().exchanges - stats.exchanges
        handle.manager.shutdown()
        return begun, stats.failed, more, once == [agreed]

    assert with_lighthouse(1, main) == [0, 1, 1, True]


def test_a_handle_that_was_replaced_cannot_detach_the_new_one() -> None:
    def main(lighthouse: str) -> Any:
        net, optimizer, old = attached(lighthouse)
        syncline.attach(net, syncline.Dense(), optimizer=optimizer, every=2, manager=old.manager)
        with pytest.raises(UsageError, match="this handle is detached, or another attach has replaced it"):
            old.detach()
        used = old.manager.is_used
        counted = weakref.ref(net)
        old.manager.shutdown()
        del net, old, optimizer
        gc.collect()
        return used, counted() is None

    assert with_lighthouse(1, main) == [True, True]
