"""What people type: answers on one screen, mistakes in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from syncline import __version__
from syncline.cli import app

runner = CliRunner()


def test_version() -> None:
    answer = runner.invoke(app, ["--version"])
    assert answer.exit_code == 0
    assert answer.stdout.strip() == f"syncline {__version__}"


@pytest.mark.parametrize("command", [[], ["bench"], ["demo"], ["probe"], ["predict"], ["cluster"], ["cluster", "run"]])
def test_help_fits_a_screen(command: list[str]) -> None:
    answer = runner.invoke(app, [*command, "--help"])
    assert answer.exit_code == 0
    assert len(answer.stdout.splitlines()) <= 50


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["bench", "--model", "nope"], "no model is called nope; known: mlp, cnn"),
        (["bench", "--methods", "ddp,magic"], "no method is called magic"),
        (["bench", "--rate", "fast"], "rate 'fast' is not a rate"),
        (["bench", "--hosts", "0"], "hosts is 0"),
        (["bench", "--per-host", "1,2"], "per-host lists 2 hosts, but there are 4"),
        (["bench", "--racks", "2"], "racks need a trunk rate"),
        (["bench", "--rank-order", "random"], "rank order 'random' is unknown"),
        (["bench", "--device", "tpu"], "device 'tpu' is unknown"),
        (["bench", "--replay", "nope.json"], "nope.json: cannot be read: No such file"),
        (["bench", "--model", "cnn", "--replay", "cnn-cpu"], "exclude each other"),
        (["bench", "--scale", "2,2"], "--scale is for a replayed profile"),
        (["bench", "--replay", "cnn-cpu", "--scale", "0,nan"], "write two positive numbers"),
        (["bench", "--methods", " , "], "no method is named"),
        (["bench", "--bucket-mb", "nan"], "a bucket needs a positive size"),
        (["bench", "--timeout", "-1"], "a positive number of seconds"),
        (["bench", "--json", "/nowhere/at/all.json"], "there is no folder /nowhere/at"),
        (["demo", "--rate", "1"], "under 100kbit"),
        (["demo", "--rate", "100gbit"], "over 34gbit"),
    ],
)
def test_a_mistake_gets_one_line_and_exit_2(arguments: list[str], says: str) -> None:
    answer = runner.invoke(app, arguments)
    assert answer.exit_code == 2
    assert answer.stdout == ""
    assert says in answer.stderr
    assert len(answer.stderr.strip().splitlines()) == 1


def test_a_corrupt_profile_gets_one_line_and_exit_2(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text('{"schema": 1, "model": "x", "gradients": [')
    answer = runner.invoke(app, ["bench", "--replay", str(path)])
    assert answer.exit_code == 2
    assert str(path) in answer.stderr
    assert len(answer.stderr.strip().splitlines()) == 1


def test_bench_shows_a_table_and_writes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    arguments = ["bench", "--hosts", "2", "--rate", "1gbit", "--model", "mlp", "--methods", "ddp,dense", "--steps", "2"]
    answer = runner.invoke(app, [*arguments, "--json", str(path)])
    assert answer.exit_code == 0, answer.stderr
    rows = json.loads(path.read_text())["rows"]
    assert [row["method"] for row in rows] == ["ddp", "dense"]
    for row in rows:
        assert f"{row['step_ms']:.1f}" in answer.stdout
    assert all(len(line) <= 80 for line in answer.stdout.splitlines())


def test_the_demo_ends_with_a_table_and_what_it_means(tmp_path: Path) -> None:
    pytest.importorskip("mlxtend")
    path = tmp_path / "demo.json"
    answer = runner.invoke(app, ["demo", "--hosts=2", "--rate=1gbit", "--steps=3", "--tune=5", f"--json={path}"])
    assert answer.exit_code == 0, answer.stderr
    assert "plain DDP" in answer.stdout
    assert "tune, without loss:" in answer.stdout and "the same weights" in " ".join(answer.stdout.split())
    assert len(json.loads(path.read_text())["rows"]) == 4
