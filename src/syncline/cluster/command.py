"""Run a command on every emulated host, as a cluster's scheduler would: `torchrun train.py`, a shell, MPI.

Output is shown line by line, with the name of its host. If the command fails on one host, all others are terminated.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import shutil
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from syncline.cluster.environment import (
    MASTER_PORT,
    OUTER_JOB,
    host_variables,
    rank_variables,
    reserved_port,
    torchrun_variables,
)
from syncline.cluster.isolation import running_hosts, unshaped_notice, why_not_shaped
from syncline.cluster.launch import collect, first_failure, send
from syncline.cluster.processes import describe_exit, reap
from syncline.cluster.spec import ClusterSpec
from syncline.errors import UsageError

INTERRUPTED = 130
_COLOURS = (36, 33, 35, 32, 34, 31)
_LONGEST_LINE_BYTES = 1 << 16


@dataclass(frozen=True)
class Command:
    """One process to start: once per host, or once per rank."""

    host: int
    name: str
    """Prefix of its output."""
    location: str
    """Its host and rank, for error messages."""
    variables: Mapping[str, str]
    """Environment variables, in addition to the caller's."""


def run_command(
    spec: ClusterSpec, argv: Sequence[str], *, per_rank: bool = False, grace_s: float = 5.0, announce: str = ""
) -> int:
    """Run `argv` on every host, or once per rank.

    Args:
        grace_s: After the first failure, the other commands get SIGTERM, and SIGKILL after this time.
        announce: A line for standard error, written after the arguments were checked.

    Returns:
        0, or 1 if the command failed anywhere, or 130 after Ctrl-C.
    """
    if spec.rank_order != "host" and not per_rank:
        raise UsageError(f"--rank-order {spec.rank_order} needs --per-rank: torchrun numbers ranks host by host")
    program = _find(argv)
    reason = why_not_shaped()
    if announce:
        sys.stderr.write(f"{announce}\n")
    if reason is not None:
        sys.stderr.write(f"syncline: {unshaped_notice(reason)}\n")
    with contextlib.nullcontext(MASTER_PORT) if reason is None else reserved_port() as port:
        commands = commands_of(spec, shaped=reason is None, port=port, per_rank=per_rank)
        return _Run(spec, [program, *argv[1:]], commands).to_the_end(grace_s, shaped=reason is None)


def commands_of(spec: ClusterSpec, *, shaped: bool, port: int = MASTER_PORT, per_rank: bool = False) -> list[Command]:
    """Return the commands to start on each host, with their environment variables."""
    commands = []
    for host in range(spec.hosts):
        if not per_rank:
            variables = torchrun_variables(spec, host, shaped=shaped, port=port)
            commands.append(Command(host, f"host{host}", f"host {host}", variables))
            continue
        common = host_variables(spec, host, shaped=shaped, port=port)
        for local_rank, rank in enumerate(spec.ranks_of(host)):
            variables = {**common, **rank_variables(spec, host, local_rank)}
            commands.append(Command(host, f"host{host} rank{rank}", f"host {host}, rank {rank}", variables))
    return commands


def _find(argv: Sequence[str]) -> str:
    if not argv:
        raise UsageError("no command to run: write it after --, for example -- torchrun train.py")
    own_bin = str(Path(sys.executable).parent)  # so that torchrun is found without activating our environment
    program = shutil.which(argv[0]) or shutil.which(argv[0], path=own_bin)
    if program is None:
        raise UsageError(f"command not found: {argv[0]}")
    return program


class _Run:
    """One run of commands on hosts: the caller's side and the hosts' side, and the pipes between them."""

    def __init__(self, spec: ClusterSpec, argv: list[str], commands: list[Command]) -> None:
        self._spec, self._argv, self._commands = spec, argv, commands
        # A single command writes to the terminal directly, so that colours and progress bars work.
        self._alone = len(commands) == 1
        self._reports = [os.pipe() for _ in commands]
        self._outputs = [] if self._alone else [(os.pipe(), os.pipe()) for _ in commands]
        self._stop = os.pipe()
        """Becomes readable when all commands must end. Hosts only poll it, so one byte serves all of them."""

    def to_the_end(self, grace_s: float, *, shaped: bool) -> int:
        pipes = [*self._reports, *(pipe for both in self._outputs for pipe in both)]
        try:
            with running_hosts(self._spec, self._on_host, shaped=shaped, pipes=pipes) as hosts:
                printers = [
                    _Printer(read_end, stream, command)
                    for command, both in zip(self._commands, self._outputs, strict=False)
                    for (read_end, _), stream in zip(both, (sys.stdout, sys.stderr), strict=True)
                ]
                outcomes = collect(
                    [read_end for read_end, _ in self._reports],
                    deadline_s=math.inf,
                    grace_s=grace_s,
                    on_failure=lambda: os.write(self._stop[1], b"1"),
                    outputs={printer.pipe: printer.take for printer in printers},
                )
                failure = first_failure(outcomes)
                if failure is None:
                    hosts.wait(grace_s)
                hosts.kill()
                for printer in printers:
                    printer.finish()
        except KeyboardInterrupt:
            return INTERRUPTED
        finally:
            for end in self._stop:
                os.close(end)
        if failure is not None:
            location, program = self._commands[failure.rank].location, Path(self._argv[0]).name
            sys.stderr.write(f"{location}: {program} {failure.error}\n")
        return 0 if failure is None else 1

    def _on_host(self, host: int) -> int:
        running: dict[int, int] = {}
        for index, (command, (_, report)) in enumerate(zip(self._commands, self._reports, strict=True)):
            if command.host != host:
                os.close(report)
                continue
            try:
                running[self._start(index, command)] = report
            except OSError as error:
                send(report, {"error": f"could not be started: {error.strerror}"})
                os.close(report)

        def ended(report: int, code: int) -> None:
            send(report, {"error": describe_exit(code) if code else None})
            os.close(report)

        threading.Thread(target=self._terminate_on_stop, args=(running,), daemon=True).start()
        return reap(running, ended)

    def _start(self, index: int, command: Command) -> int:
        inherited = {name: value for name, value in os.environ.items() if name not in OUTER_JOB}
        # One thread each, because hosts share this machine's cores; unbuffered, so that lines appear when written.
        environment = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **inherited, **command.variables}
        # Not `subprocess`, which would reap the children: this process waits for all of them with os.wait().
        files: list[tuple[int, ...]] = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]  # type: ignore[list-item]
        if not self._alone:
            files += [(os.POSIX_SPAWN_DUP2, pipe[1], 1 + stream) for stream, pipe in enumerate(self._outputs[index])]
        return os.posix_spawn(
            self._argv[0],
            self._argv,
            environment,
            file_actions=files,
            setpgroup=0,
            setsigdef=[signal.SIGPIPE],  # Python ignores it, and children would inherit that
        )

    def _terminate_on_stop(self, running: dict[int, int]) -> None:
        stop = select.poll()
        stop.register(self._stop[0], select.POLLIN)
        stop.poll()
        for pid in list(running):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGTERM)


class _Printer:
    """Prints the output of a command in whole lines, each with the command's name."""

    def __init__(self, pipe: int, stream: TextIO, command: Command) -> None:
        os.set_blocking(pipe, False)
        self.pipe, self._stream = pipe, stream
        prefix = f"{command.name} | "
        if stream.isatty() and not os.environ.get("NO_COLOR"):
            prefix = f"\x1b[{_COLOURS[command.host % len(_COLOURS)]}m{prefix}\x1b[0m"
        self._prefix = prefix.encode()
        self._partial = b""

    def take(self, data: bytes) -> None:
        *lines, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > _LONGEST_LINE_BYTES:
            lines, self._partial = [*lines, self._partial], b""
        self._write(lines)

    def finish(self) -> None:
        """Print the rest of the pipe, and a last line without a newline."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.pipe, 1 << 16):
                self.take(data)
        if self._partial:
            self._write([self._partial])

    def _write(self, lines: list[bytes]) -> None:
        self._stream.flush()
        self._stream.buffer.write(b"".join(self._prefix + line + b"\n" for line in lines))
        self._stream.buffer.flush()
