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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from syncline.cluster import linux, mps
from syncline.cluster.environment import LOOPBACK
from syncline.cluster.processes import fork, reap, report_to_stderr
from syncline.cluster.spec import ClusterSpec
from syncline.errors import ClusterError

START_S = 60.0
END_S = 10.0

HostMain = Callable[[int], int]
"""Function that a host runs: takes the host's index and returns an exit status."""

_KEEPER_SIGNALS = {signal.SIGTERM, signal.SIGCHLD}
_DID_NOT_START = "the emulated cluster did not start: "


class Hosts:
    """A running set of hosts. The kernel ends them when the thread that started them ends."""

    def __init__(self, keeper_pid: int, control: int) -> None:
        self._keeper_pid, self._control = keeper_pid, control
        self._status: int | None = None

    def wait_until_ready(self) -> None:
        """Wait until every host has its link and is about to run; raise `ClusterError` if that fails."""
        message, end = b"", time.monotonic() + START_S
        problem = f"it was not up after {START_S:g} s"
        while _readable(self._control, end - time.monotonic()):
            chunk = os.read(self._control, 65536)
            message += chunk
            if message == b"ready\n":
                return
            if not chunk:
                problem = message.decode(errors="replace").strip() or "its processes were killed"
                break
        self.kill()
        raise ClusterError(f"{_DID_NOT_START}{problem}")

    def wait(self, timeout_s: float) -> int | None:
        """Return 0 or the exit status of the first host that failed; None if hosts still run at the timeout."""
        end = time.monotonic() + timeout_s
        while self._status is None:
            if not _readable(self._control, end - time.monotonic()):
                return None
            if not os.read(self._control, 65536):  # the keeper has the other end open until all have ended
                self._reap()
        return self._status

    def kill(self) -> None:
        """End every process of every host, and wait until they are gone."""
        if self._status is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._keeper_pid, signal.SIGTERM)
        if self.wait(END_S) is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._keeper_pid, signal.SIGKILL)
            self._reap()

    def _reap(self) -> None:
        try:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self._keeper_pid, 0)[1])
        except ChildProcessError:  # the caller reaps its children itself, or ignores SIGCHLD
            self._status = 0
        os.close(self._control)


@contextlib.contextmanager
def running_hosts(
    spec: ClusterSpec, host_main: HostMain, *, shaped: bool, pipes: Sequence[tuple[int, int]] = ()
) -> Iterator[Hosts]:
    """Run `host_main` on every host, and end all hosts at the end of the context.

    Args:
        shaped: Give each host its own namespace and link.
        pipes: Pipes from the hosts to the caller. The context closes both ends here. The processes between the caller
            and the hosts close them too, so that a pipe from a host ends when the host does.
    """
    with contextlib.ExitStack() as cleanup:
        scratch = None
        if spec.device == "cuda":
            folder = tempfile.TemporaryDirectory(prefix="syncline-", ignore_cleanup_errors=True)
            scratch = Path(cleanup.enter_context(folder))
        for read_end, _ in pipes:
            cleanup.callback(os.close, read_end)
        control_read, control_write = os.pipe()
        caller = os.getpid()
        tree = _ProcessTree(spec, host_main, shaped, [end for pipe in pipes for end in pipe], scratch, control_write)
        # The keeper inherits the blocked signals, so the caller's handlers cannot take them before it waits for them.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _KEEPER_SIGNALS)
        try:
            hosts = Hosts(fork(lambda: tree.keeper(caller), tree.report), control_read)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for end in (control_write, *(write_end for _, write_end in pipes)):
                os.close(end)
        cleanup.callback(hosts.kill)
        hosts.wait_until_ready()
        yield hosts


@dataclass
class _ProcessTree:
    """The keeper, the switch and the hosts. Each process has its own copy."""

    spec: ClusterSpec
    host_main: HostMain
    shaped: bool
    hosts_only: Sequence[int]
    """File descriptors that only the caller and the hosts use."""
    scratch: Path | None
    control: int | None
    """Pipe on which the caller learns that the hosts are ready, or why not; None after that."""

    def report(self, text: str) -> None:
        """Report why a process failed: to the caller until the hosts are ready, then on standard error."""
        if self.control is None:
            report_to_stderr(text)
        else:
            os.write(self.control, text.encode())

    def _close_control(self) -> None:
        if self.control is not None:
            os.close(self.control)
            self.control = None

    def keeper(self, caller: int) -> int:
        for number in (signal.SIGINT, *_KEEPER_SIGNALS):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()  # so that Ctrl-C reaches only the caller, which then ends the keeper
        if self.shaped:
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
            if self.shaped:
                _private_files(self.spec)
            with mps.shared_gpu(self.scratch) if self.scratch is not None else contextlib.nullcontext():
                return self._switch()

        switch_pid = fork(switch, self.report)
        for end in self.hosts_only:
            os.close(end)
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
        switch = os.getpid()
        pids: list[int] = []
        lines: list[socket.socket] = []
        for host in range(self.spec.hosts):
            ours, theirs = socket.socketpair()
            lines.append(ours)
            pids.append(fork(functools.partial(self._host, host, switch, theirs, [*lines]), self.report))
            theirs.close()
        for end in self.hosts_only:
            os.close(end)
        if not _all_say_yes(lines):
            return 1  # the host has reported why
        if self.shaped:
            from syncline.cluster import links

            links.build_switches(self.spec, pids)
        if not _meet(lines):
            return 1
        self.report("ready\n")
        self._close_control()
        _say_yes(lines)
        for line in lines:
            line.close()
        return reap(dict.fromkeys(pids))

    def _host(self, host: int, switch: int, line: socket.socket, other_lines: list[socket.socket]) -> int:
        linux.die_with_parent(switch)
        for other in other_lines:
            other.close()
        if self.shaped:
            linux.unshare(linux.CLONE_NEWNET | linux.CLONE_NEWUTS)
            socket.sethostname(f"host{host}")
        if not _meet([line]):
            return 1
        if self.shaped:
            from syncline.cluster import links

            links.configure_host(self.spec, host)
        if not _meet([line]):
            return 1
        line.close()
        self._close_control()
        return self.host_main(host)


def _meet(lines: list[socket.socket]) -> bool:
    """Tell the other ends that this one is ready, and wait for them; return False if one has ended."""
    _say_yes(lines)
    return _all_say_yes(lines)


def _say_yes(lines: list[socket.socket]) -> None:
    for line in lines:
        with contextlib.suppress(BrokenPipeError):  # the other end has ended, which the next answer shows
            line.sendall(b"y")


def _all_say_yes(lines: list[socket.socket]) -> bool:
    return all(line.recv(1) == b"y" for line in lines)


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

    linux.mount("none", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    with contextlib.suppress(OSError):  # refused in some containers, which then use the outer /proc
        linux.mount("proc", "/proc", "proc")
    # Each address twice: dual-stack servers see IPv4 clients as mapped IPv6 addresses.
    names = "".join(
        f"{prefix}{links.host_address(host)} host{host}\n" for host in range(spec.hosts) for prefix in ("", "::ffff:")
    )
    with tempfile.NamedTemporaryFile("w") as table:
        table.write(f"{LOOPBACK} localhost\n{names}")
        table.flush()
        Path(table.name).chmod(0o644)
        with contextlib.suppress(OSError):
            linux.mount(table.name, "/etc/hosts", flags=linux.MS_BIND)


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
