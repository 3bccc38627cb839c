"""Processes that are hosts: each owns its network namespace, and all of them end with the process that asked for them.

The shape of the process tree, in which every arrow is a fork:

    caller → keeper → switch (PID 1 of a PID namespace) → host 0 … host n → what the host runs

The keeper is killed by the kernel when the caller ends, the switch when the keeper ends, and everything inside a PID
namespace when its first process ends. Namespaces and the interfaces in them have no names on disk and vanish with their
last process. So nothing is left behind, even after `kill -9` on the caller, and even if a host's command daemonises.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from syncline.cluster import linux
from syncline.cluster.spec import ClusterSpec
from syncline.errors import ClusterError

LOOPBACK = "127.0.0.1"
MASTER_PORT = 29500
"""Inside the cluster's own namespaces no port can be taken."""

HostMain = Callable[[int], int]
"""What a host runs: its index → its exit status."""


class Isolated:
    """A running set of hosts. `wait` for it or `kill` it; both reap everything."""

    def __init__(self, keeper_pid: int, control: int) -> None:
        self.keeper_pid = keeper_pid
        self._control = control
        self._reaped = False

    def wait_until_ready(self) -> None:
        """Returns when every link is up and every host is about to run; raises what went wrong otherwise."""
        message = b""
        while chunk := os.read(self._control, 65536):
            message += chunk
            if message == b"ready\n":
                return
        self.kill()
        raise ClusterError(f"the emulated cluster did not start: {message.decode() or 'its processes were killed'}")

    def wait(self) -> int:
        """The exit status: 0, or that of the first host that failed."""
        return self._reap()

    def kill(self) -> None:
        if not self._reaped:
            os.kill(self.keeper_pid, signal.SIGKILL)
            self._reap()

    def _reap(self) -> int:
        if self._reaped:
            return 0
        _, status = os.waitpid(self.keeper_pid, 0)
        self._reaped = True
        # The switch holds the other end until the kernel has ended everything inside: only then is it over.
        while os.read(self._control, 65536):
            pass
        os.close(self._control)
        return os.waitstatus_to_exitcode(status)


def start_hosts(spec: ClusterSpec, host_main: HostMain, *, shaped: bool) -> Isolated:  # noqa: RET503
    """Starts `host_main` on every host; with `shaped`, each in its own namespace behind its own link."""
    control_read, control_write = os.pipe()
    caller = os.getpid()
    _flush()
    keeper_pid = os.fork()
    if keeper_pid:
        os.close(control_write)
        return Isolated(keeper_pid, control_read)
    os.close(control_read)
    _run_and_exit(lambda: _keeper(spec, host_main, shaped, caller, control_write), control_write)


def _keeper(spec: ClusterSpec, host_main: HostMain, shaped: bool, caller: int, control: int) -> int:
    linux.die_with_parent(caller)
    os.setsid()  # Ctrl-C reaches the caller alone, which then ends us
    if shaped:
        linux.unshare_as_user(linux.CLONE_NEWNET | linux.CLONE_NEWPID | linux.CLONE_NEWNS | linux.CLONE_NEWUTS)
    alive_read, alive_write = os.pipe()
    keeper = os.getpid()
    _flush()
    switch_pid = os.fork()
    if switch_pid == 0:
        os.close(alive_write)

        def switch() -> int:
            linux.die_with_parent(keeper)
            if select.select([alive_read], [], [], 0)[0]:
                return 1  # the keeper ended before it could take us along
            return _switch(spec, host_main, shaped, control)

        _run_and_exit(switch, control)
    os.close(control)
    _, status = os.waitpid(switch_pid, 0)
    return os.waitstatus_to_exitcode(status)


def _switch(spec: ClusterSpec, host_main: HostMain, shaped: bool, control: int) -> int:
    if shaped:
        _private_files(spec)
    hosts: list[int] = []
    wired: list[int] = []
    for host in range(spec.hosts):
        in_namespace_read, in_namespace_write = os.pipe()
        wired_read, wired_write = os.pipe()
        switch_pid = os.getpid()
        _flush()
        pid = os.fork()
        if pid == 0:
            for end in (*wired, in_namespace_read, wired_write):
                os.close(end)
            _run_and_exit(
                functools.partial(
                    _host, spec, host, host_main, shaped, switch_pid, in_namespace_write, wired_read, control
                ),
                control,
            )
        os.close(in_namespace_write)
        os.close(wired_read)
        if os.read(in_namespace_read, 1) != b"1":
            return 1  # it has said why
        os.close(in_namespace_read)
        hosts.append(pid)
        wired.append(wired_write)
    if shaped:
        from syncline.cluster import links

        links.build_switches(spec, hosts)
    for end in wired:
        os.write(end, b"1")
        os.close(end)
    os.write(control, b"ready\n")
    return _reap_until_done(hosts)


def _host(
    spec: ClusterSpec,
    host: int,
    host_main: HostMain,
    shaped: bool,
    switch_pid: int,
    in_namespace: int,
    wired: int,
    control: int,
) -> int:
    linux.die_with_parent(switch_pid)
    if shaped:
        linux.unshare(linux.CLONE_NEWNET | linux.CLONE_NEWUTS)
        linux.set_hostname(f"host{host}")
    os.write(in_namespace, b"1")
    os.close(in_namespace)
    if os.read(wired, 1) != b"1":
        return 1
    os.close(wired)
    if shaped:
        from syncline.cluster import links

        links.configure_host(spec, host)
    os.close(control)
    return host_main(host)


def _reap_until_done(children: list[int]) -> int:
    """Waits for these children, and for orphans that the first process of a PID namespace inherits."""
    waiting, failed = set(children), 0
    while waiting:
        pid, status = os.wait()
        if pid in waiting:
            waiting.discard(pid)
            failed = failed or os.waitstatus_to_exitcode(status)
    return failed


def _private_files(spec: ClusterSpec) -> None:
    """A /proc of our processes and an /etc/hosts that knows our hosts, seen by nobody else."""
    from syncline.cluster import links

    linux.mount_private()
    with contextlib.suppress(OSError):  # refused in some containers; the outer /proc then serves
        linux.mount_proc()
    # Twice each: dual-stack servers see their IPv4 clients as mapped IPv6 addresses.
    names = "".join(
        f"{prefix}{links.host_address(host)} host{host}\n" for host in range(spec.hosts) for prefix in ("", "::ffff:")
    )
    with tempfile.NamedTemporaryFile("w") as table:
        table.write(f"{LOOPBACK} localhost\n{names}")
        table.flush()
        Path(table.name).chmod(0o644)
        with contextlib.suppress(OSError):
            linux.bind_mount(table.name, "/etc/hosts")


@functools.cache
def why_not_shaped() -> str | None:
    """None where this machine can emulate links; otherwise the reason, for the one line that says so."""
    if sys.platform != "linux":
        return f"{sys.platform} has no network namespaces"
    try:
        import pyroute2  # noqa: F401
    except ImportError:
        return "pyroute2 is not installed (pip install 'syncline[cluster]')"
    trial = start_hosts(ClusterSpec(hosts=1), lambda _: 0, shaped=True)
    try:
        trial.wait_until_ready()
    except ClusterError as error:
        return str(error)
    return None if trial.wait() == 0 else "a trial host failed"


def _flush() -> None:
    # Text still buffered would be written once by each process that inherits the buffer.
    sys.stdout.flush()
    sys.stderr.flush()


def _run_and_exit(main: Callable[[], int], control: int) -> NoReturn:
    """A forked child's whole life: it must never return into its parent's code."""
    status = 1
    try:
        status = main()
    except OSError as error:
        with contextlib.suppress(OSError):
            os.write(control, f"{error.strerror or error}".encode())
    except BaseException:  # noqa: BLE001 - whatever it was, this process must end here
        with contextlib.suppress(OSError):
            os.write(control, traceback.format_exc().encode())
    finally:
        with contextlib.suppress(Exception):
            _flush()
        os._exit(status if 0 <= status < 256 else 1)
