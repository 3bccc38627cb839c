"""Commands on emulated hosts: their environment variables, output and failures."""

from __future__ import annotations

import os
import re
import stat
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from syncline.cli.app import cluster_app
from syncline.cluster import ClusterSpec, run_command, why_not_shaped
from syncline.cluster.environment import variables_of

needs_namespaces = pytest.mark.skipif(why_not_shaped() is not None, reason=f"no namespaces: {why_not_shaped()}")
TWO = ClusterSpec(hosts=2)

ALL_REDUCE = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([2.0 ** dist.get_rank()])
dist.all_reduce(total)
line = f"rank {dist.get_rank()} host {os.environ['SYNCLINE_HOST']} sum {int(total)}\\n"
os.write(1, line.encode())  # in one piece, as ranks of a host share torchrun's output
dist.destroy_process_group()
"""


@pytest.fixture
def shaped(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setenv("SYNCLINE_NO_NAMESPACES", "1")
    return bool(request.param)


both_ways = pytest.mark.parametrize("shaped", [pytest.param(True, marks=needs_namespaces), False], indirect=True)


def syncline_cluster_run(*arguments: str) -> Result:
    return CliRunner().invoke(cluster_app, ["run", *arguments])


@needs_namespaces
def test_each_host_has_what_torchrun_and_torch_distributed_read() -> None:
    spec = ClusterSpec(hosts=2, per_host=(3, 1))
    first, second = (variables_of(spec, host, None, shaped=True) for host in range(2))
    assert first.items() >= {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "3"}.items()
    assert second.items() >= {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "1"}.items()
    assert second.items() >= {"NNODES": "2", "NODE_RANK": "1", "NPROC_PER_NODE": "1", "SYNCLINE_HOST": "1"}.items()
    for variables in (first, second):
        assert variables["PET_MASTER_ADDR"] == variables["MASTER_ADDR"] == first["SYNCLINE_HOST_ADDR"]
        assert variables["PET_MASTER_PORT"] == variables["MASTER_PORT"]
        interfaces = {variables[f"{library}_SOCKET_IFNAME"] for library in ("GLOO", "NCCL", "TP")}
        assert interfaces == {"eth0"}
        assert "RANK" not in variables


def test_each_rank_has_its_own_number_and_no_torchrun() -> None:
    spec = ClusterSpec(hosts=2, per_host=(2, 1), rank_order="scrambled")
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SYNCLINE_HOST")
    ranks = [variables_of(spec, *slot, shaped=False, port=1234) for slot in [(0, 0), (0, 1), (1, 0)]]
    found = [tuple(variables[name] for name in names) for variables in ranks]
    assert found == [("0", "0", "3", "2", "0"), ("2", "1", "3", "2", "0"), ("1", "0", "3", "1", "1")]
    assert {variables["MASTER_PORT"] for variables in ranks} == {"1234"}
    assert not any(name.startswith("PET_") for variables in ranks for name in variables)


def test_ranks_that_share_a_gpu_have_different_nccl_host_ids() -> None:
    spec = ClusterSpec(hosts=2, per_host=(2, 2), device="cuda")
    ranks = [variables_of(spec, host, local_rank, shaped=False) for host, local_rank in spec.slots]
    assert len({variables["NCCL_HOSTID"] for variables in ranks}) == 4
    assert {variables["NCCL_NET"] for variables in ranks} == {"Socket"}
    hosts = [variables_of(spec, host, None, shaped=False) for host in range(2)]
    assert len({variables["NCCL_HOSTID"] for variables in hosts}) == 2


@both_ways
def test_lines_start_with_the_name_of_their_host(shaped: bool, capfd: pytest.CaptureFixture[str]) -> None:
    script = "echo out $NODE_RANK; echo err $NODE_RANK >&2; printf 'no newline'"
    assert run_command(TWO, ["sh", "-c", script]) == 0
    captured = capfd.readouterr()
    assert sorted(captured.out.splitlines()) == [
        "host0 | no newline",
        "host0 | out 0",
        "host1 | no newline",
        "host1 | out 1",
    ]
    assert sorted(line for line in captured.err.splitlines() if " | " in line) == ["host0 | err 0", "host1 | err 1"]


@both_ways
def test_the_output_of_a_single_host_has_no_prefix(shaped: bool, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_command(ClusterSpec(hosts=1), ["sh", "-c", "echo plain"]) == 0
    assert capfd.readouterr().out == "plain\n"


def test_standard_input_is_empty(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_command(TWO, ["cat"]) == 0
    assert capfd.readouterr().out == ""


def test_a_lot_of_output_arrives_complete(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_command(TWO, ["seq", "20000"]) == 0
    lines = capfd.readouterr().out.splitlines()
    for host in range(2):
        assert [line for line in lines if line.startswith(f"host{host}")] == [
            f"host{host} | {number}" for number in range(1, 20001)
        ]


@both_ways
def test_a_daemon_does_not_delay_the_caller(shaped: bool, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_command(TWO, ["sh", "-c", "setsid sleep 1000 & echo started"]) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["host0 | started", "host1 | started"]


@both_ways
@pytest.mark.parametrize(
    ("script", "line"),
    [("exit 3", "host 1: sh exited with 3"), ("kill -9 $$", "host 1: sh was killed by SIGKILL")],
)
def test_the_first_host_that_fails_ends_the_others(
    shaped: bool, script: str, line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_command(TWO, ["sh", "-c", f"test $NODE_RANK = 0 || {script}; exec sleep 1000"], grace_s=60) == 1
    assert capfd.readouterr().err.splitlines()[-1] == line


def test_a_command_that_ignores_sigterm_is_killed_after_the_grace_period(capfd: pytest.CaptureFixture[str]) -> None:
    stubborn = "test $NODE_RANK = 1 && exit 3; trap '' TERM; sleep 1000"
    assert run_command(TWO, ["sh", "-c", stubborn], grace_s=0.2) == 1
    assert capfd.readouterr().err.splitlines()[-1] == "host 1: sh exited with 3"


def test_a_rank_that_fails_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    spec = ClusterSpec(hosts=2, per_host=(2, 1), rank_order="scrambled")
    assert run_command(spec, ["sh", "-c", "test $RANK != 2 || exit 4; sleep 1000"], per_rank=True) == 1
    assert capfd.readouterr().err.splitlines()[-1] == "host 0, rank 2: sh exited with 4"


def test_a_file_that_is_no_program_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script"
    script.write_bytes(b"\x7fELF of a machine that never was")
    script.chmod(0o755)
    assert run_command(TWO, [str(script)]) == 1
    assert re.search(r"host [01]: script could not be started: Exec format error$", capfd.readouterr().err.strip())


def test_variables_of_an_outer_job_do_not_leak_in(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "PET_STANDALONE", "PET_RDZV_BACKEND", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "stale")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert run_command(ClusterSpec(hosts=1), ["sh", "-c", "env"]) == 0
    environment = capfd.readouterr().out.splitlines()
    assert not any(line.endswith("=stale") for line in environment)
    assert "OMP_NUM_THREADS=3" in environment


@pytest.mark.parametrize(
    ("shaped", "per_host"),
    [
        pytest.param(True, (2, 1), marks=needs_namespaces, id="2 and 1"),
    ],
    indirect=["shaped"],
)
def test_a_plain_torchrun_joins_all_hosts(
    shaped: bool, per_host: tuple[int, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(ALL_REDUCE)
    torchrun = Path(sys.executable).parent / "torchrun"
    spec = ClusterSpec(hosts=2, per_host=per_host, rate_bps=10**9)
    status = run_command(spec, [str(torchrun), str(script)])
    captured = capfd.readouterr()
    assert status == 0, captured.err
    total = 2**spec.world_size - 1
    assert sorted(line for line in captured.out.splitlines() if "rank" in line) == [
        f"host{host} | rank {rank} host {host} sum {total}" for host in range(2) for rank in spec.ranks_of(host)
    ]


@both_ways
def test_the_command_line_describes_the_cluster_in_one_line(shaped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    result = syncline_cluster_run("--hosts", "3", "--per-host", "2,1,1", "--rate", "1gbit", "--", "true")
    assert result.exit_code == 0
    first, *rest = result.stderr.splitlines()
    if shaped:
        assert first == "3 hosts × 2,1,1 ranks, 1gbit links, 500 kB burst at 1gbit"
        assert rest == []
    else:
        assert first == "3 hosts × 2,1,1 ranks, 1gbit links"
        (notice,) = rest
        assert notice.startswith("syncline: links are not shaped: SYNCLINE_NO_NAMESPACES is set")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--", "no-such-program"], "command not found: no-such-program"),
        (["--rank-order", "scrambled", "--", "true"], "--rank-order scrambled needs --per-rank"),
        (["--rate", "fast", "--", "true"], "rate 'fast' is not a rate"),
        (["--racks", "2", "--", "true"], "racks need a trunk rate"),
        (["--per-host", "1,2", "--", "true"], "per-host lists 2 hosts, but there are 4"),
    ],
)
def test_wrong_use_is_one_line_and_exit_2(arguments: list[str], message: str) -> None:
    result = syncline_cluster_run(*arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"syncline cluster run: {message}")


def test_options_after_the_command_belong_to_the_command() -> None:
    result = syncline_cluster_run("--hosts", "1", "sh", "-c", "exit 0")
    assert result.exit_code == 0


def test_a_program_beside_python_is_found_without_activating_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tool = tmp_path / "some-console-script"
    tool.write_text("#!/bin/sh\necho found\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert "some-console-script" not in os.environ["PATH"]
    assert run_command(ClusterSpec(hosts=1), ["some-console-script"]) == 0
    assert capfd.readouterr().out == "found\n"
