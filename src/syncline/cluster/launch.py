"""Runs a Python function as the ranks of an emulated cluster, forked from one process that has imported torch."""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import signal
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from syncline.cluster import linux
from syncline.cluster.isolation import LOOPBACK, MASTER_PORT, _run_and_exit, start_hosts, why_not_shaped
from syncline.cluster.spec import ClusterSpec
from syncline.errors import ClusterError

RankMain = Callable[["Rank"], Any]
"""What a rank runs; what it returns must be JSON."""


@dataclass(frozen=True)
class Rank:
    """Where the calling process sits in the emulated cluster."""

    rank: int
    world_size: int
    host: int
    local_rank: int
    spec: ClusterSpec
    shaped: bool
    _pipe: int = -1
    _listener: socket.socket | None = None
    _port: int = MASTER_PORT

    def say(self, event: Any) -> None:
        """Sends something to the launching process while the rank goes on, for progress."""
        _send(self._pipe, {"event": event})

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0) if self.spec.device == "cuda" else torch.device("cpu")

    def init_process_group(self, timeout_s: float = 60.0) -> None:
        """Joins the default process group, over a store that rank 0 serves on its own host only."""
        address = os.environ["MASTER_ADDR"]
        timeout = timedelta(seconds=timeout_s)
        options: dict[str, Any] = {}
        if self.rank == 0:  # the store itself would listen on every interface
            listener = self._listener or socket.create_server((address, self._port))
            options["master_listen_fd"] = listener.detach()
        store = TCPStore(address, self._port, self.world_size, is_master=self.rank == 0, timeout=timeout, **options)
        backend = "nccl" if self.spec.device == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world_size, timeout=timeout)


@dataclass
class Outcome:
    """What became of one rank."""

    rank: int
    value: Any = None
    error: str | None = None
    """One line: the exception's type and message."""
    traceback: str = ""
    finished: bool = False
    finished_at_s: float = 0.0
    """`time.monotonic()` when it ended."""
    _buffer: bytes = field(default=b"", repr=False)


class RankFailedError(ClusterError):
    """At least one rank raised, died, or ran past the deadline."""

    def __init__(self, outcomes: Sequence[Outcome], deadline_s: float) -> None:
        self.outcomes = list(outcomes)
        first = min((o for o in outcomes if o.error), key=lambda o: o.finished_at_s)
        bad = [o.rank for o in outcomes if o.error]
        text = f"rank {first.rank}: {first.error}"
        if len(bad) > 1:
            text += f" (ranks {bad} failed; this was the first; the deadline was {deadline_s:g} s)"
        super().__init__(f"{text}\n{first.traceback}" if first.traceback else text)


def launch(
    spec: ClusterSpec,
    main: RankMain,
    *,
    deadline_s: float = 120.0,
    grace_s: float = 5.0,
    on_event: Callable[[int, Any], None] | None = None,
    shaped: bool | None = None,
) -> list[Any]:
    """Runs `main(rank)` on every rank and returns what each returned, in rank order.

    The first rank that fails gives the others `grace_s` to end by themselves; at `deadline_s` everything is killed.
    """
    outcomes = launch_outcomes(spec, main, deadline_s=deadline_s, grace_s=grace_s, on_event=on_event, shaped=shaped)
    if any(outcome.error for outcome in outcomes):
        raise RankFailedError(outcomes, deadline_s)
    return [outcome.value for outcome in outcomes]


def launch_outcomes(
    spec: ClusterSpec,
    main: RankMain,
    *,
    deadline_s: float,
    grace_s: float,
    on_event: Callable[[int, Any], None] | None = None,
    shaped: bool | None = None,
) -> list[Outcome]:
    """Like `launch`, for callers that want to know how each rank failed."""
    shaped = why_not_shaped() is None if shaped is None else shaped
    pipes = [os.pipe() for _ in range(spec.world_size)]
    # Loopback ranks share the machine's ports: the kernel picks a free one, and rank 0 inherits the socket.
    listener = None if shaped else socket.create_server((LOOPBACK, 0))

    def host_main(host: int) -> int:
        return _run_ranks(spec, host, main, shaped, pipes, listener)

    hosts = start_hosts(spec, host_main, shaped=shaped)
    try:
        for _, write_end in pipes:
            os.close(write_end)
        if listener is not None:
            listener.close()
        hosts.wait_until_ready()
        return _collect([read_end for read_end, _ in pipes], deadline_s, grace_s, on_event)
    finally:
        hosts.kill()
        for read_end, _ in pipes:
            os.close(read_end)


def rank_environment(spec: ClusterSpec, host: int, shaped: bool) -> dict[str, str]:
    """What every process of a host needs to find the others."""
    if not shaped:
        return {"MASTER_ADDR": LOOPBACK, "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    from syncline.cluster import links

    first_host = next(h for h in range(spec.hosts) if 0 in spec.ranks_of(h))
    return {
        "MASTER_ADDR": links.host_address(first_host),
        "MASTER_PORT": str(MASTER_PORT),
        "GLOO_SOCKET_IFNAME": links.HOST_INTERFACE,
        "NCCL_SOCKET_IFNAME": links.HOST_INTERFACE,
        "TP_SOCKET_IFNAME": links.HOST_INTERFACE,
        "SYNCLINE_HOST": str(host),
        "SYNCLINE_HOST_ADDR": links.host_address(host),
    }


def _run_ranks(
    spec: ClusterSpec,
    host: int,
    main: RankMain,
    shaped: bool,
    pipes: list[tuple[int, int]],
    listener: socket.socket | None,
) -> int:
    port = MASTER_PORT if listener is None else listener.getsockname()[1]
    children = []
    for local_rank, number in enumerate(spec.ranks_of(host)):
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            for other, (read_end, write_end) in enumerate(pipes):
                os.close(read_end)
                if other != number:
                    os.close(write_end)
            rank = Rank(
                rank=number,
                world_size=spec.world_size,
                host=host,
                local_rank=local_rank,
                spec=spec,
                shaped=shaped,
                _pipe=pipes[number][1],
                _listener=listener,
                _port=port,
            )
            _run_and_exit(functools.partial(_rank_process, rank, parent, main), -1)
        children.append(pid)
    for _, write_end in pipes:
        os.close(write_end)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    return 1 if any(statuses) else 0


def _rank_process(rank: Rank, parent: int, main: RankMain) -> int:
    linux.die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launching process decides
    os.environ.update(rank_environment(rank.spec, rank.host, rank.shaped))
    os.environ.update(
        RANK=str(rank.rank),
        WORLD_SIZE=str(rank.world_size),
        LOCAL_RANK=str(rank.local_rank),
        LOCAL_WORLD_SIZE=str(rank.spec.per_host[rank.host]),
        MASTER_PORT=str(rank._port),
    )
    if rank.spec.device == "cuda":
        os.environ["NCCL_HOSTID"] = f"syncline-{rank.rank}"  # lets ranks of one GPU form a communicator
    torch.set_num_threads(1)  # ranks share the machine's cores; and a forked OpenMP pool would hang
    try:
        value = main(rank)
        _send(rank._pipe, {"value": value})
    except Exception as error:  # noqa: BLE001 - reported to the launching process, whatever it is
        _send(
            rank._pipe,
            {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()},
        )
        return 1
    finally:
        if dist.is_initialized():
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
    return 0


def _send(pipe: int, message: dict[str, Any]) -> None:
    data = msgspec.json.encode(message) + b"\n"
    while data:
        data = data[os.write(pipe, data) :]


def _collect(
    pipes: list[int], deadline_s: float, grace_s: float, on_event: Callable[[int, Any], None] | None
) -> list[Outcome]:
    outcomes = [Outcome(rank) for rank in range(len(pipes))]
    end = time.monotonic() + deadline_s
    failed = False
    with selectors.DefaultSelector() as selector:
        for pipe, outcome in zip(pipes, outcomes, strict=True):
            selector.register(pipe, selectors.EVENT_READ, outcome)
        while selector.get_map() and (left := end - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                outcome = key.data
                data = os.read(key.fd, 1 << 20)
                if not data:
                    selector.unregister(key.fd)
                    if not outcome.finished:
                        _finish(outcome, error="died without a word (killed, or out of memory)")
                _take(outcome, data, on_event)
                if outcome.error and not failed:
                    failed = True
                    end = min(end, time.monotonic() + grace_s)
    for outcome in outcomes:
        if not outcome.finished:
            why = "still running when another rank failed" if failed else "still running at the deadline"
            _finish(outcome, error=why)
    return outcomes


def _take(outcome: Outcome, data: bytes, on_event: Callable[[int, Any], None] | None) -> None:
    *lines, outcome._buffer = (outcome._buffer + data).split(b"\n")
    for line in lines:
        message = msgspec.json.decode(line)
        if "event" in message:
            if on_event is not None:
                on_event(outcome.rank, message["event"])
        else:
            outcome.value = message.get("value")
            _finish(outcome, message.get("error"), message.get("traceback", ""))


def _finish(outcome: Outcome, error: str | None, trace: str = "") -> None:
    outcome.error, outcome.traceback = error, trace
    outcome.finished, outcome.finished_at_s = True, time.monotonic()
