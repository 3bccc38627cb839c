"""Run a Python function on the ranks of an emulated cluster, forked from one process that has imported torch.

The results of ranks, and of commands, reach the caller through one pipe each, as lines of JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
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

from syncline.cluster.environment import reserved_port, variables_of, wait_for_listener
from syncline.cluster.isolation import running_hosts, why_not_shaped
from syncline.cluster.processes import describe_exit, die_with_parent, ended_children, fork
from syncline.cluster.spec import ClusterSpec
from syncline.errors import ClusterError, SynclineError, UsageError

RankMain = Callable[["Rank"], Any]
"""Function that a rank runs. Its result must be serialisable as JSON."""
OnEvent = Callable[[int, Any], None]
"""Called with the rank and the event."""
Process = tuple[int, Callable[[int], int]]
"""The host of a process, and its function: takes the pipe for messages and returns an exit status."""
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

    def say(self, event: Any) -> None:
        """Send an event to the launching process, for example progress."""
        send(self._pipe, {"event": event})

    @property
    def device(self) -> torch.device:
        on_gpu = self.spec.device == "cuda"
        if on_gpu and not torch.cuda.is_available():
            raise UsageError("the cluster's device is cuda, but torch finds no GPU here: use cpu")
        return torch.device("cuda", 0) if on_gpu else torch.device("cpu")

    def init_process_group(self, timeout_s: float = 60.0) -> None:
        """Make the default process group. On CUDA, the rank's device becomes the current device."""
        if self.spec.device == "cuda":
            torch.cuda.set_device(self.device)
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        timeout, first = timedelta(seconds=timeout_s), self.rank == 0
        try:  # the store itself would listen on every interface, and not only on that of its host
            listener = socket.create_server((address, port)).detach() if first else None
            if not first:
                wait_for_listener(address, port, timeout_s)
        except OSError as error:
            problem = f"rank 0 cannot be reached at {address}, port {port}, within {timeout_s:g} s"
            raise ClusterError(f"{problem}: {error.strerror or error}") from error
        store = TCPStore(address, port, self.world_size, first, timeout=timeout, master_listen_fd=listener)
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

    def take(self, on_event: OnEvent | None, data: bytes) -> None:
        """Read what the process or its host has sent."""
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            try:
                message = msgspec.json.decode(line)
            except msgspec.DecodeError:
                continue  # empty, or the process was killed while it wrote, which its host reports next
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


def launch(spec: ClusterSpec, main: RankMain, *, deadline_s: float = 120.0, **options: Any) -> list[Any]:
    """Run `main(rank)` on every rank as `launch_outcomes` does, and return the results in rank order.

    Raises:
        RankFailedError: If a rank raised, died, or ran past the deadline.
    """
    outcomes = launch_outcomes(spec, main, deadline_s=deadline_s, **options)
    if any(outcome.error for outcome in outcomes):
        raise RankFailedError(outcomes, deadline_s)
    return [outcome.value for outcome in outcomes]


def launch_outcomes(
    spec: ClusterSpec,
    main: RankMain,
    *,
    deadline_s: float,
    grace_s: float = 5.0,
    on_event: OnEvent | None = None,
    shaped: bool | None = None,
) -> list[Outcome]:
    """Run `main(rank)` on every rank and return the outcomes in rank order.

    All ranks are killed at the deadline, or `grace_s` after one has failed. Each `Rank.say` calls `on_event`. With
    `shaped`, links are emulated; by default, if this machine can.
    """
    shaped = why_not_shaped() is None if shaped is None else shaped
    with reserved_port(shaped) as port:
        processes: list[Process] = []
        for number, (host, local_rank) in enumerate(spec.slots):
            rank = Rank(number, spec.world_size, host, local_rank, spec, shaped)
            processes.append((host, functools.partial(_run_rank, rank, port, main)))
        return run_processes(spec, processes, shaped=shaped, deadline_s=deadline_s, grace_s=grace_s, on_event=on_event)


def _run_rank(rank: Rank, port: int, main: RankMain, pipe: int) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launching process handles Ctrl-C
    os.environ.update(variables_of(rank.spec, rank.host, rank.local_rank, shaped=rank.shaped, port=port))
    torch.set_num_threads(1)  # ranks share the cores, and a forked OpenMP pool would hang
    try:
        if rank.spec.device == "cuda" and torch.cuda._is_in_bad_fork():
            cause = "the launching process has initialised CUDA (torch.cuda.is_available() is enough)"
            raise UsageError(f"{cause}, so its forked ranks cannot: launch them before that, or from a new process")
        send(pipe, {"value": main(dataclasses.replace(rank, _pipe=pipe))})
    except BaseException as error:  # noqa: BLE001 - reported to the launching process, SystemExit too
        details = "" if isinstance(error, SynclineError) else traceback.format_exc()
        send(pipe, {"error": f"{type(error).__name__}: {error}", "traceback": details})
        return 1
    finally:
        if dist.is_initialized():
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
    return 0


def send(pipe: int, message: dict[str, Any]) -> None:
    data = b"\n" + msgspec.json.encode(message) + b"\n"  # another process may have ended in the middle of a line
    with _sending:  # threads share the pipe, and long messages take several writes
        while data:
            data = data[os.write(pipe, data) :]


def run_processes(
    spec: ClusterSpec,
    processes: Sequence[Process],
    *,
    shaped: bool,
    grace_s: float,
    deadline_s: float = math.inf,
    on_event: OnEvent | None = None,
    outputs: Mapping[tuple[int, int], Callable[[bytes], None]] | None = None,
) -> list[Outcome]:
    """Run processes on their hosts until all have ended, or until the grace period after a failure is over.

    Args:
        outputs: None for ranks, which send their results. For commands, whose exit codes are the results, and which all
            get SIGTERM after the first failure: pipes with their output, and functions for its data, with `b""` last.
    """
    are_commands, outputs = outputs is not None, outputs or {}
    pipes = [os.pipe() for _ in processes]
    stop_read, stop_write = os.pipe()

    def host_main(host: int) -> int:
        own = [(main, pipe) for (owner, main), (_, pipe) in zip(processes, pipes, strict=True) if owner == host]
        return _run_on_host(own, stop_read, are_commands)

    with contextlib.ExitStack() as cleanup:
        for descriptor in itertools.chain(*pipes, *outputs, (stop_read, stop_write)):
            cleanup.callback(os.close, descriptor)
        hosts = cleanup.enter_context(running_hosts(spec, host_main, shaped=shaped))
        selector = cleanup.enter_context(selectors.DefaultSelector())
        selector.register(hosts.control, selectors.EVENT_READ)
        for (pipe, _), take in outputs.items():
            os.set_blocking(pipe, False)
            selector.register(pipe, selectors.EVENT_READ, take)
        outcomes = [Outcome(index) for index in range(len(processes))]
        for (pipe, _), outcome in zip(pipes, outcomes, strict=True):
            selector.register(pipe, selectors.EVENT_READ, functools.partial(outcome.take, on_event))
        end, failed, problem = time.monotonic() + deadline_s, False, "still running at the deadline"
        while not all(outcome.finished for outcome in outcomes) and (left := end - time.monotonic()) > 0:
            for key, _ in selector.select(min(left, 3600.0)):
                if key.fd == hosts.control:  # what the processes have sent before is in this selection too
                    end, problem = -math.inf, "a host died"
                else:
                    key.data(os.read(key.fd, 1 << 20))
            if not failed and any(outcome.error for outcome in outcomes):
                failed, end = True, min(end, time.monotonic() + grace_s)
                problem = "still running when another rank failed"
                if are_commands:
                    os.write(stop_write, b"1" * spec.hosts)
        for outcome in outcomes:
            outcome.finish(error=problem)
        hosts.wait(min(end - time.monotonic(), grace_s))
        hosts.kill()
        for (pipe, _), take in outputs.items():
            with contextlib.suppress(BlockingIOError):
                while data := os.read(pipe, 1 << 16):
                    take(data)
            take(b"")
        return outcomes


def _run_on_host(processes: Sequence[tuple[Callable[[int], int], int]], stop: int, are_commands: bool) -> int:
    """Run the processes of a host, and report on their pipes how they have ended."""

    def start(parent: int, main: Callable[[int], int], pipe: int) -> int:
        die_with_parent(parent)
        return main(pipe)

    running = {fork(functools.partial(start, os.getpid(), main, pipe)): pipe for main, pipe in processes}

    def terminate() -> None:
        os.read(stop, 1)
        for pid in list(running):
            with contextlib.suppress(ProcessLookupError):  # a process that is just being started has no group yet
                (os.killpg if os.getpgid(pid) == pid else os.kill)(pid, signal.SIGTERM)

    threading.Thread(target=terminate, daemon=True).start()
    for pid, code in ended_children(list(running)):
        how = describe_exit(code)
        error = f"{how} before it returned" if not are_commands else how if code else None
        send(running.pop(pid), {"error": error})
    return 0
