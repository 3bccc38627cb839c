"""`syncline probe` on emulated hosts and under torchrun; each mistake gets one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import syncline
from ddp_helpers import forked_torchrun
from syncline.cli import app
from syncline.cluster import why_not_shaped
from syncline.records.network import Network

runner = CliRunner()
TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)


def run(*arguments: str | Path) -> Result:
    return runner.invoke(app, ["probe", *map(str, arguments)])


def assert_refused(answer: Result, code: int, says: str) -> None:
    assert answer.exit_code == code, answer.output
    assert answer.stdout == ""
    assert says in answer.stderr
    assert len(answer.stderr.strip().splitlines()) == 1


def test_emulated_hosts_are_measured_shown_and_written(tmp_path: Path) -> None:
    path = tmp_path / "network.json"
    answer = run("--hosts", "2", "--rate", "1gbit", "--budget", "1", "--output", path)
    assert answer.exit_code == 0, answer.output
    network = Network.load(path)
    assert network.ranks == 2
    for word in ("A tiny all-reduce among 2 ranks takes", "algbw", "busbw", "start-up", "all-to-all"):
        assert word in " ".join(answer.stdout.split())
    *lines, last = answer.stdout.splitlines()
    assert last == f"Network: {path}"
    assert all(len(line) <= 80 for line in lines)
    if why_not_shaped() is None:
        (link,) = network.links
        assert (link.name, link.nominal_bps) == ("host", 10**9)
        assert "nominal" in answer.stdout and "1 Gbit/s" in answer.stdout


def test_under_torchrun_all_ranks_measure_and_only_rank_0_prints_and_writes(tmp_path: Path) -> None:
    program = str(Path(syncline.__file__).with_name("__main__.py"))
    status, output, errors = forked_torchrun(tmp_path, program, "probe", "--budget", "1", "--output", "network.json")
    assert status == 0, errors
    assert [entry.name for entry in tmp_path.iterdir()] == ["network.json"]
    network = Network.load(tmp_path / "network.json")
    assert (network.ranks, network.hosts) == (2, 1)
    assert [link.name for link in network.links] == ["local"]
    assert " ".join(output.split()).count("A tiny all-reduce among 2 ranks takes") == 1
    assert "Traceback" not in errors


def test_a_single_rank_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_refused(run("--hosts", "1"), 2, "probe needs at least two ranks")
    for name, value in zip(TORCHRUN, ("0", "1", "127.0.0.1", "0"), strict=True):
        monkeypatch.setenv(name, value)
    assert_refused(run(), 2, "probe needs at least two ranks")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--budget", "0"], "--budget 0: must be 1 to 3600 seconds"),
        (["--budget", "-5"], "--budget -5: must be 1 to"),
        (["--budget", "nan"], "--budget nan: must be 1 to"),
        (["--budget", "1e9"], "--budget 1e+09: must be 1 to"),
        (["--hosts", "0"], "hosts is 0: an emulated cluster has 1 to 250"),
        (["--hosts", "99999999"], "hosts is 99999999"),
        (["--per-host", "1,2"], "per-host lists 2 hosts, but there are 4"),
        (["--per-host", "x"], "--per-host 'x': write one number"),
        (["--rate", "fast"], "rate 'fast' is not a rate"),
        (["--rate", "900gbit"], "over 34gbit"),
        (["--racks", "2"], "racks need a trunk rate"),
        (["--device", "tpu"], "device 'tpu' is unknown"),
        (["--output", "/nowhere/at/all.json"], "there is no folder /nowhere/at"),
        (["--output", "/"], "/ is a folder: name a file to write to"),
    ],
)
def test_a_mistake_gets_one_line_and_exit_2(options: list[str], says: str) -> None:
    assert_refused(run(*options), 2, says)


def test_a_mistake_under_torchrun_gets_one_line_and_exit_2(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(TORCHRUN, ("0", "1", "127.0.0.1", "0"), strict=True):
        monkeypatch.setenv(name, value)
    assert_refused(run("--device", "abacus"), 2, "--device 'abacus': use cpu or cuda")
    assert_refused(run("--budget", "0"), 2, "must be 1 to 3600 seconds")
