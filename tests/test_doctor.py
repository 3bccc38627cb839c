"""`syncline doctor`: its findings, its remedies, and the ranks of a job that cannot connect."""

from __future__ import annotations

import io
import json
import os
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch.nn.parallel.distributed as ddp_module
from rich.console import Console
from typer.testing import CliRunner

from syncline.cli import app
from syncline.cli.doctor import show
from syncline.cluster import ClusterSpec, Rank, launch, why_not_shaped
from syncline.cluster.environment import reserved_port
from syncline.dist.deadline import TooLateError, left_behind, within
from syncline.doctor import Checkup, examine
from syncline.doctor.interfaces import Interface, gloo_choice, interfaces, is_loopback, nccl_choice
from syncline.doctor.rendezvous import meet

runner = CliRunner()


@pytest.fixture(autouse=True)
def _no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


def finding(found: dict[str, Any], what: str) -> dict[str, Any]:
    return next(one for one in found["findings"] if one["what"] == what)


def test_on_this_machine_everything_needed_works_and_fits_one_screen(tmp_path: Path) -> None:
    answer = runner.invoke(app, ["doctor", "--json", str(tmp_path / "doctor.json")])
    assert answer.exit_code == 0, answer.output
    found = json.loads((tmp_path / "doctor.json").read_text())
    assert finding(found, "gradients over gloo")["works"]
    assert finding(found, "emulated clusters")["works"] is (why_not_shaped() is None)
    assert any(one["name"] == "lo" and "IPv4" in one["families"] for one in found["interfaces"])
    assert answer.stdout.splitlines()[-1] == f"Next: {found['next']}"

    page = io.StringIO()
    show(msgspec.convert(found, Checkup), Console(file=page, width=100))
    assert len(page.getvalue().splitlines()) <= 40
    for one in found["findings"]:
        assert one["what"] in page.getvalue()


def test_the_next_command_is_one_that_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prediction needs neither namespaces nor process groups."""
    monkeypatch.setenv("SYNCLINE_NO_NAMESPACES", "1")
    found = examine()
    assert found is not None
    assert not next(one for one in found.findings if one.what == "emulated clusters").works
    name, *arguments = found.next.split()
    assert name == "syncline"
    assert runner.invoke(app, arguments).exit_code == 0


def test_a_missing_interface_is_a_problem_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    answer = runner.invoke(app, ["doctor"])
    assert answer.exit_code == 1
    said = " ".join(answer.stdout.split())
    assert "GLOO_SOCKET_IFNAME=nosuch0: no interface nosuch0 is up" in said
    assert "unset GLOO_SOCKET_IFNAME" in said
    assert "This does not work: gloo between hosts" in said


def test_missing_features_of_torch_are_reported_and_are_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ddp_module, "_BucketCapacityConfig")
    found = examine()
    assert found is not None
    lacking = next(one for one in found.findings if one.what == "tune, plans on a live model")
    assert not lacking.works
    assert "syncline.wrap" in lacking.remedy
    assert not found.problems


@pytest.mark.parametrize(
    ("asked", "shared", "told"),
    [
        ("3", "True", "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"),
        ("3", "False", "3 restarts, each with its own store"),
        ("0", "True", None),
        ("", "True", None),
    ],
)
def test_restarts_that_cannot_work_are_reported(
    asked: str, shared: str, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", asked)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", shared)
    found = examine()
    assert found is not None and not found.problems
    restarts = [one for one in found.findings if one.what == "restarts by torchrun"]
    assert [told in one.why + one.remedy for one in restarts] == ([] if told is None else [True])


def test_mistakes_get_one_line_and_exit_2(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = runner.invoke(app, ["doctor", "--json", "/nowhere/doctor.json"])
    assert answer.exit_code == 2
    assert "there is no folder /nowhere" in answer.stderr
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    answer = runner.invoke(app, ["doctor"])
    assert answer.exit_code == 2
    assert "RANK=5 and WORLD_SIZE=2: RANK must be 0 to 1" in answer.stderr


def test_an_incomplete_environment_of_a_job_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    answer = runner.invoke(app, ["doctor"])
    assert answer.exit_code == 1
    assert "lacks MASTER_ADDR" in " ".join(answer.stdout.split())


def test_a_rank_that_does_not_connect_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with reserved_port() as port:
        for name, value in (
            ("RANK", "0"),
            ("WORLD_SIZE", "3"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", str(port)),
        ):
            monkeypatch.setenv(name, value)
        answer = runner.invoke(app, ["doctor", "--wait", "1"])
    assert answer.exit_code == 1
    assert f"ranks 1, 2 of 3 did not connect to 127.0.0.1:{port}" in " ".join(answer.stdout.split())


def test_a_rank_that_cannot_reach_rank_0_reports_it_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    with reserved_port() as port:
        for name, value in (
            ("RANK", "1"),
            ("WORLD_SIZE", "2"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", str(port)),
        ):
            monkeypatch.setenv(name, value)
        answer = runner.invoke(app, ["doctor", "--wait", "1"])
    assert answer.exit_code == 1
    assert answer.stdout == ""
    assert f"rank 1 cannot reach 127.0.0.1:{port}: Connection refused" in " ".join(answer.stderr.split())


def on_two_hosts(interface: str | None) -> list[Any]:
    def main(rank: Rank) -> Any:
        if interface is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
        met = meet(6.0 if interface is None else 2.0)
        return None if met is None else msgspec.to_builtins(met)

    return launch(ClusterSpec(hosts=2), main, shaped=True, deadline_s=40.0)


@pytest.mark.skipif(why_not_shaped() is not None, reason="no namespaces here")
def test_the_ranks_of_two_hosts_connect_and_only_rank_0_has_the_result() -> None:
    met, silent = on_two_hosts(None)
    assert silent is None
    assert met["host_of_rank"] == [0, 1]
    assert met["seconds"].keys() == {"gloo"} and not met["failed"]


@pytest.mark.skipif(why_not_shaped() is not None, reason="no namespaces here")
def test_hosts_that_listen_on_an_unreachable_interface_are_reported() -> None:
    met, _ = on_two_hosts("lo")
    assert "gloo" in met["failed"]
    assert [note["listens_on"] for note in met["notes"]] == ["lo", "lo"]
    assert "\n" not in met["failed"]["gloo"]


def interface(name: str, address: str = "10.0.0.1", up: bool = True) -> Interface:
    return Interface(name=name, up=up, addresses=(address,), families=("IPv4",), speed_bps=None)


LO = interface("lo", "127.0.0.1")


@pytest.mark.parametrize(
    ("names", "named", "taken"),
    [
        (["lo", "docker0", "eth0", "eth1"], None, ("eth0", "eth1")),
        (["lo", "eth0", "ib0"], None, ("ib0",)),
        (["lo", "docker0"], None, ("docker0",)),
        (["lo"], None, ("lo",)),
        (["lo", "eth0", "eth1"], "eth", ("eth0", "eth1")),
        (["lo", "eth0", "eth01"], "=eth0", ("eth0",)),
        (["lo", "eth0", "ens3"], "^lo,eth", ("ens3",)),
        (["lo", "eth0"], "ib", ()),
    ],
)
def test_nccl_takes_interfaces_by_its_own_rules(names: list[str], named: str | None, taken: tuple[str, ...]) -> None:
    found = [LO if name == "lo" else interface(name) for name in names]
    choice = nccl_choice(found, {} if named is None else {"NCCL_SOCKET_IFNAME": named})
    assert choice.names == taken
    assert bool(choice.problem) is (not taken)


def test_gloo_takes_what_is_named_and_otherwise_what_the_host_name_leads_to() -> None:
    found = interfaces()
    assert gloo_choice(found, {"GLOO_SOCKET_IFNAME": "lo"}).names == ("lo",)
    assert gloo_choice([LO, interface("eth0", up=False)], {"GLOO_SOCKET_IFNAME": "eth0"}).problem
    own = gloo_choice(found, {})
    assert set(own.names) <= {one.name for one in found}
    assert any(is_loopback(one) for one in found)


def test_an_action_that_never_returns_raises_after_its_time() -> None:
    release = threading.Event()
    with pytest.raises(TooLateError, match=r"no result within 0\.05 s"):
        within(0.05, lambda: release.wait(20))
    assert left_behind()
    waiting = [thread for thread in threading.enumerate() if thread.daemon and "syncline-trial" in thread.name]
    release.set()
    for thread in waiting:
        thread.join(10)
    assert not left_behind()
    assert within(5, lambda: "done") == "done"
