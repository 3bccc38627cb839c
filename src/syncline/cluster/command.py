"""Run a command on every emulated host, as a cluster's scheduler would: `torchrun train.py`, a shell, MPI.

Output is shown line by line, with the name of its host. If the command fails on one host, all others are terminated.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from syncline.cluster import links
from syncline.cluster.environment import OUTER_JOB, reserved_port, variables_of
from syncline.cluster.isolation import unshaped_notice, why_not_shaped
from syncline.cluster.launch import first_failure, run_processes, send
from syncline.cluster.spec import ClusterSpec, format_rate
from syncline.errors import UsageError

_LONGEST_LINE_BYTES = 1 << 16


def run_command(spec: ClusterSpec, argv: Sequence[str], *, per_rank: bool = False, grace_s: float = 5.0) -> int:
    """Describe the cluster on standard error, and run `argv` on every host, or once per rank.

    After the first failure, the other commands get SIGTERM, and SIGKILL after `grace_s`. Return 0, 1 if the command
    failed anywhere, or 130 after Ctrl-C.
    """
    if spec.rank_order != "host" and not per_rank:
        raise UsageError(f"--rank-order {spec.rank_order} needs --per-rank: torchrun numbers ranks host by host")
    if not argv:
        raise UsageError("no command to run: write it after --, for example -- torchrun train.py")
    own_bin = str(Path(sys.executable).parent)  # so that torchrun is found without activating our environment
    program = shutil.which(argv[0]) or shutil.which(argv[0], path=own_bin)
    if program is None:
        raise UsageError(f"command not found: {argv[0]}")
    reason = why_not_shaped()
    # An idle link carries a burst faster than its rate.
    rates = [rate for rate in (spec.rate_bps, spec.trunk_rate_bps) if rate is not None and reason is None]
    bursts = [f", {links.burst_bytes(rate) / 1000:.0f} kB burst at {format_rate(rate)}" for rate in rates]
    sys.stderr.write(f"{spec.describe()}{''.join(bursts)}\n")
    if reason is not None:
        sys.stderr.write(f"syncline: {unshaped_notice(reason)}\n")
    slots = sorted(spec.slots) if per_rank else [(host, None) for host in range(spec.hosts)]
    # A single command writes to the terminal directly, so that colours and progress bars work.
    streams = (sys.stdout, sys.stderr) if len(slots) > 1 else ()
    outputs: dict[tuple[int, int], Callable[[bytes], None]] = {}
    locations, processes = [], []
    with reserved_port(reason is None) as port:
        for host, local_rank in slots:
            variables = variables_of(spec, host, local_rank, shaped=reason is None, port=port)
            locations.append(f"host {host}" + (f", rank {variables['RANK']}" if per_rank else ""))
            own = {os.pipe(): _Printer(stream, locations[-1]).take for stream in streams}
            outputs |= own
            start = functools.partial(_execute, [program, *argv[1:]], variables, [pipe for _, pipe in own])
            processes.append((host, start))
        try:
            outcomes = run_processes(spec, processes, shaped=reason is None, grace_s=grace_s, outputs=outputs)
        except KeyboardInterrupt:
            return 130
    if (failure := first_failure(outcomes)) is not None:
        sys.stderr.write(f"{locations[failure.rank]}: {Path(program).name} {failure.error}\n")
    return 0 if failure is None else 1


def _execute(argv: list[str], variables: Mapping[str, str], outputs: Sequence[int], pipe: int) -> int:
    """Become the command, in a process group of its own. Return only if that fails."""
    inherited = {name: value for name, value in os.environ.items() if not OUTER_JOB.fullmatch(name)}
    # One thread each, because hosts share this machine's cores; unbuffered, so that lines appear when written.
    environment = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **inherited, **variables}
    os.setpgid(0, 0)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and the command would inherit that
    for stream, end in enumerate((os.open(os.devnull, os.O_RDONLY), *outputs)):
        os.dup2(end, stream)
    try:
        os.execve(argv[0], argv, environment)  # noqa: S606 - no shell is needed
    except OSError as error:
        send(pipe, {"error": f"could not be started: {error.strerror}"})
    return 1


class _Printer:
    """Prints the output of a command in whole lines, each with the command's location, as in `host0 rank2 | `."""

    def __init__(self, stream: TextIO, location: str) -> None:
        self._prefix = f"{location.replace(' ', '').replace(',', ' ')} | ".encode()
        self._stream, self._partial = stream, b""

    def take(self, data: bytes) -> None:
        *lines, self._partial = (self._partial + data).split(b"\n")
        if self._partial and (not data or len(self._partial) > _LONGEST_LINE_BYTES):
            lines, self._partial = [*lines, self._partial], b""
        self._stream.flush()
        self._stream.buffer.write(b"".join(self._prefix + line + b"\n" for line in lines))
        self._stream.buffer.flush()
