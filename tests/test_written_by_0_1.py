"""What release 0.1 wrote is read by this one. The files in `written_by_0_1` are that release's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from typer.testing import CliRunner

import syncline
from syncline.cli import app
from syncline.cli.predict import PredictResult
from syncline.files import read_json
from syncline.records.postmortem import examine_reports
from syncline.report.read_inputs import read_inputs

OLD = Path(__file__).parent / "written_by_0_1"


def test_the_files_are_of_another_release() -> None:
    written = {json.loads((OLD / name).read_text())["syncline"] for name in ("bench.json", "run/rank-0000.json")}
    assert written == {"0.1.0"} and syncline.__version__ != "0.1.0"


def test_plans_profiles_and_networks_are_read() -> None:
    assert syncline.Plan.load(OLD / "plan.json").model == "cnn"
    profile = syncline.Profile.load(OLD / "profile.json")
    assert profile.model == "mlp" and profile.activations is not None
    assert syncline.Network.load(OLD / "network.json").hosts == 2


@pytest.mark.parametrize("name", ["bench.json", "demo.json", "plan.json", "profile.json", "network.json", "run"])
def test_a_report_is_made_of_each(name: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    files = [OLD / name] if name != "network.json" else [OLD / name, OLD / "profile.json"]
    answer = CliRunner().invoke(app, ["report", *map(str, files), "--output", str(page)])
    assert answer.exit_code == 0, answer.output
    assert page.stat().st_size > 0


def test_results_and_records_have_what_was_in_them() -> None:
    story = read_inputs([OLD / "bench.json", OLD / "demo.json", OLD / "run"])
    assert [row.method for row in story.benches[0].rows] == ["ddp", "dense"]
    assert story.demo is not None and story.demo.steps == 2
    assert [record.rank for record in story.runs] == [0, 1]
    assert len(read_json(OLD / "predict.json", PredictResult).rows) == 1


def test_a_failed_job_is_explained() -> None:
    found = examine_reports(OLD / "failure")
    assert [one.rank for one in found.accused] == [2] and not found.damaged
    assert found.last.syncline == "0.1.0"


def test_training_goes_on_from_a_checkpoint(one_rank: None) -> None:
    model = DDP(torch.nn.Linear(48, 48))
    handle = syncline.attach(model, syncline.OkTopk(density=0.05))
    with pytest.raises(syncline.SynclineError, match="world_size"):
        handle.load(OLD / "checkpoint")
    handle.load(OLD / "checkpoint", on_world_size="redistribute")
    assert handle.state_dict()["steps"] == 2
    handle.detach()
