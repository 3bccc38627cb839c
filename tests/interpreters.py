"""Python programs that start at once: each runs in a fork of an interpreter that has imported torch and syncline.

Such a program has an environment, a working directory and standard errors of its own, is `__main__`, and ends as any
interpreter does: uncaught exceptions go to `sys.excepthook`, and what was registered with atexit is run.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_MAX_REQUEST_BYTES = 1 << 20


class Program:
    """A program that was started, with the part of `subprocess.Popen` that tests use."""

    def __init__(self, pid: int, errors: int, status: int) -> None:
        self.pid, self.stderr = pid, os.fdopen(errors, encoding="utf-8")
        self._status, self._process = status, os.pidfd_open(pid)
        self._code: int | None = None

    def poll(self) -> int | None:
        """Its exit code, negative for a signal, or None while it runs."""
        return self._ended_within(0.0)

    def wait(self, timeout: float) -> int:
        code = self._ended_within(timeout)
        if code is None:
            raise TimeoutError(f"process {self.pid} still runs after {timeout:g} s")
        return code

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)

    def close(self) -> None:
        self.stderr.close()
        os.close(self._process)
        os.close(self._status)

    def _ended_within(self, timeout_s: float) -> int | None:
        if self._code is None and select.select([self._status], [], [], timeout_s)[0]:
            self._code = int(os.read(self._status, 100))
        return self._code


class Interpreter:
    """The interpreter that is forked."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests

    @contextlib.contextmanager
    def start(self, arguments: Sequence[str], env: Mapping[str, str], cwd: Path) -> Iterator[Program]:
        """Runs `python arguments…` (a script or `-m module`, and its arguments); kills it at the end of the block."""
        request = json.dumps({"arguments": list(arguments), "env": dict(env), "cwd": str(cwd)}).encode()
        errors, status = os.pipe(), os.pipe()
        socket.send_fds(self._requests, [request], [errors[1], status[1]])
        os.close(errors[1])
        os.close(status[1])
        program = Program(int(self._requests.recv(100)), errors[0], status[0])
        try:
            yield program
        finally:
            program.kill()
            program.wait(10.0)
            program.close()


@contextlib.contextmanager
def interpreter() -> Iterator[Interpreter]:
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, __file__, str(its.fileno())]
    with mine, subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, pass_fds=[its.fileno()]) as forked:
        its.close()
        try:
            yield Interpreter(mine)
        finally:
            mine.close()
            forked.wait(10.0)


def _requested(requests: socket.socket) -> dict[str, Any] | None:
    """Forks for each request, and reports how each fork ended. Returns the request in a fork, None at the end."""
    statuses: dict[int, tuple[int, int]] = {}  # by the process's descriptor: its number, and where its exit code goes
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd in statuses:
                    pid, status = statuses.pop(key.fd)
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    os.write(status, str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
                    os.close(status)
                    continue
                request, descriptors, _, _ = socket.recv_fds(requests, _MAX_REQUEST_BYTES, 2)
                if not request:
                    return None
                errors, status = descriptors
                pid = os.fork()
                if pid == 0:
                    os.dup2(errors, 2)
                    for descriptor in (errors, status, *statuses, *(other for _, other in statuses.values())):
                        os.close(descriptor)
                    requests.close()
                    return json.loads(request)
                os.close(errors)
                process = os.pidfd_open(pid)
                statuses[process] = pid, status
                selector.register(process, selectors.EVENT_READ)
                requests.send(str(pid).encode())


def _run(request: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    first, *others = request["arguments"]
    if first == "-m":
        sys.argv, sys.path[0] = others, request["cwd"]
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = [first, *others], str(Path(first).parent)
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    import torch
    import torch._dynamo  # DDP imports it, and that takes seconds

    import syncline.cli.run  # noqa: F401 - what `syncline run` imports

    torch.set_num_threads(1)
    gc.freeze()
    if (request := _requested(socket.socket(fileno=int(sys.argv[1])))) is not None:
        _run(request)
