"""Run hosts as processes, each in its own network namespace, which all end when the caller ends.

    caller → keeper → switch (PID 1 of a PID namespace) → host 0 … host n → what the host runs

The kernel ends the keeper with the caller, the switch with the keeper, and everything in a PID namespace with its first
process. Namespaces and interfaces vanish with their last process, so nothing is left behind, even after `kill -9` or
by daemons. Without namespaces, the keeper adopts all orphans and kills the remaining processes at the end.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from syncline.cluster import links, mps, processes
from syncline.cluster.environment import LOOPBACK
from syncline.cluster.processes import ended_children, fork
from syncline.cluster.spec import ClusterSpec
from syncline.errors import ClusterError

START_S, END_S = 60.0, 10.0
HostMain = Callable[[int], int]
"""Function that a host runs: takes the host's index and returns an exit status. Others than 0 end all hosts."""
_KEEPER_SIGNALS = {signal.SIGTERM, signal.SIGCHLD}
_DID_NOT_START = "the emulated cluster did not start: "


class Hosts:
    """A running set of hosts. The kernel ends them when the thread that started them ends."""

    def __init__(self, keeper_pid: int, control: int) -> None:
        self._keeper_pid = keeper_pid
        self._status: int | None = None
        self.control = control
        """Pipe that ends when all hosts have ended."""

    def wait_until_ready(self) -> None:
        """Wait until every host has its link and is about to run; raise `ClusterError` if that fails."""
        message, end = b"", time.monotonic() + START_S
        while message != b"ready\n":
            in_time = _readable(self.control, end - time.monotonic())
            chunk = os.read(self.control, 65536) if in_time else b""
            if not chunk:
                self.kill()
                said = message.decode(errors="replace").strip() or "its processes were killed"
                raise ClusterError(f"{_DID_NOT_START}{said if in_time else f'it was not up after {START_S:g} s'}")
            message += chunk

    def wait(self, timeout_s: float) -> int | None:
        """Return 0 or the exit status of the first host that failed; None if hosts still run at the timeout."""
        end = time.monotonic() + timeout_s
        while self._status is None:
            if not _readable(self.control, end - time.monotonic()):
                return None
            if not os.read(self.control, 65536):  # the keeper has the other end open until all have ended
                self._status = 0
                with contextlib.suppress(ChildProcessError):  # the caller reaps its children, or ignores SIGCHLD
                    self._status = os.waitstatus_to_exitcode(os.waitpid(self._keeper_pid, 0)[1])
                os.close(self.control)
        return self._status

    def kill(self) -> None:
        """End every process of every host, and wait until they are gone."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._status is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._keeper_pid, number)
                self.wait(END_S)


@contextlib.contextmanager
def running_hosts(spec: ClusterSpec, host_main: HostMain, *, shaped: bool) -> Iterator[Hosts]:
    """Run `host_main` on every host, with its own namespace and link if `shaped`, and end all with the context."""
    with contextlib.ExitStack() as cleanup:
        scratch = None
        if spec.device == "cuda":
            folder = tempfile.TemporaryDirectory(prefix="syncline-", ignore_cleanup_errors=True)
            scratch = Path(cleanup.enter_context(folder))
        control_read, control_write = os.pipe()
        tree = _ProcessTree(spec, host_main, shaped, scratch, control_write)
        # The keeper inherits the blocked signals, so the caller's handlers cannot take them before it waits for them.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _KEEPER_SIGNALS)
        try:
            hosts = Hosts(fork(functools.partial(tree.keeper, os.getpid()), tree.report), control_read)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.close(control_write)
        cleanup.callback(hosts.kill)
        hosts.wait_until_ready()
        yield hosts


@dataclass
class _ProcessTree:
    """The keeper, the switch and the hosts. Each process has its own copy."""

    spec: ClusterSpec
    host_main: HostMain
    shaped: bool
    scratch: Path | None
    control: int
    """Pipe on which the caller learns that the hosts are ready, or why not. After that, it is standard error."""

    def report(self, text: str) -> None:
        os.write(self.control, f"{text}\n".encode())

    def keeper(self, caller: int) -> int:
        for number in (signal.SIGINT, *_KEEPER_SIGNALS):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()  # so that Ctrl-C reaches only the caller, which then ends the keeper
        if self.shaped:
            processes.unshare(processes.CLUSTER_NAMESPACES)
            processes.die_with_parent(caller)
        else:
            processes.adopt_orphans()
            processes.die_with_parent(caller, signal.SIGTERM)
        alive_read, alive_write = os.pipe()
        keeper = os.getpid()

        def switch() -> int:
            os.close(alive_write)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _KEEPER_SIGNALS)
            processes.die_with_parent(keeper)
            if _readable(alive_read, 0):
                return 1  # the keeper ended before die_with_parent was in effect
            if self.shaped:
                _private_files(self.spec)
            with contextlib.nullcontext() if self.scratch is None else mps.shared_gpu(self.scratch):
                return self._switch()

        switch_pid = fork(switch, self.report)
        ended = 0
        while not ended:
            if signal.sigwait(_KEEPER_SIGNALS) == signal.SIGTERM:
                os.kill(switch_pid, signal.SIGKILL)
            ended, status = os.waitpid(switch_pid, os.WNOHANG)  # the first process of a PID namespace ends last
        if not self.shaped:
            _end_descendants()
        return os.waitstatus_to_exitcode(status)

    def _switch(self) -> int:
        """Start the hosts in lockstep: all enter their namespaces, all get links, all configure them, all run."""
        hosts: dict[int, socket.socket] = {}
        for host in range(self.spec.hosts):
            ours, theirs = socket.socketpair()
            hosts[fork(functools.partial(self._host, host, os.getpid(), theirs), self.report)] = ours
            theirs.close()
            if not ours.recv(1):
                return 1  # the host has reported why
        if self.shaped:
            links.build_switches(self.spec, list(hosts))
            for line in hosts.values():
                line.sendall(b"y")
            if not all(line.recv(1) for line in hosts.values()):
                return 1
        self.report("ready")
        os.dup2(2, self.control, inheritable=False)
        for line in hosts.values():
            line.sendall(b"y")
            line.close()
        return next((code for _, code in ended_children(hosts) if code), 0)

    def _host(self, host: int, switch: int, line: socket.socket) -> int:
        processes.die_with_parent(switch)
        if self.shaped:
            processes.unshare(processes.HOST_NAMESPACES)
            socket.sethostname(f"host{host}")
            line.sendall(b"y")
            line.recv(1)
            links.configure_host(self.spec, host)
        line.sendall(b"y")
        line.recv(1)
        line.close()
        os.dup2(2, self.control, inheritable=False)
        return self.host_main(host)


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
    processes.mount("none", "/", flags=processes.MS_REC | processes.MS_PRIVATE)
    with contextlib.suppress(OSError):  # refused in some containers, which then use the outer /proc
        processes.mount("proc", "/proc", "proc")
    # Each address twice: dual-stack servers see IPv4 clients as mapped IPv6 addresses.
    names = "".join(
        f"{prefix}{links.host_address(host)} host{host}\n" for host in range(spec.hosts) for prefix in ("", "::ffff:")
    )
    with tempfile.NamedTemporaryFile("w") as table:
        table.write(f"{LOOPBACK} localhost\n{names}")
        table.flush()
        Path(table.name).chmod(0o644)
        with contextlib.suppress(OSError):
            processes.mount(table.name, "/etc/hosts", flags=processes.MS_BIND)


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
    try:
        with running_hosts(ClusterSpec(hosts=1), lambda _: 0, shaped=True) as trial:
            return None if trial.wait(END_S) == 0 else "a trial host failed"
    except ClusterError as error:
        return str(error).removeprefix(_DID_NOT_START).splitlines()[-1]  # the last line of a traceback has the error


def _readable(descriptor: int, timeout_s: float) -> bool:
    poll = select.poll()  # select does not support descriptors over 1023
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))
