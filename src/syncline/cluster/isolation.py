"""Run hosts as processes, each in its own network namespace, which all end when the caller ends.

The process tree, in which every arrow is a fork:

    caller → keeper → switch (PID 1 of a PID namespace) → host 0 … host n → what the host runs

The keeper is killed by the kernel when the caller ends, the switch when the keeper ends, and everything inside a PID
namespace when its first process ends. Namespaces and their interfaces have no names on disk and vanish with their last
process. So nothing is left behind, even after `kill -9` on the caller, and even if a host's command daemonises.

Without namespaces, the keeper adopts all orphans and kills the remaining processes at the end.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from syncline.cluster import linux, mps
from syncline.cluster.environment import LOOPBACK
from syncline.cluster.processes import Complaints, fork
from syncline.cluster.spec import ClusterSpec
from syncline.errors import ClusterError

START_S = 60.0
END_S = 10.0

HostMain = Callable[[int], int]
"""Function that a host runs: takes the host's index and returns an exit status."""

_KEEPER_SIGNALS = {signal.SIGTERM, signal.SIGCHLD}


class Isolated:
    """A running set of hosts. The kernel ends them when the thread that started them ends."""

    def __init__(self, keeper_pid: int, control: int, scratch: Path | None) -> None:
        self.keeper_pid = keeper_pid
        self._control = control
        self._scratch = scratch
        self._status: int | None = None

    def wait_until_ready(self) -> None:
        """Wait until every host has its link and is about to run; raise `ClusterError` if that fails."""
        if (problem := self.start_problem()) is not None:
            raise ClusterError(f"the emulated cluster did not start: {problem}")

    def start_problem(self) -> str | None:
        """Wait like `wait_until_ready`, and return the problem or None. After a problem, no process runs any more."""
        message, end = b"", time.monotonic() + START_S
        while _readable(self._control, end - time.monotonic()):
            chunk = os.read(self._control, 65536)
            message += chunk
            if message == b"ready\n":
                return None
            if not chunk:
                self.kill()
                return message.decode(errors="replace").strip() or "its processes were killed"
        states = _process_states(self.keeper_pid)
        self.kill()
        return f"it was not up after {START_S:g} s{states}"

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Return 0 or the exit status of the first host that failed; None if hosts still run at the timeout."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while self._status is None:
            if not _readable(self._control, None if end is None else end - time.monotonic()):
                return None
            if not os.read(self._control, 65536):  # the keeper has the other end open until all have ended
                self._reap()
        return self._status

    def kill(self) -> None:
        """End every process of every host, and wait until they are gone."""
        if self._status is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.keeper_pid, signal.SIGTERM)
        if self.wait(END_S) is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.keeper_pid, signal.SIGKILL)
            self._reap()

    def _reap(self) -> None:
        try:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.keeper_pid, 0)[1])
        except ChildProcessError:  # the caller reaps its children itself, or ignores SIGCHLD
            self._status = 0
        os.close(self._control)
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)


def _process_states(keeper_pid: int) -> str:
    """Describe where in the kernel the cluster's processes wait, to debug a cluster that does not start."""
    states = []
    with contextlib.suppress(psutil.Error, OSError):
        keeper = psutil.Process(keeper_pid)
        for process in [keeper, *keeper.children(recursive=True)][:12]:
            where = Path(f"/proc/{process.pid}/wchan").read_text() or "nothing"
            states.append(f"{process.name()} {process.pid} of {process.ppid()}, {process.status()}, in {where}")
    return f" ({'; '.join(states)})" if states else ""


def start_hosts(spec: ClusterSpec, host_main: HostMain, *, shaped: bool, hosts_only: Sequence[int] = ()) -> Isolated:
    """Start `host_main` on every host.

    Args:
        shaped: Give each host its own namespace and link.
        hosts_only: File descriptors for the hosts. They are closed in the processes between the caller and the hosts,
            so that a pipe from a host ends when the host does.
    """
    scratch = Path(tempfile.mkdtemp(prefix="syncline-")) if spec.device == "cuda" else None
    control_read, control_write = os.pipe()
    complaints = Complaints(control_write)
    caller = os.getpid()
    # The keeper inherits the blocked signals, so the caller's handlers cannot take them before it waits for them.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _KEEPER_SIGNALS)
    try:
        keeper_pid = fork(
            lambda: _keeper(spec, host_main, shaped, hosts_only, scratch, caller, control_write, complaints), complaints
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.close(control_write)
    return Isolated(keeper_pid, control_read, scratch)


def _keeper(
    spec: ClusterSpec,
    host_main: HostMain,
    shaped: bool,
    hosts_only: Sequence[int],
    scratch: Path | None,
    caller: int,
    control: int,
    complaints: Complaints,
) -> int:
    for number in (signal.SIGINT, *_KEEPER_SIGNALS):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()  # so that Ctrl-C reaches only the caller, which then ends the keeper
    if shaped:
        linux.unshare_as_user(linux.CLONE_NEWNET | linux.CLONE_NEWPID | linux.CLONE_NEWNS | linux.CLONE_NEWUTS)
        linux.die_with_parent(caller)
    else:
        linux.adopt_orphans()
        linux.die_with_parent(caller, signal.SIGTERM)
    alive_read, alive_write = os.pipe()
    keeper = os.getpid()

    def switch() -> int:
        os.close(alive_write)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _KEEPER_SIGNALS)
        linux.die_with_parent(keeper)
        if _readable(alive_read, 0):
            return 1  # the keeper ended before die_with_parent was in effect
        if shaped:
            _private_files(spec)
        with mps.shared_gpu(scratch) if scratch is not None else contextlib.nullcontext():
            return _switch(spec, host_main, shaped, hosts_only, control, complaints)

    switch_pid = fork(switch, complaints)
    for end in hosts_only:
        os.close(end)
    ended = 0
    while not ended:
        if signal.sigwait(_KEEPER_SIGNALS) == signal.SIGTERM:
            os.kill(switch_pid, signal.SIGKILL)
        ended, status = os.waitpid(switch_pid, os.WNOHANG)  # the first process of a PID namespace ends last
    if not shaped:
        _end_descendants()
    return os.waitstatus_to_exitcode(status)


def _switch(
    spec: ClusterSpec,
    host_main: HostMain,
    shaped: bool,
    hosts_only: Sequence[int],
    control: int,
    complaints: Complaints,
) -> int:
    """Start the hosts in lockstep: all enter their namespaces, all get links, all configure them, all run."""
    switch = os.getpid()
    hosts: list[int] = []
    lines: list[socket.socket] = []
    for host in range(spec.hosts):
        ours, theirs = socket.socketpair()
        lines.append(ours)
        hosts.append(
            fork(
                functools.partial(_host, spec, host, host_main, shaped, switch, theirs, [*lines], complaints),
                complaints,
            )
        )
        theirs.close()
    for end in hosts_only:
        os.close(end)
    if not _all_say_yes(lines):
        return 1  # the host has reported why
    if shaped:
        from syncline.cluster import links

        links.build_switches(spec, hosts)
    _say_yes(lines)
    if not _all_say_yes(lines):
        return 1
    os.write(control, b"ready\n")
    complaints.close()
    _say_yes(lines)
    for line in lines:
        line.close()
    return _reap_until_done(hosts)


def _host(
    spec: ClusterSpec,
    host: int,
    host_main: HostMain,
    shaped: bool,
    switch: int,
    line: socket.socket,
    other_lines: list[socket.socket],
    complaints: Complaints,
) -> int:
    linux.die_with_parent(switch)
    for other in other_lines:
        other.close()
    if shaped:
        linux.unshare(linux.CLONE_NEWNET | linux.CLONE_NEWUTS)
        linux.set_hostname(f"host{host}")
    _say_yes([line])
    if not _all_say_yes([line]):
        return 1
    if shaped:
        from syncline.cluster import links

        links.configure_host(spec, host)
    _say_yes([line])
    if not _all_say_yes([line]):
        return 1
    line.close()
    complaints.close()
    return host_main(host)


def _say_yes(lines: list[socket.socket]) -> None:
    for line in lines:
        with contextlib.suppress(BrokenPipeError):  # the other end has ended, which the next answer shows
            line.sendall(b"y")


def _all_say_yes(lines: list[socket.socket]) -> bool:
    return all(line.recv(1) == b"y" for line in lines)


def _reap_until_done(children: list[int]) -> int:
    """Wait for these children; also reap orphans, which the first process of a PID namespace inherits."""
    waiting, failed = set(children), 0
    while waiting:
        pid, status = os.wait()
        if pid in waiting:
            waiting.discard(pid)
            failed = failed or os.waitstatus_to_exitcode(status)
    return failed


def _end_descendants() -> None:
    for _ in range(int(END_S)):  # a process may start another one meanwhile
        processes = psutil.Process().children(recursive=True)
        if not processes:
            return
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(processes, timeout=1.0)


def _private_files(spec: ClusterSpec) -> None:
    """Mount a /proc with the cluster's processes, and an /etc/hosts with its hosts, in this namespace only."""
    from syncline.cluster import links

    linux.mount_private()
    with contextlib.suppress(OSError):  # refused in some containers, which then use the outer /proc
        linux.mount_proc()
    # Each address twice: dual-stack servers see IPv4 clients as mapped IPv6 addresses.
    names = "".join(
        f"{prefix}{links.host_address(host)} host{host}\n" for host in range(spec.hosts) for prefix in ("", "::ffff:")
    )
    with tempfile.NamedTemporaryFile("w") as table:
        table.write(f"{LOOPBACK} localhost\n{names}")
        table.flush()
        Path(table.name).chmod(0o644)
        with contextlib.suppress(OSError):
            linux.bind_mount(table.name, "/etc/hosts")


def why_not_shaped() -> str | None:
    """Return why this machine cannot emulate links, in one line; None if it can."""
    if os.environ.get("SYNCLINE_NO_NAMESPACES", "0") not in ("", "0"):
        return "SYNCLINE_NO_NAMESPACES is set"
    return _why_namespaces_fail()


def unshaped_notice(reason: str) -> str:
    """Return the warning for a run without emulated links."""
    return f"links are not shaped: {reason}; hosts share the loopback interface at its full speed"


@functools.cache
def _why_namespaces_fail() -> str | None:
    if sys.platform != "linux":
        return f"{sys.platform} has no network namespaces"
    try:
        import pyroute2  # noqa: F401
    except ImportError:
        return "pyroute2 is not installed (pip install 'syncline[cluster]')"
    trial = start_hosts(ClusterSpec(hosts=1), lambda _: 0, shaped=True)
    try:
        if (problem := trial.start_problem()) is not None:
            return problem.splitlines()[-1]  # the last line of a traceback has the error
        return None if trial.wait(END_S) == 0 else "a trial host failed"
    finally:
        trial.kill()


def _readable(descriptor: int, timeout_s: float | None) -> bool:
    poll = select.poll()  # select does not support descriptors over 1023
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000))
