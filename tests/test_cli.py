"""The command line: each answer fits on one screen, and each mistake gets one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from syncline import __version__
from syncline.bench.demo import Task
from syncline.cli import app
from syncline.records.bench_result import DEMO_METHODS
from syncline.records.plan import Plan
from syncline.units import milliseconds_text

runner = CliRunner()


def test_version() -> None:
    answer = runner.invoke(app, ["--version"])
    assert answer.exit_code == 0
    assert answer.stdout.strip() == f"syncline {__version__}"


@pytest.mark.parametrize(
    "command",
    [
        [],
        *([name] for name in ("bench", "demo", "doctor", "probe", "profile", "predict", "plan", "report", "cluster")),
        ["cluster", "run"],
    ],
)
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
        (["bench", "--scale", "2,2"], "--scale needs a recorded profile"),
        (["bench", "--replay", "cnn-cpu", "--scale", "0,nan"], "write two positive numbers"),
        (["bench", "--methods", " , "], "no method is named"),
        (["bench", "--bucket-mb", "nan"], "--bucket-mb nan: must be greater than 0"),
        (["bench", "--timeout", "-1"], "--timeout -1: must be greater than 0"),
        (["bench", "--json", "/nowhere/at/all.json"], "there is no folder /nowhere/at"),
        (
            ["bench", "--methods", "ddp,plan", "--probe", "0", "--model", "mlp"],
            "plan needs a network to plan from",
        ),
        (["plan", "--profile", "bert-base-cuda"], "the rate of the hosts' links is needed"),
        (["plan", "--profile", "nope", "--rate", "1gbit"], "is neither a file nor a shipped profile"),
        (
            ["plan", "--profile", "cnn-cpu", "--rate", "1gbit", "--allow", "int5"],
            "allow='int5': must be one of bf16, fp16, int8, int4, int3, sparse",
        ),
        (["plan", "--profile", "cnn-cpu", "--rate", "fast"], "rate 'fast' is not a rate"),
        (["plan", "--profile", "cnn-cpu", "--network", "nope.json"], "nope.json: cannot be read"),
        (["plan", "--profile", "cnn-cpu", "--rate", "1gbit", "--bucket-mb", "0"], "--bucket-mb 0: must be greater"),
        (
            ["plan", "--profile", "cnn-cpu", "--rate", "1gbit", "--out", "/nowhere/p.json"],
            "there is no folder /nowhere",
        ),
        (["demo", "--rate", "1"], "rate '1' has no unit: add one, as in 10gbit"),
        (["demo", "--rate", "1kbit"], "under 100kbit, the slowest link that can be emulated"),
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
    arguments = [
        "bench",
        "--hosts",
        "2",
        "--rate",
        "1gbit",
        "--model",
        "mlp",
        "--methods",
        "ddp,dense",
        "--steps",
        "2",
        "--probe=1",
    ]
    page = tmp_path / "page.html"
    answer = runner.invoke(app, [*arguments, "--json", str(path), "--report", str(page)])
    assert answer.exit_code == 0, answer.stderr
    result = json.loads(path.read_text())
    rows = result["rows"]
    assert [row["method"] for row in rows] == ["ddp", "dense"]
    for row in rows:
        assert milliseconds_text(row["step_ms"] / 1e3, unit="") in answer.stdout
        assert f'data-step-ms="{row["step_ms"]:.6g}"' in page.read_text()
    assert all(len(line) <= 80 for line in answer.stdout.splitlines() if str(page) not in line)
    # The file has the inputs of the predictions, so a report that is made from it later shows the same.
    assert result["network"]["host_of_rank"] == [0, 1] and result["profile"]["model"] == "mlp"
    assert 'id="timeline"' in page.read_text() and 'id="links"' in page.read_text()


def test_the_demo_tunes_trains_and_ends_with_a_verdict_and_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "demo.json"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("syncline.bench.demo.TASK", Task(width=64, layers=1, heads=2, context=32, held_out=8))
    arguments = ["demo", "--hosts=2", "--rate=150mbit", "--steps=4", "--tune=5", f"--json={path}"]
    answer = runner.invoke(app, arguments)
    assert answer.exit_code == 0, answer.stderr
    assert "Report: syncline-report.html" in answer.stdout
    page = Path("syncline-report.html").read_text()
    assert all(f'id="{name}"' in page for name in ("demo", "chosen", "step", "timeline", "training", "links"))
    told = " ".join(answer.stdout.split())
    assert "emulated" in told and "plain DDP" in told and all(f'quality="{q}"' in told for q in ("exact", "same"))
    result = json.loads(path.read_text())
    rows = {row["method"]: row for row in result["rows"]}
    assert tuple(rows) == DEMO_METHODS and result["steps"] == 4
    assert len({row["losses"][0] for row in rows.values()}) == 1  # the same weights and batches
    plain = rows["ddp"]
    assert [point["step"] for point in plain["held_out"]] == [0, 1, 2, 3, 4]
    assert plain["equal_steps"] == plain["equal_time"] == plain["held_out"][-1]["bits_per_byte"] < 7.9
    for method, row in rows.items():
        assert row["losses"][:2] == pytest.approx(plain["losses"][:2], rel=0.02)
        assert (row["same_as"] in ("", "ddp") and row["steps"] >= 4) or method == "nosync"
        if method.startswith("tune-"):
            assert row["setting"] and result["said"][method]
            assert result["tunings"][method]["seconds"] > 3.0  # with the probe
    assert rows["tune-exact"]["losses"] == pytest.approx(plain["losses"], rel=1e-3)


def test_plan_shows_the_alternatives_and_writes_a_plan_for_wrap(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    answer = runner.invoke(app, ["plan", "--profile=densenet201-cuda", "--hosts=4", "--rate=10gbit", f"--out={path}"])
    assert answer.exit_code == 0, answer.stderr
    plan = Plan.load(path)
    assert not plan.nothing and plan.lossless and plan.iteration_s < plan.plain_s
    told = " ".join(answer.stdout.split())
    assert (
        plan.reason in told
        and "do nothing: plain DDP" in told
        and "mgwfbp" in told
        and "Links are not measured" in told
    )
    assert "Apply it: model = syncline.wrap" in told
    assert all(len(line) <= 80 for line in answer.stdout.splitlines())


def test_plan_refuses_a_report_that_would_not_show_the_choice(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    options = ["--profile=bert-base-cuda", "--hosts=4", "--rate=1gbit", "--quality=close", f"--report={page}"]
    answer = runner.invoke(app, ["plan", *options])
    assert answer.exit_code == 2 and not page.exists()
    assert "--report cannot show local steps, which would be chosen: leave it out" in " ".join(answer.stderr.split())


def test_plan_reports_that_plain_ddp_is_best() -> None:
    answer = runner.invoke(app, ["plan", "--profile=bert-base-cuda", "--hosts=4", "--rate=10gbit"])
    assert answer.exit_code == 0, answer.stderr
    assert "not worth a change" in " ".join(answer.stdout.split())
