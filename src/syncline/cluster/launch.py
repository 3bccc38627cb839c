"""Run a Python function on the ranks of an emulated cluster, forked from one process that has imported torch.

The results of ranks, and of commands, reach the caller through one pipe each, as lines of JSON.
"""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from syncline.cluster import linux
from syncline.cluster.environment import MASTER_PORT, host_variables, rank_variables, reserved_port, wait_for_listener
from syncline.cluster.isolation import running_hosts, why_not_shaped
from syncline.cluster.processes import describe_exit, fork, reap
from syncline.cluster.spec import ClusterSpec
from syncline.errors import ClusterError, SynclineError, UsageError

RankMain = Callable[["Rank"], Any]
"""Function that a rank runs. Its result must be serialisable as JSON."""
OnEvent = Callable[[int, Any], None]
"""Called with the rank and the event."""
_sending = threading.Lock()


@dataclass(frozen=True)
class Rank:
    """The rank of the calling process in the emulated cluster."""

    rank: int
    world_size: int
    host: int
    local_rank: int
    spec: ClusterSpec
    shaped: bool
    _pipe: int = -1
    _port: int = MASTER_PORT

    def say(self, event: Any) -> None:
        """Send an event to the launching process, for example progress."""
        send(self._pipe, {"event": event})

    @property
    def device(self) -> torch.device:
        if self.spec.device == "cpu":
            return torch.device("cpu")
        if not torch.cuda.is_available():
            raise UsageError("the cluster's device is cuda, but torch finds no GPU here: use cpu")
        return torch.device("cuda", 0)

    def init_process_group(self, timeout_s: float = 60.0) -> None:
        """Make the default process group. On CUDA, the rank's device becomes the current device.

        Rank 0 serves the store, on the address of its own host only.
        """
        if self.spec.device == "cuda":
            torch.cuda.set_device(self.device)
        address = os.environ["MASTER_ADDR"]
        timeout = timedelta(seconds=timeout_s)
        options: dict[str, Any] = {}
        if self.rank == 0:  # the store itself would listen on every interface
            options["master_listen_fd"] = socket.create_server((address, self._port)).detach()
        else:
            try:
                wait_for_listener(address, self._port, timeout_s)
            except OSError as error:
                problem = f"rank 0 cannot be reached at {address}, port {self._port}, within {timeout_s:g} s"
                raise ClusterError(f"{problem}: {error.strerror or error}") from error
        store = TCPStore(address, self._port, self.world_size, is_master=self.rank == 0, timeout=timeout, **options)
        backend = "nccl" if self.spec.device == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world_size, timeout=timeout)


@dataclass
class Outcome:
    """The result of one rank, or of one command."""

    rank: int
    value: Any = None
    error: str | None = None
    """Type and message of the exception, or how the process ended."""
    traceback: str = ""
    """Empty for a `SynclineError`, whose message needs none."""
    finished: bool = False
    finished_at_s: float = 0.0
    """`time.monotonic()` when it ended."""
    _buffer: bytes = field(default=b"", repr=False)

    def take(self, data: bytes, on_event: OnEvent | None) -> None:
        """Read what the process or its host has sent."""
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            try:
                message = msgspec.json.decode(line)
            except msgspec.DecodeError:
                continue  # incomplete: the process was killed while it wrote, which its host reports next
            if "event" not in message:
                self.finish(**message)
            elif on_event is not None:
                on_event(self.rank, message["event"])

    def finish(self, **result: Any) -> None:
        """Record the first result. Later ones, such as the exit of the process, are consequences of it."""
        if not self.finished:
            for name, value in result.items():
                setattr(self, name, value)
            self.finished, self.finished_at_s = True, time.monotonic()


def first_failure(outcomes: Sequence[Outcome]) -> Outcome | None:
    return min((outcome for outcome in outcomes if outcome.error), key=lambda o: o.finished_at_s, default=None)


class RankFailedError(ClusterError):
    """At least one rank raised, died, or ran past the deadline."""

    def __init__(self, outcomes: Sequence[Outcome], deadline_s: float) -> None:
        self.outcomes = list(outcomes)
        first = first_failure(outcomes) or outcomes[0]
        bad = [outcome.rank for outcome in outcomes if outcome.error]
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
    on_event: OnEvent | None = None,
    shaped: bool | None = None,
) -> list[Any]:
    """Run `main(rank)` on every rank and return the results in rank order.

    Args:
        deadline_s: Time after which all ranks are killed.
        grace_s: Time that the other ranks have to end after one has failed.
        on_event: Called with the rank and the event for each `Rank.say`.
        shaped: Whether to emulate links. Default: if this machine can.

    Raises:
        RankFailedError: If a rank raised, died, or ran past the deadline.
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
    on_event: OnEvent | None = None,
    shaped: bool | None = None,
) -> list[Outcome]:
    """Like `launch`, but return the outcome of every rank instead of raising."""
    shaped = why_not_shaped() is None if shaped is None else shaped
    # Without namespaces, ranks share the machine's ports.
    with contextlib.nullcontext(MASTER_PORT) if shaped else reserved_port() as port:
        pipes = [os.pipe() for _ in range(spec.world_size)]
        with running_hosts(
            spec, lambda host: _run_ranks(spec, host, main, shaped, port, pipes), shaped=shaped, pipes=pipes
        ) as hosts:
            read_ends = [read_end for read_end, _ in pipes]
            outcomes = collect(read_ends, deadline_s=deadline_s, grace_s=grace_s, on_event=on_event)
            if not any(outcome.error for outcome in outcomes):
                hosts.wait(grace_s)
            return outcomes


def _run_ranks(
    spec: ClusterSpec, host: int, main: RankMain, shaped: bool, port: int, pipes: list[tuple[int, int]]
) -> int:
    """Run on a host: start its ranks, and report those that ended without a report of their own."""
    parent = os.getpid()
    pipe_of: dict[int, int] = {}
    for local_rank, number in enumerate(spec.ranks_of(host)):
        pipe = pipes[number][1]
        rank = Rank(number, spec.world_size, host, local_rank, spec, shaped, pipe, port)
        pipe_of[fork(functools.partial(_rank_process, rank, parent, main, pipes))] = pipe
    for read_end, write_end in pipes:
        os.close(read_end)
        if write_end not in pipe_of.values():
            os.close(write_end)

    def ended(pipe: int, code: int) -> None:
        if code != 0:
            os.write(pipe, b"\n")  # the rank may have ended in the middle of a line
        send(pipe, {"error": f"{describe_exit(code)} before it returned"})
        os.close(pipe)

    return reap(pipe_of, ended)


def _rank_process(rank: Rank, parent: int, main: RankMain, pipes: list[tuple[int, int]]) -> int:
    linux.die_with_parent(parent)
    for number, (read_end, write_end) in enumerate(pipes):
        os.close(read_end)
        if number != rank.rank:
            os.close(write_end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launching process handles Ctrl-C
    os.environ.update(host_variables(rank.spec, rank.host, shaped=rank.shaped, port=rank._port))
    os.environ.update(rank_variables(rank.spec, rank.host, rank.local_rank))
    torch.set_num_threads(1)  # ranks share the cores, and a forked OpenMP pool would hang
    try:
        if rank.spec.device == "cuda" and torch.cuda._is_in_bad_fork():
            raise UsageError(
                "the launching process has initialised CUDA (torch.cuda.is_available() is enough), so ranks forked "
                "from it cannot use CUDA: launch them before that, or from a new process"
            )
        value = main(rank)
        send(rank._pipe, {"value": value})
    except BaseException as error:  # noqa: BLE001 - reported to the launching process, SystemExit too
        details = "" if isinstance(error, SynclineError) else traceback.format_exc()
        send(rank._pipe, {"error": f"{type(error).__name__}: {error}", "traceback": details})
        return 1
    finally:
        if dist.is_initialized():
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
    return 0


def send(pipe: int, message: dict[str, Any]) -> None:
    data = msgspec.json.encode(message) + b"\n"
    with _sending:  # threads share the pipe, and long messages take several writes
        while data:
            data = data[os.write(pipe, data) :]


def collect(
    pipes: Sequence[int],
    *,
    deadline_s: float,
    grace_s: float,
    on_event: OnEvent | None = None,
    on_failure: Callable[[], object] = lambda: None,
    outputs: Mapping[int, Callable[[bytes], None]] | None = None,
) -> list[Outcome]:
    """Collect the outcomes until all processes have ended, or until the grace period after a failure is over.

    Args:
        on_failure: Called after the first failure.
        outputs: Functions for the data of other pipes.
    """
    outcomes = [Outcome(rank) for rank in range(len(pipes))]
    end = time.monotonic() + deadline_s
    failed = ending = False
    reading = set(pipes)
    with selectors.DefaultSelector() as selector:
        for pipe, reader in [*zip(pipes, outcomes, strict=True), *(outputs or {}).items()]:
            selector.register(pipe, selectors.EVENT_READ, reader)
        while reading and (left := end - time.monotonic()) > 0:
            for key, _ in selector.select(min(left, 3600.0)):
                data = os.read(key.fd, 1 << 20)
                if not data:
                    selector.unregister(key.fd)
                    reading.discard(key.fd)
                if not isinstance(key.data, Outcome):
                    key.data(data)
                elif data:
                    key.data.take(data, on_event)
                else:
                    key.data.finish(error="its host died")
            if not failed and any(outcome.error for outcome in outcomes):
                failed = True
                on_failure()
            if not ending and (failed or all(outcome.finished for outcome in outcomes)):
                ending = True
                end = min(end, time.monotonic() + grace_s)
    for outcome in outcomes:
        outcome.finish(error=f"still running {'when another rank failed' if failed else 'at the deadline'}")
    return outcomes
