"""`syncline profile` in one process and under torchrun; each mistake gets one line."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch._dynamo  # noqa: F401 - DDP imports it, which takes seconds: once here, not in every rank
from typer.testing import CliRunner, Result

from syncline.cli import app
from syncline.cli.measure import _step_lines
from syncline.cluster import ClusterSpec, Rank, launch
from syncline.records.profile import Profile, RankTimes, load_profile

runner = CliRunner()
QUICK = ["--steps", "2", "--warmup", "1"]


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def train(tmp_path: Path) -> Path:
    """A user's file, with a neighbour that it imports."""
    (tmp_path / "neighbour_of_train.py").write_text("WIDTH = 4\n")
    path = tmp_path / "train.py"
    path.write_text(
        textwrap.dedent(
            """
            import os
            import torch
            from neighbour_of_train import WIDTH

            class Net(torch.nn.Linear):
                pass

            def loss(model):
                return model(torch.ones(3, WIDTH)).sum()

            def build():
                return Net(WIDTH, 2), loss

            def with_optimizer():
                net = torch.nn.Sequential(torch.nn.Linear(WIDTH, 2), torch.nn.BatchNorm1d(2))
                return net, loss, torch.optim.AdamW(net.parameters())

            def a_number():
                return 3

            def a_pair_of_others():
                return loss, Net(WIDTH, 2)

            def raises():
                raise ValueError("no data\\nat all")

            def step_raises():
                def step(model):
                    raise KeyError("labels")
                return Net(WIDTH, 2), step

            def no_loss():
                return Net(WIDTH, 2), lambda model: 3.0

            def raises_on_one_rank():
                if os.environ.get("RANK") == "1":
                    raise ValueError("no disk")
                return build()
            """
        )
    )
    return path


def run(*arguments: str | Path) -> Result:
    return runner.invoke(app, ["profile", *map(str, arguments), *QUICK])


def test_a_model_of_the_zoo_is_measured_shown_and_written(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    answer = run("mlp", "--batch", "2", "--autocast", "bf16", "--output", path)
    assert answer.exit_code == 0, answer.stderr
    profile = Profile.load(path)
    assert (profile.model, profile.batch, profile.steps, profile.ranks) == ("mlp", 2, 2, ())
    assert profile.overheads is not None and set(profile.overheads.work) >= {"dense", "bf16", "fp16"}
    assert "bf16 autocast" in profile.how
    assert "Half-way through backward" in " ".join(answer.stdout.split())
    for word in ("mlp: 995,978 parameters", "forward", "backward", "update", "linear1.0.weight"):
        assert word in answer.stdout
    *lines, last = answer.stdout.splitlines()
    assert last == f"Profile: {path}"
    assert len(lines) <= 30 and all(len(line) <= 80 for line in lines)


def test_json_is_another_name_for_output(tmp_path: Path) -> None:
    assert run("mlp", "--json", tmp_path / "p.json").exit_code == 0
    assert load_profile(tmp_path / "p.json").model == "mlp"


def test_a_users_function_is_measured(train: Path, tmp_path: Path) -> None:
    answer = run(f"{train}:build", "--output", tmp_path / "p.json")
    assert answer.exit_code == 0, answer.stderr
    profile = Profile.load(tmp_path / "p.json")
    assert profile.model == "Net"
    assert {gradient.name for gradient in profile.gradients} == {"weight", "bias"}
    assert profile.batch is None and profile.update_s == 0.0
    assert "not measured" in answer.stdout


def test_a_users_optimizer_and_buffers_are_measured_too(train: Path, tmp_path: Path) -> None:
    answer = run(f"{train}:with_optimizer", "--output", tmp_path / "p.json")
    assert answer.exit_code == 0, answer.stderr
    profile = Profile.load(tmp_path / "p.json")
    assert profile.update_s > 0 and "AdamW" in profile.how
    assert profile.model == "with_optimizer"  # a Sequential has no name of its own
    assert "16 B of float32, 8 B of int64" in answer.stdout


def test_contention_needs_several_ranks(train: Path) -> None:
    answer = run(f"{train}:build", "--contention")
    assert answer.exit_code == 2
    assert "at least two ranks" in " ".join(answer.stderr.split())


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("nope", "no model is called nope; known: mlp, cnn"),
        ("nowhere.py:build", "nowhere.py: there is no such file"),
        ("TRAIN", "name the function that builds the model, as FILE.py:FUNCTION"),
        ("TRAIN:no-name", "name the function"),
        ("TRAIN:nothing", "has no function called nothing"),
        ("TRAIN:WIDTH", "has no function called WIDTH"),
        ("TRAIN:a_number", "returned int: it must return (model, step)"),
        ("TRAIN:a_pair_of_others", "returned (function, Net): it must return (model, step)"),
        ("TRAIN:no_loss", "step must return the loss as a tensor"),
    ],
)
def test_a_wrong_target_gets_one_line_and_exit_2(train: Path, target: str, says: str) -> None:
    assert_refused(run(target.replace("TRAIN", str(train))), 2, says)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--device", "tpu"], "--device 'tpu': use cpu or cuda"),
        (["--autocast", "int4"], "autocast 'int4' is unknown"),
        (["--output", "/nowhere/at/all.json"], "there is no folder /nowhere/at"),
    ],
)
def test_a_wrong_option_gets_one_line_and_exit_2(options: list[str], says: str) -> None:
    assert_refused(run("mlp", *options), 2, says)


def test_options_of_built_in_models_are_refused_for_a_users_function(train: Path) -> None:
    assert_refused(run(f"{train}:build", "--batch", "3"), 2, "give build a parameter called batch")
    assert_refused(run(f"{train}:build", "--autocast", "bf16"), 2, "autocast is for the built-in models")


def test_a_function_with_a_batch_parameter_is_called_with_two_sizes(train: Path, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    train.write_text(
        train.read_text()
        + textwrap.dedent(
            f"""
            def sized(batch=16):
                with open({str(asked)!r}, "a") as file:
                    file.write(f"{{batch}} ")
                return Net(WIDTH, 2), lambda model: model(torch.ones(batch, WIDTH)).sum()
            """
        )
    )
    output = tmp_path / "profile.json"
    answer = run(f"{train}:sized", "--batch", "8", "--memory", "--output", str(output))
    assert answer.exit_code == 0, answer.output
    assert asked.read_text().split() == ["8", "4"]
    found = Profile.load(output).activations
    assert found is not None
    assert found.batches == (4, 8)
    assert found.elements == 10


def test_an_error_in_user_code_is_one_line_with_its_location(train: Path) -> None:
    lines = train.read_text().splitlines()
    raised = next(number for number, line in enumerate(lines, start=1) if "raise ValueError" in line)
    assert_refused(run(f"{train}:raises"), 1, f"raises failed: ValueError: no data ({train}, line {raised})")
    assert_refused(run(f"{train}:step_raises"), 1, "step_raises failed: KeyError: 'labels'")
    train.write_text("import sys\nsys.exit(3)\n")
    assert_refused(run(f"{train}:build"), 1, "SystemExit: 3")
    train.write_text("def build(:\n")
    assert_refused(run(f"{train}:build"), 1, "SyntaxError")


def assert_refused(answer: Result, code: int, says: str) -> None:
    assert answer.exit_code == code, answer.output
    assert answer.stdout == ""
    assert says in answer.stderr
    assert len(answer.stderr.strip().splitlines()) == 1


def test_under_torchrun_all_ranks_measure_and_only_rank_0_prints(train: Path, tmp_path: Path) -> None:
    """Ranks are started with the environment variables that torchrun sets."""

    def main(rank: Rank) -> Any:
        assert os.environ["RANK"] == str(rank.rank)
        answer = run("mlp", "--batch", "2", "--output", tmp_path / f"{rank.rank}.json")
        refused = run(f"{train}:raises_on_one_rank")
        return [answer.exit_code, answer.output, refused.exit_code, refused.output]

    first, second = launch(ClusterSpec(hosts=2), main, shaped=False, deadline_s=60.0)
    assert (first[0], second[0]) == (0, 0)
    assert "the slowest of 2 ranks" in first[1] and second[1] == ""
    assert [one.rank for one in Profile.load(tmp_path / "0.json").ranks] == [0, 1]
    assert not (tmp_path / "1.json").exists()
    assert (first[2], second[2]) == (1, 1)
    assert "rank 1: " in first[3] and "no disk" in second[3]


def with_ranks(*steps_s: float) -> Profile:
    """Return a shipped profile whose ranks take these multiples of its step time."""
    profile = load_profile("cnn-cpu")
    ranks = tuple(
        RankTimes(
            rank=rank,
            forward_s=pace * profile.forward_s,
            backward_s=pace * profile.backward_s,
            update_s=pace * profile.update_s,
        )
        for rank, pace in enumerate(steps_s)
    )
    return msgspec.structs.replace(profile, ranks=ranks)


def test_a_straggler_is_named_and_a_typical_rank_is_not() -> None:
    slow = _step_lines(with_ranks(1.0, 1.0, 1.25))
    assert any("rank 2 is a straggler" in line and "25% over" in line for line in slow)
    assert not any(" is a straggler:" in line for line in _step_lines(with_ranks(1.0, 0.95, 1.05)))
