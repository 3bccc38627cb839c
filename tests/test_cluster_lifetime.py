"""No process of a cluster outlives the process that started it, however that one ends."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from syncline.cluster import ClusterSpec, Rank, isolation, launch, run_command, why_not_shaped
from syncline.cluster.processes import fork

needs_namespaces = pytest.mark.skipif(why_not_shaped() is not None, reason=f"no namespaces: {why_not_shaped()}")
both_ways = pytest.mark.parametrize("shaped", [pytest.param(True, marks=needs_namespaces), False])
NOBODY = 65534
GONE_WITHIN_S = 5.0
THERE_WITHIN_S = 30.0
CLUSTER_RUN = [sys.executable, "-m", "syncline", "cluster", "run"]


@contextlib.contextmanager
def forked(main: Callable[[], int | None]) -> Iterator[psutil.Process]:
    """Fork a caller that the test can kill."""
    process = psutil.Process(fork(lambda: main() or 0))
    try:
        yield process
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
        process.wait(30)


@contextlib.contextmanager
def killed_at_last(command: subprocess.Popen[bytes]) -> Iterator[None]:
    """A failing test must not wait for a command that never ends."""
    with command:
        try:
            yield
        finally:
            command.kill()


def read_lines(pipe: int, count: int) -> list[str]:
    """Wait for this many lines; pytest-timeout is the deadline."""
    data = b""
    while data.count(b"\n") < count:
        chunk = os.read(pipe, 4096)
        if not chunk:
            raise AssertionError(f"the pipe ended after {data!r}")
        data += chunk
    return data.decode().splitlines()


def networks_of(processes: list[psutil.Process]) -> set[int]:
    return {Path(f"/proc/{process.pid}/ns/net").stat().st_ino for process in processes}


def holders_of(networks: set[int]) -> list[psutil.Process]:
    """Return all processes in these namespaces."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if networks_of([process]) <= networks:
                found.append(process)
    return found


def carriers_of(marker: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if marker.encode() in Path(f"/proc/{process.pid}/environ").read_bytes():
                found.append(process)
    return found


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:  # init will reap it
                found.append(process)
    return found


def once_there(find: Callable[[], list[psutil.Process]], count: int) -> list[psutil.Process]:
    end = time.monotonic() + THERE_WITHIN_S
    while len(found := find()) < count:
        assert time.monotonic() < end, f"only {len(found)} of {count} after {THERE_WITHIN_S:g} s: {found}"
        time.sleep(0.05)
    return found


def assert_soon_gone(left: Callable[[], list[psutil.Process]]) -> None:
    end = time.monotonic() + GONE_WITHIN_S
    while still := left():
        assert time.monotonic() < end, f"still there after {GONE_WITHIN_S:g} s: {still}"
        time.sleep(0.05)


def become_nobody() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    # A process that has changed its user may not write its uid_map before it executes a program.
    pr_set_dumpable = 4
    ctypes.CDLL(None).prctl(pr_set_dumpable, 1, 0, 0, 0)
    isolation._why_namespaces_fail.cache_clear()


@needs_namespaces
@pytest.mark.skipif(os.getuid() != 0, reason="is the user already")
def test_without_root_links_are_shaped_inside_a_user_namespace() -> None:
    read_end, write_end = os.pipe()

    def main() -> None:
        become_nobody()
        reason = why_not_shaped()
        found = launch(ClusterSpec(hosts=2), describe) if reason is None else []
        os.write(write_end, json.dumps([reason, found]).encode() + b"\n")

    def describe(rank: Rank) -> list[object]:
        from syncline.cluster import links

        rank.init_process_group()
        dist.barrier()  # a rank that ends earlier would break the other's connection
        return [os.getuid(), os.uname().nodename, links.sent_bytes() > 0]

    with forked(main):
        reason, found = json.loads(read_lines(read_end, 1)[0])
    os.close(read_end)
    os.close(write_end)
    if reason is not None:
        pytest.skip(f"users may not create namespaces here: {reason}")
    assert found == [[NOBODY, "host0", True], [NOBODY, "host1", True]]


@pytest.mark.parametrize("user", ["root", "nobody"])
@both_ways
def test_killing_the_caller_of_launch_ends_its_ranks(shaped: bool, user: str) -> None:
    if user == "nobody" and os.getuid() != 0:
        pytest.skip("is the user already")
    read_end, write_end = os.pipe()

    def main() -> None:
        if user == "nobody":
            become_nobody()
            if shaped and why_not_shaped() is not None:
                os.write(write_end, f"{why_not_shaped()}\n".encode() * 2)
                return
        launch(ClusterSpec(hosts=2), wait, deadline_s=600, shaped=shaped)

    def wait(rank: Rank) -> None:
        os.write(write_end, b"up\n")
        threading.Event().wait()

    with forked(main) as caller:
        answer = read_lines(read_end, 2)
        if answer[0] != "up":
            pytest.skip(f"users may not create namespaces here: {answer[0]}")
        processes = caller.children(recursive=True)
        networks = networks_of(processes) - networks_of([psutil.Process()])
        assert len(processes) == 6  # keeper, switch, two hosts with a rank each
        assert len(networks) == (3 if shaped else 0)
        processes += holders_of(networks)
        caller.kill()
        caller.wait(30)
        assert_soon_gone(lambda: alive(processes))
    os.close(read_end)
    os.close(write_end)


@both_ways
def test_killing_cluster_run_ends_commands_and_their_daemons(shaped: bool) -> None:
    marker = f"syncline-test-{uuid.uuid4()}"
    command = subprocess.Popen(
        [*CLUSTER_RUN, "--hosts", "2", "--", "sh", "-c", "(setsid sleep 1000 &); sleep 1000 & echo up; wait"],
        env={**os.environ, "SYNCLINE_TEST_MARKER": marker, "SYNCLINE_NO_NAMESPACES": "0" if shaped else "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with killed_at_last(command):
        assert command.stdout is not None
        read_lines(command.stdout.fileno(), 2)
        # The tree as above without ranks, and on each host a shell and two sleeps. One that is just becoming its
        # program has no environment to read.
        processes = once_there(lambda: carriers_of(marker), 5 + 2 * 3)
        networks = networks_of(processes) - networks_of([psutil.Process()])
        assert len(networks) == (3 if shaped else 0)
        processes += holders_of(networks)
        command.send_signal(signal.SIGKILL)
        command.wait(30)
        assert_soon_gone(lambda: alive(processes))
        assert_soon_gone(lambda: carriers_of(marker))


@both_ways
def test_ctrl_c_ends_everything_and_is_status_130(shaped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCLINE_NO_NAMESPACES", "0" if shaped else "1")
    read_end, write_end = os.pipe()

    def main() -> int:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored where these tests run
        os.dup2(write_end, 1)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - not pytest's
        return run_command(ClusterSpec(hosts=2), ["sh", "-c", "trap '' TERM INT; echo up; sleep 1000"])

    with forked(main) as caller:
        assert sorted(read_lines(read_end, 2)) == ["host0 | up", "host1 | up"]
        processes = caller.children(recursive=True)
        caller.send_signal(signal.SIGINT)
        assert caller.wait(30) == 130
        assert alive(processes) == []
    os.close(read_end)
    os.close(write_end)
